"""Documents that make no sense: a round that cannot see decides nothing and deletes nothing, and says so."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.record import Phase, Record, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.controller.reconcile_job import Ended, run_round
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import QUARANTINE_BYTES, CorruptError, Versioned, cut, encode_versioned
from spotkeeper.reconcile.store.store import Store, open_store
from tests.reconcile.world import JOB, World, stack

OTHER = "wxyz2345"


def two_jobs(tmp_path: Path) -> tuple[World, Store]:
    """Two jobs that train, in a real bucket."""
    store = open_store(f"sqlite://{tmp_path}/b.db")
    world = World(nodes=1, store=store, the_stack=stack(static=1), static="never")
    store.put(paths.STACK, msgspec.json.encode(world.stack))
    world.submit()
    world.submit(OTHER)
    world.until(lambda: world.training() and world.training(OTHER), 200)
    return world, store


def truncated(good: bytes) -> bytes:
    return good[: len(good) // 2]


def wrong_types(good: bytes) -> bytes:
    return good.replace(b'"nodes":[', b'"nodes":["x",')


def binary(_: bytes) -> bytes:
    return bytes(range(256)) * 64


def empty(_: bytes) -> bytes:
    return b""


def deep(_: bytes) -> bytes:
    return b'{"v":1,"job":' + b"[" * 100_000


def older(good: bytes) -> bytes:
    return good.replace(b'"v":1', b'"v":0', 1)


def newer(good: bytes) -> bytes:
    return good.replace(b'"v":1', b'"v":2', 1)


def of_another_job(good: bytes) -> bytes:
    return good.replace(JOB.encode(), b"aaaa2345")


def absurd(good: bytes) -> bytes:
    """Well-formed, and no record that any round would write."""
    return good.replace(b'"members":[0]', b'"members":[-7]')


@pytest.mark.parametrize(
    "harm", [truncated, wrong_types, binary, empty, deep, older, newer, of_another_job], ids=lambda harm: harm.__name__
)
def test_an_unreadable_record_stops_its_job_untouched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: object
) -> None:
    world, store = two_jobs(tmp_path)
    good = store.get(paths.record(JOB))
    assert good is not None
    bad = harm(good)  # type: ignore[operator]
    assert bad != good
    store.put(paths.record(JOB), bad)
    world.may_fail = True
    vms, drives, grants = set(world.machines), set(world.drives), store.read_allocation().value.grants
    with caplog.at_level(logging.ERROR, logger="spotkeeper.reconcile"):
        result = tick(store, world, world, world.options)
        assert run_round(store, world, JOB, world, world.options).ended is Ended.UNREADABLE
    assert result.failed == (JOB,) and result.orphans == ()
    alarms = [(line.getMessage()[:24], line.__dict__["job"]) for line in caplog.records]
    assert alarms == [("ALARM: jobs/abcd2345/rec", JOB)] * 2
    world._remove(world.member(0, OTHER))
    world.until(lambda: world.training(OTHER) and world.record(OTHER).gen == 2, 300)
    world.run(600)
    mine = {uid for uid, machine in world.machines.items() if machine.vm.job == JOB}
    assert mine and mine <= vms, "not an orphan, not given back, nothing new"
    assert {key for key in world.drives if JOB in key[0]} == {key for key in drives if JOB in key[0]}
    kept = [grant for grant in store.read_allocation().value.grants if grant.job == JOB]
    assert kept == [grant for grant in grants if grant.job == JOB]
    assert store.get(paths.record(JOB)) == bad
    shown = b"" if harm is of_another_job else cut(bad).encode()  # the other job's record is intact
    aside = f"{paths.record(JOB)}\n".encode() + shown
    kept_aside = [store.get(path) for path in store.list("quarantine/")]
    assert kept_aside == ([] if harm is newer else [aside[:QUARANTINE_BYTES]]), "the same thing is kept once"

    store.put(paths.record(JOB), good)  # repaired: it goes on as if nothing had been
    world.until(world.training, 300)
    assert world.record().gen == 1


def test_an_impossible_record_stops_only_its_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world, store = two_jobs(tmp_path)
    good = store.get(paths.record(JOB))
    assert good is not None and absurd(good) != good
    store.put(paths.record(JOB), absurd(good))
    with caplog.at_level(logging.ERROR, logger="spotkeeper.reconcile"):
        result = tick(store, world, world, world.options)
    assert JOB in result.failed
    assert [one.record.job for one in result.rounds if one.record] == [OTHER]
    assert any("ALARM" in line.getMessage() for line in caplog.records)


@pytest.mark.parametrize("bad", ["", "../../x", "a/b", "A" * 5000])
def test_a_request_with_an_impossible_id_counts_for_nothing(tmp_path: Path, bad: str) -> None:
    """Its object cannot be deleted by that id: every round would fail at its end, and agents would hear nothing."""
    world, store = two_jobs(tmp_path)
    store.put(f"{paths.requests(JOB)}evil", msgspec.json.encode({"id": bad, "kind": "cancel", "at": world.t}))
    assert run_round(store, world, JOB, world, world.options).ended is Ended.QUIET
    assert world.training() and store.list_requests(JOB) == ()


def test_an_unreadable_lease_blocks_no_round(tmp_path: Path) -> None:
    """It only saves money."""
    world, store = two_jobs(tmp_path)
    store.put(paths.lease(JOB), b"\x00null")
    assert run_round(store, world, JOB, world, world.options).ended is Ended.QUIET
    assert store.take_lease(JOB, "x", world.t, 9.0)


def test_unreadable_progress_is_replaced_by_the_next_report(tmp_path: Path) -> None:
    world, store = two_jobs(tmp_path)
    store.put(paths.progress(JOB), b"{")
    assert run_round(store, world, JOB, world, world.options).ended is Ended.UNREADABLE
    world.run(10)
    assert store.read_progress(JOB) is not None
    assert run_round(store, world, JOB, world, world.options).ended is Ended.QUIET


# -- the stack's own documents


def blinded(world: World) -> None:
    def read_allocation() -> Versioned[Allocation]:
        raise CorruptError("stack/allocation: not an Allocation", paths.ALLOCATION)

    world.memory.read_allocation = read_allocation  # type: ignore[method-assign]


def seeing(world: World) -> None:
    del world.memory.read_allocation  # type: ignore[method-assign]


def trained(**more: object) -> World:
    world = World(**more)  # type: ignore[arg-type]
    world.run(10)  # static machines say hello
    world.submit()
    world.until(world.training, 300)
    return world


def test_without_the_allocation_no_grant_changes_and_jobs_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = trained(nodes=2)
    grants = world.store.read_allocation().value.grants
    blinded(world)
    before = world.record()
    with caplog.at_level(logging.ERROR, logger="spotkeeper.reconcile"):
        world.run(130)
    assert any("ALARM: stack/allocation" in line.getMessage() for line in caplog.records)
    assert world.training() and world.record().ver == before.ver
    lost = world.member(1)
    world.preempt(1, notice_s=30)
    world.run(300)
    record = world.record()
    assert record.gen == 1 and record.nodes[1].cur is None, "the loss is seen, and nobody is asked for instead"
    assert lost.vm.uid not in world.machines
    assert "spotkeeper repair allocation" in record.reason, "the user is told by `status`"
    assert len(world.inserts()) == 2
    seeing(world)
    assert world.store.read_allocation().value.grants == grants, "nothing was released on no evidence"
    world.until(lambda: world.training() and world.record().gen == 2, 300)


def test_without_the_allocation_an_intent_that_has_its_grant_is_carried_out() -> None:
    world = World(nodes=1, boot_s=60)
    world.submit()
    world.until(lambda: bool(world.inserts()), 30)
    blinded(world)
    world.until(world.training, 200)


def test_without_the_allocation_no_job_becomes_done() -> None:
    """A grant that cannot be seen may be held: DONE and the loss of the node's word would leak it for ever."""
    world = trained(nodes=1, the_stack=stack(static=1), pools=("fix",))
    blinded(world)
    world.request(RequestKind.CANCEL)
    world.run(300)
    assert world.record().phase is Phase.END
    seeing(world)
    world.until(lambda: world.record().phase is Phase.DONE and not world.store.read_allocation().value.grants, 300)


def test_without_the_allocation_a_static_members_reports_are_accepted() -> None:
    """Its grant is in the record. A member that could not answer a roll call would be given up, and not come back."""
    world = trained(nodes=1, the_stack=stack(static=1), pools=("fix",))
    blinded(world)
    agent = world.member(0).agent
    assert agent is not None
    agent.sync()
    before = world.store.read_progress(JOB)
    world.run(1000)  # far beyond the silence that leads to a roll call
    after = world.store.read_progress(JOB)
    assert before is not None and after is not None and after.step > before.step
    assert world.training() and world.record().gen == 1


def test_without_the_allocation_no_gang_moves() -> None:
    """Whose machines fill the other zones is written there: an empty document would promise room everywhere."""
    world = trained(nodes=2, max_on_demand=0)
    world.run(33)
    world.capacity["z-a", Model.SPOT] = 0
    world.preempt(0)
    world.until(lambda: world.record().dry_since is not None, 400)
    blinded(world)
    world.run(900)
    assert (world.record().move, world.record().zone) == (None, "z-a")
    seeing(world)
    world.until(lambda: world.record().zone == "z-b" and world.training(), 1200)


def test_without_the_allocation_machines_of_no_record_are_left_alone() -> None:
    """The highest attempt is known from grants too: an END record made without them could miss a late insert."""
    world = trained(nodes=1)
    blinded(world)
    ghost = replace(world.member(0).vm, job=OTHER, name=world.member(0).vm.name.replace(JOB, OTHER), uid="ghost")
    world.machines["ghost"] = replace_machine(world, ghost)
    assert tick(world.store, world, world, world.options).orphans == ()
    assert "ghost" in world.machines and world.store.read_record(OTHER) is None
    seeing(world)
    assert tick(world.store, world, world, world.options).orphans == (OTHER,)


def replace_machine(world: World, vm: object) -> object:
    from dataclasses import replace as change

    return change(world.member(0), vm=vm, agent=None)


def test_without_the_stack_a_round_decides_nothing() -> None:
    world = trained(nodes=1)
    before = world.record()

    def read_stack() -> None:
        raise CorruptError("stack/pools.json: not a StackState", paths.STACK)

    world.memory.read_stack = read_stack  # type: ignore[method-assign, assignment]
    world._remove(world.member(0))
    assert run_round(world.store, world, JOB, world, world.options).ended is Ended.UNREADABLE
    assert world.record() == before
    del world.memory.read_stack  # type: ignore[method-assign]
    world.until(lambda: world.training() and world.record().gen == 2, 300)


def test_the_damaged_records_of_these_tests() -> None:
    """The harms above hit what is written."""
    world = trained(nodes=1)
    written = encode_versioned(world.record())
    assert written.startswith(b'{"v":1') and b'"members":[0]' in written and b'"nodes":[' in written
    assert world.record().nodes[0].cur is not None and world.record().nodes[0].cur.state is SlotState.MEMBER
    assert isinstance(world.record(), Record)
