"""``sweep rerun``: trains with the values of a trial again, as an ordinary job."""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.cli.output import emit, note
from spotkeeper.cli.stack import note_upkeep, open_stack, unheard
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.submit import submit, tell
from spotkeeper.client.sweep import source_of
from spotkeeper.client.sweep_status import Sweep, find_sweep, read_view
from spotkeeper.client.target import Target, whoami
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.names import JOB_NAME
from spotkeeper.contract.sweepfile import trial_job
from spotkeeper.reconcile.store.store import Store


def run(name: str, seed: int, trial: int | None, job_name: str | None, stack: str | None, *, as_json: bool) -> None:
    """Submit a job with the values of a trial.

    Args:
        trial: its number; None: the best trial.
        job_name: the job's name; None: the trial's, with the seed.

    Raises:
        CliError: no such search or trial; no trial has a value yet; no valid name; or the stack is being destroyed.
        StoreError: the bucket failed.
    """
    target, store = open_stack(stack)
    sweep = find_sweep(store, name)
    if store.draining():
        raise CliError(f"{name}: the stack {target.stack} is being destroyed", Exit.REFUSED, target.up())
    number = _best(target, store, sweep) if trial is None else trial
    if not 0 <= number < sweep.count():
        raise CliError(f"--trial {number}: no such trial", Exit.MISSING, f"{name} has 0 to {sweep.count() - 1}")
    spec = _again(sweep, number, seed, job_name)
    done = submit(store, spec, source_of(store, sweep), target.clock.now(), whoami())
    if not tell(target, store, done):
        note(unheard(target, "starts the job", new=True))
    note_upkeep(target.local)
    word = "submitted" if done.new else "runs already"
    emit(done, as_json, f"{done.name}: {word}, job {done.job}\nfollow it: spotkeeper watch {done.name}")


def _best(target: Target, store: Store, sweep: Sweep) -> int:
    best = read_view(store, sweep, None, target.clock.now(), curves=False).best
    if best is None:
        remedy = "name one: --trial N"
        raise CliError(f"{sweep.name}: no trial has reported {sweep.spec.file.metric} yet", Exit.REFUSED, remedy)
    return best


def _again(sweep: Sweep, number: int, seed: int, job_name: str | None) -> JobSpec:
    spec = trial_job(sweep.spec, sweep.cohort(number), number)
    name = job_name or f"{spec.name}-s{seed}"
    if not JOB_NAME.match(name):
        want = "want a letter, then letters, digits and -, at most 40, all lower case"
        raise CliError(f"{name}: no name of a job: {want}", Exit.USAGE, "name the job: --name JOB")
    return replace(spec, name=name, seed=seed, trial=None)
