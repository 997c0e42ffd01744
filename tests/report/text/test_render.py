"""`status JOB` and the live view as printed."""

from __future__ import annotations

from rich.console import Console

from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Event
from spotkeeper.report.job.view import job_view
from spotkeeper.report.text.render import job_table, live, status
from tests.contract.samples import STACK
from tests.report.ledgers import (
    NOTICED,
    a_record,
    entry,
    held,
    printed,
    report,
)

LONG = '  File "/srv/' + "a-long-folder/" * 12 + 'train.py", line 7, in <module>'


def test_the_output_fits_the_terminal() -> None:
    view = job_view(a_record(), Progress(gen=3, step=7, at=1.0, loss=0.5), NOTICED, STACK, 600.0, ("boom [bold]",))
    text = printed(live(view))
    for word in (
        "first (abcdefgh)",
        "generation 3",
        "step 7",
        "notice, 1m40s left",
        "standby",
        "spent $",
        "boom [bold]",
    ):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 110
    assert "boom [bold]" in printed(status(view))
    assert "notice" in printed(report(view))
    assert "first" in printed(job_table([view]))


def test_a_job_with_known_steps_shows_a_progress_bar() -> None:
    progress = Progress(gen=3, step=306, at=1.0, total_steps=1000, step_s=1.5)
    view = job_view(a_record(), progress, (), STACK, 600.0)
    for show in (status, live):
        assert "31 % of the steps, about 17m21s of training left" in printed(show(view))
    unknown = job_view(a_record(), Progress(gen=3, step=306, at=1.0), NOTICED, STACK, 600.0)
    assert "of the steps" not in printed(status(unknown)), "nothing is guessed"


def test_long_reasons_wrap_in_the_live_view() -> None:
    reason = "waiting for static machine rack-7, which alone has the newest checkpoint " * 3
    view = job_view(a_record(reason=reason.strip()), None, NOTICED, STACK, 600.0)
    console = Console(width=60, color_system=None)
    with console.capture() as capture:
        console.print(live(view))
    assert reason.strip() in " ".join(capture.get().replace("│", " ").split())


def test_log_lines_are_printed_unchanged() -> None:
    """A path that is broken, or stands in a box, cannot be copied."""
    view = job_view(held(), None, (), STACK, 600.0, (LONG, "boom"))
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(status(view), crop=False)
    assert {LONG, "boom"} <= set(capture.get().splitlines())
    assert max(len(line) for line in capture.get().splitlines() if line != LONG) <= 80


def test_the_live_view_shows_the_log_below_its_box() -> None:
    between = job_view(a_record(stop=True), None, (), STACK, 600.0, (LONG, "boom"))
    text = printed(live(between))
    assert "boom" in text and 'File "/srv/' in text and max(len(line) for line in text.splitlines()) <= 110
    assert "boom" not in printed(live(job_view(held(), None, (), STACK, 600.0, (LONG, "boom"))))


def test_a_long_event_wraps_below_its_text() -> None:
    long = entry(Event.NOTICE, 61.0, 0, 1, detail="word " * 30)
    console = Console(width=60, color_system=None)
    with console.capture() as capture:
        console.print(live(job_view(a_record(), None, (long,), STACK, 600.0)))
    lines = capture.get().splitlines()
    first = next(number for number, line in enumerate(lines) if "node 0: preemption notice" in line)
    column = lines[first].index("node 0:")
    assert "word" in lines[first + 1]
    assert all(not line[2:column].strip() for line in lines[first + 1 : first + 3])
