"""A record that no round has written counts only for what a submitter may decide."""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.client import submit
from spotkeeper.contract.generation import Sync
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Node, Phase, Record, Slot, SlotState, TrialProgress
from spotkeeper.contract.stack import Model, TeamState
from spotkeeper.contract.sweep import Trial
from spotkeeper.reconcile.controller import reconcile_job
from spotkeeper.reconcile.controller.adoption import adopt, adopted
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.controller.intake import accept
from spotkeeper.reconcile.controller.reconcile_job import Ended, Prefetched, run_round
from spotkeeper.reconcile.controller.repair import rebuild_allocation, rewritten
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.store import Store, open_store
from tests.reconcile.world import JOB, World, stack

OTHER = "wxyz2345"
STATIC = stack(static=1).pools[1].machines[0].name
TEAMS = (TeamState("vision", ("ann",), high=("ann",)),)
TRIAL = Trial("lr", 3, "loss", count=9, rungs=(10,))


def forged(world: World, **more: Any) -> Record:
    """A running job of Ann's with machines, results and a ledger entry, as Mallory may write it."""
    slots = [
        Slot(1, SlotState.MEMBER, "fix", "z-a", Model.STATIC, world.t, machine=STATIC, uid="9", boot="b"),
        Slot(1, SlotState.MEMBER, "pool", "z-a", Model.SPOT, world.t, uid="8", boot="b"),
    ]
    made = Record(
        job=JOB,
        uid="00000000-0000-0000-0000-000000000001",
        name="job",
        spec_sha256="",
        created=world.t - 9e5,
        ver=7,
        nonce="forged",
        gen=3,
        nodes=tuple(Node(top=1, cur=slot) for slot in slots),
        members=(0, 1),
        owner="ann",
        trial=TrialProgress(TRIAL, 0, (0.1,)),
        outbox=(Entry(world.t, "intent.r0.a1", Event.INTENT, node=0, attempt=1, pool="pool", zone="z-a"),),
    )
    return replace(made, **more)


def put(world: World, record: Record) -> None:
    world.store.put_spec(JOB, replace(world.spec, priority="high", team="vision"))
    world.store.set_active(JOB)
    assert world.store.create_record(record)


def test_each_write_of_an_adoption_has_a_name_of_its_own() -> None:
    """A writer whose answer was lost finds out by it whether the record is the one that it wrote."""
    names = set[str]()
    for _ in range(2):
        world = World(2)
        put(world, forged(world))
        assert adopt(world.store, JOB, world.t)
        names.add(world.record().nonce)
    assert len(names) == 2 and not names & {"forged", ""}


def test_a_forged_record_names_no_owner_no_machines_and_no_results() -> None:
    world = World(2, the_stack=replace(stack(static=1), teams=TEAMS))
    put(world, forged(world))
    world.options = changed(world.options, user="mallory")
    world.t += Times().owner_s
    world.round()
    record, claim = world.record(), world.memory.allocation[0].claim(JOB)
    assert (record.owner, record.gen, record.trial, record.members) == ("mallory", 0, None, ())
    assert claim is not None
    assert claim.team == "default"
    assert record.created == pytest.approx(world.t, abs=3700)
    intents = {(entry.node, entry.attempt) for entry in world.events(Event.INTENT)}
    granted = {(grant.node, grant.attempt) for grant in world.memory.allocation[0].grants}
    assert intents == granted, "each of the function's own"
    assert not world.memory.sweeps, "nobody trained, so nobody has reported"
    world.options = changed(world.options, user="")
    world.until(world.training)


def test_a_submitters_record_stays_as_it_is() -> None:
    world = World()
    store = world.store
    world.store.put_spec(JOB, world.spec)
    store.set_active(JOB)
    made = submit._record(store, JOB, world.spec, "0" * 64, world.t, "ann", 20000)
    assert adopted(made, world.t + 60) is made
    assert store.create_record(made)
    read = store.read_record(JOB)
    assert read is not None
    writes = world.memory.record_writes
    assert reconcile_job.Lease(store, JOB, world, None).take()
    assert world.memory.record_writes == writes


def test_a_call_before_the_record_is_there_begins_nothing() -> None:
    world = World()
    assert run_round(world.store, world, JOB, world, world.options).ended is Ended.ABSENT
    assert not world.memory.leases, "else the record that comes would count as the function's own"


def test_a_record_that_a_tick_read_before_it_was_adopted_decides_nothing() -> None:
    """Another process adopts it between the tick's read and the tick's round."""
    world = World(2, the_stack=stack(static=1))
    put(world, forged(world))
    seen: list[Prefetched | None] = []
    real = reconcile_job.run_round

    def late(*args: Any) -> Any:
        if not seen:
            seen.append(args[5])
            world.round()
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spotkeeper.reconcile.controller.tick.run_round", late)
        tick(world.store, world, world, world.options)
    assert seen == [None]
    assert {entry.attempt for entry in world.events(Event.INTENT)} <= {1}
    assert all(entry.model is not None for entry in world.events(Event.INTENT)), "none is the forged one"


@pytest.mark.parametrize("lost", ["lease", "nothing"])
def test_a_running_job_keeps_its_record(lost: str) -> None:
    world = World(2)
    world.submit()
    world.until(world.training)
    before = world.record()
    if lost == "lease":
        world.memory.leases.clear()
    world.round()
    assert (world.record().gen, world.record().members) == (before.gen, before.members)
    assert world.record().nodes[0].cur == before.nodes[0].cur


@pytest.mark.parametrize("uid", ["", "u", "../x"])
def test_a_uid_that_is_none_is_replaced(uid: str) -> None:
    """No idempotency key could be made of it, and each tick would raise an alarm."""
    world = World()
    put(world, forged(world, uid=uid, nodes=(Node(),)))
    world.until(world.training)
    assert world.record().uid != uid


def test_an_orphans_record_stays_ended() -> None:
    world = World()
    end = forged(world, phase=Phase.END)
    assert adopted(end, world.t) == replace(end, owner="", trial=None, outbox=(), ver=1)


def site(tmp_path: Path) -> tuple[World, Store]:
    store = open_store(f"sqlite://{tmp_path}/b.db")
    world = World(2, the_stack=stack(static=1), store=store)
    store.put(paths.STACK, msgspec.json.encode(world.stack))
    return world, store


def test_a_repair_believes_no_machine_of_a_forged_record(tmp_path: Path) -> None:
    """Else its slots would be grants: all static machines, and the whole of the stack's caps."""
    world, store = site(tmp_path)
    world.submit(OTHER)
    world.until(lambda: world.training(OTHER))
    before = store.read_allocation().value.grants
    assert before
    store.put(paths.ALLOCATION, b"\x00")
    put(world, forged(world))
    made = rebuild_allocation(store, world, world.t)
    assert {grant.job for grant in made.grants} == {OTHER}
    assert {(one.node, one.attempt) for one in made.grants} == {(one.node, one.attempt) for one in before}
    assert [claim.job for claim in made.claims if claim.reserved] == [OTHER]
    assert not [entry for entry in store.list_ledger(JOB) if entry.event is Event.INTENT]


def test_a_record_that_a_repair_wrote_is_not_adopted_again(tmp_path: Path) -> None:
    """A takeover by another region raises the attempt numbers of a job that no round has seen."""
    world, store = site(tmp_path)
    put(world, forged(world, outbox=()))

    def raised(record: Record) -> Record:
        return replace(record, nodes=tuple(replace(node, top=100) for node in record.nodes))

    rewritten(store, JOB, world.stack, world.t, raised)
    world.round()
    assert {node.top for node in world.record().nodes} == {101}


def test_a_static_machine_reports_to_no_forged_record(tmp_path: Path) -> None:
    world, store = site(tmp_path)
    put(world, forged(world))
    store.put(paths.ALLOCATION, b"\x00")
    with pytest.raises(CorruptError):
        accept(store, world.stack, Speaker("9", STATIC, "z-a"), Sync("b"), world.t)
    assert store.list_facts(JOB) == ()
