"""A recorded market: how many machines each zone had at each tick, and their price as a share of on-demand.

A series has one value per tick, or run lengths ``[value, ticks]``, as in the shipped files. ``null`` means that nothing
was observed: a capacity of ``null`` counts as 0, a price of ``null`` as the last price before it. A price of 0 counts
as ``null``, since machines are never free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path

import msgspec

from spotkeeper.contract import codec
from spotkeeper.contract.stack import region_of

MOST = 1000.0  # times the on-demand price: a higher value must be in another unit
LEAST_TICK_S, LONGEST_TICK_S = 1.0, 86_400.0
SHIPPED = Path(__file__).parent.parent / "local" / "markets"


class RecordingError(Exception):
    """A file is not a valid recording; the message names the file and the reason."""


Series = list[float | tuple[float | None, int] | None]


class _ZoneSeries(msgspec.Struct, frozen=True):
    zone: str
    capacity: Series
    price: Series | None = None
    spot_price: Series | None = None


class _RecordingFile(msgspec.Struct, frozen=True):
    collection: str
    market: str
    gap_seconds: float
    gang: int
    zones: list[_ZoneSeries]


@dataclass(frozen=True)
class RecordedZone:
    """One zone of a recording: ``capacity`` (machines) and ``price`` (share of on-demand) by tick."""

    name: str
    region: str
    capacity: tuple[int, ...]
    price: tuple[float, ...]


@dataclass(frozen=True)
class Recording:
    """What the zones of one machine type offered, sampled at the same times, ``tick_h`` hours apart.

    ``collection`` and ``market`` name the recording. ``gang``: a zone counts as available if it has capacity for this
    many machines.
    """

    collection: str
    market: str
    tick_h: float
    gang: int
    zones: tuple[RecordedZone, ...]

    @property
    def name(self) -> str:
        return f"{self.collection}.{self.market}"

    @property
    def ticks(self) -> int:
        return len(self.zones[0].capacity)

    def only(self, zones: tuple[int, ...]) -> Recording:
        """Return a recording with only these zones, given by index."""
        return replace(self, zones=tuple(self.zones[index] for index in zones))

    @cached_property
    def up(self) -> tuple[bytes, ...]:
        """For each zone, one byte per tick: 1 if the zone has capacity for a whole gang, else 0."""
        return tuple(bytes(count >= self.gang for count in zone.capacity) for zone in self.zones)


def read(path: Path, *, ratio: float = 0.3) -> Recording:
    """Read a recording.

    Args:
        ratio: spot price as a share of on-demand, for a file without prices.

    Raises:
        RecordingError: the file is not a recording, or its zones have different lengths.
    """
    try:
        file = codec.decode(path.read_bytes(), _RecordingFile)
    except (OSError, msgspec.DecodeError) as error:
        raise RecordingError(f"{path}: {error}") from None
    if not LEAST_TICK_S <= file.gap_seconds <= LONGEST_TICK_S:
        raise RecordingError(
            f"{path}: gap_seconds must be {LEAST_TICK_S:g} to {LONGEST_TICK_S:g}, not {file.gap_seconds:g}"
        )
    zones = tuple(_zone(zone, ratio) for zone in file.zones)
    if any(price > MOST for zone in zones for price in zone.price):
        raise RecordingError(f"{path}: prices must be shares of the on-demand price, {MOST:g} at most")
    lengths = {len(series) for zone in zones for series in (zone.capacity, zone.price)}
    if len(lengths) != 1 or lengths == {0} or file.gang < 1:
        raise RecordingError(f"{path}: all zones must have a capacity and a price for the same ticks")
    return Recording(file.collection, file.market, file.gap_seconds / 3600.0, file.gang, zones)


def read_folder(folder: Path) -> tuple[Recording, ...]:
    """Read every ``*.json`` of a folder, in order of names. Raises RecordingError if none exists or one is invalid."""
    found = tuple(read(path) for path in sorted(folder.glob("*.json")))
    if not found:
        raise RecordingError(f"{folder}: no recording (*.json) found")
    return found


def _zone(zone: _ZoneSeries, ratio: float) -> RecordedZone:
    capacity = tuple(int(value or 0) for value in _flat(zone.capacity))
    told = zone.price if zone.price is not None else zone.spot_price
    price = (ratio,) * len(capacity) if told is None else tuple(_without_gaps(_flat(told), ratio))
    return RecordedZone(zone.zone, region_of(zone.zone), capacity, price)


def _flat(told: Series) -> Iterator[float | None]:
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
