"""What may follow a machine that is replaced, and why a gang stops for it."""

from __future__ import annotations

import pytest

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.provisioning import offers, replacement
from tests.reconcile.decide.test_decide import NOW, member
from tests.reconcile.decide.test_guards import calm, on_cur, on_node


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
