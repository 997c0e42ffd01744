"""A script without the library, on machines that are taken from it with and without a word."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from spotkeeper.cli.jobs import log_data
from spotkeeper.cli.pack import pack
from spotkeeper.local.demo import proof
from spotkeeper.spec.jobfile import read_job
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Outcome, SlotState

from tests.lifecycle.stage import Run, Stage

pytestmark = pytest.mark.lifecycle

PLAIN = Path(__file__).resolve().parents[2] / "examples" / "plain"
STEPS = 400


def said(run: Run, gen: int) -> str:
    """What the ranks' machines have of the script's words in a generation; each rank has the same to say."""
    folders = (run.stage.cloud.folder / "vms").glob(f"*/root/run/spotkeeper/{run.job}/{gen}/logs")
    return "\n".join(path.read_text(errors="replace") for folder in folders for path in folder.rglob("*.log"))


def trains(run: Run, gen: int) -> bool:
    """All ranks are in, and the script has gone on."""
    record = run.record()
    members = [rank.cur for rank in record.ranks if rank.cur is not None and rank.cur.state is SlotState.MEMBER]
    return record.gen == gen and len(members) == 2 and said(run, gen).count("going on after step") >= 2


def left_alone() -> str:
    """The hash of the weights of two ranks whom nobody has disturbed, one after the other in this process."""
    script = SimpleNamespace(**runpy.run_path(str(PLAIN / "train.py"), run_name="plain"))
    net = script.network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        for rank in (0, 1):
            x, y = script.batch_of(step, rank)
            (torch.nn.functional.mse_loss(net(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return str(script.weights(net))


def test_a_script_that_saves_on_sigterm_loses_nothing_to_a_notice_and_goes_on_after_a_loss(stage: Stage) -> None:
    spec = replace(
        read_job(PLAIN / "job.yaml", None, 0.0), command=("train.py", "--steps", str(STEPS), "--step-s", "0.05")
    )
    with Run(stage, spec, pack(PLAIN)) as run:
        run.until("the first generation to train", lambda: trains(run, 1))
        rank, slot = run.storm.on_spot()[1]
        run.storm.strike(rank, slot, announced=True)
        run.until("the second generation to train", lambda: trains(run, 2))
        stopped = {int(step) for step in re.findall(r"told to stop: saved step (\d+)", said(run, 1))}
        went_on = {int(step) for step in re.findall(r"going on after step (\d+)", said(run, 2))}
        assert stopped and went_on == stopped, "both ranks, at the very step"

        rank, slot = run.storm.on_spot()[0]
        run.storm.strike(rank, slot, announced=False)
        run.until("the third generation to train", lambda: trains(run, 3))
        (again,) = {int(step) for step in re.findall(r"going on after step (\d+)", said(run, 3))}
        assert again in stopped or (again > max(stopped) and again % 25 == 0), "from the newest that both have"
        record = run.over()
        weights = proof.weights_in(log_data(stage.store, record, 0)[1].decode(errors="replace"))
    assert record.outcome is Outcome.SUCCEEDED and record.gen == 3, run.story()
    assert not run.ledger(Event.CRASH), run.story()
    assert weights == left_alone()
