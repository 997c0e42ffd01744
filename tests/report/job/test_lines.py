"""The lines of a job: step, checkpoint, output, silence, clock."""

from __future__ import annotations

import msgspec
import pytest

from spotkeeper.contract.generation import Progress
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.report.job.lines import training_line
from spotkeeper.report.job.view import JobView, OutputView, Site, job_view
from spotkeeper.report.text.render import job_table, live, status
from tests.contract.samples import STACK
from tests.report.ledgers import (
    HOUR,
    NOTICED,
    a_record,
    held,
    printed,
)


@pytest.mark.parametrize(
    ("commit", "line"),
    [
        (1, "resume from the newest checkpoint (step 1), with a fresh crash budget:  spotkeeper resume first"),
        (
            None,
            "resume from the start (no checkpoint was reported), with a fresh crash budget:  spotkeeper resume first",
        ),
    ],
)
def test_the_newest_checkpoint_has_its_step_beside_the_job_s(commit: int | None, line: str) -> None:
    progress = Progress(gen=3, step=50, at=1.0, total_steps=200, commit_gen=commit and 3, commit_step=commit)
    text = printed(status(job_view(held(), progress, (), STACK, now=HOUR)))
    assert line in text.splitlines()
    assert ("step 50/200 (checkpoint: 1)" in text) == (commit == 1)


def test_an_upload_is_shown_and_then_the_download_command() -> None:
    progress = Progress(gen=3, step=300, at=100.0, step_s=1.0, total_steps=300, uploading_s=65.0)
    view = job_view(a_record(gen=3), progress, (), STACK, now=1000.0)
    assert view.uploading_s == 65.0 and "uploading its output to the bucket" in printed(status(view))
    assert job_view(a_record(gen=4), progress, (), STACK, now=1000.0).uploading_s is None, "of an older generation"
    over = job_view(a_record(phase=Phase.DONE, outcome=Outcome.SUCCEEDED, gen=3), progress, (), STACK, now=1000.0)
    assert over.uploading_s is None and "output" not in printed(status(over))
    left = msgspec.structs.replace(over, output=OutputView(2, 4_100_000))
    assert f"output: 2 files, 4.1 MB; fetch it: spotkeeper download {over.name}" in printed(status(left))


def test_a_job_without_a_new_step_shows_for_how_long() -> None:
    progress = Progress(gen=3, step=50, at=1000.0, step_s=2.0, samples_per_s=9.0)

    def look(now: float, scale: float = 1.0, **over: object) -> JobView:
        return job_view(a_record(**over), progress, (), STACK, now=now, site=Site(scale))

    quiet = look(1720.0)
    assert quiet.no_new_step_s == 720.0 and "no new step for 12m00s" in printed(status(quiet))
    assert "no new step" not in printed(status(look(1180.0)))
    assert look(1300.0, scale=20.0).no_new_step_s is None, "a step of 2 real seconds takes 40 of this clock's"
    assert look(1720.0, gen=4, gen_since=1500.0).no_new_step_s == 220.0, "since its generation began"
    for over in ({"stop": True}, {"phase": Phase.HOLD, "hold": Hold.PAUSE}, {"phase": Phase.END}, {"gen": 0}):
        view = look(1720.0, **over)
        assert (view.no_new_step_s, view.samples_per_s) == (None, None), "nothing trains, so nothing has a rate"


def test_on_a_scaled_clock_durations_are_marked() -> None:
    progress = Progress(gen=3, step=50, at=590.0, samples_per_s=9.0)
    view = job_view(a_record(), progress, (), STACK, now=600.0, site=Site(20.0, local=True))
    assert "9 samples/s (real time)" in training_line(view)
    assert "since: on the cloud's clock, 20x" in printed(job_table([view]))
    assert "10m00s since submission on the cloud's clock, 20x" in " ".join(
        line.strip("│ ") for line in printed(live(view)).splitlines()
    )
    usual = job_view(a_record(), progress, NOTICED, STACK, now=600.0)
    for text in (printed(live(usual)), printed(status(usual)), printed(job_table([usual]))):
        assert "clock" not in text and "real" not in text


@pytest.mark.parametrize(
    ("over", "step", "total", "line", "cell"),
    [
        ({}, 586, 600, "step 586/600", "586"),
        ({"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}, 586, 600, "last reported: step 586/600", "586+"),
        ({"phase": Phase.END, "outcome": Outcome.SUCCEEDED}, 586, None, "last reported: step 586", "586+"),
        ({"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}, 600, 600, "step 600/600", "600"),
        ({"phase": Phase.DONE, "outcome": Outcome.CANCELLED}, 586, 600, "last reported: step 586/600", "586"),
    ],
)
def test_an_ended_jobs_last_report_is_marked_as_such(
    over: dict[str, object], step: int, total: int | None, line: str, cell: str
) -> None:
    view = job_view(
        a_record(**over), Progress(gen=3, step=step, at=9 * HOUR, total_steps=total), NOTICED, STACK, 9 * HOUR
    )
    assert training_line(view) == f"generation 3  {line}"
    assert cell in printed(job_table([view])).splitlines()[1].split()
