"""A machine at risk (EC2 recommends to rebalance): its notice moves on, and nobody stops before a successor is there.

The agent's words are ``spotkeeper_agent.cloud.notice``'s own; what they bring about is told by whole stories.
"""

from __future__ import annotations

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import FactIn
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model
from spotkeeper_agent.cloud import notice
from spotkeeper_agent.cloud.notice import Cause, CloudWarning, Instance, Notice
from tests.reconcile.controller.test_round import trained
from tests.reconcile.world import Agent, World

RISK = Instance("i-1", "n", "z", warning=CloudWarning(Cause.REBALANCE))


def handle_notice(world: World, agent: Agent, known: Notice | None, seen: Instance = RISK) -> Notice | None:
    """As ``spotkeeper_agent.agent.notices``: what is new is said first, what it replaces after it, in one sync each."""
    change = notice.observe(known, seen, 120.0, world.t)
    if change.given is None:
        change = notice.prolong(known, world.t)
    for kind, one in ((Kind.NOTICE, change.given), (Kind.REPRIEVE, change.withdrawn)):
        if one is not None:
            agent.outbox.append(FactIn(kind, 0, str(one.deadline)))
            agent.sync()
    return change.given or known


def at_risk(world: World, node: int) -> tuple[Agent, Notice]:
    agent = world.member(node).agent
    assert agent is not None
    known = handle_notice(world, agent, None)
    assert known is not None and known.deadline - world.t > 3000
    return agent, known


def test_a_rebalance_replacement_takes_over_without_losing_a_step() -> None:
    world = trained(World(nodes=2, boot_s=60, steps=2000))
    world.run(33)
    agent, _ = at_risk(world, 1)
    world.until(lambda: world.record().gen == 2 and world.training())
    _, start = world.started[-1]
    assert start is not None and start[1] == agent.step_no, "nothing was done twice"
    assert world.events(Event.LOSS) == [] and len(world.inserts()) == 3


def test_without_capacity_a_rebalance_notice_changes_nothing() -> None:
    world = trained(World(nodes=2, policy="spot", steps=100_000))
    world.run(33)
    for zone, model in list(world.capacity) or [("z-a", Model.SPOT)]:
        world.capacity[zone, model] = 2 if (zone, model) == ("z-a", Model.SPOT) else 0
    agent, known = at_risk(world, 1)
    first = known.deadline
    for _ in range(12):
        world.run(600)
        moved = handle_notice(world, agent, known)
        assert moved is not None and moved.deadline - world.t >= notice.REBALANCE_S / 2
        known = moved
    assert world.t > first, "what was said at first is long over"
    assert world.record().gen == 1 and world.training() and not world.record().stop
    assert world.record().nodes[1].cur is not None and world.events(Event.REPRIEVE) == [], "at no time without a notice"


def test_a_booting_replacement_survives_a_postponed_notice() -> None:
    world = trained(World(nodes=2, steps=5000))
    world.boot_s = 200
    world.run(33)
    agent, known = at_risk(world, 1)
    world.run(60)
    following = world.record().nodes[1].next
    assert following is not None
    early = Notice(known.cause, int(world.t) + 1000, known.at)  # as if half an hour had gone by
    agent.outbox.append(FactIn(Kind.NOTICE, 0, str(early.deadline)))
    agent.sync()
    moved = handle_notice(world, agent, early)
    assert moved is not None and moved.deadline > early.deadline
    still = world.record().nodes[1].next
    assert still is not None and still.attempt == following.attempt
    world.until(lambda: world.record().gen == 2 and world.training())
    assert len(world.inserts()) == 3


def test_an_interruption_after_a_rebalance_counts() -> None:
    world = trained(World(nodes=2, steps=5000))
    world.boot_s = 200
    world.run(33)
    agent, known = at_risk(world, 1)
    world.run(60)
    end = world.t + 120
    assert (
        handle_notice(world, agent, known, Instance("i-1", "n", "z", warning=CloudWarning(Cause.PREEMPTED, end)))
        is not None
    )
    cur = world.record().nodes[1].cur
    assert cur is not None and cur.notice == int(end)
    world.until(lambda: world.record().stop, 130)
    assert world.t < end, "it saves in time, though nobody stands by"
