"""A plain script for Hugging Face's trainer with one line more: preempted, it ends with the bits of one left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.adapters.plain import Case, copies, curves, fails, left_alone, preempted, restarted_after_its_end

pytest.importorskip("transformers", reason="transformers is not installed: `make adapters` runs these")

SCRIPT = "huggingface_script.py"
CASES = [
    Case(stop=1),
    Case(stop=12),  # of 12 in an epoch: its evaluation comes before the stop
    Case(stop=13),
    Case(stop=7, world=2),
    Case(("--accumulate", "5"), stop=4, world=2),
    Case(("--val-every", "5"), stop=5),
    Case(("--workers", "2"), stop=15),
    Case(("--by-init",), stop=14),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_preempted_run_equals_an_undisturbed_one(tmp_path: Path, case: Case) -> None:
    assert preempted(tmp_path / "preempted", SCRIPT, case) == left_alone(tmp_path / "alone", SCRIPT, case)


def test_later_callbacks_find_the_copy_complete(tmp_path: Path) -> None:
    assert set(copies(tmp_path, SCRIPT, Case(("--accumulate", "5")))) == {"a step begins"}


def test_what_the_trainer_logs_is_one_curve(tmp_path: Path) -> None:
    preempted(tmp_path, SCRIPT, Case(stop=13))
    found = curves(tmp_path)
    assert found["loss"] == found["learning_rate"] == list(range(2, 37, 2))
    assert (found["eval_loss"], found["train_loss"]) == ([12, 24, 36], [36])


def test_after_the_trainings_end_only_later_code_runs_again(tmp_path: Path) -> None:
    left, said = restarted_after_its_end(tmp_path / "again", SCRIPT, Case(("--weights-only",)))
    assert left == left_alone(tmp_path / "alone", SCRIPT, Case(("--weights-only",)))
    assert "nothing left to do" in said


def test_a_callback_added_after_the_trainer_is_refused(tmp_path: Path) -> None:
    assert "when it is made" in fails(tmp_path / "late", SCRIPT, Case(("--late",)))
