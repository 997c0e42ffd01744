"""Nodes of a gang as process trees: a real torchrun each, forked from a process that has torch warm.

What the agent does on a VM, in small: a saver per node that outlives generations, a run
folder with a control file per generation, torchrun with static rendezvous.
"""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spotkeeper.train.agent_link.control import NAME, Control, RunResult, read_result
from tests.train.forks import FORKS, FROZEN, WARM
from tests.train.jobs import Event, Job
from tests.train.savers import start_saver

LIMIT_S = 60.0


def preload(*modules: str) -> None:
    """Have more imported before a node is forked; before the first one is."""
    FORKS.set_forkserver_preload([*WARM, *modules, FROZEN])


@dataclass(frozen=True)
class Ended:
    """How a generation ended on one node."""

    code: int
    result: RunResult | None


@dataclass
class Gang:
    """``nodes`` machines with a disk each, and the job they run."""

    root: Path
    job: Job
    nodes: int = 1
    nproc: int = 1
    blank: set[int] = field(default_factory=set)  # nodes whose disk is not attached
    env: dict[str, str] = field(default_factory=dict)
    before: Any = None  # called in each worker first
    script: tuple[str, ...] = ()  # run this instead of `job`
    _savers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Gang:
        for node in range(self.nodes):
            self.disk(node).mkdir(parents=True)
            self._savers[node] = start_saver(self._socket(node))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._savers.values():
            process.kill()
            process.wait()

    def disk(self, node: int) -> Path:
        return self.root / f"node{node}" / "ckpt"

    def reboot(self, node: int) -> None:
        """A new saver, that holds nothing in memory."""
        self._savers[node].kill()
        self._savers[node].wait()
        self._savers[node] = start_saver(self._socket(node))

    def replace(self, node: int) -> None:
        """Another machine takes this one's place, with a new disk."""
        shutil.rmtree(self.disk(node))
        self.disk(node).mkdir()
        self.reboot(node)

    def run(self, gen: int, job: Job | None = None) -> list[Ended]:
        """One generation, to its end; what is left of it is killed, as the agent does."""
        port = _free_port()
        workers = []
        for node in range(self.nodes):
            env = self._environment(node, gen)
            Control.create(Path(env["SPOTKEEPER_RUN"]) / NAME).close()
            args = (env, job or self.job, self.nodes, self.nproc, node, port, f"{gen}", self.before, self.script)
            workers.append(FORKS.Process(target=_node, args=args))
        for worker in workers:
            worker.start()
        self._await(workers)
        return [
            Ended(worker.exitcode or 0, read_result(self.root / f"node{node}" / f"run{gen}"))
            for node, worker in enumerate(workers)
        ]

    def _await(self, workers: list[Any]) -> None:
        """All, or until one fails: then the others have a second, as with the agent's kill."""
        end = time.monotonic() + LIMIT_S
        while any(worker.is_alive() for worker in workers) and time.monotonic() < end:
            multiprocessing.connection.wait([worker.sentinel for worker in workers if worker.is_alive()], 0.5)
            if any(worker.exitcode for worker in workers):
                end = min(end, time.monotonic() + 1.0)
        for worker in workers:
            if worker.is_alive():
                _kill_group(worker.pid)
            worker.join()

    def _environment(self, node: int, gen: int) -> dict[str, str]:
        run = self.root / f"node{node}" / f"run{gen}"
        run.mkdir()
        env = {
            "SPOTKEEPER_RUN": str(run),
            "SPOTKEEPER_GEN": str(gen),
            "SPOTKEEPER_SLOT": str(node),
            "SPOTKEEPER_SAVER": str(self._socket(node)),
            "SPOTKEEPER_INTERVAL_S": "1000",
            "OMP_NUM_THREADS": "1",
        }
        if node not in self.blank:
            env["SPOTKEEPER_CKPT"] = str(self.disk(node))
        return env | self.env

    def control(self, node: int, gen: int) -> Control:
        """The agent's end of the control file."""
        return Control.open(self.root / f"node{node}" / f"run{gen}" / NAME)

    def log(self, node: int, gen: int) -> str:
        """What the node's processes wrote."""
        return (self.root / f"node{node}" / f"run{gen}" / "log").read_text()

    def _socket(self, node: int) -> Path:
        return self.root / f"node{node}" / "saver"


def run_to_end(root: Path, job: Job, **gang: Any) -> dict[int, str]:
    """The same job, left alone: its ranks' final states."""
    alone = replace(job, events=(), out=root / "out")
    with Gang(root, alone, **gang) as machines:
        assert [ended.code for ended in machines.run(1)] == [0] * machines.nodes
    return finals(alone)


def finals(job: Job) -> dict[int, str]:
    return {int(path.stem): path.read_text() for path in sorted(job.out.glob("*.json"))}


def _node(env: dict[str, str], job: Job, nodes: int, nproc: int, node: int, port: int, run_id: str, *work: Any) -> None:
    """A machine: torchrun with one function as its script. Exits 1 where a worker failed."""
    os.setpgid(0, 0)
    log = os.open(Path(env["SPOTKEEPER_RUN"]) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _die_with_parent()
    os.register_at_fork(after_in_child=_die_with_parent)
    os.environ.update(env)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=nproc,
        run_id=run_id,
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": node, "timeout": 30},
        max_restarts=0,
        monitor_interval=0.02,
        start_method="fork",
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=f"{env['SPOTKEEPER_RUN']}/logs"),
    )
    try:
        elastic_launch(config, _work)(job, *work)
    except ChildFailedError:
        raise SystemExit(1) from None


def _work(job: Job, before: Any, script: tuple[str, ...]) -> None:
    from tests.train.jobs import train

    if before is not None:
        before()
    if script:
        sys.argv = list(script)
        runpy.run_path(script[0], run_name="__main__")
    else:
        train(job)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _kill_group(pid: int | None) -> None:
    if pid is not None:
        os.killpg(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


__all__ = ["Ended", "Event", "Gang", "Job", "finals", "run_to_end"]
