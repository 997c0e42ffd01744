"""``jobs/<job>/logs/<rank>/<gen>.log``: the ends of several files, each below a line that says what it is the end of.

    --- rank 2 (sk-prod-abcdefgh-r0002-a1) stdout: bytes 1300000 to 1365000 of /run/spotkeeper/.../stdout.log

The agent writes it and the command line reads it. The places are exact, so that a reader who comes again knows
what was never there to be seen. A body is as long as its line says; what no such line leads is no file's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_HEAD = re.compile(rb"--- ([^\n]*): bytes (\d+) to (\d+) of ([^\n]+)\n")


@dataclass(frozen=True)
class Part:
    """``text`` stands ``start`` bytes into the file at ``path`` on the machine; without a path, in no file."""

    title: str
    text: bytes
    start: int = 0
    path: str = ""

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def join(parts: Iterable[Part]) -> bytes:
    """One object: every part begins a line."""
    out = b""
    for part in parts:
        if out and not out.endswith(b"\n"):
            out += b"\n"
        if part.path:
            out += f"--- {part.title}: bytes {part.start} to {part.end} of {part.path}\n".encode()
        out += part.text
    return out


def split(data: bytes) -> tuple[Part, ...]:
    """The parts of an object, in order."""
    out = []
    at = 0
    while at < len(data):
        head = _HEAD.match(data, at)
        if head is None:
            out.append(Part("", data[at:]))
            break
        start, end = int(head[2]), int(head[3])
        text = data[head.end() : head.end() + max(0, end - start)]
        out.append(Part(head[1].decode("utf-8", "replace"), text, start, head[4].decode("utf-8", "replace")))
        at = head.end() + len(text)
        if data[at : at + 1] == b"\n" and not text.endswith(b"\n"):
            at += 1
    return tuple(out)
