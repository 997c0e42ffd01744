"""A job of one to three machines goes on without those that nobody has to offer, grows again, and learns the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from spotkeeper.cli.commands import read_job
from spotkeeper.cli.jobs import log_text
from spotkeeper.cli.pack import pack
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Outcome

from tests.lifecycle.stage import ROOM, Run, Stage

pytestmark = pytest.mark.lifecycle

ELASTIC = Path(__file__).resolve().parents[2] / "examples" / "elastic"
COMMAND = ("train.py", "--steps", "700", "--every", "1")
LINE = re.compile(r"^step (\d+)  loss ([\d.]+)$", re.MULTILINE)


def curve(text: str) -> dict[int, set[float]]:
    """Losses by step: more than one where a step was done again and came out otherwise."""
    found: dict[int, set[float]] = {}
    for step, loss in LINE.findall(text):
        found.setdefault(int(step), set()).add(float(loss))
    return found


def left_alone(folder: Path) -> dict[int, set[float]]:
    """One process, undisturbed."""
    folder.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPOTKEEPER_")}
    env["PYTHONPATH"] = str(ELASTIC.parents[1] / "agent")
    argv = [sys.executable, str(ELASTIC / COMMAND[0]), *COMMAND[1:]]
    return curve(subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout)


def test_it_shrinks_when_the_market_is_dry_and_grows_again_on_one_curve(stage: Stage, tmp_path: Path) -> None:
    spec = read_job(ELASTIC / "job.yaml", None, 0.0)
    spec = replace(spec, command=(*COMMAND, "--step-s", "0.05"), policy="spot", static="never")
    with Run(stage, spec, pack(ELASTIC)) as run:
        run.steady("on three machines")
        worlds = [len(run.record().members)]
        for zone in stage.cloud.config.zones:
            stage.cloud.set_capacity(zone, 0, reclaim=False)
        victim = run.record().ranks[2].cur
        assert victim is not None
        run.storm.strike(2, victim, announced=False)
        run.until("two to go on", lambda: trains(run, 2))
        worlds.append(len(run.record().members))
        for zone in stage.cloud.config.zones:
            stage.cloud.set_capacity(zone, ROOM)
        run.until("the third to be back", lambda: trains(run, 3))
        worlds.append(len(run.record().members))
        record = run.over(180.0)
        text = "".join(log_text(stage.store, record, 0, gen)[1] for gen in range(1, record.gen + 1))
    assert (worlds, record.outcome) == ([3, 2, 3], Outcome.SUCCEEDED)
    assert len(run.ledger(Event.GENERATION)) == 3, run.story()
    here, alone = curve(text), left_alone(tmp_path / "alone")
    assert set(alone) == set(range(1, 701)) == set(here)
    assert max(abs(loss - other) for step, losses in here.items() for loss in losses for other in alone[step]) <= 1e-6


def trains(run: Run, nodes: int) -> bool:
    """So many members are in a generation that has made steps."""
    record = run.record()
    trace = run.watcher.traces().get(record.gen)
    return len(record.members) == nodes and not record.stop and trace is not None and trace.first_step_at > 0
