"""What may follow a machine that is replaced, and why a gang stops for it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Record, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Snapshot
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.provisioning import offers, replacement
from tests.reconcile.decide.test_decide import NOW, intent, machine, member
from tests.reconcile.decide.test_guards import Case, Change, calm, changed, on_cur, on_node, on_snapshot, on_spec


@pytest.mark.parametrize(
    ("reason", "notice", "models"),
    [
        ("spot", None, {Model.SPOT}),
        ("on-demand", None, {Model.ON_DEMAND}),
        ("swap", None, {Model.SPOT, Model.ON_DEMAND}),
        ("spot", NOW + 60, {Model.SPOT, Model.ON_DEMAND}),  # it goes whatever follows
        ("on-demand", NOW + 60, {Model.SPOT, Model.ON_DEMAND}),
    ],
)
def test_a_notice_opens_a_replacement_to_every_model(reason: str, notice: float | None, models: set[Model]) -> None:
    case = on_node(0, replace_reason=reason)(*on_cur(0, model=Model.ON_DEMAND, notice=notice)(*calm(1)))
    assert {offer.model for offer in offers.open_to(Draft(*case), 0, "next")} <= models
    assert notice is None or {offer.model for offer in offers.open_to(Draft(*case), 0, "next")} == models


@pytest.mark.parametrize(
    ("cur", "cause"),
    [
        ({"notice": NOW + 1}, "notice"),
        ({"notice": NOW + 1, "cut": True}, "loss"),
        ({"notice": NOW + 1, "ends": NOW + 1}, "planned end"),
        ({}, "swap"),
    ],
)
def test_a_gang_stops_for_a_replacement_with_its_cause(cur: dict[str, object], cause: str) -> None:
    next_ = member(0, 2, state=SlotState.ADMITTED)
    draft = Draft(*on_node(0, replace_reason="swap", next=next_)(*on_cur(0, **cur)(*calm(1))))
    replacement._stop(draft)
    (entry,) = draft.entries
    assert (entry.id, entry.event, entry.cause) == ("stop.g3", Event.STOP, cause)
    until = NOW + 1 if "notice" in cur else NOW + draft.save_s() + draft.times.stop_s
    assert draft.record.stop_deadline == until


def listed(record: Record, seen: Snapshot) -> Case:
    """With the machine that node 1 requested as its next."""
    return on_snapshot(listing=replace(seen.listing, vms=(*seen.listing.vms, machine(1, 2))))(record, seen)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ([], True),
        ([on_spec(regions=("here",))], False),
        ([on_snapshot(spec=None)], False),
        ([on_node(0, refused=())], False),
        # the others' notices are waited for, for a moment
        ([on_cur(1, notice=None), on_node(0, refused_at=NOW - replacement.NOTICES_S + 0.1)], True),
        ([on_cur(1, notice=None), on_node(0, refused_at=NOW - replacement.NOTICES_S)], False),
        ([on_node(1, cur=None, next=None), on_node(0, refused_at=NOW - replacement.NOTICES_S)], False),
        # and then the answers to their requests
        ([on_node(1, next=None)], False),
        ([on_node(1, next=replace(intent(2), state=SlotState.ADMITTED))], False),
        ([listed], False),
    ],
)
def test_a_refused_node_of_a_gang_with_two_regions_waits_for_the_others(changes: list[Change], held: bool) -> None:
    """The gang may lose all its machines: then it goes where spot is, together."""
    case = calm(2, regions=("here", "there"))
    refused = on_node(0, refused=("pool/z-a/spot",), refused_at=NOW - 100.0)
    go = (on_cur(0, notice=NOW + 30), on_cur(1, notice=NOW + 30))
    draft = changed(case, *go, refused, on_node(1, next=intent(2)), *changes)
    assert replacement._holds_back(draft, draft.nodes[0]) is held


def test_one_node_waits_for_nobody() -> None:
    case = on_node(0, refused=("x",), refused_at=NOW, next=intent(2))(*calm(1, regions=("here", "there")))
    draft = Draft(*on_cur(0, notice=NOW + 30)(*case))
    assert not replacement._holds_back(draft, draft.nodes[0])
