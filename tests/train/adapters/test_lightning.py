"""A plain Lightning script with one line more: preempted, it ends with the bits of one that was left alone.

The scripts have what makes resuming hard: augmentation, dropout, BatchNorm, schedulers by step and by metric,
validations. What they note on the way (epochs, validations and their figures) happens as often as it would have.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.adapters.plain import Case, copies, curves, fails, left_alone, preempted, restarted_after_its_end

pytest.importorskip("lightning", reason="Lightning is not installed: `make adapters` runs these")

SCRIPT = "lightning_script.py"
CASES = [
    Case(stop=1),
    Case(stop=12),  # of 12 in an epoch: before its validation
    Case(stop=13),
    Case(stop=35),
    Case(stop=7, world=2),
    Case(("--accumulate", "5"), stop=4, world=2),
    Case(("--val-every", "5"), stop=5),
    Case(("--workers", "2"), stop=15),
    Case(("--asks-total",), stop=15),
    Case(("--averaged",), stop=14),
    Case(("--iterable",), stop=15),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_preempted_run_equals_an_undisturbed_one(tmp_path: Path, case: Case) -> None:
    assert preempted(tmp_path / "preempted", SCRIPT, case) == left_alone(tmp_path / "alone", SCRIPT, case)


def test_batches_that_accumulate_gradients_wait_for_no_copy(tmp_path: Path) -> None:
    """Of 12 batches in an epoch the optimizer steps after the 5th, the 10th and the last."""
    then = {line for line in copies(tmp_path, SCRIPT, Case(("--accumulate", "5"))) if line.startswith("batch")}
    assert then and then <= {f"batch {at} ends" for at in (4, 9, 11)}


def test_what_the_script_logs_is_one_curve(tmp_path: Path) -> None:
    preempted(tmp_path, SCRIPT, Case(stop=13))
    found = curves(tmp_path)
    assert found["loss"] == list(range(1, 37)), "each step, of which Lightning logs every 50th"
    assert found["val"] == [12, 24, 36]


def test_after_the_trainings_end_only_later_code_runs_again(tmp_path: Path) -> None:
    left, said = restarted_after_its_end(tmp_path / "again", SCRIPT, Case())
    assert left == left_alone(tmp_path / "alone", SCRIPT, Case())
    assert "nothing left to do" in said


def test_ranks_that_would_train_alone_are_refused(tmp_path: Path) -> None:
    """Lightning's default, one device, takes no notice of torchrun."""
    said = fails(tmp_path / "alone", SCRIPT, Case(("--unaware",), world=2))
    assert "2 processes were started, but the framework's Trainer counts 1: set Trainer(strategy=" in said
