"""What the tests train: small, but with all that makes resuming hard. Runs inside torchrun's workers.

Dropout, BatchNorm (ranks' buffers differ), augmentation, tied weights, accumulation, a
scheduler; DDP with buckets so small that it sorts them anew after the first step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import spotkeeper
from spotkeeper.train.agent_link.control import NAME, AgentRequest, Commit, Control
from spotkeeper.train.loop import boundary

TRIES = 40  # at each step, of which some follow: a save may end between two steps only


@dataclass(frozen=True)
class Event:
    """What happens at a step on a rank: ``stop``, ``save`` (the agent's wish), ``kill`` once a save is durable."""

    step: int
    rank: int
    what: str


@dataclass(frozen=True)
class Job:
    """A training and what befalls it."""

    out: Path
    kind: str = "conv"  # or tied; or fsdp, the first one sharded
    steps: int = 9
    workers: int = 0
    accumulate: int = 1
    weighted: bool = False
    batch: int = 4
    width: int = 12
    events: tuple[Event, ...] = ()
    seen: Path | None = None  # every sample trained on: <epoch> <index>


class Noisy(Dataset[tuple[Tensor, Tensor, int]]):
    """Images with an augmentation that draws from two generators."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        image = torch.full((3, 8, 8), index / 50.0) + 0.1 * torch.randn(3, 8, 8)
        if random.random() < 0.5:  # noqa: S311 - an augmentation
            image = image.flip(-1)
        return image, torch.tensor(index % 5), index


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.late = nn.Linear(width, 5)  # declared first, used last: its gradient is ready first
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.late(self.drop(torch.relu(self.second(x)).mean((2, 3))))


class Tied(nn.Module):
    """Input and output share a weight, as language models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Linear(3 * 64, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(3 * 64, width)
        self.head.weight = self.tokens.weight
        self.out = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        hidden = self.layer(torch.stack((self.tokens(x), self.head(x)), 1))
        return self.out(hidden.mean(1))


def train(job: Job) -> None:
    """One rank of one generation. Writes its final state's hash to ``job.out`` when the run is done."""
    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.manual_seed(100 + rank)
    random.seed(rank)
    if world > 1:
        dist.init_process_group("gloo")
    boundary.EVERY_S = 0.0  # steps here take a few ms: agree after each, so that events land where they should
    module = (Tied if job.kind == "tied" else Conv)(job.width)
    model: Any = _spread(module, job.kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=job.steps)
    data = Noisy()
    sampler = WeightedRandomSampler([1.0 + index for index in range(50)], 60) if job.weighted else None
    loader = DataLoader(data, job.batch, shuffle=sampler is None, sampler=sampler, num_workers=job.workers)
    run = spotkeeper.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    micro = 0
    for image, label, index in run.steps(loader, steps=job.steps):
        micro += 1
        last = micro % job.accumulate == 0
        with contextlib.nullcontext() if last or world == 1 else model.no_sync():
            loss = nn.functional.cross_entropy(model(image), label)
            (loss / job.accumulate).backward()
        if job.seen:
            with job.seen.open("a") as stream:
                stream.writelines(f"{run.epoch} {int(each)}\n" for each in index)
        if not last:
            continue
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        for event in job.events:
            _happen(event, run)
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / f"{rank}.json").write_text(
        json.dumps(
            {
                "step": run.steps_done,
                "state": _digest(dict(module.state_dict()), optimizer.state_dict(), scheduler.state_dict()),
                "random": _digest(torch.get_rng_state(), random.getstate()),
            }
        )
    )
    if world > 1:
        dist.destroy_process_group()


def _spread(module: nn.Module, kind: str, world: int) -> nn.Module:
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard  # two seconds, for one test

        return fully_shard(module)
    return DistributedDataParallel(module, bucket_cap_mb=0.002) if world > 1 else module


def _happen(event: Event, run: spotkeeper.Run) -> None:
    """Events are of the first generation that reaches their step."""
    if run.rank != event.rank or run.steps_done < event.step or run.generation > 1:
        return
    control = Control.open(Path(os.environ["SPOTKEEPER_RUN"]) / NAME)
    if event.what == "kill":
        for _ in range(TRIES):
            if (commit := control.commit) and commit >= Commit(1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)  # the run must not end before the save does, on however busy a machine
    elif run.steps_done == event.step:
        control.request(AgentRequest.SAVE if event.what == "save" else AgentRequest.SAVE_STOP, time.time() + 60)
    control.close()


def _digest(*parts: object) -> str:
    sha = hashlib.sha256()
    for part in parts:
        _feed(sha, part)
    return sha.hexdigest()


def _feed(sha: Any, part: object) -> None:
    if hasattr(part, "to_local"):
        part = part.to_local()
    if isinstance(part, Tensor):
        sha.update(part.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(part, dict):
        for key, value in part.items():
            sha.update(repr(key).encode())
            _feed(sha, value)
    elif isinstance(part, (list, tuple)):
        for value in part:
            _feed(sha, value)
    else:
        sha.update(pickle.dumps(part))


def skip_replay() -> None:
    """For the test that shows why the order of gradients is replayed."""
    from spotkeeper.train.core import gradorder

    gradorder.replay = lambda *_: None
    assert sys.modules["spotkeeper.train.loop.position"].gradorder is gradorder
