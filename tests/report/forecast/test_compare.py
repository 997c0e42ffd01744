"""A step on another shape: the computation is shared, gradients are summed over the network that the machines have."""

from __future__ import annotations

import pytest
from rich.console import Console

from spotkeeper.contract.market import Network
from spotkeeper.contract.stack import PoolState, Price
from spotkeeper.report.forecast.compare import (
    Comparison,
    ForecastRow,
    GangShape,
    MeasuredStep,
    assumed,
    family,
    network_s,
    reduce_s,
    shapes,
    step_s,
    table,
)
from spotkeeper.report.forecast.forecast import Band, Outlook

ONE = GangShape("g5.xlarge", 1, 1)
FOUR_MACHINES, ONE_MACHINE = GangShape("g5.xlarge", 4, 1), GangShape("g5.12xlarge", 1, 4)


def pool(name: str, machine_type: str, nproc: int, most: int = 8) -> PoolState:
    return PoolState(
        name=name, kind="spot", machine_type=machine_type, zones=("z",), nproc=nproc, max_machines=most,
        max_on_demand=0, disk_gb=1, disk_type="d", prices={"z": Price(1.0, 0.3)},
    )  # fmt: skip


def test_an_all_reduce_is_a_ring_of_machines() -> None:
    assert reduce_s(ONE, 1.0) == 0.0
    assert reduce_s(FOUR_MACHINES, 1.0) == pytest.approx(2 * 3 / 4 * 8 / 2.5)
    assert reduce_s(ONE_MACHINE, 1.0) == pytest.approx(2 * 3 / 4 / 32.0)


def test_four_machines_of_one_gpu_are_slower_than_one_of_four_by_their_network() -> None:
    alone = MeasuredStep(8.0, ONE, 1.0)
    apart, together = step_s(alone, FOUR_MACHINES), step_s(alone, ONE_MACHINE)
    assert apart - reduce_s(FOUR_MACHINES, 1.0) == pytest.approx(2.0)
    assert together - reduce_s(ONE_MACHINE, 1.0) == pytest.approx(2.0)
    assert apart > together


def test_a_measured_step_is_unchanged_on_its_own_shape() -> None:
    step = MeasuredStep(10.0, FOUR_MACHINES, 0.5)
    assert step_s(step, FOUR_MACHINES) == pytest.approx(10.0)
    assert step_s(MeasuredStep(4.0, ONE), GangShape("unheard-of", 2, 1)) == 2.0  # of what nobody knows all are alike


def test_a_step_shorter_than_its_gradients_is_unchanged_with_a_note() -> None:
    step = MeasuredStep(2.4, FOUR_MACHINES, 1.0)  # 4.8 s, they say
    assert step_s(step, FOUR_MACHINES) == pytest.approx(2.4) == network_s(step, FOUR_MACHINES)
    assert step_s(step, ONE_MACHINE) == pytest.approx(reduce_s(ONE_MACHINE, 1.0) / 2)
    assert any(
        "sum takes 4.800 s, but a whole step takes 2.400 s" in line and "50 % of the estimated time" in line
        for line in assumed(step, [ONE_MACHINE])
    )
    assert not any("a whole step" in line for line in assumed(MeasuredStep(9.0, FOUR_MACHINES, 1.0), [ONE_MACHINE]))


def test_a_faster_accelerator_does_the_arithmetic_faster() -> None:
    assert step_s(
        MeasuredStep(10.0, GangShape("a2-highgpu-1g", 1, 1)), GangShape("a3-highgpu-1g", 1, 1)
    ) == pytest.approx(3120 / 989)


def test_each_pool_has_enough_machines_for_the_jobs_processes() -> None:
    pools = pool("singles", "g5.xlarge", 1), pool("fours", "g5.12xlarge", 4), pool("few", "g5.xlarge", 1, most=2)
    fits, out = shapes(pools, FOUR_MACHINES, "singles", ())
    assert fits == [("singles", FOUR_MACHINES), ("fours", ONE_MACHINE)]
    assert out == ["few: the job needs 4 machines, and the pool has 2"]


def test_a_measured_bandwidth_replaces_the_vendors() -> None:
    singles = pool("singles", "g5.xlarge", 1)
    here, there = (Network("g5.xlarge", zone, gbit, 0.0) for zone, gbit in ((singles.zones[0], 1.25), ("far", 0.1)))
    ((_, found),), _ = shapes([singles], GangShape("g5.xlarge", 4, 1, 1.25), "singles", (here, there))
    assert found.gbit_s == 1.25, "of the pool's own zones"
    assert reduce_s(found, 1.0) == pytest.approx(2.0 * reduce_s(FOUR_MACHINES, 1.0), rel=0.05)
    assert any(
        "g5.xlarge 1.25 Gbit/s (measured by a job)" in line for line in assumed(MeasuredStep(1.0, ONE, 1.0), [found])
    )


def test_an_unknown_network_is_noted() -> None:
    lines = assumed(MeasuredStep(1.0, ONE, 1.0), [GangShape("unheard-of", 2, 1), FOUR_MACHINES])
    assert any("unheard-of 10 Gbit/s (an estimate)" in line for line in lines)
    assert any("g5.xlarge 2.5 Gbit/s" in line for line in lines)
    assert any(line.startswith("accelerators") for line in lines)


def test_intra_machine_links_are_noted_if_used() -> None:
    found = [ONE_MACHINE, GangShape("p3.8xlarge", 1, 4), GangShape("p3.16xlarge", 1, 8), GangShape("unheard-of", 1, 2)]
    links = "g5.12xlarge 32 GB/s, p3.16xlarge 150 GB/s, p3.8xlarge 100 GB/s, unheard-of 16 GB/s (an estimate)"
    assert f"inside a machine: {links}" in assumed(MeasuredStep(1.0, ONE, 1.0), found)
    assert not any(line.startswith("inside") for line in assumed(MeasuredStep(1.0, ONE), found))


@pytest.mark.parametrize("width", [80, 100, 160])
def test_both_tables_keep_their_order_on_a_narrow_terminal(width: int) -> None:
    """Each keeps the band of what it is sorted by; what has no room is named, and assumptions stand in."""
    cost, time = Band(900.0, 1234.5, 1500.0), Band(40.0, 50.0, 61.0)
    course = Outlook(cost, time, Band(0.0, 1.0, 2.0), Band(0.5, 0.6, 1.0), late=0.02)
    rows = tuple(ForecastRow(f"pool-{n}", FOUR_MACHINES, "spot", 0.8, 0.1, 48.0, course) for n in (1, 2))
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table(Comparison("first", rows, (), ("network: " + "word " * 30,))))
    text = capture.get()
    by_cost, by_time = text.split("first by time")
    assert "$900.00 to $1,500" in by_cost and "40.0 h to 61.0 h" in by_time
    assert text.count("4 x g5.xlarge") == 4 and text.count(" 2 %") == 4 and "…" not in text
    assert ("no room here for " in text) == (width < 160)
    assert all(line.startswith("  ") for line in text.rpartition("assumed:\n")[2].splitlines())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


@pytest.mark.parametrize(("machine_type", "name"), [("a2-highgpu-1g", "a2"), ("p4d.24xlarge", "p4d"), ("m", "m")])
def test_families_of_both_clouds(machine_type: str, name: str) -> None:
    assert family(machine_type) == name


@pytest.mark.parametrize(
    ("machine_type", "gbit_s"),
    [
        ("g6e.4xlarge", 20.0),
        ("g5.16xlarge", 25.0),
        ("p3dn.24xlarge", 100.0),
        ("g2-standard-96", 100.0),
        ("a3-highgpu-2g", 50.0),
        ("a3-edgegpu-8g", 400.0),
        ("p5.4xlarge", 100.0),
    ],
)
def test_every_machine_size_has_its_vendors_network(machine_type: str, gbit_s: float) -> None:
    """DescribeInstanceTypes (baseline), and Compute Engine's page of GPU machine types."""
    shape = GangShape(machine_type, 2, 1)
    assert shape.known
    assert shape.gbit_s == gbit_s
    assert shape.tflops is not None


def test_shapes_over_budget_are_marked() -> None:
    course = Outlook(
        Band(9.0, 9.5, 10.0), Band(1.0, 1.0, 1.0), Band(0.0, 0.0, 0.0), Band(1.0, 1.0, 1.0), over_budget=0.4
    )
    rows = (ForecastRow("pool", FOUR_MACHINES, "spot", 0.8, 0.1, 48.0, course),)
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(table(Comparison("first", rows, (), ())))
    head, row = capture.get().splitlines()[1:3]
    assert "over" in head and "late" not in head
    assert "40 %" in row
