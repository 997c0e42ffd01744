"""After the loss of all its disks a job resumes from the bucket, with the weights of an undisturbed run."""

from __future__ import annotations

import pytest

from spotkeeper.contract.job import Checkpoint, Mirror, RequestKind
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.local.core.views import DiskView
from spotkeeper.reconcile.store import paths
from tests.lifecycle.stage import STEPS, Run, Stage, tiny
from tests.local.client import Api

pytestmark = pytest.mark.lifecycle

COPIED = Checkpoint(interval_s=0.7, mirror=Mirror(every_min=1.0))


def destroy_disks(stage: Stage, run: Run) -> None:
    """Delete all disks of the job, as an operator may."""
    state = stage.store.read_stack()
    assert state is not None
    compute = Api.of(stage.cloud, project=state.project)
    for disk in disks(stage, run):
        compute.ok(compute.delete(f"zones/{disk.zone}/disks/{disk.name}"))
    run.until("the disks to be gone", lambda: not disks(stage, run))


def disks(stage: Stage, run: Run) -> list[DiskView]:
    return [disk for disk in stage.cloud.status().disks if disk.labels.get("sk-job") == run.job]


@pytest.mark.matrix
def test_a_job_that_lost_all_disks_continues_from_the_bucket(stage: Stage) -> None:
    """Pause, so that no process has the state in memory; then delete the disks. The newer of two copies is damaged."""
    spec = tiny("phoenix", STEPS, nodes=2, static="never", checkpoint=COPIED)
    with Run(stage, spec) as run:
        run.until("two copies in the bucket", lambda: len(run.record().mirror) == 2)
        run.request(RequestKind.PAUSE)
        run.until("the job to hold", lambda: run.record().phase is Phase.HOLD)
        newest, older = run.record().mirror
        run.until("the replaced to be deleted", lambda: copies(stage, run) == {newest.commit, older.commit})
        part = next(path for path in stage.store.list(paths.copies(run.job)) if newest.commit in path and "bin" in path)
        data = stage.store.get(part) or b""
        stage.store.put(part, data[:-1] + bytes([data[-1] ^ 1]))
        run.until("the machines to be gone", lambda: [disk.users for disk in disks(stage, run)] == [(), ()])
        destroy_disks(stage, run)
        run.request(RequestKind.RESUME)
        run.until("the older copy to be fetched", lambda: run.record().gen == 2)
        run.steady("on new ground")
        restored = run.watcher.traces()[2].restored
        assert restored is not None and str(restored) == older.commit
        record = run.over()
        weights = run.weights()
    assert record.outcome is Outcome.SUCCEEDED, run.story()
    assert [entry.detail for entry in run.ledger(Event.UNMIRRORED)] == [newest.commit]
    assert any("steps are repeated" in entry.detail for entry in run.ledger(Event.FETCH)), run.story()
    assert weights == run.weights_left_alone(2)
    assert copies(stage, run) == set(), "what is buried costs nothing any more"


def copies(stage: Stage, run: Run) -> set[str]:
    return {paths.copy_of(path) for path in stage.store.list(paths.copies(run.job))}
