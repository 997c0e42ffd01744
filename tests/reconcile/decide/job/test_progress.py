"""What a stop costs: the steps after the newest checkpoint, as reported or, after a surprise, as estimated."""

from __future__ import annotations

import pytest

from spotkeeper.contract.facts import Kind
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job.progress import REPORTS_S, LostWork, lost_work
from tests.reconcile.decide.test_decide import NOW, fact
from tests.reconcile.decide.test_guards import Case, Change, calm, on_record, on_snapshot

STEP_S, SAVE_S = 2.0, 8.0


def stopped(after_s: float = 11.0, *said: object) -> Case:
    """A gang of two stopped so long after the report of step 100; step 90 is saved."""
    record, seen = on_record(stop=True, stop_since=NOW + after_s)(*calm(2, *said))
    return on_snapshot(step_s=STEP_S, save_s=SAVE_S)(record, seen)


@pytest.mark.parametrize(
    ("after_s", "cause", "again"),
    [
        (11.0, "loss", 10 + 5),  # whole steps of two seconds
        (11.0, "crash", 10 + 5),
        (REPORTS_S, "loss", 10 + 30),
        (REPORTS_S + 9.0, "loss", 10 + 30),  # it would have reported again
        (-3.0, "loss", 10),
        (11.0, "notice", 10),  # the gang had time to report
        (11.0, "resize", 10),
    ],
)
def test_after_a_surprise_the_steps_since_the_report_are_estimated(after_s: float, cause: str, again: int) -> None:
    assert lost_work(Draft(*stopped(after_s)), cause) == LostWork(90, again, STEP_S, SAVE_S)


@pytest.mark.parametrize("ended", [Kind.EXIT, Kind.RELEASED])
def test_a_master_that_has_ended_has_reported_its_last_step(ended: Kind) -> None:
    draft = Draft(*stopped(11.0, fact(0, ended, "1")))
    assert lost_work(draft, "loss") == LostWork(90, 10, STEP_S, SAVE_S)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (on_record(gen=0), LostWork()),
        (on_snapshot(progress=None), LostWork(0, None, STEP_S, SAVE_S)),
        (on_record(gen=4), LostWork(90, None, STEP_S, SAVE_S)),  # what is reported is of the generation before
        (on_record(given_up="3-90"), LostWork(None, None, STEP_S, SAVE_S)),
        (on_snapshot(step_s=None), LostWork(90, 10, None, SAVE_S)),
        (on_snapshot(save_s=None), LostWork(90, 15, STEP_S, None)),
    ],
)
def test_what_is_unknown_of_lost_work_is_left_out(change: Change, lost: LostWork) -> None:
    assert lost_work(Draft(*change(*stopped())), "loss") == lost
