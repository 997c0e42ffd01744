"""A slow machine is measured by the library, reported by its agent, shown, and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper.contract.job import Checkpoint
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome
from spotkeeper.reconcile.decide.provisioning.machine_health import STRAGGLER_SWAP
from tests.lifecycle.stage import Run, Stage, script

pytestmark = pytest.mark.lifecycle

SLOW = 1  # the node whose first machine is slow
TRAIN = f"""
import os, time
import spotkeeper, torch
import torch.distributed as dist
from spotkeeper.train.loop import lag
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

lag.WINDOW_S = 0.5
dist.init_process_group("gloo")
torch.manual_seed(0)
step_s = 0.25 if dist.get_rank() == {SLOW} and os.environ["SPOTKEEPER_GEN"] == "1" else 0.02
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(10_000, 4), torch.randn(10_000, 1)), 4)
run = spotkeeper.attach(model, optimizer)
for x, y in run.steps(loader, steps=100_000):
    time.sleep(step_s)
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.matrix
def test_a_slow_machine_is_reported_and_swapped_without_losing_a_step(stage: Stage, tmp_path: Path) -> None:
    fields = {"nodes": 2, "policy": "spot", "stragglers": "replace", "checkpoint": Checkpoint(interval_s=1.0)}
    with Run(stage, *script(tmp_path, "slow", TRAIN, **fields)) as run:
        run.until("the slow machine to be told of", lambda: run.ledger(Event.LAG))
        assert any("delays the others" in warning for warning in run.view().warnings)
        run.until("its replacement to train", lambda: run.record().gen > 1 and not run.record().stop)
        record = run.record()
        stopped = run.watcher.traces()[1].last_step
        run.until("the next generation's first step", lambda: (t := run.watcher.traces().get(2)) and t.first_step_at)
        resumed = run.watcher.traces()[2].restored
        outcome = run.cancel().outcome
    assert outcome is Outcome.CANCELLED
    told = run.ledger(Event.LAG)[0]
    assert told.node == SLOW and told.detail.endswith("x the median") and float(told.detail.split("x")[0]) > 1.3
    assert [entry.node for entry in run.ledger(Event.PROMOTED)][:1] == [SLOW]
    assert run.ledger(Event.GENERATION)[1].cause == STRAGGLER_SWAP
    assert run.ledger(Event.LOSS) == [] and run.ledger(Event.CRASH) == []
    other = record.nodes[1 - SLOW].cur
    assert other is not None and other.attempt == 1, "only the slow one was replaced"
    assert resumed is not None and resumed.step == stopped
