"""Measures training from its control files.

Each VM of the one-machine cloud keeps its job's control file below its root. The watcher maps each file as it appears
and keeps the mapping when the VM dies, so that it knows the last step before a loss and the first step after it to the
millisecond. It only reads.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from pathlib import Path

from spotkeeper.train.agent_link.control import Commit, Control, ControlError, RunPhase


@dataclass
class GenerationTrace:
    """One generation's steps. Times are real unix seconds; 0: no step."""

    gen: int
    first_step_at: float = 0.0
    last_step_at: float = 0.0
    last_step: int = 0
    restored: Commit | None = None


@dataclass
class Watcher:
    """Follows one job on all VMs below ``vms`` (the folder that holds a root per VM)."""

    vms: Path
    job: str
    period_s: float = 0.05
    _controls: dict[Path, tuple[int, Control]] = field(default_factory=dict)
    _traces: dict[int, GenerationTrace] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join(timeout=5)
        self.poll()

    def traces(self) -> dict[int, GenerationTrace]:
        """A copy of all traces, by generation."""
        with self._lock:
            return {gen: GenerationTrace(**vars(trace)) for gen, trace in self._traces.items()}

    def step(self) -> int:
        """The newest generation's step."""
        with self._lock:
            return self._traces[max(self._traces)].last_step if self._traces else 0

    def _run(self) -> None:
        while not self._over.wait(self.period_s):
            self.poll()

    def poll(self) -> None:
        """Read every control file once."""
        for path in self.vms.glob(f"*/root/run/spotkeeper/{self.job}/*/ctl"):
            if path not in self._controls and path.parent.name.isdigit():
                with contextlib.suppress(OSError, ControlError):  # being created, or gone again
                    self._controls[path] = (int(path.parent.name), Control.open(path))
        with self._lock:
            for gen, control in self._controls.values():
                self._note(gen, control)

    def _note(self, gen: int, control: Control) -> None:
        if control.state < RunPhase.TRAINING or not control.first_step_at:
            return
        trace = self._traces.setdefault(gen, GenerationTrace(gen))
        first, at, step = control.first_step_at, control.step_at, control.step
        trace.first_step_at = min(trace.first_step_at or first, first)
        if at > trace.last_step_at:
            trace.last_step_at, trace.last_step = at, max(step, trace.last_step)
        trace.restored = control.restored or trace.restored
