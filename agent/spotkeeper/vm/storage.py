"""The bucket, as this machine: read sources, write logs, outputs and checkpoints. Nothing else.

One face for all clouds; ``gcs.py`` and ``s3.py`` speak their protocols.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from spotkeeper.vm.metadata import Metadata

CONNECT_S = 5.0
ANSWER_S = 60.0
CHUNK = 1 << 18


class StorageError(Exception):
    """No usable answer; try again."""


class MissingError(StorageError):
    """There is no such object."""


@dataclass(frozen=True)
class Stored:
    """An object that is there. ``md5``: in hex; "" where the store does not say (it was composed of parts)."""

    size: int
    md5: str


class Readable(Protocol):
    """What :meth:`Bucket.send` takes: a file, or something that looks at each piece of one."""

    def __len__(self) -> int: ...

    def read(self, size: int = -1, /) -> bytes: ...


class Remote(Protocol):
    """One bucket in one cloud's words. Safe to use from several threads. The calls are :class:`Bucket`'s."""

    def read(self, name: str) -> Iterator[bytes]: ...

    def find(self, name: str) -> Stored | None: ...

    def send(self, name: str, content: Readable) -> Stored: ...

    def write(self, name: str, content: bytes) -> None: ...

    def create(self, name: str, content: bytes) -> bool: ...


class Bucket:
    """A bucket of the cloud that ``metadata`` belongs to. For the helper threads."""

    def __init__(self, root: str, bucket: str, metadata: Metadata) -> None:
        self._remote: Remote = metadata.storage(root, bucket)

    def read(self, name: str) -> Iterator[bytes]:
        """An object's content, in pieces.

        Raises:
            MissingError: it is not there.
            StorageError: that cannot be told, or the answer broke off.
        """
        return self._remote.read(name)

    def find(self, name: str) -> Stored | None:
        """What is there under this name.

        Raises:
            StorageError: that cannot be told.
        """
        return self._remote.find(name)

    def send(self, name: str, content: Readable) -> Stored:
        """Make or replace an object, piece by piece, whatever its size; what the bucket then says of it.

        Raises:
            StorageError: it was not taken; an object that was there is as it was.
        """
        return self._remote.send(name, content)

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a small object of text.

        Raises:
            StorageError: it was not taken.
        """
        self._remote.write(name, content)

    def create(self, name: str, content: bytes) -> bool:
        """Make a small object of text; False where it is there already, whatever it holds.

        Raises:
            StorageError: neither can be told.
        """
        return self._remote.create(name, content)
