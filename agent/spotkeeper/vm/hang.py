"""Whether a generation hangs on this machine, by what its control file and its processes show; and where it stands.

In the training loop a hang is a step that takes many times the usual one; who is seen to work meanwhile has longer.
Outside it (imports, the first step, what follows the loop) nobody knows how long things take: there it is processes
that use no processor time for an hour.
Reads files and ``/proc`` and has stacks written (``launcher/stacks.py``); whether anything is ended, reconcile decides.
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
from spotkeeper.spec import codec
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import DocState, HangRun
from spotkeeper.spec.hang import Answer, Hung, Word
from spotkeeper.train import untimed
from spotkeeper.train.control import Control, State
from spotkeeper.vm.launch import LaunchError
from spotkeeper.vm.launcher import stacks
from spotkeeper.vm.report import MOST
from spotkeeper.vm.standing import Standing
from spotkeeper.vm.supervisor import Child, Supervisor

FLOOR_S = 10.0  # real, where a virtual minute is shorter: a busy machine may stand still for seconds
IDLE_FLOOR_S = 60.0  # real, likewise
BUSY_SHARE = 0.01  # of a core: who uses less does nothing but look whether there is something to do
SAMPLES = 20  # of processor time, until its lack counts
STACKS_S = 20.0  # real, for all stacks of a machine
STALE_S = 120.0  # real; older stacks are no answer to a roll call
_OVER = (State.STOPPING, State.STOPPED)  # it ends, and has its time to do so


@dataclass
class Watch:
    """Of one generation. ``now`` everywhere: monotonic real seconds.

    The job writes the time of a step by a clock that anybody may set; only that it changes counts.
    """

    limits: HangRun
    scale: float
    mark: tuple[State, float] = (State.STARTING, 0.0)  # of the control file, when it last changed
    since: float | None = None  # when it was first seen so, or last cleared
    used_s: float = 0.0  # processor time, when it was last seen to have been used
    idle_since: float | None = None
    sampled: float = 0.0

    def hangs_since(self, control: Control, folder: Path, now: float) -> float | None:
        """Since when it hangs; None: it does not, as far as can be told."""
        mark = (control.state, control.step_at)
        if mark != self.mark or self.since is None or untimed.sections(folder):
            self.mark, self.since, self.idle_since = mark, now, None
            return None
        if control.state in _OVER:
            return None
        if in_loop(control):
            return self.since if now - self.since > self.step_limit_s(control.step_s) else None
        return self._idle(folder, now)

    def step_limit_s(self, step_s: float) -> float:
        """Real seconds that a step may take."""
        return max(self._real(self.limits.floor_s, FLOOR_S), self.limits.factor * step_s)

    def may_work(self, now: float) -> bool:
        """Whether who is seen to work is still believed."""
        return self.since is None or now - self.since <= self.idle_limit_s

    @property
    def idle_limit_s(self) -> float:
        return self._real(self.limits.idle_s, IDLE_FLOOR_S)

    def _idle(self, folder: Path, now: float) -> float | None:
        """Looked at now and then only: it reads all of ``/proc``."""
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
    """Whether a step is awaited, of which the time that it usually takes is known."""
    return control.state is State.TRAINING and control.first_step_at > 0


def processor_s(folder: Path) -> float:
    """Seconds of processor time that a generation's workers and all below them have used, those that ended included."""
    workers = set(stacks.workers_of(folder).values())
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - no Path per process
        if name.isdigit() and (fields := stacks.stat_of(int(name))):
            parents[int(name)] = int(fields[1])
            used[int(name)] = stacks.processor_s(int(name))
    mine = (pid for pid in used if pid in workers or workers.intersection(stacks.above(pid, parents)))
    return sum(used[pid] for pid in mine)


class _Place(Struct, frozen=True):
    """As ``stacks.Place``: written by the job's Python."""

    local_rank: int
    where: stacks.Where


_WORDS = {
    stacks.Where.WORKS: Word.BUSY,
    stacks.Where.ELSEWHERE: Word.ELSEWHERE,
    stacks.Where.SILENT: Word.SILENT,
    stacks.Where.DEVICE: Word.DEVICE,
    stacks.Where.WAITS: Word.WAITS,
}


def read_places(file: Path, *, may_work: bool) -> tuple[Word, int]:
    """The worker that matters most, of those that have not ended. ``may_work``: else who works hangs in a loop."""
    places: tuple[_Place, ...] = ()
    with contextlib.suppress(OSError, msgspec.DecodeError):
        places = codec.decode(file.read_bytes(), tuple[_Place, ...])
    order = list(Word)
    words = _WORDS if may_work else _WORDS | {stacks.Where.WORKS: Word.ELSEWHERE}
    found = [(words[place.where], place.local_rank) for place in places if place.where in words]
    return min(found, key=lambda one: (order.index(one[0]), one[1]), default=(Word.UNKNOWN, 0))


class Asked(Enum):
    """Of the stacks of one standstill: NO -> (the launcher is asked) WAITING -> HAD. A new step: NO."""

    NO = 0
    WAITING = 1
    HAD = 2


@dataclass
class _Dump:
    mark: tuple[State, float]  # of the standstill
    by: float  # monotonic: later nobody waits for it
    before: int  # when the file was written that is there already, 0: none
    made: float  # monotonic
    asked: Asked = Asked.WAITING


@dataclass
class HangWatch:
    """Says a hang, has the stacks written, and answers where the workers are. For the loop's thread."""

    me: Standing
    supervisor: Supervisor
    clock: Clock
    _watch: tuple[int, Watch] | None = None  # of which generation
    _dump: _Dump | None = None
    _said: tuple[State, float] | None = None  # of which standstill
    _answered: int = 0  # the newest document that was answered

    def go_on(self) -> None:
        """Look, and take the next step; called as often as the loop turns."""
        child, run = self.supervisor.child, self.me.saved.run
        if child is None or child.stop is not None or child.discarded or run is None or run.hang is None:
            self._watch = self._dump = self._said = None
            return
        if self._watch is None or self._watch[0] != child.gen:
            self._watch, self._dump, self._said = (child.gen, Watch(run.hang, self.clock.scale)), None, None
        now = time.monotonic()
        since = self._watch[1].hangs_since(child.control, child.folder, now)
        if since is not None:
            self._tell(child, since, now)
        self._answer(child, now, hangs=since is not None)

    @property
    def waits(self) -> bool:
        """Whether stacks are on their way: the loop looks often then."""
        return self._dump is not None and self._dump.asked is Asked.WAITING

    def _tell(self, child: Child, since: float, now: float) -> None:
        if self._said != _mark(child):
            self._said = _mark(child)
            at = int(self.clock.now() - (now - since) * self.clock.scale)
            self.me.log("job.hangs", gen=child.gen, step=child.control.step, for_s=round(now - since, 1))
            self.me.say(Kind.HUNG, str(Hung(min(child.control.step, MOST), at)), gen=child.gen)
        self._stacks(child, now)

    def _stacks(self, child: Child, now: float) -> bool:
        """Whether the stacks of this standstill are there, or will not come. Has them written where nobody has yet."""
        file, had = child.folder / stacks.SHORT, self._dump
        if had is None or had.mark != _mark(child) or (now - had.made > STALE_S and had.asked is Asked.HAD):
            self._dump = _Dump(_mark(child), now + STACKS_S, _written(file), now)
            try:
                self.supervisor.show_stacks()
            except LaunchError as error:
                self.me.log("job.stacks.failed", gen=child.gen, error=str(error))
                self._dump.by = now
        assert self._dump is not None
        if self._dump.asked is Asked.WAITING and (_written(file) != self._dump.before or now >= self._dump.by):
            self._dump.asked = Asked.HAD
        return self._dump.asked is Asked.HAD

    def _answer(self, child: Child, now: float, *, hangs: bool) -> None:
        """To a roll call for a hang, which another machine may have told of."""
        doc = self.me.doc
        if doc is None or not doc.stacks or doc.state is not DocState.ROLL_CALL or doc.gen != child.gen:
            return
        if doc.ver <= self._answered:
            return
        if not hangs and not self._stands_still(child, now):
            word, local_rank = Word.BUSY, 0
        elif self._stacks(child, now):
            fresh = self._dump is not None and _written(child.folder / stacks.SHORT) != self._dump.before
            may_work = self._watch is None or self._watch[1].may_work(now)
            places = read_places(child.folder / stacks.SHORT, may_work=may_work)
            word, local_rank = places if fresh else (Word.UNKNOWN, 0)
        else:
            return
        self._answered = doc.ver
        self.me.log("job.stacks", gen=child.gen, word=word.value, local_rank=local_rank)
        self.me.say(Kind.STACKS, str(Answer(doc.ver, word, local_rank)), gen=child.gen)

    def _stands_still(self, child: Child, now: float) -> bool:
        """Whether a step is awaited here as well, and for long already: it may be a little less than elsewhere."""
        if self._watch is None or untimed.sections(child.folder) or not in_loop(child.control):
            return False
        watch = self._watch[1]
        return watch.since is not None and now - watch.since > 0.5 * watch.step_limit_s(child.control.step_s)


def _mark(child: Child) -> tuple[State, float]:
    return child.control.state, child.control.step_at


def _written(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0
