"""Replays capacity and price of spot machines from a recorded market. Pure: callers pass the time.

Markets are recorded for a gang of 16 VMs, more than a laptop can run; so recorded capacities are scaled down. A zone
of the cloud replays the recorded zone of the same name; if no recorded zone has this name, then one that no other zone
replays. The seed chooses where in the recording the replay begins. All zones of a region have the spot price of the
region's first zone. A *tick* is here one sample of the recording; samples are ``gap_s`` seconds apart.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec

from spotkeeper.contract import codec
from spotkeeper.local.core.catalog import region_of

FOLDER = Path(__file__).parents[1] / "markets"
# The first third of the recording has both steady and volatile hours in all central zones; a replay starts within it.
START_SHARE = 1 / 3
CALM_SHARE = 1 / 2  # least capacity of every zone in a calm hour, as a share of the recorded gang


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
    """A recorded capacity or price: ``values[i]`` applies until tick ``ends[i]``. A tick: ``Market.gap_s`` seconds."""

    values: tuple[float, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, runs: list[tuple[int, int]] | list[tuple[float, int]]) -> Series:
        return cls(tuple(float(value) for value, _ in runs), tuple(accumulate(ticks for _, ticks in runs)))

    def at(self, tick: int) -> float:
        """The value at a tick; the recording repeats endlessly."""
        return self.values[bisect_right(self.ends, tick % self.ends[-1])]

    def next_change(self, tick: int) -> int:
        """The first tick after ``tick`` at which the recorded capacity or price may have another value."""
        turns, inside = divmod(tick, self.ends[-1])
        return turns * self.ends[-1] + self.ends[bisect_right(self.ends, inside)]


@dataclass(frozen=True)
class Market:
    """A replay of a recorded market.

    ``epoch`` is the virtual time of the replay's first tick; prices are shares of the on-demand price.
    """

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
        """Load a recording and choose where its replay begins.

        Args:
            name: a file of ``local/markets``, without ``.json``; or the path of another recording, with ``.json``.
            per_zone: a zone's capacity, in spot VMs, at times when the recorded zone has capacity for the whole gang of
                the recording (16 VMs); at other times the capacity is reduced in proportion.
            calm_s: virtual seconds at the replay's start in which each recorded zone has capacity for half of the gang.

        Raises:
            ValueError: unknown recording, more zones than recorded ones, or no calm time of this length.
        """
        path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
        if not path.is_file():
            known = ", ".join(sorted(found.stem for found in FOLDER.glob("*.json")))
            raise ValueError(f"no such recorded market: {name!r} (known: {known})")
        data = codec.decode(path.read_bytes(), _File)
        chosen = _match(zones, data.zones, name)
        ticks = sum(count for _, count in data.zones[0].capacity)
        capacities = {zone: Series.of(chosen[zone].capacity) for zone in zones}
        starts: Sequence[int] = range(int(ticks * START_SHARE))
        if calm_s:
            ahead = int(calm_s // data.gap_seconds) + 1
            starts = _calm(capacities, len(starts), ahead, data.gang * CALM_SHARE)
            if not starts:
                raise ValueError(
                    f"market {name!r}: its zones {', '.join(zones)} never all keep capacity for half of the "
                    f"recorded gang for {calm_s:.0f} s: reduce calm_s, or choose another market"
                )
        first = {region_of(zone): zone for zone in reversed(zones)}  # a region's zones have one price
        return cls(
            capacities=capacities,
            prices={zone: Series.of(chosen[first[region_of(zone)]].price) for zone in zones},
            gap_s=float(data.gap_seconds),
            gang=data.gang,
            per_zone=per_zone,
            epoch=epoch,
            offset=random.Random(seed).choice(starts),  # noqa: S311 - a replay, not a secret
        )

    def tick(self, now: float) -> int:
        return self.offset + max(0, int((now - self.epoch) // self.gap_s))

    def capacity(self, zone: str, now: float) -> int:
        """The zone's capacity for spot VMs now."""
        return int(self.capacities[zone].at(self.tick(now)) * self.per_zone // self.gang)

    def price(self, zone: str, now: float) -> float:
        """The spot price now, as a share of the on-demand price."""
        return self.prices[zone].at(self.tick(now))

    def next_change(self, now: float) -> float:
        """The virtual time at which a zone's capacity may change next."""
        tick = self.tick(now)
        first = min(series.next_change(tick) for series in self.capacities.values())
        return self.epoch + (first - self.offset) * self.gap_s

    def mean_price(self, zone: str, start: float, end: float) -> float:
        """Time-weighted mean of the price over ``[start, end]``, as a share of the on-demand price."""
        if end <= start:
            return self.price(zone, start)
        return sum((b - a) * share for a, b, share in self.price_runs(zone, start, end)) / (end - start)

    def price_runs(self, zone: str, start: float, end: float) -> Iterator[tuple[float, float, float]]:
        """Yield ``(start, end, share)`` of each price within ``[start, end]``, even before the replay's start."""
        tick = self._recorded(start)
        while self._time(tick) < end:
            until = self.prices[zone].next_change(tick)
            yield max(start, self._time(tick)), min(end, self._time(until)), self.prices[zone].at(tick)
            tick = until

    def preempted(self, zone: str, start: float, end: float) -> float | None:
        """Return the preempted share of a zone's spot machines within ``[start, end]``; None if it is not recorded.

        Every fall of capacity by n counts as n preempted machines, and the capacity at ``end`` counts as the survivors.
        """
        first, last = self._recorded(start), self._recorded(end)
        if last <= first:
            return None
        seen = [self.capacities[zone].at(tick) for tick in range(first, last + 1)]
        taken = sum(max(0.0, before - after) for before, after in pairwise(seen))
        return taken / (taken + seen[-1]) if taken + seen[-1] else None

    def carried(self, zone: str, start: float, end: float, size: int) -> list[bool]:
        """For each recorded tick of ``[start, end]``, whether the zone had capacity for ``size`` machines."""
        ticks = range(self._recorded(start), self._recorded(end))
        fits = size * self.gang  # as `capacity` maps a recorded gang to the machines of a laptop
        return [self.capacities[zone].at(tick) * self.per_zone >= fits for tick in ticks]

    def _time(self, tick: int) -> float:
        return self.epoch + (tick - self.offset) * self.gap_s

    def _recorded(self, now: float) -> int:
        """Return the recording's tick at ``now``; at a time before the recording, the first tick."""
        return max(0, self.offset + int((now - self.epoch) // self.gap_s))


def _calm(capacities: dict[str, Series], starts: int, ahead: int, least: float) -> list[int]:
    """Return the ticks below ``starts`` after which, for ``ahead`` ticks, no zone's capacity is less than ``least``."""
    bad = [any(series.at(tick) < least for series in capacities.values()) for tick in range(starts + ahead)]
    return [start for start in range(starts) if not any(bad[start : start + ahead])]


def _match(zones: tuple[str, ...], recorded: list[_Zone], name: str) -> dict[str, _Zone]:
    """Map each zone to the recorded zone of that name; the other zones get the remaining recorded zones, in order."""
    by_name = {zone.zone: zone for zone in recorded}
    left = iter(zone for zone in recorded if zone.zone not in zones)
    out: dict[str, _Zone] = {}
    for zone in zones:
        found = by_name.get(zone) or next(left, None)
        if found is None:
            raise ValueError(f"market {name!r} has {len(recorded)} zones, but the cloud needs {len(zones)}")
        out[zone] = found
    return out
