"""An Optuna study whose trials are jobs: an objective for ``study.optimize``, and a storage in the stack's bucket.

    journal = BucketJournal("lr-search")
    study = optuna.create_study(study_name="lr-search", storage=JournalStorage(journal), load_if_exists=True)
    objective = SpotkeeperObjective("job.yaml", lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)})
    objective.resume(study)
    study.optimize(objective, n_trials=20, n_jobs=4)

Optuna decides on this machine: it starts no trial and prunes none while the program does not run. Jobs run on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import optuna
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from spotkeeper.client.target import Target
from spotkeeper.contract.record import Phase
from spotkeeper.integrations import programs
from spotkeeper.integrations.journal import Journal
from spotkeeper.integrations.trial_job import JobFailedError, TrialJob, Value, ended, job_name, resolve
from spotkeeper.reconcile.store.documents import CorruptError
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store, open_store

__all__ = ["BucketJournal", "JobFailedError", "SpotkeeperObjective"]

JOB = "spotkeeper_job"  # the trial's user attribute with its job's id
PROGRAM = "spotkeeper_program"  # ... and with the program that follows it
POLL_S = 20.0  # virtual; machines upload metrics once a minute

_log = optuna.logging.get_logger("optuna.spotkeeper")


class BucketJournal(BaseJournalBackend):
    """A backend of ``optuna.storages.JournalStorage``: the journal ``name`` in the stack's bucket.

    Any number of programs may use it at once, on any machine that may submit jobs. Several studies can be in one
    journal, but each read then reads all of them.

    Args:
        name: 1 to 64 characters of a-z, 0-9 and -.
        target: a stack's name (``--stack``) or ``Target``; None: the environment names it, as for the command. Or the
            bucket: a ``Store``, ``"gs://bucket"`` or ``"s3://bucket"``.

    Raises:
        CliError: no such stack.
    """

    def __init__(self, name: str, target: Store | Target | str | None = None) -> None:
        self._journal = Journal(_store(target), name)

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        return self._journal.read(log_number_from)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._journal.append(logs)


def _store(target: Store | Target | str | None) -> Store:
    if isinstance(target, Store):
        return target
    if isinstance(target, str) and "://" in target:
        return open_store(target)
    return resolve(target).store()


class SpotkeeperObjective:
    """An objective that trains each trial as a job, and reports a metric of the job to the pruner.

    The trial fails with ``JobFailedError`` if its job fails, is cancelled, has spent its ``max_usd``, or never reports
    the metric; a trial that ends without a value leaves no job: its job is cancelled.

    Args:
        job: the job file. The job's name is the study's with the trial's number, whatever ``name`` the file has.
        params: returns a trial's values, which replace those of the job file's ``params``.
        metric: what the script reports (``run.report(loss=...)``); its last value is the trial's.
        target: a stack's name (``--stack``) or ``Target``; None: the environment names it, as for the command.
        every: only steps that this number divides are reported to the pruner; each report writes to the bucket.
        poll_s: seconds between two looks at a job.

    Raises:
        CliError: no such stack.
    """

    def __init__(
        self,
        job: str | Path,
        params: Callable[[Trial], Mapping[str, Value]],
        metric: str = "loss",
        target: Target | str | None = None,
        every: int = 1,
        poll_s: float = POLL_S,
    ) -> None:
        self._file, self._params, self._metric = Path(job), params, metric
        self._every, self._poll_s = every, poll_s
        self._target = resolve(target)
        self._store = self._target.store()

    def __call__(self, trial: Trial) -> float:
        """Train the trial's job to its end and return the metric's last value.

        Raises:
            TrialPruned: the pruner ended it.
            JobFailedError: see the class.
            CliError, SpecError, StoreError: the job could not be submitted.
        """
        trial.set_user_attr(PROGRAM, programs.own())
        return self._train(trial, Event())

    def resume(self, study: optuna.Study) -> list[FrozenTrial]:
        """Follow the trials that an earlier program left running to their ends, all at once, and return them.

        Their jobs are found again, not submitted again. Only one program may follow a trial: one that runs on this
        machine keeps its trials, one on another machine must have ended.
        """
        stop = Event()
        left = [one for one in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)) if not _followed(one)]
        with ThreadPoolExecutor(max(1, len(left))) as pool:
            try:
                return list(pool.map(lambda frozen: self._resumed(study, frozen, stop), left))
            finally:
                stop.set()

    def _resumed(self, study: optuna.Study, frozen: FrozenTrial, stop: Event) -> FrozenTrial:
        trial = Trial(study, frozen._trial_id)
        try:
            trial.set_user_attr(PROGRAM, programs.own())
            return study.tell(trial, **self._result(trial, stop), skip_if_finished=True)
        except RuntimeError:  # another program ended it at the same moment
            return study.get_trials(deepcopy=False)[trial.number]

    def _result(self, trial: Trial, stop: Event) -> dict[str, Any]:
        try:
            return {"values": self._train(trial, stop, resumed=True)}
        except optuna.TrialPruned:
            return {"state": TrialState.PRUNED}
        except Exception as error:
            _log.warning("Trial %d failed: %s", trial.number, error)
            return {"state": TrialState.FAIL}

    def _train(self, trial: Trial, stop: Event, *, resumed: bool = False) -> float:
        job = None
        try:
            known = trial.user_attrs.get(JOB)
            job = TrialJob(self._target, self._store, str(known)) if known else self._submitted(trial, resumed)
            return self._follow(trial, job, stop)
        except Exception:
            if job is not None:
                self._cancel(job)
            raise
        except KeyboardInterrupt:
            # Optuna would take it for the trial's failure, and nobody would follow the job any more
            sys.exit(_later(trial))

    def _submitted(self, trial: Trial, resumed: bool) -> TrialJob:
        """Submit the trial's job and note it. An earlier program may have been killed between the two."""
        name, values = job_name(trial.study.study_name, trial.number), self._params(trial)
        job = TrialJob.found(self._target, self._store, name, values) if resumed else None
        job = job or TrialJob.submit(self._target, self._store, self._file, name, values)
        try:
            trial.set_user_attr(JOB, job.job)
        except Exception:
            self._cancel(job)
            raise
        _log.info("Trial %d is job %s (%s).", trial.number, name, job.job)
        return job

    def _cancel(self, job: TrialJob) -> None:
        try:
            job.cancel()
        except StoreError as error:
            _log.warning("Job %s may still run (%s): spotkeeper cancel %s", job.job, error, job.job)

    def _follow(self, trial: Trial, job: TrialJob, stop: Event) -> float:
        """Report the job's points until it has ended; return the metric's last value.

        Raises:
            TrialPruned, JobFailedError
        """
        told = ""
        while True:
            try:
                record = job.read()
                over = ended(record)  # asked before the points are read, so that none can follow
                self._report(trial, job)
                if over:
                    return job.last(self._metric)
                why = record.reason if record.phase is Phase.HOLD else ""
            except CorruptError:
                raise
            except StoreError as error:  # this machine may be offline for a while, and the job trains on
                why = str(error)
            if why and why != told:
                _log.warning("Trial %d, job %s, waits: %s", trial.number, job.job, why)
            told = why
            if self._target.clock.wait(stop, self._poll_s):
                sys.exit(_later(trial))

    def _report(self, trial: Trial, job: TrialJob) -> None:
        """Report the points that are new, in order. Raises TrialPruned if the pruner says so at one of them."""
        known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step, value in job.points(self._metric, max(known, default=-1)):
            if step % self._every:
                continue
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned(f"job {job.job} at step {step}")


def _followed(trial: FrozenTrial) -> bool:
    """Whether another program on this machine follows the trial."""
    lives = programs.lives(trial.user_attrs.get(PROGRAM))
    if lives:
        _log.info("Trial %d is left to another program on this machine.", trial.number)
    return lives


def _later(trial: Trial) -> str:
    return f"trial {trial.number} is left running, and so is its job: resume(study) follows it again"
