"""A small network that tells two spirals apart; ``search.py`` looks for its learning rate, width and momentum.

python train.py --lr 0.1 --width 32 --momentum 0.9 --steps 300
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spotkeeper

EVERY = 25  # steps between two reports


def spirals(points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (points, 2) coordinates and (points,) labels 0 and 1."""
    label = torch.arange(points) % 2
    turn = torch.rand(points, generator=generator).sqrt() * 9.0
    angle = turn + label * torch.pi
    noise = torch.randn(points, 2, generator=generator) * 0.15
    return torch.stack([angle.cos(), angle.sin()], 1) * (turn / 3.0)[:, None] + noise, label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-s", type=float, default=0.0, help="a step takes this long at least, seconds")
    args = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x, y = spirals(512, generator)
    loader = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=64, shuffle=True)
    held_x, held_y = x[384:], y[384:]
    model = nn.Sequential(
        nn.Linear(2, args.width), nn.Tanh(), nn.Linear(args.width, args.width), nn.Tanh(), nn.Linear(args.width, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    run = spotkeeper.attach(model=model, optimizer=optimizer)
    for batch, label in run.steps(loader, steps=args.steps):
        began = time.monotonic()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), label).backward()
        optimizer.step()
        if run.steps_done % EVERY == 0:
            with torch.no_grad():
                run.report(loss=nn.functional.cross_entropy(model(held_x), held_y))
        time.sleep(max(0.0, args.step_s - (time.monotonic() - began)))


if __name__ == "__main__":
    main()
