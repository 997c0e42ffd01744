"""What ``run.steps()`` adds to a plain loop, per step and per sample, without snapshots and beside the agreement.

A loop over a ``DataLoader`` with an optimizer's step of three numbers, in one process with NumPy in use. Time of the
training thread, the least stretch of ``STRETCH`` steps; with loader workers, also the time to take what they loaded.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL, LARGE = 8, 128  # samples of a batch
WORKERS = (0, 2)
STRETCH, STRETCHES = 10, 120
STEP_GOAL_US, SAMPLE_GOAL_US = 50.0, 1.0


def figures(device: str = "cpu") -> list[dict[str, object]]:
    """For ``bench/run.py``. ``device``: where the trained parameter is."""
    added = {(size, workers): _added(size, workers, device) for workers in WORKERS for size in (SMALL, LARGE)}
    samples = [(added[LARGE, each] - added[SMALL, each]) / (LARGE - SMALL) for each in WORKERS]
    steps = [added[SMALL, each] - SMALL * sample for each, sample in zip(WORKERS, samples, strict=True)]
    against = ", ".join(f"{us:.0f} us ({size} samples, {workers} workers)" for (size, workers), us in added.items())
    return [
        _figure("steps.overhead_us", max(steps), STEP_GOAL_US, against),
        _figure("steps.overhead_us_per_sample", max(samples), SAMPLE_GOAL_US, against),
    ]


def _figure(name: str, value: float, goal: float, against: str) -> dict[str, object]:
    return {
        "name": name,
        "value": round(value, 2),
        "unit": "us",
        "goal": f"<= {goal:g}",
        "holds": value <= goal,
        "against": f"beyond a plain loop: {against}",
    }


def _added(size: int, workers: int, device: str) -> float:
    """Microseconds per step that ``run.steps()`` adds."""
    pairs = [(_least(_ours, size, workers, device), _least(_plain, size, workers, device)) for _ in range(2)]
    return min(ours for ours, _ in pairs) - min(plain for _, plain in pairs)


def _least(begin: Callable[[Any, Any], Iterable[object]], size: int, workers: int, device: str) -> float:
    """Microseconds per step in the fastest stretch."""
    import numpy  # noqa: F401 - in use, as in most scripts
    import torch
    from torch.utils.data import DataLoader

    param = torch.nn.Parameter(torch.zeros(3, device=device))
    param.grad = torch.zeros_like(param)
    optimizer = torch.optim.SGD([param], lr=0.1)
    loader = DataLoader(_Samples(size * STRETCH * STRETCHES), size, collate_fn=len, num_workers=workers)
    least, began = float("inf"), time.thread_time()
    for step, _ in zip(itertools.count(), begin(optimizer, loader), strict=False):
        if step % STRETCH == 0:
            now = time.thread_time()
            least, began = min(least, now - began) if step else least, now
        optimizer.step()
    return 1e6 * least / STRETCH


class _Samples:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def _plain(_: Any, loader: Any) -> Any:
    return loader


def _ours(optimizer: Any, loader: Any) -> Iterable[object]:
    import spotkeeper

    os.environ["SPOTKEEPER_INTERVAL_S"] = "3600"
    with tempfile.TemporaryDirectory() as folder:
        run = spotkeeper.attach(optimizer=optimizer, checkpoint_dir=folder)
        yield from run.steps(loader)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
