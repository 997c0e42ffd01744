"""The control file: 256 bytes through which an agent and the job on its machine talk.

The agent writes what it wants and by when; local rank 0 of the job writes how it is
doing. Both write single aligned 8-byte words in place, so a reader never sees half a
number: the job in a mapping of the file, the agent through a descriptor, so that no job
can end its agent with it (``words.py``). It is never renamed: a renamed file would leave
the other side on the old one.

Standard library only, and no torch: the agent imports this module too.

==== ============== =============================================================
 at   word           meaning
==== ============== =============================================================
   0  magic          ``SKCTL`` and the version of this layout
   8  want           ``Want``, written after ``deadline``
  16  deadline       by when, real unix seconds (0: none)
  24  ask            number of the request, written last; a new one asks anew
  32  disk           1 once the disk of a member that began without it is mounted
  64  state          ``State``
  72  step           optimizer steps done
  80  step_at        when the last one ended, real unix seconds
  88  step_s         median duration of recent steps, seconds
  96  commit         newest durable checkpoint of this node (generation, step)
 104  commit_at      when it became durable, real unix seconds
 112  save_s         median time from the start of a save to durable, seconds
 120  stall_s        median time a save holds up the loop, seconds
 128  loss           last one reported (NaN: none)
 136  samples_per_s  of all ranks together
 144  total_steps    where the run will end (0: not known)
 152  fault          ``Fault`` of the last save
 160  answered       highest ``ask`` whose save is durable
 168  interval_s     seconds between saves, as chosen
 176  pid            of local rank 0
 184  first_step_at  when this generation's first step ended, real unix seconds (0: not yet)
 192  restored       checkpoint this generation started from (generation, step)
 200  lag            times the middle rank's own time of a step, where this node holds it up (0: it keeps up)
 208  sample_s       this node's own time for a sample, seconds (0: not measured)
==== ============== =============================================================
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import time
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

from spotkeeper.train.words import Choice, Float, Read, Seconds, Whole, Words

SIZE = 256
MAGIC = int.from_bytes(b"SKCTL\0\0\1", "little")
NAME = "ctl"
RESULT = "result.json"
NO_RESTART = 93  # exit code: "a restart cannot help"

_STEP_BITS = 40  # of a (generation, step) pair; 2^24 generations, 10^12 steps


class Want(IntEnum):
    """What the agent asks for. NONE -> SAVE -> SAVE_STOP; SAVE may repeat, SAVE_STOP is for good."""

    NONE = 0
    SAVE = 1  # save in the background, go on training
    SAVE_STOP = 2  # save, wait until durable, exit


class State(IntEnum):
    """Where the job is.

    ========= ======================== =====================================
    from      to                       on
    ========= ======================== =====================================
    STARTING  RESTORING                ``attach()``
    RESTORING TRAINING                 state loaded (or fresh)
    TRAINING  STOPPING                 all ranks agreed to stop
    TRAINING  FINISHING                the loop reached its end, or was left by `break`
    STOPPING  STOPPED                  final save durable, or failed (``fault``)
    FINISHING DONE                     the same
    ========= ======================== =====================================
    """

    STARTING = 0
    RESTORING = 1
    TRAINING = 2
    STOPPING = 3
    STOPPED = 4
    FINISHING = 5
    DONE = 6


class Fault(IntEnum):
    """Why the last save came to nothing; training goes on and the older checkpoint stays."""

    NONE = 0
    DISK_FULL = 1
    SAVER_LOST = 2  # no saver answers
    WRITE_FAILED = 3  # any other error of the disk
    FENCED = 4  # a newer generation has the folder


@dataclass(frozen=True, order=True)
class Commit:
    """Identity of a checkpoint. Order is age: a later generation is always newer."""

    gen: int
    step: int

    def __str__(self) -> str:
        return f"{self.gen}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> Commit | None:
        """The inverse of ``str``, None where ``text`` is something else."""
        gen, dash, step = text.partition("-")
        if not dash or not all(part.isascii() and part.isdigit() for part in (gen, step)):
            return None
        commit = cls(int(gen), int(step))
        return commit if str(commit) == text else None  # "007-5" names no checkpoint of ours


class ControlError(Exception):
    """The file is not a control file of this version."""


class Control:
    """A control file. Neither thread nor process needs a lock: every word has one writer."""

    def __init__(self, path: Path, words: Words[int], floats: Words[float], hold: mmap.mmap | int) -> None:
        """``hold``: what the words are of, a mapping or a descriptor; :meth:`close` gives it back."""
        self.path = path
        self.words = words
        self.floats = floats
        self._hold = hold

    @classmethod
    def create(cls, path: Path | str) -> Control:
        """Make the file (an old one is overwritten in place) and hold it. The agent does this.

        Raises:
            OSError: the folder is missing, not writable, or full.
        """
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            os.ftruncate(fd, SIZE)
            os.posix_fallocate(fd, 0, SIZE)  # a full /run says so here: the job's first write to a hole would be SIGBUS
            os.pwrite(fd, bytes(SIZE), 0)
        except OSError:
            os.close(fd)
            raise
        return cls._held(path, fd)._new()

    @classmethod
    def hold(cls, path: Path | str) -> Control:
        """One that an agent before this one made; where there is none any more, one that tells nothing.

        So a generation goes on whatever its job has done to the file: :meth:`trouble` says what is wrong.
        """
        path = Path(path)
        with contextlib.suppress(OSError):
            control = cls._held(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
            if not control._other():
                return control
            control.close()
        return cls._held(path, os.memfd_create(path.name, os.MFD_CLOEXEC))

    @classmethod
    def open(cls, path: Path | str) -> Control:
        """Map a file that exists. The job does this.

        Raises:
            ControlError: it is missing, of another size, or of another version.
        """
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ControlError(f"{path}: no control file; the agent makes it before it starts the job") from None
        try:
            if (size := os.fstat(fd).st_size) != SIZE:
                raise ControlError(f"{path}: {size} bytes, want {SIZE}; is it a control file?")
            control = cls._mapped(path, mmap.mmap(fd, SIZE))
        finally:
            os.close(fd)
        if found := control._other():
            control.close()
            raise ControlError(f"{path}: {found}; agent and library are of different versions")
        return control

    @classmethod
    def private(cls) -> Control:
        """One that nobody else sees: for a run without an agent."""
        return cls._mapped(Path("-"), mmap.mmap(-1, SIZE))._new()

    @classmethod
    def _held(cls, path: Path, fd: int) -> Control:
        return cls(path, Read(fd, int), Read(fd, float), fd)

    @classmethod
    def _mapped(cls, path: Path, buffer: mmap.mmap) -> Control:
        return cls(path, memoryview(buffer).cast("Q"), memoryview(buffer).cast("d"), buffer)

    def _new(self) -> Control:
        self.loss = None
        self.words[0] = MAGIC
        return self

    def _other(self) -> str:
        """How a file begins that is not one of ours."""
        found = self.words[0]
        return "" if found == MAGIC else f"starts with {found.to_bytes(8, 'little')!r}"

    def trouble(self) -> str:
        """What is wrong with the file that an agent holds, by its job's doing; "" while nothing is."""
        if not isinstance(self._hold, int):
            return ""
        about = os.fstat(self._hold)
        if about.st_nlink == 0:  # or it never had a name: nothing of ours was found
            return f"{self.path} is gone: deleted, emptied, or another file in its place"
        if about.st_size != SIZE:
            return f"{self.path} has {about.st_size} bytes, not {SIZE}"
        return f"{self.path} {found}" if (found := self._other()) else ""

    def close(self) -> None:
        self.words.release()
        self.floats.release()
        if isinstance(self._hold, int):
            os.close(self._hold)
        else:
            self._hold.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # agent -> job

    def request(self, want: Want, deadline: float = 0.0) -> int:
        """Ask for something by ``deadline`` (real unix seconds, 0: none). Returns the request's number."""
        self.floats[2] = deadline
        self.words[1] = int(want)
        number = (self.words[3] + 1) % (1 << 64)  # anything may stand there, by the job's doing
        self.words[3] = number  # last: who sees the number sees what it stands for
        return number

    want = Choice(1, Want, Want.NONE)
    deadline = Seconds(2)
    ask = Whole(3)

    @property
    def disk(self) -> bool:
        """Whether ``SPOTKEEPER_CKPT_LATE`` may be written to."""
        return bool(self.words[4])

    @disk.setter
    def disk(self, there: bool) -> None:
        self.words[4] = int(there)

    # job -> agent

    state = Choice(8, State, State.STARTING)
    step_s = Seconds(11)
    save_s = Seconds(14)
    stall_s = Seconds(15)
    samples_per_s = Float(17)
    total_steps = Whole(18)
    fault = Choice(19, Fault, Fault.WRITE_FAILED)
    answered = Whole(20)
    interval_s = Seconds(21)
    pid = Whole(22)
    lag = Float(25)
    sample_s = Seconds(26)

    @property
    def step(self) -> int:
        return self.words[9]

    @property
    def step_at(self) -> float:
        return self.floats[10]

    def stepped(self, step: int, at: float | None = None) -> None:
        """Write the step first, then its time: who sees a new time sees its step."""
        now = time.time() if at is None else at
        self.words[9] = step
        if self.floats[23] == 0.0:
            self.floats[23] = now
        self.floats[10] = now

    def resumed(self, commit: Commit) -> None:
        """The state of ``commit`` is loaded; no step of this generation is done yet."""
        self.words[9] = commit.step
        self.words[24] = _pack(commit)

    @property
    def commit(self) -> Commit | None:
        return _unpack(self.words[12])

    @property
    def commit_at(self) -> float:
        return self.floats[13]

    def committed(self, commit: Commit, at: float | None = None) -> None:
        self.floats[13] = time.time() if at is None else at
        self.words[12] = _pack(commit)

    @property
    def loss(self) -> float | None:
        value = self.floats[16]
        return None if math.isnan(value) else value

    @loss.setter
    def loss(self, value: float | None) -> None:
        self.floats[16] = math.nan if value is None else value

    @property
    def first_step_at(self) -> float:
        return self.floats[23]

    @property
    def restored(self) -> Commit | None:
        return _unpack(self.words[24])


def _pack(commit: Commit) -> int:
    # + 1: a word of zero means "none", and (0, 0) is a checkpoint like any other.
    return (commit.gen << _STEP_BITS | commit.step) + 1


def _unpack(word: int) -> Commit | None:
    if word == 0:
        return None
    gen, step = divmod(word - 1, 1 << _STEP_BITS)
    return Commit(gen, step)


@dataclass(frozen=True)
class Result:
    """``result.json``: how a generation ended on this node, written before local rank 0 exits."""

    outcome: Literal["stopped", "done"]
    gen: int
    step: int
    commit: Commit | None  # newest durable checkpoint of this node


def write_result(run: Path | str, result: Result) -> None:
    """Write ``result.json`` into the run folder, whole or not at all."""
    path = Path(run) / RESULT
    commit = None if result.commit is None else [result.commit.gen, result.commit.step]
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    temporary.write_text(json.dumps(asdict(result) | {"commit": commit}) + "\n")
    temporary.replace(path)


def read_result(run: Path | str) -> Result | None:
    """What the job left, or None where it left nothing that makes sense (it was killed)."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        raw = json.loads((Path(run) / RESULT).read_bytes())
        commit = None if raw["commit"] is None else Commit(*map(_count, raw["commit"]))
        if raw["outcome"] in ("stopped", "done"):
            return Result(raw["outcome"], _count(raw["gen"]), _count(raw["step"]), commit)
    return None


def _count(value: object) -> int:
    """Anybody's number: one that is none would end the agent, or make a fact that nobody takes. Raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << _STEP_BITS:
        raise ValueError(f"{value!r:.40} is no count")
    return value
