"""What an image and a save with ``checkpoint.snapshots`` cost the training loop, beside ``torch.save`` of the state.

*Stall* is the time of a save at the boundary and its wait before the optimizer's step. *Slowdown* compares whole steps
with an image and without one. Forward and backward take at least twice as long as a plain copy of the state, on one
core. What a thread that only copies as many bytes costs such a step says what the machine itself allows: memory
bandwidth, and a core for the copy. Where that alone is more than the goal, no core is free, as where two virtual
processors are one core: the slowdown is then not measured, unless it holds. All kinds of steps take turns in every
round, in another order each time, and a slowdown is the median of the rounds' ratios. The parts of a step show where it
is, and the training thread's processor time whether that thread runs slower (memory) or waits (a busy core). The step
in which the saver writes to disk is given beside it. Stalls are the least of the rounds, because other load only adds.
On a GPU (``make gpu``), which works beside the loop, whole steps are the device's time, and their parts the loop's.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES_MB = tuple(int(size) for size in os.environ.get("SPOTKEEPER_BENCH_MB", "480 1920").split())
ROUNDS = int(os.environ.get("SPOTKEEPER_BENCH_ROUNDS", "12"))
SAVES = 5  # rounds with a torch.save
TENSORS = 24
SLOWDOWN = 1.0  # percent of a step, where a core is free
MEMORY = "/memfd:spotkeeper"
KINDS = {
    "image": "a step with an image",
    "copy": "with a thread that only copies",
    "save": "with a save",
    "write": "while the saver writes it",
}
PARTS = ("boundary", "forward and backward", "optimizer")

Times = dict[str, list[float]]  # seconds by what was measured


def figures() -> list[dict[str, object]]:
    return compared({size: of_a_size(size) for size in SIZES_MB})


def compared(sizes: dict[int, Times]) -> list[dict[str, object]]:
    """The figures, of what was measured by size in MB."""
    stall = max(min(times["stall"]) / min(times["torch.save"]) for times in sizes.values())
    slower = max(_slower(times, "image") for times in sizes.values())
    copied = max(_slower(times, "copy") for times in sizes.values())
    states = max(times["states"][0] for times in sizes.values())
    saves = "; ".join(
        f"{size} MB: " + ", ".join(f"{what} {min(each):.4f} to {max(each):.4f} s" for what, each in chosen.items())
        for size, times in sizes.items()
        if (chosen := {what: times[what] for what in ("stall", "torch.save")})
    )
    shown = "; ".join(f"{size} MB: {_breakdown(times)}" for size, times in sizes.items())
    return [
        _figure("snapshot.stall_vs_torch_save", stall, "x", 0.01, saves),
        _slowdown(slower, copied, shown),
        _figure("snapshot.peak_states_in_memory", states, "states", 3.0, "whole states in the saver's memory"),
    ]


def _figure(name: str, value: float, unit: str, goal: float, against: str) -> dict[str, object]:
    shown = {"name": name, "value": round(value, 4), "unit": unit, "goal": f"<= {goal:g}"}
    return {**shown, "holds": value <= goal, "against": against}


def _slowdown(image: float, copied: float, shown: str) -> dict[str, object]:
    figure = _figure("snapshot.slowdown_percent", image, "%", SLOWDOWN, shown)
    if min(image, copied) <= SLOWDOWN:
        return figure
    why = f"not measured: no core is free here, since a thread that only copies costs {copied:.1f} %"
    return figure | {"value": None, "holds": None, "against": f"{why}, an image {image:.1f} %; {shown}"}


def _slower(times: Times, kind: str, of: str = "whole") -> float:
    """How much longer steps of a kind take than steps without an image, in percent."""
    pairs = zip(times[f"{kind} {of}"], times[f"without {of}"], strict=True)
    return 100 * (median(these / without for these, without in pairs) - 1)


def _breakdown(times: Times) -> str:
    kinds = ", ".join(f"{told} {_slower(times, kind):.1f} %" for kind, told in KINDS.items())
    busy = ", ".join(f"{told} {_slower(times, kind, 'processor'):.1f} %" for kind, told in KINDS.items())
    parts = ", ".join(
        f"{part} {median(times[f'without {part}']):.4f} to {median(times[f'image {part}']):.4f} s" for part in PARTS
    )
    return f"{kinds}; of the training thread's processor time {busy}; with an image {parts}"


def of_a_size(size_mb: int, device: str = "cpu") -> Times:
    """Measure in a new process, so that one size does not warm the memory of the next."""
    argv = [sys.executable, __file__, "--measure", str(size_mb), device]
    variables = {"PYTHONPATH": str(REPOSITORY), "SPOTKEEPER_SNAPSHOTS": "1", "SPOTKEEPER_INTERVAL_S": "100000"}
    done = subprocess.run(argv, env=os.environ | variables, stdout=subprocess.PIPE, check=True)
    times: Times = json.loads(done.stdout.splitlines()[-1])
    return times


def measure(folder: Path, size_mb: int, device: str = "cpu") -> Times:
    """Run all kinds of steps in turn on a model with AdamW's moments on ``device``."""
    import torch
    from torch import nn

    import spotkeeper
    from bench.train.save import Work
    from spotkeeper.train.checkpoint.snapshot import CHECKED

    torch.set_num_threads(1)
    each = size_mb * 1_000_000 // (12 * TENSORS)  # float32 and two moments
    model = nn.ParameterList([nn.Parameter(torch.randn(each, device=device)) for _ in range(TENSORS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model:
        param.grad = torch.full_like(param, 1e-3)
    run = spotkeeper.attach(model, optimizer, checkpoint_dir=folder / "ours")
    work, pace, times = Work(device), run._boundary._pace, Times()
    copy = _plain_copy(size_mb * 1_000_000 // 4, device)
    copy_s = min(_seconds(copy) for _ in range(3))
    batches = iter(run.steps(range(1_000_000)))
    forward = max(1, math.ceil(2 * copy_s / work.steps_s()))

    def boundary(kind: str) -> threading.Thread:
        """Begin a step, and its image or save; return the thread of a plain copy."""
        pace.since = -math.inf if kind == "save" else math.inf
        pace.image_since = -math.inf if kind == "image" else math.inf
        next(batches)
        copying = threading.Thread(target=copy if kind == "copy" else lambda: None)
        copying.start()
        return copying

    def forward_and_backward() -> None:
        for _ in range(forward):
            work.step()

    def end(copying: threading.Thread) -> None:
        copying.join()
        optimizer.step()
        work.settle()

    def step(kind: str) -> Times:
        return _parts(kind, boundary, forward_and_backward, end)

    order = ["without", *(kind for kind in KINDS if kind != "write")]
    for number in range(-CHECKED, ROUNDS):
        found = Times()
        for kind in order[number % len(order) :] + order[: number % len(order)]:
            step("between")  # an image needs a step without one before it
            found |= step(kind)
            if kind == "save":
                found |= step("write")
            run.wait()
        if number < 0:
            continue
        _add(times, found | {"stall": [pace.stalls[-1]]})
        if number < SAVES:
            state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            os.sync()
            _add(times, {"torch.save": [_seconds(lambda state=state: torch.save(state, folder / "plain.pt"))]})
            os.sync()
    writer = run._boundary.writer
    assert writer.client is not None
    _add(times, {"states": [sum(size // (size_mb * 1_000_000) for size in _memories(writer.client.pid))]})
    writer.close()  # the saver writes the newest image before it ends
    return times


def _plain_copy(count: int, device: str) -> Callable[[], object]:
    """Return what copies ``count`` numbers to the CPU's memory, beside what else the device does."""
    import torch

    numbers = torch.ones(count, device=device)
    if numbers.device.type != "cuda":
        there = torch.ones(count)
        return lambda: there.copy_(numbers)
    pinned, stream = torch.ones(count, pin_memory=True), torch.cuda.Stream(numbers.device)

    def copy() -> None:
        with torch.cuda.stream(stream):
            pinned.copy_(numbers, non_blocking=True)
        stream.synchronize()

    return copy


def _parts(
    kind: str, first: Callable[[str], threading.Thread], second: Callable[[], None], third: Callable[..., None]
) -> Times:
    """Take one step in three parts; return the seconds of each."""
    busy, stamps = time.thread_time(), [time.monotonic()]
    copying = first(kind)
    stamps.append(time.monotonic())
    second()
    stamps.append(time.monotonic())
    third(copying)
    stamps.append(time.monotonic())
    parts = dict(zip(PARTS, (b - a for a, b in itertools.pairwise(stamps)), strict=True))
    found = parts | {"whole": stamps[-1] - stamps[0], "processor": time.thread_time() - busy}
    return {f"{kind} {part}": [seconds] for part, seconds in found.items()}


def _memories(pid: int) -> list[int]:
    """Sizes of a saver's memory files, bytes."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return [link.stat().st_size for link in links if str(link.readlink()).startswith(MEMORY)]


def _add(times: Times, found: Times) -> None:
    for what, each in found.items():
        times.setdefault(what, []).extend(each)


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
        print(json.dumps(measure(folder, int(sys.argv[2]), sys.argv[3])))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
