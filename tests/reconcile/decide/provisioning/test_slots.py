"""What becomes of a node whose requested machine is refused or never says hello."""

from __future__ import annotations

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import Action, CreateDisk, InsertVm, Result, ResultKind, Vm
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import BACKUP, Hold, Node, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.provisioning import slots
from tests.reconcile.decide.test_decide import NOW, UID, fact, gang, intent, machine, member
from tests.reconcile.world import JOB

OFFER = "pool/z-a/spot"


def after(kind: ResultKind, cause: str | None, **node: object) -> Draft:
    """Node 1's second attempt, intended for this cause, has had this answer."""
    record, seen = gang(2)
    asked = Result(InsertVm(JOB, UID, 1, 2, "pool", "z-a", Model.SPOT), kind, "said")
    nodes = (record.nodes[0], Node(**{"top": 2, "zone": "z-a", "cur": intent(2, cause=cause), **node}))  # type: ignore[arg-type]
    listing = replace(seen.listing, vms=seen.listing.vms[:1], results=(asked,))
    draft = Draft(replace(record, nodes=nodes), with_(seen, listing=listing))
    slots.step(draft)
    return draft


@pytest.mark.parametrize(("cause", "stays"), [("loss", "loss"), ("swap", "swap"), ("", "start"), (None, "start")])
@pytest.mark.parametrize("kind", [ResultKind.CAPACITY, ResultKind.QUOTA, ResultKind.DEAD_KEY])
def test_the_next_attempt_has_the_cause_of_the_refused_one(kind: ResultKind, cause: str | None, stays: str) -> None:
    draft = after(kind, cause)
    node = draft.nodes[1]
    assert (node.cur, node.cause, node.top) == (None, stays, 2)
    refused = kind is not ResultKind.DEAD_KEY
    assert (node.refused, node.refused_at) == (((OFFER,), NOW) if refused else ((), 0.0))
    (entry,) = draft.entries
    assert (entry.event, entry.node, entry.attempt) == (Event.REFUSED if refused else Event.LOSS, 1, 2)
    assert (entry.cause, entry.detail) == (
        (kind.value, "said")
        if refused
        else ("never joined", "the cloud no longer accepts the idempotency key of its request")
    )


@pytest.mark.parametrize(
    ("action", "what"),
    [
        (InsertVm(JOB, UID, 0, 2, "pool", "z-a", Model.SPOT), "insert a machine"),
        (CreateDisk(JOB, UID, 0, 1, "pool", "z-a"), "create a disk"),
    ],
)
def test_a_permanent_refusal_holds_the_job_and_names_what_was_refused(action: Action, what: str) -> None:
    draft = Draft(*gang(1))
    slots._permanent(draft, "no right" + "x" * 300, action)
    found = draft.record
    assert (found.hold, found.reason) == (Hold.CLOUD, f"the cloud refuses to {what}: no right" + "x" * 192)
    assert found.hold_until == NOW + min(slots.EARLY_S, draft.times.hold_s)


@pytest.mark.parametrize(("cause", "stays"), [("loss", "loss"), (None, "start")])
def test_a_backup_takes_over_with_the_cause_of_the_refused_attempt(cause: str | None, stays: str) -> None:
    spare = intent(3, cause=BACKUP)
    node = after(ResultKind.CAPACITY, cause, next=spare, top=3).nodes[1]
    assert node.cur is not None and (node.cur.attempt, node.cur.cause, node.next) == (3, stays, None)


@pytest.mark.parametrize(("cause", "stays"), [("loss", "loss"), (None, "start")])
def test_a_machine_that_its_backup_overtook_leaves_its_cause(cause: str | None, stays: str) -> None:
    draft = after(ResultKind.AMBIGUOUS, cause, next=intent(3, cause=BACKUP), top=3)
    cur = draft.nodes[1].cur
    assert cur is not None and cur.attempt == 2
    slots.overtaken(draft, 1, cur)
    cur = draft.nodes[1].cur
    assert cur is not None and (cur.attempt, cur.cause) == (3, stays)


@pytest.mark.parametrize(("past", "key"), [((), "admitted.r1.a2"), (("a", "b"), "admitted.r1.a2.b2")])
def test_an_admitted_machine_is_stored_with_its_boot_and_address(past: tuple[str, ...], key: str) -> None:
    before = intent(2, cause="loss", **({"boot": "b", "past": ("a",)} if past else {}))
    draft = on_next(before, machine(1, 2, address="10.0.0.9", created=NOW - 70))
    slots.admit(draft, 1, "next")
    found = {"state": SlotState.ADMITTED, "since": NOW, "uid": "u1-2", "boot": "c", "address": "10.0.0.9"}
    assert draft.nodes[1].next == replace(before, **found, past=past)
    (entry,) = draft.entries
    assert (entry.id, entry.event, entry.node, entry.attempt) == (key, Event.ADMITTED, 1, 2)
    assert (entry.cause, entry.started, entry.detail) == ("loss", NOW - 70, "")


@pytest.mark.parametrize(("listed", "cause"), [(False, "standby"), (True, "noticed standby")])
def test_a_standby_that_is_gone_or_has_a_notice_is_dropped(listed: bool, cause: str) -> None:
    standby = member(1, 2, state=SlotState.ADMITTED, boot="c")
    draft = on_next(standby, machine(1, 2) if listed else None)
    slots.step(draft)
    assert draft.nodes[1].next is None
    (entry,) = draft.entries
    assert (entry.id, entry.event, entry.node, entry.attempt) == ("loss.r1.a2", Event.LOSS, 1, 2)
    assert entry.cause == cause


def on_next(slot: Slot, vm: Vm | None) -> Draft:
    """Node 1 trains and has this ``next``, whose boot ``c`` has said hello and has a notice."""
    record, seen = gang(2)
    nodes = (record.nodes[0], replace(record.nodes[1], next=slot, top=2))
    vms = (*seen.listing.vms, vm) if vm is not None else seen.listing.vms
    said = (
        fact(1, Kind.HELLO, gen=0, attempt=2, boot="c"),
        fact(1, Kind.NOTICE, f"{NOW + 60:.0f}", attempt=2, boot="c"),
    )
    seen = with_(seen, listing=replace(seen.listing, vms=vms), facts=(*seen.facts, *said))
    return Draft(replace(record, nodes=nodes), seen)
