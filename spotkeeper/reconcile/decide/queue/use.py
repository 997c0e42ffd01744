"""What teams have used, in USD at list prices, and to how many machines they are entitled. Pure.

Use halves every 24 hours, so that a team is judged by its last days. It follows from the times of grants: a grant's
cost is folded into ``TeamUse`` when the grant is released, and computed from its start until then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import exp, log

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant, TeamUse, list_price
from spotkeeper.contract.months import month_of, month_start
from spotkeeper.contract.stack import DEFAULT_TEAM, StackState
from spotkeeper.reconcile.store.clock_skew import SKEW_S

HALF_LIFE_S = 86_400.0
HOUR_S = 3600.0
_RATE = log(2) / HALF_LIFE_S


def team_of(allocation: Allocation) -> Mapping[str, str]:
    """Return the team of each job that has a claim; other jobs belong to ``default``."""
    return {claim.job: claim.team for claim in allocation.claims}


def folded(allocation: Allocation, dropped: Iterable[Grant], stack: StackState, now: float) -> tuple[TeamUse, ...]:
    """Return the teams' use, with the cost of these grants, which are released now."""
    teams, use = team_of(allocation), {one.team: one for one in allocation.use}
    prices: dict[str, float] = {}
    for grant in dropped:
        team = teams.get(grant.job, DEFAULT_TEAM)
        known = use.get(team) or TeamUse(team)
        if known.at != now:
            known = _until(known, now)
        if grant.resource not in prices:
            prices[grant.resource] = price(stack, grant)
        use[team] = _with(known, prices[grant.resource] / HOUR_S, grant.since, now)
    return tuple(use[team] for team in sorted(use))


def settled(allocation: Allocation, job: str, stack: StackState, now: float) -> Allocation:
    """Return the allocation with the cost of a job's grants until now charged to its team, since it changes teams."""
    own = [grant for grant in allocation.grants if grant.job == job]
    grants = tuple(replace(grant, since=now) if grant.job == job else grant for grant in allocation.grants)
    return replace(allocation, grants=grants, use=folded(allocation, own, stack, now))


def current(allocation: Allocation, stack: StackState, now: float) -> list[TeamUse]:
    """Return the teams' use as if all grants were released now."""
    return [_until(one, now) for one in folded(allocation, allocation.grants, stack, now)]


def _until(use: TeamUse, now: float) -> TeamUse:
    """Return this use at ``now``. One that is far ahead of it was written by a wrong clock, and counts from now."""
    at = use.at if 0.0 <= use.at - now <= SKEW_S else now  # correct clocks differ as well
    month = month_of(at)
    use = replace(use, usd=use.usd * exp(-_RATE * max(0.0, at - use.at)), at=at)
    if month == use.month:
        return use
    if month == use.last_month:
        return replace(use, month=month, month_usd=use.last_usd, last_month="", last_usd=0.0)
    return replace(use, month=month, month_usd=0.0, last_month=use.month, last_usd=use.month_usd)


def _with(use: TeamUse, usd_s: float, since: float, now: float) -> TeamUse:
    ran = max(0.0, now - since)
    in_month = max(0.0, min(ran, now - month_start(use.at)))  # a clock that is ahead may have begun the next one
    cost = usd_s * (1.0 - exp(-_RATE * ran)) / _RATE  # the integral of what is left of each second's cost
    return replace(use, usd=use.usd + cost, month_usd=use.month_usd + usd_s * in_month)


def price(stack: StackState, grant: Grant) -> float:
    """Return a granted machine's list price, USD per hour; 1 if none is known, so that its time still counts."""
    return list_price(stack, grant.resource) or 1.0


def entitled(size: int, demand: Iterable[tuple[int, str, int]], stack: StackState) -> dict[str, float]:
    """Return how many machines each team is entitled to: max-min fair by share, higher priorities first.

    Args:
        size: machines of the whole stack.
        demand: priority, team and machines of each claim.
    """
    wanted: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for priority, team, machines in demand:
        wanted[priority][team] += machines
    out: dict[str, float] = defaultdict(float)
    left = float(size)
    for priority in sorted(wanted, reverse=True):
        open_ = {team: min(machines, _most(stack, team) - out[team]) for team, machines in wanted[priority].items()}
        for team, level in waterfill(left, open_, stack).items():
            out[team] += level
            left -= level
    return out


def _most(stack: StackState, team: str) -> float:
    most = stack.team(team).max_machines
    return math.inf if most is None else float(most)


def waterfill(size: float, demand: Mapping[str, float], stack: StackState) -> dict[str, float]:
    """Divide ``size`` machines by the teams' shares; what a team does not need goes to the others."""
    share = {team: stack.team(team).share for team in demand}
    out: dict[str, float] = {}
    left, open_ = size, sorted(demand, key=lambda team: (demand[team] / share[team], team))
    while open_:
        team = open_[0]
        level = left / sum(share[each] for each in open_)
        if demand[team] / share[team] > level:
            return out | {each: level * share[each] for each in open_}
        out[team] = float(demand[team])
        left -= demand[team]
        open_.pop(0)
    return out
