"""Copies of checkpoints in the bucket: a job goes on from one where no disk has anything newer, and says what is lost.

The order is disk, peer, bucket. A copy that cannot be had is skipped, and the next older one counts; of a line of
the job that was given up nothing is ever fetched; what is replaced is deleted, lists before parts.
"""

from __future__ import annotations

import threading

import pytest

from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.facts import BucketCopy, Kind
from spotkeeper.contract.generation import FactIn, Sync
from spotkeeper.contract.job import Checkpoint, Mirror, Nodes, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Mirrored, Phase, Record
from spotkeeper.reconcile.controller import cleanup
from spotkeeper.reconcile.controller.cleanup import bury
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.controller.intake import accept
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.objects import StoreError
from tests.reconcile.decide.checkpoint.test_location import paused, paused_without_its_node, resumed
from tests.reconcile.decide.gang.test_resize import refused, trained
from tests.reconcile.memory import MemoryStore
from tests.reconcile.world import JOB, Commit, World, stack

OFTEN = Checkpoint(mirror=Mirror(every_min=1.0))


def mirrored(world: World) -> World:
    """It trains, and has copies in the bucket; then it trains on."""
    trained(world)
    world.until(lambda: len(world.record().mirror) == 2, 400)
    return world


def no_more_copies(world: World) -> None:
    """Uploads do not come through any more, and steps are made that only disks have."""
    world.copies = False
    world.run(120)
    assert world.newest is not None and world.newest > copy(world)


def copy(world: World, number: int = 0) -> Commit:
    """The newest copy that the record knows of; or an older one."""
    gen, _, step = world.record().mirror[number].commit.partition("-")
    return int(gen), int(step)


def disks_destroyed(world: World, *nodes: int) -> None:
    """With all that was on them. Without nodes: all of the job's."""
    for key, drive in list(world.drives.items()):
        if drive.disk.job and (not nodes or drive.disk.node in nodes):
            del world.drives[key]


def node_lost(world: World) -> Commit | None:
    """The static machine on which it trains alone is gone, just when the bucket has the newest checkpoint."""
    world.until(lambda: world.newest == copy(world), 400)
    (machine,) = (machine for machine in world.machines.values() if not machine.vm.job)
    machine.status, machine.agent = VmStatus.DEAD, None
    return world.newest


def left_to_the_bucket(world: World) -> Commit:
    """The newest copy, when nothing is newer: the job is paused, loses its disks, and is resumed."""
    world.until(lambda: world.newest == copy(world), 400)
    paused(world)
    there = copy(world)
    disks_destroyed(world)
    world.request(RequestKind.RESUME)
    return there


def begun_from(world: World) -> Commit | None:
    world.run(5)
    return world.started[-1][1]


@pytest.mark.parametrize("nodes", [1, 2])
def test_without_disks_the_job_continues_from_the_bucket_and_reports_lost_steps(nodes: int) -> None:
    world = mirrored(World(nodes=nodes, checkpoint=OFTEN))
    no_more_copies(world)
    paused(world)
    lost, there = world.newest, copy(world)
    assert lost is not None
    disks_destroyed(world)
    world.request(RequestKind.RESUME)
    world.until(world.training, 1200)
    assert begun_from(world) == there
    (told,) = world.events(Event.FETCH)
    assert told.detail == "checkpoint {}-{}; {}-{} is lost, and {} steps are repeated".format(
        *there, *lost, lost[1] - there[1]
    )
    words = world.events(Event.GENERATION)[-1].detail
    assert words.endswith("without checkpoint {}-{}, from {}-{}".format(*lost, *there))
    world.run(120)
    paused(world)
    resumed(world)


def test_the_newest_checkpoint_in_the_bucket_loses_nothing() -> None:
    world = mirrored(World(nodes=2, checkpoint=OFTEN))
    world.until(lambda: world.newest == copy(world), 400)
    world.preempt(0)
    world.preempt(1)
    disks_destroyed(world)
    began = world.t
    world.until(world.training, 1200)
    assert begun_from(world) == copy(world)
    assert world.t - began < 120, "not the five minutes that a lost checkpoint is looked for"
    assert world.events(Event.FETCH)[-1].detail.endswith(", the newest that was reported")
    assert world.record().given_up == ""


def test_a_disk_comes_before_the_bucket() -> None:
    """One of two disks is destroyed; the other has what the bucket has, and more."""
    world = mirrored(World(nodes=2, checkpoint=OFTEN))
    no_more_copies(world)
    paused(world)
    disks_destroyed(world, 0)
    resumed(world)
    assert not world.events(Event.FETCH)


def test_a_damaged_copy_is_dropped_and_the_next_older_one_counts() -> None:
    world = mirrored(World(nodes=1, checkpoint=OFTEN))
    paused(world)
    damaged, older = copy(world), copy(world, 1)
    world.rotten.add(damaged)
    disks_destroyed(world)
    world.request(RequestKind.RESUME)
    world.until(world.training, 1200)
    assert begun_from(world) == older
    (told,) = world.events(Event.UNMIRRORED)
    assert (told.node, told.detail) == (0, "{}-{}".format(*damaged))
    assert [one.commit for one in world.record().mirror] == ["{}-{}".format(*older)]


def test_without_any_copy_the_job_holds() -> None:
    world = mirrored(World(nodes=1, checkpoint=OFTEN))
    paused(world)
    world.rotten.update(world.bucket)
    disks_destroyed(world)
    world.request(RequestKind.RESUME)
    world.until(lambda: world.record().phase is Phase.HOLD, 1500)
    assert "spotkeeper resume job-abcd2345 --go-back" in world.record().reason
    assert world.record().mirror == () and world.record().fetch is None


def test_a_machine_lost_during_a_fetch_is_replaced() -> None:
    world = mirrored(World(nodes=1, checkpoint=OFTEN))
    world.fetch_s = 200.0
    there = left_to_the_bucket(world)
    world.until(lambda: world.record().fetch is not None, 400)
    world.request(RequestKind.RESIZE, nodes=2)
    assert "the job file says" in refused(world), "a write of the record during the fetch"
    world.preempt(0)
    world.until(world.training, 1200)
    assert begun_from(world) == there and world.record().fetch is None
    assert len(world.events(Event.FETCH)) == 1, "of the same copy"


def test_a_copy_completed_during_the_fetch_of_an_older_one_is_fetched_instead() -> None:
    world = mirrored(World(nodes=1, checkpoint=OFTEN))
    no_more_copies(world)
    paused(world)
    newest, older = world.newest, copy(world)
    assert newest is not None
    disks_destroyed(world)
    world.fetch_s = 200.0
    world.request(RequestKind.RESUME)
    world.until(lambda: world.record().fetch is not None, 1200)
    world.bucket.append(newest)
    _say(world, FactIn(Kind.MIRRORED, world.record().gen, "{}-{}".format(*newest)))
    world.until(world.training, 1200)
    assert begun_from(world) == newest
    told = [entry.detail.partition(";")[0].partition(",")[0] for entry in world.events(Event.FETCH)]
    assert told == ["checkpoint {}-{}".format(*commit) for commit in (older, newest)]


def test_a_fetch_has_no_time_limit() -> None:
    """It may take hours: the job neither holds nor begins anew meanwhile, and says what it does."""
    world = mirrored(World(nodes=1, checkpoint=OFTEN))
    world.fetch_s = 7200.0
    there = left_to_the_bucket(world)
    world.run(3000)
    assert world.record().phase is Phase.RUN and not world.training()
    assert world.record().reason.startswith("fetching checkpoint {}-{} from the bucket".format(*there))
    world.until(world.training, 6000)
    assert begun_from(world) == there and world.record().reason == ""


def test_go_back_uses_the_copy_if_it_is_newer() -> None:
    """The static machine that alone had the newest is gone; the bucket's copy is older, so it is asked for."""
    world = mirrored(World(nodes=1, the_stack=stack(static=1), checkpoint=OFTEN))
    no_more_copies(world)
    paused_without_its_node(world)
    there = copy(world)
    world.request(RequestKind.RESUME)
    world.run(400)
    assert not world.training() and "--go-back" in world.record().reason
    world.request(RequestKind.RESUME, go_back=True)
    assert "refused" not in refused(world)
    world.until(world.training, 1200)
    assert begun_from(world) == there


def test_a_copy_in_the_bucket_ends_the_wait_for_a_static_machine() -> None:
    world = mirrored(World(nodes=1, the_stack=stack(static=1), checkpoint=OFTEN))
    newest = node_lost(world)
    world.until(lambda: world.training() and world.record().gen > 1, 600)
    assert begun_from(world) == newest
    assert world.record().given_up == ""


def test_a_copy_in_the_bucket_unbinds_the_gang_from_its_zone() -> None:
    world = mirrored(World(nodes=1, the_stack=stack(static=1), checkpoint=OFTEN))
    newest = node_lost(world)
    world.until(lambda: world.record().nodes[0].cur is None or not world.record().nodes[0].cur.machine, 100)
    world.request(RequestKind.MOVE, zone="z-b")
    assert "on static machine" not in refused(world)
    world.until(lambda: world.training() and world.record().zone == "z-b", 1500)
    world.run(5)
    assert newest in [commit for _, commit in world.started]


def test_a_node_with_its_own_disk_prefers_it_to_the_bucket() -> None:
    """Fetching takes time: an idle static machine is no bargain for a node whose disk waits for it."""
    world = World(nodes=1, the_stack=stack(static=1), checkpoint=OFTEN)
    machine = next(machine for machine in world.machines.values() if not machine.vm.job)
    machine.up_at = world.t + 100
    world.submit()
    world.until(world.training, 300)
    world.until(lambda: len(world.record().mirror) == 2 and world.newest == copy(world), 600)
    world.until(lambda: machine.agent is not None, 200)
    world.run(10)
    paused(world)
    resumed(world)
    assert not world.events(Event.FETCH)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_copy_restores_on_more_or_fewer_nodes(before: int, after: int) -> None:
    world = trained(World(nodes=Nodes(1, 2), checkpoint=OFTEN))
    world.request(RequestKind.RESIZE, nodes=before)
    world.until(lambda: world.training() and len(world.record().members) == before, 900)
    world.until(lambda: len(world.record().mirror) == 2 and world.newest == copy(world), 900)
    paused(world)
    there = copy(world)
    disks_destroyed(world)
    world.request(RequestKind.RESIZE, nodes=after)
    world.request(RequestKind.RESUME)
    world.until(lambda: world.training() and len(world.record().members) == after, 1500)
    assert begun_from(world) == there


def test_with_sharded_state_every_node_fetches_its_part() -> None:
    sharded = Checkpoint(replicated=False, mirror=Mirror(every_min=1.0))
    world = mirrored(World(nodes=2, checkpoint=sharded))
    no_more_copies(world)
    paused(world)
    there = copy(world)
    disks_destroyed(world, 1)
    world.request(RequestKind.RESUME)
    world.until(lambda: world.record().fetch is not None, 1200)
    fetch = world.record().fetch
    assert fetch is not None and (fetch.source, fetch.nodes) == (None, (0, 1))
    world.until(world.training, 1200)
    fetched = [f for f in world.store.list_facts(JOB) if f.kind is Kind.FETCHED]
    told = {(f.node, BucketCopy.parse(f.value)) for f in fetched}
    assert told == {(node, BucketCopy("{}-{}".format(*there))) for node in (0, 1)}


def test_a_copy_of_a_given_up_commit_does_not_count() -> None:
    """Its upload ended long after its generation: what was lost must not come back behind the job's back."""
    world = mirrored(World(nodes=1, checkpoint=OFTEN))
    no_more_copies(world)
    paused(world)
    lost = world.newest
    assert lost is not None
    disks_destroyed(world)
    world.request(RequestKind.RESUME)
    world.until(world.training, 1200)
    assert world.record().given_up == "{}-{}".format(*lost)
    before = world.record().mirror
    _say(world, FactIn(Kind.MIRRORED, world.record().gen, "{}-{}".format(*lost)))
    world.run(5)
    assert world.record().mirror == before


def _say(world: World, fact: FactIn) -> None:
    machine = world.member(0)
    who = Speaker(machine.vm.uid, machine.vm.name, machine.vm.zone)
    accept(world.store, world.stack, who, Sync(machine.boot, 0, JOB, (fact,)), world.t)
    world.round()


@pytest.mark.parametrize("value", ["99-1", "1", "1-x", "x"])
def test_an_impossible_copy_is_refused(value: str) -> None:
    world = mirrored(World(nodes=1, checkpoint=OFTEN))
    before = world.record().mirror
    _say(world, FactIn(Kind.MIRRORED, 1, value))
    assert world.record().mirror == before
    assert not [f for f in world.store.list_facts(JOB) if f.value == value]


# ---------------------------------------------------------------- what is deleted


def laid_out(store: MemoryStore, *commits: str) -> None:
    for commit in commits:
        for name in ("0.json", "0/state.bin.part-00000", "0/state.bin.part-00001", "0/skeleton.pkl"):
            store.put(f"jobs/{JOB}/ckpt/{commit}/{name}", b"x")


def left(store: MemoryStore) -> set[str]:
    return {paths.copy_of(path) for path in store.list(paths.copies(JOB))}


def record(*commits: str, **fields: object) -> Record:
    known = tuple(Mirrored(commit, 0, 0.0) for commit in commits)
    return Record(JOB, "u", "job", "", 0.0, mirror=known, mirror_top=max(commits), **fields)  # type: ignore[arg-type]


def test_replaced_copies_are_deleted_and_running_uploads_kept() -> None:
    store = MemoryStore()
    laid_out(store, "1-10", "1-20", "2-30", "2-40", "2-50", "3-60")
    assert cleanup.sweep_copies(store, record("2-40", "1-20"))
    assert left(store) == {"1-20", "2-40", "2-50", "3-60"}


def test_a_sweep_deletes_no_more_than_it_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "MOST", 4)
    store = MemoryStore()
    laid_out(store, "1-10", "2-40")
    assert cleanup.sweep_copies(store, record("2-40")) and left(store) == {"2-40"}, "its four objects"
    laid_out(store, "1-10", "1-20")
    assert not cleanup.sweep_copies(store, record("2-40"))
    assert cleanup.sweep_copies(store, record("2-40")) and left(store) == {"2-40"}


def test_before_the_first_complete_copy_no_running_upload_is_deleted() -> None:
    store = MemoryStore()
    laid_out(store, "0-5", "1-0")
    assert cleanup.sweep_copies(store, Record(JOB, "u", "job", "", 0.0))
    assert left(store) == {"0-5", "1-0"}


def test_a_copys_lists_are_deleted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every deletion in turn: what has a list is whole."""
    monkeypatch.setattr(cleanup, "AT_ONCE", 1)
    for number in range(8):
        store, count = MemoryStore(), 0
        laid_out(store, "1-10", "1-20", "2-40")
        delete = store.delete

        def dies(path: str, at: int = number, delete=delete) -> None:  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            if count > at:
                raise StoreError("the function dies")
            delete(path)

        monkeypatch.setattr(store, "delete", dies)
        with pytest.raises(StoreError):
            cleanup.sweep_copies(store, record("2-40"))
        for commit in left(store):
            there = list(store.list(f"jobs/{JOB}/ckpt/{commit}/"))
            assert len(there) == 4 or f"jobs/{JOB}/ckpt/{commit}/0.json" not in there
        monkeypatch.setattr(store, "delete", delete)
        assert cleanup.sweep_copies(store, record("2-40")) and left(store) == {"2-40"}


def test_deletions_run_eight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate = MemoryStore(), threading.Barrier(cleanup.AT_ONCE, timeout=10)
    laid_out(store, "1-10", "1-20", "2-30", "2-40", "2-50")
    running, most = set[int](), 0

    def delete(path: str, real=store.delete) -> None:  # type: ignore[no-untyped-def]
        nonlocal most
        running.add(threading.get_ident())
        most = max(most, len(running))
        gate.wait()  # passes only when all eight are in flight
        running.discard(threading.get_ident())
        real(path)

    monkeypatch.setattr(store, "delete", delete)
    assert cleanup.sweep_copies(store, record("2-50")) and left(store) == {"2-50"}
    assert most == cleanup.AT_ONCE == 8


def test_the_bucket_has_no_more_copies_than_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a whole life: what is told of is swept, in several looks where there is much, and then forgotten."""
    monkeypatch.setattr(cleanup, "MOST", 3)
    world = World(nodes=1, checkpoint=OFTEN)
    store = world.memory
    trained(world)
    for _ in range(3):
        seen = len(world.bucket)
        world.until(lambda seen=seen: len(world.bucket) > seen, 200)
        laid_out(store, "{}-{}".format(*world.bucket[-1]))
    world.run(300)
    assert left(store) <= {one.commit for one in world.record().mirror}
    assert not [f for f in world.store.list_facts(JOB) if f.kind is Kind.MIRRORED]


@pytest.mark.parametrize("keep", [False, True])
def test_copies_are_deleted_with_the_job_unless_disks_are_kept(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "MOST", 5)
    store = MemoryStore()
    laid_out(store, "1-10", "2-40")
    store.put(paths.output_list(JOB, 0), b"{}")
    store.set_active(JOB)
    over = record("2-40", phase=Phase.DONE, keep_disks=keep)
    bury(store, over, 1.0)
    assert store.active_jobs() == (() if keep else (JOB,)), "while something is left, a tick goes on"
    bury(store, over, 2.0)
    assert store.active_jobs() == ()
    assert left(store) == ({"1-10", "2-40"} if keep else set())
    assert store.get(paths.output_list(JOB, 0)) is not None


def test_a_lost_static_machine_with_the_only_checkpoint_is_replaced_by_the_copy() -> None:
    """Without copies the same world waits for its node: the tests above do not pass by themselves."""
    world = trained(World(nodes=1, the_stack=stack(static=1)))
    machine = paused_without_its_node(world)
    assert machine.status is VmStatus.DEAD
    world.request(RequestKind.RESUME)
    world.run(600)
    assert not world.training()
