"""Documents of the market: prices that the cloud reports, and events of machines.

Reconcile writes these plain values under ``market/``; the report reads them too. All of them may be missing: safety
does not depend on them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from enum import Enum

from msgspec import Struct

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model

HOUR_S = 3600.0
FRESH_S = 24 * HOUR_S  # a price told longer ago chooses nothing any more; for the past it still counts


class PriceRun(Struct, frozen=True, array_like=True):
    """From ``start`` (virtual unix seconds) until the next run a spot machine costs ``usd`` an hour.

    ``zone`` "": in all of the region, as Compute Engine tells prices; EC2 tells them by zone.
    """

    start: float
    usd: float
    zone: str = ""


class Guess(Struct, frozen=True, omit_defaults=True):
    """What a cloud itself says of its spot machines in one zone, each from 0 (bad) to 1. None: it does not say, which
    is never zero. Priors, and no more: they are compared with its guesses of other zones, not believed as they are.

    Attributes:
        had: as many as were asked about are to be had now (GCE's obtainability, a tenth of EC2's score).
        lasts: for how much of an hour most of them would run (GCE's estimated uptime, which ends at an hour).
        kept: of those that ended lately, the share that the cloud had not taken (GCE's preemption history).
    """

    had: float | None = None
    lasts: float | None = None
    kept: float | None = None


class Chances(Struct, frozen=True):
    """A pool's guesses by zone, as its cloud made them ``at`` (virtual unix seconds). A zone that is missing is
    unknown."""

    at: float
    by_zone: dict[str, Guess]


class Network(Struct, frozen=True):
    """``market/networks/<machine type>/<zone>``: what the newest gang measured between its machines, Gbit/s."""

    machine_type: str
    zone: str
    gbit_s: float
    at: float  # virtual unix seconds


class Prices(Struct, frozen=True, omit_defaults=True):
    """``market/prices/<pool>``: what the cloud tells of a pool's spot machines: prices in the stack's region, guesses.

    ``asked`` is the time of the last question, answered or not; ``told`` that of the last answer. No runs
    means unknown, never zero.
    """

    pool: str
    asked: float
    told: float = 0.0
    runs: tuple[PriceRun, ...] = ()  # by time
    guesses: Chances | None = None  # where the cloud makes any

    def guess(self, now: float, zone: str) -> Guess | None:
        """Return the cloud's estimate for a zone; None if it is unknown or too old."""
        made = self.guesses
        return made.by_zone.get(zone) if made is not None and abs(now - made.at) <= FRESH_S else None

    def now(self, now: float, zone: str = "") -> float | None:
        """Return the price for a choice made now, USD per machine-hour; None if it is unknown or too old."""
        return self.at(now, zone) if self.told and abs(now - self.told) <= FRESH_S else None

    def at(self, time: float, zone: str = "") -> float | None:
        """Return the price at a time, USD per machine-hour; None before the first run. The last run has no end."""
        runs = self._of(zone)
        found = bisect_right(runs, time, key=lambda run: run.start)
        return runs[found - 1].usd if found else None

    def mean(self, start: float, end: float, unknown: float, zone: str = "") -> float:
        """Return the time-weighted mean price over ``[start, end]``; ``unknown``: the price before the first run."""
        if end <= start:
            return self.at(start, zone) or unknown
        total, at, price = 0.0, start, self.at(start, zone)
        for run in self._of(zone):
            if start < run.start < end:
                total += (run.start - at) * (unknown if price is None else price)
                at, price = run.start, run.usd
        total += (end - at) * (unknown if price is None else price)
        return total / (end - start)

    def _of(self, zone: str) -> tuple[PriceRun, ...]:
        return tuple(run for run in self.runs if run.zone in ("", zone))


class Watch(Struct, frozen=True, array_like=True):
    """What was seen of spot in a zone, in short (``reconcile.select.zone_history``). Times: hours of the virtual
    clock."""

    zone: str
    up: bool | None = None  # at ``seen_h``; None: nobody has looked
    seen_h: float = 0.0
    since_h: float = 0.0
    losses: float = 0.0
    exposure: float = 0.0
    observed_h: float = 0.0
    up_h: float = 0.0


class Alive(Struct, frozen=True, array_like=True):
    """A spot machine whose end was not observed yet."""

    machine: str
    zone: str
    since_h: float


class MarketPast(Struct, frozen=True, omit_defaults=True):
    """``market/past/<pool>``: all hours before ``hour``, folded into one small object, the older the fainter.

    Whoever folds the same hours writes the same; what is told of an hour after that is left out.
    """

    pool: str
    hour: int
    zones: tuple[Watch, ...] = ()
    alive: tuple[Alive, ...] = ()
    boots_s: tuple[float, ...] = ()  # of the newest machines: from the order to the hello, or to the backup's


class Observation(Struct, frozen=True, array_like=True):
    """One event of one machine's life. A machine is known by its attempt, whose number never returns.

    It is the ledger's entry in short, so that an event which is written down twice is the same twice.
    """

    machine: str  # <job>-n<node>-a<attempt>
    event: Event  # ADMITTED, REFUSED, NOTICE, REPRIEVE, LOSS, GONE
    at: float
    zone: str = ""  # of GONE the ledger tells neither zone nor model
    model: Model | None = None
    cause: str = ""
    started: float | None = None


class MarketHour(Struct, frozen=True):
    """``market/hours/<pool>/<hour>``: what the pool's machines lived through in one hour, all jobs together."""

    observations: tuple[Observation, ...] = ()


class Fate(str, Enum):
    """What became of a machine that had joined.

    =========== ==================================================================================
    KEPT        the job had it for as long as it wanted, or gave it up itself (also for its silence)
    ANNOUNCED   the cloud took it, or was about to: a notice stood when it was lost or given up
    UNANNOUNCED the cloud took it, and no notice stood
    =========== ==================================================================================

    The last two are what "preemption" means everywhere, where the machine was a spot machine.
    """

    KEPT = "kept"
    ANNOUNCED = "announced"
    UNANNOUNCED = "unannounced"


LOST_ANNOUNCED = ("notice", "noticed standby")  # causes of a LOSS
LOST_SILENTLY = ("loss", "standby")
NEVER_JOINED = "never joined"


def fate(story: Iterable[tuple[Event, str]]) -> Fate:
    """Return what became of one machine, from its events with their causes, in order of time.

    The first proof of a loss decides. A withdrawn notice does not count.
    """
    noticed = False
    for event, cause in story:
        if event is Event.NOTICE:
            noticed = True
        elif event is Event.REPRIEVE:
            noticed = False
        elif event is Event.LOSS and cause in LOST_ANNOUNCED:
            return Fate.ANNOUNCED
        elif event is Event.LOSS and cause in LOST_SILENTLY:
            return Fate.ANNOUNCED if noticed else Fate.UNANNOUNCED
    return Fate.ANNOUNCED if noticed else Fate.KEPT


class MachineLife(Struct, frozen=True):
    """One machine's life, as far as it is known. Times are virtual unix seconds."""

    machine: str
    zone: str
    model: Model
    fate: Fate
    began: float | None = None  # when it ran; None: before the history that was read
    ended: float | None = None  # when it was found lost, or given back; None: it is there


def lives(observations: Iterable[Observation]) -> tuple[MachineLife, ...]:
    """Return the lives of machines that joined, by their beginning, from observations in order of time."""
    stories: dict[str, list[Observation]] = {}
    for observation in observations:
        stories.setdefault(observation.machine, []).append(observation)
    return tuple(life for story in stories.values() if (life := _life(story)) is not None)


def _life(story: list[Observation]) -> MachineLife | None:
    placed = next((observation for observation in story if observation.zone and observation.model is not None), None)
    if placed is None or placed.model is None or placed.event is Event.REFUSED or placed.cause == NEVER_JOINED:
        return None
    joined = next((observation for observation in story if observation.event is Event.ADMITTED), None)
    ended = next((observation.at for observation in story if observation.event in (Event.LOSS, Event.GONE)), None)
    return MachineLife(
        machine=placed.machine,
        zone=placed.zone,
        model=placed.model,
        fate=fate((observation.event, observation.cause) for observation in story),
        began=None if joined is None else joined.at if joined.started is None else joined.started,
        ended=ended,
    )
