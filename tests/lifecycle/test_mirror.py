"""All of a job's disks are destroyed, and it goes on from the bucket: with the same weights as one left alone."""

from __future__ import annotations

import pytest
from spotkeeper.local.views import DiskView
from spotkeeper.reconcile import paths
from spotkeeper.spec.job import AskKind, Checkpoint, Mirror
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Outcome, Phase

from tests.lifecycle.stage import STEPS, Run, Stage, tiny
from tests.local.client import Api

pytestmark = pytest.mark.lifecycle

COPIED = Checkpoint(interval_s=0.7, mirror=Mirror(every_min=1.0))


def destroy_disks(stage: Stage, run: Run) -> None:
    """All that the job has, by somebody with the right to do so."""
    state = stage.store.read_stack()
    assert state is not None
    compute = Api(stage.cloud.compute_endpoint, state.project)
    for disk in disks(stage, run):
        compute.ok(compute.delete(f"zones/{disk.zone}/disks/{disk.name}"))
    run.until("the disks to be gone", lambda: not disks(stage, run))


def disks(stage: Stage, run: Run) -> list[DiskView]:
    return [disk for disk in stage.cloud.status().disks if disk.labels.get("sk-job") == run.job]


def test_what_all_disks_lost_the_bucket_has(stage: Stage) -> None:
    """Paused, so that nobody holds the state in memory; then the disks go. The newer of two copies is damaged."""
    spec = tiny("phoenix", STEPS, nodes=2, static="never", checkpoint=COPIED)
    with Run(stage, spec) as run:
        run.until("two copies in the bucket", lambda: len(run.record().mirror) == 2)
        run.ask(AskKind.PAUSE)
        run.until("the job to hold", lambda: run.record().phase is Phase.HOLD)
        newest, older = run.record().mirror
        run.until("the replaced to be deleted", lambda: copies(stage, run) == {newest.commit, older.commit})
        part = next(path for path in stage.store.list(paths.copies(run.job)) if newest.commit in path and "bin" in path)
        data = stage.store.get(part) or b""
        stage.store.put(part, data[:-1] + bytes([data[-1] ^ 1]))
        run.until("the machines to be gone", lambda: [disk.users for disk in disks(stage, run)] == [(), ()])
        destroy_disks(stage, run)
        run.ask(AskKind.RESUME)
        run.until("the older copy to be fetched", lambda: run.record().gen == 2)
        run.steady("on new ground")
        restored = run.watcher.traces()[2].restored
        assert restored is not None and str(restored) == older.commit
        record = run.over()
        weights = run.weights()
    assert record.outcome is Outcome.SUCCEEDED, run.story()
    assert [entry.detail for entry in run.ledger(Event.UNMIRRORED)] == [newest.commit]
    assert any("steps are done again" in entry.detail for entry in run.ledger(Event.FETCH)), run.story()
    assert weights == run.weights_left_alone(2)
    assert copies(stage, run) == set(), "what is buried costs nothing any more"


def copies(stage: Stage, run: Run) -> set[str]:
    return {paths.copy_of(path) for path in stage.store.list(paths.copies(run.job))}
