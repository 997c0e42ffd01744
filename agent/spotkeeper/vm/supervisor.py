"""One generation on this machine: started from the document, stopped in order, and nothing of it left.

The order of a stop: the control file says what and by when -> the job saves, writes
``result.json`` and exits -> SIGTERM to torchrun -> SIGKILL to all of the generation. A
step is only taken when the one before had its time. This file judges no generation: the
loop says what to run and when to stop; what it is started with is in ``recipe.py``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from spotkeeper.spec.failure import Failure
from spotkeeper.spec.generation import Generation, JobRun
from spotkeeper.train.control import (
    NAME,
    NO_RESTART,
    Commit,
    Control,
    Result,
    State,
    Want,
    read_result,
)
from spotkeeper.train.store import scan
from spotkeeper.vm.failures import exit_codes, first
from spotkeeper.vm.jobhost import sweep
from spotkeeper.vm.launch import Launcher, LaunchError
from spotkeeper.vm.log import Log
from spotkeeper.vm.logs import LAUNCHER_LOG
from spotkeeper.vm.recipe import Node, environment, torchrun_args

TERM_S = 1.0  # real; at most so long before the deadline comes SIGTERM (a fifth of the time, if that is less)
LINGER_S = 2.0  # real; torchrun waits minutes for peers that will not come; its workers are done
DONE_LINGER_S = 15.0  # real; the same at a job's own end, where peers may be a step behind
UNATTACHED_S = 15.0  # real; imports take seconds
SWEEP_S = 2.0  # real; for SIGKILL to take effect
KEPT_RUNS = 3  # folders of old generations, for their logs


class Stop(Enum):
    """How far a stop has come: ASKED -> TERMED -> KILLED; each but the first has a time by which it comes."""

    ASKED = 1
    TERMED = 2
    KILLED = 3


@dataclass
class Child:
    """A generation that runs here. Times are real seconds (``time.monotonic``): of two clocks, the one nobody sets."""

    gen: int
    folder: Path
    nproc: int
    grace_s: float
    control: Control
    stop: Stop | None = None
    saving: bool = False  # a save-and-stop was asked for, so its end is a release
    discarded: bool = False  # given up for a newer generation: nobody waits for its end
    term_at: float = 0.0  # SIGTERM, if it has not ended by then
    kill_at: float = 0.0  # SIGKILL
    workers_done: float | None = None
    began: float = field(default_factory=time.monotonic)
    signals: bool = False  # it saves by itself when SIGTERM comes
    ckpt: Path | None = None  # where to look whether it begins anew; None: it has been told, or nothing to tell
    spoilt: bool = False  # its control file, by its own doing; it has been told

    @property
    def need_s(self) -> float:
        """From the word to its end: what saves took, or what a script that saves by itself was given."""
        if self.signals and self.control.state is State.STARTING:
            return self.grace_s
        return 1.5 * self.control.save_s + 2 * self.control.step_s


@dataclass(frozen=True)
class Ending:
    """How a generation ended here. ``code`` as a shell shows it; ``result``: what the job wrote, if anything."""

    gen: int
    code: int
    asked: bool
    discarded: bool
    result: Result | None
    commit: Commit | None
    failure: Failure | None = None  # of its worker that failed first

    @property
    def well(self) -> bool:
        """The job is through, as far as this machine can say."""
        return self.code == 0 and not self.stopped and not self.discarded

    @property
    def stopped(self) -> bool:
        """It ended in a save-and-stop: asked for here, or agreed with a peer that was asked first.

        Exit 93 is the job's word whenever it comes: the next generation must not begin.
        """
        if self.code == NO_RESTART:
            return False
        if self.result is not None:
            return self.result.outcome == "stopped"
        return self.asked


class Supervisor:
    """At most one child. All methods are for the loop's thread and return at once."""

    def __init__(self, run: Path, templates: Path, launcher: Launcher, log: Log) -> None:
        self._run = run
        self._templates = templates
        self._launcher = launcher
        self._log = log
        self.child: Child | None = None

    def folder(self, job: str, gen: int) -> Path:
        return self._run / job / str(gen)

    def start(self, doc: Generation, run: JobRun, node: Node) -> None:
        """Start this generation.

        Raises:
            LaunchError: the launcher refused.
            RenderError: the template of torchrun's arguments is wrong.
        """
        folder = self.folder(doc.job, doc.gen)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "logs").mkdir(parents=True)
        args = torchrun_args(self._templates, doc, run, node, folder)
        control = Control.create(folder / NAME)
        try:
            env = {**node.given, **environment(doc, run, node, folder)}
            self._launcher.start(doc.gen, args, env, node.source, folder / LAUNCHER_LOG)
        except LaunchError:
            control.close()
            raise
        signals = run.stop == "signal"
        anew = node.ckpt if doc.gen > 1 and not signals else None
        self.child = Child(doc.gen, folder, run.nproc, run.grace_s, control, signals=signals, ckpt=anew)
        self._log("job.start", gen=doc.gen, members=len(doc.members), index=node.index, disk=not node.late)
        self._forget_old(folder)

    def adopt(self, job: str, gen: int, run: JobRun) -> None:
        """Take over a child that an agent before this one started."""
        folder = self.folder(job, gen)
        control = Control.hold(folder / NAME)
        self.child = Child(gen, folder, run.nproc, run.grace_s, control, signals=run.stop == "signal")
        if control.want is Want.SAVE_STOP:
            self._asked(self.child, time.monotonic() + control.deadline - time.time() + TERM_S)
        self._log("job.adopt", gen=gen)

    def save(self) -> None:
        """Ask for a save; training goes on."""
        if self.child is not None and self.child.stop is None:
            self.child.control.request(Want.SAVE)

    def save_and_stop(self, deadline: float | None) -> None:
        """Ask the job to save and exit by ``deadline`` (real unix seconds; None: its grace period).

        Asking again only brings the deadline nearer.
        """
        child = self.child
        if child is None or child.stop is Stop.KILLED:
            return
        now, wall = time.monotonic(), time.time()
        until = now + (child.grace_s if deadline is None else deadline - wall)
        if child.saving and until >= child.kill_at - 0.5:
            return
        self._asked(child, until)
        child.control.request(Want.SAVE_STOP, wall + child.term_at - now)
        self._log("job.save_stop", gen=child.gen, step=child.control.step, within_s=round(until - now, 2))

    def _asked(self, child: Child, until: float) -> None:
        """The job's own deadline is that of SIGTERM, a little before the end, so that SIGTERM can still do good."""
        child.saving = True
        child.kill_at = until
        child.term_at = until - min(TERM_S, 0.2 * max(0.0, until - time.monotonic()))
        child.stop = child.stop or Stop.ASKED

    def show_stacks(self) -> None:
        """Have its processes' stacks written into its folder. Raises LaunchError where nobody can be asked."""
        if self.child is not None:
            self._launcher.stacks(self.child.gen)

    def discard(self) -> None:
        """End the child now; what it has not saved is lost, and how it ends is of no interest."""
        if self.child is not None and not self.child.discarded:
            self.child.discarded = True
            self._kill(self.child)

    def _kill(self, child: Child) -> None:
        child.stop = Stop.KILLED
        with contextlib.suppress(LaunchError):  # it has ended, or the launcher has: an event says so
            self._launcher.kill(child.gen)

    def tick(self) -> None:
        """Take the next step of a stop whose time has come."""
        child = self.child
        if child is None or child.stop is Stop.KILLED:
            return
        now = time.monotonic()
        self._tell_trouble(child)
        self._tell_unattached(child, now)
        if self._workers_done(child, now):
            self._kill(child)
        elif child.stop is Stop.ASKED and (now >= child.term_at or child.control.state is State.STARTING):
            # Before attach() nobody listens, and there is nothing to save: a handler of the user's may.
            self._log("job.term", gen=child.gen, state=child.control.state.name)
            child.stop = Stop.TERMED
            child.kill_at = min(child.kill_at, now + max(TERM_S, child.grace_s))
            with contextlib.suppress(LaunchError):
                self._launcher.signal(child.gen, signal.SIGTERM)
        elif child.stop is Stop.TERMED and now >= child.kill_at:
            self._log("job.kill", gen=child.gen)
            self._kill(child)

    def next_tick_s(self) -> float | None:
        """Real seconds until :meth:`tick` has something to look at; None: nothing is under way."""
        return None if self.child is None or self.child.stop is None else 0.05

    def ended(self, gen: int, code: int) -> Ending | None:
        """The launcher says that a generation is gone: what became of it. None: it was not ours any more."""
        child = self.child
        if child is None or child.gen != gen:
            return None
        self._tell_trouble(child)
        ending = self._ending(child, code)
        self.child = None
        child.control.close()
        # The launcher has ended its own; what left its tree is found by its mark.
        swept = self.sweep()
        self._log("job.end", gen=gen, code=ending.code, stopped=ending.stopped, swept=swept)
        return ending

    def sweep(self) -> int:
        """End everything that bears this node's mark but the launcher, and wait until it is gone."""
        found, until = 0, time.monotonic() + SWEEP_S
        while (count := sweep(self._run, {os.getpid(), self._launcher.pid})) and time.monotonic() < until:
            found = max(found, count)
            time.sleep(0.01)
        return found

    def _ending(self, child: Child, code: int) -> Ending:
        result = read_result(child.folder)
        if result is not None and result.gen != child.gen:
            result = None
        if result is None and child.control.state is State.STOPPED:  # on a full /run the control file alone says so
            result = Result("stopped", child.gen, child.control.step, child.control.commit)
        codes = exit_codes(child.folder)
        if NO_RESTART in codes:
            code = NO_RESTART
        elif child.stop is Stop.KILLED and len(codes) == child.nproc:
            code = max(codes)  # its workers had ended by themselves; only torchrun was killed
        commit = child.control.commit if result is None else result.commit
        return Ending(child.gen, code, child.saving, child.discarded, result, commit, first(child.folder))

    def _tell_unattached(self, child: Child, now: float) -> None:
        """Once, in the job's log: a generation after the first, of which neither a checkpoint nor ``attach()`` is seen.

        Else a script without the library begins anew after every loss, for as long as its user pays for it.
        """
        if child.ckpt is None or now - child.began < UNATTACHED_S:
            return
        ckpt, child.ckpt = child.ckpt, None
        if child.control.state is not State.STARTING or scan(ckpt):
            return
        self._log("job.unattached", gen=child.gen)
        self._tell_job(
            child,
            f"no checkpoint is here, and generation {child.gen} has not called spotkeeper.attach() within "
            f"{UNATTACHED_S:.0f} s. A script that never does begins anew after every loss: "
            'docs/train.md, "The script"',
        )

    def _tell_trouble(self, child: Child) -> None:
        """Once, here and in the job's log: that something of the job's has spoilt its control file.

        What cannot be read there counts as not said: a stop finds a job that has not begun, and comes as SIGTERM.
        """
        if child.spoilt or not (trouble := child.control.trouble()):
            return
        child.spoilt = True
        self._log("job.control", gen=child.gen, error=trouble)
        self._tell_job(
            child,
            f"{trouble}. It is the agent's, and the job's library's; something else in this job wrote there. "
            "Training goes on, but its progress may not be seen, and a stop may come as SIGTERM alone",
        )

    def _tell_job(self, child: Child, words: str) -> None:
        with contextlib.suppress(OSError), (child.folder / LAUNCHER_LOG).open("a") as log:
            log.write(f"spotkeeper: {words}\n")

    def _workers_done(self, child: Child, now: float) -> bool:
        """Whether all workers have left and torchrun has had its time."""
        if len(exit_codes(child.folder)) < child.nproc:
            return False
        child.workers_done = child.workers_done or now
        result = read_result(child.folder)
        stopped = child.saving or (result is not None and result.outcome == "stopped")
        return now - child.workers_done > (LINGER_S if stopped else DONE_LINGER_S)

    def _forget_old(self, folder: Path) -> None:
        """Keep the last few generations' folders."""
        old = [path for path in folder.parent.iterdir() if path.name.isdigit() and int(path.name) < int(folder.name)]
        for path in sorted(old, key=lambda path: int(path.name))[: -KEPT_RUNS + 1]:
            shutil.rmtree(path, ignore_errors=True)
