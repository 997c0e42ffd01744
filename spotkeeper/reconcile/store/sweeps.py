"""The documents of a search in ``sweeps/<name>/``: what it is, its cohorts, trials and stops, and its state."""

from __future__ import annotations

import msgspec

from spotkeeper.contract.names import JOB_ID, JOB_NAME
from spotkeeper.contract.sweep import SweepState
from spotkeeper.contract.sweepfile import Cohort, SweepSpec, SweepStop
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.bucket import Bucket
from spotkeeper.reconcile.store.documents import Versioned


class SweepDocuments(Bucket):
    """What members of a team write about a search, and what its trials report."""

    def read_sweep(self, name: str) -> Versioned[SweepState]:
        """Read what a search's trials have reported; an empty state with the token ``""`` if none has yet."""
        read = self._read_versioned(paths.sweep_state(name), SweepState)
        return read or Versioned(SweepState(sweep=name), "")

    def cas_sweep(self, state: SweepState, token: str) -> str | None:
        """Replace a search's state, as :meth:`cas_allocation` does."""
        path = paths.sweep_state(state.sweep)
        return self._replace_versioned(path, state, token) if token else self._create_versioned(path, state)

    def read_sweep_spec(self, name: str) -> SweepSpec | None:
        return self._value(paths.sweep_spec(name), SweepSpec)

    def create_sweep_spec(self, spec: SweepSpec) -> bool:
        """Store what a search is, create-only."""
        return self._create(paths.sweep_spec(spec.file.name), msgspec.json.encode(spec), own=True) is not None

    def list_cohorts(self, name: str) -> tuple[Cohort, ...]:
        """Return a search's cohorts, the oldest first."""
        return tuple(sorted(self._read_all(paths.sweep_cohorts(name), Cohort), key=lambda cohort: cohort.first))

    def create_cohort(self, name: str, cohort: Cohort) -> bool:
        """Store a cohort, create-only. True also if the same one is there."""
        path = paths.sweep_cohort(name, cohort.first)
        return self._create(path, msgspec.json.encode(cohort), own=True) is not None

    def list_trials(self, name: str) -> dict[int, str]:
        """Return the ids of the jobs of a search's submitted trials, by number."""
        folder = paths.sweep_trials(name)
        keys = [path for path in self._objects.list(folder) if path.removeprefix(folder).isdecimal()]
        blobs = zip(keys, self._objects.get_many(keys), strict=True)
        found = {int(path.removeprefix(folder)): blob.data.decode("ascii", "replace") for path, blob in blobs if blob}
        return {number: job for number, job in found.items() if JOB_ID.match(job)}

    def read_trial(self, name: str, number: int) -> str:
        """Return the id of the job that is a search's trial; "": none is submitted, or the object is unreadable."""
        blob = self._objects.get(paths.sweep_trial(name, number)) if JOB_NAME.match(name) else None
        job = blob.data.decode("ascii", "replace") if blob is not None else ""
        return job if JOB_ID.match(job) else ""

    def create_trial(self, name: str, number: int, job: str) -> bool:
        """Note that a trial is submitted, and as which job, create-only."""
        return self._create(paths.sweep_trial(name, number), job.encode(), own=True) is not None

    def list_stops(self, name: str) -> tuple[SweepStop, ...]:
        """Return when a search was stopped, the first time first."""
        return tuple(sorted(self._read_all(paths.sweep_stops(name), SweepStop), key=lambda stop: stop.below))

    def create_stop(self, name: str, stop: SweepStop) -> bool:
        """Note that a search was stopped, create-only. False if these trials were stopped already."""
        return self._create(paths.sweep_stop(name, stop.below), msgspec.json.encode(stop), own=True) is not None

    def list_sweeps(self) -> tuple[str, ...]:
        """Return the names of all searches."""
        found = {path.removeprefix(paths.SWEEPS).partition("/")[0] for path in self._objects.list(paths.SWEEPS)}
        return tuple(sorted(found))

    def put_sweep_source(self, name: str, sha256: str, tar: bytes) -> None:
        """Store the source of a search's trials; that of a job goes when the job ends."""
        self._put_large(paths.sweep_source(name, sha256), tar)
