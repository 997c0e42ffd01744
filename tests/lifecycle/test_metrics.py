"""A job whose first machine is lost without notice shows one curve: every step once, also those it trained again."""

from __future__ import annotations

import pytest

from spotkeeper.client.metrics import MetricsReader
from spotkeeper.contract.job import Checkpoint
from spotkeeper.contract.metrics import GenerationMetrics
from spotkeeper.contract.record import Outcome
from spotkeeper.report.job.metrics import ancestors, joined
from tests.lifecycle.stage import PATIENCE_S, Run, Stage, tiny

pytestmark = pytest.mark.lifecycle

STEPS = 300


def test_a_machine_lost_without_notice_leaves_one_curve(stage: Stage) -> None:
    spec = tiny("metrics", STEPS, nodes=1, static="never", checkpoint=Checkpoint(interval_s=1.0))
    with Run(stage, spec) as run:

        def read() -> tuple[GenerationMetrics, ...]:
            return MetricsReader(stage.store, run.job).read()

        run.steady("before the loss")
        run.until("an upload while the job trains", read)
        ((node, slot),) = run.chaos.on_spot()
        run.chaos.preempt(node, slot, announced=False)
        record = run.over(3 * PATIENCE_S)
        found = read()
    assert record.outcome is Outcome.SUCCEEDED, run.story()
    assert [gen for gen, _ in ancestors(found)] == list(range(1, record.gen)), run.story()
    assert joined(found)["loss"].steps == list(range(1, STEPS + 1))
