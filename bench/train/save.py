"""Cost of a checkpoint: our save against ``torch.save``, ``dcp.save`` and ``dcp.async_save`` of the same state.

*Stall* is the time the training loop waits. *Durable* is when every byte, hashed, and COMMIT are on disk, while the
loop waits or trains. The others hash nothing; ``torch.save`` and ``dcp.save`` stop the loop for their whole time;
``async_save`` stops it for the copy, and is durable when its future is done. All take turns in one run, so that load on
the machine affects all. Each figure is the least of three, because other load only adds; the range is given too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotkeeper.train.loop.run import Run

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES_MB = tuple(int(size) for size in os.environ.get("SPOTKEEPER_BENCH_MB", "480 1920").split())
ROUNDS = 3
TENSORS = 24
STEP_S = 0.05  # of the concurrent training, on one core
MEAN_LIFE_S = 6 * 3600.0  # between losses: a run's default


@dataclass
class Times:
    """Seconds by method, round by round. The first round warms the memory and is dropped.

    Earlier work of disk and device is finished before the clock starts.
    """

    by: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, seconds: float) -> None:
        self.by.setdefault(what, []).append(seconds)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = _quiet()
        yield
        self.add(what, time.monotonic() - began)

    def least(self, what: str) -> float:
        return min(self.by[what][1:])


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``: the worse of all sizes, with the seconds of each."""
    sizes = {size: of_a_size(size) for size in SIZES_MB}
    return [*compared(sizes), _slowdown(sizes)]


def compared(sizes: dict[int, Times]) -> list[dict[str, object]]:
    """Our times against the others', by size in MB."""
    return [
        _worst("checkpoint.stall_vs_torch_save", sizes, "stall", "torch.save", 0.15),
        _worst("checkpoint.stall_vs_async_save", sizes, "stall", "async_save stall", 1.0),
        _worst("checkpoint.durable_vs_dcp_save", sizes, "durable", "dcp.save", 1.0),
        _worst("checkpoint.durable_while_training_vs_dcp_save", sizes, "durable, training", "dcp.save", 1.4),
        _worst("checkpoint.durable_vs_async_save", sizes, "durable, training", "async_save durable, training", 1.0),
    ]


def of_a_size(size_mb: int, device: str = "cpu") -> Times:
    """Measure in a new process, so that one size does not warm the memory of the next."""
    argv = [sys.executable, __file__, "--measure", str(size_mb), device]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=True)
    return Times(json.loads(done.stdout.splitlines()[-1]))


def _worst(name: str, sizes: dict[int, Times], ours: str, theirs: str, goal: float) -> dict[str, object]:
    ratio = max(times.least(ours) / times.least(theirs) for times in sizes.values())
    told = "; ".join(f"{size} MB: {_told(times, ours)}, {_told(times, theirs)}" for size, times in sizes.items())
    return {
        "name": name,
        "value": round(ratio, 3),
        "unit": "x",
        "goal": f"<= {goal:g}",
        "holds": ratio <= goal,
        "against": told,
    }


def _told(times: Times, what: str) -> str:
    values = sorted(times.by[what][1:])
    return f"{what} {values[0]:.3f} s (to {values[-1]:.3f})"


def _slowdown(sizes: dict[int, Times]) -> dict[str, object]:
    """Slowdown of the loop at the interval a run would choose: the stall, and slower steps while the saver writes."""
    from spotkeeper.train.core.pace import young

    parts = {}
    for size, times in sizes.items():
        interval_s = young(times.least("stall"), MEAN_LIFE_S, times.least("durable, training"))
        parts[size] = (100 * max(0.0, times.least("lost to a save")) / interval_s, interval_s)
    worst = max(percent for percent, _ in parts.values())
    told = "; ".join(
        f"{size} MB: {sizes[size].least('lost to a save'):.2f} s lost to a save every {interval_s:.0f} s"
        for size, (_, interval_s) in parts.items()
    )
    return {
        "name": "checkpoint.slowdown_percent",
        "value": round(worst, 3),
        "unit": "%",
        "goal": "<= 1",
        "holds": worst <= 1,
        "against": f"{told}; one core trains, one is left to the saver",
    }


def measure(folder: Path, size_mb: int, device: str = "cpu") -> Times:
    """Run all methods in turn on a model with AdamW's moments on ``device``."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn

    import spotkeeper

    torch.set_num_threads(1)
    each = size_mb * 1_000_000 // (12 * TENSORS)  # float32 and two moments
    model = nn.ParameterList([nn.Parameter(torch.randn(each, device=device)) for _ in range(TENSORS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model:
        param.grad = torch.full_like(param, 1e-3)
    os.environ["SPOTKEEPER_INTERVAL_S"] = "100000"
    run = spotkeeper.attach(model, optimizer, checkpoint_dir=folder / "ours")
    work, times = Work(), Times()
    saves: Iterator[Any] = run.steps(range(2 + 2 * (ROUNDS + 1)))
    _step(saves, optimizer)  # staging memory is reserved after the first step, as in any run
    for _ in range(ROUNDS + 1):
        _step(saves, optimizer)
        state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        _ours(run, times)
        with times.timed("torch.save"):
            torch.save(state, folder / "plain.pt")
        with times.timed("dcp.save"):
            dcp.save(state, checkpoint_id=folder / "sharded", no_dist=True)
        _async_save(partial(dcp.async_save, state, checkpoint_id=folder / "async", no_dist=True), times, work)
        _step(saves, optimizer)
        _ours_training(run, times, work)
    return times


def _step(batches: Iterator[Any], optimizer: Any) -> None:
    next(batches)
    optimizer.step()


def _quiet() -> float:
    """Wait until disk and device are idle; return the time."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    os.sync()
    return time.monotonic()


def _ours(run: Run, times: Times) -> None:
    began = _quiet()
    run.save(wait=False)
    times.add("stall", time.monotonic() - began)
    run.wait()
    times.add("durable", time.monotonic() - began)


def _ours_training(run: Run, times: Times, work: Work) -> None:
    _quiet()
    plain = work.steps_s()
    began = time.monotonic()
    run.save(wait=False)
    writer, steps = run._boundary.writer, 0
    while writer.busy:
        work.step()
        steps += 1
        writer.poll()
    took = time.monotonic() - began
    times.add("durable, training", took)
    times.add("lost to a save", took - steps * plain)


def _async_save(save: Callable[[], Any], times: Times, work: Work) -> None:
    began = _quiet()
    future = save()
    times.add("async_save stall", time.monotonic() - began)
    while not future.done():
        work.step()
    future.result()
    times.add("async_save durable, training", time.monotonic() - began)


class Work:
    """Training steps of about ``STEP_S`` on one core, or on a GPU."""

    def __init__(self, device: str = "cpu") -> None:
        import torch

        self.settle: Callable[[], object] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
        self._matrix = torch.randn(*[4000 if device.startswith("cuda") else 400] * 2, device=device)
        self._times = 1
        while self._timed() < STEP_S:
            self._times *= 2

    def step(self) -> None:
        for _ in range(self._times):
            self._matrix @ self._matrix

    def steps_s(self) -> float:
        """Present time of a step while no save runs."""
        return median(self._timed() for _ in range(8))

    def _timed(self) -> float:
        began = time.monotonic()
        self.step()
        self.settle()
        return time.monotonic() - began


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        folder = Path(tempfile.mkdtemp(prefix="bench-save-", dir=REPOSITORY / "bench"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # dcp warns of a single process
                print(json.dumps(measure(folder, int(sys.argv[2]), sys.argv[3]).by))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    sys.path.insert(0, str(REPOSITORY))
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")


if __name__ == "__main__":
    main()
