"""What a checkpoint costs: our save against ``torch.save`` and ``dcp.save`` of the same state, in one run.

Stall is what the training loop waits for; durable is when every byte, hashed, and COMMIT
are on disk. ``dcp.save`` hashes nothing; ``torch.save`` does not even wait for the disk.
The three take turns, so that a busy machine is busy for all.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SIZE_MB = int(os.environ.get("SPOTKEEPER_BENCH_MB", "480"))
ROUNDS = 4  # the first warms everybody's memory and is not counted


def figures(size_mb: int = SIZE_MB) -> list[dict[str, object]]:
    """Ratios, with the seconds beside them."""
    folder = Path(tempfile.mkdtemp(prefix="bench-save-", dir=REPOSITORY / "bench"))
    try:
        times = measure(folder, size_mb)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stall, durable, torch_s, dcp_s = (median(values[1:]) for values in times)
    ours = f"{size_mb} MB: stall {stall:.3f} s, durable {durable:.2f} s"
    seconds = f"{ours}; torch.save {torch_s:.2f} s, dcp.save {dcp_s:.2f} s"
    return [
        _figure("save.stall_vs_torch_save", stall / torch_s, 0.15, seconds),
        _figure("save.durable_vs_dcp", durable / dcp_s, 1.0, seconds),
    ]


def _figure(name: str, ratio: float, goal: float, against: str) -> dict[str, object]:
    value = round(ratio, 3)
    return {"name": name, "value": value, "unit": "x", "goal": f"<= {goal}", "holds": ratio <= goal, "against": against}


def measure(folder: Path, size_mb: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds of (stall, durable, torch.save, dcp.save), round by round, of a model with AdamW's moments."""
    import spotkeeper
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn

    torch.set_num_threads(1)
    tensors = 24
    each = size_mb * 1_000_000 // (12 * tensors)  # float32 and two moments
    model = nn.ParameterList([nn.Parameter(torch.randn(each)) for _ in range(tensors)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model:
        param.grad = torch.full_like(param, 1e-3)
    run = spotkeeper.attach(model, optimizer, checkpoint_dir=folder / "ours")
    stalls: list[float] = []
    durables: list[float] = []
    plain: list[float] = []
    sharded: list[float] = []
    for number in run.steps(range(ROUNDS + 1), steps=ROUNDS + 1):
        optimizer.step()
        run.wait()
        if number == 0:
            continue  # the memory is made ready after the first step, as in any run
        state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        os.sync()
        began = time.monotonic()
        run.save(wait=False)
        stalls.append(time.monotonic() - began)
        run.wait()
        durables.append(time.monotonic() - began)
        plain.append(_timed(lambda state=state: torch.save(state, folder / "plain.pt")))
        sharded.append(_timed(lambda state=state: dcp.save(state, checkpoint_id=folder / "sharded", no_dist=True)))
    return stalls, durables, plain, sharded


def _timed(save: Callable[[], object]) -> float:
    os.sync()
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp says that this is one process
        save()
    return time.monotonic() - began


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY / "agent"))
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
