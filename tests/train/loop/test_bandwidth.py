"""The bandwidth between a gang's machines: measured once, told to the agent, and without a trace in the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotkeeper.train.loop.rendezvous import missing_variable
from tests.train.gangs import Gang, finals, run_to_end
from tests.train.jobs import Job


def test_the_first_generation_measures_and_the_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    job = Job(steps=6, out=tmp_path / "out")
    with Gang(tmp_path / "gang", job, nodes=2, env={"SPOTKEEPER_BANDWIDTH": "on"}) as machines:
        for gen in (1, 2):
            assert [ended.code for ended in machines.run(gen)] == [0, 0], machines.log(0, gen)
        told = [[machines.control(node, gen).gbit_s for node in (0, 1)] for gen in (1, 2)]
        assert told[0][0] == told[0][1] > 0.0, "both machines know the same figure"
        assert told[1] == [0.0, 0.0], "a later generation measures nothing"
        assert "Gbit/s between the machines" in machines.log(0, 1)
    assert finals(job) == run_to_end(tmp_path / "alone", job, nodes=2)


def test_one_machine_has_no_network_to_measure(tmp_path: Path) -> None:
    with Gang(tmp_path, Job(steps=2, out=tmp_path / "out"), nproc=2, env={"SPOTKEEPER_BANDWIDTH": "on"}) as machines:
        assert [ended.code for ended in machines.run(1)] == [0]
        assert machines.control(0, 1).gbit_s == 0.0


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, ""),
        ({"SPOTKEEPER_FABRIC": "efa"}, ""),
        ({"SPOTKEEPER_FABRIC": "rdma"}, "NCCL_NET is not set"),
        ({"SPOTKEEPER_FABRIC": "rdma", "NCCL_NET": "gIB"}, ""),
        ({"SPOTKEEPER_FABRIC": "tcpxo"}, "add NCCL_FASTRAK_IFNAME=eth1,"),
    ],
)
def test_a_missing_nccl_variable_is_named(environ: dict[str, str], told: str) -> None:
    found = missing_variable(environ)
    assert (told in found) if told else found == ""


def test_ranks_that_disagree_measure_nothing(tmp_path: Path) -> None:
    """One rank has a device, or a switch, that the other lacks: it must not wait in a collective of its own."""
    job = Job(steps=2, out=tmp_path / "out")
    with Gang(tmp_path / "gang", job, nodes=2, before=_only_the_first) as machines:
        assert [ended.code for ended in machines.run(1)] == [0, 0], machines.log(0, 1)
        assert [machines.control(node, 1).gbit_s for node in (0, 1)] == [0.0, 0.0]


def _only_the_first() -> None:
    os.environ["SPOTKEEPER_BANDWIDTH"] = "on" if os.environ["RANK"] == "0" else "off"
