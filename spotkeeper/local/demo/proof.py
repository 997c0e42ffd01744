"""Measures the cost of every recovery, and proves that the weights equal those of an undisturbed run."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from spotkeeper.clock import Clock
from spotkeeper.contract.ledger import Entry
from spotkeeper.local.lifecycle.cloud import LeftOver
from spotkeeper.report.job.recovery import Preemptions, recoveries
from spotkeeper.report.money.money import attempts, minus, seconds
from spotkeeper.report.text.words import duration, saved, usd
from spotkeeper.train.agent_link.control import Commit, Control, ControlError, RunPhase

_WEIGHTS = re.compile(r"weights ([0-9a-f]{64})")
_TOO_LONG_S = 240.0  # the reference takes about a minute
_GRACE_S = 40.0  # torchrun gives its workers 30 s


class Recovered(Struct, frozen=True):
    """One recovery, in real seconds.

    ``seconds``: from the last step before the loss of a machine to the first step after it, less the time in which new
    machines booted. ``boot_seconds``: the longest boot of a new machine, from its intent to its hello. ``announced``: a
    notice preceded the loss, or reconcile itself decided to replace the machine.
    """

    cause: str
    announced: bool
    steps_lost: int
    seconds: float
    boot_seconds: float
    replacement: str
    zone: str


class BilledCost(Struct, frozen=True):
    """The cost of the demo as the cloud bills it, in USD."""

    spent: float
    on_demand_only: float
    saved: float


class DemoReport(Struct, frozen=True):
    """The result of the demo, written to ``.spotkeeper/demo/report.json``."""

    steps: int
    generations: int
    preemptions: Preemptions
    recoveries: tuple[Recovered, ...]
    cost: BilledCost
    weights_identical: bool
    left_over: LeftOver
    engine: str

    def holds(self) -> bool:
        """Whether all checks passed: equal weights, nothing left over, no step lost in an announced recovery."""
        kept = all(not one.steps_lost for one in self.recoveries if one.announced)
        return self.weights_identical and not self.left_over and kept

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def recovered(traces: dict[int, GenerationTrace], ledger: Iterable[Entry], clock: Clock) -> tuple[Recovered, ...]:
    """Return the recoveries, from the traces of training and the ledger's entries for the same generations."""
    entries = tuple(ledger)
    by_gen = {told.gen: told for told in recoveries(entries, clock.now()) if told.seconds is not None}
    boots = [(_real(m.asked, clock), _real(m.admitted, clock)) for m in attempts(entries) if m.admitted is not None]
    out = []
    for before, after in _pairs(traces):
        told = by_gen.get(after.gen)
        pause = (before.last_step_at, after.first_step_at)
        out.append(
            Recovered(
                cause=told.cause if told else "unknown",
                announced=told is not None and told.announced,
                steps_lost=max(0, before.last_step - (after.restored.step if after.restored else 0)),
                seconds=round(seconds(minus([pause], boots)), 3),
                boot_seconds=round(clock.real_s(told.boot_s), 3) if told and told.boot_s is not None else 0.0,
                replacement=told.replacement.value if told and told.replacement else "",
                zone=(told.zone or "") if told else "",
            )
        )
    return tuple(out)


def _real(virtual: float, clock: Clock) -> float:
    return clock.real_epoch + (virtual - clock.virtual_epoch) / clock.scale


def _pairs(traces: dict[int, GenerationTrace]) -> Iterable[tuple[GenerationTrace, GenerationTrace]]:
    """Yield pairs of successive generations, without generations that made no step."""
    stepped = [traces[gen] for gen in sorted(traces) if traces[gen].first_step_at]
    return itertools.pairwise(stepped)


def weights_in(log: str) -> str | None:
    """The last hash of weights that the example printed in its log."""
    found = _WEIGHTS.findall(log)
    return found[-1] if found else None


def left_alone(source: Path, command: tuple[str, ...], nproc: int, env: dict[str, str], folder: Path) -> str:
    """Train the demo's job undisturbed, under plain torchrun, and return the hash of its weights.

    Raises:
        RuntimeError: training failed, took too long, or printed no hash; the message has the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", f"--log-dir={folder}"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SPOTKEEPER_")}
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    torchrun = subprocess.Popen(
        [sys.executable, *launch, str(source / command[0]), *command[1:]],
        cwd=folder,
        env=clean | env | {"PYTHONPATH": path, "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        log, _ = torchrun.communicate(timeout=_TOO_LONG_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the undisturbed run was not done within {_TOO_LONG_S:.0f} s") from None
    finally:
        _end(torchrun)
    weights = weights_in(log)
    if torchrun.returncode or weights is None:
        raise RuntimeError(f"the undisturbed run ended with exit code {torchrun.returncode}:\n{log[-2000:]}")
    return weights


def _end(torchrun: subprocess.Popen[str]) -> None:
    """End torchrun and wait. Its workers have their own sessions, so only torchrun can end them."""
    torchrun.terminate()
    try:
        torchrun.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.wait()


def show(console: Console, done: DemoReport, weights: str | None, elapsed_s: float, path: Path) -> None:
    """Print the recoveries and totals."""
    table = Table(
        title="every recovery, in real seconds, without the time in which new machines booted",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for title in ("cause", "announced", "steps lost", "s to next step", "boot s", "replaced by"):
        table.add_column(title, justify="left" if title in ("cause", "replaced by") else "right", no_wrap=True)
    for one in done.recoveries:
        by = f"{one.replacement} in {one.zone}" if one.replacement else "-"
        table.add_row(
            one.cause,
            "yes" if one.announced else "no",
            str(one.steps_lost),
            f"{one.seconds:.2f}",
            f"{one.boot_seconds:.1f}" if one.boot_seconds else "-",
            by,
        )
    console.print()
    console.print(table)
    cost, left = done.cost, done.left_over
    percent = 100 * cost.saved / cost.on_demand_only if cost.on_demand_only else 0.0
    lost = sum(one.steps_lost for one in done.recoveries)
    lines = [
        f"{done.steps} steps in {done.generations} generations; {lost} steps trained twice",
        f"billed {usd(cost.spent)}, the same machine-hours on demand {usd(cost.on_demand_only)}: {saved(percent)}"
        " (both include the static machine's time before and after the job)",
        f"weights {weights or '(none)'}",
        ("identical, bit by bit, to the weights of the undisturbed run" if done.weights_identical else "NOT THE SAME")
        + f"; left over: {left.vms} VMs, {left.disks} disks, {left.processes} processes",
        f"{duration(elapsed_s)} in all; the {done.engine} engine deployed the stack; report: {path}",
    ]
    console.print("\n" + "\n".join(lines), highlight=False)


# -- training, measured from its control files

# Each VM of the one-machine cloud keeps its job's control file below its root. The watcher maps each file as it appears
# and keeps the mapping when the VM dies, so that it knows the last step before a loss and the first step after it to
# the millisecond. It only reads.


@dataclass
class GenerationTrace:
    """One generation's steps. Times are real unix seconds, or 0 if it made no step."""

    gen: int
    first_step_at: float = 0.0
    last_step_at: float = 0.0
    last_step: int = 0
    restored: Commit | None = None


@dataclass
class Watcher:
    """Follows one job on all VMs below ``vms``, the folder that contains each VM's root folder."""

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
            if path not in self._controls and path.parent.name.isdecimal():
                with contextlib.suppress(OSError, ControlError):  # the file is being created, or is gone again
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
