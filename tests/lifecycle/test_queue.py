"""A low job gives its only machine to a high one, and learns the same as without: with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.client.pack import Source, pack
from spotkeeper.contract.job import PRIORITIES
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.decide.queue.reclaim import ENDING_S, PROTECTED_S
from spotkeeper.reconcile.store import paths
from tests.lifecycle.stage import GPT, PATIENCE_S, SCALE, Run, Stage, script, tiny

pytestmark = pytest.mark.lifecycle

STEP_S = 0.25  # real; most of the first generation's time, so that it costs little of a processor
STEPS = 420  # at that pace longer than the protection at a job's start and before its end together
UNHURRIED = f"""
import os, time
import train
from torch.optim.optimizer import register_optimizer_step_post_hook
if os.environ["SPOTKEEPER_GEN"] == "1":
    register_optimizer_step_post_hook(lambda *_: time.sleep({STEP_S}))
train.main()
"""


def unhurried(folder: Path) -> Source:
    home = folder / "low"
    home.mkdir()
    (home / "train.py").write_bytes((GPT / "train.py").read_bytes())
    (home / "slow.py").write_text(UNHURRIED)
    return pack(home)


@contextmanager
def cap_of_one(stage: Stage) -> Iterator[None]:
    """One dynamic machine for all jobs."""

    def write(state: StackState) -> None:
        stage.store.put(paths.STACK, msgspec.json.encode(state))

    state = stage.store.read_stack()
    assert state is not None
    write(replace(state, max_machines=1))
    yield
    write(state)


@pytest.mark.matrix  # tests/reconcile/decide/queue has jobs that stop for others in `make test`
def test_a_low_job_saves_stops_waits_and_comes_back_for_a_high_one(stage: Stage, tmp_path: Path) -> None:
    assert STEPS * STEP_S > (PROTECTED_S + ENDING_S + 180) / SCALE
    spec = tiny("low", STEPS, nodes=1, static="never", priority="low")
    urgent, files = script(tmp_path, "urgent", "print('done')")
    with cap_of_one(stage), Run(stage, spec, unhurried(tmp_path)) as low:
        low.steady("alone")
        with Run(stage, replace(urgent, priority="high"), files) as high:
            claim = high.until("it to wait", lambda: stage.store.read_allocation().value.claim(high.job))
            assert (claim.waiting, claim.priority) == (True, PRIORITIES.index("high"))
            record = low.until(
                "the low job to wait", lambda: (r := low.record()).hold is Hold.QUEUE and r, 2 * PATIENCE_S
            )
            assert record.reason == "waiting in the queue: its machines go to job urgent; it goes on by itself"
            assert low.view().reason, low.view()
            high.until("the high job to end", lambda: high.record().over, 2 * PATIENCE_S)
            assert high.record().outcome is Outcome.SUCCEEDED, high.story()
        record = low.over(2 * PATIENCE_S)
        weights = low.weights()
        assert record.outcome is Outcome.SUCCEEDED, low.story()
        assert [entry.cause for entry in low.ledger(Event.GENERATION)] == ["start", "queue"], low.story()
        assert [entry.again for entry in low.ledger(Event.GENERATION) if entry.again] == [], "no step is trained twice"
        assert len(low.ledger(Event.STOP)) == 1
        assert weights == low.weights_left_alone(1)
