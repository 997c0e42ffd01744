"""The examples for Lightning and Hugging Face, with the real libraries, survive preemptions."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotkeeper.client.logs import log_data
from spotkeeper.client.pack import pack
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.record import Outcome
from tests.lifecycle.stage import Run, Stage

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 300
NEEDS = {"lightning": "lightning", "huggingface": "transformers"}

pytestmark = pytest.mark.lifecycle


def cases() -> list[object]:
    return [
        pytest.param(name, marks=pytest.mark.skipif(not find_spec(needs), reason=f"no {needs}: `make adapters` has it"))
        for name, needs in NEEDS.items()
    ]


@pytest.mark.parametrize("name", cases())
def test_adapters_survive_a_notice_and_a_loss(stage: Stage, name: str) -> None:
    job = read_job(EXAMPLES / name / "job.yaml", None, 0.0)
    spec = replace(job, static="never", command=("train.py", "--steps", str(STEPS), "--step-s", "0.05"))
    with Run(stage, spec, pack(EXAMPLES / name)) as run:
        run.steady("at first")
        for announced in (True, False):
            victim = run.chaos.on_spot()[int(announced)]
            run.chaos.preempt(*victim, announced=announced)
            run.chaos.replaced([victim])
            run.steady("on the machines that are left")
        record = run.over()
        traces = run.watcher.traces()
        said = log_data(stage.store, record, 0)[1].decode(errors="replace")
    assert record.outcome is Outcome.SUCCEEDED and record.gen == 3 and not run.ledger(Event.CRASH), run.story()
    second, third = traces[2].restored, traces[3].restored
    assert second is not None and second.step == traces[1].last_step, "the notice cost no step"
    assert third is not None and third >= second
    assert f"{STEPS} steps, loss" in said, said
