"""A search in a bucket, whose trials have come as far as a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Outcome, Phase, TrialProgress
from spotkeeper.contract.stack import Model
from spotkeeper.contract.sweep import SweepState, TrialReport, decided
from spotkeeper.contract.sweepfile import trial_job
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli

FILE = """
name: lr
job: {command: [/opt/train.py, "{lr}"]}
space:
  lr: {uniform: [0, 1]}
  state: {choice: [a, b]}
trials: 9
metric: loss
goal: min
max_usd: 50
stop: {halving: {min: 10, max: 90}}
"""
HOUR_S = 3600.0
START_H = 0.5  # until a job trains


@pytest.fixture
def jobs(cli: Cli, store: Store, tmp_path: Path) -> dict[int, str]:
    """The jobs of a submitted search, by number."""
    (tmp_path / "sweep.yaml").write_text(FILE)
    done = cli("sweep", tmp_path / "sweep.yaml")
    assert done.code == 0, done.err
    return store.list_trials("lr")


@pytest.fixture
def over(store: Store) -> Callable[..., None]:
    def end(job: str, outcome: Outcome, hours: float = 1.0) -> None:
        """The job had one spot machine for so long ($1 an hour, on-demand $3), and has ended."""
        read = store.read_record(job)
        assert read is not None
        spec = store.read_spec(job)
        assert spec is not None and spec.trial is not None
        trial = TrialProgress(spec.trial)
        record = msgspec.structs.replace(read.value, phase=Phase.DONE, outcome=outcome, trial=trial, nonce="n")
        assert store.cas_record(record, read.token)
        intent = Entry(
            0.0, "i", Event.INTENT, node=0, attempt=1, pool="workers", zone="us-central1-a", model=Model.SPOT, price=1.0
        )
        store.append_ledger(job, intent)
        admitted = Entry(60.0, "a", Event.ADMITTED, node=0, attempt=1)
        store.append_ledger(job, admitted)
        store.append_ledger(job, Entry(START_H * HOUR_S, "b", Event.GENERATION, gen=1))
        store.append_ledger(job, Entry(hours * HOUR_S, "g", Event.GONE, node=0, attempt=1))
        store.append_ledger(job, Entry(hours * HOUR_S, "e", Event.END, cause=outcome.value))

    return end


@pytest.fixture
def tell(store: Store) -> Callable[[Mapping[int, TrialReport]], None]:
    def write(reports: Mapping[int, TrialReport]) -> None:
        """The trials have reported this."""
        read = store.read_sweep("lr")
        state = SweepState("lr", read.value.ver + 1, "n", tuple(reports[number] for number in sorted(reports)))
        spec, cohorts = store.read_sweep_spec("lr"), store.list_cohorts("lr")
        assert spec is not None
        for cohort in cohorts:
            trial = trial_job(spec, cohort, cohort.first).trial
            assert trial is not None
            state = decided(state, trial)
        assert store.cas_sweep(state, read.token)

    return write
