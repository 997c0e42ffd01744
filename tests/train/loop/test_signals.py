"""A real script with loader workers, stopped as shells, Slurm and schedulers stop one: saved, over soon, same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from spotkeeper.train.checkpoint import store
from tests.no_dynamo import NO_DYNAMO
from tests.sizes import WHOLE, size
from tests.train.forks import FORKS, interpret

PACE = "time.sleep(0.03)"  # in each step; other scripts have something else in its place
SCRIPT = f"""
import hashlib, os, pathlib, random, signal, sys, time
import spotkeeper, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((6,), index / 64) + 0.1 * torch.randn(6), torch.tensor([random.random()])

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=2)
    seen = hashlib.sha256()
    run = spotkeeper.attach(model, optimizer)
    for x, y in run.steps(loader, epochs=2):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", run.steps_done, flush=True)
        {PACE}
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print("end", hashlib.sha256(weights).hexdigest(), torch.rand(1).item(), flush=True)
"""
LAST = 32
ENDS_S = 240.0  # on a machine that is busy; bench/train/signals.py measures the ten seconds that are promised


class Script:
    """A life of it, in a session of its own like a shell's job.

    Args:
        real: in an interpreter of its own; else in a fork that has imported torch already, which costs a tenth.
        nproc: ranks, under a torchrun.
    """

    def __init__(self, folder: Path, text: str, nproc: int, *, real: bool) -> None:
        (folder / "train.py").write_text(text)
        for name in ("out", "err"):
            (folder / name).write_text("")
        self._folder = folder
        self._popen = _interpreter(folder, nproc) if real else None
        self._fork = (
            None if real else FORKS.Process(target=interpret, args=(folder, ["train.py"], _environment(), nproc))
        )
        if self._fork is not None:
            self._fork.start()
        self.pid = (self._popen or self._fork).pid or 0
        self._read = 0

    def until(self, said: str) -> str:
        """The first new line that begins so."""
        ends = time.monotonic() + ENDS_S
        while True:
            over = self._over()
            lines = (self._folder / "out").read_text().splitlines(keepends=True)
            for line in lines[self._read :]:
                if not line.endswith("\n"):
                    break
                self._read += 1
                if line.startswith(said):
                    return line
            assert not over and time.monotonic() < ends, f"it never said {said!r}:\n{self.err()}"
            time.sleep(0.005)

    def until_err(self, said: str) -> None:
        ends = time.monotonic() + ENDS_S
        while said not in self.err():
            assert time.monotonic() < ends, self.err()
            time.sleep(0.01)

    def end(self) -> int:
        """Its exit code."""
        if self._popen is not None:
            return self._popen.wait(ENDS_S)
        assert self._fork is not None
        self._fork.join(ENDS_S)
        assert self._fork.exitcode is not None, f"it does not end:\n{self.err()}"
        return self._fork.exitcode

    def err(self) -> str:
        return (self._folder / "err").read_text()

    def _over(self) -> bool:
        return self._popen.poll() is not None if self._popen else self._fork is None or not self._fork.is_alive()

    def kill(self) -> None:
        if not self._over():
            with suppress(ProcessLookupError):  # it has no session of its own yet
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):  # the fork server has reaped it just now
                os.kill(self.pid, signal.SIGKILL)
            self.end()


def _environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPOTKEEPER_")}
    return env | {"PYTHONPATH": os.pathsep.join([*NO_DYNAMO.values(), *sys.path]), "OMP_NUM_THREADS": "1"}


def _interpreter(folder: Path, nproc: int) -> subprocess.Popen[bytes]:
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"] if nproc > 1 else []
        argv = [sys.executable, *launcher, "train.py"]
        return subprocess.Popen(argv, cwd=folder, env=_environment(), stdout=out, stderr=err, start_new_session=True)


@contextmanager
def life(folder: Path, text: str = SCRIPT, nproc: int = 1, *, real: bool = False) -> Iterator[Script]:
    folder.mkdir(exist_ok=True)
    script = Script(folder, text, nproc, real=real)
    try:
        yield script
    finally:
        script.kill()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """How a run ends that was left alone."""
    with life(tmp_path_factory.mktemp("alone")) as script:
        return script.until("end")


def saved(folder: Path) -> int:
    commit = store.newest(folder / ".spotkeeper/ckpt/train").commit
    return -1 if commit is None else commit.step


def group(script: Script, number: int) -> None:
    """As a terminal and a shell do: every process of the group."""
    os.killpg(script.pid, number)


def everybody(script: Script, number: int) -> None:
    """As Slurm does: every process of the job, the saver too, which has a session of its own."""
    for pid in [script.pid, *descendants(script.pid)]:
        os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    own = [int(each) for each in children.read_text().split()] if children.exists() else []
    return own + [each for child in own for each in descendants(child)]


def alone(script: Script, number: int) -> None:
    os.kill(script.pid, number)


NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EACH_ONCE = [(group, signal.SIGTERM), (alone, signal.SIGHUP), (everybody, signal.SIGINT)]


@pytest.mark.parametrize(
    ("to", "number"), size(EACH_ONCE, [(to, number) for to in (alone, group, everybody) for number in NUMBERS])
)
def test_a_signalled_run_resumes_bit_for_bit(
    tmp_path: Path, whole: str, to: Callable[[Script, int], None], number: int
) -> None:
    with life(tmp_path, real=to is group and number == signal.SIGTERM) as script:
        script.until("step 10")
        to(script, number)
        assert script.end() == 0, script.err()
    assert 10 <= saved(tmp_path) < LAST
    name = signal.Signals(number).name
    assert f"spotkeeper: {name}: saving and stopping after this step" in script.err()
    assert script.err().count(f"stopped after step {saved(tmp_path)}") == 1
    assert "Traceback" not in script.err()
    with life(tmp_path) as script:
        assert script.until("end") == whole


def test_signals_work_in_two_loops_and_after_a_resume(tmp_path: Path, whole: str) -> None:
    """As schedulers repeat it: the second SIGTERM changes nothing, and each life is stopped."""
    for step in (5, 20):
        with life(tmp_path) as script:
            script.until(f"step {step}")
            for _ in range(2):
                everybody(script, signal.SIGTERM)
            assert script.end() == 0, script.err()
        assert step <= saved(tmp_path) < LAST
    with life(tmp_path) as script:
        assert script.until("end") == whole


def test_ctrl_c_twice_interrupts_a_step_that_takes_too_long(tmp_path: Path, whole: str) -> None:
    slow = SCRIPT.replace(PACE, "run.steps_done == 20 and (run.save(), print('slow', flush=True), time.sleep(600))")
    with life(tmp_path, slow, real=True) as script:
        script.until("slow")
        group(script, signal.SIGINT)
        script.until_err("SIGINT: saving and stopping after this step (Ctrl-C again: stop at once, without saving)")
        group(script, signal.SIGINT)
        assert script.end() == -signal.SIGINT
    assert "KeyboardInterrupt" in script.err()
    assert "asked to stop, but the script ended before it could save, at step 20; the next start" in script.err()
    assert saved(tmp_path) == 20
    with life(tmp_path) as script:
        assert script.until("end") == whole


STUCK = SCRIPT.replace("return torch.full", "index == 63 and time.sleep(600)\n        return torch.full").replace(
    PACE, "time.sleep(0.3)"
)


@pytest.mark.parametrize("number", size([signal.SIGINT], [signal.SIGTERM, signal.SIGINT]))
def test_a_stuck_loader_worker_blocks_no_stop(tmp_path: Path, number: int) -> None:
    with life(tmp_path, STUCK) as script:
        script.until("step 1")
        workers = descendants(script.pid)
        group(script, number)
        assert script.end() == 0, script.err()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert saved(tmp_path) >= 1


def test_workers_end_when_their_trainer_dies(tmp_path: Path) -> None:
    with life(tmp_path) as script:
        script.until("step 10")
        workers = descendants(script.pid)
        assert len(workers) == 3, "two workers and the saver"
        group(script, signal.SIGTERM)
        alone(script, signal.SIGKILL)
        script.end()
        ends = time.monotonic() + ENDS_S
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < ends
            time.sleep(0.05)


VALIDATING = SCRIPT.replace(
    "    loader = ", "    check = DataLoader(Noisy(), 8, num_workers=2)\n    loader = "
).replace(
    f"        {PACE}",
    """        if run.steps_done == 20:
            state = torch.get_rng_state()
            for number, _ in enumerate(check):
                number or print("validating", flush=True)
                time.sleep(0.05)
            torch.set_rng_state(state)""",
)


def test_other_loaders_workers_survive_the_signal(tmp_path: Path, whole: str) -> None:
    with life(tmp_path, VALIDATING) as script:
        script.until("validating")
        everybody(script, signal.SIGTERM)
        assert script.end() == 0, script.err()
    assert saved(tmp_path) == 20
    with life(tmp_path) as script:
        assert script.until("end") == whole


@pytest.mark.parametrize("method", size(["forkserver"], ["spawn", "forkserver"]))
def test_workers_of_other_start_methods_survive_the_signal(tmp_path: Path, whole: str, method: str) -> None:
    text = SCRIPT.replace(
        "num_workers=2", f"num_workers=1, multiprocessing_context={method!r}, persistent_workers=True"
    )
    with life(tmp_path, text, real=True) as script:
        script.until("step 10")
        group(script, signal.SIGTERM)
        assert script.end() == 0, script.err()
    assert 10 <= saved(tmp_path) < LAST
    with life(tmp_path, size(SCRIPT, text), real=WHOLE) as script:
        assert script.until("end") == whole


AFTER = (
    SCRIPT
    + """
    print("after", flush=True)
    time.sleep(600)
"""
)


def test_after_the_loop_signals_have_their_former_handlers(tmp_path: Path, whole: str) -> None:
    with life(tmp_path, AFTER) as script:
        assert script.until("end") == whole
        script.until("after")
        group(script, signal.SIGTERM)
        assert script.end() == -signal.SIGTERM
    assert "saving" not in script.err()
    with life(tmp_path, AFTER) as script:
        script.until("after")
        group(script, signal.SIGINT)
        script.end()
    assert "KeyboardInterrupt" in script.err()


FORK = SCRIPT.replace(
    f"        {PACE}",
    """        if run.steps_done == 20:
            own = os.fork()
            if own == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(own, signal.SIGTERM)  # CPython forgets it if a handler exists while os.fork() is under way
            print("own", os.waitstatus_to_exitcode(os.waitpid(own, 0)[1]), flush=True)""",
)


def test_a_fork_of_the_script_has_the_usual_signal_handlers(tmp_path: Path, whole: str) -> None:
    """SIGTERM ends the script's own process, however early it arrives, and the training goes on."""
    with life(tmp_path, FORK) as script:
        assert script.until("own") == f"own {-signal.SIGTERM}\n"
        assert script.until("end") == whole


SILENT = """
        if run.steps_done in (10, {save}):
            run.save()
        if run.steps_done == 20:
            print("here", flush=True)
            while not pathlib.Path("asked").exists():
                time.sleep(0.01)
            {then}
"""


@pytest.mark.parametrize(
    ("save", "then", "newest", "says"),
    [
        (10, "pass", 10, "0-10 stays the newest; the run ends without this save"),  # the last save is asked for in vain
        (10, "run.save(wait=False)", 20, "while it wrote 0-20; 0-10 stays the newest"),  # one before it was
        (20, "pass", 20, ""),  # and none is needed
    ],
)
def test_a_hanging_saver_blocks_no_stop(
    tmp_path: Path, whole: str, save: int, then: str, newest: int, says: str
) -> None:
    """Real stops: what it was given up for is said, and what it had saved is gone on from."""
    text = SCRIPT.replace(f"        {PACE}\n", SILENT.format(save=save, then=then))
    with life(tmp_path, text, real=WHOLE and save == 10 and then == "pass") as script:
        script.until("here")
        (saver,) = (pid for pid in descendants(script.pid) if b"saver.py" in command(pid))
        os.kill(saver, signal.SIGSTOP)
        alone(script, signal.SIGTERM)
        (tmp_path / "asked").touch()
        assert script.end() == 0, script.err()
    said = [line for line in script.err().splitlines() if "has done nothing" in line]
    assert len(said) == bool(says) and all(says in line and "nothing for 6 s" in line for line in said), script.err()
    assert f"stopped after step 20, newest checkpoint 0-{newest}" in script.err()
    assert not Path(f"/proc/{saver}").exists()
    assert saved(tmp_path) == newest
    with life(tmp_path) as script:
        assert script.until("end") == whole


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


GANG = (
    SCRIPT.replace("    model = nn", "    torch.distributed.init_process_group('gloo')\n    model = nn")
    .replace("    optimizer = ", "    model = nn.parallel.DistributedDataParallel(model)\n    optimizer = ")
    .replace('print("step",', 'run.rank or print("step",')
    .replace('print("end",', 'torch.distributed.barrier()\n    run.rank or print("end",')
)


@contextmanager
def gang(folder: Path, *, real: bool = False) -> Iterator[Script]:
    """The same with two ranks, under a torchrun: its pid is the script's."""
    with life(folder, GANG, 2, real=real) as script:
        yield script


@pytest.fixture(scope="module")
def whole_gang(tmp_path_factory: pytest.TempPathFactory) -> str:
    with gang(tmp_path_factory.mktemp("gang")) as script:
        return script.until("end")


@pytest.mark.parametrize(
    ("to", "number"),
    size(
        [(alone, signal.SIGTERM), (group, signal.SIGINT)],
        [(alone, signal.SIGTERM), (everybody, signal.SIGTERM), (group, signal.SIGINT)],
    ),
)
def test_torchrun_is_signalled_and_its_ranks_save_the_same_step(
    tmp_path: Path, whole_gang: str, to: Callable[[Script, int], None], number: int
) -> None:
    with gang(tmp_path, real=WHOLE and to is alone) as script:
        script.until("step 5")
        below = descendants(script.pid)
        to(script, number)
        script.end()  # with torchrun's own code for a signal
    step = saved(tmp_path)
    assert 5 <= step < LAST // 2, script.err()
    assert f"stopped after step {step}, newest checkpoint 0-{step}" in script.err()
    assert "saving and stopping once all 2 ranks have ended a step" in script.err()
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
    with gang(tmp_path) as script:
        assert script.until("end") == whole_gang
        assert script.end() == 0, script.err()
