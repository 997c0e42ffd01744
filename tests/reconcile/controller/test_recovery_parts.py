"""The ledger's times of a recovery: when processes stopped, when a replacement had its disk, how its start divides."""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import FactIn, Progress, Sync
from spotkeeper.contract.ledger import Event
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.controller.intake import accept
from spotkeeper.report.job.trace import job_trace
from tests.reconcile.controller.test_round import trained
from tests.reconcile.world import JOB, World


def recovered(world: World) -> World:
    trained(world)
    assert world.events(Event.MOUNTED) == [], "a job's first machines recover from nothing"
    world.preempt(1, notice_s=120.0)
    world.until(lambda: world.record().gen == 2 and bool(world.events(Event.MOUNTED)), 400)
    return world


def test_a_recovery_leaves_its_times_in_the_ledger() -> None:
    """However many nodes stop, one entry says when; each replacement says when it had its disk."""
    world = recovered(World(nodes=3))
    (stopped,) = world.events(Event.STOPPED)
    (mounted,) = world.events(Event.MOUNTED)
    (stop,) = world.events(Event.STOP)
    assert (stopped.node, stopped.gen) == (0, 1)
    assert (mounted.node, mounted.attempt) == (1, 2)
    assert stop.at <= stopped.at <= mounted.at
    (one,) = job_trace(JOB, "n", world.events(), world.t, world.stack.stack).recoveries
    assert {"notice", "boot", "stop", "mount"} <= {span.part.value for span in one.spans}


def test_the_first_step_says_how_long_its_parts_took() -> None:
    world = recovered(World(nodes=2))
    vm = world.member(0).vm
    slot = world.record().nodes[0].cur
    assert slot is not None and slot.boot is not None
    told = Progress(3, 10_000_000, 0.0, restore_s=4.0, restored_bytes=7, first_s=1.5)
    who = Speaker(vm.uid, vm.name, vm.zone)
    read = world.store.read_record(JOB)
    assert read is not None
    assert world.store.cas_record(replace(read.value, gen=3, nonce="next"), read.token)
    accept(world.store, world.stack, who, Sync(slot.boot, progress=told), world.t)
    first = world.events(Event.FIRST)[-1]
    assert (first.gen, first.restore_s, first.restored_bytes, first.first_s) == (3, 4.0, 7, 1.5)


def test_an_exit_without_an_order_to_stop_is_no_stop() -> None:
    """It is a failure, and the roll call after it is in the ledger already."""
    world = trained(World(nodes=2))
    vm, slot = world.member(0).vm, world.record().nodes[0].cur
    assert slot is not None and slot.boot is not None
    sync = Sync(slot.boot, facts=(FactIn(Kind.EXIT, 1, "1"),))
    accept(world.store, world.stack, Speaker(vm.uid, vm.name, vm.zone), sync, world.t)
    assert world.events(Event.STOPPED) == []


def test_the_progress_says_when_its_checkpoint_was_first_reported() -> None:
    world = trained(World(nodes=2))
    world.until(lambda: (told := world.store.read_progress(JOB)) is not None and told.commit_at is not None, 900)
    first = world.store.read_progress(JOB)
    assert first is not None and first.commit_at is not None and first.commit_at <= world.t
    same = world.t
    world.until(lambda: (told := world.store.read_progress(JOB)) is not None and told.commit_at != first.commit_at, 900)
    later = world.store.read_progress(JOB)
    assert later is not None and later.commit_at is not None and later.commit_at > same
    assert (later.commit_gen, later.commit_step) != (first.commit_gen, first.commit_step)
