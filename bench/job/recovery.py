"""From the kill of a node to the first step of the next generation: zygote against exec and elastic torchrun.

Processes only: no cloud, no boot, no function. Nodes of one process each on their own loopback addresses; all processes
of one are killed at once. The two ways alternate, each with a gang of its own, and medians are compared; for each
figure, the medians of a recovery's phases say where the time goes.

* zygote, exec: the agent's work at the next document. The survivors' processes are ended and all three members (a warm
  machine in place of the third) start the next generation.
* elastic: torchrun's c10d rendezvous with the fastest settings that work, its store in another process, so that no
  node's death ends it. The survivors continue as two, which is less work than waiting for a third.

For a machine that comes back, the figure is the time without a step: from the last step of the smaller gang to the
first of all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from spotkeeper.contract.generation import DocState, Generation, JobRun, Member
from spotkeeper_agent.core.events import ChildEnded, LauncherUp
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import job_path, templates_path
from spotkeeper_agent.job.jobhost import sweep
from spotkeeper_agent.job.launch_spec import LaunchSpec, launcher_kind
from spotkeeper_agent.job.launcher_client import Launcher
from spotkeeper_agent.job.supervisor import Supervisor
from spotkeeper_agent.launcher.process import become_subreaper

NODES = 3
TIMES = {2: 3, 3: 5, 4: 5, 8: 3}  # pairs by number of nodes
EXEC_TIMES = 2
PHASES = ("end", "start", "fork", "join", "step")
GOAL_ELASTIC, GOAL_EXEC, GOAL_REJOIN = 8.0, 4.0, 4.0
ELASTIC, COLD = "tuned elastic torchrun", "a cold torchrun per generation"
ADAPTERS = str(Path(__file__).resolve().parents[2] / ".venv-adapters/bin/python")  # has transformers (make adapters)
STANDS_IN = "torch._inductor.compile_fx"  # fallback: 2 s of imports that every environment has
PATIENCE_S = 120.0
JOB = "benchjob"
ELASTIC_CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,is_host=0"

# Steps with an all-reduce; each worker writes into a file when it began, joined the gang, and did its first step.
SCRIPT = """
import os, time
began = time.time()
import torch, torch.distributed as dist
dist.init_process_group("gloo")
joined = time.time()
step, path = 0, os.environ["BENCH_FIRST"] + f"/{os.getpid()}"
while True:
    dist.all_reduce(torch.ones(1000))
    step += 1
    if step == 1:
        with open(path + ".tmp", "w") as file:
            file.write(f"{began} {joined} {time.time()}")
        os.rename(path + ".tmp", path)
    os.utime(path)
    time.sleep(0.02)
"""


@dataclass(frozen=True)
class Worker:
    """When a worker's script began, joined the process group and did its first step; unix seconds."""

    began: float
    joined: float
    first: float


def workers(folder: Path) -> dict[Path, Worker]:
    paths = [path for path in folder.iterdir() if path.suffix != ".tmp"]
    return {path: Worker(*map(float, path.read_text().split())) for path in paths}


def first_steps(folder: Path, after: float, count: int) -> list[Worker]:
    """Wait until ``count`` workers have done their first step after a moment, and return them in that order.

    Raises:
        TimeoutError: it takes too long.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        done = sorted((one for one in workers(folder).values() if one.first > after), key=lambda one: one.first)
        if len(done) >= count:
            return done[:count]
        time.sleep(0.005)
    raise TimeoutError(f"no {count} first steps within {PATIENCE_S:.0f} s")


def last_step(folder: Path, before: float = float("inf")) -> float:
    """Time of the last step of a worker whose first step came before a moment."""
    return max(path.stat().st_mtime for path, one in workers(folder).items() if one.first < before)


@dataclass(frozen=True)
class Recovery:
    """A recovery's phases, in the order of ``PHASES``: seconds until the slowest member is through each.

    The old processes end; the next generation is ordered; the workers begin, join the process group, and step.
    """

    phases: tuple[float, ...]

    @classmethod
    def of(cls, moments: Sequence[float], members: Sequence[Worker]) -> Recovery:
        """``moments``: the kill, then the ends of as many of the first phases as are known (0 seconds otherwise)."""
        known = [*moments, *[moments[-1]] * (3 - len(moments))]
        slowest = [max(getattr(one, what) for one in members) for what in ("began", "joined", "first")]
        ends = [*known, *slowest]
        return cls(tuple(end - start for start, end in itertools.pairwise(ends)))

    @property
    def seconds(self) -> float:
        return sum(self.phases)


def median(recoveries: Sequence[Recovery]) -> Recovery:
    """The median of each phase is of its own recovery: they add up to about the median recovery."""
    return Recovery(tuple(statistics.median(phase) for phase in zip(*(one.phases for one in recoveries), strict=True)))


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
        self.launcher.begin(launcher_kind(run, source, self.folder / "env"))

    def warmed(self) -> None:
        event = self.events.get(timeout=PATIENCE_S)
        if not isinstance(event, LauncherUp):
            raise RuntimeError(f"launcher: {event}")

    def start(self, doc: Generation, run: JobRun, source: Path, index: int) -> None:
        saver, ckpt, out = (self.folder / name for name in ("saver.sock", "ckpt", "out"))
        node = LaunchSpec(index, index, self.address, source, saver, ckpt, out, late=True)
        self.supervisor.start(doc, run, node)

    def discarded(self) -> None:
        """Wait until all discarded processes are gone."""
        event = self.events.get(timeout=PATIENCE_S)
        if isinstance(event, ChildEnded):
            self.supervisor.ended(event.gen, event.code)

    def power_cut(self) -> None:
        self.launcher.quit()
        sweep(self.folder, set())


@dataclass(frozen=True)
class How:
    """Launcher of generations. ``imports``: the script's first lines; ``warm``: modules that a zygote shares."""

    mode: str
    imports: str = ""
    warm: tuple[str, ...] = ()
    python: str = sys.executable


@dataclass
class Gang:
    """``made``: all machines so far; ``firsts``: folder with each worker's first step; each step touches its file."""

    root: Path
    run: JobRun
    source: Path
    firsts: Path
    made: list[Machine] = field(default_factory=list)
    gen: int = -1

    def machine(self) -> Machine:
        """Add a machine, which is getting warm."""
        number = len(self.made) + 1
        self.made.append(Machine(self.root / f"vm{number}", f"127.0.1.{number}"))
        self.made[-1].warm(self.run, self.source)
        return self.made[-1]

    def start(self, members: list[Machine]) -> None:
        """Start the next generation."""
        self.gen += 1
        listed = tuple(Member(n, 1, str(n), "b", one.address, 1) for n, one in enumerate(members))
        port = 21000 + os.getpid() % 5000 + self.gen
        uid = "00000000-0000-4000-8000-000000000001"
        address, run_id = listed[0].address, f"{uid}-{self.gen}"
        doc = Generation(JOB, uid, self.gen, self.gen, DocState.RUN, listed, address, port, run_id)
        with ThreadPoolExecutor(len(members)) as pool:  # as the agents of several machines do
            for started in [pool.submit(one.start, doc, self.run, self.source, n) for n, one in enumerate(members)]:
                started.result()

    def end(self, members: list[Machine]) -> None:
        """Discard the running generation."""
        for one in members:  # each machine's agent would do this at the same time
            one.supervisor.discard()
        for one in members:
            one.discarded()


@contextlib.contextmanager
def gang(root: Path, how: How, nodes: int) -> Iterator[Gang]:
    """So many warm machines, without a generation."""
    source, firsts = root / "src", root / "first"
    source.mkdir()
    firsts.mkdir()
    (source / "train.py").write_text(how.imports + SCRIPT)
    env = {"BENCH_FIRST": str(firsts), "OMP_NUM_THREADS": "1"}
    run = JobRun("bench", ("train.py",), None, env=env, python=how.python, launcher=how.mode, warm=how.warm)
    one = Gang(root, run, source, firsts)
    try:
        for machine in [one.machine() for _ in range(nodes)]:
            machine.warmed()
        yield one
    finally:
        for machine in one.made:
            machine.power_cut()


def restarts(how: How, times: int, nodes: int = NODES) -> list[Recovery]:
    """From a kill to the first step of all members of the next generation."""
    with tempfile.TemporaryDirectory() as name, gang(Path(name), how, nodes) as one:
        began = time.time()
        one.start(one.made)
        first_steps(one.firsts, began, nodes)
        members, taken = list(one.made), []
        for _ in range(times):
            spare = one.machine()
            spare.warmed()
            time.sleep(0.5)  # the gang trains
            killed = time.time()
            members.pop().power_cut()
            one.end(members)
            ended = time.time()
            members.append(spare)
            one.start(members)
            moments = (killed, ended, time.time())
            taken.append(Recovery.of(moments, first_steps(one.firsts, killed, nodes)))
        return taken


def joins(how: How) -> float:
    """Seconds without a step when a machine that came back joins."""
    with tempfile.TemporaryDirectory() as name, gang(Path(name), how, NODES) as one:
        began = time.time()
        one.start(one.made[1:])
        first_steps(one.firsts, began, NODES - 1)
        time.sleep(0.5)
        one.end(one.made[1:])
        stood = last_step(one.firsts)
        one.start(one.made)
        return first_steps(one.firsts, stood, NODES)[-1].first - stood


def elastic(times: int, nodes: int = NODES, imports: str = "") -> list[Recovery]:
    """Like :func:`restarts` for torchrun's elasticity: to the survivors' first step, one node fewer."""
    return [_one_elastic(nodes, imports) for _ in range(times)]


def _one_elastic(nodes: int, imports: str) -> Recovery:
    with _elastic_gang(nodes, nodes, imports) as (root, running, _):
        killed = time.time()
        _kill_tree(running[-1])
        return Recovery.of((killed,), first_steps(root / "first", killed, nodes - 1))


def elastic_joins() -> float:
    """Like :func:`joins`; the node that comes back starts its own process first."""
    with _elastic_gang(NODES - 1, NODES) as (root, _, another):
        began = time.time()
        another()
        return first_steps(root / "first", began, NODES)[-1].first - last_step(root / "first", before=began)


@contextlib.contextmanager
def _elastic_gang(
    nodes: int, most: int, imports: str = ""
) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]], Callable[[], subprocess.Popen[bytes]]]]:
    """A training gang, and a function that starts one more node."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        root = Path(name)
        (root / "train.py").write_text(imports + SCRIPT)
        (root / "first").mkdir()
        port = stack.enter_context(_store(root))
        numbers = itertools.count()

        def another() -> subprocess.Popen[bytes]:
            return stack.enter_context(_torchrun(root, next(numbers), port, f"{min(nodes, most - 1)}:{most}"))

        began = time.time()
        running = [another() for _ in range(nodes)]
        first_steps(root / "first", began, nodes)
        time.sleep(0.5)
        yield root, running, another


@contextlib.contextmanager
def _store(root: Path) -> Iterator[int]:
    """A store that survives any node's death."""
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
def _torchrun(root: Path, number: int, port: int, nodes: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"),
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
    """Kill torchrun and its workers at once; they have their own sessions, so the tree is walked."""
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
    """For ``bench/run.py``: the alternatives in the same run, so that they share the machine's mood."""
    become_subreaper()  # orphans of killed nodes become ours and are reaped at the end, not left as zombies
    zygote, found = How("zygote"), []
    for nodes, times in TIMES.items():
        pairs = [(restarts(zygote, 1, nodes)[0], elastic(1, nodes)[0]) for _ in range(times)]
        ours, theirs = (list(each) for each in zip(*pairs, strict=True))
        name = "recovery.zygote_vs_elastic" + (f".{nodes}_nodes" if nodes != NODES else "")
        found.append(ratio(name, theirs, ours, GOAL_ELASTIC, f"{ELASTIC}, {nodes} nodes"))
        if nodes == NODES:
            found.append(ratio("recovery.zygote_vs_exec", restarts(How("exec"), EXEC_TIMES), ours, GOAL_EXEC, COLD))
    joined = [(joins(zygote), elastic_joins()) for _ in range(3)]
    again, others = (statistics.median(each) for each in zip(*joined, strict=True))
    return [*found, figure("recovery.rejoin_vs_elastic", others, again, GOAL_REJOIN, ELASTIC), _imports()]


def _imports() -> dict[str, object]:
    """A job with long imports: shared by the zygote (``warm:``), against repeated in each generation."""
    python = ADAPTERS if Path(ADAPTERS).exists() else sys.executable
    module = "transformers.models.llama.modeling_llama" if python == ADAPTERS else STANDS_IN
    imports = f"import {module}\n"
    warm = restarts(How("zygote", imports, (module,), python), 2, 2)
    cold = restarts(How("exec", imports, python=python), 1, 2)
    return ratio("recovery.imports_vs_exec", cold, warm, GOAL_EXEC, f"{COLD}, 2 nodes, import {module}")


def ratio(name: str, other: Sequence[Recovery], ours: Sequence[Recovery], goal: float, what: str) -> dict[str, object]:
    """Compare medians of recoveries, and say where each spends its time."""
    other_s, ours_s = (statistics.median(each.seconds for each in some) for some in (other, ours))
    return figure(name, other_s, ours_s, goal, f"medians of {len(ours)}, {what}", _phases(other), _phases(ours))


def _phases(recoveries: Sequence[Recovery]) -> str:
    told = zip(PHASES, median(recoveries).phases, strict=True)
    return " (" + ", ".join(f"{name} {seconds:.2f}" for name, seconds in told if seconds) + ")"


def figure(
    name: str, other_s: float, ours_s: float, goal: float, what: str, theirs: str = "", own: str = ""
) -> dict[str, object]:
    ratio = other_s / ours_s
    return {
        "name": name,
        "value": round(ratio, 1),
        "unit": "x faster",
        "goal": f">= {goal:.0f}",
        "holds": ratio >= goal,
        "against": f"{what}: {other_s:.2f} s{theirs}, zygote: {ours_s:.2f} s{own}",
    }


if __name__ == "__main__":
    for one in figures():
        print(f"{one['name']}: {one['value']} {one['unit']} (goal {one['goal']}); {one['against']}")
