"""Successive halving on learning curves that are trained here, under preemptions, beside training all to their ends.

81 networks learn a noisy function, each with other values of five parameters (``CURVES`` problems, each with its own
data). Their curves are then the metrics of trials in a simulated cloud, in which the function's real code decides,
machines are lost at random and every machine is paid for. A search costs what its trials' records say.

Also run real trials on the one-machine cloud, ``SPOTKEEPER_BENCH_TRIALS`` (default 12, 0: none), once in peace and once
while a machine is taken away every few seconds, and compare the rankings.
"""

from __future__ import annotations

import os
import random
import statistics
from dataclasses import dataclass

import torch

from bench.job._search_cloud import same_ranking
from spotkeeper.client.space import values_of
from spotkeeper.contract import codec
from spotkeeper.contract.job import Checkpoint, JobSpec, Mirror
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.contract.sweep import Params, Trial
from spotkeeper.contract.sweepfile import SweepFile
from tests.reconcile.world import World, stack

CURVES = 3
TRIALS, PARALLEL, ETA = 81, 9, 3
RUNGS, END = (60, 180), 540
LIFE_S = 600.0  # mean time between losses of a machine, virtual
FILE = codec.convert(
    {
        "name": "bench",
        "job": "job.yaml",
        "metric": "loss",
        "goal": "min",
        "trials": TRIALS,
        "space": {
            "lr": {"loguniform": [1e-4, 1e-1]},
            "momentum": {"uniform": [0.0, 0.98]},
            "decay": {"loguniform": [1e-6, 1e-1]},
            "width": {"int": [4, 64]},
            "batch": {"choice": [16, 32, 64]},
        },
    },
    SweepFile,
)


def figures() -> list[dict[str, object]]:
    found = [compared(seed) for seed in range(CURVES)]
    share = statistics.median(one.share for one in found)
    regret = statistics.median(one.regret for one in found)
    costs = ", ".join(f"${one.halved:.2f} of ${one.whole:.2f}" for one in found)
    losses = f"{found[0].losses} and {found[0].losses_of_all} machines lost in the first"
    over = f"{CURVES} problems of {TRIALS} trials: {costs}; {losses}"
    regrets = ", ".join(f"{one.regret:.2f}" for one in found)
    out = [
        _figure("sweep.cost_share", share, "", "<= 0.35", share <= 0.35, over),
        _figure("sweep.regret_percent", regret, "%", "<= 1", regret <= 1.0, f"of the best trial's loss: {regrets}"),
    ]
    count = int(os.environ.get("SPOTKEEPER_BENCH_TRIALS", "12"))
    if count:
        same, told = same_ranking(count)
        out.append(_figure("sweep.same_ranking", float(same), "", "1", same, told))
    return out


def _figure(name: str, value: float, unit: str, goal: str, holds: bool, against: str) -> dict[str, object]:
    return {"name": name, "value": round(value, 4), "unit": unit, "goal": goal, "holds": holds, "against": against}


@dataclass
class Compared:
    """A search by halving beside one that trains all. Costs in USD; ``regret``: percent of the best trial's loss."""

    halved: float
    whole: float
    regret: float
    losses: int
    losses_of_all: int

    @property
    def share(self) -> float:
        return self.halved / self.whole


def compared(seed: int) -> Compared:
    curves = [curve(values, seed) for values in values_of(FILE, seed, 0, TRIALS)]
    halved, found, losses = searched(curves, RUNGS, seed)
    whole, _, losses_of_all = searched(curves, (), seed)
    best = min(one[END] for one in curves)
    return Compared(halved, whole, 100.0 * (curves[found][END] - best) / best, losses, losses_of_all)


# -- the curves


def curve(values: Params, seed: int) -> dict[int, float]:
    """Train one network; return its loss on unseen data at each rung and at the end."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1000 + seed)
    x = torch.rand(1024, 2, generator=draw) * 2 - 1
    y = torch.sin(4 * x[:, :1]) * torch.cos(3 * x[:, 1:]) + 0.1 * torch.randn(1024, 1, generator=draw)
    torch.manual_seed(seed)
    width = int(values["width"])
    model = torch.nn.Sequential(
        torch.nn.Linear(2, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 1),
    )
    betas = float(values["momentum"]), 0.99
    optimizer = torch.optim.AdamW(model.parameters(), float(values["lr"]), betas, weight_decay=float(values["decay"]))
    found: dict[int, float] = {}
    for step in range(1, END + 1):
        pick = torch.randint(0, 512, (int(values["batch"]),), generator=draw)
        loss = torch.nn.functional.mse_loss(model(x[pick]), y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (*RUNGS, END):
            with torch.no_grad():
                found[step] = float(torch.nn.functional.mse_loss(model(x[512:]), y[512:]))
    return found


# -- the searches


def searched(curves: list[dict[int, float]], rungs: tuple[int, ...], seed: int) -> tuple[float, int, int]:
    """Run a search in the simulated cloud; return its cost (USD), its best trial, and how many machines were lost."""
    world = World(the_stack=stack(max_machines=TRIALS), steps=END, seed=seed)
    chance, losses = random.Random(seed), 0  # noqa: S311  seeded
    world.value = lambda job, step: curves[_number(job)].get(step)
    for number in range(TRIALS):
        trial = Trial("bench", number, "loss", "min", 0, TRIALS, rungs, ETA, PARALLEL)
        checkpoint = Checkpoint(mirror=Mirror(every_min=10_000.0))
        world.submit(_job(number), JobSpec(f"bench-{number:04d}", ("train.py",), checkpoint=checkpoint, trial=trial))
    while not all(world.record(_job(number)).phase is Phase.DONE for number in range(TRIALS)):
        world.run(60.0)
        for machine in [one for one in world.machines.values() if one.vm.job and one.vm.model is Model.SPOT]:
            if chance.random() < 60.0 / LIFE_S:
                world._remove(machine)
                losses += 1
    records = [world.record(_job(number)) for number in range(TRIALS)]
    ended = [number for number, record in enumerate(records) if record.outcome is Outcome.SUCCEEDED]
    return sum(one.limits.spent for one in records), min(ended, key=lambda number: curves[number][END]), losses


def _job(number: int) -> str:
    return f"benchj{number:02d}"


def _number(job: str) -> int:
    return int(job[-2:])
