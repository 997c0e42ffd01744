"""When time alone changes a decision: each moment from a snapshot in which nothing else is due."""

from __future__ import annotations

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import DeleteVm
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.record import Hold, Limits, Move, Phase, Roll, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.calls import due
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.store.documents import OfferHistory
from tests.reconcile.decide.test_decide import NOW, fact, gang, intent, machine
from tests.reconcile.decide.test_guards import Case, Change, all_of, on_cur, on_node, on_record, on_snapshot, on_spec

TIMES = Times()
SOON = NOW + TIMES.soon_s
BOOT_S = 240.0  # the stack's boot deadline


def calm() -> Case:
    record, snapshot = gang()
    return record, with_(snapshot, progress=Progress(3, 100, NOW))


def held(**more: object) -> Change:
    """Without machines, since these alone would be due."""

    def change(_: object, __: object) -> Case:
        record, snapshot = gang(0, phase=Phase.HOLD, hold=Hold.FAILURE, **more)
        return record, snapshot

    return change


def booting(record: object, snapshot: object) -> Case:
    """Node 1 has an intent whose machine is not listed yet."""
    case = on_node(1, top=2, cur=intent(2))(record, snapshot)  # type: ignore[arg-type]
    return on_snapshot(listing=replace(case[1].listing, vms=case[1].listing.vms[:1]))(*case)


def said_hello(record: object, snapshot: object) -> Case:
    case = booting(record, snapshot)
    hello = fact(1, Kind.HELLO, gen=0, attempt=2)
    return on_snapshot(facts=(*case[1].facts, hello))(*case)


def slow_boot(record: object, snapshot: object) -> Case:
    """Node 1's machine is listed and boots; 95 % of starts take 100 s, half of them 50 s."""
    case = on_node(1, top=2, cur=intent(2))(record, snapshot)  # type: ignore[arg-type]
    vms = (case[1].listing.vms[0], machine(1, 2, created=NOW - 10))
    seen = OfferHistory("pool", "z-a", Model.SPOT, boot_s=50.0, slow_boot_s=100.0)
    return on_snapshot(listing=replace(case[1].listing, vms=vms), market=(seen,))(*case)


VACANT = {"cur": None}


@pytest.mark.parametrize(
    ("change", "at"),
    [
        (on_record(), None),
        # a hold
        (held(), None),
        (held(hold_until=NOW + 50), NOW + 50),
        (held(hold_ends=NOW + 70), NOW + 70),
        (held(hold_until=NOW + 50, hold_ends=NOW + 70), NOW + 50),
        (held(hold_until=NOW + 90, hold_ends=NOW + 70), NOW + 70),
        (held(hold_ends=NOW - 5, hold_late=NOW - 1), NOW - 1 + TIMES.sure_s),
        (on_record(phase=Phase.HOLD, hold=Hold.FAILURE), SOON),  # its machines go
        (on_record(phase=Phase.END), SOON),
        (on_record(phase=Phase.DONE, fallback_until=NOW + 9), None),
        # a stop, a roll call, a fallback
        (on_record(stop=True, stop_deadline=NOW + 30), NOW + 30),
        (on_record(stop=True, stop_deadline=NOW), None),
        (on_record(roll=Roll(ver=40, since=NOW - 5, cause="silence")), NOW - 5 + TIMES.roll_s),
        (on_record(fallback_until=NOW + 9), NOW + 9),
        (on_record(fallback_until=NOW), None),
        (on_record(move=Move("z-b", NOW - 5)), SOON),
        # capacity
        (on_record(dry_since=NOW - 5), None),
        (all_of(on_node(1, **VACANT), on_record(dry_since=NOW - 5)), NOW - 5 + TIMES.dry_s),
        (all_of(on_node(1, **VACANT), on_record(dry_since=NOW - 900)), SOON),
        (all_of(on_node(1, **VACANT), on_record(dry_since=NOW - 5, size=1, members=(0,))), None),
        (on_node(1, refused_at=NOW - 5), None),
        (on_node(1, refused_at=NOW - 5, **VACANT), NOW - 5 + TIMES.cold_s),
        (on_node(1, refused_at=NOW - 900, **VACANT), SOON),
        # boots
        (booting, NOW - 5 + BOOT_S),
        (on_node(1, next=intent(2)), NOW - 5 + BOOT_S),
        (said_hello, SOON),
        (slow_boot, NOW - 10 + 100 + (100 - 50) / 2.302585 * 0.693147 + TIMES.soon_s),
        (on_cur(1, state=SlotState.ADMITTED), None),
        # machines that go, 5 s for a save and the margin ahead
        (on_cur(1, notice=NOW + 100), NOW + 100 - 5 - TIMES.margin_s),
        (on_cur(1, ends=NOW + 100), NOW + 100 - 5 - TIMES.margin_s),
        (on_cur(1, notice=NOW + 100, ends=NOW + 90), NOW + 90 - 5 - TIMES.margin_s),
        (on_cur(1, notice=NOW + 1), SOON),
        (all_of(on_cur(1, notice=NOW + 100), on_record(stop=True)), None),
        # limits
        (on_record(limits=Limits(closed_until=NOW + 40)), NOW + 40),
        (on_record(limits=Limits(closed_until=NOW)), None),
        (on_record(limits=Limits(hour=NOW - 100)), None),
        (all_of(on_record(limits=Limits(hour=NOW - 100)), on_node(1, launches=3, **VACANT)), NOW + 3500),
        (all_of(on_record(limits=Limits(hour=NOW - 3600)), on_node(1, launches=3, **VACANT)), None),
    ],
)
def test_when_the_next_round_is_due(change: Change, at: float | None) -> None:
    found = due(Draft(*change(*calm())), ())
    assert found == (at if at is None else pytest.approx(at, abs=0.01))


def test_unfinished_calls_are_looked_at_soon_and_of_several_moments_the_first_counts() -> None:
    record, snapshot = calm()
    assert due(Draft(record, snapshot), (DeleteVm("vm", "u", "z-a"),)) == SOON
    several = replace(record, fallback_until=NOW + 9, limits=Limits(closed_until=NOW + 8), stop_deadline=NOW + 10)
    assert due(Draft(several, snapshot), ()) == NOW + 8


@pytest.mark.parametrize("forgiven", [0.0, 2.5])
def test_the_spending_limit_is_due_when_it_will_be_reached(forgiven: float) -> None:
    limits = Limits(spent=4.0, spent_at=NOW - 1800, usd_hour=1.0, forgiven=forgiven)
    record, snapshot = all_of(on_spec(max_usd=10.0), on_record(limits=limits))(*calm())
    left = 10.0 + forgiven - (4.0 + 0.5 * 1.0)
    rate = 2 * 0.30  # of both machines, now
    assert due(Draft(record, snapshot), ()) == pytest.approx(NOW + left / rate * 3600)
    assert due(Draft(replace(record, pause="limit"), snapshot), ()) is None
    spent = replace(record, limits=replace(limits, spent=20.0))
    assert due(Draft(spent, snapshot), ()) == SOON
