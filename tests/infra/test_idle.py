"""An idle stack's bill: every declared type has a price, a tick does what is counted, and both clouds stay below $3."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest

from bench.service import idle
from bench.service.idle import UnpricedError
from spotkeeper.cli.stacks.stackfile import read_stack_file
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.store.store import Store
from tests.infra.conftest import ROOT, STACKS, Declared
from tests.scale.burst import stack_of
from tests.scale.test_tick import Clock, Cloud
from tests.security.cases_store import Shelf

# What the examples declare is in fixtures that others need too: AWS's is asked in `test_declared_aws`.
GATEWAY = "aws:ec2/natGateway:NatGateway"


def settings(cloud: str) -> idle.Settings:
    return read_stack_file(STACKS / f"Pulumi.example-{cloud}.yaml", None, "").settings


def costs(cloud: str, declared: Mapping[str, Declared]) -> None:
    """Whether an idle stack is as cheap as is promised, and as the page for operators has it."""
    lines = idle.idle(settings(cloud), Counter(one.type for one in declared.values()))
    assert 0.5 < idle.total(lines) <= 3.0
    assert all(line.usd >= 0 for line in lines)
    page = (ROOT / "docs" / "costs.md").read_text()
    told = re.search(r"\*\*\$([\d.]+) a month on Google\s+Cloud, \$([\d.]+) on AWS\*\*", page)
    assert told is not None and float(told[["gcp", "aws"].index(cloud) + 1]) == round(idle.total(lines), 2)


def test_an_idle_stack_on_google_cloud_costs_less_than_three_dollars(example: Mapping[str, Declared]) -> None:
    costs("gcp", example)


def test_unpriced_resources_are_errors_and_gateways_cost_money() -> None:
    with pytest.raises(UnpricedError, match="natGateway"):
        idle.idle(settings("aws"), {GATEWAY: 1})
    assert not idle.PRICED.keys() & idle.FREE and not idle.BOUGHT & idle.FREE


def test_rarer_ticks_cost_less() -> None:
    every = settings("aws")
    rare = msgspec.structs.replace(every, reconcile=msgspec.structs.replace(every.reconcile, tick_minutes=5))
    alarms = {"aws:cloudwatch/metricAlarm:MetricAlarm": 4}
    often, seldom = idle.idle(every, alarms), idle.idle(rare, alarms)
    (note,) = (line.usd for line in often if line.what == "the note of its ticks")  # written every five minutes
    assert note == next(line.usd for line in seldom if line.what == "the note of its ticks")
    assert idle.total(seldom) - 0.4 - note == pytest.approx((idle.total(often) - 0.4 - note) / 5)


def test_an_idle_tick_makes_no_more_requests_than_priced() -> None:
    shelf = Shelf()
    store = Store(shelf)
    stack = stack_of(4)
    store.put("stack/pools.json", msgspec.json.encode(stack))
    cloud, clock, options = Cloud(), Clock(), RoundOptions(settle_s=0.0, parallel=1)
    tick(store, cloud, clock, options)  # the first one of an instance reads more
    asked: Counter[str] = Counter()
    shelf.before = lambda verb, _key: asked.update([verb])
    assert tick(store, cloud, clock, options).jobs == 0
    assert asked["list"] <= idle.LISTS and asked["get"] <= idle.READS + idle.READS_A_POOL * len(stack.pools)
    assert set(asked) <= {"list", "get"}, "nothing is written"
