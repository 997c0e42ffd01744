"""Rules on what a job file means beyond types, one small validator per rule.

A validator is a generator of :class:`~spotkeeper.contract.parse.problem.Problem`; :func:`job_problems` runs all
validators. They read the job file and the source folder, never a cloud. ``check_run.py`` has the rules on the command,
variables and secrets, ``check_params.py`` those on parameters, ``check_team.py`` those on team and priority,
``check_mix.py`` those on a mix of machines. A caution
is about a value that is allowed but can surprise: ``submit`` prints the caution and continues. Prices are list prices.
A rule that needs an unknown value is skipped.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone

from spotkeeper.contract.job import START_S, JobSpec, UnknownError, deadline_at, named_pools, span_s
from spotkeeper.contract.market import Prices
from spotkeeper.contract.names import JOB_NAME
from spotkeeper.contract.parse import check_mix, check_params, check_run, check_team
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.parse.problem import Problem, join, nearest, problem
from spotkeeper.contract.stack import Model, PoolState, StackState


def job_problems(job: JobContext) -> list[Problem]:
    """Return all problems of a job. If some of its fields are invalid, rules that read those fields are skipped."""
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
        yield problem("nodes", "must be one number for sharded state (`checkpoint.replicated: false`), not a range")


def peers(job: JobContext) -> Iterator[Problem]:
    """Check `checkpoint.peers`: a neighbour keeps a machine's part of sharded state."""
    checkpoint = job.spec.checkpoint
    if checkpoint.peers and checkpoint.replicated:
        yield problem(
            "checkpoint.peers",
            "needs sharded state (`checkpoint.replicated: false`): replicated state is on every node already",
            checkpoint.peers,
        )
    elif checkpoint.peers and job.spec.size().max == 1:
        yield problem("checkpoint.peers", "needs two nodes or more: a node alone has no neighbour", checkpoint.peers)
    elif checkpoint.peers and not checkpoint.snapshots:
        yield problem(
            "checkpoint.peers",
            "needs `checkpoint.snapshots: true`: the neighbour keeps a copy of a snapshot",
            checkpoint.peers,
        )


def own_checkpoints(job: JobContext) -> Iterator[Problem]:
    """Check a job with `stop: signal`, whose script saves by itself.

    The newest checkpoint of such a job is unknown to Spotkeeper, so each node must keep its disk.
    """
    spec, size = job.spec, job.spec.size()
    if spec.stop != "signal":
        return
    if spec.static != "never":
        yield problem("stop", "`signal` needs `static: never`, since a static machine does not have the job's disks")
    if size.min < size.max:
        yield problem(
            "stop", "`signal` needs a fixed number of nodes: only jobs that use the library redistribute batches"
        )
    if spec.checkpoint.mirror is not None:
        yield problem("stop", "`signal` excludes `checkpoint.mirror`, which copies only what the library saves")


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
        yield problem("deadline", f"is in the past; now is {clock(job.now)}, and 6h or 2d would count from now", text)


def spans(job: JobContext) -> Iterator[Problem]:
    for name, text in (("work", job.spec.work), ("max_wait", job.spec.max_wait)):
        if text is None:
            continue
        try:
            if span_s(text) <= 0 and name == "work":
                yield problem(name, "is nothing", text)
        except ValueError as error:
            yield problem(name, str(error), text)


def money_and_time(job: JobContext) -> Iterator[Problem]:
    """Check deadline and budget. The duration of a start is looked up only if the job has a deadline or a budget."""
    if job.spec.max_usd is not None:
        yield from budget(job.spec, job.pools(), job.starts(job.spec))
    if job.now is not None and job.spec.deadline is not None:
        yield from feasible(job.spec, job.pools(), job.now, job.starts(job.spec))


def policy_fits(job: JobContext) -> Iterator[Problem]:
    spec = job.spec
    if spec.policy == "on-demand" and spec.max_on_demand == 0:
        yield problem("max_on_demand", "contradicts `policy: on-demand`: remove one of these fields", 0)
    if spec.policy == "spot" and spec.max_on_demand:
        yield problem("max_on_demand", "contradicts `policy: spot`: remove one of these fields", spec.max_on_demand)
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


def channels_exist(job: JobContext) -> Iterator[Problem]:
    """Check that the stack has the channels that ``notify`` names. Only the stack file gives addresses."""
    names = [channel.name for channel in job.stack.channels] if job.stack else None
    for name in job.spec.notify:
        if "://" in name:  # the message does not repeat it: the address of a channel often is a secret
            yield Problem("notify", "contains an address: name a channel, to which the stack file gives an address")
        elif names is not None and name not in names:
            hint = nearest(name, names)
            known = "" if hint else f" (it has {', '.join(names) or 'none'})"
            assert job.stack is not None
            yield problem(join("notify", name), f"the stack {job.stack.stack} has no such channel{known}", None, hint)


def pools_usable(job: JobContext) -> Iterator[Problem]:
    """Check that no other field of the file makes all named pools unusable."""
    named = named_pools(job.spec, job.stack) if job.stack and job.spec.pools else ()
    if named and not job.pools():
        yield problem("static", "rules out every pool under `pools`, since all are static", job.spec.static)
    usable = job.pools()
    if not usable or job.spec.policy != "on-demand":
        return
    if all(pool.kind == "spot" and not pool.max_on_demand for pool in usable):
        yield problem("policy", f"no on-demand machine is allowed in {_names(usable)}", job.spec.policy)
    elif job.spec.max_on_demand != 0 and (most := steady(job.spec, usable)) < (least := job.spec.size().min):
        what = f"the job needs at least {least} machines, of which {most} may be on-demand or static (max_on_demand)"
        yield problem("policy", what, job.spec.policy)


def capacity(job: JobContext) -> Iterator[Problem]:
    """Check that the job's pools allow enough machines, in one zone if the gang is not spread."""
    usable = job.pools()
    if not usable or job.spec.machines or any(name not in {p.name for p in usable} for name in job.spec.pools):
        return
    most, path = job.spec.size().max, check_mix.size_path(job.spec, "max")
    total = sum(pool.max_machines for pool in usable)
    if most > total:
        yield problem(path, f"is more machines than {_names(usable)} may have ({total})", most)
        return
    zones = {zone for pool in usable for zone in pool.zones}
    best = max(zones, key=lambda zone: (_in_zone(usable, zone), zone))
    if not job.spec.spread and most > _in_zone(usable, best):
        message = f"is more than any zone allows ({best}: {_in_zone(usable, best)}): add `spread: true` or lower it"
        yield problem(path, message, most)


def stack_caps(job: JobContext) -> Iterator[Problem]:
    """Check the job against the stack's limits on dynamic machines, since a job that exceeds one would wait forever."""
    stack, usable, least = job.stack, job.pools(), job.spec.size().min
    dynamic = least - sum(len(pool.machines) for pool in usable)
    if stack is None or dynamic <= 0 or least > sum(pool.max_machines for pool in usable):  # ``capacity`` reports that
        return
    path = check_mix.size_path(job.spec)
    if stack.max_machines is not None and dynamic > stack.max_machines:
        message = f"needs {dynamic} dynamic machines, but `limits.machines` of the stack is {stack.max_machines}"
        yield problem(path, message, least)
    model = Model.ON_DEMAND if job.spec.policy == "on-demand" else Model.SPOT
    bought = (pool for pool in usable if pool.kind == "spot")

    def price(pool: PoolState) -> float:
        return 0.0 if job.spec.machines and pool.reserved else pool.dearest(model)

    paid = sum(pool.reserved for pool in usable)  # reserved machines, which cost nothing more
    usd = check_mix.gang_price(job.spec, bought, max(0, dynamic - paid), price) or 0.0
    if stack.max_usd_hour is not None and usd > stack.max_usd_hour + 1e-9:
        most = f"`limits.usd_per_hour` of the stack is {stack.max_usd_hour:g}"
        yield problem(path, f"needs dynamic machines for at least ${usd:,.2f} an hour, but {most}", least)


def _in_zone(pools: tuple[PoolState, ...], zone: str) -> int:
    spot = sum(pool.max_machines for pool in pools if pool.kind == "spot" and zone in pool.zones)
    return spot + sum(machine.zone == zone for pool in pools for machine in pool.machines)


def processes(job: JobContext) -> Iterator[Problem]:
    for pool in job.pools():
        if job.spec.nproc is not None and 1 < pool.nproc < job.spec.nproc:
            yield problem("nproc", f"is more than the {pool.nproc} devices of a machine of {pool.name}", job.spec.nproc)


def scratch(job: JobContext) -> Iterator[Problem]:
    """Check that half of a static machine's disk is left for checkpoints. Other disks grow by the scratch volume."""
    small = tuple(pool for pool in job.pools() if pool.kind == "static" and pool.disk_gb < 2 * job.spec.scratch_gb)
    if small:
        most = min(pool.disk_gb for pool in small) // 2
        message = f"is more than half of the disks of {_names(small)}: lower it to {most}, or add `static: never`"
        yield problem("scratch_gb", message, job.spec.scratch_gb)


def _names(pools: tuple[PoolState, ...]) -> str:
    return ("pool " if len(pools) == 1 else "pools ") + ", ".join(pool.name for pool in pools)


def feasible(spec: JobSpec, pools: Iterable[PoolState], now: float, start_s: float = START_S) -> Iterator[Problem]:
    """Check that the job can meet its deadline on on-demand machines. A problem names the earliest possible deadline.

    If the work is unknown, check that the deadline leaves time for a start. ``start_s``: duration of a start, seconds.
    """
    if spec.deadline is None:
        return
    try:
        at, work = deadline_at(spec.deadline, now), 0.0 if spec.work is None else span_s(spec.work)
    except ValueError:
        return  # ``deadline`` and ``spans`` report it
    least = work + start_s
    if at <= now or at >= now + least:
        return
    usd = check_mix.gang_price(spec, pools, spec.size().max, lambda pool: cheapest([pool], Model.ON_DEMAND))
    price = f", at a cost of about ${usd * least / 3600.0:,.2f} on-demand" if usd and work else ""
    why = f"training takes {spec.work} (`work`), and starting takes" if work else "starting alone takes"
    why += f" {math.ceil(start_s / 60)} min"
    earliest = f"the earliest possible deadline is {clock(now + least)} (`deadline: {span(least)}`)"
    yield problem("deadline", f"cannot be met: {why}, so {earliest}{price}", spec.deadline)


def budget(spec: JobSpec, pools: Iterable[PoolState], start_s: float = START_S) -> Iterator[Problem]:
    """Check that the budget lasts until the first step. ``start_s``: duration of a start, seconds."""
    offers = tuple(pools)
    if spec.max_usd is None or not offers or any(pool.reserved for pool in offers):
        return
    models = (Model.ON_DEMAND,) if spec.policy == "on-demand" else (Model.SPOT, Model.ON_DEMAND)
    prices = [usd for model in models if (usd := _least_usd_hour(spec, offers, model)) is not None]
    least = min(prices, default=0.0) * start_s / 3600.0
    if spec.max_usd < least:
        yield problem("max_usd", f"is below what one start costs (about ${least:,.2f} by list prices)", spec.max_usd)


def _least_usd_hour(spec: JobSpec, pools: Iterable[PoolState], model: Model) -> float | None:
    return check_mix.gang_price(spec, pools, spec.size().min, lambda pool: cheapest([pool], model))


def cautions(spec: JobSpec, stack: StackState, prices: Mapping[str, Prices], now: float) -> Iterator[str]:
    """Yield cautions, one line each. ``prices``: the spot prices that the cloud reported, by pool."""
    job = JobContext(spec, stack)
    pools = job.pools()
    reported = [
        usd
        for pool in pools
        for zone in pool.zones
        if (known := prices.get(pool.name)) is not None and (usd := known.now(now, zone)) is not None
    ]
    yield from cautions_of(spec, pools, min(reported, default=None))
    yield from check_team.cautions(job)


def cautions_of(spec: JobSpec, pools: Iterable[PoolState], spot: float | None = None) -> Iterator[str]:
    """Yield cautions, one line each.

    Args:
        spot: today's lowest spot price in the job's pools; None (the cloud reported none) means list prices.
    """
    offers = tuple(pools)
    lowest = cheapest(offers, Model.SPOT) if spot is None else spot
    if spec.deadline is not None and (why := _no_net(spec, offers)):
        yield f"deadline: {spec.deadline} may be missed if no spot machine is available: {why}"
    if spec.deadline is not None and spec.work is None:
        yield "deadline: it can be checked only after the first steps, since the job file has no `work` (such as 40h)"
    if spec.max_price is not None and lowest is not None and spec.max_price < lowest and spec.policy != "on-demand":
        told = f"max_price: {spec.max_price:g} is below every spot price of its pools (the lowest is ${lowest:.3f})"
        yield f"{told}, so the job {'waits' if spec.policy == 'spot' else 'uses on-demand'} until a spot price falls"
    if spec.max_usd is not None and (usd := _least_usd(spec, offers, lowest)) > spec.max_usd:
        yield f"max_usd: ${spec.max_usd:g} will not last: `work` costs at least ${usd:,.2f}, so the job will go on hold"
    if spec.max_wait is not None and spec.policy == "on-demand":
        yield f"max_wait: {spec.max_wait} has no effect: `policy: on-demand` does not wait for spot"
    elif spec.max_wait is not None and spec.policy == "spot" and not span_s(spec.max_wait):
        yield f"max_wait: {spec.max_wait} with `policy: spot` holds the job as soon as it has no spot machine"
    if spec.data_region and not spec.data_gb:
        yield f"data_region: {spec.data_region} has no effect without `data_gb`, the size of the data read there"


def _least_usd(spec: JobSpec, pools: tuple[PoolState, ...], spot: float | None) -> float:
    """Return the job's cost on the cheapest machines (static ones included) without interruptions; 0: unknown.

    It is unknown, too, how long reserved capacity will be idle.
    """
    if spec.work is None or any(pool.reserved for pool in pools):
        return 0.0
    try:
        hours = span_s(spec.work) / 3600.0
    except ValueError:
        return 0.0  # ``spans`` reports it
    if spec.machines:
        model = Model.ON_DEMAND if spec.policy == "on-demand" else Model.SPOT
        return (_least_usd_hour(spec, pools, model) or 0.0) * hours
    bought = cheapest(pools, Model.ON_DEMAND) if spec.policy == "on-demand" else spot
    static = [price.on_demand for pool in pools if pool.kind == "static" for price in pool.prices.values()]
    return min((usd for usd in (bought, *static) if usd is not None), default=0.0) * spec.size().min * hours


def _no_net(spec: JobSpec, pools: tuple[PoolState, ...]) -> str:
    """Return why the job cannot train without spot machines; "" if it can, or if that is unknown."""
    if spec.policy == "spot":
        return "`policy: spot` buys no on-demand machine"
    most, least = steady(spec, pools), spec.size().min
    short = bool(pools) and most < least
    return f"only {most} of its {least} machines may be on-demand or static (max_on_demand)" if short else ""


def steady(spec: JobSpec, pools: Iterable[PoolState]) -> int:
    """Return how many machines that cannot be preempted (static, reserved and on-demand) the job may have."""
    offers = tuple(pools)
    static = sum(pool.max_machines for pool in offers if pool.kind == "static")
    demand = sum(min(pool.max_on_demand, spec.most_of(pool.name)) for pool in offers if pool.kind == "spot")
    static += sum(pool.reserved for pool in offers)
    return static + (demand if spec.max_on_demand is None else min(demand, spec.max_on_demand))


def cheapest(pools: Iterable[PoolState], model: Model) -> float | None:
    """Return the lowest list price of a provisioning model, USD per machine-hour; None if no pool has that model."""
    prices = [
        usd
        for pool in pools
        if pool.kind == "spot" and (model is Model.SPOT or pool.max_on_demand > 0)
        for price in pool.prices.values()
        if (usd := price.of(model))
    ]
    return min(prices, default=None)


def clock(at: float) -> str:
    """Return a time as ``2026-12-24 18:00 UTC``, rounded up to a minute, so that the text is a feasible deadline."""
    return datetime.fromtimestamp(math.ceil(at / 60.0) * 60.0, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def span(seconds: float) -> str:
    """Return a length of time as a job file writes it, rounded up: ``40.2h``, ``25m``."""
    return f"{math.ceil(seconds / 60.0)}m" if seconds < 7200.0 else f"{math.ceil(seconds / 360.0) / 10:g}h"


JOB_VALIDATORS = (
    job_name,
    node_range,
    check_mix.mix_alone,
    check_mix.mix_pools,
    peers,
    own_checkpoints,
    check_run.command_words,
    check_run.interpreter,
    check_run.warm_modules,
    check_run.container_image,
    check_run.env_names,
    check_run.env_values,
    check_run.secrets_by_reference,
    check_run.secrets_have_a_reader,
    check_params.params,
    deadline,
    spans,
    money_and_time,
    policy_fits,
    check_run.source_hash,
    check_run.source_folder,
    check_run.requirements,
    pools_exist,
    check_run.regions_exist,
    pools_usable,
    channels_exist,
    check_team.team_exists,
    check_team.high_allowed,
    capacity,
    stack_caps,
    check_team.within_team,
    processes,
    scratch,
)
