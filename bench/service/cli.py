"""Response time of the command as a shell sees it: a new process with its imports."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from spotkeeper.reconcile.store.store import open_store
from tests.cli.records import a_job
from tests.contract.samples import STACK

RUNS = 7
JOBS = 20


def figures() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        shell = stack(Path(folder))
        return [
            figure("cli.help_s", seconds(shell, "--help"), 0.25, "a process that imports typer alone"),
            figure("cli.status_s", seconds(shell, "status"), 0.6, f"{JOBS} jobs of two machines, a bucket on disk"),
        ]


def stack(folder: Path) -> dict[str, str]:
    """Environment of a shell with a stack of running jobs."""
    bucket = f"sqlite://{folder}/bucket.sqlite"
    store = open_store(bucket)
    store.put("stack/pools.json", msgspec.json.encode(STACK))
    for index in range(JOBS):
        a_job(store, job=f"bench{index:03}", name=f"job-{index}")
    mine = {"SPOTKEEPER_STACK": STACK.stack, "SPOTKEEPER_BUCKET": bucket, "SPOTKEEPER_CLOCK": "0:0:1"}
    return {**os.environ, **mine}


def seconds(shell: dict[str, str], *words: str) -> list[float]:
    """Wall seconds of each run, sorted, without the first, which fills the page cache."""
    found = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        command = [sys.executable, "-m", "spotkeeper.cli.main", *words]
        subprocess.run(command, env=shell, check=True, capture_output=True)
        found.append(time.perf_counter() - began)
    return sorted(found[1:])


def figure(name: str, took: list[float], goal_s: float, against: str) -> dict[str, object]:
    least = round(took[0], 3)
    return {
        "name": name,
        "value": least,
        "unit": "s",
        "goal": f"<= {goal_s:g}",
        "holds": least <= goal_s,
        "against": f"least of {RUNS}, median {took[RUNS // 2]:.2f} s; {against}",
    }
