"""Rules on the teams that share a stack's machines (`teams` of the stack file); ``checks`` describes their form.

A team's members are written as the function's verified tokens name callers: ``gcp`` and ``aws`` check that, since only
a user who may call the function counts as a member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from infra.settings.both import twice
from infra.settings.model import Settings, Team
from spotkeeper.contract.notification import CHANNEL_NAME
from spotkeeper.contract.parse.problem import Problem, join, nearest, problem
from spotkeeper.contract.stack import DEFAULT_TEAM

MOST = 100
NAME = "want a letter, then letters, digits and -, at most 32, all lower case"


def teams(s: Settings) -> Iterator[Problem]:
    if len(s.teams) > MOST:
        yield Problem("teams", f"has {len(s.teams)} entries, at most {MOST} are allowed")
    for name, team in s.teams.items():
        path = join("teams", name)
        if not CHANNEL_NAME.match(name):
            yield Problem(path, f"is not a name of a team: {NAME}")
        if not team.members and name != DEFAULT_TEAM:
            yield Problem(f"{path}.members", "missing: a team without members has no jobs")
        yield from twice(f"{path}.members", team.members)
        yield from twice(f"{path}.high", team.high or ())
        for index, who in enumerate(team.high or ()):
            if who not in team.members and name != DEFAULT_TEAM:
                where = join(f"{path}.high", index)
                yield problem(where, f"is no member of the team {name}", who, nearest(who, team.members))
        yield from _limits(path, team, s)


def _limits(path: str, team: Team, s: Settings) -> Iterator[Problem]:
    """Report a limit that nothing can reach, or that lets no machine start."""
    most, usd = s.most_machines(), team.max_usd_per_hour
    if team.max_machines is not None and team.max_machines > most:
        yield problem(f"{path}.max_machines", f"limits nothing: the stack allows {most} machines", team.max_machines)
    stack = s.limits.usd_per_hour
    if usd is not None and stack is not None and usd > stack and not s.static():
        yield problem(f"{path}.max_usd_per_hour", f"limits nothing: `limits.usd_per_hour` is {stack:g}", usd)
    prices = [(pool, price) for pool in s.pools for zone in pool.zones if (price := pool.price(zone))]
    usual = (price.on_demand if pool.kind == "static" else price.spot or price.on_demand for pool, price in prices)
    if usd is not None and usd < (cheapest := min(usual, default=0.0)):
        what = f"is below the price of every machine: the cheapest costs {cheapest}"
        yield problem(f"{path}.max_usd_per_hour", what, usd)


def members(s: Settings, wrong: Callable[[str, str], Iterator[Problem]]) -> Iterator[Problem]:
    """Check how members are written; ``wrong`` yields the problems of one member, given its path and itself."""
    for name, team in s.teams.items():
        high = (team.high or ()) if name == DEFAULT_TEAM else ()  # of other teams, `teams` compares it with `members`
        for key, people in (("members", team.members), ("high", high)):
            for index, who in enumerate(people):
                yield from wrong(join(f"{join('teams', name)}.{key}", index), who)
