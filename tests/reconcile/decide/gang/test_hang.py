"""A hang: called out for, all stacks had, then a crash, of the node that the others wait for."""

from __future__ import annotations

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.facts import Fact, Hung, Kind, StacksAnswer, WorkerState
from spotkeeper.contract.generation import DocState, HangRun, Progress
from spotkeeper.contract.job import Hang, JobSpec, Retry
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Phase, Record, Roll
from spotkeeper.reconcile.controller.document import generation, job_run
from spotkeeper.reconcile.decide import Decision, Snapshot, Times, decide
from spotkeeper.report.job.events import describe
from tests.reconcile.decide.test_decide import NOW, fact, gang
from tests.reconcile.world import stack

SINCE = int(NOW) - 640
ROLL = Roll(ver=40, since=NOW - 10, cause="hang")


def hung(node: int, step: int = 812) -> Fact:
    return fact(node, Kind.HUNG, str(Hung(step, SINCE)))


def answers(node: int, word: WorkerState, local_rank: int = 0) -> tuple[Fact, Fact]:
    return fact(node, Kind.HERE, "40"), fact(node, Kind.STACKS, str(StacksAnswer(40, word, local_rank)))


def called(count: int = 2, **more: object) -> tuple[Record, Snapshot]:
    """The roll has been called for a hang, which every member told of."""
    record, snapshot = gang(count, roll=ROLL, **more)
    return record, with_(snapshot, facts=(*snapshot.facts, *map(hung, range(count))))


def look(record: Record, snapshot: Snapshot, *more: Fact) -> Decision:
    return decide(record, with_(snapshot, facts=(*snapshot.facts, *more)))


def crash(decision: Decision) -> str:
    """What the ledger says of it; "" where there was none."""
    entries = decision.record.outbox if decision.record else ()
    return next((describe(entry) for entry in entries if entry.event is Event.CRASH), "")


def test_a_hang_opens_a_roll_call_that_requests_stacks() -> None:
    record, snapshot = gang()
    called = look(record, snapshot, hung(0)).record
    assert called is not None and called.roll is not None
    assert (called.roll.cause, called.roll.exits) == ("hang", False)
    doc = generation(called, snapshot.spec, stack())
    assert (doc.state, doc.stacks) == (DocState.ROLL_CALL, True)
    assert not generation(record, snapshot.spec, stack()).stacks


def test_a_later_step_clears_a_hang() -> None:
    record, snapshot = gang()
    on = with_(snapshot, progress=Progress(3, 813, NOW - 1, commit_gen=3, commit_step=1))
    assert look(record, on, hung(0)).quiet
    assert not look(record, with_(on, progress=Progress(3, 812, NOW - 1)), hung(0)).quiet
    assert not look(record, with_(on, progress=Progress(2, 900, NOW - 1)), hung(0)).quiet, "of another generation"


def test_nothing_is_stopped_before_every_machine_has_its_stacks() -> None:
    record, snapshot = called()
    assert look(record, snapshot, *answers(0, WorkerState.WAITS), fact(1, Kind.HERE, "40")).quiet
    late = with_(snapshot, now=NOW + Times().roll_s)
    assert crash(look(record, late, *answers(0, WorkerState.WAITS), fact(1, Kind.HERE, "40"))), "but for a while only"


def test_an_answer_to_an_older_roll_call_does_not_count() -> None:
    """The node was busy then."""
    record, snapshot = called(1)
    old = fact(0, Kind.STACKS, str(StacksAnswer(39, WorkerState.ELSEWHERE)))
    assert look(record, snapshot, fact(0, Kind.HERE, "40"), old).quiet


def test_a_machine_without_an_answer_is_lost_and_no_crash() -> None:
    record, snapshot = called()
    late = with_(snapshot, now=NOW + Times().roll_s, grants_first=False)
    decision = look(record, late, *answers(0, WorkerState.WAITS))
    assert decision.record is not None
    assert [entry.event for entry in decision.record.outbox][:1] == [Event.LOSS]
    assert decision.record.budget.crashes == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            [(WorkerState.WAITS, 0), (WorkerState.ELSEWHERE, 3)],
            "local rank 3 of node 1 hangs: no step after 812 for 640 s, and the others wait for it."
            " Stack traces: spotkeeper logs j --generation 3 --node 1",
        ),
        (
            [(WorkerState.WAITS, 0), (WorkerState.WAITS, 0)],
            "every node waits for the others: no step after 812 for 640 s."
            " Stack traces: spotkeeper logs j --generation 3",
        ),
        (
            [(WorkerState.SILENT, 0), (WorkerState.ELSEWHERE, 0)],
            "nodes 0, 1 hang: no step after 812 for 640 s. Stack traces: spotkeeper logs j --generation 3",
        ),
        (
            [(WorkerState.UNKNOWN, 0)],
            "the job hangs: no step after 812 for 640 s. Stack traces: spotkeeper logs j --generation 3 --node 0",
        ),
    ],
)
def test_the_crash_names_the_hanging_node_and_the_stacks(words: list[tuple[WorkerState, int]], told: str) -> None:
    record, snapshot = called(len(words))
    facts = [each for node, word in enumerate(words) for each in answers(node, *word)]
    decision = look(record, snapshot, *facts)
    assert crash(decision) == told
    assert decision.record is not None
    assert (decision.record.budget.crashes, decision.record.budget.crashed_gen) == (1, 3)
    assert decision.record.gen == 4, "who hangs is not asked to save: the next generation ends the processes"


def test_a_busy_node_clears_the_hang_for_a_while() -> None:
    record, snapshot = called()
    decision = look(record, snapshot, *answers(0, WorkerState.WAITS), *answers(1, WorkerState.BUSY))
    after = decision.record
    assert after is not None and not crash(decision)
    assert after.roll is None and not after.stop
    told = with_(snapshot, facts=(*snapshot.facts, *answers(0, WorkerState.WAITS), *answers(1, WorkerState.BUSY)))
    assert decide(after, told).quiet, "it is not asked again at once"
    again = decide(after, with_(told, now=NOW + Times().silence_s + 1)).record
    assert again is not None and again.roll is not None and again.roll.cause == "hang"
    assert look(again, told).quiet, "and that answer counted once"


def test_a_finished_node_needs_no_stacks() -> None:
    record, snapshot = called()
    decision = look(
        record, snapshot, *answers(0, WorkerState.ELSEWHERE), fact(1, Kind.HERE, "40"), fact(1, Kind.EXIT, "0")
    )
    assert crash(decision).startswith("node 0 hangs: no step after 812")


def test_an_exit_during_the_roll_call_is_the_crash() -> None:
    record, snapshot = called()
    decision = look(
        record, snapshot, *answers(0, WorkerState.WAITS), fact(1, Kind.HERE, "40"), fact(1, Kind.EXIT, "137")
    )
    assert crash(decision) == "the job's own code failed (crash): node 1 exited with 137"


def test_a_failed_process_opens_a_roll_call_that_says_why() -> None:
    decision = look(*gang(), fact(1, Kind.EXIT, "137"))
    assert decision.record is not None
    (entry,) = (entry for entry in decision.record.outbox if entry.event is Event.ROLL)
    assert (entry.cause, entry.detail) == ("exit", "node 1 exited with 137")
    assert decision.record.roll is not None and decision.record.roll.exits


def test_repeated_hangs_hold_the_job() -> None:
    record, snapshot = called()
    assert snapshot.spec is not None
    strict = with_(snapshot, spec=replace(snapshot.spec, retry=Retry(crashes=0)))
    decision = look(record, strict, *answers(0, WorkerState.WAITS), *answers(1, WorkerState.ELSEWHERE))
    assert decision.record is not None
    assert (decision.record.phase, decision.record.hold) == (Phase.HOLD, Hold.FAILURE)
    assert decision.record.reason.startswith("node 1 hangs: no step after 812 for 640 s")


def test_the_job_file_sets_the_hang_limits() -> None:
    spec = JobSpec("j", ("t.py",))
    assert job_run(spec, 1).hang == HangRun(30.0, 600.0, 3600.0)
    assert job_run(replace(spec, hang=Hang(factor=5.0, floor_min=2.0)), 1).hang == HangRun(5.0, 120.0, 3600.0)
    assert job_run(replace(spec, hang="off"), 1).hang is None


@pytest.mark.parametrize("text", ["", "7", "7-", "-7", "7-x", "7-8-9", "1" * 16 + "-1"])
def test_invalid_answers_are_ignored(text: str) -> None:
    assert Hung.parse(text) is None
    assert StacksAnswer.parse(text) is None
    assert Hung.parse(str(Hung(7, 8))) == Hung(7, 8)
    assert all(StacksAnswer.parse(str(StacksAnswer(7, word, 3))) == StacksAnswer(7, word, 3) for word in WorkerState)
