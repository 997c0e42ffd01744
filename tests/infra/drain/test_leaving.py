"""A region leaves a stack: refused while a job needs it, else emptied, and only it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from infra.drain import DrainProvider, RegionsProvider, leaving, opened
from infra.drain.emptying import DrainError
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.record import Hold, Mirrored, Move, Node, Outcome, Phase, Record
from spotkeeper.reconcile.store.documents import encode_versioned
from tests.infra.cloud import BUCKET, Cloud, props_of
from tests.infra.drain.test_drain import machine

HOME, THERE, JOB = "us-central1-a", "us-east1-b", "abcdefgh"
ABROAD = Record(JOB, "u", "first", "", 0.0, zone=THERE, gen=3, nodes=(Node(zone=THERE),))
ENDED = msgspec.structs.replace(ABROAD, phase=Phase.DONE, outcome=Outcome.FAILED, keep_disks=True)
HELD = msgspec.structs.replace(ABROAD, phase=Phase.HOLD, hold=Hold.PAUSE)


@pytest.fixture
def both(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Pulumi's state has of the drain of a stack in two regions."""
    monkeypatch.setattr("infra.drain.gcp._PAUSE_LOCAL_S", 0.01)
    return props_of(cloud, HOME, THERE)


def store(cloud: Cloud, record: Record, progress: Progress | None = None) -> None:
    cloud.things[f"{BUCKET}/jobs/{JOB}/rec"] = encode_versioned(record).decode()
    if record.phase is not Phase.DONE:
        cloud.things[f"{BUCKET}/active/{JOB}"] = "1.0"
    if progress is not None:
        cloud.things[f"{BUCKET}/jobs/{JOB}/progress"] = msgspec.json.encode(progress).decode()


def refusals(both: dict[str, Any]) -> list[str]:
    """What a preview without the region says; `up` says the same."""
    failures = DrainProvider().check(both, one_region(both)).failures
    assert all(failure.property == "regions" for failure in failures)
    first = RegionsProvider().check(both, one_region(both)).failures
    assert [failure.reason for failure in first] == [failure.reason for failure in failures], "before pools.json too"
    if failures:
        with pytest.raises(DrainError) as told:
            DrainProvider().update("drain/dev", both, one_region(both))
        assert str(told.value) == "; ".join(failure.reason for failure in failures)
    return [failure.reason for failure in failures]


def one_region(both: dict[str, Any]) -> dict[str, Any]:
    return {**both, "zones": [HOME]}


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (ABROAD, f"job first is in {THERE}: move it to another region (`spotkeeper move first ZONE`) or cancel it"),
        (msgspec.structs.replace(ABROAD, zone=HOME, nodes=(Node(zone=HOME),), move=Move(THERE, 1.0)), f"is in {THERE}"),
        (HELD, f"job first is on hold, and its only checkpoint is in {THERE}: resume it and move it to another"),
        (msgspec.structs.replace(HELD, told="3-9", mirror=(Mirrored("3-8", 0, 1.0),)), "its only checkpoint is in"),
        (ENDED, "`keep_disks`: 1 disk"),
    ],
    ids=["trains there", "moves there", "on hold", "copy is older", "keeps disks"],
)  # fmt: skip
def test_a_region_that_a_job_needs_stays(cloud: Cloud, both: dict[str, Any], record: Record, told: str) -> None:
    disk = machine(cloud, "disks", f"sk-dev-{JOB}-n0000-d0", THERE, sk_stack="dev", sk_job=JOB)
    store(cloud, record)
    (why,) = refusals(both)
    assert told in why and disk in cloud.things


def test_a_copy_in_the_bucket_must_be_of_the_newest_checkpoint(cloud: Cloud, both: dict[str, Any]) -> None:
    copied = msgspec.structs.replace(HELD, told="3-8", mirror=(Mirrored("3-8", 0, 1.0),))
    store(cloud, copied, Progress(3, 9, 1.0, commit_gen=3, commit_step=9))
    assert len(refusals(both)) == 1
    store(cloud, copied, Progress(3, 8, 1.0, commit_gen=3, commit_step=8))
    assert refusals(both) == []


def test_a_region_that_no_job_needs_is_emptied(
    cloud: Cloud, both: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a job that trains at home, of one whose checkpoint is in the bucket too, and of one that never trained."""
    kept = {
        machine(cloud, "instances", f"sk-dev-{JOB}-n0000-a1", HOME, sk_stack="dev", sk_job=JOB),
        machine(cloud, "disks", f"sk-dev-{JOB}-n0000-d1", HOME, sk_stack="dev", sk_job=JOB),
        machine(cloud, "instances", "sk-dev-floor-s0", THERE, sk_stack="dev", sk_pool="floor"),
        machine(cloud, "snapshots", f"sk-dev-{JOB}-n0000-d1", sk_stack="dev", sk_job=JOB),
    }
    machine(cloud, "disks", f"sk-dev-{JOB}-n0000-d0", THERE, sk_stack="dev", sk_job=JOB)
    machine(cloud, "instances", f"sk-dev-{JOB}-n0000-a2", THERE, sk_stack="dev", sk_job=JOB)
    store(cloud, msgspec.structs.replace(ABROAD, zone=HOME, nodes=(Node(zone=HOME),)))
    assert refusals(both) == []
    DrainProvider().update("drain/dev", both, one_region(both))
    assert {path for path in cloud.things if path.startswith("/compute")} == kept
    assert "drain of dev in us-east1: deleted 1 disk, 1 machine" in capsys.readouterr().err
    assert f"{BUCKET}/stack/drain" not in cloud.things, "the stack stays in use"


def test_a_region_that_is_added_or_stays_drains_nothing(cloud: Cloud, both: dict[str, Any]) -> None:
    store(cloud, ABROAD)
    disk = machine(cloud, "disks", f"sk-dev-{JOB}-n0000-d0", THERE, sk_stack="dev", sk_job=JOB)
    for olds, news in ((one_region(both), both), (both, both), (both, {**both, "zones": [HOME, "us-east1-c"]})):
        assert leaving.regions(olds, news) == frozenset()
        assert DrainProvider().check(olds, news).failures == []
        DrainProvider().update("drain/dev", olds, news)
    assert disk in cloud.things


def test_jobs_without_a_record_and_unreadable_ones(cloud: Cloud, both: dict[str, Any]) -> None:
    cloud.things[f"{BUCKET}/active/{JOB}"] = "1.0"
    assert leaving.needed(opened(both), frozenset({"us-east1"})) == []
    cloud.things[f"{BUCKET}/jobs/{JOB}/rec"] = '{"v":1}'
    (why,) = refusals(both)
    assert why.startswith(f"job {JOB} may have checkpoints in us-east1: jobs/{JOB}/rec: not a Record")


def test_without_rights_to_the_bucket_a_preview_refuses_nothing(both: dict[str, Any]) -> None:
    nowhere = {**both, "storage": "http://127.0.0.1:9"}
    assert DrainProvider().check(nowhere, one_region(nowhere)).failures == []
