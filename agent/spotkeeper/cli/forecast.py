"""``forecast``: gathers what a job's forecast rests on (job file, stack, recordings, own history), and prints it.

Each thing that is not known is assumed, and said in a line. Nothing is bought, and no cloud is asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import emit
from spotkeeper.cli.past import Ran, ran, shape_of
from spotkeeper.cli.starts import starts_of
from spotkeeper.cli.target import find_target
from spotkeeper.replay.recording import SHIPPED, RecordingError, read_folder, region_of
from spotkeeper.report.compare import Step, step_s
from spotkeeper.report.forecast import Forecast, Library, forecast
from spotkeeper.report.forecast_own import own_recording
from spotkeeper.report.forecast_past import Part, Task, parts
from spotkeeper.report.forecast_play import Shop, most_on_demand
from spotkeeper.report.forecast_text import markdown, table
from spotkeeper.report.markdown import code
from spotkeeper.spec import money
from spotkeeper.spec.check import cautions
from spotkeeper.spec.context import pools_of
from spotkeeper.spec.job import JobSpec, deadline_at, span_s
from spotkeeper.spec.jobfile import read_job
from spotkeeper.spec.market import Prices
from spotkeeper.spec.problem import SpecError
from spotkeeper.spec.redact import redact
from spotkeeper.spec.stack import PoolState, Price, StackState
from spotkeeper.spec.start import START_S

if TYPE_CHECKING:
    from infra.settings import Settings
    from spotkeeper.reconcile.store_api import Store

MARKETS = "SPOTKEEPER_MARKETS"
WORK_H = 24.0  # where nothing says how long a job trains
H100_USD = 11.061  # an hour of a3-highgpu-1g on demand, list price, us-central1: what the shipped recording is of
H100_SPOT = 0.23  # of it, as recorded there
HISTORY_HOURS = 90 * 24


@dataclass
class Ground:
    """What a forecast rests on, as far as it was found.

    ``named``: whether there is a stack, that the job file can be checked against. ``said``: what was assumed.
    ``scale``: how many times faster than real the stack's clock runs.
    """

    stack: StackState
    store: Store | None = None
    prices: dict[str, Prices] = field(default_factory=dict)
    now: float = 0.0
    said: list[str] = field(default_factory=list)
    named: bool = True
    scale: float = 1.0

    @cached_property
    def starts(self) -> Callable[[JobSpec], float]:
        """How long a start of a job takes, seconds."""
        return starts_of(self.store, self.stack, self.now)

    @cached_property
    def ran(self) -> Callable[[str], Ran | None]:
        """What the newest job of a name told of its steps."""
        return cache(partial(ran, self.store, self.stack))

    def job(self, file: Path) -> JobSpec:
        """A job file, checked against the stack.

        Raises:
            SpecError: everything that is wrong with it.
        """
        stack = self.stack if self.named else None
        return read_job(file, stack, self.now, self.starts)


def run(file: Path, stack: str | None, stack_file: Path | None, work: str | None, markets: Path | None, *,
        as_markdown: bool, as_json: bool) -> None:  # fmt: skip
    """Print the forecast of a job file.

    Raises:
        SpecError: the job file or the stack file is wrong, or its deadline cannot be held.
        CliError: no such stack, pool or recording, or a deadline without `work`.
    """
    made = of_file(file, ground(stack, stack_file), work, markets)
    emit(made, as_json, "" if as_json else markdown(made).rstrip("\n") if as_markdown else table(made))


def of_file(file: Path, known: Ground, work: str | None = None, markets: Path | None = None) -> Forecast:
    """The forecast of a job file on a stack. One function for the command and for the comment on a pull request.

    Raises:
        SpecError, CliError: as :func:`run`.
    """
    spec = known.job(file)
    said = list(known.said)
    task = task_of(spec, known, work, said)
    if known.named:
        said += cautions(task.spec, known.stack, known.prices, known.now)
    library = library_of(known, task, markets)
    with progress(f"replaying {spec.name}", len(library.parts)) as done:
        return forecast(task, library, said, done)


def comments(files: Iterable[Path], known: Ground) -> Iterator[str]:
    """What each of a stack's own job files will cost, as Markdown; one that cannot be forecast says why."""
    for file in files:
        try:
            yield markdown(of_file(file, known))
        except (SpecError, CliError) as error:
            yield f"{code(file.name)}: {code(redact(str(error)))}\n"


def task_of(spec: JobSpec, known: Ground, work: str | None, said: list[str], pool: PoolState | None = None) -> Task:
    """The job as it is replayed. What had to be assumed is added to ``said``.

    Raises:
        SpecError: its deadline cannot be held; with the earliest that can, and its price.
        CliError: no pool for it, or a deadline without `work`.
    """
    pool = pool or pool_of(spec, known.stack, said)
    said += _static(spec, known.stack)
    spec = replace(spec, pools=(pool.name,), work=work or spec.work)
    work_h = _work_h(spec, pool, known, said)
    start_s = known.starts(spec)
    if start_s != START_S:
        said.append(f"start: {start_s:.0f} s, as an earlier job of this name and the machines of {pool.name} took")
    if problems := tuple(money.feasible(spec, (pool,), known.now, start_s)):
        raise SpecError(problems)
    prices = known.prices.get(pool.name)
    spot = [_spot(pool, zone, prices, known.now) for zone in pool.zones]
    if known.store is not None and (untold := [zone for zone in pool.zones if _told(zone, prices, known.now) is None]):
        said.append(
            f"prices: the cloud told none of {', '.join(untold)} within a day, so spot costs what the stack lists"
        )
    demand = [pool.prices[zone].on_demand for zone in pool.zones]
    return Task(
        spec=spec,
        shop=Shop.of(spec, known.stack, pool),
        spot=tuple(spot),
        on_demand=sum(demand) / len(demand),
        work_h=work_h,
        restart_h=start_s / 3600.0,
        deadline_h=None if spec.deadline is None else (deadline_at(spec.deadline, known.now) - known.now) / 3600.0,
    )


def _static(spec: JobSpec, stack: StackState) -> Iterator[str]:
    """Nodes that run anyway are taken first, and bill for the job: its `max_usd` and its report count them."""
    for pool in pools_of(spec, stack):
        if pool.kind == "static":
            usd = max((price.on_demand for price in pool.prices.values()), default=0.0)
            yield (
                f"static: {pool.max_nodes} x {pool.machine_type} of {pool.name} are taken first where they idle, at "
                f"${usd:.3f} an hour each in reports and max_usd; here all machines are bought (`static: never` is so)"
            )


def _work_h(spec: JobSpec, pool: PoolState, known: Ground, said: list[str]) -> float:
    if spec.work is not None:
        try:
            hours = span_s(spec.work) / 3600.0
        except ValueError as error:
            raise CliError(f"--work {spec.work}: {error}", Exit.USAGE) from None
        if hours <= 0:
            raise CliError(f"--work {spec.work}: is nothing", Exit.USAGE)
        return hours
    if (told := _told_h(spec, pool, known)) is not None:
        hours, on = told
        said.append(f"work: {hours:.1f} h, as the job of this name took for its steps so far{on}")
        return hours
    if spec.deadline is not None:
        raise CliError(f"{spec.name}: it has a deadline, and nothing says how long it trains", Exit.USAGE, "--work 40h")
    said.append(f"work: {WORK_H:.0f} h, for nothing says how long it trains (`work:` in the job file, or --work 40h)")
    return WORK_H


def _told_h(spec: JobSpec, pool: PoolState, known: Ground) -> tuple[float, str] | None:
    """From an earlier job of this name: its steps, at its step time; and where that was on another shape, on which."""
    told = known.ran(spec.name)
    if told is None or not told.total_steps:
        return None
    own = shape_of(spec, pool)
    was = told.shape or own
    on = "" if was == own else f", there on {was.nodes} x {was.machine_type}: arithmetic is shared by all processes"
    return told.total_steps * step_s(Step(told.step_s, was), own) * known.scale / 3600.0, on


def _spot(pool: PoolState, zone: str, prices: Prices | None, now: float) -> float:
    told, listed = _told(zone, prices, now), pool.prices[zone]
    return told if told is not None else listed.spot if listed.spot is not None else listed.on_demand


def _told(zone: str, prices: Prices | None, now: float) -> float | None:
    return prices.now(now, zone) if prices is not None else None


def pool_of(spec: JobSpec, stack: StackState, said: list[str]) -> PoolState:
    """The cheapest spot pool that the job may use and that has room for it: on spot, or as its policy buys.

    Raises:
        CliError: there is none.
    """
    pools = dynamic(spec, stack)
    fits = [pool for pool in pools if pool.max_nodes >= spec.size().max]
    if not fits:
        why = (
            f"no spot pool of {stack.stack} has {spec.size().max} machines"
            if pools
            else "no spot pool with known prices for it"
        )
        raise CliError(f"{spec.name}: {why}", Exit.REFUSED, "`pools:` and `nodes:` in the job file")

    def key(pool: PoolState) -> tuple[bool, float, bool, str]:
        barred, demand = most_on_demand(spec, pool) < spec.size().max, spec.policy == "on-demand"
        usd = [pool.prices[zone].on_demand if demand else _spot(pool, zone, None, 0.0) for zone in pool.zones]
        return demand and barred, min(usd), barred, pool.name

    best = min(fits, key=key)
    if len(fits) > 1:
        others = ", ".join(pool.name for pool in fits if pool is not best)
        said.append(f"pool: {best.name} alone, the cheapest ({others}: spotkeeper compare)")
    return best


def dynamic(spec: JobSpec, stack: StackState) -> list[PoolState]:
    """Spot pools that the job may use, whose prices are known."""
    return [pool for pool in pools_of(spec, stack) if pool.kind == "spot" and set(pool.zones) <= set(pool.prices)]


# -- what is known


def ground(stack: str | None, stack_file: Path | None) -> Ground:
    """The stack: a file's, the running one's, or, where none is named, one machine type as it was recorded.

    Raises:
        SpecError, CliError: the stack that was named is wrong, or not there.
    """
    if stack_file is not None:
        return of_settings(stack_file, stack)
    try:
        target = find_target(stack)
    except CliError:
        if stack is not None or os.environ.get("SPOTKEEPER_BUCKET") or os.environ.get("SPOTKEEPER_STACK"):
            raise
        return Ground(recorded_stack(), now=time.time(), said=[NO_STACK], named=False)
    store = target.store()
    state = target.state(store)
    held = store.read_prices(tuple(pool.name for pool in state.pools if pool.kind == "spot"))
    prices = {name: one.value for name, one in held.items()}
    return Ground(state, store, prices, target.clock.now(), scale=target.clock.scale)


NO_STACK = (
    f"no stack is named: zones, ${H100_USD}/h on demand and spot at {H100_SPOT:.0%} of it are those of the shipped "
    "recording (a3-highgpu-1g, October 2025)"
)


def of_settings(stack_file: Path, stack: str | None) -> Ground:
    """Of a stack file, whether or not it is up: by its prices and the catalog's."""
    from spotkeeper.cli.show import read_stack_file

    return declared(read_stack_file(stack_file, stack, "spotkeeper forecast JOB.YAML --stack-file FILE").settings)


def declared(settings: Settings) -> Ground:
    """A stack as its file declares it."""
    from infra.settings.state import pool_state, stack_state

    state = stack_state(settings, tuple(pool_state(settings, pool) for pool in settings.pools))
    return Ground(state, now=time.time(), said=["prices: those of the stack file and the list, not of today"])


def recorded_stack() -> StackState:
    """What the shipped recording is of, as if somebody had made a stack of it."""
    zones = ("us-central1-a", "us-central1-b", "us-central1-c")
    price = Price(H100_USD, round(H100_USD * H100_SPOT, 3))
    pool = PoolState(
        name="recorded",
        kind="spot",
        machine_type="a3-highgpu-1g",
        zones=zones,
        nproc=1,
        max_nodes=10_000,
        max_on_demand=10_000,
        disk_gb=100,
        disk_type="pd-ssd",
        prices=dict.fromkeys(zones, price),
    )
    return StackState("none", "gcp", "", "us-central1", "", (pool,))


def library_of(known: Ground, task: Task, markets: Path | None) -> Library:
    """The shipped recordings, or those of a folder; and the job's own market, where anybody knows it.

    Raises:
        CliError: no recording there, or none in which spot was to be had.
    """
    folder = markets or (Path(named) if (named := os.environ.get(MARKETS)) else SHIPPED)
    try:
        found = parts(read_folder(folder))
    except RecordingError as error:
        raise CliError(str(error), Exit.USAGE, "--markets DIR: a folder of recordings (*.json)") from None
    own = tuple(part for part in found if _same(task.shop.pool, part.recording.market, part.recording.zones[0].region))
    own = _history(known, task.shop.pool) or own
    if not found and not own:
        raise CliError(
            f"{folder}: spot was hardly ever to be had in any region recorded there", Exit.USAGE, "--markets DIR"
        )
    return Library(tuple(part for part in found if part not in own), own)


def _same(pool: PoolState, market: str, region: str) -> bool:
    """Whether a recorded region is the pool's own: of its region, and of the family that the market is named after."""
    family = market.partition("_")[0]
    return region_of(pool.zones[0]) == region and pool.machine_type.partition("-")[0].partition(".")[0] == family


def _history(known: Ground, pool: PoolState) -> tuple[Part, ...]:
    from spotkeeper.reconcile import paths

    if known.store is None:
        return ()
    stems = (path.rpartition("/")[2] for path in known.store.list(paths.market_hours(pool.name)))
    hours = [int(stem) for stem in stems if stem.isdigit()]
    newest = tuple(hour for hour in hours if hour > known.now / 3600.0 - HISTORY_HOURS)
    sights = known.store.read_sights((pool.name,), newest)[pool.name]
    recorded = own_recording(pool.name, region_of(pool.zones[0]), sights)
    return parts((recorded,)) if recorded is not None else ()


@contextmanager
def progress(what: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, where somebody looks at it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(what, total=steps)
        yield lambda: bars.advance(bar)
