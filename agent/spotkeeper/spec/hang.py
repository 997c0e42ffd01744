"""How a hang is told: what the two facts say, ``hung`` (a step is overdue) and ``stacks`` (where a node's workers are).

The agent says the first by itself, the second when the roll is called for a hang (``vm/hang.py``); reconcile decides
(``reconcile/decide/hang.py``).
"""

from __future__ import annotations

import re
from enum import Enum

from msgspec import Struct

CAUSE = "hang"  # of a roll call, and of the crash that follows
_HUNG = re.compile(r"(\d{1,15})-(\d{1,12})\Z")
_ANSWER = re.compile(r"(\d{1,12})-([a-z]+)-(\d{1,4})\Z")


class Hung(Struct, frozen=True):
    """No step has followed ``step``, on this machine, since ``since`` (whole virtual unix seconds)."""

    step: int
    since: int

    def __str__(self) -> str:
        return f"{self.step}-{self.since}"

    @classmethod
    def parse(cls, text: str) -> Hung | None:
        found = _HUNG.match(text)
        return cls(int(found[1]), int(found[2])) if found else None


class Word(str, Enum):
    """What the worker that matters most is at, of one machine; of several the first of these in this order counts.

    BUSY: the script has said that this takes long, or works where no step is awaited: no hang. ELSEWHERE: waits for
    no peer, so where others wait it is whom they wait for. SILENT: handles no signal, so it hangs below Python.
    DEVICE: waits for its device. WAITS: for its peers. UNKNOWN: its stacks could not be had.
    """

    BUSY = "busy"
    ELSEWHERE = "elsewhere"
    SILENT = "silent"
    DEVICE = "device"
    WAITS = "waits"
    UNKNOWN = "unknown"


class Answer(Struct, frozen=True):
    """To the roll call of document version ``ver``; ``local_rank``: the worker that matters most."""

    ver: int
    word: Word
    local_rank: int = 0

    def __str__(self) -> str:
        return f"{self.ver}-{self.word.value}-{self.local_rank}"

    @classmethod
    def parse(cls, text: str) -> Answer | None:
        found = _ANSWER.match(text)
        if found is None or found[2] not in {word.value for word in Word}:
            return None
        return cls(int(found[1]), Word(found[2]), int(found[3]))
