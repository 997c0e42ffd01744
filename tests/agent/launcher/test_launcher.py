"""The launchers alone: exit codes, threads and seeds, and that nothing survives whatever is killed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract.generation import JobRun, Member
from spotkeeper.train.agent_link.control import Control
from spotkeeper_agent.core.events import ChildEnded, LauncherLost, LauncherUp
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import job_path, templates_path
from spotkeeper_agent.job import failures, logs
from spotkeeper_agent.job.jobhost import sweep
from spotkeeper_agent.job.launch_spec import LaunchSpec, launcher_kind
from spotkeeper_agent.job.launcher_client import Launcher, LauncherKind, LaunchError
from spotkeeper_agent.job.supervisor import Ending, Supervisor
from spotkeeper_agent.launcher import stacks
from spotkeeper_agent.launcher.process import MARK
from spotkeeper_agent.launcher.server import LaunchedRun, Server, Start
from tests.agent.fakes import REPO, alive, all_pids, children_of, command_of, document, environ_of, wait_until
from tests.agent.jobs import ENDS, STUBBORN, STUCK
from tests.no_dynamo import NO_DYNAMO

LIGHT = REPO / "tests/agent/light_launcher.py"


class Bench:
    """A node's launcher and supervisor without an agent around them."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.lines: list[str] = []
        log = Log(write=self.lines.append)
        self.launcher = Launcher(folder, job_path(), self.events.put, log)
        self.supervisor = Supervisor(folder, templates_path(), self.launcher, log)
        self.mode = mode
        self.gen = 0

    def run(self, script: str, *args: str, nproc: int = 1, **env: str) -> JobRun:
        source = self.folder / "src"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text(script)
        env = {"OMP_NUM_THREADS": "1"} | NO_DYNAMO | env
        return JobRun(
            "job", ("train.py", *args), None, env=env, python=sys.executable, nproc=nproc, launcher=self.mode, grace_s=5
        )

    def up(self, run: JobRun) -> None:
        self.launcher.begin(launcher_kind(run, self.folder / "src", self.folder / "env"))
        assert isinstance(self.events.get(timeout=60), LauncherUp), self.lines

    def start(self, run: JobRun, *, port: int = 0) -> Path:
        if not self.launcher.up:
            self.up(run)
        self.gen += 1
        doc = document(self.gen, self.gen, (Member(0, 1, "1", "b", "127.0.0.1", run.nproc),), port=port)
        ckpt, out = self.folder / "ckpt", self.folder / "out"
        node = LaunchSpec(0, 0, "127.0.0.1", self.folder / "src", self.folder / "saver.sock", ckpt, out, late=True)
        self.supervisor.start(doc, run, node)
        return self.supervisor.folder(doc.job, self.gen)

    def wait_end(self, timeout_s: float = 60) -> Ending:
        event = self.events.get(timeout=timeout_s)
        assert isinstance(event, ChildEnded), event
        assert event.left == 0
        ending = self.supervisor.ended(event.gen, event.code)
        assert ending is not None
        end = next(told for told in map(json.loads, reversed(self.lines)) if told["event"] == "job.end")
        assert end["swept"] == 0, "the launcher had ended them all, so the sweep found none"
        return ending

    def marked(self) -> list[int]:
        mark = f"{MARK}={self.folder}".encode()
        return [pid for pid in all_pids() if pid != self.launcher.pid and mark in environ_of(pid)]

    def torchrun(self) -> int:
        return children_of(self.launcher.pid)[0]


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One warm launcher for the tests that leave it whole."""
    with closing_bench(tmp_path_factory.mktemp("node"), "zygote") as bench:
        yield bench


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The same for the exec launcher; starting takes seconds, so few tests use it."""
    with closing_bench(tmp_path_factory.mktemp("node"), "exec") as bench:
        yield bench


@contextlib.contextmanager
def closing_bench(folder: Path, mode: str) -> Iterator[Bench]:
    bench = Bench(folder, mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # no machine's environment has it either
        yield bench
    bench.launcher.quit()
    sweep(bench.folder, set())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[[str], Bench]]:
    made: list[Bench] = []

    def make(mode: str) -> Bench:
        made.append(Bench(tmp_path, mode))
        return made[-1]

    yield make
    for one in made:
        one.launcher.quit()
        sweep(one.folder, set())


CODES = {"return": 0, "0": 0, "93": 93, "_exit93": 93, "7": 7, "raise": 1, "kill": 137}


@pytest.mark.parametrize("how", CODES)
def test_exit_codes_survive_torchrun(zygote: Bench, how: str) -> None:
    check_exit(zygote, how)


@pytest.mark.matrix  # a cold launcher starts and ends below in `make test`, and agents use one in `make recovery`
@pytest.mark.parametrize("how", ["_exit93", "kill", "raise"])
def test_exit_codes_survive_a_cold_torchrun(cold: Bench, how: str) -> None:
    check_exit(cold, how)


def check_exit(bench: Bench, how: str) -> None:
    folder = bench.start(bench.run(ENDS, how))
    ending = bench.wait_end()
    assert (ending.code, ending.stopped) == (CODES[how], False)
    logs = "".join(path.read_text() for path in folder.rglob("std*.log"))
    assert f"about to end by {how}" in logs
    if how == "raise":
        assert logs.count("RuntimeError: on purpose") == 1, "the traceback reaches the log, once"
        assert "boot.py" not in logs, "and shows the user's own frames only"


PLAIN_LOOP = """
import spotkeeper, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = spotkeeper.attach(model, optimizer)
for batch in run.steps(torch.utils.data.DataLoader(torch.ones(64, 2), 4)):
    model(batch).mean().backward()
    optimizer.step()
"""


def test_a_plain_loop_in_an_elastic_job_exits_with_93(zygote: Bench) -> None:
    folder = zygote.start(msgspec.structs.replace(zygote.run(PLAIN_LOOP), max_world=3))
    assert zygote.wait_end().code == 93
    logs = "".join(path.read_text() for path in folder.rglob("std*.log"))
    assert "Write run.backward(loss) for loss.backward(), and run.step() for" in logs
    zygote.start(zygote.run(PLAIN_LOOP))
    assert zygote.wait_end().code == 0, "with one number of nodes it is as good"


def test_93_of_one_rank_beats_the_failures_it_causes(zygote: Bench) -> None:
    script = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(93)\ntime.sleep(60)\n"
    zygote.start(zygote.run(script, nproc=2))
    assert zygote.wait_end().code == 93


def test_stacks_distinguish_waiting_ranks_from_the_blocking_one(zygote: Bench) -> None:
    folder = zygote.start(zygote.run(STUCK, nproc=2))
    wait_until((folder / "loads").exists, 60)

    def in_place() -> list[dict[str, str]] | None:
        """The workers may be a moment before it: a machine that is busy with other tests."""
        (folder / stacks.SHORT).unlink(missing_ok=True)
        zygote.launcher.stacks(zygote.gen)
        wait_until((folder / stacks.SHORT).exists, 20)
        found = json.loads((folder / stacks.SHORT).read_text())
        return found if [place["where"] for place in found] == ["waits", "elsewhere"] else None

    waits, hangs = wait_until(in_place, 40)
    assert waits["at"].startswith("distributed_c10d.py:") and "called from train.py:" in waits["at"]
    assert hangs["at"] == "train.py:17 in hangs"
    text = (folder / stacks.TEXT).read_text()
    assert "local rank 1, its process" in text and "in loads" in text, "and what it has forked"
    assert not list(folder.glob("exit.*")), "nobody was ended by the question"
    zygote.supervisor.discard()
    assert zygote.wait_end(20).discarded


FAILS = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    if sys.argv[1] == "segv":
        os.kill(os.getpid(), 11)
    raise ValueError("the column 'label' is missing")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("how", ["raise", "segv"])
def test_a_rank_that_lost_a_peer_is_not_the_cause(zygote: Bench, how: str) -> None:
    folder = zygote.start(zygote.run(FAILS, how, nproc=2))
    ending = zygote.wait_end()
    assert ending.failure is not None
    assert (ending.failure.follows, ending.failure.local_rank) == (False, 1)
    assert all(each.follows for rank, each in failures.failures(folder).items() if rank != 1)
    if how == "raise":
        assert logs.collect(folder).decode().rstrip().endswith("ValueError: the column 'label' is missing")


WORKER = """
import json, os, random, sys, threading
import numpy, torch
out = {"threads": torch.get_num_threads(), "seeds": [random.random(), float(numpy.random.rand()), torch.initial_seed()],
       "argv": sys.argv, "path0": sys.path[0], "cwd": os.getcwd(), "name": __name__,
       "env": {k: v for k, v in os.environ.items() if k.startswith("SPOTKEEPER_") or k in ("MINE", "PYTHONPATH")}}
import atexit
atexit.register(lambda: open(os.environ["SPOTKEEPER_RUN"] + "/atexit", "w").close())
json.dump(out, open(os.environ["SPOTKEEPER_RUN"] + "/out." + os.environ["RANK"], "w"))
"""


def test_both_launchers_give_workers_the_same_environment(zygote: Bench, cold: Bench) -> None:
    seen = []
    for bench in (zygote, zygote, cold):
        folder = bench.start(bench.run(WORKER, "--x", "1", nproc=2, MINE="yes", OMP_NUM_THREADS="3"))
        assert bench.wait_end().code == 0
        assert (folder / "atexit").exists(), "what the user registered for the end has run"
        source = str(bench.folder / "src")
        outs = [json.loads((folder / f"out.{rank}").read_text()) for rank in (0, 1)]
        for out in outs:
            assert out["argv"] == [f"{source}/train.py", "--x", "1"]
            assert (out["path0"], out["cwd"], out["name"]) == (source, source, "__main__")
            assert (out["env"]["MINE"], out["env"]["SPOTKEEPER_SLOT"]) == ("yes", "0")
            assert "SPOTKEEPER_CKPT" not in out["env"]
            assert out["env"]["PYTHONPATH"].startswith(str(job_path()))
            assert out["threads"] == 3, "though the zygote imported torch under another value"
        seen.append([out["seeds"] for out in outs])
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] != seen[0][1]


@pytest.mark.parametrize("victim", ["torchrun", "rank", "discard", "stop order"])
def test_no_process_survives_its_generation(zygote: Bench, victim: str) -> None:
    """Whoever is killed: the rank, its forked child, its subprocess, a daemon that has left its session, and
    one that has blanked its environment and has no parent any more."""
    family, rank = stubborn(zygote)
    if victim == "torchrun":
        os.kill(zygote.torchrun(), signal.SIGKILL)
    elif victim == "rank":
        os.kill(rank, signal.SIGKILL)
    elif victim == "discard":
        zygote.supervisor.discard()
    else:
        zygote.supervisor.save_and_stop(time.time() + 2)
        while zygote.events.empty():
            zygote.supervisor.tick()
            time.sleep(0.02)
    ending = zygote.wait_end(10)
    assert ending.discarded == (victim == "discard")
    assert ending.stopped == (victim == "stop order")
    assert ending.code in (137, 128 + 15)
    assert zygote.marked() == []
    assert not any(alive(pid) for pid in family)


@pytest.mark.parametrize("mode", ["zygote", "exec"])
def test_no_process_survives_its_launcher(bench: Callable[[str], Bench], mode: str) -> None:
    one = bench(mode)
    family, _ = stubborn(one)
    torchrun, [guard] = one.torchrun(), [pid for pid in all_pids() if one.launcher.pid in children_of(pid)]
    opened = [path.resolve().name for path in Path(f"/proc/{torchrun}/fd").iterdir()]
    assert opened and "launcher.lock" not in opened
    os.kill(guard, signal.SIGSTOP)  # so that only the kernel can end torchrun
    try:
        os.kill(one.launcher.pid, signal.SIGKILL)
        wait_until(lambda: not alive(torchrun), 10)
    finally:
        os.kill(guard, signal.SIGCONT)
    assert isinstance(one.events.get(timeout=10), LauncherLost)
    one.supervisor.sweep()
    wait_until(lambda: not any(alive(pid) for pid in family), 3)  # SIGKILL has been sent; exiting takes a moment
    assert one.marked() == []


@pytest.mark.matrix
@pytest.mark.parametrize("order", list(itertools.permutations(("launcher", "torchrun", "rank"))), ids="-".join)
def test_no_process_survives_in_any_order_of_kills(bench: Callable[[str], Bench], order: tuple[str, ...]) -> None:
    """All within a moment. The guard as well: ``test_orphans.py``."""
    one = bench("exec")
    family, rank = stubborn(one)
    pids = {"launcher": one.launcher.pid, "torchrun": one.torchrun(), "rank": rank}
    for victim in order:
        with contextlib.suppress(ProcessLookupError):  # those before have taken it along
            os.kill(pids[victim], signal.SIGKILL)
    while not isinstance(one.events.get(timeout=20), LauncherLost):
        pass
    one.supervisor.sweep()
    wait_until(lambda: not any(alive(pid) for pid in family), 10)
    assert one.marked() == []


@pytest.mark.matrix
def test_no_process_survives_a_cold_torchrun(cold: Bench) -> None:
    family, _ = stubborn(cold)
    os.kill(cold.torchrun(), signal.SIGKILL)
    assert cold.wait_end(10).code == 137
    assert not any(alive(pid) for pid in family)


def stubborn(one: Bench) -> tuple[list[int], int]:
    """Start the job that tries to stay; its whole family, and its rank."""
    folder = one.start(one.run(STUBBORN))
    wait_until((folder / "up").exists, 40)
    family = wait_until(lambda: _whole_family(one), 10)
    with Control.open(folder / "ctl") as control:
        return family, control.pid


def _family(one: Bench) -> list[int]:
    """All descendants of the launcher, with those that have left for its subreaper."""
    found, todo = [], [one.launcher.pid]
    while todo:
        new = children_of(todo.pop())
        found += new
        todo += new
    return found


def _whole_family(one: Bench) -> list[int] | None:
    """The family once all have come up: torchrun, the rank, its forked child, three sleeps, and two daemons."""
    pids = _family(one)
    sleeps = sum(command_of(pid).startswith("sleep 98") for pid in pids)
    return pids if sleeps == 5 and len(pids) >= 8 else None


def test_launcher_outlives_its_agent_and_is_found_again(bench: Callable[[str], Bench]) -> None:
    one = bench("exec")
    run = one.run("import time\ntime.sleep(60)\n")
    one.start(run)
    again = Launcher(one.folder, job_path(), one.events.put, Log(write=one.lines.append))
    again.begin(launcher_kind(run, one.folder / "src", one.folder / "env"))
    assert one.events.get(timeout=10) == LauncherUp(1, None)
    assert again.pid == one.launcher.pid
    with pytest.raises(LaunchError, match="generation 1 still runs"):
        again.start(2, [], {}, one.folder, one.folder / "log")
    again.kill(1)
    assert one.wait_end(10).code == 137


def test_a_request_that_cannot_be_served_gets_an_answer(tmp_path: Path) -> None:
    def spawn(start: Start, server: Server) -> int:
        raise OSError(11, "no process left")

    server = Server(tmp_path, "exec", spawn)
    start = {"op": "start", "gen": 3, "args": [], "env": {}, "cwd": "/", "log": str(tmp_path / "log")}
    for request, error in (
        (start, "cannot start torchrun: [Errno 11] no process left"),
        (start | {"more": 1}, "TypeError: "),
        ({"op": "kill"}, "KeyError: 'gen'"),
        ({"op": "other"}, "unknown op 'other'"),
    ):
        answer = server._answer(json.dumps(request).encode())
        assert answer["ok"] is False and error in answer["error"]
    server.run = LaunchedRun(2, os.getpid(), str(tmp_path))
    assert server._answer(b'{"op": "signal", "gen": 1, "signal": 0}')["error"] == "generation 1 does not run"


LATE = """
import os, subprocess, sys
from spotkeeper_agent.launcher.__main__ import _spawn
from spotkeeper_agent.launcher.process import reap_dead
from spotkeeper_agent.launcher.server import Start

started = subprocess.Popen.__init__
def late(self, *args, **options):
    started(self, *args, **options)
    os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
subprocess.Popen.__init__ = late
pid = _spawn(Start(1, ["--no-such-option"], {}, ".", "torchrun.log"), None)
print(reap_dead() == {pid: 2})
"""


def test_a_torchrun_that_ends_before_its_launcher_runs_again_is_still_reported(tmp_path: Path) -> None:
    """As on a machine with busy cores: the launcher waited forever for an end that ``Popen`` itself had reaped."""
    env = os.environ | {"PYTHONPATH": str(job_path())}
    out = subprocess.run([sys.executable, "-c", LATE], cwd=tmp_path, env=env, capture_output=True, check=True)
    assert out.stdout == b"True\n", (tmp_path / "torchrun.log").read_text()


def test_a_launcher_that_is_still_ending_costs_one_more_start(bench: Callable[[str], Bench]) -> None:
    """It still held the folder, so its successor left; nobody came, and training waited for three minutes."""
    one = bench("exec")
    with (one.folder / "launcher.lock").open("w") as dying:
        fcntl.flock(dying, fcntl.LOCK_EX)
        one.launcher.begin(launcher_kind(one.run(ENDS), one.folder / "src", one.folder / "env"))
        log = one.folder / "launcher.log"
        wait_until(lambda: log.exists() and "another launcher" in log.read_text(), 30)
    assert isinstance(one.events.get(timeout=30), LauncherUp), one.lines


def test_warm_modules_are_imported_before_the_start(bench: Callable[[str], Bench]) -> None:
    """But for those that are no ground to fork from, and those that are not there: the job imports them itself."""
    one = bench("zygote")
    modules = one.folder / "modules"
    modules.mkdir()
    (modules / "heavy.py").write_text("import os\nBY = os.getpid()\n")
    (modules / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\n"
    )
    script = (
        "import sys\nprint('there:', 'heavy' in sys.modules, 'threads' in sys.modules)\nimport heavy\nprint(heavy.BY)\n"
    )
    path = os.pathsep.join([str(modules), *NO_DYNAMO.values()])
    run = replace(one.run(script, PYTHONPATH=path), warm=("threads", "missing", "heavy"))
    folder = one.start(run)
    zygote = one.launcher.pid
    assert one.wait_end().code == 0
    said = "".join(path.read_text() for path in folder.rglob("stdout*") if path.is_file())
    assert "there: True False" in said
    assert f"\n{zygote}\n" in said, "imported by the launcher, not by the job"
    log = (one.folder / "launcher.log").read_text()
    assert "threads is imported again by each generation: it starts threads" in log
    assert "missing is imported again by each generation: it cannot be imported here (ModuleNotFoundError" in log


def test_another_environment_gets_another_launcher(bench: Callable[[str], Bench]) -> None:
    one = bench("exec")
    run = one.run("pass")
    one.up(run)
    first = one.launcher.pid
    other = Launcher(one.folder, job_path(), one.events.put, Log(write=one.lines.append))
    other.begin(launcher_kind(one.run("pass", NEW="1"), one.folder / "src", one.folder / "env"))
    ups = [one.events.get(timeout=30) for _ in range(2)]
    assert {type(event) for event in ups} == {LauncherUp, LauncherLost}
    assert other.pid not in (0, first)
    other.quit()


def test_a_missing_interpreter_is_reported(bench: Callable[[str], Bench]) -> None:
    one = bench("exec")
    run = JobRun("job", ("train.py",), None, python="no-such-python")
    one.launcher.begin(launcher_kind(run, one.folder, one.folder / "env"))
    event = one.events.get(timeout=10)
    assert isinstance(event, LauncherLost)
    assert "no-such-python" in event.reason


def test_busy_port_is_an_exit_and_no_hang(zygote: Bench) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))  # noqa: S104 - where TCPStore listens
        taken.listen()
        folder = zygote.start(zygote.run("pass"), port=taken.getsockname()[1])
        assert zygote.wait_end(30).code == 1
    assert "EADDRINUSE" in (folder / "torchrun.log").read_text()


FRESH = """
import os, sys, torch
assert not torch.cuda.is_initialized()
if sys.argv[1] == "cuda":
    assert torch.ones(8, device="cuda").sum().item() == 8
"""


def test_the_zygote_opens_no_device_and_its_memory_does_not_grow(zygote: Bench) -> None:
    """A fork of a process that has initialised CUDA cannot use it."""
    zygote.start(zygote.run(FRESH, "cuda" if Path("/dev/nvidiactl").exists() else "cpu"))
    assert zygote.wait_end().code == 0
    opened = [str(path.readlink()) for path in Path(f"/proc/{zygote.launcher.pid}/fd").iterdir()]
    assert len(opened) > 3 and not [path for path in opened if path.startswith("/dev/nvidia")]
    [up] = [json.loads(line) for line in zygote.lines if '"launcher.up"' in line]
    assert up["mode"] == "zygote"
    rollup = Path(f"/proc/{zygote.launcher.pid}/smaps_rollup").read_text()
    [pss_kb] = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")]
    assert 50 < up["memory_mb"] < 1000
    assert pss_kb / 1024 < 1.25 * up["memory_mb"], "after all that it has started"


def test_a_launcher_of_another_bundle_is_replaced_without_a_loss(tmp_path: Path) -> None:
    """Between two generations, after the agent's upgrade: the next one shall use the new library."""
    with closing_bench(tmp_path, "zygote") as bench:
        (tmp_path / "light").write_text(f'#!/bin/sh\nexec {sys.executable} -S {LIGHT} "$4"\n')
        (tmp_path / "light").chmod(0o755)
        kind = LauncherKind("zygote", str(tmp_path / "light"), ())
        bench.launcher.begin(kind)
        assert isinstance(bench.events.get(timeout=60), LauncherUp)
        assert not bench.launcher.stale
        before = bench.launcher.pid
        bench.launcher.home = "/var/lib/spotkeeper/bundle/before/job"  # as the agent before this one had it
        assert bench.launcher.stale
        bench.launcher.renew()
        assert not bench.launcher.up, "no generation begins meanwhile"
        assert isinstance(bench.events.get(timeout=60), LauncherUp), bench.lines
        assert bench.launcher.pid != before and not bench.launcher.stale
        assert not alive(before)


FORGED = [
    {"guard": 1 << 40}, {"guard": -1}, {"guard": 1e300}, {"pid": -1}, {"pid": 1 << 63}, {"pid": 10**30},
    {"run": {"gen": 1 << 63, "pid": 1}}, {"run": {"gen": 1, "pid": 1, "code": -(1 << 40)}},
    {"pid": 0, "key": "other"}, {"pid": 1, "key": "other"},
]  # fmt: skip


@pytest.mark.parametrize("forged", FORGED)
def test_a_job_that_listens_on_the_launchers_socket_ends_no_agent(tmp_path: Path, forged: dict[str, object]) -> None:
    """Its numbers are no process of the machine's, or the agent itself: the launcher is started anew."""
    launcher = Launcher(tmp_path, job_path(), lambda event: None, Log(write=lambda line: None))
    kind = LauncherKind("exec", sys.executable, ())
    agents, jobs = socket.socketpair()
    with agents, jobs:
        jobs.sendall(json.dumps({"ok": True, "pid": os.getpid(), "key": kind.key()} | forged).encode() + b"\n")
        assert launcher._greet(agents, kind) is None
