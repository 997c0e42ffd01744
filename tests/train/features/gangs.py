"""Gangs that train features: each run alone, then stopped, then taken up by other processes.

All features of a gang run in the same processes, one after the other: what costs time is
to start them.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import socket
import time
import traceback
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import spotkeeper
from spotkeeper.train.agent_link.control import AgentRequest
from spotkeeper.train.core.shards import is_shared
from spotkeeper.train.loop import boundary
from tests.train.features.trainings import FEATURES, STEPS, Make
from tests.train.forks import FORKS
from tests.train.jobs import _digest as digest

_STOP = 3  # asked for after this step; agreed on one later


class Life(Enum):
    """Of a feature's training: ALONE from beginning to end; STOPPED in the middle, and RESUMED in the same folder."""

    ALONE = "alone"
    STOPPED = "stopped"
    RESUMED = "resumed"


@dataclass(frozen=True)
class Told:
    """What a rank says of one life. ``state``: a digest of all that it has at the end."""

    begun: int = 0
    steps: int = 0
    state: str = ""
    error: str = ""


@dataclass(frozen=True)
class Outcome:
    """Of a feature in a world, by rank."""

    alone: list[Told]
    stopped: list[Told]
    resumed: list[Told]

    def fault(self) -> str:
        """What is not as promised; "" if all is."""
        for life in (self.alone, self.stopped, self.resumed):
            if errors := [told.error for told in life if told.error]:
                return errors[0]
        if any(not 0 < told.steps < STEPS for told in self.stopped):
            return f"was not stopped in the middle: {[told.steps for told in self.stopped]}"
        if [told.begun for told in self.resumed] != [told.steps for told in self.stopped]:
            return f"resumed at {[told.begun for told in self.resumed]}"
        pairs = zip(self.alone, self.resumed, strict=True)
        differ = [rank for rank, (alone, resumed) in enumerate(pairs) if alone != replace(resumed, begun=0)]
        return f"ranks {differ} end with other bits" if differ else ""


def run(world: int, names: tuple[str, ...], root: Path) -> tuple[dict[str, Outcome], float]:
    """All lives of these features in one world, and the processor seconds they took."""
    for life in Life:
        _start(world, names, root, life)
    found = {name: Outcome(*(_read(root, life, name, world) for life in Life)) for name in names}
    return found, sum(float(path.read_text()) for path in root.glob("*/cpu.*"))


def _read(root: Path, life: Life, name: str, world: int) -> list[Told]:
    paths = [root / life.value / f"{name}.{rank}" for rank in range(world)]
    return [Told(**json.loads(path.read_text())) if path.exists() else Told(error="it never ended") for path in paths]


def _start(world: int, names: tuple[str, ...], root: Path, life: Life) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    (root / life.value).mkdir(parents=True)
    workers = [FORKS.Process(target=_rank, args=(world, names, root, life, rank, port)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(500)
        if worker.is_alive():
            worker.kill()
            worker.join()


def _rank(world: int, names: tuple[str, ...], root: Path, life: Life, rank: int, port: int) -> None:
    out = root / life.value
    log = os.open(out / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), GROUP_RANK="0")
    torch.set_num_threads(1)
    boundary.EVERY_S = 0.0
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    for name in names:
        folder = root / ("left" if life is Life.ALONE else "taken") / name
        try:
            told = train(FEATURES[name], folder, rank, world, life)
        except Exception:
            told = Told(error=traceback.format_exc())
        (out / f"{name}.{rank}").write_text(json.dumps(asdict(told)))
    (out / f"cpu.{rank}").write_text(str(time.process_time()))
    dist.destroy_process_group()


def train(make: Make, folder: Path, rank: int, world: int, life: Life) -> Told:
    """One life of a script, as its author would write it."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    training = make(world)
    torch.manual_seed(900 + rank if life is Life.RESUMED else 100 + rank)  # what was saved has to win
    random.seed(rank)
    run = spotkeeper.attach(training.model, training.optimizer, checkpoint_dir=folder, **training.parts)
    begun = run.steps_done
    try:
        for batch in run.steps(training.loader, steps=STEPS):
            training.step(batch)
            if life is Life.STOPPED and run.steps_done >= _STOP and rank == world - 1:
                run._control.request(AgentRequest.SAVE_STOP)
    except SystemExit:
        return Told(begun, run.steps_done)
    optimizers = training.optimizer if isinstance(training.optimizer, list) else [training.optimizer]
    state = [
        dict(training.model.state_dict()),
        [each.state_dict() for each in optimizers],
        {name: part.state_dict() for name, part in training.parts.items()},
        [torch.get_rng_state(), random.getstate()],
    ]
    return Told(begun, run.steps_done, digest(_local(state)))


def _local(part: Any) -> Any:
    """Shared tensors as this rank's part, names as they are without a compiler."""
    if isinstance(part, torch.Tensor):
        return part.to_local() if is_shared(part) else part
    if isinstance(part, dict):
        return {str(key).replace("_orig_mod.", ""): _local(value) for key, value in part.items()}
    return [_local(each) for each in part] if isinstance(part, (list, tuple)) else part
