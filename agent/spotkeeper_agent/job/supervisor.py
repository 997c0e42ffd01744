"""Starts and stops one generation on this machine, and leaves none of its processes behind.

A stop has these steps: the control file requests a stop by a deadline -> the job saves, writes ``result.json`` and
exits -> SIGTERM to torchrun -> SIGKILL to the whole generation. Each step has its time; the next step follows after it.
The agent's loop decides what to run and when to stop; ``launch_spec.py`` builds arguments and environment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from spotkeeper.contract.facts import Failure, Rung
from spotkeeper.contract.generation import Generation, JobRun
from spotkeeper.train.agent_link.control import (
    NAME,
    NO_RESTART,
    AgentRequest,
    Commit,
    Control,
    Outcome,
    RunPhase,
    RunResult,
    read_result,
)
from spotkeeper.train.checkpoint.store import scan
from spotkeeper.train.core import beneath
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job.chunks import LAUNCHER_LOG
from spotkeeper_agent.job.failures import exit_codes, first
from spotkeeper_agent.job.jobhost import share, sweep
from spotkeeper_agent.job.launch_spec import LaunchSpec, environment, torchrun_args
from spotkeeper_agent.job.launcher_client import Launcher, LaunchError

TERM_S = 1.0  # real; SIGTERM comes this long before the deadline, or a fifth of the time left if that is less
LINGER_S = 2.0  # real; after its workers ended, torchrun would wait minutes for peers that do not come
DONE_LINGER_S = 15.0  # real; the same at a job's good end, when peers may be a step behind
NEED_MOST_S = 3600.0  # real; upper limit of the save time that the job reports, which may be wrong
UNATTACHED_S = 15.0  # real; imports take seconds
SWEEP_S = 2.0  # real; time for SIGKILL to take effect
KEPT_RUNS = 3  # number of generations with kept folders, for their logs

_OUTCOMES: dict[RunPhase, Outcome] = {RunPhase.STOPPED: "stopped", RunPhase.REACHED: "reached"}


class Stop(Enum):
    """Progress of a stop: ASKED, then at set times TERMED (SIGTERM was sent) and KILLED (SIGKILL was sent)."""

    ASKED = 1
    TERMED = 2
    KILLED = 3


@dataclass
class Child:
    """A generation that runs here. Times are in seconds of ``time.monotonic``."""

    gen: int
    folder: Path
    nproc: int
    grace_s: float
    control: Control
    stop: Stop | None = None
    saving: bool = False  # a save-and-stop was requested, so the end is reported as a release
    discarded: bool = False  # given up for a newer generation: its end is not reported
    term_at: float = 0.0  # when SIGTERM is sent
    kill_at: float = 0.0  # when SIGKILL is sent
    workers_done: float | None = None
    began: float = field(default_factory=time.monotonic)
    signals: bool = False  # the script saves by itself on SIGTERM
    ckpt: Path | None = None  # checkpoint folder for the warning about a script that starts over; None: no check
    spoilt: bool = False  # the job damaged its control file, and its log says so

    @property
    def need_s(self) -> float:
        """Real seconds that a stop needs, judged by past saves; the grace period if only the script itself saves."""
        if self.signals and self.control.state is RunPhase.STARTING:
            return self.grace_s
        return min(NEED_MOST_S, 1.5 * self.control.save_s + 2 * self.control.step_s)


@dataclass(frozen=True)
class Ending:
    """How a generation ended here. ``code``: as a shell shows it; ``asked``: whether a stop was requested here."""

    gen: int
    code: int
    asked: bool
    discarded: bool
    result: RunResult | None
    commit: Commit | None
    failure: Failure | None = None  # of the worker that failed first
    unlooped: bool = False  # the script called ``attach()`` and ended well without a loop over its run

    @property
    def well(self) -> bool:
        """Whether the script ended by itself with 0. As far as this machine can tell, the job is then done."""
        return self.code == 0 and not self.stopped and not self.discarded

    @property
    def stopped(self) -> bool:
        """Whether the generation ended in a save-and-stop, requested here or agreed with a peer.

        Exit code 93 always counts as the job's own end: with this code a script asks never to be started again.
        """
        if self.code == NO_RESTART:
            return False
        if self.result is not None:
            return self.result.outcome != "done"
        return self.asked

    @property
    def rung(self) -> Rung | None:
        """How far a trial of a search has come, if it has saved at its rung's step or ended well."""
        result = self.result
        if result is None or not (self.well or (self.stopped and result.outcome == "reached")):
            return None
        return Rung(result.step, result.value)


class Supervisor:
    """Runs at most one generation. Only the loop's thread may call the methods.

    No method waits until a generation has saved or ended. Methods wait for seconds at most: for the launcher's answer,
    or until processes that were killed have ended (:meth:`sweep`).
    """

    def __init__(self, run: Path, templates: Path, launcher: Launcher, log: Log) -> None:
        self._run = run
        self._templates = templates
        self._launcher = launcher
        self._log = log
        self.child: Child | None = None

    def folder(self, job: str, gen: int) -> Path:
        return self._run / job / str(gen)

    def start(self, doc: Generation, run: JobRun, spec: LaunchSpec) -> None:
        """Start this generation.

        Raises:
            LaunchError: the launcher refused.
            RenderError: the template of torchrun's arguments is wrong.
        """
        folder = self.folder(doc.job, doc.gen)
        _make_anew(folder)
        args = torchrun_args(self._templates, doc, run, spec, folder)
        control = Control.create(folder / NAME)
        try:
            for path in (
                folder / NAME,
                folder / "logs",
                folder,
            ):  # the folder last: until then only the agent can write in it
                share(path)
            env = {**spec.extra_env, **environment(doc, run, spec, folder)}
            self._launcher.start(doc.gen, args, env, spec.source, folder / LAUNCHER_LOG)
        except LaunchError:
            control.close()
            raise
        signals = run.stop == "signal"
        anew = spec.ckpt if doc.gen > 1 and not signals else None
        self.child = Child(doc.gen, folder, run.nproc, run.grace_s, control, signals=signals, ckpt=anew)
        if spec.scratch_made:
            self._warn(self.child, f"the scratch folder is new and empty: {spec.scratch}, {run.scratch_gb} GB")
        self._log("job.start", gen=doc.gen, members=len(doc.members), index=spec.index, disk=not spec.late)
        self._forget_old(folder)

    def adopt(self, job: str, gen: int, run: JobRun) -> None:
        """Take over a generation that an earlier agent started."""
        folder = self.folder(job, gen)
        control = Control.hold(folder / NAME)
        self.child = Child(gen, folder, run.nproc, run.grace_s, control, signals=run.stop == "signal")
        if control.requested is AgentRequest.SAVE_STOP:
            self._set_deadline(self.child, time.monotonic() + control.deadline - time.time() + TERM_S)
        self._log("job.adopt", gen=gen)

    def save(self) -> None:
        """Request a save; training continues."""
        if self.child is not None and self.child.stop is None:
            self.child.control.request(AgentRequest.SAVE)

    def save_and_stop(self, deadline: float | None) -> None:
        """Request a save and an exit by ``deadline`` (real unix seconds; None: after the grace period).

        A repeated request can only shorten the deadline.
        """
        child = self.child
        if child is None or child.stop is Stop.KILLED:
            return
        now, wall = time.monotonic(), time.time()
        until = now + (child.grace_s if deadline is None else deadline - wall)
        if child.saving and until >= child.kill_at - 0.5:
            return
        self._set_deadline(child, until)
        child.control.request(AgentRequest.SAVE_STOP, wall + child.term_at - now)
        self._log("job.save_stop", gen=child.gen, step=child.control.step, within_s=round(until - now, 2))

    def _set_deadline(self, child: Child, until: float) -> None:
        """Set the times of a stop: SIGKILL at ``until``, SIGTERM shortly before. The job must save before SIGTERM."""
        child.saving = True
        child.kill_at = until
        child.term_at = until - min(TERM_S, 0.2 * max(0.0, until - time.monotonic()))
        child.stop = child.stop or Stop.ASKED

    def show_stacks(self) -> None:
        """Have the launcher write the processes' stack traces into the run folder. Raises LaunchError."""
        if self.child is not None:
            self._launcher.stacks(self.child.gen)

    def discard(self) -> None:
        """End the generation now. Unsaved steps are lost, and the generation's end is not reported."""
        if self.child is not None and not self.child.discarded:
            self.child.discarded = True
            self._kill(self.child)

    def _kill(self, child: Child) -> None:
        child.stop = Stop.KILLED
        with contextlib.suppress(LaunchError):  # the generation or the launcher has ended: an event follows
            self._launcher.kill(child.gen)

    def tick(self) -> None:
        """Take the next step of a stop when it is due, end a torchrun whose workers have ended, and log warnings."""
        child = self.child
        if child is None or child.stop is Stop.KILLED:
            return
        now = time.monotonic()
        self._warn_damaged_control(child)
        self._warn_unattached(child, now)
        if self._workers_done(child, now):
            self._kill(child)
        elif child.stop is Stop.ASKED and (now >= child.term_at or child.control.state is RunPhase.STARTING):
            # Before attach() the library cannot save, but the user's own signal handler may.
            self._log("job.term", gen=child.gen, state=child.control.state.name)
            child.stop = Stop.TERMED
            child.kill_at = min(child.kill_at, now + max(TERM_S, child.grace_s))
            with contextlib.suppress(LaunchError):
                self._launcher.signal(child.gen, signal.SIGTERM)
        elif child.stop is Stop.TERMED and now >= child.kill_at:
            self._log("job.kill", gen=child.gen)
            self._kill(child)

    def next_tick_s(self) -> float | None:
        """Return the real seconds until the next :meth:`tick`; None if no stop is running."""
        return None if self.child is None or self.child.stop is None else 0.05

    def ended(self, gen: int, code: int) -> Ending | None:
        """Process and return a generation's end that the launcher reported. None if ``gen`` is not the current one."""
        child = self.child
        if child is None or child.gen != gen:
            return None
        self._warn_damaged_control(child)
        ending = self._ending(child, code)
        self.child = None
        child.control.close()
        # The launcher has ended its own processes, but not those that left its process tree.
        swept = self.sweep()
        self._log("job.end", gen=gen, code=ending.code, stopped=ending.stopped, swept=swept)
        return ending

    def sweep(self) -> int:
        """Kill the processes that a generation left behind, and wait until they have ended."""
        found, until = 0, time.monotonic() + SWEEP_S
        while (count := sweep(self._launcher.folder, {os.getpid(), self._launcher.pid})) and time.monotonic() < until:
            found = max(found, count)
            time.sleep(0.01)
        return found

    def _ending(self, child: Child, code: int) -> Ending:
        result = read_result(child.folder)
        if result is not None and result.gen != child.gen:
            result = None
        if result is None and (outcome := _OUTCOMES.get(child.control.state)):  # /run is full: the control file has it
            result = RunResult(outcome, child.gen, child.control.step, child.control.commit)
        codes = exit_codes(child.folder)
        if NO_RESTART in codes:
            code = NO_RESTART
        elif child.stop is Stop.KILLED and len(codes) == child.nproc:
            code = max(codes)  # the workers had ended by themselves; only torchrun was killed
        commit = child.control.commit if result is None else result.commit
        control = child.control
        unlooped = not code and result is None and control.state is RunPhase.TRAINING and not control.first_step_at
        return Ending(child.gen, code, child.saving, child.discarded, result, commit, first(child.folder), unlooped)

    def _warn_unattached(self, child: Child, now: float) -> None:
        """Warn once, in the job's log, if a later generation neither finds a checkpoint nor calls ``attach()``.

        A script that does not use the library starts over after every loss, at its user's expense.
        """
        if child.ckpt is None or now - child.began < UNATTACHED_S:
            return
        ckpt, child.ckpt = child.ckpt, None
        if child.control.state is not RunPhase.STARTING or scan(ckpt):
            return
        self._log("job.unattached", gen=child.gen)
        self._warn(
            child,
            f"no checkpoint is here, and generation {child.gen} has not called spotkeeper.attach() within "
            f"{UNATTACHED_S:.0f} s. Without this call a script starts over after every loss: "
            'docs/train.md, "The script"',
        )

    def _warn_damaged_control(self, child: Child) -> None:
        """Warn once, in the job's log, that the job has damaged its control file.

        Values that cannot be read count as not set. A stop then sends SIGTERM, as for a job that is still starting.
        """
        if child.spoilt or not (trouble := child.control.trouble()):
            return
        child.spoilt = True
        self._log("job.control", gen=child.gen, error=trouble)
        self._warn(
            child,
            f"{trouble}. Only the agent and the library write this file; another program of this job has changed it. "
            "Training continues, but `status` can lack its progress, and a stop can come as SIGTERM without a request",
        )

    def _warn(self, child: Child, words: str) -> None:
        with contextlib.suppress(OSError):
            beneath.append(child.folder, LAUNCHER_LOG, f"spotkeeper: {words}\n")

    def _workers_done(self, child: Child, now: float) -> bool:
        """Whether all workers have ended and torchrun has had time to end."""
        if len(exit_codes(child.folder)) < child.nproc:
            return False
        child.workers_done = child.workers_done or now
        result = read_result(child.folder)
        stopped = child.saving or (result is not None and result.outcome != "done")
        return now - child.workers_done > (LINGER_S if stopped else DONE_LINGER_S)

    def _forget_old(self, folder: Path) -> None:
        """Delete the folders of all but the last few generations."""
        old = [path for path in folder.parent.iterdir() if path.name.isdecimal() and int(path.name) < int(folder.name)]
        for path in sorted(old, key=lambda path: int(path.name))[: -KEPT_RUNS + 1]:
            beneath.remove(path.parent, path.name)


def _make_anew(folder: Path) -> None:
    """Make an empty run folder. An older folder is first moved away, since deleting it may fail."""
    with contextlib.suppress(FileNotFoundError):
        gone = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
        folder.rename(gone)
        beneath.remove(gone.parent, gone.name)
    (folder / "logs").mkdir(parents=True)
