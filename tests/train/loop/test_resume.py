"""A preempted run ends with the same bits as one left alone, at one rank and at three."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.contract.metrics import read_metrics
from spotkeeper.train.agent_link.control import METRICS, AgentRequest, Commit, ControlError, RunResult
from spotkeeper.train.checkpoint import store
from tests.sizes import size
from tests.train.gangs import Event, Gang, finals, run_to_end
from tests.train.jobs import Job, skip_replay

CASES: dict[str, dict[str, Any]] = {
    "conv": {},
    "weighted-workers": {"weighted": True, "workers": 2},
    "tied-accumulated": {"kind": "tied", "accumulate": 3},
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[int, str]]:
    """Final states of the runs left alone, by case and world, made once."""
    return _References(tmp_path_factory.mktemp("alone"))


class _References(dict[tuple[str, int], dict[int, str]]):
    def __init__(self, root: Path) -> None:
        self._root = root

    def __missing__(self, key: tuple[str, int]) -> dict[int, str]:
        case, world = key
        self[key] = run_to_end(self._root / f"{case}{world}", Job(Path(), **CASES[case]), nodes=world)
        assert len(self[key]) == world
        return self[key]


@pytest.mark.parametrize(
    ("case", "world"), [("conv", 1), *size([], [("conv", 3)]), ("weighted-workers", 3), ("tied-accumulated", 3)]
)
def test_a_requested_stop_resumes_bitwise(tmp_path: Path, references: Any, case: str, world: int) -> None:
    job = Job(tmp_path / "out", **CASES[case], events=(Event(4, 0, "stop"),))
    with Gang(tmp_path, job, nodes=world) as gang:
        stopped = gang.run(1)
        assert [ended.code for ended in stopped] == [0] * world
        steps = {ended.result.step for ended in stopped if ended.result}
        assert len(steps) == 1 and steps.pop() in range(4, 8), "all ranks stop at one step, soon"
        assert {ended.result.outcome for ended in stopped if ended.result} == {"stopped"}
        assert not job.out.exists(), "the code after the loop did not run"
        done = gang.run(2)
        assert [ended.result for ended in done] == [RunResult("done", 2, 9, Commit(2, 9))] * world
    assert finals(job) == references[case, world]


@pytest.mark.parametrize("world", size([3], [1, 3]))
def test_a_killed_rank_resumes_from_the_checkpoint(tmp_path: Path, references: Any, world: int) -> None:
    events = (Event(2, world - 1, "save"), Event(4, world - 1, "kill"))
    job = Job(tmp_path / "out", events=events)
    with Gang(tmp_path, job, nodes=world) as gang:
        killed = gang.run(1)
        assert all(ended.code for ended in killed), "no rank survives the loss of one"
        assert [ended.result for ended in killed] == [None] * world
        newest = store.newest(gang.disk(0)).commit
        assert newest is not None and newest.step in (2, 3, 4)
        assert [ended.code for ended in gang.run(2)] == [0] * world
    assert finals(job) == references["conv", world]


@pytest.mark.parametrize("disk", [True, False])
def test_a_blank_master_gets_its_state_from_a_peer(tmp_path: Path, references: Any, disk: bool) -> None:
    job = Job(tmp_path / "out", events=(Event(3, 1, "stop"),))
    with Gang(tmp_path, job, nodes=3) as gang:
        stopped = gang.run(1)[1].result
        assert stopped is not None and stopped.commit is not None
        gang.replace(0)
        if not disk:
            gang.blank = {0}
        done = gang.run(2)
        assert [ended.code for ended in done] == [0, 0, 0]
        mine = RunResult("done", 2, 9, Commit(2, 9) if disk else None)
        assert [ended.result for ended in done] == [mine] + [RunResult("done", 2, 9, Commit(2, 9))] * 2
        # Rank 0's metrics that no bucket has are in every node's checkpoint.
        metrics = read_metrics((tmp_path / "node0/run2" / METRICS).read_bytes(), 2)
        assert metrics.ancestors == ((1, stopped.step),)
        assert list(metrics.metrics["loss"].steps) == list(range(1, 10))
        assert not (tmp_path / "node1/run2" / METRICS).exists(), "rank 0 alone writes them"
        # With its disk it has the peer's copy durable as well, under the name it came with.
        assert store.complete(gang.disk(0)) == ([Commit(2, 9), stopped.commit] if disk else [])
    assert finals(job) == references["conv", 3]


def test_without_the_recorded_gradient_order_three_ranks_differ(tmp_path: Path, references: Any) -> None:
    """The reason for gradorder.py; should DDP change, this test says that it is no longer needed."""
    job = Job(tmp_path / "out", events=(Event(4, 0, "stop"),), **CASES["tied-accumulated"])
    with Gang(tmp_path, job, nodes=3, before=skip_replay) as gang:
        gang.run(1)
        gang.run(2)
    assert set(finals(job)) == {0, 1, 2}
    assert finals(job) != references["tied-accumulated", 3]


def test_two_ranks_on_a_node_share_its_disk(tmp_path: Path) -> None:
    job = Job(tmp_path / "out", events=(Event(3, 1, "stop"),))
    alone = run_to_end(tmp_path / "alone", job, nproc=2)
    with Gang(tmp_path / "gang", job, nproc=2) as gang:
        assert [ended.code for ended in gang.run(1)] == [0]
        assert [ended.code for ended in gang.run(2)] == [0]
    assert len(finals(job)) == 2
    assert finals(job) == alone


def test_a_damaged_copy_is_replaced_by_a_peers_copy(tmp_path: Path, references: Any) -> None:
    job = Job(tmp_path / "out", events=(Event(3, 0, "stop"),))
    with Gang(tmp_path, job, nodes=3) as gang:
        commit = gang.run(1)[0].result.commit
        state = gang.disk(1) / str(commit) / store.STATE
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
        gang.reboot(1)
        assert [ended.code for ended in gang.run(2)] == [0, 0, 0]
        assert f"skipped checkpoint {commit}: state.bin does not match its hash" in gang.log(1, 2)
    assert finals(job) == references["conv", 3]


@pytest.mark.parametrize("torn", [False, True])
def test_without_an_intact_copy_all_use_the_older_checkpoint(tmp_path: Path, references: Any, torn: bool) -> None:
    job = Job(tmp_path / "out", events=(Event(2, 0, "save"), Event(6, 0, "stop")))
    with Gang(tmp_path, job, nodes=1) as gang:
        newest = gang.run(1)[0].result.commit
        older = store.complete(gang.disk(0))[1]
        if torn:
            (gang.disk(0) / str(newest) / store.COMMIT).unlink()
        else:
            (gang.disk(0) / str(newest) / store.SKELETON).write_bytes(b"")
        gang.reboot(0)
        assert gang.run(2)[0].code == 0
        assert f"quarantined {newest}" in gang.log(0, 2)
        assert f"resumed from {older}" in gang.log(0, 2)
    assert finals(job) == references["conv", 1]


def test_more_ranks_resume_from_one(tmp_path: Path) -> None:
    job = Job(tmp_path / "out", events=(Event(4, 0, "stop"),))
    with Gang(tmp_path / "gang", job, nodes=2) as gang:
        gang.nodes = 1
        gang.run(1)
        gang.nodes = 2
        assert gang.run(2)[0].code == 0, gang.log(0, 2)
        assert "; saved by 1 rank, now 2: random generators are reseeded" in gang.log(0, 2)


def test_fewer_ranks_resume_with_the_same_batches(tmp_path: Path) -> None:
    """Every global batch has the same samples, whichever ranks train on them; only their division changes."""
    job = Job(tmp_path / "out", events=(Event(4, 0, "stop"),), seen=tmp_path / "seen")
    run_to_end(tmp_path / "alone", Job(Path(), seen=tmp_path / "expected"), nodes=3)
    with Gang(tmp_path / "gang", job, nodes=3) as gang:
        gang.run(1)
        gang.nodes = 1
        assert gang.run(2)[0].code == 0, gang.log(0, 2)
        assert "saved by 3 ranks, now 1: random generators are reseeded" in gang.log(0, 2)
        assert "(12 per rank) and keeps this size, although the loader now gives 4 per rank" in gang.log(0, 2)
    seen, expected = ((tmp_path / name).read_text().splitlines() for name in ("seen", "expected"))
    assert len(expected) == 9 * 12
    assert sorted(seen) == sorted(expected)


def test_the_example_resumes_bitwise(tmp_path: Path) -> None:
    """examples/gpt on three nodes: stopped by an agent, and ended with the weights of a run left alone."""
    train = Path(__file__).parents[3] / "examples/gpt/train.py"
    small = ("--dim", "32", "--layers", "1", "--text-bytes", "100000", "--steps", "40")
    shas = []
    for name, stops in (("alone", 0), ("stopped", 1)):
        out = tmp_path / name / "weights"
        keeps = {"SPOTKEEPER_OUTPUT": str(out)}
        with Gang(tmp_path / name, Job(out), nodes=3, script=(str(train), *small), env=keeps) as gang:
            for gen in range(1, stops + 1):
                asking = threading.Thread(target=_stop_after, args=(gang, gen, 5))
                asking.start()
                assert [ended.code for ended in gang.run(gen)] == [0, 0, 0], gang.log(0, gen)
                asking.join()
                assert not out.exists()
            assert [ended.code for ended in gang.run(9)] == [0, 0, 0], gang.log(0, 9)
            loss = gang.control(0, 9).loss
            assert loss is not None and loss < 5.0, "it learns: bytes at random cost 5.5"
        shas.append((out / "model.sha256").read_text())
        assert (out / "model.pt").stat().st_size > 10_000
    assert shas[0] == shas[1]


def _stop_after(gang: Gang, gen: int, step: int) -> None:
    """As an agent does, on a node that is not the master."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(ControlError), gang.control(2, gen) as control:
            if control.step >= step:
                control.request(AgentRequest.SAVE_STOP, time.time() + 30)
                return
        time.sleep(0.002)
