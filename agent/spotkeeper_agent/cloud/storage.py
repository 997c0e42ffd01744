"""The stack's bucket as this machine uses it: reads sources, writes logs, outputs and checkpoints.

``gcs.py`` and ``s3.py`` implement :class:`Bucket`; ``Metadata.storage`` opens the right one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Protocol

CONNECT_S = 5.0
ANSWER_S = 60.0
CHUNK = 1 << 18


class StorageError(Exception):
    """The bucket gave no usable answer; try again."""


class MissingError(StorageError):
    """The object does not exist."""


@dataclass(frozen=True)
class Stored:
    """An object in the bucket. ``md5``: in hex; "" if unknown, as for an object that was sent to S3 in parts."""

    size: int
    md5: str


class Readable(Protocol):
    """The content that :meth:`Bucket.send` takes: a stream of known length."""

    def __len__(self) -> int: ...

    def read(self, size: int = -1, /) -> bytes: ...


class FilePart:
    """A part of an open file (``size`` bytes from ``start``), hashed while it is read.

    ``check`` is called with the size of each piece that was read. It can wait to slow the transfer down, and raises
    StorageError to end it. ``also`` is another digest that is updated with the same bytes.
    """

    def __init__(
        self, file: IO[bytes], start: int, size: int, check: Callable[[int], None], also: hashlib._Hash | None = None
    ) -> None:
        self._file, self._at, self._left, self._size = file, start, size, size
        self._check, self._also = check, also
        self.md5 = hashlib.md5(usedforsecurity=False)

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1, /) -> bytes:
        count = self._left if size < 0 else min(size, self._left)
        try:
            piece = os.pread(self._file.fileno(), count, self._at)
        except ValueError:  # another thread closed it, and has set the flag that ``check`` tests
            raise StorageError("interrupted: the file was closed during the transfer") from None
        self._check(len(piece))
        self._at += len(piece)
        self._left -= len(piece)
        self.md5.update(piece)
        if self._also is not None:
            self._also.update(piece)
        return piece

    def read_through(self) -> str:
        """Read all bytes without sending them; return their MD5 in hex."""
        while self.read(1 << 20):
            pass
        return self.md5.hexdigest()


class HashedPart(FilePart):
    """A file's first ``size`` bytes with their SHA-256, for a store that wants the hash before the bytes.

    The file is read twice, once for the hash and once while it is sent, so it is never in memory as a whole.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__(file, 0, size, lambda _: None)
        whole = hashlib.sha256()
        FilePart(file, 0, size, lambda _: None, whole).read_through()
        self.sha256 = whole.hexdigest()


class Bucket(Protocol):
    """One bucket. Safe to use from several threads; calls block."""

    def read(self, name: str) -> Iterator[bytes]:
        """Yield an object's content in pieces.

        Raises:
            MissingError: the object does not exist.
            StorageError: the store does not answer, or the answer is cut short.
        """

    def find(self, name: str) -> Stored | None:
        """Return the object of this name, or None if it does not exist.

        Raises:
            StorageError: the store does not answer.
        """

    def send(self, name: str, content: Readable) -> Stored:
        """Make or replace an object of any size, piece by piece; return it as the store describes it.

        Raises:
            StorageError: the store did not accept the object; an older object of this name is unchanged.
        """

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a small text object.

        Raises:
            StorageError: the store did not accept the object.
        """

    def create(self, name: str, content: bytes) -> bool:
        """Make a small text object; return False if an object of this name exists, whatever its content.

        Raises:
            StorageError: the store does not answer.
        """

    def delete(self, name: str) -> None:
        """Delete an object. A missing object is not an error.

        Raises:
            StorageError: the store does not answer, or refuses.
        """
