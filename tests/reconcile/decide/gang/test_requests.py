"""What a user's request does, and why it is refused: each answer from a snapshot that lacks one thing."""

from __future__ import annotations

import pytest

from spotkeeper.contract.job import JobRequest, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Limits, Node, Outcome, Phase, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import requests
from spotkeeper.reconcile.decide.job import limits
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import Change, calm, on_cur, on_node, on_record, on_snapshot

TIMES = Times()


def asked(kind: RequestKind, change: Change = lambda *case: case, **more: object) -> tuple[Draft, str]:
    """The draft after a request of ann, and the ledger's detail about it."""
    request = JobRequest("q1", kind, NOW, "ann", **more)  # type: ignore[arg-type]
    record, snapshot = change(*calm(2))
    draft = Draft(record, on_snapshot(requests=(request,))(record, snapshot)[1])
    requests.step(draft)
    (entry,) = (entry for entry in draft.entries if entry.event is Event.REQUEST)
    assert (entry.id, entry.node, entry.cause) == ("request.q1", request.node, kind.value)
    assert draft.record.requests_done == ("q1",)
    return draft, entry.detail


@pytest.mark.parametrize("node", [0, 1])
def test_a_swap_replaces_the_machine_of_its_node(node: int) -> None:
    draft, told = asked(RequestKind.SWAP, node=node)
    assert told == "by ann"
    assert [each.replace_reason for each in draft.nodes] == [("user" if at == node else None) for at in range(2)]


@pytest.mark.parametrize(
    ("node", "change", "why"),
    [
        (None, on_record(), "node None is not one of 0..1"),
        (-1, on_record(), "node -1 is not one of 0..1"),
        (2, on_record(), "node 2 is not one of 0..1"),
        (1, on_node(1, cur=None), "node 1 is being replaced already"),
        (1, on_cur(1, state=SlotState.ADMITTED), "node 1 is being replaced already"),
        (1, on_cur(1, model=Model.STATIC), "node 1 trains on a static machine, whose disk has the node's data"),
        (1, on_record(phase=Phase.END), "the job has ended"),
    ],
)
def test_why_a_swap_is_refused(node: int | None, change: Change, why: str) -> None:
    draft, told = asked(RequestKind.SWAP, change, node=node)
    assert told == f"refused: {why}"
    assert [each.replace_reason for each in draft.nodes] == [None, None]


def test_a_swap_of_a_machine_that_is_replaced_already_changes_nothing() -> None:
    draft, told = asked(RequestKind.SWAP, on_node(1, replace_reason="spot"), node=1)
    assert (told, draft.nodes[1].replace_reason) == ("by ann", "spot")


def test_a_cancel_ends_the_job() -> None:
    draft, _ = asked(RequestKind.CANCEL)
    assert (draft.record.phase, draft.record.outcome, draft.record.reason) == (
        Phase.END,
        Outcome.CANCELLED,
        "cancelled by ann",
    )


def test_a_pause_stops_the_members_and_holds_a_job_without_any() -> None:
    draft, _ = asked(RequestKind.PAUSE)
    assert (draft.record.phase, draft.record.pause, draft.record.stop) == (Phase.RUN, "paused by ann", True)
    assert draft.record.stop_deadline == NOW + 5.0 + TIMES.stop_s
    draft, _ = asked(RequestKind.PAUSE, on_record(members=()))
    assert (draft.record.phase, draft.record.hold, draft.record.reason) == (Phase.HOLD, Hold.PAUSE, "paused by ann")
    assert asked(RequestKind.PAUSE, on_record(phase=Phase.HOLD))[1] == "refused: the job is on hold already"


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("count", [requests.KEPT, requests.KEPT + 1])
def test_the_newest_handled_requests_are_remembered_and_those_that_still_exist(count: int, waits: bool) -> None:
    done = tuple(f"q{number}" for number in range(count))
    kept = done if waits else done[-requests.KEPT :]
    assert requests._kept(done, {"q0"} if waits else set()) == kept


def test_a_resume_ends_a_hold_or_a_pause_and_nothing_else() -> None:
    draft, _ = asked(RequestKind.RESUME, on_record(phase=Phase.HOLD, hold=Hold.PAUSE))
    assert draft.record.phase is Phase.RUN
    draft, _ = asked(RequestKind.RESUME, on_record(pause="paused by ann"))
    assert draft.record.pause == ""
    assert asked(RequestKind.RESUME)[1] == "refused: the job is not on hold"
    for queued in (on_record(recalled=True), on_record(phase=Phase.HOLD, hold=Hold.QUEUE)):
        told = asked(RequestKind.RESUME, queued)[1]
        assert told == "refused: the job waits in the queue, and goes on by itself: spotkeeper queue"
    told = asked(RequestKind.RESUME, go_back=True)[1]
    assert told == "refused: the job is not on hold, and does not wait for a checkpoint"


HELD = on_record(phase=Phase.HOLD, hold=Hold.PAUSE)
WITHOUT = "without checkpoint 3-90 unless a machine has it"


@pytest.mark.parametrize(
    ("change", "back", "given_up", "noted"),
    [
        (HELD, False, "", [""]),
        (HELD, True, "3-90", [WITHOUT]),
        (on_record(pause="paused by ann"), True, "3-90", [WITHOUT]),
        (on_record(pause="paused by ann"), False, "", []),
    ],
)
def test_a_resume_is_in_the_ledger_as_of_the_records_next_version(
    change: Change, back: bool, given_up: str, noted: list[str]
) -> None:
    draft, _ = asked(RequestKind.RESUME, change, go_back=back)
    assert draft.record.given_up == given_up
    entries = [entry for entry in draft.entries if entry.event is Event.RESUME]
    assert [(entry.id, entry.cause, entry.detail) for entry in entries] == [
        (f"resume.v{draft.before.ver + 1}", "resume", detail) for detail in noted
    ]


# -- holds that end by themselves


def held(**more: object) -> Draft:
    draft = Draft(*on_record(phase=Phase.HOLD, hold=Hold.FAILURE, reason="it fails", **more)(*calm(2)))
    requests.expire_hold(draft)
    return draft


def test_a_hold_retries_at_its_time() -> None:
    assert held(hold_until=NOW).record.phase is Phase.RUN
    assert held(hold_until=NOW + 1).record.phase is Phase.HOLD


@pytest.mark.parametrize(
    ("ends", "late", "phase", "noted"),
    [
        (NOW + 1, None, Phase.HOLD, None),
        (NOW, None, Phase.HOLD, NOW),
        (NOW - 9000, NOW - TIMES.sure_s + 1, Phase.HOLD, NOW - TIMES.sure_s + 1),
        (NOW - 9000, NOW - TIMES.sure_s, Phase.END, NOW - TIMES.sure_s),
        (NOW + 1, NOW - 9000, Phase.HOLD, None),  # the clock that found it over was ahead
        (None, None, Phase.HOLD, None),
    ],
)
def test_a_hold_ends_the_job_when_two_rounds_an_hour_apart_find_it_over(
    ends: float | None, late: float | None, phase: Phase, noted: float | None
) -> None:
    draft = held(hold_ends=ends, hold_late=late)
    assert draft.record.phase is phase
    if phase is Phase.HOLD:
        assert draft.record.hold_late == noted
    else:
        assert (draft.record.outcome, draft.record.reason) == (Outcome.FAILED, "no resume in time: it fails")


# -- the hourly cost that the record notes


@pytest.mark.parametrize(
    ("recorded", "noted"),
    [(None, None), (0.6, 0.6), (0.597, 0.597), (0.603, 0.603), (0.5, 0.6), (0.7, 0.6), (0.0, 0.6)],
)
def test_a_new_hourly_cost_is_noted_once_it_differs_by_enough(recorded: float | None, noted: float | None) -> None:
    draft = Draft(*on_record(limits=Limits(usd_hour=recorded))(*calm(2)))  # two machines at $0.30
    limits._note(draft)
    assert draft.record.limits.usd_hour == (noted if noted is None else pytest.approx(noted))


def test_a_vacant_node_costs_nothing() -> None:
    draft = Draft(*on_node(1, cur=None)(*calm(2)))
    assert limits._rate(draft, [draft.nodes[0], Node()]) == pytest.approx(0.3 + 0.3), "its old machine is listed"
