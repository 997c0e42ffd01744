"""``sweep start``, ``extend`` and ``rerun``: draw values, submit trials."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.cli.output import emit, note, progress
from spotkeeper.cli.stack import note_cautions, note_upkeep, open_stack, unheard
from spotkeeper.client import find_target, lookup, space
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.pack import Source, pack_source
from spotkeeper.client.sweep import begin, new_nonce, source_of, submit_missing
from spotkeeper.client.sweep import extend as add_cohort
from spotkeeper.client.sweep_status import Sweep, find_sweep, read_view
from spotkeeper.client.target import Target, notify, whoami
from spotkeeper.contract.job import JobSpec, pools_of
from spotkeeper.contract.parse.sweepfile import SweepAndJob, read_sweep
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.sweep import MOST_TRIALS
from spotkeeper.contract.sweepfile import Cohort, SweepFile, SweepSpec, trial_job
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.sweep import plan
from spotkeeper.report.text.words import count

MOST_PARALLEL = 64  # trials with machines at a time, unless the file says more


class Started(Struct, frozen=True):
    """What a submission of trials has done. ``new``: the numbers of the trials that it submitted -> their jobs."""

    sweep: str
    trials: int
    new: dict[str, str]


def start(file: Path, stack: str | None, *, dry_run: bool, as_json: bool) -> None:
    """Start a search, or submit its missing trials.

    Raises:
        CliError: another search has this name; this one was stopped; or the stack is being destroyed.
        SpecError: all problems of the file and of its job.
    """
    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    now = target.clock.now()
    found = read_sweep(file, state, now, lookup.starts_of(store, state, now, target.clock.scale))
    cohort = _first(found.file, now)
    parallel = found.file.parallel or _room(state, found.job, len(cohort.values))
    spec = SweepSpec(replace(found.file, job=""), found.job, parallel, new_nonce(), now, whoami())
    note_cautions(store, state, found.job_file, trial_job(spec, cohort, 0), now)
    if dry_run:
        from spotkeeper.report.text import sweep as words

        view = plan(found.file, found.job, cohort, parallel, pools_of(found.job, state))
        emit(view, as_json, words.plan(view))
        return
    _refuse_draining(target, store, file)
    source = _packed(found)
    sweep = begin(store, spec, source, cohort)
    if sweep.stops:
        again = f"further trials: spotkeeper sweep extend {sweep.name} --trials +20"
        from spotkeeper.report.text.sweep import stopped

        raise CliError(f"{sweep.name}: the search was {stopped(sweep.stops[-1])}", Exit.REFUSED, again)
    _submit(target, store, sweep, source, as_json=as_json)


def _first(file: SweepFile, now: float) -> Cohort:
    many = len(space.grid(file.space)) if file.sampler == "grid" else file.trials or 0
    return Cohort(0, space.values_of(file, file.seed, 0, many), file.seed, 0, file.max_usd, now, whoami())


def _packed(found: SweepAndJob) -> Source | None:
    return pack_source(found.job_file, found.job)


def _room(state: StackState, job: JobSpec, trials: int) -> int:
    """Return how many trials can have machines at a time, as far as the stack's and the team's limits say."""
    machines = min(state.size, sum(pool.max_machines for pool in pools_of(job, state)))
    team = state.team(job.team).max_machines if job.team else None
    machines = machines if team is None else min(machines, team)
    groups = [pool.max_machines // job.most_of(pool.name) for pool in pools_of(job, state) if job.machines]
    return max(1, min(machines // job.size().min, *groups, trials, MOST_PARALLEL))


def _refuse_draining(target: Target, store: Store, what: object) -> None:
    if store.draining():
        again = f"bring it up again: {target.up()}"
        raise CliError(f"{what}: the stack {target.stack} is being destroyed", Exit.REFUSED, again)


def _submit(target: Target, store: Store, sweep: Sweep, source: Source | None, *, as_json: bool) -> None:
    """Submit the missing trials with a progress bar, and print what was done."""
    heard = [True]

    def tell(job: str) -> None:
        if heard[0]:  # after the first failure the others would only wait for the same one
            heard[0] = notify(target, store, job)

    for job in lookup.unowned(store, sorted(sweep.jobs.values())):
        tell(job)
    new: dict[str, str] = {}
    missing = sweep.missing()
    with progress(f"submitting {count(len(missing), 'trial')}", len(missing)) as advance:
        for number, job in submit_missing(store, sweep, source, target.clock.now(), whoami(), tell):
            new[str(number)] = job
            advance()
    note_upkeep(target.local)
    every = sweep.spec.job
    if new and (every.team or every.priority == "high"):  # the function knows by now who submitted them, if it answered
        first = lookup.record_of(store, next(iter(new.values())))
        for line in lookup.ungranted_of(store, store.read_stack(), first):
            note(f"note: {line}")
    if not heard[0]:
        note(unheard(target, "starts the trials", new=True))
    name = sweep.name
    whole = "" if len(new) == sweep.count() else f", {sweep.count()} in all"
    done = (
        f"submitted {count(len(new), 'trial')}{whole}" if new else f"all {sweep.count()} trials are submitted already"
    )
    text = f"{name}: {done}\nfollow it: spotkeeper sweep status {name}"
    emit(Started(name, sweep.count(), new), as_json, text)


def extend(
    name: str, trials: str, max_usd: float | None, seed: int | None, stack: str | None, *, as_json: bool
) -> None:
    """Add a cohort to a search. If an earlier submission is incomplete, complete that one instead.

    Raises:
        CliError: no such search; it is a grid, which is complete; too many trials; or its ``max_usd`` is spent.
    """
    target, store = open_stack(stack)
    sweep = find_sweep(store, name)
    many = _number(trials)
    _refuse_draining(target, store, name)
    if sweep.missing():
        lacking = count(len(sweep.missing()), "trial")
        note(f"{name}: an earlier submission lacks {lacking}: submitting these, and no further ones")
    else:
        cohort = _next(sweep, many, max_usd, seed, target.clock.now())
        _refuse_spent(target, store, sweep, cohort, trials)
        sweep = add_cohort(store, sweep, cohort)
        if (stop := sweep.spec.file.stop) is not None and many < stop.halving.eta:
            few = f"{count(many, 'trial')}, fewer than eta ({stop.halving.eta})"
            note(f"note: {few}: only one of them trains to its end")
    _submit(target, store, sweep, source_of(store, sweep), as_json=as_json)


def _refuse_spent(target: Target, store: Store, sweep: Sweep, cohort: Cohort, trials: str) -> None:
    """Raise CliError if the earlier trials have spent what all trials may cost: the new ones would end at once."""
    if cohort.max_usd is None:
        return
    state, now = store.read_stack(), target.clock.now()
    spent = read_view(store, sweep, state, now, lookup.site_of(store, state, target), curves=False).spent
    if spent >= cohort.max_usd:
        why = f"{sweep.name}: max_usd is ${cohort.max_usd:,.2f}, and its trials have spent ${spent:,.2f}"
        again = f"spotkeeper sweep extend {sweep.name} --trials {trials} --max-usd USD, with more than ${spent:,.2f}"
        raise CliError(f"{why}: further ones would end at once", Exit.REFUSED, again)


def _number(trials: str) -> int:
    digits = trials.removeprefix("+")
    if not (digits.isascii() and digits.isdecimal() and int(digits) > 0):
        raise CliError(f"--trials {trials}: want a number of trials to add, such as +20", Exit.USAGE)
    return int(digits)


def _next(sweep: Sweep, many: int, max_usd: float | None, seed: int | None, now: float) -> Cohort:
    file, first = sweep.spec.file, sweep.count()
    if file.sampler == "grid":
        told = f"{sweep.name}: a grid has every combination already"
        raise CliError(told, Exit.REFUSED, "start another search with more values")
    if first + many > MOST_TRIALS:
        raise CliError(f"--trials +{many}: a search has at most {MOST_TRIALS:,} trials, this one {first}", Exit.USAGE)
    last = sweep.cohorts[-1]
    seed = last.seed if seed is None else seed
    drawn = sum(len(cohort.values) for cohort in sweep.cohorts if cohort.seed == seed)
    values = space.values_of(file, seed, drawn, many)
    return Cohort(first, values, seed, drawn, last.max_usd if max_usd is None else max_usd, now, whoami())
