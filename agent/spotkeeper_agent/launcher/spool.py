"""Spools a worker's whole output on disk: stamped lines without secrets, compressed, bounded in rate and size.

The agent makes a spool folder on the boot disk for each generation (``SPOTKEEPER_SPOOL``), takes the files out of it,
and uploads them (``job/chunks.py``). Each file is one gzip member of whole lines::

    <unix ms> <local rank>o TEXT        a line of standard output; ``e``: of standard error
    <unix ms> n TEXT                    a note from Spotkeeper, such as how much output is missing here

A file appears by rename, so the agent never finds an incomplete one. The workers of a node share its rate: what they
print beyond it is counted and dropped, as is everything while the folder or the disk is full. Printing never waits for
the disk or the bucket. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER, SECRETS = "SPOTKEEPER_SPOOL", "SPOTKEEPER_SECRETS"  # variables: the folder; names of the secrets' variables
RATE = 2e6  # bytes per second that the log of a node takes, as printed
BURST_S = 4.0  # a node may print the bytes of this many seconds at once
AGAIN_S = 1.0  # output is taken again once this much of the burst is free, so that pieces are not tiny
FILE_BYTES = 256 << 10  # of a file's text; compressed it is hardly ever larger
FLUSH_S = 1.0  # a file is written at most this long after its first line
IDLE_S = 4.0  # an unfinished line is written after this long without a new byte
LINE_BYTES = 32 << 10  # a longer line is cut
SPOOL_BYTES, SPOOL_FILES = 64 << 20, 4000  # in the folder
FREE_BYTES, FREE_SHARE = 1 << 30, 0.05  # the spool leaves this much of its disk free, or this share if that is less
SHORTEST = 4  # characters; a shorter value would be part of many ordinary words
NOTE = b"n"
TOO_FAST, FULL = "more than 2 MB/s", "the disk with the spool is full"  # why output is left out
RATE_FILE = "rate"


def hide(content: bytes, secrets: Iterable[str]) -> bytes:
    """Replace each byte of a secret by a star, so that byte positions stay valid."""
    for value in sorted(secrets, key=len, reverse=True):
        content = content.replace(value.encode(), b"*" * len(value.encode()))
    return content


def reach(secrets: Iterable[str]) -> int:
    """Return the bytes that must be known on both sides of a piece of text to find each secret that its ends cut."""
    return max((len(value.encode()) for value in secrets), default=1) - 1


def lines_of(values: Iterable[str]) -> set[str]:
    """Return the lines of secret values, except short ones: output is searched for each line by itself."""
    return {line for value in values for line in value.splitlines() if len(line) >= SHORTEST}


def packed(at: float, source: bytes, text: bytes) -> bytes:
    """Return lines as one gzip member. ``at``: unix seconds; ``text``: whole lines, the last without its newline."""
    gzip = zlib.compressobj(1, wbits=31)
    return gzip.compress(stamped(at, source, text)) + gzip.flush()


def stamped(at: float, source: bytes, text: bytes) -> bytes:
    stamp = b"%013d %s " % (at * 1000, source)
    return stamp + text.replace(b"\n", b"\n" + stamp) + b"\n"


def size(count: int) -> str:
    """Format a number of bytes: ``512 bytes``, ``17.2 KB``, ``1.2 MB``; a KB has 1,000 bytes."""
    for unit, of in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= of:
            return f"{count / of:.1f} {unit}"
    return f"{count} byte" + ("" if count == 1 else "s")


def has_room(folder: Path | str) -> bool:
    """Return whether the folder's disk has more free space than the logs must leave."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize > min(FREE_BYTES, FREE_SHARE * disk.f_blocks * disk.f_frsize)


class Rate:
    """The rate that all workers of a node share (the generic cell rate algorithm).

    The file ``rate`` in the spool's folder has one number: the monotonic time at which a log that grows by exactly
    ``RATE`` bytes per second would have all bytes taken so far. While it is more than ``BURST_S`` ahead, no bytes are
    taken. Nothing locks the file, since a job could hold a lock for ever, so two workers that print at the same instant
    can exceed the rate by one piece. By writing to this file a job spoils only its own log.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / RATE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        self._full = False

    def take(self, count: int) -> bool:
        """Return whether the log takes ``count`` bytes more. Raises OSError: the file cannot be read or written."""
        now = time.monotonic()
        known = os.pread(self._file, 8, 0)
        until = struct.unpack("d", known)[0] if len(known) == 8 else now
        if not now < until < now + 2 * BURST_S:  # idle; or from before a reboot, or no number
            until = now
        self._full = until - now > BURST_S - (AGAIN_S if self._full else 0.0)
        if self._full:
            return False
        os.pwrite(self._file, struct.pack("d", until + count / RATE), 0)
        return True


class Spool:
    """One worker's lines on their way into the folder.

    ``before``: how the previous output worker ended too early; "" if there was none.
    """

    def __init__(self, folder: Path, rank: bytes, secrets: Iterable[str], *, before: str = "") -> None:
        self._folder, self._rank = folder, rank
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._back = reach(self._secrets)
        self._rate = Rate(folder)
        self._unfinished: dict[bytes, bytes] = {}  # by stream: the beginning of a line
        self._cut: dict[bytes, str] = {}  # by stream of which the beginning of a line was dropped: the reason
        self._left_out: dict[str, list[int]] = {}  # by reason: bytes and lines since the last note
        self._noted: dict[str, list[int]] = {}  # the same, noted in the file that is not written yet
        self._gzip, self._packed, self._size, self._lines = _gzip(), b"", 0, 0
        self._began = self._heard = 0.0  # monotonic: when the first line was taken, and when the last byte came
        self._files = 0
        if before:
            self._take(NOTE, f"the output worker {before}: up to a second of output is missing here".encode())
            self._flush()

    @classmethod
    def of(cls, environ: Mapping[str, str], *, before: str) -> Spool | None:
        """Return the spool in the folder that ``environ`` names; None without that folder: only a log's end is kept."""
        folder, rank = environ.get(FOLDER), environ.get("LOCAL_RANK", "0")
        if not folder:
            return None
        secrets = lines_of(environ.get(name, "") for name in environ.get(SECRETS, "").split())
        with contextlib.suppress(OSError):
            return cls(Path(folder), rank.encode(), secrets, before=before)
        return None

    def add(self, stream: bytes, piece: bytes) -> None:
        """Take a piece of output. ``stream``: ``o`` (standard output) or ``e`` (standard error)."""
        self._heard = time.monotonic()
        if why := self._refusal(len(piece)):
            self._drop(why, len(piece) + len(self._unfinished.pop(stream, b"")), piece.count(b"\n"))
            self._cut.pop(stream, None)
            if not piece.endswith(b"\n"):
                self._cut[stream] = why
            return
        if why := self._cut.get(stream, ""):
            end = piece.find(b"\n") + 1
            self._drop(why, end or len(piece), 1 if end else 0)
            if not end:
                return
            del self._cut[stream]
            piece = piece[end:]
        text = self._unfinished.pop(stream, b"") + piece
        last = text[-1:] if text.endswith(b"\r") else b""  # the first byte of \r\n, or the end of a progress bar
        body, ended, rest = _lines(text.removesuffix(b"\r")).rpartition(b"\n")
        if ended:
            self._take(self._rank + stream, hide(body, self._secrets))
        if len(rest) > LINE_BYTES + self._back:
            # Keep back what may be the beginning of a secret.
            rest = hide(rest, self._secrets)
            cut = len(rest) - self._back
            self._take(self._rank + stream, rest[:cut])
            rest = rest[cut:]
        if rest or last:
            self._unfinished[stream] = rest + last

    def wait_s(self) -> float | None:
        """Return in how many seconds :meth:`tick` must be called; None: not before more output has arrived."""
        now = time.monotonic()
        due = [self._began + FLUSH_S] if self._size or self._left_out else []
        due += [self._heard + IDLE_S] if self._unfinished else []
        return max(0.0, min(due) - now) if due else None

    def tick(self) -> None:
        now = time.monotonic()
        if self._unfinished and now >= self._heard + IDLE_S:
            self._finish_lines()
        if (self._size or self._left_out) and now >= self._began + FLUSH_S:
            self._flush()

    def end(self) -> None:
        self._finish_lines()
        self._flush()

    def _refusal(self, count: int) -> str:
        """Return why the log does not take ``count`` bytes; "" if it takes them."""
        try:
            return "" if self._rate.take(count) else TOO_FAST
        except OSError:  # not even the rate file's one block is free; an exception would end the output worker
            return FULL

    def _finish_lines(self) -> None:
        for stream in list(self._unfinished):
            text = self._unfinished.pop(stream).removesuffix(b"\r")
            self._take(self._rank + stream, hide(text, self._secrets))

    def _drop(self, why: str, count: int, lines: int) -> None:
        if not self._size and not self._left_out:
            self._began = time.monotonic()
        of = self._left_out.setdefault(why, [0, 0])
        of[0] += count
        of[1] += lines

    def _take(self, source: bytes, text: bytes) -> None:
        if not self._size and not self._left_out:
            self._began = time.monotonic()
        now = time.time()
        self._packed += self._gzip.compress(self._notes(now) + stamped(now, source, text))
        self._size += len(text) + 1
        self._lines += text.count(b"\n") + 1
        if self._size >= FILE_BYTES:
            self._flush()

    def _notes(self, now: float) -> bytes:
        out = b""
        for why, (count, lines) in self._left_out.items():
            out += stamped(now, NOTE, f"{size(count)} ({lines} lines) left out here: {why}".encode())
            noted = self._noted.setdefault(why, [0, 0])
            noted[:] = noted[0] + count, noted[1] + lines
        self._left_out = {}
        return out

    def _flush(self) -> None:
        notes = self._notes(time.time())
        data = self._packed + self._gzip.compress(notes) + self._gzip.flush()
        count, lines, noted = self._size, self._lines, self._noted
        self._gzip, self._packed, self._size, self._lines, self._noted = _gzip(), b"", 0, 0, {}
        if not count and not notes:
            return
        try:
            full = not self._has_room()
            if not full:
                self._write(data)
        except OSError:
            full = True
        if full:
            self._left_out = noted
            self._drop(FULL, count, lines)
            self._began = time.monotonic()

    def _has_room(self) -> bool:
        sizes = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # the agent has taken it
                    sizes.append(entry.stat(follow_symlinks=False).st_size)
        return len(sizes) < SPOOL_FILES and sum(sizes) < SPOOL_BYTES and has_room(self._folder)

    def _write(self, data: bytes) -> None:
        self._files += 1
        name = f"{time.time() * 1000:013.0f}-{self._rank.decode()}-{os.getpid()}-{self._files:08d}.gz"
        beside = self._folder / f".{name}"
        try:
            beside.write_bytes(data)
            beside.rename(self._folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise


def _gzip() -> zlib._Compress:
    return zlib.compressobj(1, wbits=31)


def _lines(text: bytes) -> bytes:
    """Return text in which every line ends with one ``\\n``: a progress bar's ``\\r`` ends a line too."""
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in text else text
