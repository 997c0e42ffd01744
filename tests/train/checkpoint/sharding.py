"""A small sharded training whose whole state can be told, saved in one gang and taken up by another."""

from __future__ import annotations

import datetime
import json
import os
import socket
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import spotkeeper
from spotkeeper.train.checkpoint import snapshot
from spotkeeper.train.loop import boundary
from tests.train.checkpoint.test_snapshot import LatestCopier
from tests.train.forks import FORKS
from tests.train.jobs import _digest as digest

SAVED = 3  # steps


@dataclass(frozen=True)
class Life:
    """One life of the script. ``train``: make the checkpoint; else only begin, and tell what was found."""

    world: int
    nodes: int
    folder: Path
    out: Path
    train: bool = False
    overlap: bool = False  # with ``train``: save while it trains, copied as late as is allowed, and never at the end


def live(life: Life) -> list[dict[str, Any]]:
    """What each rank told."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    life.out.mkdir(parents=True, exist_ok=True)
    workers = [FORKS.Process(target=_rank, args=(life, rank, port)) for rank in range(life.world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        if worker.is_alive():
            worker.kill()
            worker.join()
    return [json.loads((life.out / str(rank)).read_text()) for rank in range(life.world)]


def _rank(life: Life, rank: int, port: int) -> None:
    log = os.open(life.out / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    each = life.world // life.nodes
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(life.world))
    os.environ.update(LOCAL_RANK=str(rank % each), GROUP_RANK=str(rank // each))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=life.world, timeout=datetime.timedelta(seconds=120))
    try:
        told: dict[str, Any] = _begin(life, rank)
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    told["log"] = (life.out / f"log{rank}").read_text()
    (life.out / str(rank)).write_text(json.dumps(told))
    dist.destroy_process_group()


def _begin(life: Life, rank: int) -> dict[str, Any]:
    torch.manual_seed(7 if life.train else 8)  # the same on all ranks, and another when it begins again
    model = module()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if life.overlap:
        return _overlap(life, model, optimizer)
    run = spotkeeper.attach(model, optimizer, checkpoint_dir=life.folder)
    if life.train:
        data = TensorDataset(torch.randn(60, 6), torch.randn(60, 5))
        for x, y in run.steps(DataLoader(data, 6), steps=SAVED):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"step": run.steps_done, "commit": str(run.wait()), "state": digest(whole(model, optimizer))}


def _overlap(life: Life, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    os.environ.update(SPOTKEEPER_SNAPSHOTS="1", SPOTKEEPER_INTERVAL_S="0.000001")
    late = LatestCopier()
    snapshot.CHECKED = boundary.EVERY_S = 0
    snapshot.EVERY = 1000
    snapshot.ThreadPoolExecutor = lambda *_: late  # type: ignore[assignment, misc]
    run = spotkeeper.attach(model, optimizer, checkpoint_dir=life.folder)
    run._boundary._strategy._copier._begun = 1  # type: ignore[attr-defined]  # copy 0 would be checked
    states = {0: digest(whole(model, optimizer))}
    data = TensorDataset(torch.randn(200, 6), torch.randn(200, 5))
    for x, y in run.steps(DataLoader(data, 6), steps=20):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        states[run.steps_done] = digest(whole(model, optimizer))
        if len(states) == 13:
            break
    return {"commit": str(run.wait()), "states": states, "copies": late.copies}


def module() -> nn.Module:
    """Sizes that no number of ranks divides; a tensor that is smaller than the gang; a buffer."""
    return nn.Sequential(
        nn.Linear(6, 11), nn.BatchNorm1d(11), nn.GELU(), nn.Linear(11, 5), nn.Linear(5, 5), nn.Linear(5, 1)
    )


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All parameters and moments, put together from all ranks. Collective."""
    params = dict(model.named_parameters())
    moments = optimizer.state_dict()["state"]
    return [
        {name: _full(param) for name, param in params.items()},
        {at: {name: _full(value) for name, value in state.items()} for at, state in moments.items()},
    ]


def _full(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
