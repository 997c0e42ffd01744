"""``market``: what a stack's pools and zones cost, and how long their spot machines lasted, over time."""

from __future__ import annotations

from spotkeeper.cli.output import emit
from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError, Exit

DAY_S = 86_400.0
PARTS = 28  # of the time, one character each: three charts fit beside the numbers on a wide terminal


def run(pool: str | None, days: float, stack: str | None, *, as_json: bool) -> None:
    """Print the market of all spot pools, or of one.

    Raises:
        CliError: no such stack or pool.
    """
    from msgspec.structs import replace

    from spotkeeper.client.market import observations
    from spotkeeper.report.market import market_view
    from spotkeeper.report.text.market import market

    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    if pool is not None:
        chosen = tuple(one for one in state.pools if one.name == pool and one.kind == "spot")
        if not chosen:
            names = ", ".join(one.name for one in state.pools if one.kind == "spot") or "none"
            raise CliError(f"{pool}: no such spot pool in {state.stack}", Exit.MISSING, f"its spot pools: {names}")
        state = replace(state, pools=chosen)
    now = target.clock.now()
    seen = observations(store, state, now)
    grants = lookup.allocation_of(store).grants if any(one.reservations for one in state.pools) else ()
    view = market_view(state, lookup.prices_of(store, state), seen, now - days * DAY_S, now, PARTS, grants)
    emit(view, as_json, market(view, state))
