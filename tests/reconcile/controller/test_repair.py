"""A rebuilt stack/allocation names every grant that may be in use; a round that read the old one writes nothing."""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Claim, Grant
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.record import Phase
from spotkeeper.contract.stack import ReservedCapacity, TeamState
from spotkeeper.contract.sweep import Trial
from spotkeeper.reconcile.controller import repair
from spotkeeper.reconcile.controller.reconcile_job import Round
from spotkeeper.reconcile.controller.repair import RepairError, rebuild_allocation
from spotkeeper.reconcile.decide.queue import use
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store, open_store
from tests.reconcile.world import JOB, World, stack
from tests.sizes import size

OTHER = "wxyz2345"


def site(tmp_path: Path, **more: object) -> tuple[World, Store]:
    store = open_store(f"sqlite://{tmp_path}/b.db")
    world = World(store=store, the_stack=stack(static=1), **more)  # type: ignore[arg-type]
    store.put(paths.STACK, msgspec.json.encode(world.stack))
    world.run(10)
    return world, store


def keys(grants: tuple[Grant, ...]) -> set[tuple[str, int, int, str, str]]:
    return {(grant.job, grant.node, grant.attempt, grant.resource, grant.zone) for grant in grants}


@pytest.mark.parametrize("moment", range(0, 240, size(21, 7)))
def test_a_repair_at_any_moment_loses_no_grant(tmp_path: Path, moment: int) -> None:
    """Two jobs, a static machine, a loss, a notice, a cancelled job: whatever is under way when it breaks."""
    world, store = site(tmp_path, nodes=2)
    world.submit()
    world.submit(OTHER)
    for second in range(moment):
        world.step()
        if second == 60:
            world.preempt(0, notice_s=60)
        if second == 100 and world.record(OTHER).nodes[0].cur is not None:
            world._remove(world.member(0, OTHER))
        if second == 150:
            world.request(RequestKind.CANCEL)
    before = store.read_allocation().value.grants
    store.put(paths.ALLOCATION, b"\x00 not an allocation")
    world.run(moment % 5)
    made = rebuild_allocation(store, world, world.t)
    assert store.read_allocation().value == made
    pending = {(g.job, g.node, g.attempt) for g in before} - {(g.job, g.node, g.attempt) for g in made.grants}
    for job, node, attempt in pending:  # of no intent: nothing can have come of it
        nodes = world.record(job).nodes
        assert attempt > nodes[node].top or world.record(job).over
        assert not any((m.vm.job, m.vm.node, m.vm.attempt) == (job, node, attempt) for m in world.machines.values())
    world.run(150)
    world.until(lambda: world.training(OTHER), 600)
    world.run(100)
    live = {
        (record.job, index, slot.attempt)
        for record in (world.record(JOB), world.record(OTHER))
        for index, node in enumerate(record.nodes)
        for slot in (node.cur, node.next)
        if slot is not None
    }
    assert {(g.job, g.node, g.attempt) for g in store.read_allocation().value.grants} == live, (
        "none too few, none for ever"
    )


def test_a_round_that_read_the_old_allocation_writes_no_intent(tmp_path: Path) -> None:
    """It holds a grant that nobody sees any more: its record was written once more, so its own write fails."""
    world, store = site(tmp_path, nodes=1)
    world.submit()
    world.until(world.training, 200)
    world._remove(world.member(0))
    stalled = Round(store, world, JOB, world, world.options)
    real = store.cas_record

    def repaired_first(record: object, token: str) -> str | None:
        store.cas_record = real  # type: ignore[method-assign]
        store.put(paths.ALLOCATION, b"{")
        rebuild_allocation(store, world, world.t)
        return real(record, token)  # type: ignore[arg-type]

    store.cas_record = repaired_first  # type: ignore[method-assign, assignment]
    top = world.record().nodes[0].top
    assert stalled.run().ended.value == "lost"
    assert world.record().nodes[0].top == top
    assert all(grant.attempt <= top for grant in store.read_allocation().value.grants), "that grant is gone, unused"
    world.until(lambda: world.training() and world.record().gen == 2, 300)


def test_a_static_machine_without_dropped_stays_granted(tmp_path: Path) -> None:
    """The record names it no more; only the ledger does. Granted to another job, it would train for two."""
    world, store = site(tmp_path, nodes=1, pools=("fix",))
    world.submit()
    world.until(world.training, 200)
    agent = world.member(0).agent
    assert agent is not None
    agent.hung = True
    world.request(RequestKind.CANCEL)
    world.run(130)
    assert world.record().phase is Phase.DONE
    before = keys(store.read_allocation().value.grants)
    assert len(before) == 1
    store.put(paths.ALLOCATION, b"[]")
    assert keys(rebuild_allocation(store, world, world.t).grants) == before
    agent.hung = False
    world.run(130)
    assert store.read_allocation().value.grants == ()


def test_machines_of_a_job_with_an_unreadable_record_keep_their_grants(tmp_path: Path) -> None:
    world, store = site(tmp_path, nodes=1, static="never")
    world.submit()
    world.until(world.training, 200)
    before = keys(store.read_allocation().value.grants)
    store.put(paths.record(JOB), b"{")
    store.put(paths.ALLOCATION, b"{")
    for path in store.list(f"jobs/{JOB}/ledger/"):  # and the ledger has gone the same way: the cloud still lists it
        store.delete(path)
    assert keys(rebuild_allocation(store, world, world.t).grants) == before


def test_refused_repairs(tmp_path: Path) -> None:
    world, store = site(tmp_path, nodes=1)
    world.submit()
    world.until(world.training, 200)
    with pytest.raises(RepairError, match="is valid"):
        rebuild_allocation(store, world, world.t)
    good = store.get(paths.ALLOCATION)
    assert good is not None
    store.put(paths.ALLOCATION, good.replace(b'"v":1', b'"v":2', 1))
    with pytest.raises(RepairError, match="format 2"):
        rebuild_allocation(store, world, world.t)
    store.put(paths.ALLOCATION, b"{")
    world.blind.add("z-c")
    with pytest.raises(RepairError, match="no answer from z-c"):
        rebuild_allocation(store, world, world.t)
    assert store.get(paths.ALLOCATION) == b"{"


def test_one_static_machine_of_two_jobs_is_refused_and_two_machines_are_not() -> None:
    first, second = (Grant(job, 0, 1, "machine:sk-t-fix-s0") for job in (JOB, OTHER))
    repair._check_nodes([first, replace(second, resource="machine:sk-t-fix-s1"), replace(first, resource="slot:pool")])
    with pytest.raises(RepairError, match=f"jobs {JOB} and {OTHER} both seem to have static machine sk-t-fix-s0"):
        repair._check_nodes([first, second])


def test_the_queue_keeps_who_waits_since_when_and_what_teams_have_used(tmp_path: Path) -> None:
    third = "third222"
    teams = (TeamState("vision", ("ann",), max_usd_month=1000.0), TeamState("speech", ("max",)))
    store = open_store(f"sqlite://{tmp_path}/b.db")
    world = World(store=store, the_stack=replace(stack(max_machines=2), teams=teams), nodes=2)
    store.put(paths.STACK, msgspec.json.encode(world.stack))
    for job, user, priority in ((JOB, "ann", "low"), (OTHER, "max", "normal"), (third, "ann", "low")):
        world.options = changed(world.options, user=user)
        world.spec = replace(world.spec, priority=priority)
        world.submit(job)
        if job == JOB:
            world.until(world.training)
            world.preempt(0)
            world.run(30 * 60)
    world.until(lambda: world.training(OTHER))
    world.run(3600)
    before = store.read_allocation().value
    store.put(paths.ALLOCATION, b"\x00")
    made = rebuild_allocation(store, world, world.t)

    def told(claim: Claim) -> tuple[object, ...]:
        return claim.job, claim.team, claim.priority, claim.min, claim.max, claim.reserved, len(claim.recalls)

    assert sorted(map(told, made.claims)) == sorted(map(told, before.claims))
    for claim in made.claims:
        old = before.claim(claim.job)
        assert old is not None
        assert claim.waits == pytest.approx(old.waits, abs=120)
    assert {claim.job: bool(claim.waits) for claim in made.claims} == {JOB: True, OTHER: False, third: True}
    used, was = ({one.team: one for one in use.current(each, world.stack, world.t)} for each in (made, before))
    assert used.keys() == was.keys() == {"vision", "speech"}
    for team, one in used.items():
        assert one.usd == pytest.approx(was[team].usd, rel=0.01)
        assert one.month_usd == pytest.approx(was[team].month_usd, rel=0.01)
        assert one.usd > 0.1
    world.run(120)
    assert world.training(OTHER) and world.record(JOB).hold is not None


def test_a_trial_whose_machines_are_being_deleted_still_counts_in_its_search(tmp_path: Path) -> None:
    world, store = site(tmp_path, nodes=1, static="never")
    world.spec = replace(world.spec, trial=Trial("lr", 3, "loss", count=9, parallel=2))
    world.submit()
    world.until(world.training, 200)
    world.request(RequestKind.CANCEL)
    world.until(lambda: world.record().over)
    before = store.read_allocation().value
    assert before.grants and [(claim.max, claim.sweep, claim.parallel) for claim in before.claims] == [(0, "lr", 2)]
    store.put(paths.ALLOCATION, b"{")
    made = rebuild_allocation(store, world, world.t)
    assert keys(made.grants) == keys(before.grants) and made.claims == before.claims
    world.until(lambda: world.record().phase is Phase.DONE)
    world.run(70)
    assert store.read_allocation().value.claims == ()


def test_machines_in_reserved_capacity_keep_its_name(tmp_path: Path) -> None:
    """The ledger does not have it. Without the name, the next job would get the same reserved machines."""
    store = open_store(f"sqlite://{tmp_path}/b.db")
    pool = replace(stack().pools[0], reservations=(ReservedCapacity("res", "z-a", 2),))
    world = World(nodes=2, store=store, the_stack=replace(stack(), pools=(pool,)))
    store.put(paths.STACK, msgspec.json.encode(world.stack))
    world.submit()
    world.until(world.training, 200)
    before = keys(store.read_allocation().value.grants)
    assert {resource for *_, resource, _ in before} == {"slot:pool/reserved/z-a/res"}
    store.put(paths.ALLOCATION, b"{")
    assert keys(rebuild_allocation(store, world, world.t).grants) == before
    store.put(paths.record(JOB), b"{")  # then the cloud's listing tells
    store.put(paths.ALLOCATION, b"{")
    assert keys(rebuild_allocation(store, world, world.t).grants) == before
