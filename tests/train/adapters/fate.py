"""What the scripts of these tests share: what befalls them at a step, and what is left of them at the end.

Runs in torchrun's workers, and has nothing of a framework.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from spotkeeper.train.agent_link.control import NAME, AgentRequest, Control
from spotkeeper.train.loop import boundary
from tests.train.jobs import _digest


class Images(Dataset[dict[str, Tensor]]):
    """Small images with a label. ``noisy``: with an augmentation, drawn from two generators."""

    def __init__(self, size: int, *, noisy: bool) -> None:
        self._size, self._noisy = size, noisy

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = torch.linspace(0, 1 + index / self._size, 3 * 8 * 8).view(3, 8, 8)
        if self._noisy:
            image = image + 0.1 * torch.randn(3, 8, 8)
            image = image.flip(-1) if random.random() < 0.5 else image  # noqa: S311 - an augmentation
        return {"pixels": image, "labels": torch.tensor(index % 5)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stop-at", type=int, default=-1, help="optimizer steps")
    parser.add_argument("--stop-rank", type=int, default=0, help="whose machine gets the notice")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--val-every", type=float, default=1.0)
    parser.add_argument("--iterable", action="store_true")
    parser.add_argument("--asks-total", action="store_true", help="the script asks for the number of steps beforehand")
    parser.add_argument("--averaged", action="store_true", help="a second copy of the weights, kept by a callback")
    parser.add_argument("--unaware", action="store_true", help="of the number of processes")
    parser.add_argument("--by-init", action="store_true", help="the trainer makes the model")
    parser.add_argument("--late", action="store_true", help="the callback comes after the trainer")
    parser.add_argument("--weights-only", action="store_true", help="there is no optimizer in the end")
    args = parser.parse_args()
    torch.set_num_threads(1)
    boundary.EVERY_S = 0.0  # steps here take a few ms: agree after each, so that a stop lands where it should
    return args


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def befall(args: argparse.Namespace, step: int) -> None:
    """The notice reaches one machine, in the first generation."""
    if step == args.stop_at and rank() == args.stop_rank and os.environ["SPOTKEEPER_GEN"] == "1":
        with Control.open(Path(os.environ["SPOTKEEPER_RUN"]) / NAME) as control:
            control.request(AgentRequest.SAVE_STOP, time.time() + 60)


def note(args: argparse.Namespace, what: str) -> None:
    """Something that a preempted run does as often as one left alone."""
    if rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "notes").open("a") as stream:
            stream.write(what + "\n")


def leave(args: argparse.Namespace, step: int, *state: Any) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    final = {"step": step, "state": _digest(*state), "random": _digest(torch.get_rng_state(), random.getstate())}
    (args.out / f"{rank()}.json").write_text(json.dumps(final))
