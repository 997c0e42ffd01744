"""A script without the library: it saves on SIGTERM and resumes from its own files.

    torchrun --nproc-per-node 2 train.py --steps 200
    spotkeeper submit job.yaml

docs/train.md, "A script without the library", has the contract; its three places are marked.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

HOME = Path(os.environ.get("SPOTKEEPER_CKPT", "checkpoints"))  # <- 1: files here are there again
EVERY = 25  # steps between saves, for machines that are lost without notice
KEPT = 2  # the other ranks' newest may be one older than ours


def file_of(step: int) -> Path:
    return HOME / f"rank{dist.get_rank()}-step{step:06d}.pt"


def steps_saved() -> list[int]:
    found = HOME.glob(f"rank{dist.get_rank()}-step*.pt")
    return sorted(int(path.stem.partition("-step")[2]) for path in found)


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write atomically: a temporary file, then a rename."""
    path = file_of(step)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_suffix(".tmp"))
    with path.with_suffix(".tmp").open("rb") as stream:
        os.fsync(stream.fileno())
    path.with_suffix(".tmp").rename(path)
    for old in steps_saved()[:-KEPT]:
        file_of(old).unlink()


def newest_of_all() -> int:
    """The newest step that every rank has saved; 0 to start anew, as after the loss of a disk."""
    everybody: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, steps_saved())
    return max(set.intersection(*map(set, everybody)), default=0)


def any_rank(wish: bool) -> bool:
    """Whether any rank was told to stop: all ranks leave after the same step, or the others would wait."""
    word = torch.tensor(int(wish))
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return bool(word)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A batch that depends on step and rank alone, so that a resumed run sees the same ones."""
    noise = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 8, generator=noise)
    return x, x.sum(1, keepdim=True).sin()


def weights(net: nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in net.state_dict().values())).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds a step takes, as a larger model's")
    args = parser.parse_args()
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))  # <- 2: the handler only takes a note

    dist.init_process_group("gloo")
    HOME.mkdir(parents=True, exist_ok=True)
    net = network()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = newest_of_all()  # <- 3: the script is always started in the same way
    if step:
        state = torch.load(file_of(step), weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    print(f"going on after step {step}", flush=True)

    while step < args.steps:
        x, y = batch_of(step, dist.get_rank())
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(args.step_s)
        stop = any_rank(bool(told))
        if stop or step % EVERY == 0:
            save(step, net, optimizer)
        if stop:
            print(f"told to stop: saved step {step}", flush=True)
            sys.exit(0)

    print(f"{step} steps, weights {weights(net)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
