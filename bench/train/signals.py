"""From a signal to the end of the process with its step saved: the time a terminal, Slurm or a scheduler waits.

A script with loader workers in its own session. SIGTERM goes to the process, to its group, and to every process of the
job; Ctrl-C to the group; one loader has a worker stuck in a sample; one saver is stopped; one gang of two runs under
torchrun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GOAL_S = 10.0
PATIENCE_S = 300.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SCRIPT = """
import os, sys, time
import spotkeeper, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if sys.argv[1:] == ["stuck"] and index == 99:
            time.sleep(600)
        return torch.randn(64)

torch.set_num_threads(1)
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1))
model = nn.parallel.DistributedDataParallel(model) if "RANK" in os.environ else model
optimizer = torch.optim.Adam(model.parameters())
run = spotkeeper.attach(model, optimizer)
for x in run.steps(DataLoader(Samples(), 4, num_workers=2)):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if run.steps_done == 10:
        run.save()
    run.rank or print("step", run.steps_done, flush=True)
    time.sleep(0.05)
"""


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    took = {name: _took(*case) for name, case in CASES.items()}
    worst = max(took.values())
    each = ", ".join(f"{name} {value:.1f}" for name, value in took.items())
    return [
        {
            "name": "signals.saved_to_exit_s",
            "value": round(worst, 2),
            "unit": "s",
            "goal": f"<= {GOAL_S:g}",
            "holds": worst <= GOAL_S,
            "against": "from the signal to the end of the process with its step saved, or an earlier one where the "
            f"saver is stopped; two loader workers: {each}",
        }
    ]


def _one(pid: int, number: int) -> None:
    os.kill(pid, number)


def _group(pid: int, number: int) -> None:
    os.killpg(pid, number)


def _all(pid: int, number: int) -> None:
    for each in [pid, *_below(pid)]:
        os.kill(each, number)


def _one_without_saver(pid: int, number: int) -> None:
    for each in _below(pid):
        if b"saver.py" in Path(f"/proc/{each}/cmdline").read_bytes():
            os.kill(each, signal.SIGSTOP)
    os.kill(pid, number)


def _below(pid: int) -> list[int]:
    own = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [each for child in own for each in _below(child)]


CASES: dict[str, tuple[Callable[[int, int], None], signal.Signals, str]] = {
    "SIGTERM to the process": (_one, signal.SIGTERM, ""),
    "to its group": (_group, signal.SIGTERM, ""),
    "to the whole job": (_all, signal.SIGTERM, ""),
    "Ctrl-C": (_group, signal.SIGINT, ""),
    "SIGTERM beside a stuck worker": (_group, signal.SIGTERM, "stuck"),
    "SIGTERM with a stopped saver": (_one_without_saver, signal.SIGTERM, ""),
    "SIGTERM to torchrun with two ranks": (_one, signal.SIGTERM, "torchrun"),
}


def _took(send: Callable[[int, int], None], number: signal.Signals, how: str) -> float:
    from spotkeeper.train.checkpoint import store

    with tempfile.TemporaryDirectory(dir=REPOSITORY / "bench") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        env = {key: value for key, value in os.environ.items() if not key.startswith("SPOTKEEPER_")}
        launcher = TORCHRUN if how == "torchrun" else ()
        process = subprocess.Popen(
            [sys.executable, *launcher, "train.py", *filter(None, [how])],
            cwd=folder,
            env=env | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            step = next(line for line in process.stdout if line == "step 20\n")
            began = time.monotonic()
            send(process.pid, number)
            process.communicate(timeout=PATIENCE_S)
            took = time.monotonic() - began
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        commit = store.newest(folder / ".spotkeeper/ckpt/train").commit
        least = 10 if send is _one_without_saver else int(step.split()[1])  # saved before the signal
        wrong = process.returncode and not launcher  # torchrun has an exit code of its own for a signal
        if wrong or commit is None or commit.step < least:
            raise RuntimeError(f"exit code {process.returncode}, newest checkpoint {commit}")
        return took


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
