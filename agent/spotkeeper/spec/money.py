"""What a job's deadline and budget can hold, by list prices: said before anything is bought. Pure.

A validator's part that computes; ``spec.check`` calls it. Nothing is said of what is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

from spotkeeper.spec.job import JobSpec, deadline_at, span_s
from spotkeeper.spec.model import Model
from spotkeeper.spec.parse import Problem, problem
from spotkeeper.spec.stack import PoolState

RESTART_S = 600.0  # a start, where none was measured: the machine's boot, torch's import, the data's first batch


def spans(spec: JobSpec) -> Iterator[Problem]:
    for name, text in (("work", spec.work), ("max_wait", spec.max_wait)):
        if text is None:
            continue
        try:
            if span_s(text) <= 0 and name == "work":
                yield problem(name, "is nothing", text)
        except ValueError as error:
            yield problem(name, str(error), text)


def feasible(spec: JobSpec, pools: Iterable[PoolState], now: float) -> Iterator[Problem]:
    """A deadline that not even on-demand from the first moment holds, with the earliest that it does, and its price."""
    if spec.deadline is None or spec.work is None:
        return
    try:
        at, work = deadline_at(spec.deadline, now), span_s(spec.work)
    except ValueError:
        return  # said elsewhere
    earliest = now + work + RESTART_S
    if at <= now or at >= earliest:
        return
    usd = cheapest(pools, Model.ON_DEMAND)
    price = f", for about ${usd * spec.size().max * (work + RESTART_S) / 3600.0:,.2f} on-demand" if usd else ""
    yield problem(
        "deadline",
        f"cannot be held: `work` is {spec.work}, and the earliest is {clock(earliest)}{price}",
        spec.deadline,
    )


def budget(spec: JobSpec, pools: Iterable[PoolState]) -> Iterator[Problem]:
    """A budget that ends before the first step is made."""
    offers = tuple(pools)
    if spec.max_usd is None or not offers:
        return
    models = (Model.ON_DEMAND,) if spec.policy == "on-demand" else (Model.SPOT, Model.ON_DEMAND)
    prices = [usd for model in models if (usd := cheapest(offers, model)) is not None]
    least = min(prices, default=0.0) * spec.size().min * RESTART_S / 3600.0
    if spec.max_usd < least:
        yield problem("max_usd", f"is below what one start costs (about ${least:,.2f} by list prices)", spec.max_usd)


def price_cap(spec: JobSpec, pools: Iterable[PoolState]) -> Iterator[Problem]:
    """A limit below every spot price leaves only on-demand; under `policy: spot` that is nothing at all."""
    usd = cheapest(pools, Model.SPOT)
    if spec.max_price is not None and usd is not None and spec.max_price < usd and spec.policy == "spot":
        yield problem("max_price", f"is below every spot price of its pools (the lowest is ${usd:.3f})", spec.max_price)


def cheapest(pools: Iterable[PoolState], model: Model) -> float | None:
    """USD per machine-hour by the stack's list; None where no machine of that kind is sold."""
    prices = [
        usd
        for pool in pools
        if pool.kind == "spot" and (model is Model.SPOT or pool.max_on_demand > 0)
        for price in pool.prices.values()
        if (usd := price.of(model))
    ]
    return min(prices, default=None)


def clock(at: float) -> str:
    """``2026-12-24 18:00 UTC``."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
