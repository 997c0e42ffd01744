"""What the commands do, one function each: find the stack, do it, print it."""

from __future__ import annotations

import contextlib
import getpass
import time
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.cli import download as downloading
from spotkeeper.cli import jobs
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.fetching import shown
from spotkeeper.cli.output import emit, note
from spotkeeper.cli.pack import pack_source
from spotkeeper.cli.poke import poke
from spotkeeper.cli.starts import starts_of
from spotkeeper.cli.submit import submit_file
from spotkeeper.cli.target import Target, find_target
from spotkeeper.reconcile.store_api import CorruptError, Store, StoreError
from spotkeeper.report.held import resume as resume_command
from spotkeeper.report.view import JobView
from spotkeeper.spec.check import cautions
from spotkeeper.spec.job import AskKind, JobSpec
from spotkeeper.spec.jobfile import read_job
from spotkeeper.spec.problem import SpecError
from spotkeeper.spec.record import Hold, Outcome, Phase, Record
from spotkeeper.spec.stack import StackState


class Asked(Struct, frozen=True, omit_defaults=True):
    """What ``cancel``, ``pause`` and ``resume`` answer. ``changed``: fields of the job file that a resume replaces."""

    job: str
    name: str
    ask: str
    id: str
    changed: tuple[str, ...] = ()


def submit(file: Path, stack: str | None, *, watch: bool, check: bool, as_json: bool) -> None:
    target, store, state = _stack_for(stack, file)
    spec = _checked(target, store, state, file)
    source = pack_source(file, spec)
    if check:
        emit(spec, as_json, f"{file}: {spec.name} is well" + (f", {source.files} files to send" if source else ""))
        return
    done, heard = submit_file(target, file, spec, source)
    _note_upkeep(target)
    if not heard:
        note("the function could not be reached from here: the next tick starts the job")
    word = "submitted" if done.new else "runs already" if done.holds is None else f"holds ({done.holds})"
    text = f"{done.name}: {word}, job {done.job}"
    if watch:
        note(text)
        watch_job(done.job, stack, as_json=as_json)
        return
    follow = f"follow it: spotkeeper watch {done.name}"
    emit(done, as_json, f"{text}\n{follow if done.holds is None else _ways_out(jobs.find_job(store, done.job))}")


def _ways_out(record: Record) -> str:
    return f"go on: {resume_command(record)}; end it with its checkpoints: spotkeeper cancel {record.name}"


def _stack_for(stack: str | None, file: Path) -> tuple[Target, Store, StackState]:
    """The stack that a job file is for.

    Raises:
        CliError, StoreError: there is no such stack; what is wrong with the file even so is told before.
    """
    try:
        target = find_target(stack)
        store = target.store()
        state = target.state(store)
    except (CliError, StoreError):
        try:
            read_job(file, None, 0.0)
        except SpecError as error:
            note("\n".join(f"error: {line}" for line in str(error).splitlines()))
        raise
    return target, store, state


def _checked(target: Target, store: Store, state: StackState, file: Path, since: float | None = None) -> JobSpec:
    """The job file, checked against the stack. ``since``: of a job that is resumed, its submission: its deadline
    counts from there, and what is done of its work by now is not to be done again.

    Raises:
        SpecError: everything that is wrong with the file.
    """
    now = target.clock.now()
    spec = read_job(file, state, now if since is None else since, starts_of(store, state, now))
    for line in cautions(spec, state, jobs.prices_of(store, state), now):
        note(f"note: {line}")
    return spec


def status(job: str | None, stack: str | None, *, finished: bool, as_json: bool) -> None:
    from spotkeeper.report.render import status as shown_status
    from spotkeeper.report.tables import job_table

    target = find_target(stack)
    _note_upkeep(target)
    store = target.store()
    state = _known_state(target, store)
    now = target.clock.now()
    if job is not None:
        record = jobs.find_job(store, job)
        view = jobs.view_of(store, record, state, now, target.site(), jobs.deadline_of(store, record))
        view = replace(view, output=downloading.summary(store, record))
        emit(view, as_json, shown_status(view))
        return
    found = jobs.all_jobs(store, finished)
    views = [jobs.view_of(store, record, state, now, target.site()) for record in found.records]
    for one in found.unreadable:
        note(f"{one.job}: unreadable, and left alone: {one.unreadable}\n  try: {one.remedy}")
    text = f"no unfinished job in {target.stack} (finished ones: spotkeeper status --all)"
    emit([*views, *found.unreadable], as_json, job_table(views) if views else "" if found.unreadable else text)


def _open(stack: str | None) -> tuple[Target, Store]:
    """The stack and its bucket, which must be that stack's, whether or not the rest of its document makes sense.

    Raises:
        CliError: there is no such stack.
    """
    target = find_target(stack)
    store = target.store()
    with contextlib.suppress(CorruptError):  # a wish can be left, and a log read, all the same
        target.state(store)
    return target, store


def _note_upkeep(target: Target) -> None:
    if target.local is not None:
        from spotkeeper.cli.localcloud import note_upkeep

        note_upkeep(target.local)


def _known_state(target: Target, store: Store) -> StackState | None:
    """The stack, where it makes sense; says what does not, and what then goes on."""
    state = None
    try:
        state = target.state(store)
    except CorruptError as error:
        note(f"{error}\n  no job is looked after; what runs goes on\n  try: {error.remedy}")
    try:
        store.read_alloc()
    except CorruptError as error:
        note(f"{error}\n  no machine is asked for or given back; what runs goes on\n  try: {error.remedy}")
    return state


def watch_job(job: str, stack: str | None, *, as_json: bool) -> None:
    from spotkeeper.cli.watch import watch

    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    record = jobs.find_job(store, job)
    deadline = jobs.deadline_of(store, record)
    code = watch(lambda: _look(target, store, state, record, deadline), as_json)
    if code is Exit.OK:
        if not as_json:
            _note_output(store, record)
        return
    held = store.read_record(record.job)
    why = held.value.hold if held is not None and held.value.phase is Phase.HOLD else None
    who, remedy = f"{record.name} ({record.job})", f"spotkeeper resume {record.name}"
    if why is Hold.SPEND:
        raise CliError(f"{who} has spent its max_usd and holds", code, f"{remedy} (for as much again)")
    if why is not None:
        raise CliError(f"{who} failed and holds", code, f"spotkeeper logs {record.job}, then {remedy} [JOB.YAML]")
    if held is not None and held.value.outcome is Outcome.CANCELLED:
        raise CliError(f"{who} was cancelled", code)  # by a person, who knows why
    raise CliError(f"{who} did not succeed", code, f"spotkeeper logs {record.job}")


def _note_output(store: Store, record: Record) -> None:
    from spotkeeper.report.lines import output_line

    if (held := store.read_record(record.job)) and (output := downloading.summary(store, held.value)):
        note(output_line(output, record.name))


def download(job: str, folder: Path | None, rank: int | None, stack: str | None, *, as_json: bool) -> None:
    _, store = _open(stack)
    record = jobs.find_job(store, job)
    done = downloading.download(store, record, folder, rank, quiet=as_json)
    emit(done, as_json, downloading.text(done))
    for line in done.left_out:
        note(f"not kept: {shown(line)}")
    if record.outcome is None:
        note(f"{record.name} still runs: of machines that go on there may be more")


def checkpoints(job: str, fetch: Path | None, commit: str | None, stack: str | None, *, as_json: bool) -> None:
    from spotkeeper.cli import checkpoints as reading

    if commit is not None and fetch is None:
        raise CliError(
            "--commit says which one to fetch", Exit.USAGE, "spotkeeper checkpoints JOB --fetch DIR --commit GEN-STEP"
        )
    _, store = _open(stack)
    record = jobs.find_job(store, job)
    if fetch is None:
        rows = reading.known(store, record, time.time())
        emit(rows, as_json, reading.text(rows, record))
        return
    done = reading.fetch(store, record, fetch, commit, quiet=as_json)
    use = f'spotkeeper.attach(..., checkpoint_dir="{shown(done.folder)}") goes on from it'
    emit(done, as_json, f"{done.commit} is in {shown(done.folder)}, {len(done.files)} files; {use}")


def _look(target: Target, store: Store, state: StackState, record: Record, deadline: float | None) -> JobView:
    held = store.read_record(record.job)
    if held is None:
        raise CliError(f"{record.job}: its record is gone", Exit.MISSING)
    return jobs.view_of(store, held.value, state, target.clock.now(), target.site(), deadline)


def logs(job: str, rank: str, gen: int | None, stack: str | None, *, follow: bool, as_json: bool) -> None:
    from spotkeeper.cli import logs as reading

    wanted = reading.wanted(rank)
    target, store = _open(stack)
    reading.logs(target, store, jobs.find_job(store, job), wanted, gen, follow=follow, as_json=as_json)


def ask_job(
    job: str, kind: str, stack: str | None, *, as_json: bool, nodes: int | None = None, go_back: bool = False
) -> None:
    target, store = _open(stack)
    withdrawn = jobs.withdraw(store, job, target.clock.now()) if kind == AskKind.CANCEL.value else None
    if withdrawn is not None:
        emit(Asked(withdrawn, job, kind, ""), as_json, f"{job} ({withdrawn}): its unfinished submission is withdrawn")
        return
    record = jobs.find_job(store, job)
    by, now = getpass.getuser(), target.clock.now()
    wish = jobs.ask(store, record, AskKind(kind), now, by, nodes=nodes, go_back=go_back)
    if not poke(target, record.job):
        note("the function could not be reached from here: the next tick takes it in")
    size = f" to {jobs.machines(nodes)}" if nodes is not None else ""
    text = f"{record.name} ({record.job}): asked to {kind}{size}"
    emit(Asked(record.job, record.name, kind, wish.id), as_json, text)
    if not as_json:
        note(f"  to see it done: spotkeeper status {record.name}")


def resume(job: str, file: Path | None, stack: str | None, *, go_back: bool, as_json: bool) -> None:
    if file is None:
        ask_job(job, AskKind.RESUME.value, stack, as_json=as_json, go_back=go_back)
        return
    from spotkeeper.cli.mend import resume_with

    target, store, state = _stack_for(stack, file)
    record = jobs.find_job(store, job)
    spec = _checked(target, store, state, file, record.created)
    source = pack_source(file, spec)
    by, now = getpass.getuser(), target.clock.now()
    wish, changed = resume_with(store, record, spec, source, state, now, by, go_back=go_back)
    if not poke(target, record.job):
        note("the function could not be reached from here: the next tick takes it in")
    files = f"with other files ({', '.join(changed)})" if changed else "; its files are as they were"
    text = f"{record.name} ({record.job}): asked to resume{' ' if changed else ''}{files}"
    emit(Asked(record.job, record.name, AskKind.RESUME.value, wish.id, tuple(changed)), as_json, text)


def reconcile(stack: str | None, *, once: bool, as_json: bool) -> None:
    from spotkeeper.cli.tick import tick

    if not once:
        raise CliError("only one tick at a time", Exit.USAGE, "spotkeeper reconcile --once")
    done = tick(find_target(stack))
    late = f"; no time was left for {len(done.late)} of them: run it again" if done.late else ""
    emit(done, as_json, f"{done.jobs} unfinished job{'' if done.jobs == 1 else 's'} reconciled{late}")
    if done.failed:
        remedy = "mend what an ALARM above names, if there is one; then run it again"
        raise CliError(f"rounds were cut off: {', '.join(done.failed)}", Exit.FAILED, remedy)


def repair(what: str, stack: str | None, *, as_json: bool) -> None:
    from spotkeeper.cli.tick import repair_alloc

    if what != "alloc":
        raise CliError(f"{what}: only alloc can be repaired", Exit.USAGE, "spotkeeper repair alloc")
    made = repair_alloc(find_target(stack))
    emit(made, as_json, f"stack/alloc is made anew: {jobs.machines(len(made.grants))} granted")


def render(file: Path | None, stack: str | None, *, as_json: bool) -> None:
    from spotkeeper.cli.show import Rendered, job_texts, stack_texts

    texts: tuple[Rendered, ...]
    if file is not None and not file.name.startswith("Pulumi."):
        texts = job_texts(read_job(file, None, 0.0))
    else:
        texts = stack_texts(file, stack)
    emit(texts, as_json, "\n".join(f"===== {one.name}\n{one.text}" for one in texts))


def plan(file: Path | None, stack: str | None, *, as_json: bool) -> None:
    from spotkeeper.cli import plan as planning

    planned = planning.plan(file, stack)
    emit(planned, as_json, "" if as_json else "\n".join(planning.lines(planned)))


def check(stack: str | None, *, as_json: bool) -> None:
    from spotkeeper.cli import check as checking

    checking.run(stack, as_json=as_json)


def review(
    preview: Path,
    file: Path | None,
    stack: str | None,
    base: Path | None,
    *,
    agreed: bool,
    quiet: bool,
    as_json: bool,
    comment: Path | None,
    stacks: int,
) -> None:
    from spotkeeper.cli import review as reviewing

    shown = reviewing.Comment(comment, stacks)
    reviewing.review(preview, file, stack, base, agreed=agreed, quiet=quiet, as_json=as_json, comment=shown)


def live(stack: str | None, *, as_json: bool) -> None:
    from spotkeeper.cli import live as looking

    found = looking.of_stack(stack)
    emit(found, as_json, "\n".join(looking.text(found)).rstrip("\n"))


def schema(document: str) -> None:
    from spotkeeper.cli.schema import text

    print(text(document))
