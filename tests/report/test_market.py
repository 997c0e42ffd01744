"""The market over time: prices, requests and interruptions by part, and how they are drawn."""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.market import HOUR_S, Observation, PriceRun, Prices
from spotkeeper.contract.stack import Model, ReservedCapacity
from spotkeeper.report.html import stack as html_stack
from spotkeeper.report.market import MarketView, ZoneMarket, market_view
from spotkeeper.report.stack import stack_view
from spotkeeper.report.text.market import bars, market
from tests.contract.samples import STACK, ZONES
from tests.report.ledgers import printed

A, B, C = ZONES
H = HOUR_S
SPOT = Model.SPOT
# A machine in A from hour 1 to its preemption in hour 3; a refusal in A in hour 3; a machine in B that still runs.
SEEN = (
    Observation("j-n0-a1", Event.ADMITTED, 1.1 * H, A, SPOT, started=1.0 * H),
    Observation("j-n0-a1", Event.NOTICE, 3.4 * H, A, SPOT),
    Observation("j-n0-a1", Event.LOSS, 3.5 * H, A, SPOT, "notice"),
    Observation("j-n0-a2", Event.REFUSED, 3.6 * H, A, SPOT, "capacity"),
    Observation("j-n0-a3", Event.REFUSED, 3.6 * H, A, Model.ON_DEMAND, "capacity"),
    Observation("j-n0-a4", Event.REFUSED, 3.7 * H, A, SPOT, "quota"),
    Observation("j-n0-a5", Event.ADMITTED, 3.9 * H, B, SPOT, started=3.8 * H),
)
TOLD = {"workers": Prices("workers", 7.9 * H, 7.9 * H, (PriceRun(1.5 * H, 1.0, A), PriceRun(6.0 * H, 2.0, A)))}


def seen(parts: int = 8) -> MarketView:
    return market_view(STACK, TOLD, {"workers": SEEN}, 0.0, 8.0 * H, parts)


def zone(view: MarketView, name: str, pool: str = "workers") -> ZoneMarket:
    return next(one for one in view.zones if (one.pool, one.zone) == (pool, name))


def test_prices_over_time() -> None:
    found = zone(seen(), A)
    assert found.prices == (None, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0)
    assert (found.spot, found.on_demand, found.reported) == (2.0, 3.0, True)
    unknown = zone(seen(), C)
    assert (unknown.spot, unknown.reported, set(unknown.prices)) == (1.0, False, {None}), "the stack file's price"
    assert zone(seen(2), A).prices == (1.0, 1.5), "the mean of a part, from the first known price on"


def test_requests_and_interruptions_over_time() -> None:
    found = zone(seen(), A)
    assert (found.served, found.refused, found.availability) == (1, 1, 0.5), "on-demand and quota say nothing of spot"
    assert found.available == (None, 1.0, 1.0, 0.0, None, None, None, None)
    assert (found.interruptions, found.interrupted) == (1, (0, 0, 0, 1, 0, 0, 0, 0))
    assert (found.hours, found.last_interruption, found.per_100_hours) == (2.5, 3.5 * H, 40.0)
    running = zone(seen(), B)
    assert (running.interruptions, running.available[3:]) == (0, (1.0,) * 5)
    assert abs(running.hours - 4.2) < 1e-9


def test_a_window_leaves_out_what_was_before_it() -> None:
    view = market_view(STACK, TOLD, {"workers": SEEN}, 4.0 * H, 8.0 * H, 4)
    found = zone(view, A)
    assert (found.served, found.refused, found.interruptions, found.hours) == (0, 0, 0, 0.0)
    assert zone(view, B).hours == 4.0, "a machine that ran before the window began"


def test_only_spot_pools_have_a_market() -> None:
    assert {one.pool for one in seen().zones} == {"workers", "gpus"}


def test_bars_have_one_character_for_each_part() -> None:
    assert bars([None, 1.0, 1.5, 2.0], 1.0, 2.0) == "·▁▅█"
    assert bars([3.0, 3.0], 3.0, 3.0) == "▁▁", "a price that never changes"


def test_the_tables_fit_and_say_where_a_price_comes_from() -> None:
    text = printed(market(seen(), STACK))
    lines = text.splitlines()
    assert lines[0].startswith("market of prod: the last 8h00m, 1h00m per character")
    row = next(line for line in lines if line.startswith(A))
    assert "$2.00" in row and "67 %" in row and "1/2" in row and "·▁▁▁▁▁██" in row
    assert "$1.00*" in text and "* the stack file's price" in text
    assert max(map(len, lines)) <= 110
    gone = '"low to high", "requests over time", "per 100 h", last'
    assert lines.count(f"no room here for {gone}: spotkeeper market --json") == text.count("no room") == 1


def test_a_small_change_of_the_price_looks_small() -> None:
    told = {"workers": Prices("workers", 7.9 * H, 7.9 * H, (PriceRun(1.5 * H, 0.84, A), PriceRun(6.0 * H, 0.86, A)))}
    text = printed(market(market_view(STACK, told, {}, 0.0, 8.0 * H, 8), STACK))
    assert "·▁▁▁▁▁▁▁" in text and "█" not in text.partition("charts:")[0]


def test_reserved_capacity_says_what_is_used_and_when() -> None:
    day = 86_400.0
    one = ReservedCapacity("res", A, 3, starts=1.0 * day, ends=3.0 * day)
    pool = replace(STACK.pools[0], reservations=(one, ReservedCapacity("res", B, 1)))
    on = replace(STACK, pools=(pool, *STACK.pools[1:]))
    grants = [Grant("j", node, 1, f"slot:workers/reserved/{A}/res") for node in range(2)]
    grants += [Grant("j", 2, 1, "slot:workers"), Grant("j", 3, 1, f"slot:other/reserved/{A}/res")]

    def lines(now: float) -> list[str]:
        view = market_view(on, {}, {}, now - day, now, 4, grants)
        return [line for line in printed(market(view, on)).splitlines() if line.startswith("reservation")]

    when = "from 1970-01-02 00:00 UTC to 1970-01-04 00:00 UTC"
    free = f"reservation res in {B}: 0 of 1 used, 1 idle"
    assert lines(2.0 * day) == [f"reservation res in {A} {when}: 2 of 3 used, 1 idle", free]
    assert lines(4.0 * day) == [f"reservation res in {A} {when}: 2 of 3 used, not open", free]
    page = str(html_stack.pools(stack_view(on, Allocation(grants=tuple(grants)), (), 2.0 * day)))
    assert f"reservation res in {A} {when}: 2 of 3 used, 1 idle" in page and free in page
