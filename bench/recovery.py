"""Kill of a node to the first step of the next generation: zygote against exec, and against elastic torchrun.

The process side alone: no cloud, no boot, no function. Three nodes of one process each, on
loopback addresses of their own; all processes of the third are killed at once.

* zygote, exec: what an agent does at the next document. The survivors' processes are ended
  and all three members (a warm machine in place of the third) start the next generation.
* elastic: torchrun's own c10d rendezvous with the fastest settings that work, its store
  outside so that no node's death takes it along. The survivors go on as two, which is less
  work than waiting for a third.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from spotkeeper.spec.generation import DocState, Generation, JobRun, Member
from spotkeeper.vm.events import ChildEnded, LauncherUp
from spotkeeper.vm.jobhost import sweep
from spotkeeper.vm.launch import Launcher
from spotkeeper.vm.launcher.process import become_subreaper
from spotkeeper.vm.log import Log
from spotkeeper.vm.settings import job_path, templates_path
from spotkeeper.vm.supervisor import Node, Supervisor, launcher_kind

NODES = 3
ZYGOTE_TIMES, EXEC_TIMES, ELASTIC_TIMES = 5, 2, 2
GOAL_ELASTIC, GOAL_EXEC = 8.0, 4.0
PATIENCE_S = 120.0
JOB = "benchjob"
ELASTIC_CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,is_host=0"

# Steps with an all-reduce; the time of each worker's first step goes into a file of its own.
SCRIPT = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
step = 0
while True:
    dist.all_reduce(torch.ones(1000))
    step += 1
    if step == 1:
        path = os.environ["BENCH_FIRST"] + f"/{os.getpid()}"
        with open(path + ".tmp", "w") as file:
            file.write(repr(time.time()))
        os.rename(path + ".tmp", path)
    time.sleep(0.02)
"""


def first_steps(folder: Path, after: float, count: int) -> float:
    """When the ``count``-th worker has done its first step after a moment.

    Raises:
        TimeoutError: it takes too long.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        times = [float(path.read_text()) for path in folder.iterdir() if path.suffix != ".tmp"]
        done = sorted(moment for moment in times if moment > after)
        if len(done) >= count:
            return done[count - 1]
        time.sleep(0.005)
    raise TimeoutError(f"no {count} first steps within {PATIENCE_S:.0f} s")


@dataclass
class Machine:
    """One node's launcher and supervisor, as its agent has them."""

    folder: Path
    address: str
    events: queue.SimpleQueue[object] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        log = Log(write=lambda _: None)
        self.launcher = Launcher(self.folder, job_path(), self.events.put, log)
        self.supervisor = Supervisor(self.folder, templates_path(), self.launcher, log)

    def warm(self, run: JobRun, source: Path) -> None:
        self.launcher.begin(launcher_kind(run, source))

    def warmed(self) -> None:
        event = self.events.get(timeout=PATIENCE_S)
        if not isinstance(event, LauncherUp):
            raise RuntimeError(f"launcher: {event}")

    def start(self, doc: Generation, run: JobRun, source: Path, index: int) -> None:
        saver, ckpt, out = (self.folder / name for name in ("saver.sock", "ckpt", "out"))
        node = Node(index, index, self.address, source, saver, ckpt, out, late=True)
        self.supervisor.start(doc, run, node)

    def discarded(self) -> None:
        """Wait until all of what was given up is gone."""
        event = self.events.get(timeout=PATIENCE_S)
        if isinstance(event, ChildEnded):
            self.supervisor.ended(event.gen, event.code)

    def power_cut(self) -> None:
        self.launcher.quit()
        sweep(self.folder, set())


def restarts(mode: str, times: int) -> list[float]:
    """Seconds from a kill to the first step of all members of the next generation."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source, firsts = root / "src", root / "first"
        source.mkdir()
        firsts.mkdir()
        (source / "train.py").write_text(SCRIPT)
        env = {"BENCH_FIRST": str(firsts), "OMP_NUM_THREADS": "1"}
        run = JobRun("bench", ("train.py",), None, env=env, python=sys.executable, launcher=mode)
        machines: list[Machine] = []
        try:
            machines += [Machine(root / f"vm{number}", f"127.0.1.{number + 1}") for number in range(NODES)]
            for one in machines:
                one.warm(run, source)
            for one in machines:
                one.warmed()
            began = time.time()
            _start_all(machines, 0, run, source)
            first_steps(firsts, began, NODES)
            return [_one_restart(machines, number + 1, run, source, firsts) for number in range(times)]
        finally:
            for one in machines:
                one.power_cut()


def _one_restart(machines: list[Machine], gen: int, run: JobRun, source: Path, firsts: Path) -> float:
    spare = Machine(machines[0].folder.parent / f"spare{gen}", f"127.0.1.{NODES + gen}")
    spare.warm(run, source)
    spare.warmed()
    time.sleep(0.5)  # the gang trains
    victim = machines[-1]
    killed = time.time()
    victim.power_cut()
    machines[-1] = spare
    for one in machines[:-1]:  # each machine's agent would do this at the same time
        one.supervisor.discard()
    for one in machines[:-1]:
        one.discarded()
    _start_all(machines, gen, run, source)
    return first_steps(firsts, killed, NODES) - killed


def _start_all(machines: list[Machine], gen: int, run: JobRun, source: Path) -> None:
    members = tuple(Member(n, 1, str(n), "b", one.address, 1) for n, one in enumerate(machines))
    port = 21000 + os.getpid() % 5000 + gen
    uid = "00000000-0000-4000-8000-000000000001"
    doc = Generation(JOB, uid, gen, gen, DocState.RUN, members, members[0].address, port, f"{uid}-{gen}")
    with ThreadPoolExecutor(len(machines)) as pool:  # as the agents of three machines do
        for started in [pool.submit(one.start, doc, run, source, n) for n, one in enumerate(machines)]:
            started.result()


def elastic(times: int) -> list[float]:
    """The same for torchrun's own elasticity: seconds until the survivors' first step as two."""
    return [_one_elastic() for _ in range(times)]


def _one_elastic() -> float:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        root = Path(name)
        (root / "train.py").write_text(SCRIPT)
        (root / "first").mkdir()
        port = stack.enter_context(_store(root))
        began = time.time()
        nodes = [stack.enter_context(_torchrun(root, number, port)) for number in range(NODES)]
        first_steps(root / "first", began, NODES)
        time.sleep(0.5)
        killed = time.time()
        _kill_tree(nodes[-1])
        return first_steps(root / "first", killed, NODES - 1) - killed


@contextlib.contextmanager
def _store(root: Path) -> Iterator[int]:
    """A store that no node's death takes along."""
    code = (
        "import sys, time, torch.distributed as d;"
        "s = d.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False);"
        "open(sys.argv[1], 'w').write(str(s.port)); time.sleep(600)"
    )
    path = root / "port"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        until = time.monotonic() + PATIENCE_S
        while not (path.exists() and path.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        yield int(path.read_text())
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _torchrun(root: Path, number: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES - 1}:{NODES}", "--nproc-per-node=1"),
        *("--max-restarts=10", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench"),
        *(f"--rdzv-conf={ELASTIC_CONF}", f"--local-addr=127.0.1.{number + 1}"),
        *(f"--log-dir={root / 'logs'}", str(root / "train.py")),
    ]
    env = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "BENCH_FIRST": str(root / "first"),
        "OMP_NUM_THREADS": "1",
    }
    with (root / f"log{number}").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        _kill_tree(process)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """torchrun and its workers at once; they have sessions of their own, so the tree is walked."""
    todo, found = [process.pid], [process.pid]
    while todo:
        with contextlib.suppress(OSError):
            below = Path(f"/proc/{(pid := todo.pop())}/task/{pid}/children").read_text().split()
            found += map(int, below)
            todo += map(int, below)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``: all three in one run, so that they share the machine's mood."""
    become_subreaper()  # orphans of killed nodes become ours and are reaped at the end, not left as zombies
    zygote = statistics.median(restarts("zygote", ZYGOTE_TIMES))
    cold = statistics.median(restarts("exec", EXEC_TIMES))
    tuned = statistics.median(elastic(ELASTIC_TIMES))
    return [
        _ratio("recovery.zygote_vs_elastic", tuned, zygote, GOAL_ELASTIC, "tuned elastic torchrun"),
        _ratio("recovery.zygote_vs_exec", cold, zygote, GOAL_EXEC, "a cold torchrun per generation"),
    ]


def _ratio(name: str, other_s: float, ours_s: float, goal: float, what: str) -> dict[str, object]:
    ratio = other_s / ours_s
    return {
        "name": name,
        "value": round(ratio, 1),
        "unit": "x faster",
        "goal": f">= {goal:.0f}",
        "holds": ratio >= goal,
        "against": f"{what}: {other_s:.2f} s, zygote: {ours_s:.2f} s",
    }


if __name__ == "__main__":
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
