"""The tick finds what no record knows, and nothing that a record does know is harmed by it."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import Disk, Vm, VmStatus
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.generation import FactIn, Sync
from spotkeeper.contract.job import JobRequest, JobSpec, RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Node, Outcome, Phase, Record
from spotkeeper.reconcile.controller.cleanup import bury
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.controller.intake import accept
from spotkeeper.reconcile.controller.reconcile_job import Ended, Prefetched, run_round
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import Versioned
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import CorruptError
from tests.reconcile.world import JOB, Drive, Machine, World

GHOST = "ghxst234"


def trained() -> World:
    world = World(nodes=1)
    world.submit()
    world.until(world.training, 200)
    return world


def test_a_machine_without_a_record_gets_an_end_record_and_is_deleted() -> None:
    world = trained()
    real = world.member(0)
    name = real.vm.name.replace(JOB, GHOST).replace("-a1", "-a7")
    ghost = replace(real.vm, job=GHOST, name=name, uid="ghost", attempt=7)
    world.machines["ghost"] = Machine(ghost, world.t, VmStatus.RUNNING, boot="b", up_at=world.t + 1e6)
    result = tick(world.store, world, world, world.options)
    assert result.orphans == (GHOST,)
    record = world.record(GHOST)
    assert (record.phase, record.nodes[0].top, record.keep_disks) == (Phase.END, 7, True)
    world.run(130)
    assert world.record(GHOST).phase is Phase.DONE
    assert [m.vm.uid for m in world.dynamic()] == [real.vm.uid]
    assert world.training()


def test_a_disk_without_a_record_is_kept() -> None:
    world = trained()
    disk = Disk(f"sk-t-{GHOST}-n0002-d4", "z-b", GHOST, 2, 4)
    world.drives[disk.name, "z-b"] = Drive(disk, world.t)
    world.run(130)
    assert (disk.name, "z-b") in world.drives
    assert world.record(GHOST).phase is Phase.DONE
    assert world.record(GHOST).nodes[2].disk_top == 4


def test_a_deleted_record_is_reported_once_with_the_kept_disks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are billed until a person has looked: an alarm, not a warning, and no word that nothing is left."""
    world = trained()
    for node in (0, 1):
        disk = Disk(f"sk-t-{GHOST}-n000{node}-d1", "z-b", GHOST, node, 1)
        world.drives[disk.name, "z-b"] = Drive(disk, world.t)
    with caplog.at_level(logging.INFO):
        world.run(190)
    told = [line for line in caplog.records if GHOST in line.getMessage()]
    found = [(line.levelname, line.event, line.job) for line in told]
    assert found == [("ERROR", "orphan", GHOST)], "what the alarm looks for"
    assert told[0].getMessage() == (
        f"ALARM: job {GHOST} has machines, disks or grants but no record: Spotkeeper ends it and deletes its machines; "
        f"2 disks kept and billed: sk-t-{GHOST}-n0000-d1 (z-b), sk-t-{GHOST}-n0001-d1 (z-b)"
    )
    (done,) = world.events(Event.DONE, job=GHOST)
    assert done.detail == f"but 2 disks kept and billed: sk-t-{GHOST}-n0000-d1, sk-t-{GHOST}-n0001-d1"
    assert "its disks are kept" in world.record(GHOST).reason


def test_an_orphan_without_disks_is_reported_briefly() -> None:
    world = World(nodes=1, steps=20)
    world.submit()
    world.until(lambda: world.record().phase is Phase.DONE, 600)
    assert [entry.detail for entry in world.events(Event.DONE)] == [""]


def test_a_grant_without_a_record_is_released() -> None:
    world = trained()
    allocation, version = world.memory.allocation
    lost = Grant(GHOST, 0, 3, "slot:pool")
    world.memory.allocation = (Allocation(allocation.ver, "", (*allocation.grants, lost)), version + 1)
    world.run(130)
    assert [g.job for g in world.store.read_allocation().value.grants] == [JOB]
    assert world.record(GHOST).outcome is Outcome.CANCELLED


def test_a_job_being_submitted_is_left_alone() -> None:
    """Its marker is written before its record: a tick in between must not take the marker away."""
    world = trained()
    world.store.set_active(GHOST)
    result = tick(world.store, world, world, world.options)
    assert result.orphans == ()
    assert GHOST in world.store.active_jobs()
    assert world.store.read_record(GHOST) is None


def test_a_late_machine_of_a_job_that_is_done_is_deleted() -> None:
    """Rule 9: the record outlives the job; an insert that was stalled for an hour finds it there."""
    world = World(nodes=1, steps=20)
    world.submit()
    world.until(lambda: world.record().phase is Phase.DONE, 600)
    intent = world.inserts()[0]
    name = f"sk-t-{JOB}-n0000-a{intent.attempt}"
    vm = Vm(name, "late", intent.zone, VmStatus.RUNNING, "pool", JOB, 0, intent.attempt, "10.9.9.9")
    world.machines["late"] = Machine(vm, world.t, VmStatus.RUNNING, boot="b", up_at=world.t + 1e6)
    world.run(130)
    assert world.dynamic() == []
    assert world.record().phase is Phase.DONE


def test_a_tick_finishes_an_interrupted_cleanup() -> None:
    """Its name stays taken, and its ask stays there, if the round dies right after the record's last write."""
    world = trained()
    request = JobRequest(id="a", kind=RequestKind.CANCEL, at=world.t)
    done = replace(world.record(), ver=world.record().ver + 1, nonce="n", phase=Phase.DONE)
    assert world.store.cas_record(done, world.memory.read_record(JOB).token)  # type: ignore[union-attr]
    world.store.put_name(done.name, JOB)
    world.store.put_request(JOB, request)
    for digit in "ab":  # the second by a resume with other files
        world.store.put(paths.source(JOB, digit * 64), b"tar")
    kept = (paths.output_list(JOB, 0), paths.output_file(JOB, 0, "model.pt"))
    for path in kept:
        world.store.put(path, b"the user's")
    assert world.store.list_facts(JOB)
    tick(world.store, world, world, world.options)
    assert world.store.read_name(done.name) is None
    assert world.store.list_requests(JOB) == ()
    assert world.store.list(paths.sources(JOB)) == ()
    assert set(world.store.list(paths.outputs(JOB))) == set(kept), "what the job left is its user's, for ever"
    assert world.store.active_jobs() == ()
    assert world.store.read_tomb(JOB) == world.t
    held = {(grant.node, grant.attempt) for grant in world.store.read_allocation().value.grants}
    assert all((fact.node, fact.attempt) in held for fact in world.store.list_facts(JOB))


class CutError(BaseException):
    """The process ends here."""


def test_facts_of_an_ended_job_are_deleted_after_a_died_round() -> None:
    world = World(nodes=1, steps=20)
    world.submit()
    real, real_cas = world.memory.delete_facts, world.memory.cas_record

    def cut(job: str, facts: tuple[Fact, ...]) -> None:
        if world.record().phase is Phase.DONE:
            world.memory.delete_facts = real  # type: ignore[method-assign]
            raise CutError
        real(job, facts)

    def cas_record(record: Record, token: str) -> str | None:
        if record.phase is Phase.DONE:
            world.store.put_fact(JOB, Fact("u", "b", 0, 1, 0, Kind.FREED, "1"))
        return real_cas(record, token)

    world.memory.delete_facts, world.memory.cas_record = cut, cas_record  # type: ignore[method-assign]
    with pytest.raises(CutError):
        world.until(lambda: False, 600)
    assert world.record().phase is Phase.DONE and world.store.list_facts(JOB)
    world.memory.leases.clear()
    world.run(130)
    assert world.store.list_facts(JOB) == ()
    assert world.store.active_jobs() == ()


def test_dropped_outlives_its_job_until_the_grant_is_released() -> None:
    """And goes then, although the round that gave the grant back dies at once: the grant was all that ticks had."""
    world = trained()
    world._remove(world.member(0))
    world.drives.clear()
    done = replace(world.record(), ver=world.record().ver + 1, nonce="n", phase=Phase.DONE, nodes=(Node(top=1),))
    assert world.store.cas_record(done, world.memory.read_record(JOB).token)  # type: ignore[union-attr]
    allocation, version = world.memory.allocation
    world.memory.allocation = (Allocation(allocation.ver, "", (Grant(JOB, 0, 1, "machine:far"),)), version + 1)
    world.memory.facts.clear()
    word = Fact("u", "b", 0, 1, 0, Kind.DROPPED, "0")
    world.store.put_fact(JOB, word)
    bury(world.store, done, world.t)
    assert world.store.list_facts(JOB) == (word,)
    assert world.store.active_jobs() == ()
    real = world.memory.cas_allocation

    def cut(grants: Allocation, token: str) -> str | None:
        assert real(grants, token)
        raise CutError

    world.memory.cas_allocation = cut  # type: ignore[method-assign]
    with pytest.raises(CutError):
        tick(world.store, world, world, world.options)
    world.memory.cas_allocation = real  # type: ignore[method-assign]
    world.memory.leases.clear()
    assert world.store.read_allocation().value.grants == ()
    world.t += 60
    tick(world.store, world, world, world.options)
    assert world.store.list_facts(JOB) == ()
    assert world.store.active_jobs() == ()


def test_facts_reported_during_a_cleanup_are_not_left_behind() -> None:
    """A request that read the record before the end, and whose process dies after it has stored the fact."""
    world = trained()
    agent = world.member(0)
    ending = replace(world.record(), phase=Phase.END)
    done = replace(ending, ver=ending.ver + 1, nonce="n", phase=Phase.DONE, nodes=(Node(top=1),))
    assert world.store.cas_record(done, world.memory.read_record(JOB).token)  # type: ignore[union-attr]
    world.memory.allocation = (Allocation(), world.memory.allocation[1] + 1)
    bury(world.store, done, world.t)
    assert (world.store.list_facts(JOB), world.store.active_jobs()) == ((), ())
    who = Speaker(agent.vm.uid, agent.vm.name, agent.vm.zone)
    said = Sync("boot", facts=(FactIn(Kind.FREED, value="0"),))
    stack = world.memory.stack
    assert stack is not None
    assert not accept(world.store, stack, who, said, world.t).new, "the record is read afresh"
    world.memory.read_record = lambda _: Versioned(replace(ending, nodes=(Node(top=1),)), "old")  # type: ignore[method-assign]
    assert accept(world.store, stack, who, said, world.t).new
    del world.memory.read_record
    assert world.store.list_facts(JOB)
    world._remove(agent)
    world.drives.clear()
    tick(world.store, world, world, world.options)
    assert (world.store.list_facts(JOB), world.store.active_jobs()) == ((), ())


def test_only_facts_of_dropped_attempts_are_deleted() -> None:
    world = trained()
    old = Fact("u", "b", 0, 0, 0, Kind.HELLO)
    world.store.put_fact(JOB, old)
    before = set(world.store.list_facts(JOB)) - {old}
    world.run(70)
    assert set(world.store.list_facts(JOB)) >= before
    assert old not in world.store.list_facts(JOB)


def test_a_failed_cleanup_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    world = trained()
    done = replace(world.record(), ver=world.record().ver + 1, nonce="n", phase=Phase.DONE)
    assert world.store.cas_record(done, world.memory.read_record(JOB).token)  # type: ignore[union-attr]
    world._remove(world.member(0))
    real = world.memory.put_tomb

    def put_tomb(job: str, at: float) -> None:
        raise StoreError("HTTP 503")

    world.memory.put_tomb = put_tomb  # type: ignore[method-assign]
    assert tick(world.store, world, world, world.options).failed == (JOB,)
    assert f"cleanup of ended job {JOB} failed: HTTP 503" in caplog.messages
    assert world.store.active_jobs() == (JOB,)
    world.memory.put_tomb = real  # type: ignore[method-assign]
    assert tick(world.store, world, world, world.options).failed == ()
    assert world.store.active_jobs() == ()


def test_an_unreadable_job_does_not_stop_the_others() -> None:
    world = trained()
    world.submit("wxyz2345")
    real = world.memory.list_facts

    def list_facts(job: str):  # type: ignore[no-untyped-def]
        if job == JOB:
            raise StoreError("the bucket does not answer")
        return real(job)

    world.memory.list_facts = list_facts  # type: ignore[method-assign]
    result = tick(world.store, world, world, world.options)
    assert (result.failed, result.trouble) == ((JOB,), "")
    assert [r.record.job for r in result.rounds if r.record] == ["wxyz2345"]


def test_a_tick_in_which_every_jobs_round_failed_says_why() -> None:
    world = trained()

    def list_facts(job: str):  # type: ignore[no-untyped-def]
        raise StoreError("the bucket does not answer")

    world.memory.list_facts = list_facts  # type: ignore[method-assign]
    result = tick(world.store, world, world, world.options)
    assert (result.failed, result.rounds) == ((JOB,), ())
    assert result.trouble == "the round of every job was interrupted: the bucket does not answer"


def test_a_record_written_after_the_listing_is_not_judged_by_it() -> None:
    """Rule 3: the tick reads records first. A machine admitted after the listing must not be lost to it."""
    world = World(nodes=1)
    world.submit()
    world.until(world.training, 200)
    stale = world.list(world.stack.stack)
    stale = replace(stale, vms=())  # as if taken before the machine was visible
    current = world.record()
    older = Versioned(replace(current, ver=current.ver - 1, nonce="old"), "0")
    result = run_round(world.store, world, JOB, world, world.options, Prefetched(older, stale))
    assert result.ended is Ended.LOST
    assert world.record() == current


def test_an_invalid_record_stops_only_its_own_job(caplog: pytest.LogCaptureFixture) -> None:
    """Edited by hand, or of another version: told in the log, its machines left alone, the others looked after."""
    world = trained()
    world.may_fail = True
    real = world.member(0)
    name = real.vm.name.replace(JOB, GHOST)
    ghost = replace(real.vm, job=GHOST, name=name, uid="ghost")
    world.machines["ghost"] = Machine(ghost, world.t, VmStatus.RUNNING, up_at=world.t + 1e6)
    world.store.set_active("zzzz2345")
    read = world.memory.read_record

    def reading(job: str) -> Versioned[Record] | None:
        if job == GHOST:
            raise CorruptError(f"jobs/{job}/rec: not a Record")
        if job == "zzzz2345":
            raise StoreError("HTTP 503")
        return read(job)

    world.memory.read_record = reading  # type: ignore[method-assign]
    result = tick(world.store, world, world, world.options)
    assert (sorted(result.failed), result.orphans) == ([GHOST, "zzzz2345"], ())
    assert f"ALARM: jobs/{GHOST}/rec: not a Record; delete the object" in caplog.messages
    assert "record of zzzz2345: HTTP 503" in caplog.messages
    assert "ghost" in world.machines
    world._remove(real)
    world.until(lambda: world.training() and world.record().gen == 2, 300)


@pytest.mark.parametrize(
    ("ago_s", "ledger", "given_up"), [(86_400.0, False, True), (86_399.0, False, False), (86_400.0, True, False)]
)
def test_a_submission_that_began_a_day_ago_and_has_no_record_is_given_up(
    ago_s: float, ledger: bool, given_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With a ledger the job has run, so a person deleted its record."""
    world = World(nodes=1)
    world.store.set_active(GHOST, world.now() - ago_s)
    world.memory.put_spec(GHOST, JobSpec("gpt", ("train.py",)))
    if ledger:
        world.store.append_ledger(GHOST, Entry(world.now(), "end.job", Event.END, 1))
    tick(world.store, world, world, world.options)
    read = world.store.read_record(GHOST)
    assert (read is not None) is given_up
    assert (GHOST in world.store.active_jobs()) is not given_up
    told = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    text = f"job {GHOST}: its submission began more than a day ago and was never completed; its files are deleted"
    assert told == [text] * given_up
    if read is not None:
        record = read.value
        assert (record.phase, record.outcome, record.name) == (Phase.DONE, Outcome.CANCELLED, "gpt")
        assert (record.reason, record.created) == ("its submission was never completed", world.now())
