"""The result on disk is that of a whole run, and of nothing less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.security.tally import BODIES, Bodies, Tally

CLASSES = {"store: one": 3, "store: two": 4}


@pytest.mark.parametrize(
    ("tally", "said"),
    [
        (Tally(dict(CLASSES)), "0 of 100000 bodies"),
        (Tally(dict(CLASSES), bodies=Bodies(BODIES - 1)), "99999 of 100000 bodies"),
        (Tally({"store: one": 3}, bodies=Bodies(BODIES)), "1 of 2 classes"),
        (Tally(bodies=Bodies(5)), "0 of 2 classes, 5 of 100000 bodies"),
    ],
)
def test_a_partial_run_does_not_replace_a_whole_one(tmp_path: Path, tally: Tally, said: str) -> None:
    file = tmp_path / "security.json"
    file.write_text("whole")
    assert said in tally.write(2, file)
    assert file.read_text() == "whole"


def test_several_processes_counts_are_one_run() -> None:
    whole = Tally()
    for part in (Tally({"store: one": 3}), Tally({}, ["store: two"], Bodies(7, taken=7, median_ms=0.5)), Tally()):
        whole.add(part.told())
    whole.add(None)  # a process that died
    assert whole == Tally({"store: one": 3}, ["store: two"], Bodies(7, taken=7, median_ms=0.5))


def test_a_whole_run_is_kept_with_its_times_and_its_failures(tmp_path: Path) -> None:
    file = tmp_path / "made" / "security.json"
    bodies = Bodies(BODIES, taken=60_000, refused=40_000, median_ms=0.25, p99_ms=1.5, longest_ms=30.0)
    assert "written" in Tally({"store: one": 3}, ["store: two"], bodies).write(2, file)
    told = json.loads(file.read_text())
    assert (told["cases"], told["failed"]) == (3, ["store: two"])
    assert (told["median_ms"], told["p99_ms"], told["bodies"]["sent"]) == (0.25, 1.5, BODIES)
