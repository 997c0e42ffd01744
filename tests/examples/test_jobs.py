"""The examples' job files: well, and as long as a first look at a job takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper.client.space import values_of
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.parse.sweepfile import read_sweep
from spotkeeper.contract.sweepfile import Cohort, SweepSpec, trial_job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["gpt", "elastic", "lightning", "huggingface", "plain"])
def test_an_example_trains_long_enough_to_preempt_its_machines(name: str) -> None:
    """Whatever the machine: a fast one is slowed down to the time a step takes at least."""
    spec = read_job(EXAMPLES / name / "job.yaml", None, 0.0)
    script, *words = spec.command
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert script == "train.py"
    assert 180 <= int(options["--steps"]) * float(options["--step-s"]) <= 240


def test_the_example_of_a_search_fills_in_its_values() -> None:
    found = read_sweep(EXAMPLES / "search" / "sweep.yaml", None, 0.0)
    file = found.file
    cohort = Cohort(0, values_of(file, file.seed, 0, file.trials or 0), file.seed)
    job = trial_job(SweepSpec(file, found.job, 1, "n", 0.0), cohort, 8)
    assert job.command[-2:] == (f"--lr={job.params['lr']}", f"--layers={job.params['layers']}")
    steps = int(job.command[job.command.index("--steps") + 1])
    assert file.stop is not None and steps == file.stop.halving.max and job.trial is not None
    assert job.trial.rungs == (30, 90)
