"""A declared mix of machines: which node has which pool, in which zones, and at what price."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract import codec
from spotkeeper.contract.allocation import Claim
from spotkeeper.contract.job import MOST_NODES, JobSpec, MachineGroup, Nodes, pools_of
from spotkeeper.contract.parse.check import feasible, job_problems
from spotkeeper.contract.parse.check_mix import gang_price
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.stack import Model, Price
from tests.contract.samples import PRICES, STACK, ZONES, pool

MIX = JobSpec(name="first", command=("train.py",), machines=(MachineGroup("gpus", 2), MachineGroup("workers", 1)))
DEAR = {zone: Price(on_demand=9.0, spot=5.0) for zone in ZONES}


def test_each_node_has_its_pool() -> None:
    assert MIX.size() == Nodes(3, 3)
    assert [MIX.pool_of(node) for node in range(4)] == ["gpus", "gpus", "workers", ""]
    assert (MIX.pool_names(), MIX.most_of("gpus"), MIX.most_of("workers")) == (("gpus", "workers"), 2, 1)
    plain = replace(MIX, machines=(), nodes=Nodes(1, 4), pools=("gpus",))
    assert (plain.pool_of(0), plain.pool_names(), plain.most_of("gpus")) == ("", ("gpus",), 4)


def test_a_mix_has_at_most_as_many_nodes_as_another_job() -> None:
    most = replace(MIX, machines=(MachineGroup("gpus", MOST_NODES - 1), MachineGroup("workers", 1)))
    assert codec.decode(msgspec.json.encode(most), JobSpec) == most
    claim = Claim("abcd2345", most.size().min, most.size().max, 0.0)
    assert codec.decode(msgspec.json.encode(claim), Claim) == claim
    groups = [{"pool": "gpus", "nodes": MOST_NODES}, {"pool": "workers", "nodes": 1}]
    more = msgspec.json.encode({"name": "first", "command": ["train.py"], "machines": groups})
    with pytest.raises(msgspec.ValidationError, match="machines: 10,001 nodes in all, and a job may have 10,000"):
        codec.decode(more, JobSpec)


def test_a_gang_in_one_zone_uses_the_zones_that_all_of_its_pools_have() -> None:
    stack = replace(STACK, pools=(pool("gpus", zones=ZONES[1:]), pool("workers", zones=ZONES[:2])))
    assert [one.zones for one in pools_of(MIX, stack)] == [ZONES[1:2]] * 2
    assert [set(one.prices) for one in pools_of(MIX, stack)] == [{ZONES[1]}] * 2
    assert [one.zones for one in pools_of(replace(MIX, spread=True), stack)] == [ZONES[1:], ZONES[:2]]
    apart = replace(STACK, pools=(pool("gpus", zones=ZONES[1:]), pool("workers", zones=ZONES[:1])))
    problems = [str(one) for one in job_problems(JobContext(MIX, apart))]
    assert problems == ["machines: no zone has all of these pools: add `spread: true`, or name other pools"]
    assert not job_problems(JobContext(replace(MIX, spread=True), apart))


def test_a_mix_costs_what_its_groups_cost() -> None:
    pools = (pool("gpus", prices=DEAR), pool("workers", prices=PRICES))
    assert gang_price(MIX, pools, 3, lambda one: one.dearest(Model.SPOT)) == 2 * 5.0 + 1.0
    assert gang_price(MIX, pools[:1], 3, lambda one: one.dearest(Model.SPOT)) is None
    assert gang_price(replace(MIX, machines=()), pools, 3, lambda one: one.dearest(Model.SPOT)) == 3.0
    small = (pool("gpus", prices=DEAR), pool("workers", prices=PRICES, max_machines=2))
    plain = replace(MIX, machines=())
    assert gang_price(plain, small, 3, lambda one: one.dearest(Model.SPOT)) == 2 * 1.0 + 5.0, "workers has only two"
    (late,) = feasible(replace(MIX, deadline="1h", work="1h"), pools, 0.0)
    assert "at a cost of about $24.50 on-demand" in str(late), "2 x 9 + 3 an hour, for 70 minutes"
