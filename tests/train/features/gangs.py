"""Gangs that train features: each run alone, stopped, killed, and taken up by other processes.

All features of a gang run in the same processes, one after the other: what costs time is to start them. Only those that
are killed have processes of their own. They keep an image after each step, and copy it at the worst moment.
Sharded state has no images, so it is saved instead.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import spotkeeper
from spotkeeper.train.agent_link.control import AgentRequest
from spotkeeper.train.checkpoint import snapshot
from spotkeeper.train.checkpoint.client import Client
from spotkeeper.train.checkpoint.protocol import IMAGES
from spotkeeper.train.checkpoint.strategy import ResumePoint
from spotkeeper.train.core.shards import is_shared
from spotkeeper.train.loop import boundary
from spotkeeper.train.loop.position import RunPosition
from tests.train.checkpoint.test_snapshot import LatestCopier
from tests.train.features.trainings import COPIES, FEATURES, STEPS, Make
from tests.train.forks import FORKS
from tests.train.jobs import _digest as digest
from tests.train.savers import start_saver

_STOP = 3  # asked for after this step; agreed on one later
_KILL = STEPS - 1  # step before whose end all ranks are killed


class Life(Enum):
    """Of a feature's training: ALONE from beginning to end; STOPPED in the middle, and RESUMED in the same folder;
    KILLED in the middle, and RESTORED from the saver's memory."""

    ALONE = "alone"
    STOPPED = "stopped"
    RESUMED = "resumed"
    KILLED = "killed"
    RESTORED = "restored"

    @property
    def begun(self) -> Life | None:
        """The life that this one continues."""
        return {"resumed": Life.STOPPED, "restored": Life.KILLED}.get(self.value)


@dataclass(frozen=True)
class Told:
    """What a rank says of one life. ``state``: a digest of all that it has at the end."""

    begun: int = 0
    steps: int = 0
    state: str = ""
    error: str = ""
    source: str = ""  # where the state came from: "memory" is the saver's


@dataclass(frozen=True)
class Outcome:
    """Of a feature in a world, by rank."""

    alone: list[Told]
    stopped: list[Told]
    resumed: list[Told]
    killed: list[Told] = field(default_factory=list)
    restored: list[Told] = field(default_factory=list)

    def fault(self) -> str:
        """What is not as promised; "" if all is."""
        for life in (self.alone, self.stopped, self.resumed, self.killed, self.restored):
            if errors := [told.error for told in life if told.error]:
                return errors[0]
        if any(not 0 < told.steps < STEPS for told in self.stopped):
            return f"was not stopped in the middle: {[told.steps for told in self.stopped]}"
        if [told.begun for told in self.resumed] != [told.steps for told in self.stopped]:
            return f"resumed at {[told.begun for told in self.resumed]}"
        return self._lost() or self._differ(self.resumed, "stopped") or self._differ(self.restored, "killed")

    def _lost(self) -> str:
        """Where the killed training began again, if that is not its last image."""
        if not self.killed:
            return ""
        steps, source = [told.begun for told in self.restored], self.restored[0].source
        images = self.killed[0].source == "images"
        least = _KILL - 1 if images else 1
        good = all(least <= step < _KILL for step in steps) and (source == "memory" or not images)
        return "" if good else f"restored from {source} at {steps}"

    def _differ(self, life: Sequence[Told], what: str) -> str:
        pairs = zip(self.alone, life, strict=bool(life))
        differ = [rank for rank, (alone, told) in enumerate(pairs) if alone != replace(told, begun=0, source="")]
        return f"ranks {differ} end with other bits after they were {what}" if differ else ""


def run(
    world: int, names: tuple[str, ...], root: Path, kills: tuple[str, ...] | None = None
) -> tuple[dict[str, Outcome], float]:
    """All lives of these features in one world, and the processor seconds they took. ``kills``: those also killed."""
    kills = names if kills is None else kills
    for life in (Life.ALONE, Life.STOPPED, Life.RESUMED):
        _start(world, names, root, life)
    savers = [start_saver(_saver(root, name)) for name in kills]
    try:
        for name in kills:
            _start(world, (name,), root, Life.KILLED)
        _start(world, kills, root, Life.RESTORED)
    finally:
        for saver in savers:
            saver.kill()
            saver.wait()
    lives = {name: [_read(root, life, name, world) for life in Life] for name in names}
    found = {name: Outcome(*(told if name in kills else told[:3])) for name, told in lives.items()}
    return found, sum(float(path.read_text()) for path in root.glob("*/cpu.*"))


def _saver(root: Path, name: str) -> Path:
    return root / f"{list(FEATURES).index(name)}.sock"


def _read(root: Path, life: Life, name: str, world: int) -> list[Told]:
    paths = [root / life.value / f"{name}.{rank}" for rank in range(world)]
    return [Told(**json.loads(path.read_text())) if path.exists() else Told(error="it never ended") for path in paths]


def _start(world: int, names: tuple[str, ...], root: Path, life: Life) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    (root / life.value).mkdir(parents=True, exist_ok=True)
    workers = [FORKS.Process(target=_rank, args=(world, names, root, life, rank, port)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(500)
        if worker.is_alive():
            worker.kill()
            worker.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid or 0, signal.SIGKILL)  # data workers of a killed rank


def _rank(world: int, names: tuple[str, ...], root: Path, life: Life, rank: int, port: int) -> None:
    os.setsid()
    out = root / life.value
    log = os.open(out / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), GROUP_RANK="0")
    torch.set_num_threads(1)
    boundary.EVERY_S = 0.0
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    for name in names:
        if life in (Life.KILLED, Life.RESTORED):
            os.environ.update(SPOTKEEPER_SAVER=str(_saver(root, name)), SPOTKEEPER_GEN=str(1 + (life is Life.RESTORED)))
        teller = Teller(out / f"{name}.{rank}", out / f"cpu.{names[0]}.{rank}")
        try:
            folder = root / (life.begun or life).value / "of" / name
            teller.tell(train(FEATURES[name], folder, rank, world, life, teller))
        except Exception:
            teller.tell(Told(error=traceback.format_exc()))
    dist.destroy_process_group()


@dataclass(frozen=True)
class Teller:
    """Writes down what a rank says of one life, and its processor seconds."""

    path: Path
    cpu: Path

    def tell(self, told: Told) -> None:
        self.path.write_text(json.dumps(asdict(told)))
        self.cpu.write_text(str(time.process_time()))

    def die(self, told: Told, world: int) -> None:
        """With all ranks at once: they are killed between an optimizer's step and its boundary."""
        self.tell(told)
        if world > 1:
            dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def train(make: Make, folder: Path, rank: int, world: int, life: Life, teller: Teller) -> Told:
    """One life of a script, as its author would write it."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    training = make(world)
    torch.manual_seed(900 + rank if life.begun else 100 + rank)  # what was saved has to win
    random.seed(rank)
    sources = _sources()
    if life is Life.KILLED:
        sources = _keep_images(sharded=any(map(is_shared, training.model.parameters())))
    run = spotkeeper.attach(training.model, training.optimizer, checkpoint_dir=folder, **training.parts)
    begun = run.steps_done
    try:
        for batch in run.steps(training.loader, steps=STEPS):
            training.step(batch)
            if life is Life.KILLED and run.steps_done == _KILL:
                teller.die(Told(begun, run.steps_done, source="".join(sources)), world)
            if life is Life.STOPPED and run.steps_done >= _STOP and rank == world - 1:
                run._control.request(AgentRequest.SAVE_STOP)
    except SystemExit:
        return Told(begun, run.steps_done)
    optimizers = training.optimizer if isinstance(training.optimizer, list) else [training.optimizer]
    state = [
        dict(training.model.state_dict()),
        [each.state_dict() for each in optimizers],
        {name: part if isinstance(part, dict) else part.state_dict() for name, part in training.parts.items()},
        [torch.get_rng_state(), random.getstate()],
    ]
    return Told(begun, run.steps_done, digest(_local(state)), source="".join(sources))


def _sources() -> list[str]:
    """A list that gets the source of the state that is loaded."""
    found: list[str] = []
    load = RunPosition.load

    def note(self: RunPosition, point: ResumePoint) -> None:
        RunPosition.load = load  # type: ignore[method-assign]
        found.append(point.source)
        load(self, point)

    RunPosition.load = note  # type: ignore[method-assign]
    return found


def _keep_images(*, sharded: bool) -> list[str]:
    """Keep an image after each step, copied at the worst moment, however long the saver takes to give memory."""
    os.environ.update(SPOTKEEPER_SNAPSHOTS="1", SPOTKEEPER_INTERVAL_S="0.001" if sharded else "3600")
    if sharded:
        return ["saves"]
    boundary.Agreement.after_step = lambda *_: boundary.StepAction.IMAGE  # type: ignore[method-assign]
    take, find = Client.image, Client.next_image
    Client.image = lambda self, number, size, wait=True: take(self, number, size, wait=True)  # type: ignore[method-assign]

    def next_image(self: Client) -> int | None:
        while (number := find(self)) is None and any(map(self.images.awaits, range(IMAGES))):
            self._read_soon()
        return number

    Client.next_image = next_image  # type: ignore[method-assign]
    snapshot.ThreadPoolExecutor = lambda *_: WorstCopier()  # type: ignore[assignment, misc]
    return ["images"]


class WorstCopier(LatestCopier):
    """Copies while the weights are what no image may have, otherwise as late as is allowed."""

    def submit(self, work: Callable[[Any], None], what: Any) -> Future[None]:
        future = super().submit(work, what)
        COPIES.append(future.exception)
        return future


def _local(part: Any) -> Any:
    """Shared tensors as this rank's part, names as they are without a compiler."""
    if isinstance(part, torch.Tensor):
        return part.to_local() if is_shared(part) else part
    if isinstance(part, dict):
        return {str(key).replace("_orig_mod.", ""): _local(value) for key, value in part.items()}
    return [_local(each) for each in part] if isinstance(part, (list, tuple)) else part
