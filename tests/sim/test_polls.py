"""Polls that report nothing: few reads for many of them, and never an answer older than what an agent has had."""

from __future__ import annotations

import msgspec
import pytest

from spotkeeper.contract.generation import Sync, SyncReply
from spotkeeper.contract.record import Record
from spotkeeper.reconcile.service.rounds import AGE_S
from spotkeeper_agent.core.sync import pending_s
from tests.sim.agent import Agent
from tests.sim.function import Process, Request
from tests.sim.meter import polls_in
from tests.sim.world import World, small_stack

JOB = "abcd2345"


@pytest.fixture
def world() -> World:
    world = World(stack=small_stack(2))
    job = world.submit(JOB, nodes=2)
    assert world.until(lambda: job.training)
    world.run(10.0)
    return world


def poll(world: World, process: Process, agent: Agent, ver: int | None = None, pending: bool = False) -> SyncReply:
    assert agent.doc is not None
    body = Sync(agent.boot, agent.doc.ver if ver is None else ver, JOB, pending=pending)
    who = f"Bearer {agent.uid} {agent.name} {agent.machine.vm.zone}"
    headers = {"Content-Type": "application/json", "Authorization": who}
    data, status, _ = process.app.handle(Request("POST", "/v1/sync", msgspec.json.encode(body), headers))
    assert status == 200
    return msgspec.json.decode(data, type=SyncReply)


def rewrite(world: World) -> Record:
    """Another process writes the record."""
    held = world.store.read_record(JOB)
    assert held is not None
    record = msgspec.structs.replace(held.value, ver=held.value.ver + 1, nonce=f"w{held.value.ver}")
    assert world.store.cas_record(record, held.token)
    return record


def reads(world: World) -> int:
    return world.function.counts["read_record"] + world.function.counts["read_due"]


def test_polls_within_half_a_second_share_one_read(world: World) -> None:
    process, agents = Process(world.function), world.jobs[JOB].agents
    before = reads(world)
    for agent in agents * 10:
        poll(world, process, agent, pending=True)
    assert reads(world) - before == 2, "the record, and when a round is due"
    record = rewrite(world)
    world.run(AGE_S)
    reply = poll(world, process, agents[0])
    assert reply.doc is not None and reply.doc.ver == record.ver


def test_an_agent_never_receives_an_older_document(world: World) -> None:
    behind, ahead = Process(world.function), Process(world.function)
    agent, peer = world.jobs[JOB].agents
    poll(world, behind, peer)
    record = rewrite(world)
    told = poll(world, ahead, agent).doc
    assert told is not None and told.ver == record.ver
    before = reads(world)
    poll(world, behind, agent, ver=told.ver)
    assert reads(world) - before == 1, "what this process has read is older than what the agent has"
    again = poll(world, behind, peer).doc
    assert again is not None and again.ver == record.ver, "and newer from there on for everybody"


def test_a_process_answers_with_its_own_rounds_result(world: World) -> None:
    process, agent = Process(world.function), world.jobs[JOB].agents[0]
    poll(world, process, agent)
    record = rewrite(world)
    process.app.handle(Request("POST", f"/v1/notify/{JOB}", b"{}", {"Content-Type": "application/json"}))
    told = poll(world, process, agent).doc
    assert told is not None and told.ver >= record.ver


@pytest.mark.parametrize("at", [0.2, 0.4])
def test_a_due_round_starts_despite_a_cached_time(world: World, at: float) -> None:
    process, agent = Process(world.function), world.jobs[JOB].agents[0]
    world.store.leases[JOB] = ("", 0.0, world.engine.t + 0.3)
    poll(world, process, agent, pending=True)
    before = world.function.counts["list"]
    world.engine.t += at
    poll(world, process, agent, pending=True)
    assert world.function.counts["list"] - before == (1 if at > 0.3 else 0)


def test_another_processs_round_is_not_repeated(world: World) -> None:
    process, agent = Process(world.function), world.jobs[JOB].agents[0]
    world.store.leases[JOB] = ("", 0.0, world.engine.t + 0.3)
    poll(world, process, agent, pending=True)
    world.store.leases[JOB] = ("", 0.0, None)
    world.engine.t += 0.4
    before = world.function.counts["list"]
    poll(world, process, agent, pending=True)
    assert world.function.counts["list"] == before


def test_reports_of_a_large_gang_share_rounds() -> None:
    world = World(stack=small_stack(16), look_s=0.4, seed=2)
    job = world.submit(JOB, nodes=16)
    assert world.until(lambda: job.training)
    assert world.function.counts["list"] <= 27, "36 where each report is looked at as it comes"


def test_the_meter_counts_the_polls_of_a_wait() -> None:
    for seconds in (0.4, 10.0, 99.0, 150.0, 201.0, 1000.0, 4000.0):
        at, polls = 0.0, 0
        while (at := at + pending_s(at)) <= seconds:
            polls += 1
        assert abs(polls_in(seconds) - polls) <= 1, seconds
