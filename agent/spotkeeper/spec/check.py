"""What a job file means beyond types: one small validator per rule.

A validator is a generator of :class:`~spotkeeper.spec.problem.Problem`; :func:`check_job` runs all and raises once.
They look at the file and at the source folder, never at a cloud: a wrong file is refused before anything is written.
Rules about what is run are in ``check_run``, about variables and secrets in ``check_env``, about money in ``money``; a
stack document has its own, ``check_stack``.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from spotkeeper.spec import check_env, check_run, money
from spotkeeper.spec.context import JobContext
from spotkeeper.spec.job import JobSpec, UnknownError, deadline_at
from spotkeeper.spec.market import Prices
from spotkeeper.spec.model import Model
from spotkeeper.spec.names import JOB_NAME
from spotkeeper.spec.problem import Problem, SpecError, join, nearest, problem
from spotkeeper.spec.stack import PoolState, StackState


def check_job(
    spec: JobSpec, stack: StackState | None = None, *, folder: Path | None = None, now: float | None = None
) -> JobSpec:
    """``spec`` itself, if nothing is wrong with it.

    Raises:
        SpecError: everything that is.
    """
    problems = job_problems(JobContext(spec, stack, folder, now))
    if problems:
        raise SpecError(problems)
    return spec


def cautions(spec: JobSpec, stack: StackState, prices: Mapping[str, Prices], now: float) -> tuple[str, ...]:
    """What is right, and may come otherwise than meant, a line each. ``prices``: as the cloud told them, by pool."""
    pools = JobContext(spec, stack).pools()
    told = [
        usd
        for pool in pools
        for zone in pool.zones
        if (known := prices.get(pool.name)) is not None and (usd := known.now(now, zone)) is not None
    ]
    return tuple(money.cautions(spec, pools, min(told, default=None)))


def job_problems(job: JobContext) -> list[Problem]:
    """All that is wrong with a job; of one that is known in part, what needs no other part to be said."""
    problems: list[Problem] = []
    for validator in JOB_VALIDATORS:
        with contextlib.suppress(UnknownError):
            for problem in validator(job):
                problems.append(problem)
    return problems


def job_name(job: JobContext) -> Iterator[Problem]:
    name = job.spec.name
    if not JOB_NAME.match(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:40].rstrip("-")
        hint = near if JOB_NAME.match(near) else None
        yield problem("name", "want a letter, then letters, digits and -, at most 40, all lower case", name, hint)


def node_range(job: JobContext) -> Iterator[Problem]:
    size = job.spec.size()
    if size.min > size.max:
        yield problem("nodes.min", f"is above nodes.max ({size.max})", size.min)
    elif size.min < size.max and not job.spec.checkpoint.replicated:
        yield problem("nodes", "sharded state (checkpoint.replicated: false) wants one number: no part may be missing")


def own_checkpoints(job: JobContext) -> Iterator[Problem]:
    """Of what a script saves by itself nobody knows which is the newest, so it stays with its rank's own disk."""
    spec, size = job.spec, job.spec.size()
    if spec.stop != "signal":
        return
    if spec.static != "never":
        yield problem("stop", "signal wants `static: never`, for its checkpoints stay on its own disks")
    if size.min < size.max:
        yield problem("stop", "signal wants one number of nodes: only the library can divide its batches anew")
    if spec.checkpoint.mirror is not None:
        yield problem("stop", "signal leaves nothing to copy for checkpoint.mirror, which knows what the library saves")


def deadline(job: JobContext) -> Iterator[Problem]:
    text = job.spec.deadline
    if text is None:
        return
    try:
        at = deadline_at(text, job.now or 0.0)
    except ValueError as error:
        yield problem("deadline", str(error), text)
        return
    if job.now is not None and at <= job.now:
        yield problem("deadline", f"is in the past; now is {money.clock(job.now)}, and 6h, 2d are from now", text)


def money_and_time(job: JobContext) -> Iterator[Problem]:
    yield from money.spans(job.spec)
    if job.spec.max_usd is not None:  # how long a start takes is looked up where something hangs on it
        yield from money.budget(job.spec, job.pools(), job.starts(job.spec))
    if job.now is not None and job.spec.deadline is not None:
        yield from money.feasible(job.spec, job.pools(), job.now, job.starts(job.spec))


def policy_fits(job: JobContext) -> Iterator[Problem]:
    spec = job.spec
    if spec.policy == "on-demand" and spec.max_on_demand == 0:
        yield problem("max_on_demand", "forbids what `policy: on-demand` asks for: remove one", 0)
    if spec.policy == "spot" and spec.max_on_demand:
        yield problem("max_on_demand", "allows what `policy: spot` forbids: remove one", spec.max_on_demand)
    if spec.max_on_demand is not None and spec.max_on_demand > (most := spec.size().max):
        yield problem("max_on_demand", f"is above the number of nodes ({most})", spec.max_on_demand)


def pools_exist(job: JobContext) -> Iterator[Problem]:
    names = [pool.name for pool in job.stack.pools] if job.stack else None
    counts = Counter(job.spec.pools)
    for index, name in enumerate(job.spec.pools):
        path = join("pools", index)
        if counts[name] > 1 and job.spec.pools.index(name) != index:
            yield problem(path, "is named twice", name)
        elif names is not None and name not in names:
            hint = nearest(name, names)
            known = "" if hint else f" (it has {', '.join(names) or 'none'})"
            assert job.stack is not None
            yield problem(path, f"the stack {job.stack.stack} has no such pool{known}", name, hint)


def pools_usable(job: JobContext) -> Iterator[Problem]:
    """Named pools that another line of the file rules out altogether."""
    named = [p for p in job.stack.pools if p.name in job.spec.pools] if job.stack else []
    if named and not job.pools():
        yield problem("static", "rules out every pool under `pools`: all of them are static", job.spec.static)
    usable = job.pools()
    if not usable or job.spec.policy != "on-demand":
        return
    if all(pool.kind == "spot" and not pool.max_on_demand for pool in usable):
        yield problem("policy", f"no on-demand machine is allowed in {_names(usable)}", job.spec.policy)
    elif job.spec.max_on_demand != 0 and (most := money.steady(job.spec, usable)) < (least := job.spec.size().min):
        what = f"of the {least} machines it cannot do without {most} may be on-demand or static (max_on_demand)"
        yield problem("policy", what, job.spec.policy)


def capacity(job: JobContext) -> Iterator[Problem]:
    """The pools' caps, and one zone's for a gang that is not spread."""
    usable = job.pools()
    if not usable or any(name not in {p.name for p in usable} for name in job.spec.pools):
        return
    most = job.spec.size().max
    path = "nodes" if isinstance(job.spec.nodes, int) else "nodes.max"
    total = sum(pool.max_nodes for pool in usable)
    if most > total:
        yield problem(path, f"more than {_names(usable)} may hold ({total})", most)
        return
    zones = {zone for pool in usable for zone in pool.zones}
    best = max(zones, key=lambda zone: (_in_zone(usable, zone), zone))
    if not job.spec.spread and most > _in_zone(usable, best):
        message = f"no zone may hold as many ({best}: {_in_zone(usable, best)}): add `spread: true` or ask for less"
        yield problem(path, message, most)


def stack_caps(job: JobContext) -> Iterator[Problem]:
    """What all dynamic machines of the stack may be together: a job that needs more would wait for ever."""
    stack, usable, least = job.stack, job.pools(), job.spec.size().min
    dynamic = least - sum(len(pool.nodes) for pool in usable)
    if stack is None or dynamic <= 0 or least > sum(pool.max_nodes for pool in usable):  # which ``capacity`` tells
        return
    path = "nodes" if isinstance(job.spec.nodes, int) else "nodes.min"
    if stack.max_machines is not None and dynamic > stack.max_machines:
        message = f"it needs {dynamic} dynamic machines, and the stack may have {stack.max_machines} (limits.machines)"
        yield problem(path, message, least)
    model = Model.ON_DEMAND if job.spec.policy == "on-demand" else Model.SPOT
    usd = dynamic * min((pool.dearest(model) for pool in usable if pool.kind == "spot"), default=0.0)
    if stack.max_usd_hour is not None and usd > stack.max_usd_hour + 1e-9:
        most = f"the stack may spend ${stack.max_usd_hour:g} (limits.usd_per_hour)"
        yield problem(path, f"its dynamic machines cost ${usd:,.2f} an hour at least, and {most}", least)


def _in_zone(pools: tuple[PoolState, ...], zone: str) -> int:
    spot = sum(pool.max_nodes for pool in pools if pool.kind == "spot" and zone in pool.zones)
    return spot + sum(node.zone == zone for pool in pools for node in pool.nodes)


def processes(job: JobContext) -> Iterator[Problem]:
    for pool in job.pools():
        if job.spec.nproc is not None and 1 < pool.nproc < job.spec.nproc:
            yield problem("nproc", f"a machine of {pool.name} has {pool.nproc} devices", job.spec.nproc)


def _names(pools: tuple[PoolState, ...]) -> str:
    return ("pool " if len(pools) == 1 else "pools ") + ", ".join(pool.name for pool in pools)


JOB_VALIDATORS = (
    job_name,
    node_range,
    own_checkpoints,
    check_run.command_words,
    check_run.interpreter,
    check_run.warm_modules,
    check_env.env_names,
    check_env.env_values,
    check_env.secrets_by_reference,
    check_env.secrets_have_a_reader,
    deadline,
    money_and_time,
    policy_fits,
    check_run.source_hash,
    check_run.source_folder,
    check_run.requirements,
    pools_exist,
    pools_usable,
    capacity,
    stack_caps,
    processes,
)
