"""The view of a stack: limits, prices, interruptions and what an hour costs now."""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import Observation, PriceRun, Prices
from spotkeeper.contract.record import Hold, Phase
from spotkeeper.contract.stack import Model, ReservedCapacity, StackState
from spotkeeper.report.job.view import job_view
from spotkeeper.report.stack import StackView, stack_view
from tests.contract.samples import STACK, ZONES
from tests.report.ledgers import HOUR, NOTICED, a_record

A, B, C = ZONES
NOW = HOUR + 30
GRANTS = (
    Grant("abcdefgh", 0, 1, "slot:workers"),
    Grant("abcdefgh", 1, 1, "slot:workers/on-demand"),
    Grant("abcdefgh", 2, 1, "machine:sk-prod-always-s0"),
)
PRICES = {"workers": Prices("workers", NOW, NOW, (PriceRun(0.0, 0.5),))}


def life(machine: str, zone: str, *story: tuple[Event, float, str], model: Model = Model.SPOT) -> list[Observation]:
    return [Observation(machine, event, at, zone, model, cause) for event, at, cause in story]


OBSERVED = {
    "workers": (
        *life("a", A, (Event.ADMITTED, 0.0, ""), (Event.LOSS, HOUR, "loss")),
        *life("b", A, (Event.ADMITTED, 0.0, ""), (Event.GONE, HOUR, "")),
        *life("c", A, (Event.REFUSED, 5.0, "capacity")),
        *life("d", B, (Event.ADMITTED, 0.0, ""), (Event.LOSS, HOUR, "loss"), model=Model.ON_DEMAND),
    )
}


def a_stack(grants: tuple[Grant, ...] = GRANTS, state: StackState = STACK, **over: object) -> StackView:
    view = job_view(a_record(), None, NOTICED[:6], STACK, NOW)
    held = replace(view, name="held", phase=Phase.HOLD, reason="spent its max_usd", nodes=())
    given = {"prices": PRICES, "observed": OBSERVED, **over}
    limited = replace(state, max_usd_hour=10.0)
    return stack_view(limited, Allocation(1, "n", grants), [(view, NOTICED[:6]), (held, ())], NOW, **given)


def test_pools_show_their_limits_and_what_is_used() -> None:
    view = a_stack()
    pools = {pool.name: (pool.used, pool.used_on_demand, pool.max_machines, pool.max_on_demand) for pool in view.pools}
    assert pools == {"workers": (2, 1, 4, 2), "always": (1, 0, 1, 0), "gpus": (0, 0, 2, 0)}
    assert (view.machines, view.max_machines, view.max_usd_hour) == (2, 5, 10.0)


def test_zones_show_prices_and_what_happened_there() -> None:
    zones = {zone.zone: zone for zone in a_stack().pools[0].zones}
    assert (zones[A].spot, zones[A].on_demand, zones[A].reported) == (0.5, 3.0, True)
    assert (zones[A].served, zones[A].refused, zones[A].interruptions, zones[A].hours) == (2, 1, 1, 2.0)
    assert zones[A].availability == 2 / 3
    assert (zones[B].served, zones[B].interruptions, zones[C].availability) == (0, 0, None)
    listed = a_stack(prices={}).pools[0].zones[0]
    assert (listed.spot, listed.reported) == (1.0, False)


def test_an_hour_costs_all_machines_at_present_prices() -> None:
    """A spot machine that trains and its replacement that boots, and the static machine, which always runs."""
    assert a_stack().usd_hour == 3.0 + 2 * 0.5
    assert a_stack(prices={}).usd_hour == 3.0 + 2 * 1.0
    assert a_stack().listed_usd_hour == 1.0 + 3.0


def test_reserved_machines_are_counted_apart_and_cost_nothing_more() -> None:
    workers, *others = STACK.pools
    ours = (ReservedCapacity("res", A, 2), ReservedCapacity("later", A, 8, starts=NOW + 1))
    state = replace(STACK, pools=(replace(workers, reservations=ours), *others))
    view = a_stack((*GRANTS, Grant("abcdefgh", 3, 1, f"slot:workers/reserved/{A}/res")), state)
    (pool, *_) = view.pools
    assert (pool.used, pool.used_on_demand, pool.used_reserved, pool.reserved) == (3, 1, 1, 2)
    assert view.listed_usd_hour == a_stack().listed_usd_hour


def test_jobs_on_hold_are_named_with_their_reason() -> None:
    view = a_stack()
    assert [(job.name, job.reason) for job in view.held] == [("held", "spent its max_usd")]
    assert (view.jobs, view.training) == (2, 1)


def test_a_job_that_the_queue_paused_is_not_on_hold_for_a_person() -> None:
    record = a_record(phase=Phase.HOLD, hold=Hold.QUEUE, nodes=(), members=())
    view = job_view(record, None, (), STACK, NOW)
    assert stack_view(STACK, Allocation(), [(view, ())], NOW).held == ()
