"""Who has rounds because of the queue: jobs that only wait rest, and a change wakes whom it concerns."""

from __future__ import annotations

from dataclasses import replace as changed

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, TeamUse
from spotkeeper.contract.job import JobRequest, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Phase
from spotkeeper.contract.stack import TeamState
from spotkeeper.reconcile.controller.lease import Lease
from spotkeeper.reconcile.controller.reconcile_job import OWNER_WAITS, Ended, run_round
from spotkeeper.reconcile.controller.tick import RESTS, TICK_EVERY_S, tick
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.queue.claim import ASKED, woken
from spotkeeper.reconcile.store.documents import CorruptError, decode
from tests.reconcile.world import JOB, World, stack

WAITING = tuple(f"wait{a}{b}{b}2" for a in "abcd" for b in "xyz")


def crowded(**more: object) -> World:
    """One machine, one job that trains on it, and a dozen that wait."""
    world = World(the_stack=replace(stack(max_machines=1), **more))
    world.submit()
    world.until(world.training)
    for job in WAITING:
        world.submit(job)
    return world


def test_jobs_that_only_wait_have_a_round_in_one_of_thirty_ticks() -> None:
    world = crowded()
    rounds: list[str] = []
    for _ in range(RESTS):
        world.t += TICK_EVERY_S
        done = tick(world.store, world, world, world.options)
        rounds += [result.record.job for result in done.rounds if result.record is not None]
    assert sorted(set(rounds)) == sorted({JOB, *WAITING})
    assert rounds.count(JOB) >= RESTS
    assert all(rounds.count(job) == 1 for job in WAITING)


def test_a_round_names_the_jobs_for_which_it_freed_machines() -> None:
    world = crowded()
    world.store.put_request(JOB, JobRequest(id="c", kind=RequestKind.CANCEL, at=world.t))
    woken: set[str] = set()
    while not woken:
        world.t += 1.0
        world._cloud_moves()
        result = run_round(world.store, world, JOB, world, world.options)
        woken |= result.woken
        assert result.record is not None
        assert result.record.phase is not Phase.DONE or woken
    assert woken == {WAITING[0]}


def test_a_job_that_begins_to_wait_wakes_those_that_may_make_room() -> None:
    world = World(the_stack=stack(max_machines=4))
    for job, priority in ((JOB, "normal"), ("low1low2", "low"), ("low2low2", "low"), ("norm1222", "normal")):
        world.spec = replace(world.spec, priority=priority)
        world.submit(job)
        world.until(lambda job=job: world.training(job))  # type: ignore[misc]
    world.spec = replace(world.spec, priority="normal")
    world.submit("later222")
    before = replace(world.memory.allocation[0], claims=())
    assert woken(before, world.memory.allocation[0]) >= {"low1low2", "low2low2"}
    assert woken(world.memory.allocation[0], world.memory.allocation[0]) == frozenset()
    waits = replace(before, grants=world.memory.allocation[0].grants)
    asked = woken(waits, replace(waits, claims=(Claim("later222", 1, 1, since=0.0, waits=1.0),)))
    assert len(asked) == ASKED


def test_a_claim_of_a_job_that_is_nowhere_is_dropped() -> None:
    world = crowded()
    held, version = world.memory.allocation
    stray = Claim("nowhere2", 1, 1, since=0.0, waits=1.0)
    world.memory.allocation = (replace(held, claims=(*held.claims, stray)), version + 1)
    for _ in range(RESTS):
        world.t += TICK_EVERY_S
        tick(world.store, world, world, world.options)
    jobs = [claim.job for claim in world.memory.allocation[0].claims]
    assert "nowhere2" not in jobs and set(WAITING) <= set(jobs)


@pytest.mark.parametrize(
    ("user", "wants", "team", "priority"),
    [
        ("ann", "high", "vision", 2),
        ("bob", "high", "vision", 1),
        ("eve", "high", "default", 2),
        ("", "high", "default", 1),
        ("", "low", "default", 0),
    ],
)
def test_only_a_verified_user_has_a_team_and_its_rights(user: str, wants: str, team: str, priority: int) -> None:
    teams = (TeamState("vision", ("ann", "bob"), high=("ann",)),)
    world = World(the_stack=replace(stack(), teams=teams))
    world.spec = replace(world.spec, priority=wants, team="vision")
    world.options = changed(world.options, user=user)
    world.submit()
    claim = world.memory.allocation[0].claim(JOB)
    assert (claim is None) is (not user), "the call that tells whose job it is may still come"
    if not user:
        assert not world.events(Event.INTENT)
        world.t += Times().owner_s
        world.round()
        claim = world.memory.allocation[0].claim(JOB)
    assert claim is not None
    assert world.events(Event.INTENT)
    assert (claim.team, claim.priority, world.record().owner) == (team, priority, user)
    world.options = changed(world.options, user="mallory")
    world.round()
    assert world.record().owner == (user or "mallory"), "the first verified user owns the job"


@pytest.mark.parametrize("frees", [2, OWNER_WAITS + 1], ids=["a short round", "a round that does not end"])
def test_a_user_who_submits_while_a_tick_starts_the_job_owns_it(frees: int) -> None:
    world = World()
    world.submit()  # its first round knows no user, as a tick's
    other, naps = Lease(world.store, JOB, world, None), list[float]()
    assert other.take()

    def sleep(seconds: float) -> None:
        naps.extend([seconds] if seconds else [])  # 0: a pause of the round itself
        if len(naps) == frees:
            other._give_back()

    def poke(user: str) -> Ended:
        options = changed(world.options, user=user, sleep=sleep)
        return run_round(world.store, world, JOB, world, options).ended

    in_time = frees <= OWNER_WAITS
    assert poke("ann") is (Ended.QUIET if in_time else Ended.BUSY)
    assert (world.record().owner, len(naps)) == (("ann", 2) if in_time else ("", OWNER_WAITS))
    if in_time:
        assert other.take()
        assert poke("bob") is Ended.BUSY
        assert len(naps) == 2, "a job that has an owner makes nobody wait"


def test_a_job_takes_no_machines_from_others_before_its_owner_is_known() -> None:
    """As one of the team ``default``, which has used nothing, it could take those of its owner's own team."""
    world = World(the_stack=replace(stack(max_machines=1), teams=(TeamState("vision", ("ann",)),)))
    world.options = changed(world.options, user="ann")
    world.submit()
    world.until(world.training)
    world.run(1800)
    held, version = world.memory.allocation
    world.memory.allocation = (replace(held, use=(TeamUse("vision", 1000.0, world.t),)), version + 1)
    world.options = changed(world.options, user="")
    world.submit(WAITING[0])
    tick(world.store, world, world, world.options)
    world.options = changed(world.options, user="ann")
    world.round(WAITING[0])
    world.run(1800)
    assert not world.events(Event.HOLD) and not world.record().stop
    claim = world.memory.allocation[0].claim(WAITING[0])
    assert claim is not None and (claim.team, claim.waiting) == ("vision", True)


def test_a_tick_corrects_claims_of_a_clock_that_was_ahead() -> None:
    world = crowded()
    held, version = world.memory.allocation
    late = world.t + 1e12
    wrong = [replace(one, waits=late, recalls=(1.0, late), lapsed=late, dry_since=late) for one in held.claims[1:]]
    use = (TeamUse("default", 5.0, late), TeamUse("vision", 5.0, world.t))
    world.memory.allocation = (replace(held, claims=(held.claims[0], *wrong), use=use), version + 1)
    tick(world.store, world, world, world.options)
    new = world.memory.allocation[0]
    for claim in new.claims[1:]:
        assert {claim.waits, claim.lapsed, claim.dry_since, *claim.recalls} == {1.0, world.t}
    assert {one.at for one in new.use} == {world.t}


@pytest.mark.parametrize(("field", "value"), [("min", -1), ("max", 10_001), ("reserved", -1), ("priority", 3)])
def test_a_claim_with_a_number_that_no_round_writes_makes_the_allocation_unreadable(field: str, value: int) -> None:
    claim = replace(Claim(JOB, 1, 1, since=0.0), **{field: value})
    with pytest.raises(CorruptError, match=rf"^stack/allocation: .*claims\[0\]\.{field}") as error:
        decode(msgspec.json.encode(Allocation(claims=(claim,))), Allocation, "stack/allocation")
    assert "spotkeeper repair allocation" in error.value.remedy
