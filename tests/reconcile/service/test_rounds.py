"""Rounds and ticks of one process, called directly: what a request gets while another one is at work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotkeeper.contract.cloud import Listing
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.reconcile.controller import reconcile_job
from spotkeeper.reconcile.controller.alarm import read_note
from spotkeeper.reconcile.controller.reconcile_job import Ended, RoundOptions, RoundResult
from spotkeeper.reconcile.service.rounds import WOKEN, Rounds, Ticked
from spotkeeper.reconcile.service.runtime import FunctionSettings, Runtime
from spotkeeper.reconcile.store.objects import AGAIN_S, REQUEST_S
from tests.reconcile.world import JOB, STACK, World

LATE = Fact("u9", "b9", 0, 1, 1, Kind.HERE, "1")


class Process:
    """One process of the function, for a job that trains."""

    def __init__(self) -> None:
        self.world = World(nodes=1)
        self.world.submit()
        self.world.until(self.world.training, 200)
        self.store = self.world.memory
        settings = FunctionSettings(STACK, "", clock=self.world)  # type: ignore[arg-type]
        runtime = Runtime(settings, self.store, self.world)  # type: ignore[arg-type]
        runtime._options = RoundOptions(sleep=lambda _: None, parallel=1)
        runtime.monotonic = self.world.now
        self.rounds = Rounds(runtime)

    def round(self) -> dict[str, object]:
        """One request's round; the fields of its log line."""
        visit = self.rounds.visit()
        self.rounds.run_round(self.world.stack, JOB, visit)
        return visit.note


def test_a_round_logs_what_it_did_and_drops_what_the_process_had_read() -> None:
    process = Process()
    rounds, now = process.rounds, process.world.now()
    for job in (JOB, "wxyz2345"):
        rounds.records.keep(job, None, now)
        rounds.dues.keep(job, 5.0, now)
    assert process.round() == {"job": JOB, "ended": "quiet", "rounds": 1, "passes": 1, "writes": 0, "calls": 0}
    read = process.store.read_record(JOB)
    assert rounds.records.get(JOB, lambda: read, lambda _: True) == read
    assert rounds.dues.get(JOB, lambda: 7.0, lambda _: True) == 7.0
    assert rounds.dues.get("wxyz2345", lambda: 7.0, lambda _: True) == 5.0, "another job's documents stay"


def test_a_report_at_the_end_of_a_requests_time_makes_the_next_round_due() -> None:
    """Its own request was sent away, and the round that it relied on has no time left to read it."""
    process = Process()
    world, store = process.world, process.store
    real_look, real_facts = world.list, store.list_facts
    sent_away: list[dict[str, object]] = []

    def look(stack: str) -> Listing:
        found = real_look(stack)
        world.t += REQUEST_S - AGAIN_S + 0.5
        return found

    def list_facts(job: str) -> tuple[Fact, ...]:
        found = real_facts(job)
        if world.now() > began and not sent_away:
            assert store.put_fact(JOB, LATE)
            sent_away.append(process.round())
        return found

    began = world.now()
    world.list, store.list_facts = look, list_facts  # type: ignore[method-assign]
    assert process.round() == {"job": JOB, "ended": "quiet", "rounds": 1, "passes": 1, "writes": 0, "calls": 0}
    assert sent_away == [{"job": JOB, "ended": "busy"}]
    due = store.read_due(JOB)
    assert due is not None and began < due <= world.now()


@pytest.mark.parametrize(
    ("late", "ended", "rounds"), [(True, Ended.QUIET, 2), (False, Ended.QUIET, 1), (False, Ended.BUSY, 2)]
)
def test_a_round_is_repeated_for_a_request_whose_report_it_has_not_read(
    monkeypatch: pytest.MonkeyPatch, late: bool, ended: Ended, rounds: int
) -> None:
    """While another process has the lease, this process does not know what was read."""
    process = Process()
    real = reconcile_job.run_round
    done: list[RoundResult] = []
    sent_away: list[dict[str, object]] = []

    def run_round(*args: Any) -> RoundResult:
        done.append(real(*args))
        if len(done) > 1:
            return done[-1]
        assert not late or process.store.put_fact(JOB, LATE)
        sent_away.append(process.round())
        return replace(done[0], ended=ended)

    monkeypatch.setattr(reconcile_job, "run_round", run_round)
    process.round()
    assert sent_away == [{"job": JOB, "ended": "busy"}]
    assert len(done) == rounds
    assert LATE not in done[0].facts and (LATE in done[-1].facts) is late


def test_a_tick_during_a_tick_does_nothing() -> None:
    process = Process()
    world, rounds = process.world, process.rounds
    real = world.list
    meanwhile: list[Ticked] = []

    def look(stack: str) -> Listing:
        meanwhile.append(rounds.run_tick(rounds.visit(), strict=True))
        return real(stack)

    world.list = look  # type: ignore[method-assign]
    assert rounds.run_tick(rounds.visit()) == Ticked(1, failed=0, busy=False)
    assert meanwhile == [Ticked(0, failed=0, busy=True)]
    note = read_note(process.store)  # type: ignore[arg-type]
    assert note is not None and (note.succeeded, note.failing) == (world.now(), None)


@pytest.mark.parametrize(("others", "time_left", "begun"), [(2, True, 2), (WOKEN + 2, True, WOKEN), (2, False, 0)])
def test_a_round_is_followed_by_rounds_of_the_jobs_that_it_made_room_for(
    monkeypatch: pytest.MonkeyPatch, others: int, time_left: bool, begun: int
) -> None:
    process = Process()
    real = reconcile_job.run_round
    woken = [f"woken{letter}22" for letter in "abcdefgh"[:others]]
    jobs: list[tuple[str, str]] = []

    def run_round(*args: Any) -> RoundResult:
        jobs.append((args[2], args[4].user))
        if args[2] != JOB:
            return RoundResult(Ended.QUIET, woken=frozenset({JOB}))  # one step, no chain
        if not time_left:
            process.world.t += REQUEST_S - AGAIN_S + 0.5
        return replace(real(*args), woken=frozenset(woken))

    monkeypatch.setattr(reconcile_job, "run_round", run_round)
    process.rounds.run_round(process.world.stack, JOB, process.rounds.visit(), "ann")
    assert jobs == [(JOB, "ann"), *((job, "") for job in woken[:begun])]
