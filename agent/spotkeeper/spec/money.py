"""What a job's deadline and budget can hold, by list prices: said before anything is bought. Pure.

A validator's part that computes; ``spec.check`` calls it. Nothing is said of what is not known. What can be, but may
not be what was meant, is a caution and no problem: ``submit`` says it and goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

from spotkeeper.spec.job import JobSpec, deadline_at, span_s
from spotkeeper.spec.model import Model
from spotkeeper.spec.problem import Problem, problem
from spotkeeper.spec.stack import PoolState
from spotkeeper.spec.start import START_S


def spans(spec: JobSpec) -> Iterator[Problem]:
    for name, text in (("work", spec.work), ("max_wait", spec.max_wait)):
        if text is None:
            continue
        try:
            if span_s(text) <= 0 and name == "work":
                yield problem(name, "is nothing", text)
        except ValueError as error:
            yield problem(name, str(error), text)


def feasible(spec: JobSpec, pools: Iterable[PoolState], now: float, start_s: float = START_S) -> Iterator[Problem]:
    """A deadline that not even on-demand from the first moment holds, with the earliest that it does, and its price.

    Where nobody knows how long it trains, one that ends before it can begin. ``start_s``: what a start of it takes.
    """
    if spec.deadline is None:
        return
    try:
        at, work = deadline_at(spec.deadline, now), 0.0 if spec.work is None else span_s(spec.work)
    except ValueError:
        return  # said elsewhere
    least = work + start_s
    if at <= now or at >= now + least:
        return
    usd = cheapest(pools, Model.ON_DEMAND)
    price = f", for about ${usd * spec.size().max * least / 3600.0:,.2f} on-demand" if usd and work else ""
    why = f"`work` is {spec.work} and a start" if work else "a start alone"
    why += f" takes {math.ceil(start_s / 60)} min"
    earliest = f"the earliest is {clock(now + least)} (`deadline: {span(least)}`)"
    yield problem("deadline", f"cannot be held: {why}, so {earliest}{price}", spec.deadline)


def budget(spec: JobSpec, pools: Iterable[PoolState], start_s: float = START_S) -> Iterator[Problem]:
    """A budget that ends before the first step is made. ``start_s``: what a start of it takes."""
    offers = tuple(pools)
    if spec.max_usd is None or not offers:
        return
    models = (Model.ON_DEMAND,) if spec.policy == "on-demand" else (Model.SPOT, Model.ON_DEMAND)
    prices = [usd for model in models if (usd := cheapest(offers, model)) is not None]
    least = min(prices, default=0.0) * spec.size().min * start_s / 3600.0
    if spec.max_usd < least:
        yield problem("max_usd", f"is below what one start costs (about ${least:,.2f} by list prices)", spec.max_usd)


def cautions(spec: JobSpec, pools: Iterable[PoolState], spot: float | None = None) -> Iterator[str]:
    """What a job file says that may come otherwise than meant, a line each.

    Args:
        spot: the lowest price of its pools' spot machines today, where the cloud told any; else the list's.
    """
    offers = tuple(pools)
    lowest = cheapest(offers, Model.SPOT) if spot is None else spot
    if spec.deadline is not None and (why := _no_net(spec, offers)):
        yield f"deadline: {spec.deadline} may be missed where spot is not to be had: {why}"
    if spec.deadline is not None and spec.work is None:
        yield "deadline: whether it can be held shows when its first steps tell how long it trains (or `work: 40h`)"
    if spec.max_price is not None and lowest is not None and spec.max_price < lowest and spec.policy != "on-demand":
        told = f"max_price: {spec.max_price:g} is below every spot price of its pools (the lowest is ${lowest:.3f})"
        yield f"{told}, so it {'waits' if spec.policy == 'spot' else 'has on-demand machines, if any,'} until one falls"
    if spec.max_usd is not None and (usd := _least_usd(spec, offers, lowest)) > spec.max_usd:
        yield f"max_usd: ${spec.max_usd:g} is less than `work` costs at the lowest price (${usd:,.2f}): it will hold"
    if spec.max_wait is not None and spec.policy in ("spot", "on-demand"):
        yield f"max_wait: {spec.max_wait} says nothing under `policy: {spec.policy}`, which changes to no other kind"


def _least_usd(spec: JobSpec, pools: tuple[PoolState, ...], spot: float | None) -> float:
    """What the job's work costs if nothing happens, on the cheapest machines; 0: nobody knows. Static nodes may be the
    cheapest where they are."""
    if spec.work is None:
        return 0.0
    try:
        hours = span_s(spec.work) / 3600.0
    except ValueError:
        return 0.0  # said elsewhere
    bought = cheapest(pools, Model.ON_DEMAND) if spec.policy == "on-demand" else spot
    static = [price.on_demand for pool in pools if pool.kind == "static" for price in pool.prices.values()]
    return min((usd for usd in (bought, *static) if usd is not None), default=0.0) * spec.size().min * hours


def _no_net(spec: JobSpec, pools: tuple[PoolState, ...]) -> str:
    """Why machines that nobody takes away cannot make up the gang; "": they can, or nobody knows."""
    if spec.policy == "spot":
        return "`policy: spot` buys no on-demand machine"
    most, least = steady(spec, pools), spec.size().min
    short = bool(pools) and most < least
    return f"{most} of its {least} machines may be on-demand or static (max_on_demand)" if short else ""


def steady(spec: JobSpec, pools: Iterable[PoolState]) -> int:
    """How many machines that nobody takes away it may have at most: static nodes, and on-demand ones."""
    offers = tuple(pools)
    static = sum(pool.max_nodes for pool in offers if pool.kind == "static")
    demand = sum(pool.max_on_demand for pool in offers if pool.kind == "spot")
    return static + (demand if spec.max_on_demand is None else min(demand, spec.max_on_demand))


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
    """``2026-12-24 18:00 UTC``: the minute that has begun by then, so that a deadline which is written so holds."""
    return datetime.fromtimestamp(math.ceil(at / 60.0) * 60.0, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def span(seconds: float) -> str:
    """``40.2h``, ``25m``: at least so long, as a job file writes it."""
    return f"{math.ceil(seconds / 60.0)}m" if seconds < 7200.0 else f"{math.ceil(seconds / 360.0) / 10:g}h"
