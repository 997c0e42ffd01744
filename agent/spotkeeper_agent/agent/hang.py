"""Detects a generation that hangs on this machine, and reports which code its workers are in.

In the training loop, a step that takes many times the usual time is a hang; a worker that visibly works gets more time.
Outside the training loop (imports, the first step, code after the loop) durations are unknown, so there an hour without
processor time is a hang. This module reads files and ``/proc`` and requests stack traces (``launcher/stacks.py``);
the function decides which machines to restart.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper.contract.facts import Hung, Kind, StacksAnswer, WorkerState
from spotkeeper.contract.generation import DocState, HangRun
from spotkeeper.train.agent_link.control import Control, RunPhase, in_untimed_section
from spotkeeper.train.core import beneath
from spotkeeper_agent.core.state import MachineState
from spotkeeper_agent.job.failures import NOTE_BYTES, worker_pids
from spotkeeper_agent.job.launcher_client import LaunchError
from spotkeeper_agent.job.progress import MOST
from spotkeeper_agent.job.supervisor import Child, Supervisor
from spotkeeper_agent.launcher import stacks

FLOOR_S = 10.0  # real; lower limit where a virtual minute is shorter: a busy machine may stall for seconds
IDLE_FLOOR_S = 60.0  # real, likewise
BUSY_SHARE = 0.01  # of a core; a process that uses less merely polls
SAMPLES = 20  # samples of processor time within the idle limit
STACKS_S = 20.0  # real, for all stack traces of a machine
STALE_S = 120.0  # real; older stack traces are no answer to a roll call
_OVER = (RunPhase.STOPPING, RunPhase.STOPPED, RunPhase.REACHED)  # the run is ending, and a stop has its own deadline


@dataclass
class Watch:
    """Watches one generation for a hang. ``now`` is always monotonic real seconds.

    The control file has the wall-clock time at which the last step ended. As the wall clock can be set, a change of
    this time only shows that another step has ended; ``now`` measures for how long a step runs.
    """

    limits: HangRun
    scale: float
    mark: tuple[RunPhase, float] = (RunPhase.STARTING, 0.0)  # the control file's state and last step time
    since: float | None = None  # when the mark last changed
    used_s: float = 0.0  # processor seconds when they last increased
    idle_since: float | None = None
    sampled: float = 0.0

    def hangs_since(self, control: Control, folder: Path, now: float) -> float | None:
        """Return the monotonic time since which the generation hangs; None if it is not known to hang."""
        mark = (control.state, control.step_at)
        if mark != self.mark or self.since is None or in_untimed_section(folder):
            self.mark, self.since, self.idle_since = mark, now, None
            return None
        if control.state in _OVER:
            return None
        if in_loop(control):
            return self.since if now - self.since > self.step_limit_s(control.step_s) else None
        return self._idle(folder, now)

    def step_limit_s(self, step_s: float) -> float:
        """Return the real seconds after which a step counts as a hang. ``step_s``: the usual duration of a step."""
        return max(self._real(self.limits.floor_s, FLOOR_S), self.limits.factor * step_s)

    def may_work(self, now: float) -> bool:
        """Whether the current step or phase may still be merely slow, because it began within the idle limit."""
        return self.since is None or now - self.since <= self.idle_limit_s

    @property
    def idle_limit_s(self) -> float:
        return self._real(self.limits.idle_s, IDLE_FLOOR_S)

    def _idle(self, folder: Path, now: float) -> float | None:
        """Return the time since which the job uses no processor time, if the idle limit is over; None otherwise."""
        limit = self.idle_limit_s
        if self.idle_since is None or now - self.sampled >= limit / SAMPLES:
            self.sampled = now
            used = processor_s(folder)
            if self.idle_since is None or abs(used - self.used_s) > BUSY_SHARE * (now - self.idle_since) + 0.1:
                self.used_s, self.idle_since = used, now
        return self.idle_since if now - self.idle_since > limit else None

    def _real(self, virtual_s: float, floor_s: float) -> float:
        return max(virtual_s / self.scale, min(virtual_s, floor_s))


def in_loop(control: Control) -> bool:
    """Whether a step is under way and the usual duration of a step is known."""
    return control.state is RunPhase.TRAINING and control.first_step_at > 0


def processor_s(folder: Path) -> float:
    """Return the processor seconds of a generation's workers and descendants, including ended descendants."""
    workers = worker_pids(folder)
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - no Path per process
        if name.isdecimal() and (fields := stacks.stat_of(int(name))):
            parents[int(name)] = int(fields[1])
            used[int(name)] = stacks.processor_s(int(name))
    mine = (pid for pid in used if pid in workers or workers.intersection(stacks.above(pid, parents)))
    return sum(used[pid] for pid in mine)


class _WorkerPlace(Struct, frozen=True):
    """The two fields of a ``stacks.WorkerPlace`` that this module reads, from the file ``stacks.json``."""

    local_rank: int
    where: stacks.Where


_WORDS = {
    stacks.Where.WORKS: WorkerState.BUSY,
    stacks.Where.ELSEWHERE: WorkerState.ELSEWHERE,
    stacks.Where.SILENT: WorkerState.SILENT,
    stacks.Where.DEVICE: WorkerState.DEVICE,
    stacks.Where.WAITS: WorkerState.WAITS,
}


def read_places(file: Path, *, may_work: bool) -> tuple[WorkerState, int]:
    """Return state and local rank of the running worker whose state comes first in :class:`WorkerState`.

    Pass ``may_work=True`` while the step may still be merely slow (:meth:`Watch.may_work`): a worker that makes
    progress (``stacks.Where.WORKS``) then counts as BUSY. Otherwise it counts as ELSEWHERE, like a worker that hangs
    while its peers wait for it.
    """
    places: tuple[_WorkerPlace, ...] = ()
    with contextlib.suppress(OSError, msgspec.DecodeError):
        places = codec.decode(beneath.read(file.parent, file.name, NOTE_BYTES), tuple[_WorkerPlace, ...])
    order = list(WorkerState)
    words = _WORDS if may_work else _WORDS | {stacks.Where.WORKS: WorkerState.ELSEWHERE}
    found = [(words[place.where], place.local_rank) for place in places if place.where in words]
    return min(found, key=lambda one: (order.index(one[0]), one[1]), default=(WorkerState.UNKNOWN, 0))


class Asked(Enum):
    """The state of a request for the stack traces of this machine's workers."""

    WAITING = 1
    HAD = 2  # the stack traces have been written, or the agent no longer waits for them


@dataclass
class _Dump:
    mark: tuple[RunPhase, float]  # the generation's (see Watch) when the stack traces were requested
    by: float  # monotonic; the agent waits for the stack traces until then
    before: int  # mtime in ns of an older file of stack traces, 0 if there is none
    made: float  # monotonic; time of the request
    asked: Asked = Asked.WAITING


@dataclass
class HangWatch:
    """Reports hangs, requests stack traces, answers roll calls that ask for them. Only the agent's loop may call it."""

    machine: MachineState
    supervisor: Supervisor
    clock: Clock
    _watch: tuple[int, Watch] | None = None  # generation and its watch
    _dump: _Dump | None = None
    _reported: tuple[RunPhase, float] | None = None  # mark (see Watch) of the hang that was reported
    _answered: int = 0  # version of the newest document that was answered

    def go_on(self) -> None:
        """Check the generation and take the next step; called in every iteration of the agent's loop."""
        child, run = self.supervisor.child, self.machine.saved.run
        if child is None or child.stop is not None or child.discarded or run is None or run.hang is None:
            self._watch = self._dump = self._reported = None
            return
        if self._watch is None or self._watch[0] != child.gen:
            self._watch, self._dump, self._reported = (child.gen, Watch(run.hang, self.clock.scale)), None, None
        now = time.monotonic()
        since = self._watch[1].hangs_since(child.control, child.folder, now)
        if since is not None:
            self._tell(child, since, now)
        self._answer(child, now, hangs=since is not None)

    @property
    def waits(self) -> bool:
        """Whether requested stack traces are still missing; the agent's loop runs faster until they arrive."""
        return self._dump is not None and self._dump.asked is Asked.WAITING

    def _tell(self, child: Child, since: float, now: float) -> None:
        if self._reported != _mark(child):
            self._reported = _mark(child)
            at = int(self.clock.now() - (now - since) * self.clock.scale)
            self.machine.log("job.hangs", gen=child.gen, step=child.control.step, for_s=round(now - since, 1))
            self.machine.say(Kind.HUNG, str(Hung(min(child.control.step, MOST), at)), gen=child.gen)
        self._stacks(child, now)

    def _stacks(self, child: Child, now: float) -> bool:
        """Request stack traces, unless this step has recent ones; return True once the wait for them is over."""
        file, had = child.folder / stacks.SHORT, self._dump
        if had is None or had.mark != _mark(child) or (now - had.made > STALE_S and had.asked is Asked.HAD):
            self._dump = _Dump(_mark(child), now + STACKS_S, _written(file), now)
            try:
                self.supervisor.show_stacks()
            except LaunchError as error:
                self.machine.log("job.stacks.failed", gen=child.gen, error=str(error))
                self._dump.by = now
        assert self._dump is not None
        if self._dump.asked is Asked.WAITING and (_written(file) != self._dump.before or now >= self._dump.by):
            self._dump.asked = Asked.HAD
        return self._dump.asked is Asked.HAD

    def _answer(self, child: Child, now: float, *, hangs: bool) -> None:
        """Answer a roll call that asks for stack traces, even if only another machine has reported a hang."""
        doc = self.machine.doc
        if doc is None or not doc.stacks or doc.state is not DocState.ROLL_CALL or doc.gen != child.gen:
            return
        if doc.ver <= self._answered:
            return
        if not hangs and not self._stands_still(child, now):
            word, local_rank = WorkerState.BUSY, 0
        elif self._stacks(child, now):
            fresh = self._dump is not None and _written(child.folder / stacks.SHORT) != self._dump.before
            may_work = self._watch is None or self._watch[1].may_work(now)
            places = read_places(child.folder / stacks.SHORT, may_work=may_work)
            word, local_rank = places if fresh else (WorkerState.UNKNOWN, 0)
        else:
            return
        self._answered = doc.ver
        self.machine.log("job.stacks", gen=child.gen, word=word.value, local_rank=local_rank)
        self.machine.say(Kind.STACKS, str(StacksAnswer(doc.ver, word, local_rank)), gen=child.gen)

    def _stands_still(self, child: Child, now: float) -> bool:
        """Whether a step has taken more than half the time after which it counts as a hang.

        From then on the agent answers a roll call with the state of its workers, and no longer just with BUSY.
        """
        if self._watch is None or in_untimed_section(child.folder) or not in_loop(child.control):
            return False
        watch = self._watch[1]
        return watch.since is not None and now - watch.since > 0.5 * watch.step_limit_s(child.control.step_s)


def _mark(child: Child) -> tuple[RunPhase, float]:
    return child.control.state, child.control.step_at


def _written(file: Path) -> int:
    try:
        return beneath.status(file.parent, file.name).st_mtime_ns
    except OSError:
        return 0
