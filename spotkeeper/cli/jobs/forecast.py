"""``forecast``: predicts a job's cost and end from replays of recorded markets. ``compare`` uses this module too.

It makes an assumption for each unknown value and prints it. It buys nothing and calls no cloud.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from spotkeeper.cli.jobs.ground import Ground, ground, shape_of
from spotkeeper.cli.output import emit, progress
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract.job import START_S, JobSpec, deadline_at, pools_of, span_s
from spotkeeper.contract.market import Prices
from spotkeeper.contract.parse.check import cautions, feasible
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.redact import redact
from spotkeeper.contract.stack import PoolState, StackState, region_of
from spotkeeper.replay.recording import SHIPPED, RecordingError, read_folder
from spotkeeper.report.forecast.compare import MeasuredStep, step_s
from spotkeeper.report.forecast.forecast import Forecast, Library, forecast, markdown, table
from spotkeeper.report.forecast.mix import as_one_pool
from spotkeeper.report.forecast.player import Shop, most_on_demand
from spotkeeper.report.forecast.recordings import RecordingPart, Task, own_recording, parts
from spotkeeper.report.forecast.reserved import reserved_machines
from spotkeeper.report.text.words import code

MARKETS = "SPOTKEEPER_MARKETS"
NEVER = "a higher `max_price`, or a `policy` that also buys on-demand machines"
WORK_H = 24.0  # assumed training time of a job if it is unknown
HISTORY_HOURS = 90 * 24


def run(file: Path, stack: str | None, stack_file: Path | None, work: str | None, markets: Path | None, *,
        as_markdown: bool, as_json: bool) -> None:  # fmt: skip
    """Print the forecast of a job file.

    Raises:
        SpecError: the job file or the stack file is invalid, or the deadline cannot be met.
        CliError: no such stack, pool or recording, or a deadline without `work`.
    """
    made = of_file(file, ground(stack, stack_file), work, markets)
    emit(made, as_json, "" if as_json else markdown(made).rstrip("\n") if as_markdown else table(made))


def of_file(file: Path, known: Ground, work: str | None = None, markets: Path | None = None) -> Forecast:
    """Forecast a job file on a stack, for the command and for the comment on a pull request."""
    spec = known.job(file)
    said = list(known.said)
    if spec.machines:
        spec, known = _unmixed(spec, known, said)
    task = task_of(spec, known, work, said)
    if known.named:
        said += cautions(task.spec, known.stack, known.prices, known.now)
    library = library_of(known, task, markets)
    with progress(f"replaying {spec.name}", len(library.parts)) as done:
        made = forecast(task, library, said, done)
    if not made.runs:
        raise CliError(f"{spec.name}: {never(spec, made.replays)}", Exit.REFUSED, NEVER)
    return made


def _unmixed(spec: JobSpec, known: Ground, said: list[str]) -> tuple[JobSpec, Ground]:
    """Return a mix of machines as a job of one pool, and the stack with that pool."""
    try:
        spec, stack, prices, told = as_one_pool(spec, known.stack, known.prices, known.now)
    except KeyError as error:
        why = f"{known.stack.stack} has no pool {error}, or no price for it"
        raise CliError(f"{spec.name}: {why}", Exit.REFUSED, "name the stack: --stack or --stack-file") from None
    said.append(told)
    return spec, dataclasses.replace(known, stack=stack, prices=prices)


def never(spec: JobSpec, replays: int) -> str:
    """The message about a job that got no machine in any replay."""
    price = "" if spec.max_price is None else f", since max_price is {spec.max_price:g}"
    return f"the job gets no machine in any of {replays} replays{price}"


def comments(files: Iterable[Path], known: Ground) -> Iterator[str]:
    """Yield the forecast of each job file of a stack as Markdown, or the reason why it failed."""
    for file in files:
        try:
            yield markdown(of_file(file, known))
        except (SpecError, CliError) as error:
            yield f"{code(file.name)}: {code(redact(str(error)))}\n"


def task_of(spec: JobSpec, known: Ground, work: str | None, said: list[str], pool: PoolState | None = None) -> Task:
    """Return what a replay needs to know of a job; append the assumptions made for it to ``said``.

    Raises:
        SpecError: its deadline cannot be met; the message names the earliest possible deadline and its price.
        CliError: no pool fits, or a deadline without `work`.
    """
    pool = pool or pool_of(spec, known.stack, said)
    said += _static(spec, known.stack)
    spec = replace(spec, pools=(pool.name,), work=work or spec.work)
    work_h = _work_h(spec, pool, known, said)
    start_s = known.starts(spec)
    if start_s != START_S:
        said.append(f"start: {start_s:.0f} s, as measured by a job of this name on {pool.name}")
    if problems := tuple(feasible(spec, (pool,), known.now, start_s)):
        raise SpecError(problems)
    prices = known.prices.get(pool.name)
    if known.store is not None and (untold := [zone for zone in pool.zones if _told(zone, prices, known.now) is None]):
        where = ", ".join(untold)
        said.append(f"prices: the cloud reported none for {where} within a day, so this uses the stack's list prices")
    demand = [pool.prices[zone].on_demand for zone in pool.zones]
    move_usd = _move_usd(spec, known.stack, pool)
    return Task(
        spec=spec,
        shop=Shop.of(spec, known.stack, pool),
        spot=tuple(_spot(pool, zone, prices, known.now) for zone in pool.zones),
        on_demand=min(demand) if move_usd else sum(demand) / len(demand),
        work_h=work_h,
        restart_h=start_s / 3600.0,
        deadline_h=None if spec.deadline is None else (deadline_at(spec.deadline, known.now) - known.now) / 3600.0,
        reserved=reserved_machines(spec, pool, known.store, known.now, work_h + start_s / 3600.0, said),
        move_usd=move_usd,
        start_usd=_start_usd(spec, known.stack, pool),
    )


def _move_usd(spec: JobSpec, stack: StackState, pool: PoolState) -> float:
    """Return the egress of going to another region of the pool's zones, USD for each machine, in the dearest case."""
    gb = pool.disk_gb + spec.data_gb / spec.size().max
    regions = {region_of(zone) for zone in pool.zones} if stack.regions else set()
    return max((stack.egress_usd(one, other, gb) for one in regions for other in regions), default=0.0)


def _start_usd(spec: JobSpec, stack: StackState, pool: PoolState) -> dict[str, float]:
    """Return the egress of the job's data at a first start, by region, USD for each machine; only what costs."""
    regions = {region_of(zone) for zone in pool.zones} if stack.regions else set()
    source, gb = spec.data_region or stack.region, spec.data_gb / spec.size().max
    return {region: usd for region in sorted(regions) if (usd := stack.egress_usd(source, region, gb))}


def _static(spec: JobSpec, stack: StackState) -> Iterator[str]:
    """The note about each static pool: the job uses its machines first, and their cost counts toward `max_usd`."""
    for pool in pools_of(spec, stack):
        if pool.kind == "static":
            dearest = max((price.on_demand for price in pool.prices.values()), default=0.0)
            yield (
                f"static: the job first uses idle machines of {pool.name}, each ${dearest:.2f} an hour toward max_usd; "
                f"the forecast leaves out its {pool.max_machines} x {pool.machine_type}, as if `static: never` were set"
            )


def _work_h(spec: JobSpec, pool: PoolState, known: Ground, said: list[str]) -> float:
    if spec.work is not None:
        try:
            hours = span_s(spec.work) / 3600.0
        except ValueError as error:
            raise CliError(f"--work {spec.work}: {error}", Exit.USAGE) from None
        if hours <= 0:
            raise CliError(f"--work {spec.work}: must be more than 0", Exit.USAGE)
        return hours
    if (reported := _reported_work_h(spec, pool, known)) is not None:
        hours, on = reported
        said.append(f"work: {hours:.1f} h, from the step time that the last job of this name reported{on}")
        return hours
    if spec.deadline is not None:
        raise CliError(f"{spec.name} has a deadline, but its training time is unknown", Exit.USAGE, "--work 40h")
    said.append(f"work: {WORK_H:.0f} h, since the training time is unknown (`work:` in the job file, or --work 40h)")
    return WORK_H


def _reported_work_h(spec: JobSpec, pool: PoolState, known: Ground) -> tuple[float, str] | None:
    """Return the virtual hours that this job must train, and a note or ""; None if its name has no such report.

    The report is that of the newest job of this name: its number of steps and its step time. If it had other machines,
    the step time is converted to this job's machines, and the note says so.
    """
    told = known.ran(spec.name)
    if told is None or not told.total_steps:
        return None
    own = shape_of(spec, pool, known.networks)
    was = told.shape or own
    on = "" if was == own else f", on {was.nodes} x {was.machine_type}, recomputed for these machines"
    return told.total_steps * step_s(MeasuredStep(told.step_s, was), own) * known.scale / 3600.0, on


def _spot(pool: PoolState, zone: str, prices: Prices | None, now: float) -> float:
    told, listed = _told(zone, prices, now), pool.prices[zone]
    return told if told is not None else listed.spot if listed.spot is not None else listed.on_demand


def _told(zone: str, prices: Prices | None, now: float) -> float | None:
    return prices.now(now, zone) if prices is not None else None


def pool_of(spec: JobSpec, stack: StackState, said: list[str]) -> PoolState:
    """Return the cheapest spot pool that the job may use and that is large enough.

    It compares on-demand prices if the job has ``policy: on-demand``, else spot prices.

    Raises:
        CliError: no such pool.
    """
    if spec.machines:
        why = "it compares pools that have all machines of the job, but the job is a mix of machines (`machines`)"
        raise CliError(
            f"{spec.name}: {why}", Exit.REFUSED, "compare a job file with `nodes:` instead, and no `machines:`"
        )
    pools = dynamic(spec, stack)
    fits = [pool for pool in pools if pool.max_machines >= spec.size().max]
    if not fits:
        count = f"no spot pool of {stack.stack} allows {spec.size().max} machines"
        why = count if pools else "none of the spot pools that the job may use has a known price"
        raise CliError(f"{spec.name}: {why}", Exit.REFUSED, "choose other `pools:` or fewer `nodes:` in the job file")

    def key(pool: PoolState) -> tuple[bool, float, bool, str]:
        barred, demand = most_on_demand(spec, pool) < spec.size().max, spec.policy == "on-demand"
        usd = [pool.prices[zone].on_demand if demand else _spot(pool, zone, None, 0.0) for zone in pool.zones]
        return demand and barred, min(usd), barred, pool.name

    best = min(fits, key=key)
    if len(fits) > 1:
        others = ", ".join(pool.name for pool in fits if pool is not best)
        said.append(f"pool: only {best.name}, the cheapest (spotkeeper compare shows {others} too)")
    return best


def dynamic(spec: JobSpec, stack: StackState) -> list[PoolState]:
    """Return the spot pools with known prices that the job may use."""
    return [pool for pool in pools_of(spec, stack) if pool.kind == "spot" and set(pool.zones) <= set(pool.prices)]


def library_of(known: Ground, task: Task, markets: Path | None) -> Library:
    """Return the recordings to replay, from the folder ``markets``, else that of SPOTKEEPER_MARKETS, else shipped ones.

    ``Library.own`` has the stack's own history, else the recordings of the pool's region and machine family.

    Raises:
        CliError: the folder has no recording, or none with spot capacity.
    """
    folder = markets or (Path(named) if (named := os.environ.get(MARKETS)) else SHIPPED)
    try:
        found = parts(read_folder(folder))
    except RecordingError as error:
        raise CliError(str(error), Exit.USAGE, "--markets DIR, a folder of recordings (*.json)") from None
    own = tuple(part for part in found if _same(task.shop.pool, part.recording.market, part.recording.zones[0].region))
    own = _history(known, task.shop.pool) or own
    if not found and not own:
        raise CliError(f"{folder}: no recorded region had spot capacity", Exit.USAGE, "--markets DIR")
    return Library(tuple(part for part in found if part not in own), own)


def _same(pool: PoolState, market: str, region: str) -> bool:
    """Whether a recording's region and machine family are the pool's. The market ``a3_h100`` has the family ``a3``."""
    family = market.partition("_")[0]
    return region_of(pool.zones[0]) == region and pool.machine_type.partition("-")[0].partition(".")[0] == family


def _history(known: Ground, pool: PoolState) -> tuple[RecordingPart, ...]:
    from spotkeeper.reconcile.store import paths

    if known.store is None:
        return ()
    stems = (path.rpartition("/")[2] for path in known.store.list(paths.market_hours(pool.name)))
    hours = [int(stem) for stem in stems if stem.isdecimal()]
    newest = tuple(hour for hour in hours if hour > known.now / 3600.0 - HISTORY_HOURS)
    observations = known.store.read_observations((pool.name,), newest)[pool.name]
    recorded = own_recording(pool.name, region_of(pool.zones[0]), observations)
    return parts((recorded,)) if recorded is not None else ()
