"""kill -9 of every process of a run, one after the other: the weights equal those of an undisturbed run.

What only looks after training (agent, saver, function, control plane and its keeper) may die without costing
a generation. What carries it (launcher, torchrun, a node) is the job's own crash, and costs exactly one.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from spotkeeper.contract.job import Checkpoint, Retry
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome
from spotkeeper.local.core import procs
from spotkeeper.local.core.views import VmView
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.local.lifecycle.folder import LocalCloudError
from spotkeeper.train.agent_link.control import Control, ControlError
from spotkeeper_agent.job.launcher_client import saver_pid
from tests.lifecycle.stage import STEPS, Run, Stage, tiny

pytestmark = pytest.mark.lifecycle

SEED = 20261
HARMLESS = ("agent", "saver", "function", "server", "keeper")
CRASHES = ("zygote", "torchrun", "node")


class Victims:
    """Pids by role, and for some roles by node. None: not running now."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._cloud = run.stage.cloud

    def find(self, what: str, node: int) -> int | None:
        try:
            return self._FINDERS[what](self, node)
        except (LocalCloudError, ControlError, OSError, ValueError, IndexError, StopIteration):
            return None

    def _vm(self, node: int) -> VmView:
        cur = self._run.record().nodes[node].cur
        return next(vm for vm in self._cloud.status().vms if cur is not None and vm.id == cur.uid)

    def _agent(self, node: int) -> int | None:
        """Found by its arguments: the pid file of a killed one remains."""
        marked = procs.marked(procs.mark(procs.VM, f"{self._cloud.config.uid}-{self._vm(node).id}"))
        found = [pid for pid in marked if _cmdline(pid)[-2:] == ["-m", "spotkeeper_agent"]]
        return found[0] if found else None

    def _saver(self, node: int) -> int | None:
        return saver_pid(self._folder(node) / "node")

    def _node(self, node: int) -> int | None:
        gen = self._run.record().gen
        return Control.open(self._folder(node) / self._run.job / str(gen) / "ctl").pid or None

    def _torchrun(self, node: int) -> int | None:
        return _parent(self._node(node))

    def _zygote(self, node: int) -> int | None:
        return _parent(self._torchrun(node))

    def _folder(self, node: int) -> Path:
        return Path(self._vm(node).root) / "run" / "spotkeeper"

    def _function(self, _: int) -> int | None:
        return self._cloud.status().functions[0].pid or None

    def _server(self, _: int) -> int | None:
        return _recorded(self._cloud.folder / "server.pid")

    def _keeper(self, _: int) -> int | None:
        return _recorded(self._cloud.folder / "keeper.pid")

    _FINDERS: ClassVar[dict[str, Callable[[Victims, int], int | None]]] = {
        "agent": _agent,
        "saver": _saver,
        "node": _node,
        "torchrun": _torchrun,
        "zygote": _zygote,
        "function": _function,
        "server": _server,
        "keeper": _keeper,
    }


def _recorded(path: Path) -> int | None:
    pid, started = (int(word) for word in path.read_text().split())
    return pid if procs.is_same(pid, started) else None


def _cmdline(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    except OSError:
        return []


def _parent(pid: int | None) -> int | None:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) if pid else None


def kill_one(run: Run, victims: Victims, what: str, rng: random.Random) -> None:
    """Kill a process at a random moment of steady training, and wait for its successor."""
    run.steady(f"before {what} is killed")
    node = rng.randrange(2)
    pid = run.until(f"node {node}'s {what} to run", lambda: victims.find(what, node))
    gen, step = run.record().gen, run.watcher.step() + rng.randrange(15)
    run.until(f"step {step}", lambda: run.watcher.step() >= step)
    os.kill(pid, signal.SIGKILL)
    if what == "keeper":
        run.until("the keeper to be dead", lambda: victims.find(what, node) is None)
        LocalCloud.up(run.stage.cloud.folder)  # only `spotkeeper local up` restarts the keeper
    if what in CRASHES:
        run.until("another generation", lambda: run.record().gen > gen)
    run.until(f"another {what} for node {node}", lambda: victims.find(what, node) not in (None, pid))


def test_a_run_with_kills_ends_with_the_weights_of_an_undisturbed_run(stage: Stage) -> None:
    rng = random.Random(SEED)  # noqa: S311
    order = [*HARMLESS, *CRASHES]
    rng.shuffle(order)
    spec = tiny("chaos", STEPS, 0.07, nodes=2, retry=Retry(crashes=len(CRASHES)), checkpoint=Checkpoint(interval_s=1.0))
    with Run(stage, spec) as run:
        victims = Victims(run)
        for what in order:
            before = run.record()
            kill_one(run, victims, what, rng)
            run.steady(f"after {what} was killed")
            after = run.record()
            costs = int(what in CRASHES)
            assert after.gen - max(1, before.gen) == costs, f"{what}: {before.gen} -> {after.gen}"
            assert after.budget.crashes - before.budget.crashes == costs, what
            print(f"{what} was killed: generation {after.gen}, step {run.watcher.step()}")
        record = run.over()
        weights = run.weights()
    assert record.outcome is Outcome.SUCCEEDED, record.reason
    assert not run.ledger(Event.LOSS), "no machine was given up for a process that died on it"
    assert weights == run.weights_left_alone(2)
