"""Access to the words of the control file: through a mapping in the job, by reads and writes in the agent.

The job's access takes well under a microsecond. The agent's takes a few microseconds but cannot kill the agent: a
process that maps a file dies of SIGBUS at its next access once the job has emptied the file. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

WORD = 8  # bytes
READS = 5
_MOST_S = 1e11  # upper bound of a valid time or span

E = TypeVar("E", bound=IntEnum)
N = TypeVar("N", bound=float)


class WordArray(Protocol[N]):
    """The words of a control file, all as integers or all as floats."""

    def __getitem__(self, at: int, /) -> N: ...

    def __setitem__(self, at: int, value: N, /) -> None: ...

    def release(self) -> None: ...


class FileWords(Generic[N]):
    """Words of an open file; the caller closes the file. Missing words read as 0; failed writes are ignored."""

    def __init__(self, fd: int, kind: type[N]) -> None:
        self._fd = fd
        self._kind = kind
        self._form = struct.Struct("=Q" if kind is int else "=d")

    def __getitem__(self, at: int, /) -> N:
        raw = self._read(WORD * at)
        return self._kind(self._form.unpack(raw)[0] if len(raw) == WORD else 0)

    def __setitem__(self, at: int, value: N, /) -> None:
        with contextlib.suppress(OSError):  # the job has emptied the file, and the disk is full
            os.pwrite(self._fd, self._form.pack(value), WORD * at)

    def release(self) -> None:
        self._fd = -1

    def _read(self, offset: int) -> bytes:
        """Read a word until two reads agree, because the kernel may copy a word in pieces."""
        raw = b""
        with contextlib.suppress(OSError):
            for _ in range(READS):
                before, raw = raw, os.pread(self._fd, WORD, offset)
                if raw == before:
                    break
        return raw


class HasWords(Protocol):
    """A class with the control file's words as integers (``words``) and as floats; the descriptors below need both."""

    words: WordArray[int]
    floats: WordArray[float]


@dataclass(frozen=True)
class FloatWord:
    """A float attribute."""

    at: int

    def __get__(self, of: HasWords, _: type[HasWords]) -> float:
        return of.floats[self.at]

    def __set__(self, of: HasWords, value: float) -> None:
        of.floats[self.at] = value


class SecondsWord(FloatWord):
    """A time or a duration. An invalid word reads as 0, because a job's writes must not crash the agent."""

    def __get__(self, of: HasWords, _: type[HasWords]) -> float:
        value = of.floats[self.at]
        return value if 0.0 <= value < _MOST_S else 0.0


@dataclass(frozen=True)
class IntWord:
    """An integer attribute."""

    at: int

    def __get__(self, of: HasWords, _: type[HasWords]) -> int:
        return of.words[self.at]

    def __set__(self, of: HasWords, value: int) -> None:
        of.words[self.at] = value


@dataclass(frozen=True)
class EnumWord(Generic[E]):
    """An attribute whose value is a member of the enum ``kind``. A number that is no member reads as ``other``."""

    at: int
    kind: type[E]
    other: E
    _members: dict[int, E] = field(init=False, repr=False)  # several times as fast as ``kind(number)``

    def __post_init__(self) -> None:
        object.__setattr__(self, "_members", {member.value: member for member in self.kind})

    def __get__(self, of: HasWords, _: type[HasWords]) -> E:
        return self._members.get(of.words[self.at], self.other)

    def __set__(self, of: HasWords, value: E) -> None:
        of.words[self.at] = int(value)
