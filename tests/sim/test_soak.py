"""A slice of the soak, and what it rests on: the same seed tells the same story, and no tick is skipped in vain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import soak
from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.record import Slot
from spotkeeper.reconcile.decide import calls
from spotkeeper.reconcile.decide.snapshot import Queries
from tests.sim.soak import run
from tests.sim.world import World, small_stack

JOB = "abcd2345"
SLICE = [(3, 1, 1.0), (3, 8, 0.5), (3, 64, 0.03)]  # `make soak`: 10,000 days


@pytest.mark.parametrize(("seed", "nodes", "days"), SLICE)
def test_days_on_a_recorded_market_break_no_rule(seed: int, nodes: int, days: float) -> None:
    done = run(seed, nodes, days)
    assert done.violations == ()
    assert done.left_over == ()
    assert done.duplicates == 0
    assert done.launches >= nodes
    assert done.trained > 0.5


def test_the_same_seed_gives_the_same_story() -> None:
    first, second = run(11, 2, 0.4), run(11, 2, 0.4)
    assert first == second
    assert first.recoveries
    assert first != run(12, 2, 0.4)


@pytest.mark.parametrize("notice_s", [120.0, 0.0, -1.0])
def test_skipped_ticks_have_no_effect(notice_s: float) -> None:
    """With every tick made, the ledger is the same to the last entry."""
    told = []
    for skip in (True, False):
        world = World(stack=small_stack(2, on_demand=2), seed=5)
        world.skip = skip
        job = world.submit(JOB, nodes=2)
        assert world.until(lambda job=job: job.training, 600)
        world.run(5000)
        machine = world.member(JOB, 1)
        assert machine is not None
        world.preempt(machine, notice_s)
        world.run(20_000)
        told.append([(entry.at, entry.id, entry.cause) for entry in world.store.list_ledger(JOB)])
        assert (world.skipped > 300) is skip
    assert told[0] == told[1]


def test_a_soak_detects_broken_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_delete_disks", lambda draft: iter(()))
    assert any("disk" in left for left in run(1, 2, 0.5).left_over)


def test_a_soak_detects_a_healthy_member_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Queries, node: int, slot: Slot) -> bool:
        """An unanswered zone taken as empty."""
        vm = self.vm(node, slot)
        return vm is None or vm.status is VmStatus.DEAD

    monkeypatch.setattr(Queries, "gone", gone)
    assert any("S4" in what for seed in range(4) for what in run(seed, 2, 1.0).violations)


def test_the_soaks_plan_covers_all_days_and_sizes() -> None:
    plan = soak.plan(10_000, 1)
    assert round(sum(days for _, _, days in plan)) == 10_000
    assert {nodes for _, nodes, _ in plan} == {1, 8, 64}
    assert len({seed for seed, _, _ in plan}) == len(plan)


def test_the_soaks_report_has_the_promised_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(soak, "SHARES", {1: 0.9, 2: 0.1})
    monkeypatch.setattr(soak, "RUN_DAYS", {1: 1.0, 2: 0.3})
    monkeypatch.setattr(soak, "REPORT", tmp_path / "soak.json")
    monkeypatch.setattr(soak.table, "RESULTS", tmp_path / "results.json")
    assert soak.main(["--days", "2", "--cores", "1"]) == 0
    report = json.loads((tmp_path / "soak.json").read_text())
    assert {"virtual_days", "violations", "runs", "launches", "duplicates", "left_over"} <= set(report)
    assert report["virtual_days"] >= 2.0
    assert report["runs"] == 3
    names = {figure["name"] for figure in json.loads((tmp_path / "results.json").read_text())["figures"]}
    assert {"soak.violations", "soak.recovery_s.1_ranks_p50", "soak.cents.2_ranks_p95"} <= names
    assert soak.figures() == report["figures"]
