"""Facts: what agents report. Create-only objects; the key is the whole content.

``jobs/<job>/facts/<uid>.<boot>.<rank>.<attempt>.<gen>.<kind>.<value>``
"""

from __future__ import annotations

import re
from enum import Enum

from msgspec import Struct


class Kind(str, Enum):
    """What an agent can say. ``gen`` is the generation it speaks of (0 before the first)."""

    HELLO = "hello"  # value: "0". This boot is up and asks to be admitted
    NOTICE = "notice"  # value: deadline, whole virtual unix seconds
    REPRIEVE = "reprieve"  # value: the deadline of the notice that was withdrawn
    RELEASED = "released"  # value: newest committed step. Its processes of `gen` have stopped after a save-and-stop
    FREED = "freed"  # value: disk number or "0". Disk unmounted; the agent will not touch it again
    EXIT = "exit"  # value: exit code. The job's process of `gen` ended by itself (0: done)
    FAILED = "failed"  # value: ``failure.Failure``. When the first of its workers failed, and whether for a peer's sake
    HERE = "here"  # value: the document version that called the roll
    ATTACHED = "attached"  # value: disk number or "0" (a static node's own). Mounted; what it HOLDS was said before
    HOLDS = "holds"  # value: "<gen>-<step>" of the newest complete checkpoint on the mounted disk
    DAMAGED = "damaged"  # value: "<gen>-<step>" of a checkpoint there, newer than that, which was whole once
    DROPPED = "dropped"  # value: "0". A static node is rid of this attempt (its word releases the grant)
    NO_DISK = "nodisk"  # value: "<disk number>-<word>" (``vm.disk.Why``). It cannot be mounted here; trying goes on
    FULL = "full"  # value: which time, from "0". The checkpoint disk is full; training goes on
    UNSAVED = "unsaved"  # value: "write-failed" or "saver-lost", and "-<which time>" after the first. The same
    SAVED = "saved"  # value: which time. A save succeeded after one of those
    MIRRORED = "mirrored"  # value: "<gen>-<step>" of a checkpoint whose copy in the bucket is complete
    FETCHED = "fetched"  # the same: the copy that ``Record.fetch`` names is on the mounted disk
    UNMIRRORED = "unmirrored"  # the same: that copy cannot be had, for it is damaged, or gone
    AMISS = "amiss"  # value: a key of :data:`AMISS`. Preflight at boot found an error; training goes on
    SLOW = "stall"  # value: step. No step for many times the median
    LAGS = "lags"  # value: "<which time>-<percent>". It holds the gang up: its own time, of the middle rank's
    KEEPS_UP = "keepsup"  # value: which time. It does no more
    SICK = "sick"  # value: ``sick.Sign``. Its processes of `gen` ended as they do on broken hardware
    HUNG = "hung"  # value: ``hang.Hung``. No step for so long that it is taken for a hang
    STACKS = "stacks"  # value: ``hang.Answer``. Its workers' stacks are in its log, asked for by this roll call


# What :attr:`Kind.AMISS` may name, and how it is told.
AMISS = {
    "clock": "its clock is wrong",
    "metadata": "it cannot prove who it is",
    "space": "it has no room for a checkpoint",
    "driver": "a GPU or its driver does not work",
    "peers": "it cannot reach the gang's first machine: a firewall between them?",
}

_ID, _COUNT = "([-a-z0-9]{1,64})", "([0-9]{1,11})"
_KEY = re.compile(rf"{_ID}\.{_ID}\.{_COUNT}\.{_COUNT}\.{_COUNT}\.([-a-z_]+)\.([-a-z0-9]{{1,40}})\Z")
_KINDS = {kind.value: kind for kind in Kind}


class Fact(Struct, frozen=True, gc=False):
    """Who (unique instance id, boot), for which attempt of which rank and generation, says what."""

    uid: str
    boot: str
    rank: int
    attempt: int
    gen: int
    kind: Kind
    value: str = "0"

    def key(self) -> str:
        """The last part of the object's name."""
        return f"{self.uid}.{self.boot}.{self.rank}.{self.attempt}.{self.gen}.{self.kind.value}.{self.value}"

    @classmethod
    def parse(cls, key: str) -> Fact | None:
        """The fact a key stands for, or None where it makes no sense."""
        found = _KEY.match(key)  # a gang of 10,000 has as many keys, parsed several times a round
        if found is None:
            return None
        uid, boot, rank, attempt, gen, kind, value = found.groups()
        known = _KINDS.get(kind)
        return cls(uid, boot, int(rank), int(attempt), int(gen), known, value) if known is not None else None
