"""Cost of the ranks' agreement per step of 50 ms: two real processes over gloo, each step timed.

Every few steps the ranks agree whether to save or stop (``train/loop/boundary.py``), without waiting for the answer.
Averaged over all steps; the least of three runs, because other load on the machine only adds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
STEP_S, STEPS, RUNS, WORLD = 0.05, 200, 3, 2
GOAL_PERCENT = 0.5
PATIENCE_S = 180.0


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    runs = [_run() for _ in range(RUNS)]
    percents = sorted(100 * each["agreement"] / STEP_S for each in runs)
    blocking = min(each["all_reduce"] for each in runs)
    return [
        {
            "name": "agreement.percent_of_50ms_step",
            "value": round(percents[0], 3),
            "unit": "%",
            "goal": f"<= {GOAL_PERCENT}",
            "holds": percents[0] <= GOAL_PERCENT,
            "against": f"an all-reduce that is waited for after every step: {100 * blocking / STEP_S:.2f} %; "
            f"{WORLD} ranks, {STEPS} steps, least of {RUNS} (to {percents[-1]:.2f} %)",
        }
    ]


def _run() -> dict[str, float]:
    """Seconds per step of rank 0."""
    with tempfile.TemporaryDirectory() as name:
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, __file__, f"--store={name}/store"]
        ranks = [
            subprocess.Popen(
                [*argv, f"--rank={rank}"], env=env, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            )
            for rank in range(WORLD)
        ]
        try:
            out, _ = ranks[0].communicate(timeout=PATIENCE_S)
            if any(process.wait(PATIENCE_S) for process in ranks):
                raise RuntimeError(f"exit codes {[process.returncode for process in ranks]}")
        finally:
            for process in ranks:
                process.kill()
        seconds: dict[str, float] = json.loads(out.splitlines()[-1])
        return seconds


def rank(number: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    from spotkeeper.train.core.gang import DistributedGang
    from spotkeeper.train.loop.boundary import Agreement, StepAction

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=WORLD)
    gang = DistributedGang()
    agreement, word = Agreement(gang), torch.zeros(1)
    spent = {"agreement": 0.0, "all_reduce": 0.0}
    for what in spent:
        gang.gather(b"")
        for _ in range(STEPS):
            time.sleep(STEP_S)  # the device computes
            began = time.perf_counter()
            if what == "agreement":
                agreement.after_step(lambda: StepAction.NOTHING, STEP_S)
            else:
                dist.all_reduce(word)
            spent[what] += time.perf_counter() - began
    agreement.drain()
    print(json.dumps({what: seconds / STEPS for what, seconds in spent.items()}), flush=True)
    gang.gather(b"")


if __name__ == "__main__":
    options = dict(option.split("=", 1) for option in sys.argv[1:])
    if options:
        rank(int(options["--rank"]), options["--store"])
    else:
        sys.path.insert(0, str(REPOSITORY))
        for figure in figures():
            print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
