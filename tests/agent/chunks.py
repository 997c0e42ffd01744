"""A bucket in memory, and the complete logs in it as tests read them."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping

from spotkeeper_agent.cloud.storage import MissingError, Readable, StorageError, Stored


class MemoryBucket:
    """``away``: it refuses every request. ``most``: the largest piece that was read of what was sent."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.away = False
        self.most = 0

    def _check(self) -> None:
        if self.away:
            raise StorageError("away")

    def read(self, name: str) -> Iterator[bytes]:
        self._check()
        if name not in self.objects:
            raise MissingError(name)
        yield self.objects[name]

    def find(self, name: str) -> Stored | None:
        self._check()
        data = self.objects.get(name)
        return None if data is None else Stored(len(data), hashlib.md5(data, usedforsecurity=False).hexdigest())

    def send(self, name: str, content: Readable) -> Stored:
        self._check()
        pieces = []
        while piece := content.read(16384):  # as http.client does
            self.most = max(self.most, len(piece))
            pieces.append(piece)
        self.objects[name] = b"".join(pieces)
        assert len(self.objects[name]) == len(content)
        return Stored(len(content), "")

    def write(self, name: str, content: bytes) -> None:
        self._check()
        self.objects[name] = content

    def create(self, name: str, content: bytes) -> bool:
        self._check()
        if name in self.objects:
            return False
        self.objects[name] = content
        return True

    def delete(self, name: str) -> None:
        self._check()
        self.objects.pop(name, None)


def unpacked(data: bytes) -> bytes:
    """The text of some gzip members."""
    out = b""
    while data:
        gzip = zlib.decompressobj(31)
        out += gzip.decompress(data)
        data = gzip.unused_data
    return out


def complete_log(objects: Mapping[str, bytes], job: str, node: int, gen: int) -> str:
    """A node's complete log of a generation, without the times."""
    folder = f"jobs/{job}/logs/{node}/{gen}/"
    text = b"".join(unpacked(objects[name]) for name in sorted(objects) if name.startswith(folder))
    return re.sub(r"(?m)^\d{13} ", "", text.decode(errors="replace"))
