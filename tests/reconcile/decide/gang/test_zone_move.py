"""A move to another zone: why it is refused, what it writes, and what ends it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.cloud import (
    Action,
    CreateDisk,
    CreateSnapshot,
    DiskSnapshot,
    InsertVm,
    Result,
    ResultKind,
)
from spotkeeper.contract.record import Move, Moved, Phase, Roll, ZoneRequest
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import zone_move
from tests.reconcile.decide.test_decide import NOW, UID, intent
from tests.reconcile.decide.test_guards import Change, calm, changed, on_cur, on_node, on_record, on_snapshot, on_spec
from tests.reconcile.decide.test_steps import on_listing
from tests.reconcile.world import JOB, STACK

TIMES = Times()
DISK = CreateDisk(JOB, UID, 0, 1, "pool", "z-b")
COPY = CreateSnapshot(JOB, UID, 0, 0, "z-a", 1)


ZONES = frozenset({"z-a", "z-b", "z-c"})


def moving(
    *results: Result, waits: bool = True, since: float = NOW - 60, answered: Set[str] = ZONES, **more: object
) -> Draft:
    there = intent(2, zone="z-b") if waits else None
    return changed(
        calm(2),
        on_record(move=Move("z-b", since, **more)),  # type: ignore[arg-type]
        on_node(0, copy=1, disk_top=1, next=there),
        on_node(1, copy=1, disk_top=1),
        on_listing(results=results, answered=frozenset(answered)),
    )


@pytest.mark.parametrize(
    ("action", "kind", "detail", "why"),
    [
        (DISK, ResultKind.PERMANENT, "said", "said"),
        (DISK, ResultKind.PERMANENT, "", "permanent"),
        (COPY, ResultKind.PERMANENT, "said", "said"),
        (DISK, ResultKind.AMBIGUOUS, "said", ""),
        (replace(DISK, job="other234"), ResultKind.PERMANENT, "said", ""),
        (replace(DISK, number=2), ResultKind.PERMANENT, "said", ""),
        (replace(COPY, copy=0), ResultKind.PERMANENT, "said", ""),
        (InsertVm(JOB, UID, 0, 2, "pool", "z-b", Model.SPOT), ResultKind.PERMANENT, "said", ""),
    ],
)
def test_a_refused_copy_ends_a_move(action: Action, kind: ResultKind, detail: str, why: str) -> None:
    assert zone_move._refused(moving(Result(action, kind, detail))) == why
    assert zone_move._refused(moving(Result(action, kind, detail), waits=False)) == why


@pytest.mark.parametrize(("waits", "since", "ends"), [(True, NOW, True), (False, NOW, False), (False, NOW - 300, True)])
def test_a_gang_in_a_dry_zone_tries_a_refused_copy_again_for_a_time(waits: bool, since: float, ends: bool) -> None:
    refused = Result(DISK, ResultKind.PERMANENT, "said")
    assert zone_move._refused(moving(refused, waits=waits, since=since, dry=True)) == ("said" if ends else "")


@pytest.mark.parametrize(
    ("silent_since", "answered", "why", "then"),
    [
        (None, ZONES, "", None),
        (None, {"z-a", "z-c"}, "", NOW),
        (NOW - 119, {"z-a", "z-c"}, "", NOW - 119),
        (NOW - 120, {"z-a", "z-c"}, "z-b has not answered for 2 min", NOW - 120),
        (NOW - 120, {"z-a", "z-b"}, "", None),
        (NOW - 120, {"z-c"}, "", NOW - 120),
    ],
    ids=["answers", "falls silent", "not for long", "too long", "answers again", "home is silent too"],
)
def test_a_zone_that_falls_silent_ends_a_move_there(
    silent_since: float | None, answered: set[str], why: str, then: float | None
) -> None:
    draft = moving(silent_since=silent_since, answered=answered)
    assert zone_move._silent(draft) == why
    assert draft.record.move is not None and draft.record.move.silent_since == then
    zone_move.step(draft)
    assert (draft.record.move is None) == bool(why)
    if why:
        assert [(entry.cause, entry.detail) for entry in draft.entries] == [("refused", why)]


@pytest.mark.parametrize("action", [DISK, COPY])
def test_a_copy_that_exists_after_all_ends_no_move(action: Action) -> None:
    draft = moving(Result(action, ResultKind.PERMANENT, "said"))
    disk = replace(draft.snapshot.listing.disks[0], name=names.disk_name(STACK, JOB, 0, 1), zone="z-b", number=1)
    made = replace(disk, ready=False, users=())
    copy = DiskSnapshot(made.name, JOB, 0, 1, ready=False)
    listing = replace(draft.snapshot.listing, disks=(*draft.snapshot.listing.disks, made), snapshots=(copy,))
    assert zone_move._refused(Draft(draft.before, with_(draft.snapshot, listing=listing))) == ""


def test_copies_that_take_too_long_end_a_move() -> None:
    assert zone_move._refused(moving(since=NOW - zone_move.COPIES_S)) == ""
    late = f"the disks were not copied within {zone_move.COPIES_S / 60:.0f} min"
    assert zone_move._refused(moving(since=NOW - zone_move.COPIES_S - 1)) == late


@pytest.mark.parametrize(
    ("changes", "zone", "why"),
    [
        ([], "z-b", ""),
        ([], "z-a", "the job is in z-a already"),
        ([], None, "None is not a zone of the job's pools (z-a, z-b, z-c)"),
        ([], "z-x", "z-x is not a zone of the job's pools (z-a, z-b, z-c)"),
        ([on_spec(pools=("other",))], "z-b", "z-b is not a zone of the job's pools ()"),
        (
            [on_listing(answered=frozenset({"z-a"}))],
            "z-b",
            "the cloud does not answer for z-b: request the move again later",
        ),
        ([on_spec(spread=True)], "z-b", "only a gang in one zone can move"),
        ([on_snapshot(spec=None)], "z-b", "only a gang in one zone can move"),
        ([on_record(zone=None)], "z-b", "only a gang in one zone can move"),
        ([on_cur(0, model=Model.STATIC)], "z-b", "a static machine pins the gang to its zone"),
        ([on_record(phase=Phase.HOLD)], "z-b", "the job is on hold"),
        ([on_record(pause="limit")], "z-b", "the job is on hold"),
        ([on_record(move=Move("z-c", NOW))], "z-b", "the job is already moving to z-c"),
        (
            [on_node(0, machine="m", wrote=3)],
            "z-b",
            "the newest checkpoint is only on static machine m, which cannot move",
        ),
    ],
)
def test_why_a_move_is_refused(changes: list[Change], zone: str | None, why: str) -> None:
    draft = changed(calm(2), *changes)
    assert zone_move.take(draft, zone) == why
    if why:
        assert (draft.whole(), draft.entries) == (draft.before, [])


@pytest.mark.parametrize(("asked", "left"), [("z-b", None), ("z", None), ("z-c", ZoneRequest("z-c", NOW))])
def test_a_move_answers_the_request_for_its_zone_and_no_other(asked: str, left: ZoneRequest | None) -> None:
    draft = changed(calm(2), on_record(asked_zone=ZoneRequest(asked, NOW)))
    zone_move.begin(draft, "z-b", "stockout")
    assert draft.record.asked_zone == left


def test_a_move_stops_the_gang_and_is_logged() -> None:
    draft = changed(
        calm(2), on_node(0, next=intent(2), replace_reason="user"), on_record(dry_since=NOW, roll=Roll(40, NOW, "x"))
    )
    draft.set(asked_zone=ZoneRequest("z", NOW))
    zone_move.begin(draft, "z-b", "asked")
    record = draft.record
    assert (record.move, record.roll, record.dry_since) == (Move("z-b", NOW), None, None)
    assert record.asked_zone is None
    assert (record.stop, record.stop_deadline) == (True, NOW + 5 + TIMES.stop_s)
    assert [(node.next, node.replace_reason) for node in draft.nodes] == [(None, None)] * 2
    assert [(entry.id, entry.cause, entry.detail) for entry in draft.entries] == [
        ("stop.g3", "move", ""),
        ("move.v41", "asked", "z-a -> z-b"),
    ]


@pytest.mark.parametrize("zone", [None, "z-a"])
def test_a_move_is_cancelled_by_its_own_zone_or_by_none(zone: str | None) -> None:
    draft = moving()
    assert zone_move.take(draft, zone) == ""
    assert draft.record.move is None
    assert [(node.next, node.copy) for node in draft.nodes] == [(None, None)] * 2
    assert [(entry.id, entry.cause, entry.detail) for entry in draft.entries] == [("move.cancel.v41", "cancelled", "")]


@pytest.mark.parametrize(("until", "then"), [(NOW + 900, NOW), (NOW - 900, NOW - 900)])
def test_a_gang_that_has_moved_uses_the_copies_and_the_machine_that_waits(until: float, then: float) -> None:
    draft = moving()
    draft.set(fallback_until=until)
    zone_move._arrive(draft)
    record = draft.record
    assert (record.move, record.zone, record.moved) == (None, "z-b", Moved(NOW, 60.0))
    assert record.fallback_until == then, "a fallback was about the old zone"
    assert [(node.disk, node.copy, node.zone, node.next) for node in draft.nodes] == [(1, None, "z-b", None)] * 2
    cur = draft.nodes[0].cur
    assert cur is not None and (cur.attempt, cur.cause) == (2, "move")
    entry = draft.entries[-1]
    assert (entry.id, entry.cause, entry.detail) == ("move.done.v41", "move", "the disks are in z-b")
