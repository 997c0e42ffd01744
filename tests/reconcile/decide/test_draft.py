"""Changes of a draft that several steps make: what is counted, and what it says."""

from __future__ import annotations

import pytest

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Budget, Hold, Move, Node, Outcome, Phase, Roll
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.draft import Draft
from tests.reconcile.decide.test_decide import NOW, member
from tests.reconcile.decide.test_guards import calm, on_record

RULES = Times().fallback  # 3 losses and one per node within an hour, or 3 lives in a row of less than 600 s


def lost(budget: Budget, **slot: object) -> Draft:
    """A job of one machine loses this one."""
    draft = Draft(*on_record(budget=budget)(*calm(1)))
    draft.count_loss(0, member(0, **slot))
    return draft


@pytest.mark.parametrize(
    ("budget", "lived_s", "cause", "told"),
    [
        (Budget(loss_times=(NOW - 3600, NOW - 2460, NOW - 60)), 900, "too many losses", "4 losses in 60 min in z-a"),
        (Budget(loss_times=(NOW - 3601, NOW - 2460, NOW - 60)), 900, "", ""),
        (Budget(short_lives=2), 599, "lives too short", "1 losses in 0 min in z-a"),
        (Budget(short_lives=2, loss_times=(NOW - 1500,)), 599, "lives too short", "2 losses in 25 min in z-a"),
        (Budget(short_lives=2), 600, "", ""),
        (Budget(short_lives=1), 599, "", ""),
    ],
)
def test_many_losses_or_short_lives_start_a_fallback(budget: Budget, lived_s: float, cause: str, told: str) -> None:
    draft = lost(budget, since=NOW - lived_s)
    found = draft.record.budget
    assert (found.preemptions, found.loss_times) == (1, (*budget.loss_times, NOW))
    assert found.short_lives == (budget.short_lives + 1 if lived_s < RULES.short_life_s else 0)
    assert draft.record.fallback_until == (NOW + RULES.on_demand_s if cause else 0.0)
    entries = [(entry.event, entry.cause, entry.detail) for entry in draft.entries]
    assert entries == ([(Event.FALLBACK, cause, f"{told}, spot again at 03:16 UTC")] if cause else [])


def test_a_loss_during_a_fallback_is_counted_and_does_not_extend_it() -> None:
    draft = Draft(*on_record(budget=Budget(short_lives=2), fallback_until=NOW + 1)(*calm(1)))
    draft.count_loss(0, member(0, since=NOW))
    assert (draft.record.budget.preemptions, draft.record.fallback_until, draft.entries) == (1, NOW + 1, [])


def test_fallbacks_in_a_row_are_one_spell_until_the_job_trains_on_spot_or_a_person_resumes_it() -> None:
    def again(**over: object) -> str:
        """The cause of a second fallback, after a round with this record."""
        earlier = {"fallback_until": NOW - 1, "fell_back": True, "budget": Budget(short_lives=2)}
        draft = Draft(*on_record(**earlier | over)(*calm(1)))
        draft.back_on_spot()
        if draft.record.phase is Phase.HOLD:
            draft.release("resume" if over["hold"] is Hold.PAUSE else "retry")
        draft.put(0, cur=None)  # the machine is lost, so that none of the gang is on-demand
        draft.fall_back("lives too short")
        (entry,) = [entry for entry in draft.entries if entry.event is Event.FALLBACK]
        return entry.cause or ""

    bought = (Node(cur=member(0, model=Model.ON_DEMAND)),)
    assert again(nodes=bought) == "no spot yet: lives too short"
    assert again(nodes=bought, gen=3, stop=True) == "no spot yet: lives too short"
    assert again(phase=Phase.HOLD, hold=Hold.CAPACITY, gen=0) == "no spot yet: lives too short"
    assert again(phase=Phase.HOLD, hold=Hold.PAUSE, gen=0) == "lives too short"
    assert again(gen=3) == "lives too short", "its machine was a spot machine"


def test_the_loss_of_an_on_demand_machine_is_no_preemption() -> None:
    budget = Budget(short_lives=2)
    assert lost(budget, since=NOW, model=Model.ON_DEMAND).record.budget == budget


def test_a_hold_of_the_queue_is_no_failed_try() -> None:
    draft = Draft(*on_record(gen=3, hold_count=1)(*calm(1)))
    draft.hold(Hold.QUEUE, "its machines go to another job")
    assert draft.record.hold_count == 1


@pytest.mark.parametrize("gen", [0, 3])
def test_a_hold_stops_a_generation_at_once(gen: int) -> None:
    draft = Draft(*on_record(gen=gen)(*calm(1)))
    draft.hold(Hold.PAUSE, "paused by ann", until=NOW + 5, ends=NOW + 9, node=0)
    found = draft.record
    assert (found.phase, found.hold, found.reason, found.hold_count) == (Phase.HOLD, Hold.PAUSE, "paused by ann", 1)
    assert (found.hold_until, found.hold_ends, found.hold_late) == (NOW + 5, NOW + 9, None)
    assert (found.stop, found.stop_deadline) == ((True, NOW) if gen else (False, None))
    assert [(node.cur, node.vacant_since) for node in draft.nodes] == [(None, NOW)]
    (entry,) = draft.entries
    assert (entry.id, entry.event, entry.node) == (f"hold.v{draft.before.ver + 1}", Event.HOLD, 0)
    assert (entry.cause, entry.detail) == (Hold.PAUSE.value, "paused by ann")


@pytest.mark.parametrize(
    ("size", "parked", "found"), [(None, (), []), (3, (), []), (2, (), [2]), (2, (0,), [0]), (None, (1, 2), [1, 2])]
)
def test_nodes_beyond_the_size_are_parked_unless_others_are_named(
    size: int | None, parked: tuple[int, ...], found: list[int]
) -> None:
    draft = Draft(*on_record(size=size, parked=parked)(*calm(3)))
    assert [index for index in range(3) if draft.parked(index)] == found


def test_the_end_of_a_job_ends_all_that_it_was_about_to_do() -> None:
    under_way = {"roll": Roll(3, NOW, "exit"), "move": Move("z-b", NOW), "stop": True, "recalled": True}
    draft = Draft(*on_record(gen=3, pause="by user", hold=Hold.QUEUE, **under_way)(*calm(1)))
    draft.end(Outcome.FAILED, "exit code 1")
    done = draft.record
    assert (done.phase, done.outcome, done.reason) == (Phase.END, Outcome.FAILED, "exit code 1")
    assert (done.roll, done.move, done.hold) == (None, None, None)
    assert (done.stop, done.recalled, done.pause) == (False, False, "")
