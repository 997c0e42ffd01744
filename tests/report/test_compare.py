"""A step on another shape: arithmetic is shared, gradients are summed over the network that the machines have."""

from __future__ import annotations

import pytest
from spotkeeper.report.compare import Shape, Step, assumed, family, reduce_s, shapes, step_s
from spotkeeper.spec.stack import PoolState, Price

ONE = Shape("g5.xlarge", 1, 1)
FOUR_MACHINES, ONE_MACHINE = Shape("g5.xlarge", 4, 1), Shape("g5.12xlarge", 1, 4)


def pool(name: str, machine_type: str, nproc: int, most: int = 8) -> PoolState:
    return PoolState(
        name=name, kind="spot", machine_type=machine_type, zones=("z",), nproc=nproc, max_nodes=most, max_on_demand=0,
        disk_gb=1, disk_type="d", prices={"z": Price(1.0, 0.3)},
    )  # fmt: skip


def test_an_all_reduce_is_a_ring_of_machines() -> None:
    assert reduce_s(ONE, 1.0) == 0.0
    assert reduce_s(FOUR_MACHINES, 1.0) == pytest.approx(2 * 3 / 4 * 8 / 2.5)
    assert reduce_s(ONE_MACHINE, 1.0) == pytest.approx(2 * 3 / 4 / 12.0)


def test_four_machines_of_one_gpu_are_slower_than_one_of_four_by_their_network() -> None:
    alone = Step(8.0, ONE, 1.0)
    apart, together = step_s(alone, FOUR_MACHINES), step_s(alone, ONE_MACHINE)
    assert apart - reduce_s(FOUR_MACHINES, 1.0) == pytest.approx(2.0)
    assert together - reduce_s(ONE_MACHINE, 1.0) == pytest.approx(2.0)
    assert apart > together


def test_what_was_measured_comes_back_on_its_own_shape() -> None:
    step = Step(10.0, FOUR_MACHINES, 0.5)
    assert step_s(step, FOUR_MACHINES) == pytest.approx(10.0)
    assert step_s(Step(4.0, ONE), Shape("unheard-of", 2, 1)) == 2.0  # of what nobody knows all are alike


def test_a_faster_accelerator_does_the_arithmetic_faster() -> None:
    assert step_s(Step(10.0, Shape("a2-highgpu-1g", 1, 1)), Shape("a3-highgpu-1g", 1, 1)) == pytest.approx(3120 / 989)


def test_of_each_pool_as_many_machines_as_make_the_job_s_processes() -> None:
    pools = pool("singles", "g5.xlarge", 1), pool("fours", "g5.12xlarge", 4), pool("few", "g5.xlarge", 1, most=2)
    fits, out = shapes(pools, FOUR_MACHINES, "singles")
    assert fits == [("singles", FOUR_MACHINES), ("fours", ONE_MACHINE)]
    assert out == ["few: 4 machines are wanted, it has 2"]


def test_a_network_that_is_not_in_the_table_is_said() -> None:
    lines = assumed(Step(1.0, ONE, 1.0), [Shape("unheard-of", 2, 1), FOUR_MACHINES])
    assert any("10 Gbit/s of unheard-of" in line for line in lines)
    assert any("g5.xlarge 2.5 Gbit/s" in line for line in lines)
    assert any(line.startswith("accelerators") for line in lines)


@pytest.mark.parametrize(("machine_type", "name"), [("a2-highgpu-1g", "a2"), ("p4d.24xlarge", "p4d"), ("m", "m")])
def test_families_of_both_clouds(machine_type: str, name: str) -> None:
    assert family(machine_type) == name
