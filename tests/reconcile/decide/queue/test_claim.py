"""Whole jobs under one queue: machines go to whom they are due, and come back."""

from __future__ import annotations

from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.job import JobRequest, Nodes, RequestKind, spec_sha256
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import PriceRun
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.contract.stack import Price, TeamState
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.queue import claim, use
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import calm, changed, on_node, on_record
from tests.reconcile.world import JOB, World, stack

SECOND = "wxyz2345"
MINUTE = 60.0


def world_of(machines: int, **spec: object) -> World:
    world = World(the_stack=stack(max_machines=machines), **spec)  # type: ignore[arg-type]
    world.spec = replace(world.spec, priority="low")
    return world


def submit(world: World, job: str, **spec: object) -> None:
    world.spec = replace(world.spec, **spec)
    world.submit(job)


def shrunk() -> World:
    """An elastic job has given two of its four machines to another one, and trains on."""
    world = world_of(4, nodes=Nodes(2, 4))
    submit(world, JOB)
    world.until(lambda: world.training() and len(world.record().members) == 4)
    world.run(20 * MINUTE)
    submit(world, SECOND, priority="normal", nodes=2)
    world.until(lambda: world.training(SECOND), 6 * MINUTE)
    world.until(lambda: world.training() and len(world.record().members) == 2, 60)
    return world


def repeated(world: World, job: str) -> list[int | None]:
    return [entry.again for entry in world.events(Event.GENERATION, job=job) if entry.again]


def test_a_job_of_a_higher_priority_takes_the_machines_and_gives_them_back() -> None:
    world = world_of(2, nodes=2, steps=2000)
    submit(world, JOB)
    world.until(world.training)
    world.run(20 * MINUTE)
    submit(world, SECOND, priority="normal")
    world.until(lambda: world.training(SECOND), 6 * MINUTE)
    held = world.record()
    assert (held.phase, held.hold) == (Phase.HOLD, Hold.QUEUE)
    assert held.reason == f"waiting in the queue: its machines go to job job-{SECOND}; it goes on by itself"
    assert len(world.dynamic()) == 2
    world.until(lambda: world.record(SECOND).outcome is Outcome.SUCCEEDED, 3600)
    world.until(world.training, 6 * MINUTE)
    world.until(lambda: world.record().phase is Phase.DONE, 3600)
    assert world.record().outcome is Outcome.SUCCEEDED
    assert not repeated(world, JOB) and not repeated(world, SECOND), "no step is trained twice"
    assert world.memory.allocation[0].claims == ()


@pytest.mark.parametrize(("policy", "on_demand"), [("on-demand", True), ("balanced", False), ("spot", False)])
def test_a_claim_says_whether_the_job_takes_on_demand_machines_alone(policy: str, on_demand: bool) -> None:
    made = claim.claim(Draft(*calm(2, policy=policy)))
    assert made is not None and made.on_demand is on_demand


@pytest.mark.parametrize(("begun", "since"), [(NOW - 500.0, NOW - 500.0), (0.0, NOW)])
def test_a_job_that_runs_without_a_claim_keeps_its_machines(begun: float, since: float) -> None:
    made = claim.claim(changed(calm(2), on_record(gen_since=begun)))
    assert made is not None and (made.reserved, made.reserved_at, made.waits) == (2, since, None)
    waits = claim.claim(changed(calm(1), on_node(0, cur=None)), ())
    assert waits is not None and (waits.reserved, waits.waits) == (0, NOW)


def test_a_job_that_has_just_started_keeps_its_machines() -> None:
    world = world_of(2, nodes=2)
    submit(world, JOB)
    world.until(world.training)
    started = world.t
    submit(world, SECOND, priority="normal")
    world.until(lambda: world.record().stop, 1200)
    assert 15 * MINUTE <= world.t - started <= 17 * MINUTE


def test_a_job_that_a_signal_stops_takes_no_more_than_it_needs() -> None:
    """Others could not have it back; not even if a user asks for more."""
    world = world_of(4, nodes=Nodes(2, 4), stop="signal")
    submit(world, JOB)
    world.until(lambda: world.training() and len(world.record().members) == 2)
    world.request(RequestKind.RESIZE, nodes=4)
    world.run(20 * MINUTE)
    assert (len(world.record().members), world.memory.allocation[0].claims[0].max) == (2, 2)


def test_a_job_past_its_last_step_does_not_grow_by_itself() -> None:
    """It would stop for that, and its code after the loop would run again."""
    world = shrunk()
    agent = world.member(0).agent
    assert agent is not None
    world.loop_steps = agent.step_no + 5
    world.run(2 * MINUTE)
    gen = world.record().gen
    world.store.put_request(SECOND, JobRequest(id="c", kind=RequestKind.CANCEL, at=world.t))
    world.run(30 * MINUTE)
    assert (world.record().gen, len(world.record().members)) == (gen, 2) and world.record().phase is Phase.RUN


def test_an_elastic_job_shrinks_instead_and_grows_again() -> None:
    world = shrunk()
    assert world.record().phase is Phase.RUN
    world.store.put_request(SECOND, JobRequest(id="c", kind=RequestKind.CANCEL, at=world.t))
    world.until(lambda: len(world.record().members) == 4 and world.training(), 3600)
    assert not repeated(world, JOB)


def test_a_user_may_keep_a_job_at_the_size_to_which_it_shrank() -> None:
    world = shrunk()
    world.request(RequestKind.RESIZE, nodes=2)
    assert (world.events(Event.REQUEST)[-1].detail, world.record().asked) == ("by user", 2)
    world.run(5)
    world.request(RequestKind.RESIZE, nodes=2)
    assert world.events(Event.REQUEST)[-1].detail == "refused: the job has 2 already"
    world.store.put_request(SECOND, JobRequest(id="c", kind=RequestKind.CANCEL, at=world.t))
    world.until(lambda: world.record(SECOND).phase is Phase.DONE, 3600)
    world.run(3600)
    assert (len(world.record().members), world.training()) == (2, True)


def test_a_job_that_cannot_shrink_stops_as_a_whole_and_is_not_asked_again() -> None:
    """At the last save all of its disks fail, so that no node may stay alone."""
    world = world_of(3, nodes=Nodes(1, 3))
    submit(world, JOB)
    world.until(lambda: world.training() and len(world.record().members) == 3)
    world.run(20 * MINUTE)
    submit(world, SECOND, priority="normal", nodes=1)
    world.until(lambda: world.record().stop, 60)
    for agent in world.agents():
        agent.say(Kind.FULL, world.record().gen)
    world.until(lambda: world.training(SECOND), 10 * MINUTE)
    assert (world.record().hold, world.record().parked) == (Hold.QUEUE, ())
    asked = [entry.detail for entry in world.events(Event.REQUEST)]
    assert asked == [
        f"2 nodes: machines went to job job-{SECOND}",
        "the resize is given up, because no node has the newest checkpoint",
    ]
    world.store.put_request(SECOND, JobRequest(id="c", kind=RequestKind.CANCEL, at=world.t))
    world.until(lambda: world.training() and len(world.record().members) == 3, 3600)


def test_a_stopped_elastic_job_comes_back_with_all_its_disks() -> None:
    """Only one of them has the newest checkpoint, and the record does not say which."""
    world = world_of(2, nodes=Nodes(1, 2))
    submit(world, JOB)
    world.until(lambda: world.training() and len(world.record().members) == 2)
    for drive in world.drives.values():
        drive.broken = drive.disk.node == 0
    world.run(20 * MINUTE)
    submit(world, SECOND, priority="normal", nodes=2)
    world.until(lambda: world.training(SECOND), 10 * MINUTE)
    submit(world, "third222", nodes=1)
    world.store.put_request(SECOND, JobRequest(id="c", kind=RequestKind.CANCEL, at=world.t))
    world.until(lambda: world.training("third222"), 10 * MINUTE)
    world.run(10 * MINUTE)
    assert (world.record().hold, world.record().size) == (Hold.QUEUE, None)
    world.store.put_request("third222", JobRequest(id="c", kind=RequestKind.CANCEL, at=world.t))
    for drive in world.drives.values():
        drive.broken = False
    world.until(world.training, 10 * MINUTE)
    assert not repeated(world, JOB)


def test_an_elastic_job_that_stops_before_it_can_shrink_waits_with_all_its_disks() -> None:
    """While it saves with four machines, the queue leaves it two; then all four vanish."""
    world = world_of(4, nodes=Nodes(2, 4))
    submit(world, JOB)
    world.until(lambda: world.training() and len(world.record().members) == 4)
    world.run(20 * MINUTE)
    for node in range(4):
        world.preempt(node)
    world.run(1)
    world.round()
    assert not any(node.cur is not None and node.cur.uid for node in world.record().nodes)
    held, version = world.memory.allocation
    claims = [replace(one, reserved=2, whom=SECOND) if one.job == JOB else one for one in held.claims]
    world.memory.allocation = (replace(held, claims=tuple(claims)), version + 1)
    world.round()
    assert (world.record().size, world.events(Event.REQUEST)) == (None, [])
    world.until(lambda: world.training() and len(world.record().members) == 4)
    assert not repeated(world, JOB)


@pytest.mark.parametrize(("name", "shown"), [("gpt-2", "gpt-2"), ("a\x1b[2J", SECOND), ("a" * 41, SECOND)])
def test_a_reason_names_a_job_unless_its_name_is_none(name: str, shown: str) -> None:
    draft = Draft(*on_record(job=SECOND, name=name)(*calm(1)))
    own = claim.claim(draft)
    assert own is not None
    assert Allocation(claims=(replace(own, job=SECOND),)).name(SECOND) == shown


def test_jobs_of_one_class_start_in_the_order_of_their_submission() -> None:
    world = world_of(2, nodes=2, steps=600)
    jobs = [JOB, "bcde2345", "cdef2345", "defg2345"]
    for job in jobs:
        submit(world, job)
        world.run(5)
    ends: list[str] = []
    while len(ends) < len(jobs):
        world.step()
        assert world.t < 1_010_000
        ends += [job for job in jobs if job not in ends and world.record(job).over]
    assert ends == jobs


def test_a_job_waits_since_it_was_submitted_whatever_comes_later() -> None:
    """Its class rises with the days that it has waited."""
    world = world_of(2, nodes=2)
    submit(world, JOB)
    world.until(world.training)

    def since() -> float | None:
        return next(claim.waits for claim in world.memory.allocation[0].claims if claim.job == SECOND)

    submit(world, SECOND)
    world.run(10)
    began = since()
    assert began is not None
    submit(world, "cdef2345", priority="normal")
    world.run(30 * MINUTE)
    assert since() == began < world.t - 30 * MINUTE


def test_a_user_pauses_a_job_that_waits_and_it_leaves_the_queue() -> None:
    world = world_of(2, nodes=2)
    submit(world, JOB)
    world.until(world.training)
    world.run(20 * MINUTE)
    submit(world, SECOND, priority="normal")
    world.until(lambda: world.record().hold is Hold.QUEUE, 600)
    world.request(RequestKind.PAUSE)
    assert world.record().hold is Hold.PAUSE
    world.run(2 * MINUTE)
    assert [claim.job for claim in world.memory.allocation[0].claims] == [SECOND]
    world.request(RequestKind.RESUME)
    world.run(2 * MINUTE)
    assert world.record().phase is Phase.RUN and "waiting in the queue" in world.record().reason


@pytest.mark.parametrize("limit", [{"max_machines": 3}, {"max_usd_hour": 0.98}])
def test_a_team_never_has_more_machines_than_its_limit(limit: dict[str, float]) -> None:
    """Also while a machine is replaced, and while another job of the team gives its machines up."""
    team = TeamState("vision", ("ann",), **limit)  # type: ignore[arg-type]
    world = World(the_stack=replace(stack(max_machines=9), teams=(team,)), nodes=3)  # $0.32 a machine at most
    world.options = with_(world.options, user="ann")
    submit(world, JOB, priority="low")
    world.until(world.training)
    world.preempt(1, notice_s=120)
    most = 0
    for second in range(3600):
        if second == 1800:
            submit(world, SECOND, priority="normal")
        world.step()
        most = max(most, len(world.memory.allocation[0].grants))
    assert most == 3
    assert world.training(SECOND) and world.record().hold is Hold.QUEUE


def test_a_gang_gets_all_of_its_machines_though_its_first_choice_is_too_dear_for_its_team() -> None:
    """At their market prices the machines of the dear pool come first; at their list prices two would be too many."""
    team = TeamState("vision", ("ann",), max_usd_hour=1.7)
    base = stack(max_machines=9).pools[0]
    dear = {zone: Price(on_demand=2.0, spot=0.8) for zone in base.prices}
    pools = base, replace(base, name="dear", prices=dear)
    world = World(the_stack=replace(stack(), pools=pools, teams=(team,)), nodes=3)
    world.prices["dear"] = (PriceRun(world.t - 1e6, 0.1),)
    world.options = with_(world.options, user="ann")
    submit(world, JOB)
    world.until(world.training, 5 * MINUTE)
    assert sorted(machine.vm.pool for machine in world.dynamic()) == ["dear", "pool", "pool"]


def test_a_job_that_resumes_in_another_team_leaves_its_cost_to_the_first() -> None:
    """Also if its machines are not gone yet: else the new team would pay for all that they have cost."""
    world = World(the_stack=replace(stack(), teams=(TeamState("a", ("ann",)), TeamState("b", ("ann",)))), nodes=2)
    world.options = with_(world.options, user="ann")
    submit(world, JOB, team="a")
    world.until(world.training)
    world.run(60 * MINUTE)
    world.request(RequestKind.PAUSE)
    world.until(lambda: world.record().phase is Phase.HOLD, 600)
    assert len(world.memory.allocation[0].grants) == 2
    resumed = replace(world.spec, team="b")
    world.store.put_spec(JOB, resumed, spec_sha256(resumed))
    world.request(RequestKind.RESUME, spec_sha256=spec_sha256(resumed))
    world.until(world.training, 600)
    used = {one.team: one.month_usd for one in use.current(world.memory.allocation[0], world.stack, world.t)}
    assert used["a"] > 10 * used["b"]
