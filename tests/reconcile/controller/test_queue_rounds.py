"""Who has rounds because of the queue: jobs that only wait rest, and a change wakes whom it concerns."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Claim
from spotkeeper.contract.job import JobRequest, RequestKind
from spotkeeper.contract.record import Phase
from spotkeeper.contract.stack import TeamState
from spotkeeper.reconcile.controller.reconcile_job import run_round
from spotkeeper.reconcile.controller.tick import RESTS, TICK_EVERY_S, tick
from spotkeeper.reconcile.decide.queue.claim import ASKED, woken
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
    assert claim is not None
    assert (claim.team, claim.priority, world.record().owner) == (team, priority, user)
    world.options = changed(world.options, user="mallory")
    world.round()
    assert world.record().owner == (user or "mallory"), "the first verified user owns the job"
