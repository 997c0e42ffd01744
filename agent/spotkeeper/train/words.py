"""How the two sides of a control file come to its words: the job by a mapping, its agent by reads and writes.

A look of the job's costs well under a microsecond. The agent's may cost a few, and must not end the agent: whoever
maps a file that its job empties dies of SIGBUS at the next look. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

WORD = 8  # bytes
LOOKS = 5
_MOST_S = 1e11  # of a time or a span

E = TypeVar("E", bound=IntEnum)
N = TypeVar("N", bound=float)


class Words(Protocol[N]):
    """The words of a control file, all read as whole numbers or all as floats."""

    def __getitem__(self, at: int, /) -> N: ...

    def __setitem__(self, at: int, value: N, /) -> None: ...

    def release(self) -> None: ...


class Read(Generic[N]):
    """Of an open file, which is the caller's. A word that is not there is 0; one that cannot be written is not.

    ``kind``: of its words.
    """

    def __init__(self, fd: int, kind: type[N]) -> None:
        self._fd = fd
        self._kind = kind
        self._form = struct.Struct("=Q" if kind is int else "=d")

    def __getitem__(self, at: int, /) -> N:
        raw = self._look(WORD * at)
        return self._kind(self._form.unpack(raw)[0] if len(raw) == WORD else 0)

    def __setitem__(self, at: int, value: N, /) -> None:
        with contextlib.suppress(OSError):  # a file that its job has emptied, and no room to fill it again
            os.pwrite(self._fd, self._form.pack(value), WORD * at)

    def release(self) -> None:
        self._fd = -1

    def _look(self, offset: int) -> bytes:
        """The kernel promises nobody that it copies a word as one: what two looks in a row show is one word."""
        raw = b""
        with contextlib.suppress(OSError):
            for _ in range(LOOKS):
                before, raw = raw, os.pread(self._fd, WORD, offset)
                if raw == before:
                    break
        return raw


class HasWords(Protocol):
    """The same words twice; what follows are attributes of such a class."""

    words: Words[int]
    floats: Words[float]


@dataclass(frozen=True)
class Float:
    """A word that is an attribute as it stands."""

    at: int

    def __get__(self, of: HasWords, _: type[HasWords]) -> float:
        return of.floats[self.at]

    def __set__(self, of: HasWords, value: float) -> None:
        of.floats[self.at] = value


class Seconds(Float):
    """A time or a span; 0 where the word says none that could be: a job that tramples on its file ends no agent."""

    def __get__(self, of: HasWords, _: type[HasWords]) -> float:
        value = of.floats[self.at]
        return value if 0.0 <= value < _MOST_S else 0.0


@dataclass(frozen=True)
class Whole:
    at: int

    def __get__(self, of: HasWords, _: type[HasWords]) -> int:
        return of.words[self.at]

    def __set__(self, of: HasWords, value: int) -> None:
        of.words[self.at] = value


@dataclass(frozen=True)
class Choice(Generic[E]):
    """``other``: what a word of no meaning stands for."""

    at: int
    kind: type[E]
    other: E

    def __get__(self, of: HasWords, _: type[HasWords]) -> E:
        try:
            return self.kind(of.words[self.at])
        except ValueError:
            return self.other

    def __set__(self, of: HasWords, value: E) -> None:
        of.words[self.at] = int(value)
