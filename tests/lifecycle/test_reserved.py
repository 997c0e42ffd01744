"""A job on reserved capacity: it costs nothing there, and moves to spot before the reservation ends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from spotkeeper.client.target import STACK, STACK_FILE
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome
from spotkeeper.contract.stack import Model
from spotkeeper.local import deploy
from tests.lifecycle.stage import Run, Stage, tiny

pytestmark = pytest.mark.lifecycle

ZONE = "us-central1-b"
LEFT_S = 700.0  # virtual; the replacement is requested when half of the machine's time there is over, at the latest


def written(file: Path, more: str = "") -> None:
    pool = f"      max_on_demand: 2\n      reservations: [{{name: res, zone: {ZONE}, count: 1{more}}}]\n"
    file.write_text(STACK_FILE.read_text().replace("      max_on_demand: 2\n", pool, 1))


@pytest.fixture
def reserved(tmp_path: Path) -> Iterator[Stage]:
    file = tmp_path / "Pulumi.local.yaml"
    written(file)
    with Stage.of_its_own(tmp_path, None, file) as stage:
        yield stage


@pytest.mark.matrix
def test_a_job_trains_in_a_reservation_and_leaves_it_before_its_end(reserved: Stage) -> None:
    cloud = reserved.cloud
    with Run(reserved, tiny("reserved", 1_000_000, static="never", nodes=1)) as run:
        run.steady("in the reservation")
        slot = run.record().nodes[0].cur
        assert slot is not None and (slot.model, slot.zone, slot.reservation) == (Model.RESERVED, ZONE, "res")
        (shown,) = (vm for vm in cloud.status().vms if vm.labels.get("sk-job") == run.job)
        assert (shown.model, shown.price) == ("reserved", 0.0)
        money = run.view().money
        assert money.spent == money.on_demand_only == 0.0 < money.reserved_hours

        ends = datetime.fromtimestamp(cloud.clock.now() + LEFT_S, UTC)
        written(reserved.stack_file, f", ends: {ends.isoformat(timespec='seconds')}")
        deploy.up(STACK, reserved.stack_file, cloud, cloud.folder / "deploy", engine="in-process")
        run.until("its second generation to train", lambda: run.record().gen == 2 and run.chaos.is_steady())
        slot = run.record().nodes[0].cur
        assert slot is not None and (slot.model, slot.zone) == (Model.SPOT, ZONE)
        assert cloud.clock.now() < ends.timestamp()
        assert [(one.cause, one.steps_again) for one in run.view().recoveries] == [("planned end", 0)]
        assert not run.ledger(Event.LOSS) and run.record().budget.preemptions == 0
        record = run.cancel()
    assert record.outcome is Outcome.CANCELLED
