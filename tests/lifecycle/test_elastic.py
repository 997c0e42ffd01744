"""A job of one to three machines trains on with fewer while capacity lacks, grows again, and learns the same."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotkeeper.client.pack import pack
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.record import Outcome
from spotkeeper.reconcile.store import paths
from tests.lifecycle.stage import Run, Stage

pytestmark = pytest.mark.lifecycle

ELASTIC = Path(__file__).resolve().parents[2] / "examples" / "elastic"
COMMAND = ("train.py", "--steps", "2000", "--every", "1")  # more than the test needs
LINE = re.compile(r"^step (\d+)  loss ([\d.]+)$", re.MULTILINE)


def curve(text: str) -> dict[int, set[float]]:
    """Losses by step: several where a repeated step gave another loss."""
    found: dict[int, set[float]] = {}
    for step, loss in LINE.findall(text):
        found.setdefault(int(step), set()).add(float(loss))
    return found


def left_alone(folder: Path, steps: int) -> dict[int, set[float]]:
    """The first steps of one process, undisturbed."""
    folder.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPOTKEEPER_")}
    env["PYTHONPATH"] = str(ELASTIC.parents[1])
    argv = [sys.executable, str(ELASTIC / COMMAND[0]), *COMMAND[1:]]
    with subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = "".join(itertools.islice(process.stdout, steps))
        process.kill()
    return curve(text)


@pytest.mark.matrix
def test_an_elastic_job_shrinks_and_grows_on_the_same_loss_curve(stage: Stage, tmp_path: Path) -> None:
    spec = read_job(ELASTIC / "job.yaml", None, 0.0)
    spec = replace(spec, command=(*COMMAND, "--step-s", "0.05"), policy="spot", static="never")
    with Run(stage, spec, pack(ELASTIC)) as run:
        run.steady("on three machines")
        worlds = [len(run.record().members)]
        home, victim = run.record().zone, run.record().nodes[2].cur
        assert home is not None and victim is not None
        for zone in sorted(
            stage.cloud.config.zones, key=lambda zone: zone == home
        ):  # no zone has capacity for all three
            stage.cloud.set_capacity(zone, 2 if zone == home else 0, reclaim=False)
        run.chaos.preempt(2, victim, announced=False)
        run.until("two to go on", lambda: trains(run, 2))
        worlds.append(len(run.record().members))
        stage.fill()
        run.until("the third to be back", lambda: trains(run, 3))
        worlds.append(len(run.record().members))
        run.until("its first losses to be told", lambda: curve(told(run, 3)))
        losses = curve("".join(told(run, gen) for gen in (1, 2, 3)))
        record = run.cancel()
    assert (worlds, record.outcome) == ([3, 2, 3], Outcome.CANCELLED)
    assert len(run.ledger(Event.GENERATION)) == 3, run.story()
    alone = left_alone(tmp_path / "alone", max(losses))
    assert set(losses) == set(alone) == set(range(1, max(losses) + 1)), "every step was done"
    assert max(abs(loss - other) for step in alone for loss in losses[step] for other in alone[step]) <= 1e-6


def told(run: Run, gen: int) -> str:
    """Node 0's output in a generation."""
    return (run.stage.store.get(paths.log(run.job, 0, gen)) or b"").decode()


def trains(run: Run, nodes: int) -> bool:
    """Whether a generation of this many members has made steps."""
    record = run.record()
    trace = run.watcher.traces().get(record.gen)
    return len(record.members) == nodes and not record.stop and trace is not None and trace.first_step_at > 0
