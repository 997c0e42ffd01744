"""``submit``: checks all job files, then submits them in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from spotkeeper.cli.output import emit, note
from spotkeeper.cli.stack import checked, note_upkeep, stack_for, unheard
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.pack import Source, pack_source
from spotkeeper.client.submit import Submitted, submit_file
from spotkeeper.client.target import Target
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.jobfile import Overrides
from spotkeeper.contract.parse.problem import Problem, SpecError
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.hold import resume
from spotkeeper.report.job.waiting import place_line, waiting_line
from spotkeeper.report.text.words import count


def run(
    files: Sequence[Path], stack: str | None, overrides: Overrides, *, watch: bool, check: bool, verbose: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Check all job files, then submit them in order.

    Raises:
        CliError: an option for one file was given with several; or a file was refused, see
            :func:`~spotkeeper.client.submit.submit_file` (the files before it are submitted).
        SpecError: all problems of all files; nothing is submitted.
    """
    if len(files) > 1 and (watch or overrides.name is not None):
        option = "--watch" if watch else "--name"
        raise CliError(f"{option} takes one job file, got {len(files)}", Exit.USAGE)
    target, store, state = stack_for(stack, files[0])
    specs = _all_checked(target, store, state, files, overrides)
    sources = [pack_source(file, spec) for file, spec in zip(files, specs, strict=True)]
    if check:
        lines = [_valid(*one) for one in zip(files, specs, sources, strict=True)]
        emit(specs if len(specs) > 1 else specs[0], as_json, "\n".join(lines))
        return
    sent = [_submitted(target, store, state, *one) for one in zip(files, specs, sources, strict=True)]
    done = _in_queue(target, store, state, sent)
    if watch:
        from spotkeeper.cli.jobs.status import watch_job

        note(_text(done[0]))
        watch_job(done[0].job, stack, verbose=verbose, as_json=as_json)
        return
    text = "\n".join(f"{_text(one)}\n{_next_step(store, one)}" for one in done)
    emit(done if len(done) > 1 else done[0], as_json, text)


def _all_checked(
    target: Target, store: Store, state: StackState, files: Sequence[Path], overrides: Overrides
) -> list[JobSpec]:
    """Check all job files; SpecError with the problems of all files, and job names that occur twice."""
    specs: list[JobSpec] = []
    problems: list[Problem] = []
    for file in files:
        try:
            specs.append(checked(target, store, state, file, overrides))
        except SpecError as error:
            problems += error.problems
    names = [spec.name for spec in specs]
    problems += [
        Problem("name", f"several of these files have the name {name}, but unfinished jobs need different names")
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    if problems:
        raise SpecError(problems)
    return specs


def _valid(file: Path, spec: JobSpec, source: Source | None) -> str:
    files = f", {count(source.files, 'file')} to send" if source else ""
    return f"{file}: job file is valid ({spec.name}{files})"


def _submitted(
    target: Target, store: Store, state: StackState, file: Path, spec: JobSpec, source: Source | None
) -> Submitted:
    done, notified = submit_file(target, file, spec, source)
    if spec.team or spec.priority == "high":  # the function knows by now who submitted it, if it answered
        record = lookup.find_job(store, done.job)
        done = replace(done, ungranted=lookup.ungranted_of(store, state, record))
    note_upkeep(target.local)
    if not notified:
        note(unheard(target, "starts the job", new=True))
    return done


def _in_queue(target: Target, store: Store, state: StackState, done: list[Submitted]) -> list[Submitted]:
    """Add the places of the jobs that wait in the queue now, from one read of the allocation."""
    names = {one.job: one.name for one in done}
    queue = lookup.queue_of(store, state, target.clock.now(), names)
    return done if queue is None else [replace(one, queue=queue.waiting(one.job)) for one in done]


def _text(done: Submitted) -> str:
    word = "submitted" if done.new else "runs already" if done.on_hold is None else f"on hold ({done.on_hold})"
    text = "\n".join((f"{done.name}: {word}, job {done.job}", *done.ungranted))
    if done.queue is None:
        return text
    return f"{text}\n{place_line(done.queue)}\n{waiting_line(done.queue)}"


def _next_step(store: Store, done: Submitted) -> str:
    if done.on_hold is None:
        return f"follow it: spotkeeper watch {done.name}"
    record = lookup.find_job(store, done.job)
    return f"to resume it: {resume(record)}; to delete it and its checkpoints: spotkeeper cancel {record.name}"
