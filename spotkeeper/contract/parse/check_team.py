"""Rules on a job's team and priority, and on what its team's share and limits allow.

The function decides to which team a job belongs, since only it knows for sure who submitted the job. A rule therefore
refuses only what no team allows to which the job may belong; ``cautions`` names the teams that do not allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spotkeeper.contract.parse.check_mix import gang_price, size_path
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.parse.problem import Problem, nearest, problem
from spotkeeper.contract.stack import DEFAULT_TEAM, Model, PoolState, TeamState

_SHOWN = 3  # most teams, or pools, that a message names


def teams_of(job: JobContext) -> tuple[TeamState, ...]:
    """Return the teams to which the job may belong; () if the stack or the named team is unknown."""
    if job.stack is None:
        return ()
    listed = {team.name: team for team in job.stack.teams if team.members}
    if job.spec.team:
        return (listed[job.spec.team],) if job.spec.team in listed else ()
    return tuple((listed | {DEFAULT_TEAM: job.stack.team(DEFAULT_TEAM)}).values())


def team_exists(job: JobContext) -> Iterator[Problem]:
    name, stack = job.spec.team, job.stack
    if not name or stack is None or teams_of(job):
        return
    if name == DEFAULT_TEAM:
        yield problem("team", "is the team of users whom no team lists: leave it out", name)
        return
    names = [team.name for team in stack.teams if team.members]
    hint = nearest(name, names)
    known = "" if hint else f" (it has {', '.join(names) or 'none'})"
    yield problem("team", f"the stack {stack.stack} has no such team{known}", name, hint)


def high_allowed(job: JobContext) -> Iterator[Problem]:
    teams = teams_of(job)
    if job.spec.priority != "high" or not teams or any(team.high != () for team in teams):
        return
    which = f"team {teams[0].name} allows" if len(teams) == 1 else "all teams allow"
    what = f"{which} it to nobody: use normal, or list members under the team's `high` in the stack file"
    yield problem("priority", what, job.spec.priority)


def within_team(job: JobContext) -> Iterator[Problem]:
    """Check that at least one team would let the job start: it would wait forever in any other."""
    for why in (_limit, _borrowing):
        found = [why(job, team) for team in teams_of(job)]
        if found and all(found):
            yield problem(size_path(job.spec), found[0], job.spec.size().min)


def cautions(job: JobContext) -> Iterator[str]:
    """Yield a caution if the job can start in some of the teams to which it may belong only; ``within_team`` passed."""
    whys: tuple[Callable[[JobContext, TeamState], str], ...] = (_limit, _borrowing)
    for why in whys:
        found = {team.name: told for team in teams_of(job) if (told := why(job, team))}
        if found:
            names = ", ".join(list(found)[:_SHOWN]) + (" ..." if len(found) > _SHOWN else "")
            size = f"{size_path(job.spec)}: {job.spec.size().min}"
            yield f"{size} never starts if your team is {names}: it {next(iter(found.values()))}"


def _limit(job: JobContext, team: TeamState) -> str:
    """Return why the team's limits never let the job start; "" if they do. It is as ``queue.Room`` counts."""
    least = job.spec.size().min
    if team.max_machines is not None and least > team.max_machines:
        return f"is more machines than team {team.name} may have (`max_machines` is {team.max_machines})"
    model = Model.ON_DEMAND if job.spec.policy == "on-demand" else Model.SPOT

    def listed(pool: PoolState) -> float:
        return pool.dearest(Model.STATIC if pool.kind == "static" else model)

    pools = job.pools()
    usd = gang_price(job.spec, pools, least, listed) or 0.0
    if team.max_usd_hour is not None and usd > team.max_usd_hour + 1e-9:
        prices = ", ".join(f"{pool.name} ${listed(pool):,.2f}" for pool in pools[:_SHOWN])
        more = ", ..." if len(pools) > _SHOWN else ""
        return (
            f"costs at least ${usd:,.2f} an hour (a machine of {prices}{more}), and team {team.name} may spend "
            f"${team.max_usd_hour:,.2f} (`max_usd_per_hour`): use fewer machines or cheaper pools, or raise the team's "
            "limit in the stack file"
        )
    return ""


def _borrowing(job: JobContext, team: TeamState) -> str:
    """Return why the job would have to borrow machines that it cannot give back; "" if it would not."""
    stack, least = job.stack, job.spec.size().min
    if stack is None or job.spec.stop != "signal" or least > stack.size or least <= (share := stack.nominal(team.name)):
        return ""
    return (
        f"is more than the share of team {team.name}, {share:.1f} of {stack.size} machines. A job with `stop: signal` "
        "would lose work if machines were taken back, so it borrows none: use fewer nodes or `stop: library`, or "
        "raise the team's `share` in the stack file"
    )
