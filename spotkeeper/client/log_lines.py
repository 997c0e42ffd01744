"""Reads complete logs from the bucket: line by line, in order of time, across nodes and generations.

Memory is bounded whatever the length of a log: a chunk is read in pieces and unpacked as it comes. A job can write
anything into its log and, with root on its machine, anything into its folder in the bucket. So the sizes of lines,
packed files and lists are limited, and a note replaces each damaged part. ``contract/uploads.py`` has the format.
"""

from __future__ import annotations

import heapq
import math
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import count

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper.contract.uploads import CHUNK, LogIndex, chunk_name, log_folder, log_index
from spotkeeper.reconcile.store.store import Store

PIECE = 256 << 10  # read from the bucket, and unpacked, at once
LINE_BYTES = 128 << 10  # output workers cut lines at less
MEMBER_BYTES = 16 << 20  # of one packed file, unpacked: more than an output worker packs
LATE_MS = 3000  # the longest time until a line of a node's workers is in the node's chunk
WAITING_BYTES = 64 << 20  # of lines that wait for earlier ones of their node, shared by the nodes
LINE_COST = 256  # bytes of a waiting line beside its text
INDEX_BYTES = 1 << 20
LATEST = 253_402_300_799.0  # the end of the year 9999, unix seconds
_GZIP = b"\x1f\x8b\x08\0\0\0\0\0"  # as zlib begins a file
_DAMAGED = b"%013d n a part of the log is damaged and left out" % 0
_LINE = re.compile(rb"(\d{13}) (n|t|s|(\d{1,4})([oe])) (.*)", re.DOTALL)
_KINDS = {b"n": "spotkeeper", b"t": "torchrun", b"s": "stacks", b"o": "stdout", b"e": "stderr"}


class LogLine(Struct, frozen=True):
    """A line of a log. ``at``: real unix ms.

    ``source``: stdout or stderr (of a worker), torchrun, stacks (stack traces of a hung job), or spotkeeper (a note).
    """

    at: int
    node: int
    gen: int
    source: str
    local_rank: int
    text: str


def shown(line: LogLine, clock: Clock) -> str:
    """Return a line as text: time by the stack's clock (UTC), node, local rank unless 0, source, and what was printed.

    The sources stdout and stderr are left out.
    """
    virtual = clock.now() - (time.time() - line.at / 1000) * clock.scale
    at = datetime.fromtimestamp(min(max(0.0, virtual), LATEST), timezone.utc)  # a job can write any time
    rank = f".{line.local_rank}" if line.local_rank else ""
    source = "" if line.source in ("stdout", "stderr") else f" {line.source}"
    return f"{at:%Y-%m-%dT%H:%M:%SZ} node {line.node}{rank}{source}: {line.text}"


class _Unpacker:
    """Unpacks gzip members as their bytes come. After a damaged member it continues with the next one."""

    def __init__(self) -> None:
        self._gzip: zlib._Decompress | None = None
        self._skipping = False  # within a damaged member
        self._size = 0  # of the member, unpacked
        self._packed = self._line = b""

    def lines(self, data: bytes) -> Iterator[bytes]:
        data = self._packed + data
        self._packed = b""
        while data:
            if self._gzip is None:
                at = data.find(_GZIP)
                if at != 0 and not _GZIP.startswith(data) and not self._skipping:
                    yield _DAMAGED
                    self._skipping, self._line = True, b""
                if at < 0:
                    self._packed = data[1 - len(_GZIP) :]
                    return
                data = data[at:]
                self._gzip, self._size, self._skipping = zlib.decompressobj(31), 0, False
            try:
                text = self._gzip.decompress(data, PIECE)
            except zlib.error:
                text, self._size = b"", MEMBER_BYTES + 1
            self._size += len(text)
            if self._size > MEMBER_BYTES:
                yield _DAMAGED
                self._gzip, self._skipping, self._line = None, True, b""
                data = data[1:]
                continue
            data = self._gzip.unconsumed_tail
            if self._gzip.eof:
                data, self._gzip = self._gzip.unused_data, None
            yield from self._split(text)

    def _split(self, text: bytes) -> Iterator[bytes]:
        *lines, self._line = (self._line + text).split(b"\n")
        yield from lines
        if len(self._line) > LINE_BYTES:
            yield self._line
            self._line = b""


@dataclass
class NodeLines:
    """One node's log. Each call of :meth:`read` yields the lines that are new since the previous call.

    ``gen``: only lines of this generation; None: of all. ``since``: only lines from this time on, real unix ms.
    ``ends``: the moment (``time.monotonic()``) at which reading must stop, since a small object can be unpacked for
    hours. ``stopped``: whether this limit has ended the reading; then :meth:`read` yields nothing more.
    """

    store: Store
    job: str
    node: int
    gen: int | None = None
    since: int = 0
    ends: float = math.inf
    stopped: bool = False
    _chunk: tuple[int, int] = (0, 0)  # generation and start of the chunk that was read last
    _read: int = 0  # its bytes that were read
    _unpack: _Unpacker = field(default_factory=_Unpacker)

    def chunks(self) -> list[tuple[int, int]]:
        """Return all chunks, as generation and start, in order."""
        folder = log_folder(self.job, self.node)
        found = (CHUNK.match(path, len(folder)) for path in self.store.list(folder))
        return sorted((int(each[1]), int(each[2])) for each in found if each)

    def read(self) -> Iterator[LogLine]:
        chunks = [each for each in self.chunks() if self.gen in (None, each[0])]
        for number, chunk in enumerate(chunks):
            ended = number + 1 < len(chunks) and chunks[number + 1][1] <= self.since
            if chunk >= self._chunk and not ended and not self.stopped:
                yield from self._of(chunk)

    def deleted(self) -> int:
        """Return the bytes of chunks that were deleted because of the job's ``logs.keep_mb``."""
        try:
            data = self.store.part(log_index(self.job, self.node), 0, INDEX_BYTES)
            return codec.decode(data, LogIndex).deleted if data else 0
        except msgspec.DecodeError:
            return 0

    def _of(self, chunk: tuple[int, int]) -> Iterator[LogLine]:
        if chunk != self._chunk:
            self._chunk, self._read, self._unpack = chunk, 0, _Unpacker()
        gen, begins = chunk
        name = chunk_name(self.job, self.node, gen, begins)
        while True:
            start = max(0, self._read - 1)  # one byte that exists: a read behind the end costs more requests
            piece = self.store.part(name, start, PIECE)
            new = (piece or b"")[self._read - start :]
            if not new:
                return
            self._read += len(new)
            for line in self._unpack.lines(new):
                if time.monotonic() > self.ends:
                    self.stopped = True
                    return
                found = _parsed(line, self.node, gen, begins)
                begins = found.at
                if found.at >= self.since:
                    yield found


def _parsed(line: bytes, node: int, gen: int, before: int) -> LogLine:
    """Return a line; ``before``: the time of the previous line, used if this line has none."""
    found = _LINE.match(line)
    if found is None:
        return LogLine(before, node, gen, "stdout", 0, line[:LINE_BYTES].decode("utf-8", "replace"))
    kind = _KINDS[found[4] or found[2]]
    text = found[5][:LINE_BYTES].decode("utf-8", "replace")
    return LogLine(int(found[1]) or before, node, gen, kind, int(found[3] or 0), text)


def in_order(nodes: Sequence[NodeLines]) -> Iterator[LogLine]:
    """Yield the new lines of several nodes in order of time."""
    most = WAITING_BYTES // max(1, len(nodes))
    return heapq.merge(*(_sorted(node.read(), most) for node in nodes), key=lambda line: line.at)


def _sorted(lines: Iterable[LogLine], most: int) -> Iterator[LogLine]:
    """Yield lines in order of time; ``lines`` may deliver a line late, after lines that are up to ``LATE_MS`` newer.

    So a line waits here for older ones. While more than ``most`` bytes wait, the oldest line is yielded at once.
    """
    waiting: list[tuple[int, int, LogLine]] = []
    numbers, newest, size = count(), 0, 0
    for line in lines:
        heapq.heappush(waiting, (line.at, next(numbers), line))
        newest, size = max(newest, line.at), size + len(line.text) + LINE_COST
        while waiting[0][0] < newest - LATE_MS or size > most:
            first = heapq.heappop(waiting)[2]
            size -= len(first.text) + LINE_COST
            yield first
    while waiting:
        yield heapq.heappop(waiting)[2]
