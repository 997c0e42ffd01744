"""Exchanges the ranks' small parts (random generators, places in the data, buffers) while training continues.

An image of replicated state contains each rank's small part. The exchange is one collective of the library's own
process group, begun at the boundary and waited for where the image's copy is. So it needs a size that all ranks know
before: that of the largest part in the last exchange, and some more. If a part has outgrown it, all ranks learn this
from the exchange, and the image does not count; the next exchange has room. The first exchange, and those for saves
that training waits for, gather parts of any size at once.
"""

from __future__ import annotations

from collections.abc import Callable

from spotkeeper.train.core.gang import Gang

_HEADER = 8  # bytes: a part's size
_SPARE = 1 << 12  # bytes, and an eighth: most parts keep their size, but lists and texts in them may grow


class PendingParts:
    """Small parts on their way, or there. ``bound``: the most bytes that all ranks' parts have, in the next one too."""

    def __init__(self, answer: Callable[[], list[bytes]], width: int, world: int) -> None:
        self._answer, self._width = answer, width
        self._rows: list[bytes] | None = None
        self.world, self.bound = world, width * world

    def parts(self) -> tuple[bytes, ...] | None:
        """Wait for all ranks' parts; return None if one has outgrown its room.

        Raises:
            RuntimeError: a rank is gone.
        """
        sizes = self.sizes()
        if max(sizes) > self._width:
            return None
        return tuple(row[_HEADER : _HEADER + size] for row, size in zip(self._rows or (), sizes, strict=True))

    def sizes(self) -> list[int]:
        """Wait for all ranks' parts; return their sizes in bytes. Raises as ``parts``."""
        if self._rows is None:
            self._rows = self._answer()
        return [int.from_bytes(row[:_HEADER], "little") for row in self._rows]


class SmallParts:
    """One rank's exchanges. All ranks call ``exchange`` in the same order, with the same ``now``."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._width = 0  # bytes of a part for which there is room; 0: not known yet
        self._last: PendingParts | None = None

    def like(self, part: bytes) -> PendingParts:
        """Return what the first exchange returns if all ranks' parts are like this one. Not collective."""
        return PendingParts(lambda: [_row(part)] * self._gang.world, _room(len(part)), self._gang.world)

    def exchange(self, part: bytes, *, now: bool) -> PendingParts:
        """Exchange this rank's part. ``now``: wait for all parts. Collective."""
        if self._last is not None:
            self._note(self._last.sizes())
            self._last = None
        if now or not self._width or self._gang.world == 1:
            parts = self._gang.gather(part)
            self._note([len(each) for each in parts])
            return PendingParts(lambda: [_row(each) for each in parts], self._width, self._gang.world)
        width = self._width
        answer = self._gang.collect(_row(part[:width].ljust(width, b"\0"), len(part)))
        self._last = PendingParts(answer, width, self._gang.world)
        return self._last

    def _note(self, sizes: list[int]) -> None:
        """Fit the room to the last exchange's parts, which are the same on all ranks."""
        most = max(sizes)
        if not most <= self._width <= 2 * most + _SPARE:
            self._width = _room(most)


def _row(part: bytes, size: int | None = None) -> bytes:
    return (len(part) if size is None else size).to_bytes(_HEADER, "little") + part


def _room(most: int) -> int:
    """Return the room for parts of at most ``most`` bytes. Ranks whose parts hardly differ find the same."""
    return -(-(most + most // 8 + _SPARE) // _SPARE) * _SPARE
