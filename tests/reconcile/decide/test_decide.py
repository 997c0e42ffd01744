"""One pass at a time: what ``decide()`` asks for, from plain values."""

from __future__ import annotations

import random
from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import (
    AttachDisk,
    CreateDisk,
    DeleteVm,
    DetachDisk,
    Disk,
    DiskSnapshot,
    InsertVm,
    Listing,
    Result,
    ResultKind,
    Vm,
    VmStatus,
)
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Move, Node, Phase, Record, Roll, Slot, SlotState
from spotkeeper.contract.stack import Model, PoolState
from spotkeeper.reconcile.decide import Decision, Snapshot, Times, calls, decide
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import exits
from spotkeeper.reconcile.store.documents import OfferHistory
from tests.reconcile.world import JOB, STACK, ZONES, stack

NOW = 10_000.0
UID = "00000000-0000-0000-0000-000000000001"


def machine(node: int, attempt: int = 1, **more: object) -> Vm:
    name = names.vm_name(STACK, JOB, node, attempt)
    base = Vm(name, f"u{node}-{attempt}", "z-a", VmStatus.RUNNING, "pool", JOB, node, attempt, f"10.0.0.{node}")
    return replace(base, **more)


def member(node: int, attempt: int = 1, **more: object) -> Slot:
    who = (f"u{node}-{attempt}", "b", f"10.0.0.{node}")
    slot = Slot(attempt, SlotState.MEMBER, "pool", "z-a", Model.SPOT, NOW - 900, None, *who, disk=True, has_newest=True)
    return replace(slot, **more)


def intent(attempt: int, **more: object) -> Slot:
    return replace(Slot(attempt, SlotState.INTENT, "pool", "z-a", Model.SPOT, NOW - 5), **more)


def fact(node: int, kind: Kind, value: str = "0", gen: int = 3, attempt: int = 1, boot: str = "b") -> Fact:
    return Fact(f"u{node}-{attempt}", boot, node, attempt, gen, kind, value)


def gang(count: int = 2, **more: object) -> tuple[Record, Snapshot]:
    """A job that trains in generation 3, all well."""
    nodes = tuple(Node(top=1, cur=member(node), zone="z-a") for node in range(count))
    record = Record(
        job=JOB,
        uid=UID,
        name="j",
        spec_sha256="",
        created=0.0,
        ver=40,
        gen=3,
        gen_since=NOW - 30,
        zone="z-a",
        nodes=nodes,
    )
    record = replace(record, members=tuple(range(count)), **more)
    disks = tuple(
        Disk(names.disk_name(STACK, JOB, node, 0), "z-a", JOB, node, 0, (machine(node).name,)) for node in range(count)
    )
    vms = tuple(machine(node, disks=(disks[node].name,)) for node in range(count))
    grants = tuple(Grant(JOB, node, 1, "slot:pool") for node in range(count))
    listing = Listing(vms, disks, (), frozenset(ZONES))
    facts = tuple(fact(node, Kind.HELLO, gen=0) for node in range(count))
    return record, Snapshot(
        stack(), JobSpec("j", ("x",), count), listing, NOW, facts, allocation=Allocation(1, "", grants), save_s=5.0
    )


def granted(snapshot: Snapshot, decision: Decision) -> Snapshot:
    assert decision.grants is not None
    return with_(snapshot, allocation=decision.grants)


def events(decision: Decision) -> list[Event]:
    assert decision.record is not None
    return [entry.event for entry in decision.record.outbox]


# -- the form of a pass


def test_a_healthy_job_causes_no_action() -> None:
    record, snapshot = gang()
    decision = decide(record, snapshot)
    assert decision.quiet
    assert decision.due is None


def test_a_pass_is_pure_and_independent_of_the_order_of_its_input() -> None:
    record, snapshot = gang(4)
    facts = [*snapshot.facts, fact(1, Kind.NOTICE, "10100"), fact(3, Kind.NOTICE, "10050"), fact(0, Kind.EXIT, "1")]
    first = decide(record, with_(snapshot, facts=tuple(facts)))
    for seed in range(5):
        mixed = random.Random(seed)  # noqa: S311
        mixed.shuffle(facts)
        vms = list(snapshot.listing.vms)
        mixed.shuffle(vms)
        again = with_(snapshot, facts=tuple(facts), listing=replace(snapshot.listing, vms=tuple(vms)))
        assert decide(record, again) == first


def test_a_pass_does_exactly_one_thing_grants_first_then_the_record_then_calls() -> None:
    record, snapshot = gang()
    snapshot = with_(snapshot, listing=replace(snapshot.listing, vms=snapshot.listing.vms[:1]))
    one = decide(record, snapshot)
    assert one.grants is not None and one.record is None and not one.actions
    assert Grant(JOB, 1, 2, "slot:pool", NOW, "z-a") in one.grants.grants
    two = decide(record, granted(snapshot, one))
    assert two.record is not None and two.grants is None and not two.actions
    assert two.record.ver == record.ver + 1
    assert (two.record.stop, two.record.stop_deadline) == (True, NOW)
    cur = two.record.nodes[1].cur
    assert cur is not None and (cur.attempt, cur.state, cur.cause) == (2, SlotState.INTENT, "loss")
    assert sorted(events(two)) == sorted([Event.LOSS, Event.STOP, Event.INTENT])
    three = decide(two.record, granted(snapshot, one))
    assert three.grants is not None and [entry.id for entry in three.noted] == ["gone.r1.a1"]
    four = decide(two.record, granted(snapshot, three))
    assert InsertVm(JOB, UID, 1, 2, "pool", "z-a", Model.SPOT) in four.actions


def test_a_grant_without_an_intent_is_released_after_its_number_is_burnt() -> None:
    """Another round may be about to write the very intent, for it still finds the offer: its grant must stand."""
    record, snapshot = gang()
    left = Grant(JOB, 1, 2, "slot:pool", NOW - 3)  # of a round that ended before it wrote the intent
    nodes = (record.nodes[0], replace(record.nodes[1], cur=None))
    record = replace(record, stop=True, stop_deadline=NOW - 1, nodes=nodes)
    allocation = replace(snapshot.allocation, grants=(snapshot.allocation.grants[0], left))
    snapshot = with_(snapshot, listing=replace(snapshot.listing, vms=snapshot.listing.vms[:1]), allocation=allocation)
    dear = with_(snapshot, market=(OfferHistory("pool", "z-a", Model.SPOT, price=99.0),))
    first = decide(record, dear)
    assert first.grants is not None
    assert left in first.grants.grants
    other = decide(record, snapshot).record
    assert other is not None
    assert other.nodes[1].cur is not None
    assert other.nodes[1].cur.attempt == left.attempt
    second = decide(record, granted(dear, first)).record
    assert second is not None
    assert second.nodes[1].top == left.attempt + 1
    third = decide(second, granted(dear, first))
    assert third.grants is not None
    assert left not in third.grants.grants


def test_a_lost_race_for_the_allocation_does_not_hold_up_the_record() -> None:
    record, snapshot = gang()
    snapshot = with_(snapshot, listing=replace(snapshot.listing, vms=snapshot.listing.vms[:1]), grants_first=False)
    decision = decide(record, snapshot)
    assert decision.record is not None
    assert decision.record.nodes[1].cur is None
    assert decision.record.stop


def test_entries_have_the_same_ids_however_often_a_pass_is_repeated() -> None:
    record, snapshot = gang()
    snapshot = with_(snapshot, listing=replace(snapshot.listing, vms=snapshot.listing.vms[:1]))
    snapshot = granted(snapshot, decide(record, snapshot))
    ids = [[entry.id for entry in decide(record, with_(snapshot, now=NOW + late)).record.outbox] for late in (0, 7)]  # type: ignore[union-attr]
    assert ids[0] == ids[1] == ["loss.r1.a1", "stop.g3", "intent.r1.a2"]


@pytest.mark.parametrize("hours", [0.1, 30.0])
def test_a_finished_node_is_no_crash_while_another_evaluates(hours: float) -> None:
    """The others ended after the loop; after three minutes without a step it was called one, until all retries were
    gone: a trained job had failed. Later it was so after an hour, also for a script that tells of no steps at all."""
    record, snapshot = gang()
    record = replace(record, roll=Roll(ver=40, since=NOW - 1, cause="silence"))
    facts = (*snapshot.facts, fact(1, Kind.EXIT, "0"), fact(0, Kind.HERE, "40"), fact(1, Kind.HERE, "40"))
    now = record.gen_since + 3600.0 * hours
    decision = decide(replace(record, roll=replace(record.roll, since=now - 1)), with_(snapshot, facts=facts, now=now))
    assert decision.record is not None
    assert decision.record.roll is None
    assert not decision.record.outbox


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        ({0: "peer-2000-0", 1: "own-3000-0", 2: "own-2500-1"}, 2),
        ({0: "own-1000-0", 1: "peer-900-0", 2: "peer-1100-0"}, 0),
        ({0: "peer-2000-0", 2: "peer-2500-0"}, 1),  # of whom nothing is known was killed
        ({}, 1),
    ],
)
def test_the_first_independent_failure_is_the_cause(told: dict[int, str], cause: int) -> None:
    """All but a killed one exit with 1: the lowest node was said to have failed, which had only lost its peer."""
    record, snapshot = gang(3)
    record = replace(record, roll=Roll(ver=40, since=NOW - 1, cause="exit", exits=True))
    exits = [fact(node, Kind.EXIT, "137" if node == 1 else "1") for node in range(3)]
    facts = [fact(node, Kind.HERE, "40") for node in range(3)] + exits
    facts += [fact(node, Kind.FAILED, value) for node, value in told.items()]
    decision = decide(record, with_(snapshot, facts=(*snapshot.facts, *facts)))
    assert decision.record is not None
    crash, stop = decision.record.outbox[:2]
    assert (crash.event, crash.node, crash.cause) == (Event.CRASH, cause, "crash")
    assert (stop.event, stop.id, stop.cause) == (Event.STOP, "stop.g3", "crash")


# -- losses are proved


@pytest.mark.parametrize("status", [VmStatus.DEAD, None])
def test_a_missing_member_is_a_loss_only_if_its_zone_answered(status: VmStatus | None) -> None:
    record, snapshot = gang()
    vms = [vm for vm in snapshot.listing.vms if vm.node == 0]
    if status is not None:
        vms.append(machine(1, status=status))
    listing = replace(snapshot.listing, vms=tuple(vms))
    assert not decide(record, with_(snapshot, listing=listing)).quiet
    blind = replace(listing, answered=frozenset(ZONES) - {"z-a"})
    assert decide(record, with_(snapshot, listing=blind)).quiet


def test_the_right_name_with_another_unique_id_is_not_ours() -> None:
    record, snapshot = gang()
    listing = replace(snapshot.listing, vms=(snapshot.listing.vms[0], machine(1, uid="impostor")))
    snapshot = with_(snapshot, listing=listing)
    decision = decide(record, granted(snapshot, decide(record, snapshot)))
    assert decision.record is not None
    after = decide(decision.record, granted(snapshot, decide(record, snapshot)))
    assert DeleteVm(machine(1).name, "impostor", "z-a") in after.actions


def test_a_machine_found_stopping_without_a_notice_has_a_short_one() -> None:
    """GCE stops a preempted machine while it still saves; its report may come after the listing."""
    record, snapshot = gang()
    listing = replace(snapshot.listing, vms=(snapshot.listing.vms[0], machine(1, status=VmStatus.STOPPING)))
    snapshot = with_(snapshot, listing=listing)
    decision = decide(record, granted(snapshot, decide(record, snapshot)))
    assert decision.record is not None
    cur = decision.record.nodes[1].cur
    assert cur is not None and cur.state is SlotState.MEMBER
    assert cur.notice == NOW + Times().stopping_s
    assert decision.record.nodes[1].next is not None


@pytest.mark.parametrize("warned", [True, False])
@pytest.mark.parametrize("answered", [True, False])
def test_a_stop_is_for_a_notice_only_where_one_was_given(warned: bool, answered: bool) -> None:
    """A machine killed at once ends its processes before it is gone, perhaps after it answered a roll call."""
    record, snapshot = gang()
    facts = (*snapshot.facts, fact(1, Kind.EXIT, "143"))
    if warned:
        facts = (*facts, fact(1, Kind.NOTICE, f"{NOW + 60:.0f}"))
    if answered:
        record = replace(record, roll=Roll(ver=40, since=NOW - 1, cause="exit", exits=True))
        facts = (*facts, fact(0, Kind.HERE, "40"), fact(1, Kind.HERE, "40"))
    listing = replace(snapshot.listing, vms=(snapshot.listing.vms[0], machine(1, status=VmStatus.STOPPING)))
    snapshot = with_(snapshot, listing=listing, facts=facts)
    decision = decide(record, granted(snapshot, decide(record, snapshot)))
    assert decision.record is not None
    causes = [entry.cause for entry in decision.record.outbox if entry.event is Event.STOP]
    assert causes == ["notice" if warned else "loss"]


def test_a_machine_not_yet_listed_is_not_admitted() -> None:
    record, snapshot = gang(1)
    record = replace(record, gen=0, members=(), nodes=(Node(top=1, cur=intent(1), zone="z-a"),))
    nowhere = replace(snapshot.listing, vms=(), disks=())
    assert [type(a) for a in decide(record, with_(snapshot, listing=nowhere)).actions] == [InsertVm]
    pending = replace(snapshot.listing, vms=(machine(0, status=VmStatus.PENDING),), disks=())
    assert decide(record, with_(snapshot, listing=pending)).quiet
    running = replace(snapshot.listing, vms=(machine(0),), disks=())
    admitted = decide(record, with_(snapshot, listing=running)).record
    assert admitted is not None and admitted.nodes[0].cur is not None
    assert (admitted.nodes[0].cur.uid, admitted.nodes[0].cur.boot) == ("u0-1", "b")


# -- intents


@pytest.mark.parametrize("kind", [ResultKind.AMBIGUOUS, ResultKind.THROTTLED, ResultKind.ACCEPTED])
def test_a_retry_repeats_the_intent_as_it_is(kind: ResultKind) -> None:
    record, snapshot = gang(1)
    record = replace(record, nodes=(Node(top=4, cur=intent(4, zone="z-b"), zone="z-b"),), stop=True, stop_deadline=NOW)
    call = InsertVm(JOB, UID, 0, 4, "pool", "z-b", Model.SPOT)
    snapshot = with_(snapshot, allocation=Allocation(1, "", (Grant(JOB, 0, 4, "slot:pool"),)))
    snapshot = with_(snapshot, listing=Listing((), (), (), frozenset(ZONES), (Result(call, kind),)))
    assert decide(record, snapshot).actions == (call,)


@pytest.mark.parametrize("why", ["dead key", "dead", "stopping", "late"])
def test_a_failed_intent_burns_its_number(why: str) -> None:
    record, snapshot = gang(1)
    record = replace(record, nodes=(Node(top=4, cur=intent(4), zone="z-a"),), stop=True, stop_deadline=NOW)
    call = InsertVm(JOB, UID, 0, 4, "pool", "z-a", Model.SPOT)
    status = {"dead": VmStatus.DEAD, "stopping": VmStatus.STOPPING}.get(why, VmStatus.PENDING)
    vms = () if why == "dead key" else (machine(0, 4, status=status),)
    results = (Result(call, ResultKind.DEAD_KEY),) if why == "dead key" else ()
    grants = (Grant(JOB, 0, 4, "slot:pool"), Grant(JOB, 0, 5, "slot:pool"))
    snapshot = with_(
        snapshot, listing=Listing(vms, (), (), frozenset(ZONES), results), allocation=Allocation(1, "", grants)
    )
    if why == "late":
        snapshot = with_(snapshot, now=NOW + 300)
    decision = decide(record, snapshot)
    assert decision.record is not None and decision.record.nodes[0].cur is not None
    assert decision.record.nodes[0].cur.attempt == decision.record.nodes[0].top == 5


def test_a_grant_found_pending_is_used_and_one_not_wanted_is_burnt_then_released() -> None:
    record, snapshot = gang(1)
    extra = Grant(JOB, 0, 2, "slot:pool")
    snapshot = with_(snapshot, allocation=replace(snapshot.allocation, grants=(*snapshot.allocation.grants, extra)))
    burnt = decide(record, snapshot)
    assert burnt.record is not None
    assert burnt.record.nodes[0].top == 2
    released = decide(burnt.record, snapshot)
    assert released.grants is not None
    assert extra not in released.grants.grants
    assert [entry.id for entry in released.noted] == ["gone.r0.a2"]


def test_a_slot_is_kept_while_its_machine_is_listed_or_a_zone_is_silent() -> None:
    record, snapshot = gang(1)
    record = replace(record, nodes=(Node(top=2, cur=member(0, 2), zone="z-a"),))
    old = machine(0, 1, status=VmStatus.STOPPING)
    both = (Grant(JOB, 0, 1, "slot:pool"), Grant(JOB, 0, 2, "slot:pool"))
    snapshot = with_(snapshot, allocation=Allocation(1, "", both))
    listing = Listing((old, machine(0, 2)), (), (), frozenset(ZONES))
    assert decide(record, with_(snapshot, listing=listing)).grants is None
    half = replace(listing, vms=(machine(0, 2),), answered=frozenset({"z-a"}))
    assert decide(record, with_(snapshot, listing=half)).grants is None
    gone = replace(listing, vms=(machine(0, 2),))
    released = decide(record, with_(snapshot, listing=gone)).grants
    assert released is not None
    assert [grant.attempt for grant in released.grants] == [2]


# -- disks: the attachment is the mutex


def lone(cur: Slot, disks: tuple[Disk, ...], vms: tuple[Vm, ...], **more: object) -> tuple[Record, Snapshot]:
    record, snapshot = gang(1)
    record = replace(record, stop=True, stop_deadline=NOW, nodes=(Node(top=cur.attempt, cur=cur, zone="z-a", **more),))  # type: ignore[arg-type]
    grants = tuple(Grant(JOB, 0, vm.attempt, "slot:pool") for vm in vms)
    return record, with_(
        snapshot, listing=Listing(vms, disks, (), frozenset(ZONES)), allocation=Allocation(1, "", grants)
    )


DISK = Disk(names.disk_name(STACK, JOB, 0, 0), "z-a", JOB, 0, 0)
NEW = member(0, 2, state=SlotState.ADMITTED, disk=False, has_newest=False, since=NOW, cause="notice")


def test_a_free_disk_is_attached_to_cur() -> None:
    record, snapshot = lone(NEW, (DISK,), (machine(0, 2),))
    assert decide(record, snapshot).actions == (AttachDisk(DISK.name, machine(0, 2).name, "u0-2", "z-a"),)


def test_a_used_disk_is_detached_early_only_after_freed() -> None:
    old = machine(0, 1, disks=(DISK.name,))
    held = replace(DISK, users=(old.name,))
    record, snapshot = lone(NEW, (held,), (old, machine(0, 2)))
    assert decide(record, snapshot).actions == (), "it has a moment to unmount"
    freed = with_(snapshot, facts=(fact(0, Kind.FREED, "0"),))
    assert decide(record, freed).actions == (DetachDisk(DISK.name, old.name, "u0-1", "z-a"),)
    other = with_(snapshot, facts=(fact(0, Kind.FREED, "9"),))
    assert decide(record, other).actions == (), "it let go of another disk"
    late = with_(snapshot, now=NOW + 21)
    assert decide(record, late).actions == (DeleteVm(old.name, "u0-1", "z-a"),)


def test_a_vanished_machine_is_not_waited_for() -> None:
    old = machine(0, 1, disks=(DISK.name,))
    record, snapshot = lone(replace(NEW, cause="loss"), (replace(DISK, users=(old.name,)),), (old, machine(0, 2)))
    assert decide(record, snapshot).actions == (DeleteVm(old.name, "u0-1", "z-a"),)


def test_no_disk_is_created_before_the_machine_runs_or_if_one_exists_elsewhere() -> None:
    record, snapshot = lone(intent(2), (), (machine(0, 2, status=VmStatus.PENDING),))
    assert decide(record, snapshot).actions == ()
    record, snapshot = lone(NEW, (), (machine(0, 2),))
    assert [type(a) for a in decide(record, snapshot).actions] == [CreateDisk]
    record, snapshot = lone(NEW, (replace(DISK, zone="z-b"),), (machine(0, 2),))
    assert decide(record, snapshot).actions == ()


@pytest.mark.parametrize(
    ("changes", "allowed", "named"),
    [
        (({}, {}), (), "one"),
        (({}, {}), ("two",), "two"),
        (({"kind": "static"}, {}), (), "two"),
        (({"zones": ("z-a",)}, {}), (), "two"),
        (({}, {}), ("gone",), "one"),  # the disks move with the gang, whatever pool its machines are from
        (({"zones": ("z-a",)}, {"kind": "static"}), (), ""),  # the cloud refuses it, and the move ends
    ],
)
def test_a_copied_disk_is_of_a_spot_pool_of_its_new_zone(
    changes: tuple[dict[str, object], ...], allowed: tuple[str, ...], named: str
) -> None:
    record, snapshot = gang(1, move=Move("z-b", NOW - 60), nodes=(Node(top=1, zone="z-a", copy=2),))
    pools: list[PoolState] = [
        replace(stack().pools[0], name=name, **more) for name, more in zip(("one", "two"), changes, strict=True)
    ]
    copied = DiskSnapshot(names.disk_name(STACK, JOB, 0, 2), JOB, 0, 2, ready=True)
    free = replace(snapshot.listing.disks[0], users=())
    snapshot = with_(
        snapshot,
        stack=replace(snapshot.stack, pools=tuple(pools)),
        spec=JobSpec("j", ("x",), 1, pools=allowed),
        listing=Listing((), (free,), (copied,), frozenset(ZONES)),
    )
    assert calls.plan(Draft(record, snapshot)) == (
        CreateDisk(JOB, UID, 0, 2, named, "z-b", snapshot=names.disk_name(STACK, JOB, 0, 2)),
    )


# -- roll calls


def test_an_exit_opens_a_roll_call_and_only_an_answer_to_it_counts() -> None:
    record, snapshot = gang()
    snapshot = with_(snapshot, facts=(*snapshot.facts, fact(1, Kind.EXIT, "1")))
    opened = decide(record, snapshot).record
    assert opened is not None and opened.roll is not None
    assert opened.roll.ver == opened.ver
    answers = [fact(0, Kind.HERE, str(opened.ver)), fact(1, Kind.HERE, str(opened.ver - 1))]
    half = with_(snapshot, facts=(*snapshot.facts, *answers))
    assert decide(opened, half).quiet, "an old answer would keep a hung machine for ever"
    full = with_(half, facts=(*half.facts, fact(1, Kind.HERE, str(opened.ver + 2))))
    crashed = decide(opened, full).record
    assert crashed is not None
    assert (crashed.budget.crashes, crashed.budget.crashed_gen, crashed.gen) == (1, 3, 4)
    overdue = decide(opened, with_(half, now=NOW + 61, grants_first=False)).record
    assert overdue is not None
    assert (overdue.budget.crashes, overdue.budget.preemptions) == (0, 1)
    assert overdue.nodes[1].cur is None


@pytest.mark.parametrize("how", ["with the exit", "after the roll call", "found stopping"])
def test_processes_that_end_with_their_machine_are_no_crash(how: str) -> None:
    """A system that goes down ends the job first; its agent lives on for seconds and answers roll calls."""
    record, snapshot = gang()
    notice = fact(1, Kind.NOTICE, f"{NOW + 25:.0f}")
    died = (*snapshot.facts, fact(1, Kind.EXIT, "143"), fact(0, Kind.EXIT, "1"))
    snapshot = with_(snapshot, facts=(*died, notice) if how == "with the exit" else died, grants_first=False)
    first = decide(record, snapshot).record
    assert first is not None
    if how == "with the exit":
        assert first.stop and first.roll is None
        return
    here = tuple(fact(node, Kind.HERE, str(first.ver)) for node in (0, 1))
    listing = snapshot.listing
    if how == "found stopping":
        vms = (listing.vms[0], replace(listing.vms[1], status=VmStatus.STOPPING))
        listing = Listing(vms, listing.disks, (), listing.answered)
    told = (*snapshot.facts, *here) if how == "found stopping" else (*snapshot.facts, *here, notice)
    then = decide(first, with_(snapshot, facts=told, listing=listing, grants_first=False)).record
    assert then is not None and then.stop
    assert then.budget.crashes == 0


def test_success_needs_every_member_at_the_newest_generation() -> None:
    record, snapshot = gang()
    one = with_(snapshot, facts=(*snapshot.facts, fact(0, Kind.EXIT, "0"), fact(1, Kind.EXIT, "0", gen=2)))
    assert decide(record, one).quiet
    both = with_(snapshot, facts=(*snapshot.facts, fact(0, Kind.EXIT, "0"), fact(1, Kind.EXIT, "0")))
    ended = decide(record, both).record
    assert ended is not None and ended.phase is Phase.END


# -- when to stop


@pytest.mark.parametrize(("left_s", "stops"), [(100.0, False), (16.0, False), (15.0, True), (3.0, True)])
def test_the_stop_comes_when_the_time_left_is_the_save_and_a_margin(left_s: float, stops: bool) -> None:
    record, snapshot = gang()
    nodes = (record.nodes[0], replace(record.nodes[1], top=2, cur=member(1, notice=NOW + left_s), next=intent(2)))
    record = replace(record, nodes=nodes)
    notice = fact(1, Kind.NOTICE, f"{NOW + left_s:.0f}")
    allocation = replace(snapshot.allocation, grants=(*snapshot.allocation.grants, Grant(JOB, 1, 2, "slot:pool")))
    snapshot = with_(snapshot, facts=(*snapshot.facts, notice), allocation=allocation)
    decision = decide(record, snapshot)
    assert (decision.record is not None and decision.record.stop) is stops
    if not stops:
        assert decision.due is not None
        assert decision.due <= NOW + max(left_s - 15.0, Times().soon_s)


def test_advancing_progress_is_no_silence() -> None:
    record, snapshot = gang()
    record = replace(record, gen_since=NOW - 1000)
    silent = decide(record, snapshot).record
    assert silent is not None and silent.roll is not None and silent.roll.cause == "silence"
    alive = with_(snapshot, progress=Progress(gen=3, step=9, at=NOW - 20))
    assert decide(record, alive).quiet
    older = with_(snapshot, progress=Progress(gen=2, step=9, at=NOW - 20))
    assert not decide(record, older).quiet


@pytest.mark.parametrize(("later_s", "called"), [(0.0, False), (1.0, True)])
def test_a_stall_opens_a_roll_call_unless_one_was_just_answered(later_s: float, called: bool) -> None:
    record, snapshot = gang(roll_at=NOW - Times().silence_s - later_s)
    facts = (*snapshot.facts, fact(1, Kind.STALL, "9"))
    decision = decide(record, with_(snapshot, facts=facts, progress=Progress(gen=3, step=9, at=NOW - 20)))
    assert decision.quiet is not called
    if decision.record is not None:
        (entry,) = decision.record.outbox
        assert decision.record.roll == Roll(ver=41, since=NOW, cause="stall")
        assert (entry.event, entry.cause) == (Event.ROLL, "stall")


def test_a_single_machine_gets_an_earlier_roll_call() -> None:
    for nodes, quiet_s, called in ((1, 36.0, False), (1, 37.0, True), (2, 120.0, False), (2, 121.0, True)):
        record, snapshot = gang(nodes)
        silent = with_(snapshot, progress=Progress(gen=3, step=9, at=NOW - quiet_s))
        new = decide(replace(record, gen_since=NOW - 1000), silent).record
        assert (new is not None and new.roll is not None) is called, (nodes, quiet_s)


def test_a_one_machine_job_has_less_time_to_answer_a_roll_call_since_the_tick_waits_for_it() -> None:
    for nodes, waited_s, lost in ((1, 30.0, False), (1, 31.0, True), (2, 45.0, False), (2, 46.0, True)):
        record, snapshot = gang(nodes)
        record = replace(record, gen_since=NOW - 1000, roll=Roll(40, NOW - waited_s, "silence"))
        facts = (*snapshot.facts, *(fact(node, Kind.HERE, "40") for node in range(1, nodes)))
        decision = decide(record, with_(snapshot, facts=facts, progress=Progress(gen=3, step=9, at=NOW - 200)))
        assert decision.quiet is not lost, (nodes, waited_s)
        assert lost or decision.due == NOW - waited_s + (30.0 if nodes == 1 else 45.0)


def test_a_zone_without_capacity_makes_no_round_due_without_vacant_nodes() -> None:
    record, snapshot = gang()
    due = decide(replace(record, dry_since=NOW - 1000), snapshot).due
    assert due is None or due > NOW + Times().soon_s


@pytest.mark.parametrize(
    ("codes", "counted"), [("5 7", 5), ("0 7", 7), ("7 0", 7), ("93 1", 93), ("1 93", 93), ("0 0", 0)]
)
def test_of_several_exits_of_a_node_the_fatal_one_or_the_first_failure_counts(codes: str, counted: int) -> None:
    record, snapshot = gang()
    told = tuple(fact(1, Kind.EXIT, code) for code in codes.split())
    assert exits._codes(Draft(record, with_(snapshot, facts=(*snapshot.facts, *told)))) == {1: counted}
