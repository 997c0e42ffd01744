"""What a save with ``checkpoint.snapshots`` costs the training loop, beside ``torch.save`` of the same state.

*Stall* is the time at the boundary and the wait before the optimizer's step. *Slowdown* compares whole steps with and
without a save. Forward and backward take at least twice as long as a plain copy of the state, on one core. The saver
begins to write before the optimizer's step, so the slowdown contains that too. What a thread that only copies as many
bytes costs the same step says what the machine itself allows. Steps with a save, steps without one and
``torch.save`` take turns. Stalls are the least of the rounds, because other load only adds, steps are medians; the
ranges are given too. CPU only.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES_MB = tuple(int(size) for size in os.environ.get("SPOTKEEPER_BENCH_MB", "480 1920").split())
ROUNDS = 5
TENSORS = 24
MEMORY = "/memfd:spotkeeper"

Times = dict[str, list[float]]  # seconds by what was measured


def figures() -> list[dict[str, object]]:
    sizes = {size: of_a_size(size) for size in SIZES_MB}
    stall = max(min(times["stall"]) / min(times["torch.save"]) for times in sizes.values())
    slower = max(100 * (median(times["with"]) / median(times["without"]) - 1) for times in sizes.values())
    limit = max(100 * (median(times["with a plain copy"]) / median(times["plain"]) - 1) for times in sizes.values())
    states = max(times["states"][0] for times in sizes.values())
    told = "; ".join(
        f"{size} MB: {', '.join(_told(times, what) for what in ('stall', 'torch.save', 'with', 'without'))}"
        for size, times in sizes.items()
    )
    return [
        _figure("snapshot.stall_vs_torch_save", stall, "x", 0.01, told),
        _figure("snapshot.slowdown_percent", slower, "%", 1.0, f"{told}; a thread that only copies: {limit:.1f} %"),
        _figure("snapshot.peak_states_in_memory", states, "states", 3.0, "whole states in the saver's memory"),
    ]


def _figure(name: str, value: float, unit: str, goal: float, against: str) -> dict[str, object]:
    shown = {"name": name, "value": round(value, 4), "unit": unit, "goal": f"<= {goal:g}"}
    return {**shown, "holds": value <= goal, "against": against}


def _told(times: Times, what: str) -> str:
    return f"{what} {min(times[what]):.4f} to {max(times[what]):.4f} s"


def of_a_size(size_mb: int) -> Times:
    """Measure in a new process, so that one size does not warm the memory of the next."""
    argv = [sys.executable, __file__, "--measure", str(size_mb)]
    variables = {"PYTHONPATH": str(REPOSITORY), "SPOTKEEPER_SNAPSHOTS": "1", "SPOTKEEPER_INTERVAL_S": "100000"}
    done = subprocess.run(argv, env=os.environ | variables, stdout=subprocess.PIPE, check=True)
    times: Times = json.loads(done.stdout.splitlines()[-1])
    return times


def measure(folder: Path, size_mb: int) -> Times:
    import torch
    from torch import nn

    import spotkeeper
    from bench.train.save import Work
    from spotkeeper.train.checkpoint.snapshot import CHECKED

    torch.set_num_threads(1)
    each = size_mb * 1_000_000 // (12 * TENSORS)  # float32 and two moments
    model = nn.ParameterList([nn.Parameter(torch.randn(each)) for _ in range(TENSORS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model:
        param.grad = torch.full_like(param, 1e-3)
    run = spotkeeper.attach(model, optimizer, checkpoint_dir=folder / "ours")
    work, pace, times = Work(), run._boundary._pace, Times()
    pair = torch.ones(2, size_mb * 1_000_000 // 4)
    copy_s = min(_seconds(lambda: pair[0].copy_(pair[1])) for _ in range(3))
    batches = run.steps(range(2 + 2 * (CHECKED + ROUNDS)))
    forward = max(1, math.ceil(2 * copy_s / work.steps_s()))

    def step(*, due: bool) -> float:
        pace.since = -math.inf if due else math.inf

        def whole() -> None:
            next(batches)
            for _ in range(forward):
                work.step()
            optimizer.step()

        return _seconds(whole)

    def beside_a_copy() -> None:
        copying = threading.Thread(target=lambda: pair[0].copy_(pair[1]))
        copying.start()
        for _ in range(forward):
            work.step()
        copying.join()
        optimizer.step()

    def alone() -> None:
        for _ in range(forward):
            work.step()
        optimizer.step()

    step(due=False)
    for number in range(CHECKED + ROUNDS):
        os.sync()
        without = step(due=False)
        os.sync()
        took = step(due=True)
        run.wait()
        if number < CHECKED:
            continue
        _add(times, {"with": took, "without": without, "stall": pace.stalls[-1]})
        _add(times, {"with a plain copy": _seconds(beside_a_copy), "plain": _seconds(alone)})
        state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        os.sync()
        _add(times, {"torch.save": _seconds(lambda state=state: torch.save(state, folder / "plain.pt"))})
    client = run._boundary.writer.client
    assert client is not None
    _add(times, {"states": sum(size // (size_mb * 1_000_000) for size in _memories(client.pid))})
    return times


def _memories(pid: int) -> list[int]:
    """Sizes of a saver's memory files, bytes."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return [link.stat().st_size for link in links if str(link.readlink()).startswith(MEMORY)]


def _add(times: Times, values: dict[str, float]) -> None:
    for what, value in values.items():
        times.setdefault(what, []).append(value)


def _seconds(work: Any) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def main() -> None:
    if sys.argv[1:2] != ["--measure"]:
        for figure in figures():
            print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
        return
    folder = Path(tempfile.mkdtemp(prefix="bench-snapshot-", dir=REPOSITORY / "bench"))
    try:
        print(json.dumps(measure(folder, int(sys.argv[2]))))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
