"""The same search twice with real trials on the one-machine cloud: in peace, and while machines are taken away."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PREEMPT_S = 4.0  # real, between two machines that are taken away
LIMIT_S = 7200.0
ENDED = ("succeeded", "stopped", "failed", "cancelled")
TRAIN = """
import torch, spotkeeper
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
params = spotkeeper.params()
x = torch.rand(512, 2) * 2 - 1
y = torch.sin(4 * x[:, :1]) * torch.cos(3 * x[:, 1:]) + 0.1 * torch.randn(512, 1)
model = torch.nn.Sequential(torch.nn.Linear(2, params["width"]), torch.nn.Tanh(), torch.nn.Linear(params["width"], 1))
optimizer = torch.optim.AdamW(model.parameters(), params["lr"])
run = spotkeeper.attach(model, optimizer)
for a, b in run.steps(DataLoader(TensorDataset(x, y), 32, shuffle=True), steps=540):
    loss = torch.nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.report(loss=loss)
"""
JOB = "name: x\ncommand: [train.py]\nsource: .\nstatic: never\n"
SWEEP = """
name: {name}
job: job.yaml
space: {{lr: {{loguniform: [1e-4, 1e-1]}}, width: {{int: [4, 64]}}}}
trials: {trials}
parallel: 6
metric: loss
goal: min
stop: {{halving: {{min: 60, max: 540, eta: 3}}}}
"""


def same_ranking(trials: int) -> tuple[bool, str]:
    """Return whether both searches rank all trials alike, with the same values, and what was done to the second."""
    with tempfile.TemporaryDirectory(prefix="search") as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        (folder / "job.yaml").write_text(JOB)
        (folder / ".spotkeeperignore").write_text("*\n!train.py\n")
        _spotkeeper(folder, "local", "up")
        try:
            peaceful, _ = _searched(folder, "peace", trials, preempt=False)
            attacked, taken = _searched(folder, "attack", trials, preempt=True)
        finally:
            _spotkeeper(folder, "local", "down", "--force")
    return peaceful == attacked, f"{trials} trials on the one-machine cloud; {taken} machines were taken away"


def _searched(folder: Path, name: str, trials: int, *, preempt: bool) -> tuple[list[tuple[int, float]], int]:
    """Run a search to its end; return its ranking (trial, value) and how many machines were taken away."""
    (folder / "sweep.yaml").write_text(SWEEP.format(name=name, trials=trials))
    _spotkeeper(folder, "sweep", "sweep.yaml")
    chance, taken, until = random.Random(1), 0, time.monotonic() + LIMIT_S  # noqa: S311  seeded
    while time.monotonic() < until:
        rows = _spotkeeper(folder, "sweep", "status", name, "--all")["rows"]
        if len(rows) == trials and all(row["state"] in ENDED for row in rows):
            return [(row["number"], row["value"]) for row in rows], taken
        vms = [vm["name"] for vm in _spotkeeper(folder, "local", "status")["vms"] if vm["status"] == "RUNNING"]
        dynamic = [vm for vm in vms if "floor" not in vm]
        if preempt and dynamic:
            _spotkeeper(folder, "local", "preempt", chance.choice(dynamic))
            taken += 1
        time.sleep(PREEMPT_S)
    raise TimeoutError(f"search {name} did not end within {LIMIT_S:.0f} s")


def _spotkeeper(folder: Path, *argv: str) -> Any:
    command = [sys.executable, "-m", "spotkeeper.cli.main", *argv, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and argv[:2] != ("local", "preempt"):  # the machine may have gone by itself
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr}")
    return json.loads(done.stdout or "{}")
