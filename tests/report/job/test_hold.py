"""What `status` says of a job on hold: its cost, its end, and the commands that continue or end it."""

from __future__ import annotations

import msgspec
import pytest

from spotkeeper.contract.cloud import disks_kept
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Node, Outcome, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.view import JobView, Site, job_view
from spotkeeper.report.text.render import job_table, live, status
from tests.contract.samples import STACK
from tests.report.ledgers import (
    HOUR,
    a_record,
    entry,
    held,
    priced,
    printed,
    report,
)


def test_a_failed_job_on_hold_shows_its_cost_and_both_commands() -> None:
    up = [entry(Event.ADMITTED, 60.0, node, 1, pool="workers", model=Model.SPOT) for node in (0, 1)]
    again = entry(Event.ADMITTED, 90.0, 1, 2, pool="workers", model=Model.ON_DEMAND)
    static = entry(Event.ADMITTED, 60.0, 2, 1, pool="always", model=Model.STATIC)
    view = job_view(held(hold_ends=HOUR * 25), None, [*up, again, static], priced(0.10), now=HOUR)
    assert view.stands() and not view.over()
    assert view.hold is not None and view.hold.usd_per_day == pytest.approx(2 * 100 * 0.10 * 12 / 365)
    assert printed(status(view)).splitlines()[-5:] == [
        "its machines are deleted; 2 disks of 200 GB in all: $0.66 a day",
        "unless resumed, it ends in 1d00h: its disks and their checkpoints are deleted",
        "resume from the newest checkpoint, with a fresh crash budget:  spotkeeper resume first",
        "resume with a corrected script, or a corrected job file:  spotkeeper resume first JOB.YAML",
        "end it (its disks and their checkpoints are deleted):  spotkeeper cancel first",
    ]
    assert "spotkeeper resume first" in printed(live(view))
    dear = job_view(held(keep_disks=True), None, up, priced(None), now=HOUR)
    assert "2 disks of 200 GB in all: price unknown" in printed(status(dear))
    assert "end it (its disks stay (keep_disks)):" in printed(status(dear))
    assert msgspec.json.decode(msgspec.json.encode(view), type=JobView) == view


def test_a_job_held_by_max_usd_names_both_remedies() -> None:
    record = held(Hold.SPEND, reason="max_usd: $5.00 is spent", hold_ends=HOUR * 25)
    lines = printed(status(job_view(record, None, (), STACK, now=HOUR))).splitlines()
    assert "on hold (max_usd: $5.00 is spent)" in lines[0]
    assert lines[-5:] == [
        "it can spend a little more than max_usd: costs are checked each minute, and saving takes time",
        "unless resumed, it ends in 1d00h: its disks and their checkpoints are deleted",
        "resume from the newest checkpoint, with max_usd to spend again:  spotkeeper resume first",
        "resume with another max_usd, or other files:  spotkeeper resume first JOB.YAML",
        "end it (its disks and their checkpoints are deleted):  spotkeeper cancel first",
    ]


def test_a_job_held_by_max_wait_names_both_remedies() -> None:
    record = held(Hold.MAX_WAIT, reason="waiting for capacity in z-a", hold_ends=HOUR * 25)
    assert printed(status(job_view(record, None, (), STACK, now=HOUR))).splitlines()[-3:-1] == [
        "resume from the newest checkpoint, with max_wait to wait again:  spotkeeper resume first",
        "resume with `policy: balanced`, another max_wait, or other pools:  spotkeeper resume first JOB.YAML",
    ]


def test_an_unavailable_checkpoint_names_go_back_once() -> None:
    progress = Progress(gen=3, step=50, at=1.0, commit_gen=3, commit_step=48)
    remedy = "spotkeeper resume first --go-back"
    why = f"no available machine has the newest checkpoint, 3-48. To continue without it: {remedy}"
    view = job_view(held(Hold.CLOUD, reason=why, hold_until=HOUR * 2), progress, (), STACK, now=HOUR)
    text = " ".join(printed(status(view)).split())
    assert text.count(remedy) == 1 and "spotkeeper resume first JOB.YAML --go-back" in text
    assert "to go on from the newest" not in text
    assert view.hold is not None and view.hold.resume == remedy


@pytest.mark.parametrize("local", [False, True])
def test_kept_disks_of_an_ended_job_are_named(local: bool) -> None:
    done = entry(Event.DONE, 2 * HOUR, cause="succeeded", detail=f"but {disks_kept(['sk-prod-abcdefgh-n0000-d0'])}")
    over = a_record(phase=Phase.DONE, outcome=Outcome.SUCCEEDED, nodes=(Node(),), members=(), keep_disks=True)
    view = job_view(over, None, (done,), STACK, now=9 * HOUR, site=Site(local=local))
    assert view.disks_kept == "1 disk kept and billed: sk-prod-abcdefgh-n0000-d0"
    for text in (printed(status(view)), printed(report(view)), printed(live(view)), printed(job_table([view]))):
        assert view.disks_kept in text
    how = "spotkeeper local down deletes them" if local else "--filter=labels.sk-job=abcdefgh)"
    assert how in printed(status(view)) and how in printed(report(view))
    assert job_view(over, None, (entry(Event.DONE, 1.0),), STACK, now=9 * HOUR).disks_kept == ""


def test_other_holds_name_their_wait() -> None:
    """A pause and a refusal end by themselves or were requested; a resume that is on its way ends the hold."""
    assert not job_view(held(Hold.PAUSE), None, (), STACK, now=1.0).stands()
    cloud = job_view(held(Hold.CLOUD, hold_until=61.0), None, (), STACK, now=1.0)
    assert not cloud.stands() and "it tries again by itself in 1m00s" in printed(status(cloud))
    assert "disk" not in printed(status(cloud)).replace("its disks and their checkpoints", ""), "it never had one"
    resuming = job_view(held(), None, (), STACK, now=1.0, resuming=True)
    assert not resuming.stands() and "a resume is requested" in printed(status(resuming))
