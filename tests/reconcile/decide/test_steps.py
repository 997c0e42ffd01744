"""Single steps of a decision: what each writes, as values, and snapshots in which one guard alone decides."""

from __future__ import annotations

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.cloud import (
    CreateDisk,
    InsertVm,
    Offer,
    Result,
    ResultKind,
    VmStatus,
)
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import Checkpoint, Mirror, Nodes
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import BACKUP, Fetch, Hold, Mirrored, Move, Phase, Roll, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.checkpoint import location, mirrors
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import generation
from spotkeeper.reconcile.decide.job import progress
from spotkeeper.reconcile.decide.provisioning import pending, reservations, slots
from spotkeeper.reconcile.decide.queue import claim
from tests.reconcile.decide.test_decide import NOW, UID, fact, gang, intent, machine, member
from tests.reconcile.decide.test_guards import Change, calm, changed, on_cur, on_node, on_record, on_snapshot, on_spec
from tests.reconcile.world import JOB, ZONES

TIMES = Times()


def on_listing(**changes: object) -> Change:
    return lambda record, seen: (record, with_(seen, listing=replace(seen.listing, **changes)))


# -- slots


def test_a_standby_machine_that_reboots_is_admitted_again() -> None:
    slot = member(1, 2, state=SlotState.ADMITTED, disk=False, has_newest=False)
    vm = machine(1, 2)
    draft = changed(
        calm(2, fact(1, Kind.HELLO, attempt=2, gen=0, boot="c")),
        on_node(1, next=slot, top=2),
        lambda record, seen: on_listing(vms=(*seen.listing.vms, vm))(record, seen),
    )
    slots.step(draft)
    assert draft.nodes[1].next == replace(slot, since=NOW, boot="c", past=("b",))
    assert draft.nodes[1].cur == draft.before.nodes[1].cur


def test_a_machine_that_stops_without_a_notice_is_logged_as_a_loss_of_its_attempt() -> None:
    case = calm(2)
    stopping = replace(case[1].listing.vms[1], status=VmStatus.STOPPING)
    draft = changed(case, on_listing(vms=(case[1].listing.vms[0], stopping)))
    slots.step(draft)
    (entry,) = [entry for entry in draft.entries if entry.event is Event.LOSS]
    assert (entry.id, entry.node, entry.attempt, entry.cause) == ("loss.r1.a1", 1, 1, "loss")
    assert (entry.pool, entry.zone, entry.model) == ("pool", "z-a", Model.SPOT)


@pytest.mark.parametrize(
    ("kind", "change", "number"),
    [
        (ResultKind.PERMANENT, on_record(), 4),
        (ResultKind.DEAD_KEY, on_record(), 4),
        (ResultKind.CAPACITY, on_record(), 0),
        (ResultKind.PERMANENT, on_node(1, cur=None), 0),
        (ResultKind.PERMANENT, on_cur(1, machine="static"), 0),  # it uses the static machine's disk
    ],
)
def test_a_refused_disk_gets_a_number_that_was_never_used(kind: ResultKind, change: Change, number: int) -> None:
    case = calm(2)
    asked = Result(CreateDisk(JOB, UID, 1, 0, "pool", "z-a"), kind, "said")
    draft = changed(case, on_listing(disks=case[1].listing.disks[:1], results=(asked,)), on_node(1, disk_top=3), change)
    slots._disk_refused(draft, 1)
    assert (draft.nodes[1].disk, draft.nodes[1].disk_top) == (number, max(3, number))
    assert (draft.record.hold is Hold.CLOUD) is (kind is ResultKind.PERMANENT and number > 0)


def test_a_disk_that_exists_after_all_keeps_its_number() -> None:
    case = calm(2)
    asked = Result(CreateDisk(JOB, UID, 1, 0, "pool", "z-a"), ResultKind.PERMANENT, "said")
    free = replace(case[1].listing.disks[1], users=())
    draft = changed(case, on_listing(disks=(case[1].listing.disks[0], free), results=(asked,)))
    slots._disk_refused(draft, 1)
    assert draft.nodes == list(draft.before.nodes)


def test_a_machine_that_is_refused_for_good_holds_the_job() -> None:
    asked = Result(InsertVm(JOB, UID, 1, 2, "pool", "z-a", Model.SPOT), ResultKind.PERMANENT, "said")
    draft = changed(calm(2), on_node(1, cur=intent(2), top=2), on_listing(results=(asked,)))
    slots.step(draft)
    assert (draft.record.hold, draft.record.hold_until) == (Hold.CLOUD, NOW + min(slots.EARLY_S, TIMES.hold_s))
    assert draft.record.reason == "the cloud refuses to insert a machine: said"


@pytest.mark.parametrize(
    ("standby", "cause"),
    [
        ({"cause": BACKUP}, "notice"),
        ({"cause": "swap to spot"}, "swap to spot"),
        ({"cause": None}, "notice"),
        ({"zone": "z-b"}, None),  # it cannot attach the node's disk
        ({"machine": "static"}, None),  # it would begin without the newest checkpoint
    ],
)
def test_a_standby_machine_takes_over_with_its_own_cause(standby: dict[str, object], cause: str | None) -> None:
    draft = changed(calm(1), on_node(0, next=intent(2, **standby), wrote=3))
    slots.replace_cur(draft, 0, "notice")
    node = draft.nodes[0]
    assert (None if node.cur is None else (node.cur.attempt, node.cur.cause)) == (None if cause is None else (2, cause))
    assert cause is not None or (node.cause, node.vacant_since) == ("notice", NOW)


# -- requests


def test_a_new_job_gets_all_nodes_that_its_file_allows() -> None:
    record, seen = on_record(gen=0, members=())(*on_spec(nodes=Nodes(2, 3))(*gang()))
    draft = Draft(replace(record, nodes=()), seen)
    claim.step(draft)
    reservations.step(draft)
    assert [node.cur is not None for node in draft.nodes] == [True, True, False]  # the first two have grants


@pytest.mark.parametrize(
    "change",
    [
        on_record(phase=Phase.HOLD),
        on_record(move=Move("z-b", NOW)),
        on_record(pause="limit"),
        on_snapshot(draining=True),
    ],
)
def test_each_of_these_alone_prevents_a_request(change: Change) -> None:
    for changes, count in (((), 1), ((change,), 0)):
        draft = changed(calm(2), on_node(1, cur=None, vacant_since=NOW), *changes)
        reservations.step(draft)
        assert len(draft.wanted) == count


def test_the_cause_of_a_request_is_the_nodes() -> None:
    draft = changed(calm(2), on_node(1, cur=None, cause="loss", vacant_since=NOW))
    reservations.step(draft)
    (grant,) = draft.wanted
    asked = with_(draft.snapshot, allocation=replace(draft.snapshot.allocation, grants=(grant,)))
    draft = Draft(draft.whole(), asked)
    reservations.step(draft)
    cur = draft.nodes[1].cur
    assert cur is not None and (cur.attempt, cur.state, cur.cause, cur.since) == (2, SlotState.INTENT, "loss", NOW)
    (entry,) = draft.entries
    assert (entry.id, entry.cause) == ("intent.r1.a2", "loss")
    assert (entry.price, entry.on_demand) == (0.3, 1.0) and entry.detail == draft.whys["pool/z-a/spot"].partition(": ")[
        2
    ]


# -- a gang that waits for the rest


def waiting(**changes: object) -> list[Change]:
    return [
        on_record(**({"stop": True, "stop_since": NOW - 900, "short_since": NOW - TIMES.gang_s} | changes)),
        on_node(1, cur=None),
    ]


def test_machines_that_waited_for_the_rest_are_released() -> None:
    draft = changed(calm(2), *waiting())
    pending.give_back(draft)
    assert (draft.record.phase, draft.record.hold) == (Phase.HOLD, Hold.CAPACITY)
    assert draft.record.reason == "no capacity; released 1 machine that waited for the other machines"


@pytest.mark.parametrize(
    "change",
    [
        on_record(stop=False),
        on_record(gen=3, move=Move("z-b", NOW)),
        on_record(pause="limit"),
        on_snapshot(blind=True),
        on_snapshot(draining=True),
        on_record(short_since=NOW - TIMES.gang_s + 1),
        on_record(short_since=None),
        on_node(1, cur=member(1)),
        on_cur(0, model=Model.STATIC),
        on_cur(0, state=SlotState.INTENT),
        on_spec(max_wait="1h"),
    ],
)
def test_each_of_these_alone_keeps_the_machines(change: Change) -> None:
    draft = changed(calm(2), *waiting(), change)
    pending.give_back(draft)
    assert draft.record.phase is Phase.RUN


def test_a_whole_gang_waits_for_nothing() -> None:
    draft = changed(calm(2), *waiting(), on_node(1, cur=member(1)))
    pending.give_back(draft)
    assert draft.record.short_since == NOW - TIMES.gang_s, "a vacant node alone changes it"


def test_a_request_of_this_pass_keeps_the_machines() -> None:
    draft = changed(calm(2), *waiting())
    draft.wanted.append(draft.snapshot.allocation.grants[0])
    pending.give_back(draft)
    assert draft.record.phase is Phase.RUN


@pytest.mark.parametrize(
    ("change", "since"), [(on_record(), NOW), (on_node(0, cur=None), None), (on_record(short_since=NOW - 5), NOW - 5)]
)
def test_the_time_of_waiting_counts_from_the_first_machine(change: Change, since: float | None) -> None:
    draft = changed(calm(2), *waiting(short_since=None), change)
    pending.give_back(draft)
    assert draft.record.short_since == since


# -- where the newest checkpoint is


@pytest.mark.parametrize(
    ("said", "has"),
    [
        ([], True),
        ([fact(0, Kind.EXIT)], False),  # it ended and has reported no checkpoint
        ([fact(0, Kind.RELEASED), fact(0, Kind.CHECKPOINT, "3-80")], False),
        ([fact(0, Kind.RELEASED), fact(0, Kind.CHECKPOINT, "3-90")], True),
        ([fact(0, Kind.CHECKPOINT, "3-80")], True),
        ([fact(0, Kind.FULL)], False),
        ([fact(0, Kind.UNSAVED)], False),
        ([fact(0, Kind.FULL, gen=2)], True),
    ],
)
def test_a_machines_own_reports_decide_whether_it_has_the_newest(said: list[object], has: bool) -> None:
    draft = Draft(*calm(2, *said))
    assert location.has_newest(draft, 0, member(0)) is has
    assert not location.has_newest(draft, 0, member(0, disk=False))


def test_what_one_node_reports_says_nothing_of_another() -> None:
    full = changed(calm(2, fact(0, Kind.FULL)))
    assert (location.lacks(full, [0]), location.lacks(full, [1]), location.lacks(full, [0, 1])) == (True, False, False)
    told = changed(
        calm(2, fact(0, Kind.CHECKPOINT, "3-90"), fact(1, Kind.CHECKPOINT, "3-80")),
        on_cur(0, has_newest=False),
        on_cur(1, has_newest=False),
        on_snapshot(progress=Progress(3, 100, NOW)),
        on_record(gen=4),
    )
    assert (location.lacks(told, [0]), location.lacks(told, [1]), location.lacks(told, [])) == (False, True, True)


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ([], True),
        ([on_node(0, machine="other")], True),
        ([on_node(0, machine="static")], True),  # its own
        ([on_cur(1, disk=False)], False),
        ([on_node(1, machine="other")], False),  # not at home: it saves elsewhere
        ([on_node(1, machine="other"), on_node(0, machine="static")], True),
        ([on_node(1, machine="other"), on_record(gen=0)], True),
        ([on_spec(checkpoint=Checkpoint(replicated=False)), on_node(0, wrote=0)], True),
        ([on_spec(checkpoint=Checkpoint(replicated=False)), on_node(0, wrote=3)], False),
    ],
)
def test_a_replacement_may_use_another_disk_only_while_a_member_saves_to_its_own(
    changes: list[Change], may: bool
) -> None:
    assert location.may_follow(changed(calm(2), *changes), 0, "static") is may


def test_where_a_zone_does_not_answer_the_machine_says_which_disk_it_has() -> None:
    silent = on_listing(answered=frozenset(ZONES) - {"z-a"})
    for told, has in ((fact(0, Kind.ATTACHED, "0"), True), (fact(0, Kind.ATTACHED, "1"), False),
                      (fact(0, Kind.CHECKPOINT, "0"), False)):  # fmt: skip
        draft = changed(calm(1, told), silent)
        assert draft.queries.attached(0, 0, member(0)) is has


# -- copies in the bucket


FETCHES = (
    on_spec(checkpoint=Checkpoint(mirror=Mirror(every_min=1.0))),
    on_record(stop=True, stop_since=NOW, mirror=(Mirrored("2-90", 0, NOW),)),
    on_cur(0, has_newest=False),
    on_snapshot(progress=Progress(3, 100, NOW, commit_gen=2, commit_step=90)),
)


def fetching(*said: object, fetch: Fetch | None = None, copy: str = "2-90") -> Draft:
    case = calm(1, fact(0, Kind.ATTACHED), *said)
    return changed(case, *FETCHES, on_record(mirror=(Mirrored(copy, 0, NOW),), fetch=fetch))


FETCH = Fetch("2-90", 0, (0,))


def test_a_generation_waits_for_the_newest_copy() -> None:
    draft = fetching()
    assert mirrors.awaited(draft, [0]) and draft.record.fetch == FETCH
    assert draft.record.reason == (
        "fetching checkpoint 2-90 from the bucket: no disk has this checkpoint or a newer one"
    )
    assert [(entry.id, entry.detail) for entry in draft.entries] == [
        ("fetch.v41", "checkpoint 2-90, the newest that was reported")
    ]
    two = changed(calm(2, fact(0, Kind.ATTACHED), fact(1, Kind.ATTACHED)), *FETCHES, on_cur(1, has_newest=False))
    assert mirrors.awaited(two, [0, 1]) and two.record.fetch == FETCH, "the other receives it from node 0"
    again = fetching(fetch=FETCH)
    assert mirrors.awaited(again, [0]) and again.entries == [], "it is logged once"


def test_an_older_copy_is_not_fetched_while_the_newest_commit_may_come_back() -> None:
    draft = fetching(copy="2-50", fetch=FETCH)
    assert not mirrors.awaited(draft, [0])
    assert draft.record.fetch is None and draft.entries == []


@pytest.mark.parametrize(("waited_s", "fetches"), [(TIMES.disk_s, True), (TIMES.disk_s - 0.1, False)])
def test_an_older_copy_is_fetched_once_the_disk_with_the_newest_had_time_to_come(
    waited_s: float, fetches: bool
) -> None:
    since = NOW - waited_s
    older = on_record(mirror=(Mirrored("2-50", 0, NOW),), stop_since=since)
    case = calm(1, fact(0, Kind.ATTACHED), fact(0, Kind.CHECKPOINT, "1-30"))
    draft = changed(case, *FETCHES, older, on_cur(0, since=since), on_node(0, wrote=2, newest_generation=2))
    assert mirrors.lost(draft, [0])
    generation._begin(draft, [0])
    assert (draft.record.fetch == Fetch("2-50", 0, (0,))) is fetches


def test_a_fetch_is_remembered_once_it_is_there() -> None:
    there = fetching(fact(0, Kind.CHECKPOINT, "2-90"), fact(0, Kind.FETCHED, "2-90"), fetch=FETCH)
    assert mirrors._there(there, [0]) and not mirrors.awaited(there, [0]) and there.record.fetch == FETCH
    other = fetching(fact(0, Kind.CHECKPOINT, "2-90"), fact(0, Kind.FETCHED, "2-80"), fetch=FETCH)
    assert not mirrors._there(other, [0]) and not mirrors.awaited(other, [0]) and other.record.fetch is None


def test_only_a_report_of_the_fetch_counts_as_fetched() -> None:
    draft = fetching(fact(0, Kind.CHECKPOINT, "2-90"), fetch=FETCH)
    assert generation._fresh(draft, [0]) == set()
    draft = fetching(fact(0, Kind.FETCHED, "2-90"), fetch=FETCH)
    assert generation._fresh(draft, [0]) == {0}


# -- a generation


def test_a_node_that_is_left_out_keeps_its_machine_without_a_disk() -> None:
    draft = changed(calm(3), on_node(2, cur=None, cause="loss"), on_record(stop=True, stop_since=NOW))
    generation._publish(draft, [0])
    assert draft.record.members == (0,) and draft.record.gen == 4
    assert draft.nodes[1] == replace(draft.before.nodes[1], cur=member(1, disk=False, has_newest=False))
    assert draft.nodes[2] == draft.before.nodes[2]
    first = replace(draft.before.nodes[0], wrote=4, newest_generation=4)
    assert draft.nodes[0] == first


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ([], True),
        ([on_cur(0, state=SlotState.ADMITTED)], False),  # a member is missing: its replacement comes first
        ([on_node(0, replace_reason="user")], False),
        ([on_cur(1, notice=NOW + 60)], False),
        ([on_cur(2, state=SlotState.INTENT)], False),
        ([on_node(2, cur=None)], False),
        ([on_snapshot(progress=None)], False),  # a stop would lose all steps
        ([on_snapshot(progress=None), on_cur(2, cause="resize")], True),
        ([on_record(roll=Roll(40, NOW, "silence"))], False),
        ([on_record(pause="user")], False),
        ([on_record(move=Move("z-b", NOW))], False),
    ],
)
def test_a_generation_stops_once_for_the_nodes_that_it_lacks(changes: list[Change], stops: bool) -> None:
    coming = member(2, state=SlotState.ADMITTED, disk=False, has_newest=False)
    draft = changed(calm(3), on_record(members=(0, 1)), on_node(2, cur=coming), *changes)
    generation.step(draft)
    assert draft.record.stop is stops
    assert draft.record.stop_deadline == (NOW + 5 + TIMES.stop_s if stops else None)
    assert [(entry.id, entry.cause) for entry in draft.entries] == [("stop.g3", "grow")] * stops


@pytest.mark.parametrize(
    ("cur", "cause"),
    [
        ({}, "stop withdrawn"),
        ({"state": SlotState.ADMITTED, "past": ("a",)}, "reboot"),
        ({"state": SlotState.ADMITTED}, "grow"),
        ({"state": SlotState.ADMITTED, "cause": "start"}, "grow"),
        ({"state": SlotState.ADMITTED, "cause": "loss"}, "loss"),
    ],
)
def test_a_generation_begins_for_what_is_new_in_it(cur: dict[str, object], cause: str) -> None:
    draft = changed(calm(2), on_cur(1, **cur), on_record(stop=True, stop_since=NOW))
    assert generation._cause(draft, [0, 1]) == cause


@pytest.mark.parametrize(
    ("node", "cur", "model", "cause"),
    [
        ({"replace_reason": "spot"}, {}, Model.SPOT, "swap to spot"),
        ({"replace_reason": "spot"}, {}, Model.ON_DEMAND, "swap"),
        ({"replace_reason": "user"}, {}, Model.SPOT, "swap"),
        ({"replace_reason": "straggler"}, {}, Model.SPOT, "swap of a straggler"),
        ({"replace_reason": "spot"}, {"notice": NOW + 9}, Model.SPOT, "notice"),
        ({"replace_reason": "spot"}, {"notice": NOW + 9, "cut": True}, Model.SPOT, "loss"),
    ],
)
def test_a_following_machine_says_what_it_follows(
    node: dict[str, object], cur: dict[str, object], model: Model, cause: str
) -> None:
    draft = changed(calm(1), on_node(0, **node), on_cur(0, **cur))
    assert reservations._cause(draft.nodes[0], "next", Offer("pool", "z-a", model, 0.3)) == cause


# -- work and slack


@pytest.mark.parametrize(
    ("left", "work", "planned"),
    [
        (1800.0, None, 7.5),  # without `work`, all of it is what is left
        (1800.0, "2h", 1.5),
        (None, "2h", 6.0),
        (7200.0, "1h", 6.0),
    ],
)
def test_the_slack_that_was_planned_is_in_proportion_to_what_is_left(
    left: float | None, work: str | None, planned: float
) -> None:
    draft = changed(calm(1, deadline="8h", work=work), on_record(created=NOW - 3600), on_snapshot(left_s=left))
    found = progress.work(draft)
    assert found is not None and found.planned_h == pytest.approx(planned)
