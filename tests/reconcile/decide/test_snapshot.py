"""What a snapshot says of one slot's machine: is it the slot's own, is it gone, can it mount its disk."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.cloud import Vm, VmStatus
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.record import Slot
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.snapshot import Queries
from tests.reconcile.decide.test_decide import NOW, fact, machine, member
from tests.reconcile.decide.test_guards import calm, on_snapshot
from tests.reconcile.world import STACK

STATIC = names.static_machine_name(STACK, "fix", 0)
MARGIN_S = Times().margin_s


def listed(vm: Vm, *said: object) -> Queries:
    record, seen = calm(1, *said)
    return Draft(*on_snapshot(listing=replace(seen.listing, vms=(vm,)))(record, seen)).queries


def static(**more: object) -> Slot:
    return member(0, model=Model.STATIC, machine=STATIC, **more)


@pytest.mark.parametrize(("uid", "own"), [("s0", True), (None, True), ("s1", False)])
def test_a_static_machine_with_another_unique_id_is_not_the_slots(uid: str | None, own: bool) -> None:
    vm = Vm(STATIC, "s0", "z-a", VmStatus.RUNNING, "fix", "", 0, 0, "10.0.1.0")
    assert listed(vm).vm(0, static(uid=uid)) == (vm if own else None)


@pytest.mark.parametrize(
    ("notice", "gone"),
    [(None, False), (NOW, False), (NOW - MARGIN_S, False), (NOW - MARGIN_S - 1, True)],
)
def test_a_stopping_machine_is_gone_once_its_notice_is_over(notice: float | None, gone: bool) -> None:
    assert listed(machine(0, status=VmStatus.STOPPING)).gone(0, member(0, notice=notice)) is gone


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((), None),
        (((Kind.NO_DISK, "0-damaged"),), "damaged"),
        (((Kind.NO_DISK, "1-damaged"),), None),  # of another disk
        (((Kind.NO_DISK, "0-damaged"), (Kind.ATTACHED, "0")), None),  # it came after all
        (((Kind.NO_DISK, "0-damaged"), (Kind.ATTACHED, "1")), "damaged"),
    ],
)
def test_a_machine_that_reported_its_disk_attached_can_mount_it(
    said: tuple[tuple[Kind, str], ...], why: str | None
) -> None:
    queries = listed(machine(0), *(fact(0, kind, value) for kind, value in said))
    assert queries.unmountable(0, 0, member(0)) == why
