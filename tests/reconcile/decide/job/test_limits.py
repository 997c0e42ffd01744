"""Limits of a job: the breaker, and the price with which what the job costs is compared."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Limits, Roll
from spotkeeper.contract.stack import PoolState, Price, StackState
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import limits
from tests.reconcile.decide.test_decide import NOW
from tests.reconcile.decide.test_guards import calm, changed, on_node, on_record, on_snapshot
from tests.reconcile.world import stack

TIMES = Times()


def test_a_machine_without_a_price_of_its_model_counts_as_on_demand() -> None:
    bare = replace(stack().pools[0], prices={zone: Price(on_demand=2.5) for zone in stack().pools[0].zones})
    draft = Draft(*on_snapshot(stack=replace(stack(), pools=(bare,)))(*calm(1)))
    slot = draft.nodes[0].cur
    assert slot is not None and limits.price(draft, slot) == 2.5


def tripped(draft: Draft, why: str) -> bool:
    """Whether the breaker tripped now, for this reason."""
    (*_, entry) = draft.entries or [None]
    if entry is None:
        return False
    assert (entry.id, entry.event) == (f"limit.v{draft.before.ver + 1}.breaker", Event.LIMIT)
    assert (entry.cause, entry.detail, draft.record.limits.closed_until) == ("breaker", why, NOW + TIMES.breaker_s)
    return len(draft.entries) == 1


@pytest.mark.parametrize(
    ("nodes", "before", "trips"),
    [
        (2, Limits(), False),
        (2, Limits(unexplained=1, unexplained_since=NOW - TIMES.breaker_window_s), True),
        (2, Limits(unexplained=1, unexplained_since=NOW - TIMES.breaker_window_s - 1), False),
        (9, Limits(unexplained=1, unexplained_since=NOW), True),
        (10, Limits(unexplained=1, unexplained_since=NOW), False),  # a fifth is not more than a fifth
        (2, Limits(unexplained=1, unexplained_since=NOW, closed_until=NOW - TIMES.breaker_window_s), False),
        (2, Limits(unexplained=1, unexplained_since=NOW, closed_until=NOW - TIMES.breaker_window_s - 1), True),
    ],
)
def test_many_nodes_that_vanish_at_once_trip_the_breaker(nodes: int, before: Limits, trips: bool) -> None:
    draft = Draft(*on_record(limits=before)(*calm(nodes)))
    limits.count_unexplained(draft)
    assert tripped(draft, f"2 of {nodes} nodes vanished at once without preemption") is trips


@pytest.mark.parametrize(
    ("missing", "closed_until", "trips", "waits"),
    [
        (1, 0.0, False, False),
        (2, 0.0, True, True),
        (2, NOW - 11, True, True),
        (2, NOW - 10, False, False),  # once in each roll call
        (2, NOW + 1, False, True),
    ],
)
def test_many_nodes_without_an_answer_get_more_time_once(
    missing: int, closed_until: float, trips: bool, waits: bool
) -> None:
    roll = Roll(ver=40, since=NOW - 10, cause="silence")
    draft = Draft(*on_record(roll=roll, limits=Limits(closed_until=closed_until))(*calm(3)))
    assert limits.deaf(draft, missing) is waits
    assert tripped(draft, "2 of 3 nodes do not answer the roll call") is trips


def two_pools(most: int = 9) -> StackState:
    """``pool`` costs 1, 2 and 3 dollars in its zones, ``dear`` 5 in the first."""
    (pool,) = stack().pools
    prices = {zone: Price(on_demand=float(usd), spot=0.3) for usd, zone in enumerate(pool.zones, 1)}
    dear = PoolState("dear", "spot", "big", ("z-a",), 8, most, 9, 10, "pd", {"z-a": Price(on_demand=5.0, spot=2.0)})
    return replace(stack(), pools=(replace(pool, prices=prices), dear))


@pytest.mark.parametrize(
    ("zone", "pools", "most", "usd"),
    [
        ("z-a", ("pool",), 9, 2.0),
        ("z-b", ("pool",), 9, 4.0),
        (None, ("pool",), 9, 6.0),
        ("z-gone", ("pool",), 9, 0.0),
        ("z-b", (), 9, 4.0),
        ("z-a", (), 9, 10.0),
        ("z-a", (), 1, 6.0),  # one node has the dear machine, the other the next cheaper one
        (None, (), 1, 8.0),
    ],
)
def test_the_price_on_demand_is_that_of_the_dearest_machines_in_the_gangs_zone(
    zone: str | None, pools: tuple[str, ...], most: int, usd: float
) -> None:
    case = on_record(zone=zone)(*on_snapshot(stack=two_pools(most))(*calm(2, pools=pools)))
    assert limits.on_demand(Draft(*case)) == usd


def test_without_a_job_file_the_price_on_demand_is_unknown() -> None:
    assert limits.on_demand(Draft(*on_snapshot(spec=None)(*calm(2)))) == 0.0


@pytest.mark.parametrize("members", [(0, 1), ()])
def test_a_spent_cap_stops_the_gang_with_time_for_a_save(members: tuple[int, ...]) -> None:
    case = on_record(limits=Limits(spent=3.0), members=members)(*calm(2, max_usd=3.0))
    draft = Draft(*case)
    limits.step(draft)
    until = NOW + (draft.save_s() + TIMES.stop_s if members else 0.0)
    assert (draft.record.pause, draft.record.stop_deadline) == ("max_usd: $3.00 is spent", until)
    assert [(entry.id, entry.event, entry.cause, entry.detail) for entry in draft.entries] == [
        ("stop.g3", Event.STOP, "spend", ""),
        ("limit.v41.spend", Event.LIMIT, "spend", "max_usd: $3.00 is spent"),
    ]


@pytest.mark.parametrize(
    ("record", "vacant", "told"),
    [({}, True, True), ({"reason": "too many"}, True, False), ({}, False, False)],
)
def test_a_limit_that_keeps_a_node_waiting_is_told_once(record: dict[str, object], vacant: bool, told: bool) -> None:
    case = on_record(**record)(*calm(2))
    draft = Draft(*(on_node(1, cur=None)(*case) if vacant else case))
    limits.tell(draft, 1, "too many")
    assert draft.record.reason == ("too many" if vacant else "")
    found = [(entry.id, entry.event, entry.node, entry.detail) for entry in draft.entries]
    assert found == ([("limit.v41", Event.LIMIT, 1, "too many")] if told else [])


@pytest.mark.parametrize(
    ("launches", "waits"),
    [
        ((TIMES.launches_node - 1, 0), ""),
        ((TIMES.launches_node, 0), "node 0"),
        ((0, TIMES.launches_node + 2 * TIMES.launches_job - 1), ""),
        ((0, TIMES.launches_node + 2 * TIMES.launches_job), "the job"),
    ],
)
def test_an_hours_launches_end_at_the_limit_of_the_node_or_the_job(launches: tuple[int, int], waits: str) -> None:
    nodes = [on_node(index, launches=count) for index, count in enumerate(launches)]
    why = limits.bars(changed(calm(2), on_record(limits=Limits(hour=NOW)), *nodes), 0)
    assert why.startswith(f"waiting: {waits} was given") if waits else why == ""
