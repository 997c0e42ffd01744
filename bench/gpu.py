"""Cost of a checkpoint and of a recovery with the state on a GPU: ``make gpu`` writes ``bench/gpu.json``.

The measurements of ``save.py``, ``snapshot.py``, ``loss.py``, ``restore.py``, ``steps.py`` and ``recovery.py`` on the
first CUDA device, and the time of a CUDA context, which every generation pays again. The processes of two or three
machines share the device and talk over gloo. The figures belong to another kind of machine than those of
``results.json``, so they have their own file, with the device's name. Without a device it measures nothing and says so.

    make gpu
    make gpu ARGS="--device cpu --mb 48"      a rehearsal: everything, slower, without writing the file
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "agent")]

from bench import run  # noqa: E402
from bench.job import recovery  # noqa: E402
from bench.train import loss, restore, save, snapshot, steps  # noqa: E402
from spotkeeper_agent.launcher.process import become_subreaper  # noqa: E402

OUT = HERE / "gpu.json"
SIZES_MB = (480, 1920)
TIMES = 3
KILLS = 5  # of a gang whose processes share the device
CONTEXT = """
import time, torch
began = time.monotonic()
torch.ones(1, device={device!r}).sum().item()
print(time.monotonic() - began)
"""
TOUCH = "import torch\ntorch.ones(1, device={device!r}).sum().item()\n"


def measured(device: str, sizes_mb: tuple[int, ...]) -> list[run.Figure]:
    """Return all figures. ``device``: torch's name of it."""
    saves = save.compared({size: save.of_a_size(size, device) for size in sizes_mb})
    images = snapshot.compared({size: snapshot.of_a_size(size, device) for size in sizes_mb})
    losses = [*restore.figures(device), *steps.figures(device), *loss.figures(device, KILLS)]
    found = [_context(device), *saves, *images, *losses, *_recovery(TOUCH.format(device=device))]
    return [figure | {"name": f"gpu.{figure['name']}"} for figure in found]


def _context(device: str) -> run.Figure:
    """Time from the first use of the device to its first answer, in a process that has imported torch."""
    argv = [sys.executable, "-c", CONTEXT.format(device=device)]
    taken = [float(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout) for _ in range(TIMES)]
    seconds = statistics.median(taken)
    return {
        "name": "context_s",
        "value": round(seconds, 3),
        "unit": "s",
        "goal": "known",
        "holds": True,
        "against": f"each of {TIMES}: {', '.join(f'{each:.2f}' for each in taken)} s",
    }


def _recovery(touch: str) -> list[run.Figure]:
    """Two nodes. A zygote's generations create the context again too, because a fork cannot inherit one."""
    become_subreaper()
    ours = recovery.restarts(recovery.How("zygote", touch), TIMES, 2)
    cold = recovery.restarts(recovery.How("exec", touch), TIMES, 2)
    theirs = recovery.elastic(TIMES, 2, touch)
    return [
        recovery.ratio("recovery.zygote_vs_exec", cold, ours, 1.0, recovery.COLD),
        recovery.ratio("recovery.zygote_vs_elastic", theirs, ours, 1.0, recovery.ELASTIC),
    ]


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(prog="make gpu", description="Measure checkpoints and recovery on a GPU.")
    parser.add_argument("--device", default="cuda", help="torch's name; any device but cuda is a rehearsal")
    parser.add_argument("--mb", type=int, nargs="+", default=SIZES_MB, help="sizes of the state")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"{OUT.relative_to(HERE.parent)}: not measured: torch finds no CUDA device here")
        return 0
    found = measured(options.device, tuple(options.mb))
    print(run.table(found))
    if options.device == "cuda":
        about = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__}
        OUT.write_text(json.dumps({**about, "machine": run.machine(), "figures": found}, indent=2) + "\n")
    return 1 if any(figure["holds"] is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
