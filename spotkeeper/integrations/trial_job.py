"""One trial's job: submit it or find it again, read its metric, see how it ended, cancel it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError
from spotkeeper.client.metrics import MetricsReader
from spotkeeper.client.pack import pack_source
from spotkeeper.client.submit import submit_file
from spotkeeper.client.target import Target, notify, whoami
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.names import JOB_NAME
from spotkeeper.contract.parse.jobfile import Overrides, read_job
from spotkeeper.contract.record import Hold, Outcome, Phase, Record
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.metrics import joined

NAME = 40  # characters of a job's name, at most
ENDED_HOLDS = frozenset({Hold.FAILURE, Hold.SPEND, Hold.MAX_WAIT})  # nobody resumes a trial's job: its trial has failed

Value = bool | int | float | str


class JobFailedError(Exception):
    """A trial's job failed, was cancelled, or reported no such metric. ``catch=(JobFailedError,)`` goes on after it.

    ``job``: the job's id.
    """

    def __init__(self, message: str, job: str) -> None:
        super().__init__(message)
        self.job = job


def resolve(target: Target | str | None) -> Target:
    """Return the stack: a target itself, or as the command finds it (``--stack``; None: from the environment).

    Raises:
        CliError: no such stack.
    """
    return target if isinstance(target, Target) else find_target(target)


def job_name(study: str, trial: int) -> str:
    """Return the name of a trial's job: ``<study>-<trial>`` if that is a job's name, else with a hash of the study."""
    plain = f"{study}-{trial}"
    if JOB_NAME.match(plain):
        return plain
    end = f"-{hashlib.sha256(study.encode()).hexdigest()[:6]}-{trial}"
    words = re.sub(r"[^a-z0-9]+", "-", study.lower()).strip("-")
    start = words if words[:1].isalpha() else f"study-{words}"
    return start[: NAME - len(end)].strip("-") + end


class TrialJob:
    """A job that was submitted for a trial."""

    def __init__(self, target: Target, store: Store, job: str) -> None:
        self.job = job
        self._target, self._store = target, store
        self._metrics = MetricsReader(store, job)
        self._record: Record | None = None

    @classmethod
    def submit(cls, target: Target, store: Store, file: Path, name: str, values: Mapping[str, Value]) -> TrialJob:
        """Submit a job file under this name, with these values as its ``params``.

        An unfinished job with this name and the same content is returned instead: a submission may be repeated.

        Raises:
            CliError, SpecError, StoreError: as ``spotkeeper submit``.
        """
        state, now = target.state(store), target.clock.now()
        starts = lookup.starts_of(store, state, now, target.clock.scale)
        spec = read_job(file, state, now, starts, Overrides(name=name, params=dict(values)))
        done, _ = submit_file(target, file, spec, pack_source(file, spec))
        return cls(target, store, done.job)

    @classmethod
    def found(cls, target: Target, store: Store, name: str, values: Mapping[str, Value]) -> TrialJob | None:
        """Return the newest job of this name, if it has these values among its ``params``, whatever its source."""
        job = store.read_name(name)
        read = store.read_record(job) if job is not None else None
        spec = store.read_spec(read.value.job, read.value.spec_key()) if read is not None else None
        if job is None or spec is None or not values.items() <= spec.params.items():
            return None
        return cls(target, store, job)

    def read(self) -> Record:
        """Read the job's record anew. Raises JobFailedError if it is gone."""
        try:
            self._record = lookup.record_of(self._store, self.job)
        except CliError as error:
            raise JobFailedError(str(error), self.job) from None
        return self._record

    def points(self, metric: str, after: int) -> Iterator[tuple[int, float]]:
        """Yield the (step, value) of all points of the metric that are later than step ``after``, by step."""
        curve = joined(self._metrics.read()).get(metric)
        if curve is not None:
            yield from ((step, value) for step, value in zip(curve.steps, curve.values, strict=True) if step > after)

    def last(self, metric: str) -> float:
        """Return the metric's last value. Raises JobFailedError if the job never reported it."""
        curves = joined(self._metrics.read())
        if metric not in curves:
            there = f"it reported {', '.join(sorted(curves))}" if curves else "it reported no metric (run.report)"
            raise JobFailedError(f"{self._told()} reported no metric {metric}: {there}", self.job)
        return curves[metric].values[-1]

    def cancel(self) -> None:
        """Cancel the job. Nothing happens if it has ended."""
        with suppress(CliError):
            request = lookup.new_request(RequestKind.CANCEL, self._target.clock.now(), whoami())
            lookup.send_request(self._store, lookup.record_of(self._store, self.job), request)
            notify(self._target, self._store, self.job)

    def _told(self) -> str:
        return f"job {self._record.name} ({self.job})" if self._record is not None else f"job {self.job}"


def ended(record: Record) -> bool:
    """Whether the job has ended with all of its metrics in the bucket.

    Raises:
        JobFailedError: it failed, or was cancelled.
    """
    told = f"job {record.name} ({record.job})"
    failed = record.over and record.outcome is not Outcome.SUCCEEDED
    if failed or (record.phase is Phase.HOLD and record.hold in ENDED_HOLDS):
        what = record.outcome.value if failed and record.outcome is not None else "failed"
        why = f": {record.reason}" if record.reason else ""
        raise JobFailedError(f"{told} {what}{why}; see spotkeeper logs {record.job}", record.job)
    return record.phase is Phase.DONE  # its machines are gone, after their agents sent the last metrics
