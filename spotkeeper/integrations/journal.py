"""An append-only log in the bucket, which many programs write at once without a lock.

Each append creates one object, ``studies/<name>/batches/<number>``; its number is its position, and there are no gaps.
An object is never replaced or deleted: a writer that was asleep for a week could otherwise take an old position again.
If the position is taken, the writer reads on and takes the next one. After a lost answer it compares the object with
its own bytes, which have a nonce.

``studies/<name>/segments/<number>`` has ``SEGMENT`` batches in one object, byte by byte, so that a first read is fast.
A segment is a copy: readers take it or the batches, and a lost one is written again.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError, NewerError
from spotkeeper.reconcile.store.objects import StoreError, UnavailableError
from spotkeeper.reconcile.store.store import Store

FORMAT = 1
SEGMENT = 100  # batches in a segment
FAR = 8  # new batches that are read one by one; if more follow, the folder is listed
TRIES = 5  # of a write that gets no answer
PAUSE_S = 1.0  # real, before the second try; each further pause is twice as long
EMPTY = '{"v":1,"nonce":"","logs":[]}'

_log = logging.getLogger(__name__)


class Journal:
    """The log ``name`` in a bucket. Thread-safe.

    Args:
        name: 1 to 64 characters of a-z, 0-9 and -.
        pause: waits between two tries of a write, real seconds.
    """

    def __init__(self, store: Store, name: str, pause: Callable[[float], None] = time.sleep) -> None:
        self._store, self.name, self._pause = store, name, pause
        paths.study(name)  # raises BadKeyError
        self._lock = threading.Lock()
        self._batches: list[bytes] = []  # as stored: decoded they take several times as much
        self._ends: list[int] = []  # how many logs there are up to and with each batch
        self._segments = 0  # segments that are known to exist
        self._loaded = False
        self._appended = False  # the last call was an append: nothing is newer

    def read(self, first: int) -> list[dict[str, Any]]:
        """Return the logs from number ``first`` on.

        An append has read all that is before it, so the first read after an append asks for nothing.

        Raises:
            CorruptError: an object is damaged or is none of a journal.
            StoreError: the bucket failed.
        """
        with self._lock:
            if not self._appended:
                self._read_on()
            self._appended = False
            at = bisect_right(self._ends, first)
            before = self._ends[at - 1] if at else 0
            logs = [log for data in self._batches[at:] for log in json.loads(data)["logs"]]
        return logs[max(0, first - before) :]

    def append(self, logs: Sequence[dict[str, Any]]) -> None:
        """Append logs as one batch.

        Raises:
            TypeError: a log is not JSON; nothing was written.
            CorruptError, StoreError: as :meth:`read`. After ``UnavailableError`` the batch was perhaps written.
        """
        document = {"v": FORMAT, "nonce": secrets.token_hex(8), "logs": list(logs)}
        data = json.dumps(document, separators=(",", ":")).encode()
        with self._lock:
            if not self._loaded:
                self._load()
            while not self._created(len(self._batches), data):
                self._next()
            self._take(data, len(logs))
            self._appended = True
            self._compact()

    # -- write

    def _created(self, number: int, data: bytes) -> bool:
        """Create a batch; return False if the position is taken. Without an answer, the same write is repeated."""
        pause = PAUSE_S
        for left in reversed(range(TRIES)):
            try:
                return self._store.create(paths.batch(self.name, number), data)
            except UnavailableError:
                if not left:
                    raise
            self._pause(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause *= 2
        raise AssertionError("not reached")

    def _compact(self) -> None:
        """Write the segments of complete groups of batches. All writers write the same bytes."""
        while (self._segments + 1) * SEGMENT <= len(self._batches):
            first = self._segments * SEGMENT
            lines = b"".join(data + b"\n" for data in self._batches[first : first + SEGMENT])
            try:
                self._store.create(paths.segment(self.name, self._segments), lines)
            except StoreError as error:  # the next append tries again
                _log.info("%s: segment %d is not written: %s", self.name, self._segments, error)
                return
            self._segments += 1

    # -- read

    def _read_on(self) -> None:
        """Read what was appended since the last call."""
        if not self._loaded:
            self._load()
            return
        for _ in range(FAR):
            if not self._next():
                return
        self._load()

    def _next(self) -> bool:
        """Read the next batch; return False if there is none yet."""
        path = paths.batch(self.name, len(self._batches))
        data = self._store.get(path)
        if data is None:
            return False
        self._take(data, _checked(data, path))
        return True

    def _load(self) -> None:
        """List the journal, and read all new batches: complete groups from their segments, where there are any."""
        batches, segments = self._listed()
        count = self._count(batches)
        self._segments = max(self._segments, _run(segments))
        while len(self._batches) < count:
            at = len(self._batches)
            group = at // SEGMENT
            if at % SEGMENT == 0 and group in segments:
                self._take_segment(group)
                continue
            numbers = range(at, min(count, (group + 1) * SEGMENT))
            names = tuple(paths.batch(self.name, number) for number in numbers)
            for path, data in zip(names, self._store.get_all(names), strict=True):
                if data is None:
                    raise CorruptError(f"{path}: was deleted while it was read; {_restore()}", path)
                self._take(data, _checked(data, path))
        self._loaded = True

    def _listed(self) -> tuple[set[int], set[int]]:
        """Return the numbers of all batches and segments."""
        batches, segments = set(), set()
        for path in self._store.list(paths.study(self.name)):
            number = int(path[-8:]) if path[-8:].isdecimal() else 0
            if path == paths.batch(self.name, number):
                batches.add(number)
            elif path == paths.segment(self.name, number):
                segments.add(number)
            else:
                raise CorruptError(f"{path}: belongs to no journal; move or delete the object", path)
        return batches, segments

    def _count(self, batches: set[int]) -> int:
        """Return the number of batches. Raises CorruptError if one is missing between others."""
        count = max(batches, default=-1) + 1
        missing = islice((number for number in range(count) if number not in batches), 2 * FAR)
        # a listing takes a while: a batch that was created meanwhile can be left out, and a later one be in it
        names = [paths.batch(self.name, number) for number in missing]
        for path, data in zip(names, self._store.get_all(tuple(names)), strict=True):
            if data is None:
                raise CorruptError(f"{path}: is missing, but later batches exist; {_restore()}", path)
        return count

    def _take_segment(self, group: int) -> None:
        path = paths.segment(self.name, group)
        data = self._store.get(path)
        lines = data.split(b"\n")[:-1] if data is not None else []
        try:
            counts = [_checked(line, path) for line in lines]
        except NewerError:
            raise
        except CorruptError:
            counts = []
        if len(counts) != SEGMENT:
            why = "is no segment of a journal; delete the object, which is only a copy: the next writer makes it anew"
            raise CorruptError(f"{path}: {why}", path)
        for line, count in zip(lines, counts, strict=True):
            self._take(line, count)

    def _take(self, data: bytes, count: int) -> None:
        if b"\n" in data:  # written by hand; a segment has a batch in each line
            data = json.dumps(json.loads(data), separators=(",", ":")).encode()
        self._batches.append(data)
        self._ends.append((self._ends[-1] if self._ends else 0) + count)


def _run(numbers: set[int]) -> int:
    """Return how many of 0, 1, 2, ... are there without a gap."""
    count = 0
    while count in numbers:
        count += 1
    return count


def _checked(data: bytes, path: str) -> int:
    """Return the number of logs in a batch.

    Raises:
        CorruptError: the bytes are no batch; NewerError: a newer Spotkeeper wrote it.
    """
    try:
        found = json.loads(data)
        form, logs = found["v"], found["logs"]
    except (ValueError, LookupError, TypeError, RecursionError):
        form, logs = None, None
    if isinstance(form, int) and form > FORMAT:
        raise NewerError(f"{path}: format {form}: a newer Spotkeeper wrote it; use that version here", path)
    if form != FORMAT or not isinstance(logs, list) or not all(isinstance(log, dict) for log in logs):
        raise CorruptError(f"{path}: is no batch of a journal; {_restore()}", path)
    return len(logs)


def _restore() -> str:
    return f"restore the object; if it is lost, write {EMPTY} there, and the study goes on without its entries"
