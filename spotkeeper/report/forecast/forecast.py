"""Forecasts a job's cost and end: it replays, on recorded markets, the policy that buys machines. Pure.

The job is replayed from many moments of each recorded region, since each region is a sample of what the job's market
could be like. All regions weigh the same; but if the job's own market is recorded, it has half of the whole weight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.contract.stack import region_of
from spotkeeper.replay.model import ATTEMPT_H, PlayedOutcome
from spotkeeper.report.forecast.player import most_on_demand
from spotkeeper.report.forecast.recordings import MOVE_H, RecordingPart, Task, outcomes
from spotkeeper.report.text.words import code, markdown_table, percent, usd

if TYPE_CHECKING:
    from rich.console import RenderableType


REPLAYS = 240  # most replays of a job, over all parts (regions of recordings)
LEAST = 8  # fewest replays of one part
TICKS = 150_000  # most ticks over all replays: a job of months is replayed less often
Market = Sequence[PlayedOutcome]


class Library(Struct, frozen=True):
    """Recordings of markets: ``own`` of the market in which the job would run, ``others`` of other markets."""

    others: tuple[RecordingPart, ...]
    own: tuple[RecordingPart, ...] = ()

    @property
    def parts(self) -> tuple[RecordingPart, ...]:
        return (*self.own, *self.others)


class Outlook(Struct, frozen=True):
    """The forecast cost and end of a job. Money is USD for all its machines, times are hours from its start.

    Attributes:
        spot_share: the share of machine-hours on spot.
        late: the share of replays that ended after the deadline; None without a deadline.
        unfinished: the share of replays that were stopped before the job's end.
        over_budget: the share of replays over `max_usd` (the job would go on hold); None without that limit.
        egress: transfers between regions, a part of ``usd``; None: the job has no two regions.
    """

    usd: Band
    finish_h: Band
    preemptions: Band
    spot_share: Band
    late: float | None = None
    unfinished: float = 0.0
    over_budget: float | None = None
    egress: Band | None = None


class Forecast(Struct, frozen=True):
    """The forecast of one job on one pool. ``on_demand``: exact cost and end on the pool's on-demand machines alone."""

    job: str
    pool: str
    machine_type: str
    nodes: int
    work_h: float
    deadline_h: float | None
    expected: Outlook
    on_demand: Outlook
    saves: float  # expected saving, as a share of the on-demand cost
    replays: int
    assumptions: tuple[str, ...]
    runs: bool = True  # False: no replay had a machine, because no spot price was below its `max_price`
    bought: int = 1  # its machines that are not in reserved capacity; both costs are theirs


def forecast(
    task: Task, library: Library, assumptions: Sequence[str] = (), done: Callable[[], None] = lambda: None
) -> Forecast:
    """Forecast the cost and the end of a job.

    Args:
        assumptions: the caller's assumptions, a line each; the assumptions of the replays follow them.
        done: called after each replayed part.

    Raises:
        ValueError: the library is empty.
    """
    if not library.parts:
        raise ValueError("no recorded market has spot capacity")
    whole, own, others = on_demand_only(task), [], []
    if task.bought:
        own, others = ([_played(task, one, library, done) for one in of] for of in (library.own, library.others))
    expected = outlook(task, others, own) if task.bought else whole
    return Forecast(
        job=task.spec.name,
        pool=task.shop.pool.name,
        machine_type=task.shop.pool.machine_type,
        nodes=task.nodes,
        work_h=task.work_h,
        deadline_h=task.deadline_h,
        expected=expected,
        on_demand=whole,
        saves=1.0 - expected.usd.mid / whole.usd.mid if task.bought else 0.0,
        replays=sum(map(len, (*own, *others))),
        assumptions=(*assumptions, *(_assumed(task, library) if task.bought else ())),
        runs=not task.bought or task.shop.on_demand or expected.spot_share.high > 0,
        bought=task.bought,
    )


def replays(task: Task, library: Library) -> int:
    finest = min(part.recording.tick_h for part in library.parts)
    ticks = (task.deadline_h or 1.5 * task.work_h) / finest
    return max(LEAST, int(min(REPLAYS, TICKS / ticks) / len(library.parts)))


def _played(task: Task, part: RecordingPart, library: Library, done: Callable[[], None]) -> Market:
    found = tuple(outcomes(task, part, replays(task, library)))
    done()
    return found


def outlook(task: Task, others: Sequence[Market], own: Sequence[Market] = ()) -> Outlook:
    """Compute the 80 % ranges of a job's cost, end, preemptions and share on spot, and the risks.

    Args:
        others: for each recorded market, the outcomes of the job's replays there.
        own: the same for the markets that the stack itself has recorded, in the zones that the job may use.
    """

    def of(value: Callable[[PlayedOutcome], float]) -> Values:
        return weigh(*([[value(out) for out in market] for market in markets] for markets in (others, own)))

    def share(value: Callable[[PlayedOutcome], bool]) -> float:
        return of(lambda out: float(value(out))).share()

    most, horizon, due_h = task.spec.max_usd, task.terms(1.0).horizon_h, task.deadline_h
    return Outlook(
        usd=band(of(lambda out: cost_usd(task, out))),
        finish_h=band(of(lambda out: out.finish_h)),
        preemptions=band(of(lambda out: out.preemptions)),
        spot_share=band(of(spot_share)),
        late=None if due_h is None else share(lambda out: out.missed or out.finish_h > due_h),
        unfinished=share(lambda out: out.finish_h > horizon) if task.deadline_h is None else 0.0,
        over_budget=share(lambda out: cost_usd(task, out) > most) if most is not None else None,
        egress=band(of(lambda out: out.egress * task.bought)) if task.move_usd or task.start_usd else None,
    )


def cost_usd(task: Task, out: PlayedOutcome) -> float:
    return out.cost * task.bought


def spot_share(out: PlayedOutcome) -> float:
    ran = out.spot_h + out.on_demand_h
    return out.spot_h / ran if ran else 0.0


def on_demand_only(task: Task) -> Outlook:
    hours = task.work_h + task.restart_h
    start_usd = min((task.start_usd.get(region_of(zone), 0.0) for zone in task.shop.pool.zones), default=0.0)
    cost, nothing = (hours * task.on_demand + start_usd) * task.bought, Band(0.0, 0.0, 0.0)
    late = None if task.deadline_h is None else float(hours > task.deadline_h)
    over = None if task.spec.max_usd is None else float(cost > task.spec.max_usd)
    egress = Band(*[start_usd * task.bought] * 3) if task.start_usd else None
    return Outlook(Band(cost, cost, cost), Band(hours, hours, hours), nothing, nothing, late, 0.0, over, egress)


def barred(task: Task) -> str:
    """Why the job is not allowed to have all its machines on-demand; "" if it is."""
    if task.shop.on_demand:
        return ""
    if task.spec.policy == "spot":
        return "the job's policy is spot"
    return f"at most {most_on_demand(task.spec, task.shop.pool)} of its {task.nodes} machines may be on-demand"


# -- assumptions


def _assumed(task: Task, library: Library) -> Iterator[str]:
    spec = task.spec
    names = Counter(part.recording.name for part in library.parts)
    where = ", ".join(f"{name}: {count} region{'s' * (count > 1)}" for name, count in sorted(names.items()))
    yield f"market: capacity comes and goes as in one of the recorded markets ({where}), from many starting times"
    if library.own:
        yield (
            f"market: {', '.join(part.name for part in library.own)} is the market in which the job would run; "
            "its replays weigh as much as all others together"
        )
    low, high = usd(min(task.spot)), usd(max(task.spot))
    spot = low if low == high else f"{low} to {high}"
    yield f"prices: on-demand {usd(task.on_demand)}, spot {spot} a machine-hour, changing as in the recording"
    watched = min(part.recording.gang for part in library.parts)
    if task.nodes > watched:
        yield (
            f"capacity: the recordings tell when {watched} machines were available; "
            f"the job's {task.nodes} machines are assumed to be available at the same times"
        )
    else:
        yield "capacity: the job runs only while all its machines are available, and loses them together"
    if spec.size().min < task.nodes:
        yield f"nodes: all {task.nodes} or none, although the job could continue with {spec.size().min}"
    start, move = (f"{hours * 60:.0f} min" for hours in (task.restart_h, MOVE_H))
    yield (
        f"start: each launch bills {start} before training begins ({move} more in another zone); "
        f"a refused request adds {ATTEMPT_H * 3600:.0f} s"
    )
    yield "work: a preemption costs the time of a restart; no step is lost (the notice gives time for a save)"
    if task.shop.on_demand:
        yield "on-demand: available at any time"
    else:
        yield f"on-demand: {barred(task)}, so the replays buy none; the on-demand column is for comparison"
    if task.move_usd:
        yield f"egress: going to another region costs {usd(task.move_usd)} a machine for its whole disk and its data"
    if task.start_usd:
        told = ", ".join(f"{usd(price * task.nodes)} in {region}" for region, price in sorted(task.start_usd.items()))
        yield f"egress: a first start transfers the job's data: {told}"
    counted = task.move_usd or task.start_usd
    yield "not included: disks" + (", and traffic within a region" if counted else " and traffic")
    yield f"range: should contain {percent(PROMISED)} of outcomes, tested on unseen markets (bench/market/forecast.py)"


# -- for people


HEAD = ("", "expected", "80 % range", "on-demand only")


def rows(made: Forecast) -> Iterator[tuple[str, str, str, str]]:
    """The rows of the forecast: name, expected value, 80 % range, and the value with on-demand machines only."""
    ours, whole = made.expected, made.on_demand
    yield "cost", usd(ours.usd.mid), span(ours.usd, usd), usd(whole.usd.mid)
    if ours.egress is not None:
        yield (
            "of it egress",
            usd(ours.egress.mid),
            span(ours.egress, usd),
            usd(whole.egress.mid if whole.egress else 0.0),
        )
    yield "done after", hours(ours.finish_h.mid), span(ours.finish_h, hours), hours(whole.finish_h.mid)
    yield "preemptions", f"{ours.preemptions.mid:.1f}", span(ours.preemptions, lambda n: f"{n:.0f}"), "0"
    yield "share on spot", percent(ours.spot_share.mid), span(ours.spot_share, percent), "0 %"
    for name, share in risks(ours):
        yield name, percent(share), "", percent(dict(risks(whole)).get(name, 0.0))


def risks(of: Outlook) -> Iterator[tuple[str, float]]:
    """The risks of a job, each with the share of replays in which it happened."""
    if of.late is not None:
        yield "after its deadline", of.late
    if of.over_budget is not None:
        yield "over its max_usd", of.over_budget
    if of.unfinished:
        yield "not finished", of.unfinished


def headline(made: Forecast) -> str:
    mixed = " and " in made.machine_type  # as forecast/mix.py names it
    machines = f"{made.nodes} machines ({made.machine_type})" if mixed else f"{made.nodes} x {made.machine_type}"
    if not made.bought:
        return f"{machines}, {hours(made.work_h)} of training in reserved capacity"
    saved = f"{percent(made.saves)} cheaper than on-demand" if made.saves >= 0.005 else "no cheaper than on-demand"
    until = "" if made.deadline_h is None else f", deadline in {hours(made.deadline_h)}"
    return f"{machines}, {hours(made.work_h)} of training{until}: {saved}"


def table(made: Forecast) -> RenderableType:
    """The forecast as the command prints it; below it, a line for each assumption."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(HEAD):
        grid.add_column(name, justify="right" if at else "left", no_wrap=True)
    for row in rows(made):
        grid.add_row(*row)
    title = Text(f"{made.job} on {made.pool}: {headline(made)}", "bold")
    return Group(title, grid, Text(f"assumed ({made.replays} replays):", "dim"), below(made.assumptions))


def below(lines: Iterable[str]) -> RenderableType:
    """Indent lines by two columns, also where they wrap."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text("\n".join(lines), "dim"), (0, 0, 0, 2), expand=False)


def markdown(made: Forecast) -> str:
    """The forecast as Markdown for a comment. Names from users become code spans; the assumptions are collapsed."""
    title = f"**{code(made.job)} on {code(made.pool)}**: {code(headline(made))}"
    cells = [list(row) for row in rows(made)]
    lines = [title, "", *markdown_table(list(HEAD), cells, right=(1, 2, 3)), ""]
    return "\n".join((*lines, *folded(f"{made.replays} replays; assumptions", made.assumptions))) + "\n"


def folded(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield f"<details><summary>{title}</summary>\n"
    yield from (f"- {code(line, 1000)}" for line in lines)
    yield "\n</details>"


def span(of: Band, say: Callable[[float], str]) -> str:
    low, high = say(of.low), say(of.high)
    return low if low == high else f"{low} to {high}"


def hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours < 100 else f"{hours / 24:.1f} d"


# -- a band: the range that contains 80 % of future outcomes

# The job's market is treated as one more recorded market. All markets weigh the same, however often each is replayed.
# A band is the shortest interval with a given share of the recorded outcomes. That share is above the promised
# 80 %, because an unrecorded market differs from the recorded ones. Conformal prediction over groups (Lee, Barber and
# Willett, "Distribution-free inference with hierarchical data") requires 0.8 (1 + 1/K) for K markets in the worst case.
# When each market was left out in turn, about 0.6 of that addition was enough; when the job's own market was known and
# only hours of it were left out, no addition was needed (`bench/market/forecast.py` measures both).

PROMISED = 0.80
ADDED = 0.5  # divided by the number of markets, this is added to PROMISED
DIGITS = 9  # values that agree in this many digits count as equal
Weighted = tuple[float, float]  # a value and its weight


class Band(Struct, frozen=True):
    """The range of a quantity: four of five outcomes are from ``low`` to ``high``; ``mid`` is the mean.

    The mean can be outside the range, if a few outcomes are far from all others.
    """

    low: float
    mid: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low - 1e-6 <= value <= self.high + 1e-6

    def times(self, factor: float) -> Band:
        return Band(self.low * factor, self.mid * factor, self.high * factor)


class Values(Struct, frozen=True):
    """Outcomes with their weights; ``level``: the share of the weight that a band must contain."""

    weighted: tuple[Weighted, ...]
    level: float

    def share(self) -> float:
        """The weighted share of outcomes that are 1; every outcome must be 0 or 1."""
        return sum(weight * value for value, weight in self.weighted)


def weigh(others: Sequence[Sequence[float]], own: Sequence[Sequence[float]] = ()) -> Values:
    """Give each outcome its weight; the markets of ``others`` weigh the same.

    If the job's ``own`` markets are known, they have half of the whole weight, shared equally.
    """
    kinds = [markets for markets in (others, own) if markets]
    weighted = tuple(
        (value, 1.0 / len(kinds) / len(markets) / len(market))
        for markets in kinds
        for market in markets
        for value in market
    )
    return Values(weighted, PROMISED if own else min(1.0, PROMISED + ADDED / max(1, len(others))))


def band(values: Values) -> Band:
    """Return the band of one quantity, not stretched to its mean.

    Raises:
        ValueError: no values.
    """
    found: dict[float, float] = {}
    for value, weight in values.weighted:
        found[round(value, DIGITS)] = found.get(round(value, DIGITS), 0.0) + weight
    if not found:
        raise ValueError("a band needs outcomes")
    points = sorted(found)
    sums = [0.0, *accumulate(found[point] for point in points)]
    mean = sum(point * weight for point, weight in found.items()) / sums[-1]
    low, high = _shortest(points, sums, values.level * sums[-1])
    return Band(low, mean, high)


def _shortest(points: list[float], sums: list[float], wanted: float) -> tuple[float, float]:
    best = points[0], points[-1]
    for first, point in enumerate(points):
        last = bisect_left(sums, sums[first] + wanted - 1e-9, first + 1)
        if last > len(points):
            break
        if points[last - 1] - point < best[1] - best[0] - 1e-12:
            best = point, points[last - 1]
    return best
