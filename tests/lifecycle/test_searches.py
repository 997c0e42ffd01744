"""A search with real processes: trials stop at a rung, give up machine and disk, and the best goes on, bit for bit."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import Checkpoint, Mirror
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome
from spotkeeper.contract.sweep import Trial
from tests.lifecycle.stage import PATIENCE_S, Run, Stage, script
from tests.train.forks import run_script

pytestmark = pytest.mark.lifecycle

RUNG, END = 30, 60
TRAIN = f"""
import torch, spotkeeper
torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(64, 4)
y = x @ torch.ones(4, 1) + torch.randn(64, 1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=spotkeeper.params()["lr"])
run = spotkeeper.attach(model, optimizer)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8, shuffle=True)
for a, b in run.steps(loader, steps={END}):
    loss = torch.nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.report(loss=loss)
    print("loss", run.steps_done, loss.item().hex(), flush=True)
"""
RATES = {0: 0.001, 1: 0.1}


def losses(text: str) -> dict[int, float]:
    lines = (line.split() for line in text.splitlines() if line.startswith("loss "))
    return {int(step): float.fromhex(value) for _, step, value in lines}


@pytest.mark.matrix  # tests/reconcile/decide/gang and tests/train/loop/test_rungs.py have its parts in `make test`
def test_the_better_trial_goes_on_from_its_copy_and_learns_the_same(stage: Stage, tmp_path: Path) -> None:
    spec, source = script(tmp_path, "train", TRAIN, checkpoint=Checkpoint(mirror=Mirror()))
    alone = {}
    for number, rate in RATES.items():
        (folder := tmp_path / f"alone{number}").mkdir()
        ended = run_script(
            folder, str(tmp_path / "train" / "main.py"), SPOTKEEPER_PARAMS=json.dumps({"lr": rate}), **spec.env
        )
        alone[number] = losses(ended.stdout)
    with ExitStack() as stack:
        runs = []
        for number, rate in RATES.items():
            trial = Trial("lr", number, "loss", "min", 0, len(RATES), (RUNG,), 2, len(RATES))
            job = replace(spec, name=f"lr-{number:04d}", params={"lr": rate}, trial=trial)
            runs.append(stack.enter_context(Run(stage, job, source)))
            if not number:  # the other one is late: this one waits, and has nothing that costs money
                runs[0].until("it to wait", lambda: runs[0].record().hold is Hold.RUNG, 3 * PATIENCE_S)
                runs[0].until("its disk to go", lambda: stage.left_over() == stage.quiet, PATIENCE_S)
        ended_at = [run.over(3 * PATIENCE_S) for run in runs]
        state = stage.store.read_sweep("lr").value
        assert [trial.values for trial in state.trials] == [(alone[0][RUNG],), (alone[1][RUNG],)]
        best = 0 if alone[0][RUNG] < alone[1][RUNG] else 1
        assert ended_at[best].outcome is Outcome.SUCCEEDED, runs[best].story()
        assert ended_at[1 - best].outcome is Outcome.STOPPED, runs[1 - best].story()
        assert state.trial(best).final == alone[best][END], "the same loss, bit for bit"
        causes = [entry.cause for entry in runs[best].ledger(Event.GENERATION)]
        assert causes == ["start", "rung"], runs[best].story()
        assert runs[best].ledger(Event.FETCH), "its disk had gone: the checkpoint came from the bucket"
        assert [entry.again for entry in runs[best].ledger(Event.GENERATION) if entry.again] == []
