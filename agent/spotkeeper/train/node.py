"""The staging memory of a node, shared by its ranks.

The saver's memory file comes to the node's first rank. Of sharded state each rank has bytes
of its own, and copies them there by itself: through the first one's open file, which a
process of the same user may open by its number.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True)
class Offer:
    """Memory as its owner names it to the others of its node."""

    pid: int
    fd: int
    size: int  # bytes

    def to_bytes(self) -> bytes:
        return f"{self.pid} {self.fd} {self.size}".encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        return cls(*map(int, data.split()))


class Neighbour:
    """The memory of another rank of this node, mapped once for as long as it is the same."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._key: tuple[int, int, int] | None = None

    def open(self, offer: Offer) -> memoryview:
        """Its memory.

        Raises:
            OSError: it is gone, or belongs to another user.
        """
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            key = (status.st_dev, status.st_ino, offer.size)
            if key != self._key or self._map is None:
                self._map, self._key = mmap.mmap(fd, offer.size, flags=mmap.MAP_SHARED | _POPULATE), key
        finally:
            os.close(fd)
        return memoryview(self._map)
