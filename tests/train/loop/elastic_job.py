"""A training whose world changes, in float64: run by ``gangs`` as a script.

    elastic_job.py OUT --batch 20 --micro 3 --steps 12 [--stop-at 5] [--plain] [--slow]

Each step's mean loss over the global batch is written to ``OUT/curve``, exactly; the state at the end to
``OUT/<rank>.json``. Dropout, BatchNorm (its statistics follow the micro-batch), a scheduler, clipping.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import spotkeeper
from spotkeeper.train.agent_link.control import NAME, AgentRequest, Control
from spotkeeper.train.loop import boundary
from tests.train.jobs import _digest


class Points(Dataset[tuple[Tensor, Tensor]]):
    """A curve with noise that is drawn anew at each visit."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64) * (1 + index % 7) + index / 70
        return x + 0.1 * torch.randn(6, dtype=torch.float64), torch.sin(x.sum()).reshape(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--micro", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--stop-at", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="the script's own backward and step")
    parser.add_argument("--bare", action="store_true", help="no DDP")
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--workers", type=int, default=0, help="of rank 0's loader")
    parser.add_argument("--slow", action="store_true", help="rank 1 is slow until it has less work, then rank 0 is")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    boundary.EVERY_S = 0.0
    module = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1)).double()
    torch.manual_seed(rank)  # what ranks draw by themselves differs
    model: Any = module
    if world > 1 and not args.bare:
        model = DistributedDataParallel(module, bucket_cap_mb=0.0005, static_graph=args.static_graph)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loader = DataLoader(Points(), args.micro, shuffle=True, num_workers=args.workers * (rank == 0))
    run = spotkeeper.attach(model, optimizer, scheduler, global_batch=args.batch)
    work, took, slow = 0, 0.0, args.slow and rank == 1
    if args.slow:  # as if a slow rank needed three times as long: what is measured on a busy machine would be noise
        boundary.Stopwatch.end = lambda _: took  # type: ignore[method-assign]
    for x, y in run.steps(loader, steps=args.steps):
        work += 1
        loss = nn.functional.mse_loss(model(x), y)
        if args.plain:
            loss.backward()
            optimizer.step()
            continue
        run.backward(loss)
        if run.step(clip=1.0):
            note(args, run)
            print(f"work: {work}", flush=True)
            took = work * (0.03 if slow else 0.01)
            if args.slow and work not in (3, 4):  # of seven micro-batches: both ranks see it after the same step
                slow = work > 4
            work = 0
    args.out.mkdir(parents=True, exist_ok=True)
    state = _digest(dict(module.state_dict()), optimizer.state_dict(), scheduler.state_dict())
    final = {"step": run.steps_done, "state": state, "weights": _digest(*module.parameters())}
    (args.out / f"{rank}.json").write_text(json.dumps(final))
    if world > 1:
        dist.destroy_process_group()


def note(args: argparse.Namespace, run: spotkeeper.Run) -> None:
    """On all ranks after the same steps: the loss is known, and the agent wants the run to stop."""
    loss = run.loss()
    if run.rank:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "curve").open("a") as stream:
        stream.write(f"{run.steps_done} {loss.hex()}\n")
    if run.steps_done == args.stop_at:
        with Control.open(Path(os.environ["SPOTKEEPER_RUN"]) / NAME) as control:
            control.request(AgentRequest.SAVE_STOP, time.time() + 60)


if __name__ == "__main__":
    main()
