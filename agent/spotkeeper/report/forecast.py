"""What a job will cost, and when it will be done: the rule that buys, replayed on recorded markets. Pure.

The job is begun at many moments in every recorded region. Each region is one guess at what this job's market will be
like, and all count alike; the job's own market, where it was recorded, counts as much as all the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from spotkeeper.replay.cases import ATTEMPT_H
from spotkeeper.replay.model import Outcome
from spotkeeper.report.forecast_band import PROMISED, Band, Values, band, weigh
from spotkeeper.report.forecast_past import MOVE_H, Part, Task, outcomes
from spotkeeper.report.forecast_play import most_on_demand

REPLAYS = 240  # of a job, all parts together
LEAST = 8  # of one part
TICKS = 150_000  # of all replays together: a job of months is begun less often
Market = Sequence[Outcome]


class Library(Struct, frozen=True):
    """What was recorded. ``own``: of it, the job's own market."""

    others: tuple[Part, ...]
    own: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*self.own, *self.others)


class Course(Struct, frozen=True):
    """What a job comes to. Money is USD for all its machines, times are hours from its beginning.

    Attributes:
        spot_share: of the hours in which machines ran, those on spot.
        late: of the replays, the share that ended after the deadline; None: there is none.
        unfinished: the share that was not done when the replay was given up.
        over_budget: the share that cost more than `max_usd` (the job would hold then); None: there is none.
    """

    usd: Band
    finish_h: Band
    preemptions: Band
    spot_share: Band
    late: float | None = None
    unfinished: float = 0.0
    over_budget: float | None = None


class Forecast(Struct, frozen=True):
    """One job on one pool, beside the same on on-demand only, of which nothing is uncertain here."""

    job: str
    pool: str
    machine_type: str
    nodes: int
    work_h: float
    deadline_h: float | None
    expected: Course
    on_demand: Course
    saves: float  # of on-demand's price, the share that is expected to be saved
    replays: int
    assumptions: tuple[str, ...]


def forecast(
    task: Task, library: Library, assumptions: Sequence[str] = (), done: Callable[[], None] = lambda: None
) -> Forecast:
    """
    Args:
        assumptions: what the caller took for granted, a line each.
        done: called after each part.

    Raises:
        ValueError: the library is empty.
    """
    if not library.parts:
        raise ValueError("no recorded market in which spot was to be had")
    own, others = ([_played(task, part, library, done) for part in parts] for parts in (library.own, library.others))
    expected, whole = course(task, others, own), on_demand_only(task)
    return Forecast(
        job=task.spec.name,
        pool=task.shop.pool.name,
        machine_type=task.shop.pool.machine_type,
        nodes=task.nodes,
        work_h=task.work_h,
        deadline_h=task.deadline_h,
        expected=expected,
        on_demand=whole,
        saves=1.0 - expected.usd.mid / whole.usd.mid,
        replays=sum(map(len, (*own, *others))),
        assumptions=(*assumptions, *_assumed(task, library)),
    )


def replays(task: Task, library: Library) -> int:
    """How often the job is begun in each part."""
    finest = min(part.recording.tick_h for part in library.parts)
    ticks = (task.deadline_h or 1.5 * task.work_h) / finest
    return max(LEAST, int(min(REPLAYS, TICKS / ticks) / len(library.parts)))


def _played(task: Task, part: Part, library: Library, done: Callable[[], None]) -> Market:
    found = tuple(outcomes(task, part, replays(task, library)))
    done()
    return found


def course(task: Task, others: Sequence[Market], own: Sequence[Market] = ()) -> Course:
    """Bands over outcomes by part."""

    def of(value: Callable[[Outcome], float]) -> Values:
        return weigh(*([[value(out) for out in market] for market in markets] for markets in (others, own)))

    def share(value: Callable[[Outcome], bool]) -> float:
        return of(lambda out: float(value(out))).share()

    most, horizon, due_h = task.spec.max_usd, task.terms(1.0).horizon_h, task.deadline_h
    return Course(
        usd=band(of(lambda out: usd(task, out))),
        finish_h=band(of(lambda out: out.finish_h)),
        preemptions=band(of(lambda out: out.preemptions)),
        spot_share=band(of(spot_share)),
        late=None if due_h is None else share(lambda out: out.missed or out.finish_h > due_h),
        unfinished=share(lambda out: out.finish_h > horizon) if task.deadline_h is None else 0.0,
        over_budget=share(lambda out: usd(task, out) > most) if most is not None else None,
    )


def usd(task: Task, out: Outcome) -> float:
    return out.cost * task.nodes


def spot_share(out: Outcome) -> float:
    ran = out.spot_h + out.on_demand_h
    return out.spot_h / ran if ran else 0.0


def on_demand_only(task: Task) -> Course:
    hours = task.work_h + task.restart_h
    cost, nothing = hours * task.on_demand * task.nodes, Band(0.0, 0.0, 0.0)
    late = None if task.deadline_h is None else float(hours > task.deadline_h)
    over = None if task.spec.max_usd is None else float(cost > task.spec.max_usd)
    return Course(Band(cost, cost, cost), Band(hours, hours, hours), nothing, nothing, late, 0.0, over)


def barred(task: Task) -> str:
    """Why the whole gang may not be on-demand; "" if it may."""
    if task.shop.on_demand:
        return ""
    if task.spec.policy == "spot":
        return "the job's policy is spot"
    return f"{most_on_demand(task.spec, task.shop.pool)} machines may be, fewer than the gang's {task.nodes}"


# -- what is taken for granted


def _assumed(task: Task, library: Library) -> Iterator[str]:
    spec = task.spec
    names = Counter(part.recording.name for part in library.parts)
    where = ", ".join(f"{name}: {count} region{'s' * (count > 1)}" for name, count in sorted(names.items()))
    yield f"market: like a recorded one ({where}), begun at any moment of it"
    if library.own:
        yield f"market: {', '.join(part.name for part in library.own)} is the job's own: as much weight as all others"
    spot = (
        f"${min(task.spot):.3f}" if min(task.spot) == max(task.spot) else f"${min(task.spot):.3f}-{max(task.spot):.3f}"
    )
    yield f"prices: on-demand ${task.on_demand:.3f}, spot {spot} a machine-hour, moving as spot did in the recording"
    watched = min(part.recording.gang for part in library.parts)
    if task.nodes > watched:
        yield f"capacity: recordings show {watched} machines or more; the {task.nodes} of this job are lost as one"
    else:
        yield "capacity: the gang runs where all its machines are to be had, and loses its place as one"
    if spec.size().min < task.nodes:
        yield f"nodes: all {task.nodes} or none, though it could go on with {spec.size().min}"
    start, move = (f"{hours * 60:.0f} min" for hours in (task.restart_h, MOVE_H))
    yield f"start: {start} for every launch, billed; {move} more in another zone; {ATTEMPT_H * 3600:.0f} s a refusal"
    yield "work: preemptions cost their restart and no training beside it (a notice is time enough for a save)"
    if task.shop.on_demand:
        yield "on-demand: to be had at any time"
    else:
        yield f"on-demand: {barred(task)}, so none is bought; its column is what the same would cost, for comparison"
    yield "left out: disks and traffic"
    yield f"band: holds {PROMISED:.0%} of outcomes in markets that were left out (bench/forecast.py)"
