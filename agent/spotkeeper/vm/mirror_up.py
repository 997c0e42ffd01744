"""One copy of a committed checkpoint on its way to the bucket: part by part, the list last and create-only.

The files are opened before the first byte is sent: what retention deletes meanwhile stays readable, and its room is
free again when the copy is through or given up. For one helper thread, never the trainer's: at the lowest priority,
not faster than allowed, and broken off at its next piece by ``stop``. Parts that are there by size and MD5 are not sent
again, so an agent that was killed simply begins anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from spotkeeper.spec.mirror import PART_BYTES, MirrorFile, MirrorList, list_name, part_names, part_size
from spotkeeper.train.control import Commit
from spotkeeper.train.store import COMMIT, Manifest, read
from spotkeeper.vm.events import MirrorThere
from spotkeeper.vm.storage import Bucket, StorageError

NICE = 15
_READ = 1 << 20


class RottenError(Exception):
    """The disk's own copy does not match its COMMIT: it is no use to anybody."""


@dataclass
class Pace:
    """At most so many bytes a second; ``stop`` ends a wait."""

    bytes_s: float
    stop: threading.Event
    _due: float = field(default_factory=time.monotonic)

    def take(self, size: int) -> None:
        """
        Raises:
            StorageError: ``stop`` was set.
        """
        now = time.monotonic()
        self._due = max(self._due, now) + size / self.bytes_s
        if self.stop.wait(max(0.0, self._due - now)):
            raise StorageError("broken off: something matters more now")


class Source:
    """A committed checkpoint, held open.

    Raises:
        ValueError: it is incomplete or damaged (by sizes).
        OSError: a file cannot be read.
    """

    def __init__(self, ckpt: Path, commit: Commit, rank: int, *, replicated: bool) -> None:
        self.manifest: Manifest = read(ckpt, commit)
        writers = sorted({place.slot for place in self.manifest.gang if place.writes})
        self.whole = (rank,) if replicated else tuple(writers)
        self.files = tuple(MirrorFile(file.name, file.bytes, file.sha256) for file in self.manifest.files)
        with contextlib.ExitStack() as stack:
            self.proof = (ckpt / str(commit) / COMMIT).read_text()
            self.open = tuple(stack.enter_context((ckpt / str(commit) / file.name).open("rb")) for file in self.files)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()


class _Reader:
    """One part on its way: paced, hashed, never longer than it said, and soon out of the page cache."""

    def __init__(self, file: IO[bytes], start: int, size: int, pace: Pace, whole: hashlib._Hash | None) -> None:
        self._file, self._at, self._left, self._size = file, start, size, size
        self._pace, self._whole = pace, whole
        self.md5 = hashlib.md5(usedforsecurity=False)

    def __len__(self) -> int:
        return self._size

    def read(self, size: int = -1, /) -> bytes:
        count = self._left if size < 0 else min(size, self._left)
        piece = _pread(self._file, count, self._at)
        self._pace.take(len(piece))
        self._at += len(piece)
        self._left -= len(piece)
        self.md5.update(piece)
        if self._whole is not None:
            self._whole.update(piece)
        return piece


class Upload:
    """Tried until all is there. ``stop`` is anybody's; ``count``: parts that are there, for the loop to see."""

    def __init__(
        self, bucket: Bucket, job: str, rank: int, source: Source, bytes_s: float, part_bytes: int = PART_BYTES
    ) -> None:
        self.stop = threading.Event()
        self.commit = source.manifest.commit
        self.count = 0
        self._bucket, self._job, self._rank, self._source = bucket, job, rank, source
        self._bytes_s, self._part_bytes = bytes_s, part_bytes
        self._done: dict[str, hashlib._Hash] = {}  # parts that are there, with the file's digest up to their end

    def work(self) -> MirrorThere:
        """Send what is not there yet, then the list.

        Raises:
            StorageError: the bucket took something not, or ``stop`` was set; try again.
            RottenError: what is on the disk is not what was committed.
            OSError: a file cannot be read.
        """
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread alone
        pace = Pace(self._bytes_s, self.stop)
        for file, stream in zip(self._source.files, self._source.open, strict=True):
            self._file(file, stream, pace)
        return MirrorThere(self.commit, self._publish())

    def close(self) -> None:
        """For good, also while the helper waits for the bucket: nothing holds the disk from here on."""
        self.stop.set()
        self._source.close()

    def _file(self, file: MirrorFile, stream: IO[bytes], pace: Pace) -> None:
        digest = hashlib.sha256()
        for number, name in enumerate(part_names(self._job, str(self.commit), self._rank, file, self._part_bytes)):
            if name not in self._done:
                start, size = number * self._part_bytes, part_size(file, number, self._part_bytes)
                self._done[name] = self._part(name, stream, start, size, digest.copy(), pace)
                self.count += 1
            digest = self._done[name]
        if digest.hexdigest() != file.sha256:
            raise RottenError(f"{file.name} of {self.commit} does not match its hash in COMMIT: nothing of it is kept")

    def _part(
        self, name: str, stream: IO[bytes], start: int, size: int, digest: hashlib._Hash, pace: Pace
    ) -> hashlib._Hash:
        """The file's digest after this part, which is in the bucket then."""
        there = self._bucket.find(name)
        if there is not None and there.size == size:
            known = digest.copy()
            md5 = hashlib.md5(usedforsecurity=False)
            for piece in _pieces(stream, start, size, self.stop):
                md5.update(piece)
                known.update(piece)
            # S3 says no MD5 of what it put together from parts. The name is this checkpoint's alone, and an object is
            # there as a whole; whoever fetches it compares hashes.
            if there.md5 in ("", md5.hexdigest()):
                return known
        reader = _Reader(stream, start, size, pace, digest)
        sent = self._bucket.send(name, reader)
        if (sent.size, sent.md5) != (size, reader.md5.hexdigest()):
            raise StorageError(f"{name}: {sent.size} bytes arrived, or others than were sent")
        _forget(stream, start, size)
        return digest

    def _publish(self) -> bool:
        """The list; whether with it the copy is complete: of sharded state others may still be on their way."""
        source = self._source
        content = MirrorList(
            self.commit.gen,
            self.commit.step,
            self._rank,
            source.whole,
            source.files,
            source.proof,
            source.manifest.saved_at,
            self._part_bytes,
        )
        self._bucket.create(list_name(self._job, str(self.commit), self._rank), msgspec.json.encode(content))
        # Whoever's list is the last one sees all the others: each writes its own before it looks.
        others = (rank for rank in source.whole if rank != self._rank)
        return all(self._bucket.find(list_name(self._job, str(self.commit), rank)) is not None for rank in others)


def _pieces(stream: IO[bytes], start: int, size: int, stop: threading.Event) -> Iterator[bytes]:
    for at in range(start, start + size, _READ):
        if stop.is_set():
            raise StorageError("broken off: something matters more now")
        yield _pread(stream, min(_READ, start + size - at), at)


def _pread(stream: IO[bytes], size: int, at: int) -> bytes:
    """
    Raises:
        StorageError: it was closed meanwhile. (Where its number is another file's by then, ``stop`` is set as well.)
    """
    try:
        return os.pread(stream.fileno(), size, at)
    except ValueError:
        raise StorageError("broken off: the disk is given up") from None


def _forget(stream: IO[bytes], start: int, size: int) -> None:
    """The page cache is the trainer's."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError, ValueError):
            os.posix_fadvise(stream.fileno(), start, size, os.POSIX_FADV_DONTNEED)
