"""The proof: what every recovery cost, and that the weights are those of a run left alone."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.local.cloud import LeftOver
from spotkeeper.local.demo.watcher import Trace
from spotkeeper.report.money import attempts
from spotkeeper.report.preemptions import Preemptions
from spotkeeper.report.recovery import recoveries
from spotkeeper.report.spans import minus, seconds
from spotkeeper.spec.ledger import Entry

_WEIGHTS = re.compile(r"weights ([0-9a-f]{64})")
_TOO_LONG_S = 240.0  # the reference takes about a minute
_GRACE_S = 40.0  # torchrun gives its workers 30


class Recovered(Struct, frozen=True):
    """One recovery, in real seconds.

    ``seconds``: from the last step before to the first one after, less the part of it in which a replacement
    was still booting. ``boot_seconds``: the longest boot, from the decision to the hello; ``announced`` is
    true where nobody was surprised: a notice, or a change that reconcile itself made.
    """

    cause: str
    announced: bool
    steps_lost: int
    seconds: float
    boot_seconds: float
    replacement: str
    zone: str


class Cost(Struct, frozen=True):
    """USD, as the cloud billed it."""

    spent: float
    on_demand_only: float
    saved: float


class Report(Struct, frozen=True):
    """``.spotkeeper/demo/report.json``."""

    steps: int
    generations: int
    preemptions: Preemptions
    recoveries: tuple[Recovered, ...]
    cost: Cost
    weights_identical: bool
    left_over: LeftOver
    engine: str

    def holds(self) -> bool:
        """Whether what is promised came true: the same weights, nothing left, no step lost where there was a notice."""
        kept = all(not one.steps_lost for one in self.recoveries if one.announced)
        return self.weights_identical and not self.left_over and kept

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def recovered(traces: dict[int, Trace], ledger: Iterable[Entry], clock: Clock) -> tuple[Recovered, ...]:
    """Join what training measured with what the ledger knows, by generation."""
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
    """Virtual unix seconds as real ones."""
    return clock.real_epoch + (virtual - clock.virtual_epoch) / clock.scale


def _pairs(traces: dict[int, Trace]) -> Iterable[tuple[Trace, Trace]]:
    """Generations that made a step, with the one that made the next."""
    stepped = [traces[gen] for gen in sorted(traces) if traces[gen].first_step_at]
    return itertools.pairwise(stepped)


def weights_in(log: str) -> str | None:
    """The hash the example prints when it is done; the last one of the log."""
    found = _WEIGHTS.findall(log)
    return found[-1] if found else None


def left_alone(source: Path, command: tuple[str, ...], nproc: int, env: dict[str, str], folder: Path) -> str:
    """Train the same job under plain torchrun, undisturbed, and return the hash of its weights.

    Raises:
        RuntimeError: it failed, took too long, or printed no hash; the end of its log is in the message.
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
        raise RuntimeError(f"the undisturbed run ended with {torchrun.returncode}:\n{log[-2000:]}")
    return weights


def _end(torchrun: subprocess.Popen[str]) -> None:
    """Nothing where it has ended. Its workers have sessions of their own: only torchrun can end them, if asked."""
    torchrun.terminate()
    try:
        torchrun.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        torchrun.kill()
        torchrun.wait()
