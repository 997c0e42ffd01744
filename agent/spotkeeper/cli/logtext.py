"""Ranks' stored logs as text for people: which file speaks, and in its place what is left out."""

from __future__ import annotations

from spotkeeper.spec.joblog import Part, split
from spotkeeper.vm.launcher.output import KEPT_BYTES

Log = tuple[int, int]  # rank, generation


def whole(data: bytes) -> str:
    """All that is stored of one log."""
    return News().of((0, 0), data)


class News:
    """What a reader has not seen yet of logs that are stored anew while they grow."""

    def __init__(self) -> None:
        self._ends: dict[tuple[Log, str], int] = {}  # of each file, in bytes: up to where it was told
        self._loose: dict[Log, str] = {}  # what stood in no file
        self._speaks: tuple[Log, str] | None = None  # the file below whose heading the reader is
        self.gaps: dict[str, Part] = {}  # files of which something was left out, by heading

    def of(self, log: Log, data: bytes) -> str:
        """What is new of a log, each file's below its heading."""
        out = ""
        for part in split(data):
            text = self._of_file(log, part) if part.path else self._of_none(log, part)
            if not text:
                continue
            if part.path and self._speaks != (log, part.path):
                text = f"--- {part.title}\n{text}"
                self._speaks = log, part.path
            out += text if not out or out.endswith("\n") else f"\n{text}"
        return out

    def _of_file(self, log: Log, part: Part) -> str:
        seen = self._ends.get((log, part.path), 0)
        if part.end <= seen:
            return ""
        self._ends[log, part.path] = part.end
        text = part.text[max(0, seen - part.start) :].decode("utf-8", "replace")
        if part.start <= seen:
            return text
        self.gaps[part.title] = part
        what = "whole" if part.end <= KEPT_BYTES else f"its last {KEPT_BYTES >> 20} MiB"
        return f"... {size(part.start - seen)} left out; {what} on the machine: {part.path}\n{text}"

    def _of_none(self, log: Log, part: Part) -> str:
        text = part.text.decode("utf-8", "replace")
        before, self._loose[log] = self._loose.get(log, ""), text
        return added(before, text)


def added(before: str, after: str) -> str:
    """What ``after`` has more than ``before``; its beginning may have been cut off meanwhile."""
    if after.startswith(before):
        return after[len(before) :]
    tail = before[-2048:]
    at = after.find(tail)
    return after[at + len(tail) :] if at >= 0 else f"... some of it left out\n{after}"


def size(count: int) -> str:
    """``512 bytes``, ``17.2 KB``, ``1.2 MB``; a KB has 1,000 bytes."""
    for unit, of in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= of:
            return f"{count / of:.1f} {unit}"
    return f"{count} byte" + ("" if count == 1 else "s")
