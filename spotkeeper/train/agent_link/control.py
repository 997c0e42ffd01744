"""The control file: 320 bytes through which an agent and the job on its machine communicate.

The agent writes its request and deadline; local rank 0 of the job writes its progress. Both write single aligned 8-byte
words in place, so a reader never sees half a number. The job maps the file and the agent uses a descriptor, so that a
job cannot kill its agent (``control_io.py``). Neither ever replaces the file: the other would not notice, and go on
with the old file.

Also here: ``result.json``, the outcome of a generation, and the marker files of *untimed sections*, during which the
agent does not look for hangs. Standard library only.

==== ============== =============================================================
 at   word           meaning
==== ============== =============================================================
   0  magic          ``SKCTL`` and the version of this layout
   8  requested      ``AgentRequest``, written after ``deadline``
  16  deadline       of the request, real unix seconds (0: none)
  24  request_number written last; a new number is a new request
  32  disk_ready     1 once the disk is mounted, if the node began without its disk
  40  metrics_stored number of the newest ``metrics.json`` in the bucket (0: none)
  64  state          ``RunPhase``
  72  step           optimizer steps done
  80  step_at        end of the last step, real unix seconds
  88  step_s         median duration of recent steps, seconds
  96  commit         newest durable checkpoint of this node (generation, step)
 104  commit_at      when ``commit`` became durable, real unix seconds
 112  save_s         median time from a save's start until the checkpoint is durable, seconds
 120  stall_s        median time that a save stops the loop, seconds
 128  loss           last reported loss (NaN: none)
 136  samples_per_s  of all ranks together
 144  total_steps    optimizer steps at the run's end (0: unknown)
 152  fault          ``Fault`` of the last save
 160  answered       highest request number whose save is durable
 168  interval_s     seconds between saves: from the job file, or computed (``SavePace``)
 176  pid            of local rank 0
 184  first_step_at  end of this generation's first step, real unix seconds (0: not yet)
 192  restored       checkpoint this generation started from (generation, step)
 200  lag            this node's *own time* as a multiple of the median rank's (0: it keeps up): the time of a step
                     without the wait for other ranks (``loop/lag.py``)
 208  sample_s       this node's own time per sample, seconds (0: not measured)
 216  gbit_s         bandwidth between the gang's machines, Gbit/s (0: not measured)
 224  met_at         when all ranks of this generation had met, real unix seconds (0: not yet)
 232  restored_at    when the state was loaded, real unix seconds (0: not yet)
 240  restored_bytes size of the checkpoint this generation started from (0: none)
 248  metrics_file   number of the newest ``metrics.json`` in the run folder (0: none), written after the file
 256  image_steps    steps between the two newest images of the state (0: fewer than two images)
 264  image_share    share of the training time that images cost
==== ============== =============================================================
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal, get_args

from spotkeeper.train.agent_link.control_io import (
    EnumWord,
    FileWords,
    FloatWord,
    HasWords,
    IntWord,
    SecondsWord,
    WordArray,
)
from spotkeeper.train.core import beneath

SIZE = 320
MAGIC = int.from_bytes(b"SKCTL\0\0\2", "little")
NAME = "ctl"
RESULT = "result.json"
METRICS = "metrics.json"  # in the run folder, made by ``loop/metrics.py``
UNTIMED = "untimed"  # name of a marker file in the run folder, before ".<local rank>"
_RESULT_BYTES = 64 << 10
NO_RESTART = 93  # exit code: "a restart cannot help"

_STEP_BITS = 40  # of a (generation, step) pair; 2^24 generations, 10^12 steps


class AgentRequest(IntEnum):
    """A request of the agent to the job. SAVE can come several times in a generation; the job exits after SAVE_STOP."""

    NONE = 0
    SAVE = 1  # save in the background, continue training
    SAVE_STOP = 2  # save, wait until durable, exit


class RunPhase(IntEnum):
    """Phase of the job on this node.

    ========= ======================== ===========================================
    from      to                       on
    ========= ======================== ===========================================
    STARTING  RESTORING                ``attach()``
    RESTORING TRAINING                 state loaded, or a new run
    TRAINING  STOPPING                 all ranks agreed to stop
    TRAINING  FINISHING                the loop ended, or the script left it by `break`
    STOPPING  STOPPED                  final save durable, or failed (``fault``)
    FINISHING DONE                     final save durable, or failed (``fault``)
    STOPPING  REACHED                  a trial of a search has saved after its rung's step
    ========= ======================== ===========================================
    """

    STARTING = 0
    RESTORING = 1
    TRAINING = 2
    STOPPING = 3
    STOPPED = 4
    FINISHING = 5
    DONE = 6
    REACHED = 7


class Fault(IntEnum):
    """The reason why the last save failed. Training continues and the older checkpoint stays."""

    NONE = 0
    DISK_FULL = 1
    SAVER_LOST = 2  # no saver answers
    WRITE_FAILED = 3  # any other error of the disk
    FENCED = 4  # a newer generation uses the folder
    NO_MEMORY = 5  # no memory to copy the state into


@dataclass(frozen=True, order=True)
class Commit:
    """Identity of a checkpoint. Commits sort by age: a commit of a later generation is always newer."""

    gen: int
    step: int

    def __str__(self) -> str:
        return f"{self.gen}-{self.step}"

    @classmethod
    def parse(cls, text: str) -> Commit | None:
        """Parse ``<gen>-<step>``; None for other text."""
        gen, dash, step = text.partition("-")
        if not dash or not all(part.isascii() and part.isdigit() for part in (gen, step)):
            return None
        commit = cls(int(gen), int(step))
        return commit if str(commit) == text else None  # "007-5" is not a checkpoint's name


class CommitWord(IntWord):
    """A commit as one word: 0 means "no commit", so every commit, even (0, 0), is its packed numbers plus 1."""

    def __get__(self, of: HasWords, _: type[HasWords]) -> Commit | None:  # type: ignore[override]
        word = of.words[self.at]
        return Commit(*divmod(word - 1, 1 << _STEP_BITS)) if word else None

    def __set__(self, of: HasWords, commit: Commit | None) -> None:  # type: ignore[override]
        of.words[self.at] = (commit.gen << _STEP_BITS | commit.step) + 1 if commit else 0


class ControlError(Exception):
    """The file is not a control file of this version."""


class Control:
    """A control file. Needs no locks, because every word has one writer."""

    def __init__(self, path: Path, words: WordArray[int], floats: WordArray[float], hold: mmap.mmap | int) -> None:
        """``hold``: the memory mapping or file descriptor behind ``words``, which :meth:`close` closes."""
        self.path = path
        self.words = words
        self.floats = floats
        self._hold = hold

    @classmethod
    def create(cls, path: Path | str) -> Control:
        """Create the file for the agent and keep it open; an old file is overwritten in place.

        Raises:
            OSError: the folder is missing, not writable, or full.
        """
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            os.ftruncate(fd, SIZE)
            os.posix_fallocate(
                fd, 0, SIZE
            )  # fails here if /run is full; otherwise the job's first write to a hole would raise SIGBUS
            os.pwrite(fd, bytes(SIZE), 0)
        except OSError:
            os.close(fd)
            raise
        return cls._from_fd(path, fd)._new()

    @classmethod
    def hold(cls, path: Path | str) -> Control:
        """Open the file that an earlier process of the agent made, so that the agent can go on with the generation.

        If the job has deleted or damaged the file, return an empty file in memory; :meth:`trouble` says what happened.
        """
        path = Path(path)
        with contextlib.suppress(OSError):
            control = cls._from_fd(path, beneath.open_file(path.parent, path.name, os.O_RDWR))
            if not control._other():
                return control
            control.close()
        return cls._from_fd(path, os.memfd_create(path.name, os.MFD_CLOEXEC))

    @classmethod
    def open(cls, path: Path | str) -> Control:
        """Map an existing file for the job.

        Raises:
            ControlError: the file is missing, or has another size or version.
        """
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ControlError(f"{path}: no control file; the agent creates it before it starts the job") from None
        try:
            if (size := os.fstat(fd).st_size) != SIZE:
                raise ControlError(f"{path} is not a control file: it has {size} bytes, not {SIZE}")
            control = cls._mapped(path, mmap.mmap(fd, SIZE))
        finally:
            os.close(fd)
        if found := control._other():
            control.close()
            raise ControlError(f"{path} {found}: agent and library have different versions")
        return control

    @classmethod
    def private(cls) -> Control:
        """Return a control file that only this process sees, for a run without an agent."""
        return cls._mapped(Path("-"), mmap.mmap(-1, SIZE))._new()

    @classmethod
    def _from_fd(cls, path: Path, fd: int) -> Control:
        return cls(path, FileWords(fd, int), FileWords(fd, float), fd)

    @classmethod
    def _mapped(cls, path: Path, buffer: mmap.mmap) -> Control:
        return cls(path, memoryview(buffer).cast("Q"), memoryview(buffer).cast("d"), buffer)

    def _new(self) -> Control:
        self.loss = None
        self.words[0] = MAGIC
        return self

    def _other(self) -> str:
        """Return "" for a control file of this version; otherwise "starts with <first 8 bytes>", for a message."""
        found = self.words[0]
        return "" if found == MAGIC else f"starts with {found.to_bytes(8, 'little')!r}"

    def trouble(self) -> str:
        """Return how the job has damaged the file that the agent has open; "" if the file is intact."""
        if not isinstance(self._hold, int):
            return ""
        about = os.fstat(self._hold)
        if about.st_nlink == 0:  # deleted, or the stand-in of ``hold``
            return f"{self.path} is gone: the job has deleted, emptied or replaced the file"
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

    def request(self, want: AgentRequest, deadline: float = 0.0) -> int:
        """Write a request with its deadline (real unix seconds, 0: none); return the request's number."""
        self.floats[2] = deadline
        self.words[1] = int(want)
        number = (self.words[3] + 1) % (1 << 64)  # the job may have written any value
        self.words[3] = number  # last: a reader of the number sees its request
        return number

    requested = EnumWord(1, AgentRequest, AgentRequest.NONE)
    deadline = SecondsWord(2)
    request_number = IntWord(3)
    disk_ready = IntWord(4)
    metrics_stored = IntWord(5)

    # job -> agent

    state = EnumWord(8, RunPhase, RunPhase.STARTING)
    step = IntWord(9)
    step_at = FloatWord(10)
    step_s = SecondsWord(11)
    commit = CommitWord(12)
    commit_at = FloatWord(13)
    save_s = SecondsWord(14)
    stall_s = SecondsWord(15)
    samples_per_s = FloatWord(17)
    total_steps = IntWord(18)
    fault = EnumWord(19, Fault, Fault.WRITE_FAILED)
    answered = IntWord(20)
    interval_s = SecondsWord(21)
    pid = IntWord(22)
    first_step_at = FloatWord(23)
    restored = CommitWord(24)
    lag = FloatWord(25)
    sample_s = SecondsWord(26)
    gbit_s = FloatWord(27)
    met_at = FloatWord(28)
    restored_at = FloatWord(29)
    restored_bytes = IntWord(30)
    metrics_file = IntWord(31)
    image_steps = IntWord(32)
    image_share = FloatWord(33)

    def stepped(self, step: int, at: float | None = None) -> None:
        """Write the step, then its time, so that a reader of the new time sees the new step."""
        now = time.time() if at is None else at
        self.step = step
        if not self.first_step_at:
            self.first_step_at = now
        self.step_at = now

    def resumed(self, commit: Commit, size: int = 0) -> None:
        """Record that the state of ``commit`` (``size`` bytes) is loaded and this generation has done no step yet."""
        self.step, self.restored, self.restored_bytes = commit.step, commit, size

    def committed(self, commit: Commit, at: float | None = None) -> None:
        self.commit_at = time.time() if at is None else at
        self.commit = commit

    @property
    def loss(self) -> float | None:
        value = self.floats[16]
        return None if math.isnan(value) else value

    @loss.setter
    def loss(self, value: float | None) -> None:
        self.floats[16] = math.nan if value is None else value


Outcome = Literal["stopped", "done", "reached"]  # "reached": a trial has trained up to its rung (``RunPhase.REACHED``)


@dataclass(frozen=True)
class RunResult:
    """The content of ``result.json``: a generation's outcome on this node. Local rank 0 writes it before it exits."""

    outcome: Outcome
    gen: int
    step: int
    commit: Commit | None  # newest durable checkpoint of this node
    value: float | None = None  # a trial's metric, on the node of rank 0; None: no number was reported


def write_result(run: Path | str, result: RunResult) -> None:
    """Write ``result.json`` into the run folder, atomically."""
    path = Path(run) / RESULT
    commit = None if result.commit is None else [result.commit.gen, result.commit.step]
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    temporary.write_text(json.dumps(asdict(result) | {"commit": commit}) + "\n")
    temporary.replace(path)


def read_result(run: Path | str) -> RunResult | None:
    """Read ``result.json``; None if it is missing or invalid, as after a kill."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        raw = json.loads(beneath.read(run, RESULT, _RESULT_BYTES))
        commit = None if raw["commit"] is None else Commit(*map(_count, raw["commit"]))
        value = raw.get("value")
        if raw["outcome"] in get_args(Outcome):
            number = float(value) if type(value) in (int, float) and math.isfinite(value) else None
            return RunResult(raw["outcome"], _count(raw["gen"]), _count(raw["step"]), commit, number)
    return None


def _count(value: object) -> int:
    """Check a number that the job wrote, so that the agent does not crash on it. Raises ValueError if it is invalid."""
    if type(value) is not int or not 0 <= value < 1 << _STEP_BITS:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


@contextlib.contextmanager
def untimed_section(run: Path | None, local_rank: int) -> Iterator[None]:
    """Turn off hang detection until the ``with`` block ends; of nested blocks, until the outermost one ends.

    ``run``: the generation's run folder; None without an agent: no hang detection then exists.
    """
    if run is None:
        yield
        return
    file = run / f"{UNTIMED}.{local_rank}"
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except OSError:  # nested, or the folder is not writable, which must not fail the job
        yield
        return
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def in_untimed_section(run: Path) -> bool:
    """Whether any process of this machine is in an untimed section."""
    with contextlib.suppress(OSError):
        return any(name.startswith(UNTIMED + ".") for name in beneath.names(run))
    return False
