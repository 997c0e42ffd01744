"""Home runs dry, and a gang goes abroad with its disks, comes back with them, and leaves by the bucket: same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotkeeper.client.target import STACK_FILE
from spotkeeper.contract.job import Checkpoint, Mirror, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome
from spotkeeper.contract.stack import region_of
from tests.lifecycle.stage import STEPS, Run, Stage, tiny

pytestmark = pytest.mark.lifecycle

HOME, ABROAD = "us-central1", "us-east1"
HERE, THERE = "us-central1-a", "us-east1-b"
COPIED = Checkpoint(interval_s=0.7, mirror=Mirror(every_min=1.0))


@pytest.fixture
def both(tmp_path: Path, alone: Path) -> Iterator[Stage]:
    """The stack `local` with a zone of another region."""
    file, text = tmp_path / "Pulumi.local.yaml", STACK_FILE.read_text()
    text = text.replace(f"spotkeeper:region: {HOME}\n", f"spotkeeper:regions: [{HOME}, {ABROAD}]\n")
    file.write_text(
        text.replace(
            "spotkeeper:zones: [us-central1-a, us-central1-b, us-central1-c]", f"spotkeeper:zones: [{HERE}, {THERE}]"
        )
    )
    with Stage.of_its_own(tmp_path, alone, file) as stage:
        yield stage


@pytest.mark.matrix  # tests/sim has this story in `make test`, tests/local the copies of snapshots
def test_a_gang_goes_abroad_when_home_is_dry_and_returns_with_the_same_weights(both: Stage) -> None:
    spec = tiny("emigrant", 5 * STEPS, nodes=2, static="never", regions=(HOME, ABROAD), checkpoint=COPIED)
    with Run(both, spec) as run:
        run.steady("at home")
        assert region_of(run.record().zone or "") == HOME
        run_dry(both, run, HERE, THERE)
        for model in ("spot", "on-demand"):
            both.cloud.set_capacity(HERE, None, model=model)
        run_dry(both, run, THERE, HERE)
        transfers, billed = run.ledger(Event.EGRESS), both.cloud.bill().bill.egress
        by_bucket(both, run, THERE)
        record = run.over()
        weights = run.weights()
    assert record.outcome is Outcome.SUCCEEDED, run.story()
    causes = ["stockout", "move"] * 2 + ["asked", "move"]
    assert [entry.cause for entry in run.ledger(Event.MOVE)] == causes, run.story()
    assert [one.steps_again for one in run.view().recoveries if one.steps_again] == [], run.story()
    copied_usd = sum(entry.usd or 0.0 for entry in transfers if entry.cause == "checkpoint")  # all it bills
    assert billed > 0 and copied_usd == pytest.approx(billed, rel=1e-6)
    assert weights == run.weights_left_alone(2)


def run_dry(stage: Stage, run: Run, zone: str, other: str) -> None:
    """Take all machines of the zone away. The gang goes to the other one, and its disks with it."""
    stage.cloud.set_capacity(zone, 0, model="on-demand")
    stage.cloud.set_capacity(zone, 0, reclaim=True)
    run.until(f"the gang to leave {zone}", lambda: run.record().zone == other and not run.record().move)
    run.steady(f"in {other}")
    vms = [vm for vm in stage.cloud.status().vms if vm.labels.get("sk-job") == run.job]
    assert {vm.zone for vm in vms} == {other}, vms
    restored = run.watcher.traces()[run.record().gen].restored
    assert restored is not None and restored.step > 0, "the disks there hold what those before held"


def by_bucket(stage: Stage, run: Run, zone: str) -> None:
    """Have the gang go to a zone that has machines again. It stops, uploads its checkpoint and fetches it there."""
    for model in ("spot", "on-demand"):
        stage.cloud.set_capacity(zone, None, model=model)
    run.until("a copy in the bucket", lambda: bool(run.record().mirror))
    run.request(RequestKind.MOVE, zone=zone)
    run.until(f"the gang to be in {zone}", lambda: run.record().zone == zone and not run.record().move)
    run.steady(f"in {zone}, by the bucket")
    restored = run.watcher.traces()[run.record().gen].restored
    (fetched,) = [entry.detail for entry in run.ledger(Event.FETCH)]
    assert restored is not None and str(restored) in fetched, fetched
