"""Steps that a job repeats after an unannounced loss of a machine, with ``checkpoint.snapshots``.

The example's GPT trains on three machines in small: three ranks over gloo, each with a saver, a control file and a disk
of its own. At random moments one of them is killed with its saver, its disk is emptied, and the other ranks are killed,
as their agents do. The next generation resumes from the newest image of the survivors' savers. No other save is due.

Each loss counts in *spacings*: the number of steps between the two newest images at the kill, seen in the memory of a
saver. Spacings differ from kill to kill, so the largest loss is not divided by the largest spacing. Images are made at
most every 0.2 s, after the ranks have agreed, and so rarely that they cost at most 1 % of the training time.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from spotkeeper.train.agent_link.control import NAME, Commit, Control
from spotkeeper.train.checkpoint import saver
from spotkeeper.train.checkpoint.durable import Buffer
from spotkeeper.train.checkpoint.seal import read_seal

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "examples" / "gpt" / "train.py"
NODES, KILLS, SEED = 3, int(os.environ.get("SPOTKEEPER_BENCH_KILLS", "20")), 7
TRAINS_S = (1.0, 4.0)  # how long a generation trains before its kill
IMAGES = 4  # seen before that; the first one's copy is checked, and the memory is new
STEP_S = "0.05"
LIMIT_S = 120.0
MEMORY = "/memfd:spotkeeper"


@dataclass(frozen=True)
class Kill:
    """What one kill cost. ``spacing``: steps between the two newest images at that moment."""

    lost: int  # steps
    spacing: int
    step_s: float

    @classmethod
    def of(cls, reached: int, restored: int, images: Sequence[int], step_s: float) -> Kill:
        """Of a generation that reached a step. ``restored``: the next one's first step; ``images``: oldest first."""
        return cls(reached - restored, images[-1] - images[-2], step_s)

    @property
    def ratio(self) -> float:
        return self.lost / self.spacing


class Machine:
    """One machine in small: a disk, a saver, and the rank that trains there."""

    def __init__(self, root: Path, node: int, device: str = "cpu") -> None:
        self.root, self.node, self._device = root / f"node{node}", node, device
        self.saver: subprocess.Popen[bytes] | None = None
        self.rank: subprocess.Popen[bytes] | None = None
        self.control: Control | None = None

    def boot(self) -> None:
        """Start the saver on an empty disk."""
        shutil.rmtree(self.root, ignore_errors=True)
        (self.root / "ckpt").mkdir(parents=True)
        env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        self.saver = subprocess.Popen(saver.command(self.root / "saver"), env=env)

    def train(self, gen: int, port: int) -> None:
        run = self.root / f"run{gen}"
        run.mkdir()
        self.control = Control.create(run / NAME)
        env = {
            "PYTHONPATH": str(REPOSITORY),
            "RANK": str(self.node),
            "WORLD_SIZE": str(NODES),
            "LOCAL_RANK": "0",
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SPOTKEEPER_RUN": str(run),
            "SPOTKEEPER_GEN": str(gen),
            "SPOTKEEPER_SLOT": str(self.node),
            "SPOTKEEPER_SAVER": str(self.root / "saver"),
            "SPOTKEEPER_CKPT": str(self.root / "ckpt"),
            "SPOTKEEPER_OUTPUT": str(self.root / "output"),
            "SPOTKEEPER_SNAPSHOTS": "1",
            "SPOTKEEPER_INTERVAL_S": "100000",
            "OMP_NUM_THREADS": "1",
        }
        argv = [sys.executable, str(SCRIPT), "--steps", "1000000", "--step-s", STEP_S, "--device", self._device]
        with (self.root / f"log{gen}").open("wb") as log:
            self.rank = subprocess.Popen(argv, env=os.environ | env, cwd=run, stdout=log, stderr=log)

    @property
    def step(self) -> int:
        """The newest step, or 0 before the first step of this generation."""
        return self.control.step if self.control is not None and self.control.first_step_at else 0

    def image(self) -> Commit | None:
        """The newest complete image in the saver's memory."""
        assert self.saver is not None
        found = []
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{self.saver.pid}/fd").iterdir():
                if str(link.readlink()).startswith(MEMORY):
                    found.append(_commit_of(link))
        return max((commit for commit in found if commit), default=None)

    def end_rank(self) -> None:
        if self.rank is not None:
            self.rank.kill()
            self.rank.wait()

    def end(self) -> None:
        self.end_rank()
        if self.saver is not None:
            self.saver.kill()
            self.saver.wait()


def _commit_of(link: Path) -> Commit | None:
    memory = Buffer.__new__(Buffer)
    memory.fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory.size = os.fstat(memory.fd).st_size
        sealed = read_seal(memory)
        return sealed.manifest.commit if sealed else None
    finally:
        os.close(memory.fd)


def figures(device: str = "cpu", count: int = KILLS) -> list[dict[str, object]]:
    """For ``bench/run.py``. ``device``: where all machines train; ``count``: kills."""
    kills = measure(device, count)
    worst = max(kill.ratio for kill in kills)
    lost, spacings = [kill.lost for kill in kills], [kill.spacing for kill in kills]
    seconds = max(kill.lost * kill.step_s for kill in kills)
    spacing_s = median(kill.spacing * kill.step_s for kill in kills)
    return [
        {
            "name": "loss.steps_lost_max",
            "value": round(worst, 2),
            "unit": "spacings",
            "goal": "<= 2",
            "holds": worst <= 2.0,
            "against": f"largest of {len(kills)} kills of one of {NODES} machines, each against its spacing; at most "
            f"{max(lost)} steps, {seconds:.1f} s of training (median {median(lost):g} steps); an image every "
            f"{min(spacings)} to {max(spacings)} steps, {spacing_s:.1f} s",
        }
    ]


def measure(device: str = "cpu", count: int = KILLS) -> list[Kill]:
    """Kill machines at random moments."""
    draw = random.Random(SEED)  # noqa: S311 - a draw
    kills: list[Kill] = []
    with booted(device) as machines:
        before = _train(machines, 0, draw.uniform(*TRAINS_S))
        for gen in range(1, count + 1):
            reached, step_s, images = before
            dead = draw.choice(machines)
            for each in (dead, *machines):
                each.end_rank()
            dead.end()
            dead.boot()
            before = _train(machines, gen, draw.uniform(*TRAINS_S))
            control = machines[0].control
            restored = control.restored if control is not None else None
            kills.append(Kill.of(reached, restored.step if restored else 0, images, step_s))
    return kills


@contextlib.contextmanager
def booted(device: str = "cpu") -> Iterator[list[Machine]]:
    root = Path(tempfile.mkdtemp(prefix="bench-loss-", dir=REPOSITORY / "bench"))
    machines = [Machine(root, node, device) for node in range(NODES)]
    try:
        for machine in machines:
            machine.boot()
        yield machines
    finally:
        for machine in machines:
            machine.end()
        shutil.rmtree(root, ignore_errors=True)


def _train(machines: list[Machine], gen: int, for_s: float) -> tuple[int, float, list[int]]:
    """Run one generation until its kill is due.

    Returns the newest step of any rank, the seconds that a step takes, and the steps of its images.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for machine in machines:
        machine.train(gen, port)
    end, due = time.monotonic() + LIMIT_S, math.inf
    images: list[int] = []
    while time.monotonic() < due:
        if time.monotonic() > end or any(each.rank is None or each.rank.poll() is not None for each in machines):
            raise RuntimeError(
                f"generation {gen} does not train:\n{(machines[0].root / f'log{gen}').read_text()[-2000:]}"
            )
        newest = machines[0].image()
        if newest is not None and newest.gen == gen and newest.step not in images:
            images.append(newest.step)
            if len(images) == IMAGES:
                due = time.monotonic() + for_s
        time.sleep(0.01)
    control = machines[0].control
    return max(machine.step for machine in machines), control.step_s if control is not None else 0.0, images


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
