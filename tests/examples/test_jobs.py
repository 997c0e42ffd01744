"""The examples' job files: well, and as long as a first look at a job takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper.contract.parse.jobfile import read_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["gpt", "elastic", "lightning", "huggingface", "plain"])
def test_an_example_trains_long_enough_to_preempt_its_machines(name: str) -> None:
    """Whatever the machine: a fast one is slowed down to the time a step takes at least."""
    spec = read_job(EXAMPLES / name / "job.yaml", None, 0.0)
    script, *words = spec.command
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert script == "train.py"
    assert 180 <= int(options["--steps"]) * float(options["--step-s"]) <= 240
