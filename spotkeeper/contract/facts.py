"""Facts: what agents report, and the text forms of a failed worker, a hang and a hardware fault.

A fact is a create-only object; its key is its whole content:
``jobs/<job>/facts/<uid>.<boot>.<node>.<attempt>.<gen>.<kind>.<value>``
"""

from __future__ import annotations

import math
import re
import struct
from enum import Enum

from msgspec import Struct


class Kind(str, Enum):
    """What an agent reports. A fact's ``gen`` is the generation that the report concerns (0: before the first)."""

    HELLO = "hello"  # value: "0". The machine has booted and asks to be admitted
    NOTICE = "notice"  # value: deadline, whole virtual unix seconds. The cloud will take the machine
    REPRIEVE = "reprieve"  # value: the withdrawn notice's deadline
    RELEASED = "released"  # value: newest committed step. The job's processes of `gen` stopped after a save-and-stop
    FREED = "freed"  # value: disk number or "0". The disk is unmounted; the agent will not use it again
    RUNG = "rung"  # value: :class:`Rung`. A trial of a search has saved at its rung's step, or ended well
    EXIT = "exit"  # value: exit code. The job's processes of `gen` ended by themselves (0: done)
    FAILED = "failed"  # value: :class:`Failure`. When the machine's first worker failed, and whether because of a peer
    HERE = "here"  # value: the document version of the roll call that this answers
    ATTACHED = "attached"  # value: disk number or "0" (a static machine's own). It is mounted, and CHECKPOINT is sent
    CHECKPOINT = "checkpoint"  # value: "<gen>-<step>" of the newest complete checkpoint on the mounted disk
    DAMAGED = "damaged"  # value: "<gen>-<step>" of a newer checkpoint on that disk; it was complete once
    DROPPED = "dropped"  # value: "0". A static machine dropped this attempt, which releases the grant
    NO_DISK = "nodisk"  # value: "<disk number>-<word>" (``agent/host/disk.py``). Not mountable here; the agent retries
    FULL = "full"  # value: number of this failure, from "0". The checkpoint disk is full; training continues
    UNSAVED = "unsaved"  # value: "write-failed", "saver-lost" or "no-memory"; then "-<number>", except for number 0
    SAVED = "saved"  # value: number of the failure (FULL or UNSAVED) after which a save succeeded
    UNLOOPED = "unlooped"  # value: "0". The job succeeded, called attach() and never looped: nothing is saved
    MIRRORED = "mirrored"  # value: :class:`BucketCopy`. A checkpoint's copy in the bucket is complete
    FETCHED = "fetched"  # value: :class:`BucketCopy`. The copy that ``Record.fetch`` names is on the mounted disk
    UNMIRRORED = "unmirrored"  # value: "<gen>-<step>". The copy that ``Record.fetch`` names is damaged or gone
    PREFLIGHT_FAILED = "preflight-failed"  # value: a key of :data:`PREFLIGHT_CHECKS`. Training continues
    STALL = "stall"  # value: last step. Since then many times the median step time has passed
    LAGS = (
        "lags"  # value: "<number of the lag>-<percent>": the machine's own step time, in percent of the median node's
    )
    KEEPS_UP = "keepsup"  # value: the number of the lag. The machine no longer lags
    HARDWARE_FAULT = "hardware-fault"  # value: :class:`Sign` that a crash in `gen` left on the machine
    HUNG = "hung"  # value: :class:`Hung`. No step for so long that the job counts as hung
    STACKS = "stacks"  # value: :class:`StacksAnswer`. A roll call's answer: the workers' stack traces are in the log


# Checks that :attr:`Kind.PREFLIGHT_FAILED` may name, and the words for them.
PREFLIGHT_CHECKS = {
    "clock": "its clock is wrong",
    "metadata": "it cannot prove its identity",
    "space": "it has no room for a checkpoint",
    "driver": "a GPU or its driver does not work",
    "peers": "it cannot reach the gang's first machine, perhaps because of a firewall",
}

_ID, _COUNT = "([-a-z0-9]{1,64})", "([0-9]{1,11})"
_KEY = re.compile(rf"{_ID}\.{_ID}\.{_COUNT}\.{_COUNT}\.{_COUNT}\.([-a-z_]+)\.([-a-z0-9]{{1,40}})\Z")
_KINDS = {kind.value: kind for kind in Kind}


class Fact(Struct, frozen=True, gc=False):
    """One report. ``uid``: the machine's unique instance id. ``boot``: the boot's id; a reboot makes a new one."""

    uid: str
    boot: str
    node: int
    attempt: int
    gen: int
    kind: Kind
    value: str = "0"

    def key(self) -> str:
        """Return the last part of the object's name."""
        return f"{self.uid}.{self.boot}.{self.node}.{self.attempt}.{self.gen}.{self.kind.value}.{self.value}"

    @classmethod
    def parse(cls, key: str) -> Fact | None:
        """Return the fact that a key encodes; None if the key is invalid."""
        found = _KEY.match(key)  # one match, for speed: a gang of 10,000 nodes has as many keys, parsed in every round
        if found is None:
            return None
        uid, boot, node, attempt, gen, kind, value = found.groups()
        known = _KINDS.get(kind)
        return cls(uid, boot, int(node), int(attempt), int(gen), known, value) if known is not None else None


# -- values of facts

Commit = tuple[int, int]  # a checkpoint's generation and step; as a text "<gen>-<step>"


def parse_commit(text: str) -> Commit | None:
    """Return the checkpoint that a text names; None if it names none."""
    gen, _, step = text.partition("-")
    return (int(gen), int(step)) if gen.isdecimal() and step.isdecimal() else None


class BucketCopy(Struct, frozen=True):
    """The value of MIRRORED and FETCHED: a checkpoint, "<gen>-<step>", and the bytes that went to or from the bucket.

    MIRRORED counts the parts of all nodes, FETCHED what this machine downloaded.
    """

    commit: str
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.commit}-{self.bytes}"

    @classmethod
    def parse(cls, text: str) -> BucketCopy | None:
        """Return what the text encodes; None if it is invalid."""
        found = _BUCKET_COPY.match(text)
        return cls(found[1], int(found[2] or 0)) if found else None


class Rung(Struct, frozen=True):
    """The value of a RUNG fact: how far a trial has come, and its metric there; None: it reported no number.

    Only the machine of rank 0 knows the metric.
    """

    step: int
    value: float | None

    def __str__(self) -> str:
        return f"{self.step}-{'none' if self.value is None else struct.pack('>d', self.value).hex()}"

    @classmethod
    def parse(cls, text: str) -> Rung | None:
        """Return what the text encodes; None if it is invalid."""
        found = _RUNG.match(text)
        if found is None:
            return None
        number = None if found[2] == "none" else struct.unpack(">d", bytes.fromhex(found[2]))[0]
        return cls(int(found[1]), number if number is not None and math.isfinite(number) else None)


HANG = "hang"  # cause of a roll call, and of the crash that may follow
_BUCKET_COPY = re.compile(r"(\d{1,13}-\d{1,13})(?:-(\d{1,12}))?\Z")
_RUNG = re.compile(r"(\d{1,13})-([0-9a-f]{16}|none)\Z")
_HUNG = re.compile(r"(\d{1,15})-(\d{1,12})\Z")
_ANSWER = re.compile(r"(\d{1,12})-([a-z]+)-(\d{1,4})\Z")
_FAILURE = re.compile(r"(own|peer)-(\d{1,15})-(\d{1,4})\Z")


class Failure(Struct, frozen=True):
    """The value of a FAILED fact, which goes with an EXIT fact: the first failure of a worker on a machine.

    ``follows``: the worker failed because a peer was gone. ``at_ms``: real unix milliseconds by that machine's clock.
    """

    follows: bool
    at_ms: int
    local_rank: int = 0

    def order(self) -> tuple[bool, int]:
        """Return a sort key; the smallest is the root cause. Machines' clocks agree within milliseconds."""
        return self.follows, self.at_ms

    def __str__(self) -> str:
        return f"{'peer' if self.follows else 'own'}-{self.at_ms}-{self.local_rank}"

    @classmethod
    def parse(cls, text: str) -> Failure | None:
        found = _FAILURE.match(text)
        return cls(found[1] == "peer", int(found[2]), int(found[3])) if found else None


class Hung(Struct, frozen=True):
    """The value of a HUNG fact. ``step``: the machine's last step. ``since``: when progress ended, virtual unix s."""

    step: int
    since: int

    def __str__(self) -> str:
        return f"{self.step}-{self.since}"

    @classmethod
    def parse(cls, text: str) -> Hung | None:
        found = _HUNG.match(text)
        return cls(int(found[1]), int(found[2])) if found else None


class WorkerState(str, Enum):
    """The state of a worker in a job that seems hung. A machine reports the state of one worker.

    It chooses the worker whose state comes first in this order:

    BUSY: the worker is not hung, since the script announced a long step, or is at a place where no step is expected.
    ELSEWHERE: it waits for no peer, so its peers wait for it. SILENT: it handles no signal, so it hangs in code below
    Python. DEVICE: it waits for its device. WAITS: it waits for its peers. UNKNOWN: its stack trace is not available.
    """

    BUSY = "busy"
    ELSEWHERE = "elsewhere"
    SILENT = "silent"
    DEVICE = "device"
    WAITS = "waits"
    UNKNOWN = "unknown"


class StacksAnswer(Struct, frozen=True):
    """The value of a STACKS fact: the answer to the roll call of document version ``ver``.

    ``word``: the state of the worker ``local_rank``.
    """

    ver: int
    word: WorkerState
    local_rank: int = 0

    def __str__(self) -> str:
        return f"{self.ver}-{self.word.value}-{self.local_rank}"

    @classmethod
    def parse(cls, text: str) -> StacksAnswer | None:
        found = _ANSWER.match(text)
        if found is None or found[2] not in {word.value for word in WorkerState}:
            return None
        return cls(int(found[1]), WorkerState(found[2]), int(found[3]))


class Sign(str, Enum):
    """A sign of broken hardware that a machine finds in its logs after a crash.

    All signs but NETWORK concern the machine that found them. NETWORK counts only if a single machine finds it, since
    every machine finds it when a peer dies.
    """

    MEMORY = "memory"
    LOST = "lost"
    FAULT = "fault"
    DRIVER = "driver"
    HOST = "host"
    NETWORK = "network"


SIGN_WORDS = {
    Sign.MEMORY: "an uncorrectable memory error of a GPU",
    Sign.LOST: "a GPU that cannot be reached",
    Sign.FAULT: "a GPU that fails while it computes",
    Sign.DRIVER: "a GPU error reported by the driver (Xid)",
    Sign.HOST: "a machine check or disk error reported by the kernel",
    Sign.NETWORK: "an NCCL network error",
}


def parse_sign(value: str) -> Sign | None:
    """Return the sign of broken hardware that a fact's value names; None if it is invalid."""
    return next((sign for sign in Sign if sign.value == value), None)
