"""The plan of a search, and what a trial waits for: by what all trials have reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotkeeper.contract.sweep import SweepState, Trial, TrialReport, decided
from spotkeeper.contract.sweepfile import EarlyStop, Halving, SweepFile
from spotkeeper.report.job.waiting import trial_lines, trial_part
from spotkeeper.report.sweep import rung_plans, steps_share


def file(halving: Halving | None) -> SweepFile:
    return SweepFile("s", "", {}, "loss", "min", stop=None if halving is None else EarlyStop(halving))


@given(trials=st.integers(1, 200), low=st.integers(1, 50), factor=st.integers(2, 60), eta=st.integers(2, 5))
def test_the_plan_is_what_the_function_decides(trials: int, low: int, factor: int, eta: int) -> None:
    halving = Halving(low, low * factor, eta)
    plans = rung_plans(file(halving), trials)
    assert [plan.step for plan in plans] == list(halving.rungs())
    trial = Trial("s", 0, "loss", count=trials, rungs=halving.rungs(), eta=eta)
    alive, steps, at = set(range(trials)), 0, 0
    reports = {number: TrialReport(number) for number in alive}
    for rung, step in enumerate(halving.rungs()):
        assert plans[rung].trials == len(alive)
        steps, at = steps + len(alive) * (step - at), step
        for number in alive:
            reports[number] = TrialReport(number, (*reports[number].values, float(number)))
        found = decided(SweepState("s", trials=tuple(reports.values())), trial).decision(0, rung)
        assert found is not None and found.best == plans[rung].continuing
        alive = set(found.continuing())
    steps += len(alive) * (halving.max - at)
    assert steps_share(file(halving), trials, plans) == pytest.approx(steps / (trials * halving.max))


def test_without_halving_every_trial_trains_to_its_end() -> None:
    assert rung_plans(file(None), 9) == () and steps_share(file(None), 9, ()) == 1.0
    assert steps_share(file(Halving(10, 10)), 9, ()) == 1.0


TRIAL = Trial("s", 4, "loss", first=3, count=6, rungs=(10, 30), eta=3)


def part(*reports: TrialReport) -> list[str]:
    return trial_lines(trial_part(TRIAL, decided(SweepState("s", trials=reports), TRIAL)))[1:]


@pytest.mark.parametrize(
    ("reports", "lines"),
    [
        ([], []),
        (
            [TrialReport(4, (0.5,))],
            ["waits at step 10: 5 of 6 trials have not reported: s-0003, s-0005, s-0006, s-0007, s-0008"],
        ),
        (
            [TrialReport(number, (0.5,)) for number in (3, 4, 5, 6)] + [TrialReport(7, over=True)],
            ["waits at step 10: 1 of 6 trials has not reported: s-0008"],
        ),
        (
            [TrialReport(4, (0.5,)), *(TrialReport(number, held=True) for number in (3, 5, 6, 7, 8))],
            [
                "waits at step 10: 5 of 6 trials have not reported: s-0003, s-0005, s-0006, s-0007, s-0008",
                "on hold: s-0003, s-0005, s-0006, s-0007, s-0008: resume or cancel",
            ],
        ),
        ([TrialReport(number, (0.5,)) for number in range(3, 9)], []),
        ([TrialReport(number, (0.5,) * (1 + (number == 4))) for number in range(3, 9)],
         ["waits at step 30: 1 of 2 trials has not reported: s-0003"]),
        ([TrialReport(4, (0.5,), over=True)], []),
        (
            [TrialReport(4, held=True)],
            ["the others do not wait for it; once resumed, it continues if it beats the last one that did"],
        ),
        ([TrialReport(4, (0.5, 0.4), held=True)], []),
        ([TrialReport(4, (0.5, 0.4, 0.3))], []),
    ],
)  # fmt: skip
def test_what_a_trial_waits_for(reports: list[TrialReport], lines: list[str]) -> None:
    assert part(*reports) == lines


def test_a_trial_names_its_search() -> None:
    assert trial_lines(trial_part(TRIAL, SweepState()))[0] == "trial 4 of a search:  spotkeeper sweep status s"
