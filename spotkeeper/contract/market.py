"""Documents of the market: prices that the cloud reports, and events of machines.

Reconcile writes these plain values under ``market/``; the report also reads them. Any of these documents can be
missing, since safety does not depend on them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from enum import Enum

from msgspec import Struct

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model

HOUR_S = 3600.0
FRESH_S = 24 * HOUR_S  # older prices and guesses count as unknown for decisions; reports on the past still use them


class PriceRun(Struct, frozen=True, array_like=True):
    """A spot price of ``usd`` per machine-hour from ``start`` (virtual unix seconds) until the next run.

    ``zone`` "": all zones, in a stack with one region of Google Cloud, where prices are those of a region.
    """

    start: float
    usd: float
    zone: str = ""


class Guess(Struct, frozen=True, omit_defaults=True):
    """A cloud's own estimates for its spot machines in one zone, each from 0 (bad) to 1; None: not published.

    They serve only as priors: a zone's estimates are compared with those of other zones, not taken literally.

    Attributes:
        had: chance that the requested number of machines is available now (GCE's obtainability, EC2's score / 10).
        lasts: for how long most of the machines would run, in hours, at most 1 (GCE's estimated uptime).
        kept: the share of recently ended machines that the cloud had not preempted (GCE's preemption history).
    """

    had: float | None = None
    lasts: float | None = None
    kept: float | None = None


class Chances(Struct, frozen=True):
    """A cloud's guesses for a pool by zone, made ``at`` (virtual unix seconds). Zones without guesses are left out."""

    at: float
    by_zone: dict[str, Guess]


class Network(Struct, frozen=True):
    """``market/networks/<machine type>/<zone>``: bandwidth between machines, as the newest gang measured it, Gbit/s."""

    machine_type: str
    zone: str
    gbit_s: float
    at: float  # virtual unix seconds


class Prices(Struct, frozen=True, omit_defaults=True):
    """``market/prices/<pool>``: a pool's spot prices, and the cloud's estimates of spot capacity.

    ``asked``: time of the last query; ``told``: time of the last answer; ``runs``: periods of constant price. If there
    are no ``runs``, the prices are unknown, not zero.
    """

    pool: str
    asked: float
    told: float = 0.0
    runs: tuple[PriceRun, ...] = ()  # by time
    guesses: Chances | None = None  # None: the cloud publishes none

    def guess(self, now: float, zone: str) -> Guess | None:
        """Return the cloud's estimate for a zone; None if it is unknown or too old."""
        made = self.guesses
        return made.by_zone.get(zone) if made is not None and abs(now - made.at) <= FRESH_S else None

    def now(self, now: float, zone: str = "") -> float | None:
        """Return the price for a choice made now, USD per machine-hour; None if it is unknown or too old."""
        return self.at(now, zone) if self.told and abs(now - self.told) <= FRESH_S else None

    def at(self, time: float, zone: str = "") -> float | None:
        """Return the price at a time, USD per machine-hour; None before the first known price.

        The newest known price counts for all times after it.
        """
        runs = self._of(zone)
        found = bisect_right(runs, time, key=lambda run: run.start)
        return runs[found - 1].usd if found else None

    def mean(self, start: float, end: float, unknown: float, zone: str = "") -> float:
        """Return the time-weighted mean price over ``[start, end]``; ``unknown`` is assumed before the first price."""
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
    """A zone's spot observations in condensed form (``reconcile.select.zone_history``). Times are virtual hours."""

    zone: str
    up: bool | None = None  # whether spot was available at ``seen_h``; None: never probed
    seen_h: float = 0.0
    since_h: float = 0.0
    losses: float = 0.0
    exposure: float = 0.0
    observed_h: float = 0.0
    up_h: float = 0.0


class Alive(Struct, frozen=True, array_like=True):
    """A spot machine that still runs, as far as observed."""

    machine: str
    zone: str
    since_h: float


class MarketPast(Struct, frozen=True, omit_defaults=True):
    """``market/past/<pool>``: all hours before ``hour`` condensed into one small object; older hours weigh less.

    Condensing the same hours again gives the same object; later reports about a condensed hour are ignored.
    """

    pool: str
    hour: int
    zones: tuple[Watch, ...] = ()
    alive: tuple[Alive, ...] = ()
    boots_s: tuple[float, ...] = ()  # of the newest machines: from the request to the first hello (its own or a backup)


class Observation(Struct, frozen=True, array_like=True):
    """One event in a machine's life.

    The same ledger entry always gives an equal observation, and equal observations are stored once. ``machine``
    contains the attempt's number, which is never used twice.
    """

    machine: str  # <job>-n<node>-a<attempt>
    event: Event  # ADMITTED, REFUSED, NOTICE, REPRIEVE, LOSS, GONE
    at: float
    zone: str = ""  # GONE entries have neither zone nor model
    model: Model | None = None
    cause: str = ""
    started: float | None = None


class MarketHour(Struct, frozen=True):
    """``market/hours/<pool>/<hour>``: the events of the pool's machines in one hour, over all jobs."""

    observations: tuple[Observation, ...] = ()


class Fate(str, Enum):
    """How the life of an admitted machine ended.

    =========== =====================================================================================
    KEPT        it still runs, or the job released it without a notice, perhaps because it was silent
    ANNOUNCED   it was lost or released while a preemption notice was in force
    UNANNOUNCED it was lost without a notice
    =========== =====================================================================================

    For a spot machine, ANNOUNCED and UNANNOUNCED count as preemptions.
    """

    KEPT = "kept"
    ANNOUNCED = "announced"
    UNANNOUNCED = "unannounced"


LOST_ANNOUNCED = ("notice", "noticed standby")  # causes of a LOSS
LOST_SILENTLY = ("loss", "standby")
NEVER_JOINED = "never joined"


def fate(story: Iterable[tuple[Event, str]]) -> Fate:
    """Return the fate of one machine from its events and their causes, in order of time.

    The first LOSS decides. A withdrawn notice does not count.
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
    """One machine's life. Times are virtual unix seconds."""

    machine: str
    zone: str
    model: Model
    fate: Fate
    began: float | None = None  # when it started to run; None: before the first observation
    ended: float | None = None  # when it was found lost or was released; None: it still runs


def lives(observations: Iterable[Observation]) -> tuple[MachineLife, ...]:
    """Return the lives of admitted machines, ordered by first observation. ``observations`` are in order of time."""
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
