"""What a real job of the one-machine cloud shows of itself: the parts of a recovery, and how busy its machines are."""

from __future__ import annotations

import pytest

from spotkeeper.client.target import local_target
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.exporter import families, reading
from spotkeeper.exporter.reading import StackReader, StackReading
from spotkeeper.report.job.trace import RecoveryPart, job_trace
from tests.lifecycle.stage import Run, Stage, tiny

pytestmark = pytest.mark.lifecycle


def test_a_recovery_leaves_its_parts_and_machines_their_use(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "USAGE_S", 0.0)
    with Run(stage, tiny("observed", 4000, nodes=2, static="never")) as run:
        run.steady("before a machine is taken")
        node, slot = run.chaos.spot_members(1)[0]
        run.chaos.preempt(node, slot, announced=True)
        run.until("the next generation's first step", lambda: len(run.ledger(Event.FIRST)) == 2)
        run.until("the disk on the replacement", lambda: run.ledger(Event.MOUNTED))
        cloud = stage.cloud
        trace = job_trace(run.job, "observed", run.ledger(), cloud.clock.now(), "local", cloud.clock.scale)
        reader = StackReader(local_target(cloud.folder))
        busy = run.until("every node's use", lambda: (found := usage(reader.read())) and len(found) == 2 and found)
        run.request(RequestKind.CANCEL)
        run.over()
    (one,) = trace.recoveries
    parts = {span.part: span for span in one.spans}
    assert {*RecoveryPart} - set(parts) <= {RecoveryPart.NOTICE, RecoveryPart.ORDER, RecoveryPart.SAVE}
    assert parts[RecoveryPart.BOOT].node == parts[RecoveryPart.MOUNT].node == node
    assert (parts[RecoveryPart.RESTORE].bytes or 0) > 0, "it continued from a checkpoint"
    ended = [span.end for span in one.spans]
    assert one.end is not None and all(end is not None for end in ended)
    assert parts[RecoveryPart.FIRST].end == one.end and one.slowest is not None
    assert all(0.0 <= share <= 1.0 for share in busy.values())


def usage(read: StackReading) -> dict[str, float]:
    """The CPU use of each node."""
    found = next(one for one in families.families(read) if one.name == "spotkeeper_node_cpu_usage_ratio")
    return {sample.labels["node"]: sample.value for sample in found.samples}
