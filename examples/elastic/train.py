"""A training that continues with fewer machines and grows again, on the same loss curve.

    python train.py                                      # alone: all micro-batches one after the other
    torchrun --nproc-per-node 3 train.py                 # the same curve on three ranks
    spotkeeper submit job.yaml                           # on one to three machines, as they come and go

Each step takes 36 samples whatever the number of ranks, in nine micro-batches of four. Lines that differ from a script
for a fixed number of machines are marked.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import spotkeeper


class Spirals(Dataset[tuple[Tensor, int]]):
    """Points on three noisy spirals and their spiral's number: float64 [2], 0..2. The noise differs at each visit."""

    def __len__(self) -> int:
        return 900

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        arm, along = index % 3, torch.tensor(index / 900, dtype=torch.float64)
        angle = 4.0 * along + 2.1 * arm
        point = along * torch.stack((angle.cos(), angle.sin()))
        return point + 0.02 * torch.randn(2, dtype=torch.float64), arm


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=36, help="samples of all ranks in one step")
    parser.add_argument("--micro", type=int, default=4, help="samples that a rank trains on at once")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines of output")
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds a step takes at least, as a larger model's")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("SPOTKEEPER_SEED", "0")))
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group("gloo")

    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model = DistributedDataParallel(net.double()) if distributed else net.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loader = DataLoader(Spirals(), batch_size=args.micro, shuffle=True)

    run = spotkeeper.attach(model, optimizer, scheduler, global_batch=args.batch)  # <- samples of all ranks
    for points, arms in run.steps(loader, steps=args.steps):  # a micro-batch; ranks may have different numbers of them
        loss = nn.functional.cross_entropy(model(points), arms)
        run.backward(loss)  # <- for loss.backward()
        if run.step(clip=1.0):  # <- for the steps of optimizer and scheduler, and zero_grad(); the global batch is over
            mean = run.loss()  # of the global batch, over all ranks
            run.report(loss=mean)
            time.sleep(args.step_s)
            if run.rank == 0 and run.steps_done % args.every == 0:
                print(f"step {run.steps_done}  loss {mean:.12f}", flush=True)
    if run.rank == 0:
        torch.save(net.state_dict(), run.output / "model.pt")  # <- fetched by `spotkeeper download elastic`
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
