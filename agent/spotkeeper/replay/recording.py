"""A recorded market: by tick, how many machines each zone carried, and at what share of the on-demand price.

Two spellings are read: values by tick, and the shipped ``[value, ticks]`` runs. ``null`` is a gap: nobody looked.
What nobody saw was not to be had, and has the price of before; so has what was free, for nobody gives machines away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path

import msgspec

from spotkeeper.spec import codec

MOST = 1000.0  # times on-demand: a price above it is of another unit
LEAST_TICK_S, LONGEST_TICK_S = 1.0, 86_400.0
SHIPPED = Path(__file__).parent.parent / "local" / "markets"


class RecordingError(Exception):
    """A file that is no recording; says which, and why."""


Told = list[float | tuple[float | None, int] | None]


class _Zone(msgspec.Struct, frozen=True):
    zone: str
    capacity: Told
    price: Told | None = None
    spot_price: Told | None = None


class _File(msgspec.Struct, frozen=True):
    collection: str
    market: str
    gap_seconds: float
    gang: int
    zones: list[_Zone]


@dataclass(frozen=True)
class Zone:
    """``capacity`` (machines) and ``price`` (share of on-demand) by tick."""

    name: str
    region: str
    capacity: tuple[int, ...]
    price: tuple[float, ...]


@dataclass(frozen=True)
class Recording:
    """Zones of one machine type over the same ticks; ``gang`` is how many machines were watched at once."""

    collection: str
    market: str
    tick_h: float
    gang: int
    zones: tuple[Zone, ...]

    @property
    def name(self) -> str:
        return f"{self.collection}.{self.market}"

    @property
    def ticks(self) -> int:
        return len(self.zones[0].capacity)

    def only(self, zones: tuple[int, ...]) -> Recording:
        """The same market for whoever may use these zones only."""
        return replace(self, zones=tuple(self.zones[index] for index in zones))

    @cached_property
    def up(self) -> tuple[bytes, ...]:
        """By zone and tick, 1 where a whole gang runs."""
        return tuple(bytes(count >= self.gang for count in zone.capacity) for zone in self.zones)


def read(path: Path, *, ratio: float = 0.3) -> Recording:
    """
    Args:
        ratio: the spot price as a share of on-demand, where the file has no prices.

    Raises:
        RecordingError: no recording, or zones of different lengths.
    """
    try:
        file = codec.decode(path.read_bytes(), _File)
    except (OSError, msgspec.DecodeError) as error:
        raise RecordingError(f"{path}: {error}") from None
    if not LEAST_TICK_S <= file.gap_seconds <= LONGEST_TICK_S:
        raise RecordingError(
            f"{path}: gap_seconds: want {LEAST_TICK_S:g} to {LONGEST_TICK_S:g}, not {file.gap_seconds:g}"
        )
    zones = tuple(_zone(zone, ratio) for zone in file.zones)
    if any(price > MOST for zone in zones for price in zone.price):
        raise RecordingError(f"{path}: prices are shares of on-demand's, {MOST:g} at most")
    lengths = {len(series) for zone in zones for series in (zone.capacity, zone.price)}
    if len(lengths) != 1 or lengths == {0} or file.gang < 1:
        raise RecordingError(f"{path}: every zone needs capacity and price for each of the same ticks")
    return Recording(file.collection, file.market, file.gap_seconds / 3600.0, file.gang, zones)


def read_folder(folder: Path) -> tuple[Recording, ...]:
    """Every ``*.json`` of a folder, by name.

    Raises:
        RecordingError: there is none, or one is no recording.
    """
    found = tuple(read(path) for path in sorted(folder.glob("*.json")))
    if not found:
        raise RecordingError(f"{folder}: no recording (*.json) there")
    return found


def region_of(zone: str) -> str:
    """``us-east-1a`` and ``us-east1-b`` as their regions; a name without such an end is its own region."""
    return zone[:-2] if zone[-2:-1] == "-" else zone[:-1] if zone[-2:-1].isdigit() else zone


def _zone(zone: _Zone, ratio: float) -> Zone:
    capacity = tuple(int(value or 0) for value in _flat(zone.capacity))
    told = zone.price if zone.price is not None else zone.spot_price
    price = (ratio,) * len(capacity) if told is None else tuple(_without_gaps(_flat(told), ratio))
    return Zone(zone.zone, region_of(zone.zone), capacity, price)


def _flat(told: Told) -> Iterator[float | None]:
    for run in told:
        if isinstance(run, tuple):
            yield from repeat(run[0], run[1])
        else:
            yield run


def _without_gaps(prices: Iterator[float | None], first: float) -> Iterator[float]:
    last = first
    for price in prices:
        last = price if price is not None and price > 0 else last
        yield last
