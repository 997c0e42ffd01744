"""Replays capacity and price of spot machines from a recorded market. Pure: callers pass the time.

A recording says for how many spot VMs, at most 16, a zone has capacity. A laptop cannot run so many, so the replay
scales capacities down. A zone of the cloud replays the recorded zone of the same name; if no recorded zone has this
name, then one that no other zone replays. The seed chooses where in the recording the replay begins. All zones of a
region have the spot price of the region's first zone. Samples of the recording are ``gap_s`` virtual seconds apart.
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
CALM_SHARE = 1 / 2  # least capacity of every zone in a calm hour, as a share of `Market.gang`


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
    """A zone's recorded capacity or price.

    ``values[i]`` applies from sample ``ends[i - 1]`` (0 for the first value) up to, not including, sample ``ends[i]``.
    """

    values: tuple[float, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, runs: list[tuple[int, int]] | list[tuple[float, int]]) -> Series:
        return cls(tuple(float(value) for value, _ in runs), tuple(accumulate(samples for _, samples in runs)))

    def at(self, sample: int) -> float:
        """The value at a sample; the recording repeats endlessly."""
        return self.values[bisect_right(self.ends, sample % self.ends[-1])]

    def next_change(self, sample: int) -> int:
        """The first sample after ``sample`` that may have another value."""
        turns, inside = divmod(sample, self.ends[-1])
        return turns * self.ends[-1] + self.ends[bisect_right(self.ends, inside)]


@dataclass(frozen=True)
class Market:
    """A replay of a recorded market.

    ``epoch``: the virtual time of the replay's first sample; ``offset``: the index of that sample in the recording.
    ``gang``: the largest capacity of a zone that the recording can show; ``per_zone``: the capacity that stands for it
    in the replay. Prices are shares of the on-demand price.
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
            zones: the zones of the cloud.
            per_zone: a zone's capacity, in spot VMs, at times when the recorded zone has capacity for 16 VMs, the
                most that the recording shows; at other times the capacity is reduced in proportion.
            calm_s: virtual seconds after the replay's start in which each recorded zone has capacity for half of these
                VMs; 0: no such beginning is sought.

        Raises:
            ValueError: unknown recording, more zones than the recording has, or no calm time of this length.
        """
        path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
        if not path.is_file():
            known = ", ".join(sorted(found.stem for found in FOLDER.glob("*.json")))
            raise ValueError(f"no such recorded market: {name!r} (known: {known})")
        data = codec.decode(path.read_bytes(), _File)
        chosen = _match(zones, data.zones, name)
        samples = sum(count for _, count in data.zones[0].capacity)
        capacities = {zone: Series.of(chosen[zone].capacity) for zone in zones}
        starts: Sequence[int] = range(int(samples * START_SHARE))
        if calm_s:
            ahead = int(calm_s // data.gap_seconds) + 1
            starts = _calm(capacities, len(starts), ahead, data.gang * CALM_SHARE)
            if not starts:
                raise ValueError(
                    f"market {name!r}: its zones {', '.join(zones)} never all have capacity for half of "
                    f"{data.gang} VMs for {calm_s:.0f} s: reduce calm_s, or choose another market"
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

    def sample(self, now: float) -> int:
        return self.offset + max(0, int((now - self.epoch) // self.gap_s))

    def capacity(self, zone: str, now: float) -> int:
        """The zone's capacity for spot VMs now."""
        return int(self.capacities[zone].at(self.sample(now)) * self.per_zone // self.gang)

    def price(self, zone: str, now: float) -> float:
        """The spot price now, as a share of the on-demand price."""
        return self.prices[zone].at(self.sample(now))

    def next_change(self, now: float) -> float:
        """The virtual time at which a zone's capacity may change next."""
        sample = self.sample(now)
        first = min(series.next_change(sample) for series in self.capacities.values())
        return self.epoch + (first - self.offset) * self.gap_s

    def mean_price(self, zone: str, start: float, end: float) -> float:
        """Time-weighted mean of the price over ``[start, end]``, as a share of the on-demand price."""
        if end <= start:
            return self.price(zone, start)
        return sum((b - a) * share for a, b, share in self.price_runs(zone, start, end)) / (end - start)

    def price_runs(self, zone: str, start: float, end: float) -> Iterator[tuple[float, float, float]]:
        """Yield ``(start, end, share)`` of each price within ``[start, end]``. ``start`` may be before the replay."""
        sample = self._recorded(start)
        while self._time(sample) < end:
            until = self.prices[zone].next_change(sample)
            yield max(start, self._time(sample)), min(end, self._time(until)), self.prices[zone].at(sample)
            sample = until

    def preempted(self, zone: str, start: float, end: float) -> float | None:
        """Return the preempted share of a zone's spot machines within ``[start, end]``; None if it is not recorded.

        Every fall of capacity by n counts as n preempted machines, and the capacity at ``end`` counts as the survivors.
        """
        first, last = self._recorded(start), self._recorded(end)
        if last <= first:
            return None
        seen = [self.capacities[zone].at(sample) for sample in range(first, last + 1)]
        taken = sum(max(0.0, before - after) for before, after in pairwise(seen))
        return taken / (taken + seen[-1]) if taken + seen[-1] else None

    def carried(self, zone: str, start: float, end: float, size: int) -> list[bool]:
        """For each sample within ``[start, end]``, return whether the zone had capacity for ``size`` machines."""
        samples = range(self._recorded(start), self._recorded(end))
        fits = size * self.gang  # scaled as in `capacity`
        return [self.capacities[zone].at(sample) * self.per_zone >= fits for sample in samples]

    def _time(self, sample: int) -> float:
        return self.epoch + (sample - self.offset) * self.gap_s

    def _recorded(self, now: float) -> int:
        """Return the recorded sample at ``now``; at a time before the recording, the first sample."""
        return max(0, self.offset + int((now - self.epoch) // self.gap_s))


def _calm(capacities: dict[str, Series], starts: int, ahead: int, least: float) -> list[int]:
    """Return each sample below ``starts`` from which on, for ``ahead`` samples, every zone has capacity ``least``."""
    bad = [any(series.at(sample) < least for series in capacities.values()) for sample in range(starts + ahead)]
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
