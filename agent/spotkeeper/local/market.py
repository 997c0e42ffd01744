"""Capacity and price of spot machines, replayed from a recorded market. Pure: time comes in, never from a clock.

A recorded gang (16 VMs) is mapped to the few that fit on a laptop; a cloud's zones are mapped to
recorded ones by name, and otherwise in order. The seed draws where in the recording the replay begins.
Spot prices are those of a region, as Google's are: its first zone's, where the recording knows several.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec

from spotkeeper.local.catalog import region_of
from spotkeeper.spec import codec

FOLDER = Path(__file__).parent / "markets"
# The first third of the recording shows steady and stormy hours in all central zones; a replay starts within it.
START_SHARE = 1 / 3
CALM_SHARE = 1 / 2  # of a recorded gang: in a calm hour every zone carries at least that


class _Zone(msgspec.Struct, frozen=True):
    zone: str
    capacity: list[tuple[int, int]]
    price: list[tuple[float, int]]


class _File(msgspec.Struct, frozen=True):
    collection: str
    market: str
    gap_seconds: int
    gang: int
    zones: list[_Zone]


@dataclass(frozen=True)
class Series:
    """A step function over recorded ticks: ``values[i]`` holds until tick ``ends[i]``."""

    values: tuple[float, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, runs: list[tuple[int, int]] | list[tuple[float, int]]) -> Series:
        return cls(tuple(float(value) for value, _ in runs), tuple(accumulate(ticks for _, ticks in runs)))

    def at(self, tick: int) -> float:
        """The value at a tick; the recording repeats for ever."""
        return self.values[bisect_right(self.ends, tick % self.ends[-1])]

    def next_change(self, tick: int) -> int:
        """The first tick after this one where the value may differ."""
        turns, inside = divmod(tick, self.ends[-1])
        return turns * self.ends[-1] + self.ends[bisect_right(self.ends, inside)]


@dataclass(frozen=True)
class Market:
    """The replay. ``epoch`` is the virtual time of the first tick; prices are shares of on-demand."""

    capacities: dict[str, Series]
    prices: dict[str, Series]
    gap_s: float
    gang: int
    per_zone: int
    epoch: float
    offset: int

    @classmethod
    def load(
        cls, name: str, zones: tuple[str, ...], *, epoch: float, seed: int, per_zone: int, calm_s: float = 0.0
    ) -> Market:
        """
        Args:
            name: a file of ``local/markets``, without ``.json``; or the path of another recording, with it.
            per_zone: how many VMs a zone has when the recording shows a whole gang.
            calm_s: the replay begins where the market is calm for this long (for whoever brings a storm along).

        Raises:
            ValueError: no such recording, more zones than it has, or it is never calm for so long.
        """
        path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
        if not path.is_file():
            known = ", ".join(sorted(found.stem for found in FOLDER.glob("*.json")))
            raise ValueError(f"market {name!r}: no such recording (there is: {known})")
        data = codec.decode(path.read_bytes(), _File)
        chosen = _match(zones, data.zones, name)
        ticks = sum(count for _, count in data.zones[0].capacity)
        capacities = {zone: Series.of(chosen[zone].capacity) for zone in zones}
        starts: Sequence[int] = range(int(ticks * START_SHARE))
        if calm_s:
            ahead = int(calm_s // data.gap_seconds) + 1
            starts = _calm(capacities, len(starts), ahead, data.gang * CALM_SHARE)
            if not starts:
                raise ValueError(f"market {name!r} is never calm for {calm_s:.0f} s in all of {', '.join(zones)}")
        return cls(
            capacities=capacities,
            prices={zone: Series.of(chosen[_first_of_region(zone, zones)].price) for zone in zones},
            gap_s=float(data.gap_seconds),
            gang=data.gang,
            per_zone=per_zone,
            epoch=epoch,
            offset=random.Random(seed).choice(starts),  # noqa: S311 - a replay, not a secret
        )

    def tick(self, now: float) -> int:
        return self.offset + max(0, int((now - self.epoch) // self.gap_s))

    def capacity(self, zone: str, now: float) -> int:
        """How many spot VMs the zone carries now."""
        return int(self.capacities[zone].at(self.tick(now)) * self.per_zone // self.gang)

    def price(self, zone: str, now: float) -> float:
        """The spot price now, as a share of the on-demand price."""
        return self.prices[zone].at(self.tick(now))

    def next_change(self, now: float) -> float:
        """Virtual time at which some zone's capacity may change next."""
        tick = self.tick(now)
        first = min(series.next_change(tick) for series in self.capacities.values())
        return self.epoch + (first - self.offset) * self.gap_s

    def mean_price(self, zone: str, start: float, end: float) -> float:
        """Time-weighted mean of the price share over ``[start, end]``."""
        if end <= start:
            return self.price(zone, start)
        return sum((b - a) * share for a, b, share in self.price_runs(zone, start, end)) / (end - start)

    def price_runs(self, zone: str, start: float, end: float) -> Iterator[tuple[float, float, float]]:
        """``(start, end, share)`` of each price that held within these times; those before the replay as recorded."""
        tick = self._recorded(start)
        while self._time(tick) < end:
            until = self.prices[zone].next_change(tick)
            yield max(start, self._time(tick)), min(end, self._time(until)), self.prices[zone].at(tick)
            tick = until

    def preempted(self, zone: str, start: float, end: float) -> float | None:
        """Of the spot machines that a zone carried in these times, the share that was taken away; None: not recorded.

        Taken is what capacity fell by; the others are those that were left in the end.
        """
        first, last = self._recorded(start), self._recorded(end)
        if last <= first:
            return None
        seen = [self.capacities[zone].at(tick) for tick in range(first, last + 1)]
        taken = sum(max(0.0, before - after) for before, after in pairwise(seen))
        return taken / (taken + seen[-1]) if taken + seen[-1] else None

    def carried(self, zone: str, start: float, end: float, size: int) -> list[bool]:
        """Tick by tick of these times, whether the zone carried so many machines; [] where nothing was recorded."""
        ticks = range(self._recorded(start), self._recorded(end))
        fits = size * self.gang  # as `capacity` maps a recorded gang to the machines of a laptop
        return [self.capacities[zone].at(tick) * self.per_zone >= fits for tick in ticks]

    def _time(self, tick: int) -> float:
        return self.epoch + (tick - self.offset) * self.gap_s

    def _recorded(self, now: float) -> int:
        """The tick of a moment, also of one before the replay began; the recording's first at the least."""
        return max(0, self.offset + int((now - self.epoch) // self.gap_s))


def _first_of_region(zone: str, zones: tuple[str, ...]) -> str:
    return next(other for other in zones if region_of(other) == region_of(zone))


def _calm(capacities: dict[str, Series], starts: int, ahead: int, least: float) -> list[int]:
    """Those of the first ``starts`` ticks from where on no zone carries less than ``least`` for ``ahead`` ticks."""
    bad = [any(series.at(tick) < least for series in capacities.values()) for tick in range(starts + ahead)]
    return [start for start in range(starts) if not any(bad[start : start + ahead])]


def _match(zones: tuple[str, ...], recorded: list[_Zone], name: str) -> dict[str, _Zone]:
    """By name where the recording has the zone; the others take what is left, in order."""
    by_name = {zone.zone: zone for zone in recorded}
    left = iter(zone for zone in recorded if zone.zone not in zones)
    out: dict[str, _Zone] = {}
    for zone in zones:
        found = by_name.get(zone) or next(left, None)
        if found is None:
            raise ValueError(f"market {name!r} has {len(recorded)} zones, {len(zones)} are wanted")
        out[zone] = found
    return out
