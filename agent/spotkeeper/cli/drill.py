"""``spotkeeper drill``: takes one machine of a running job away, follows how the job gets over it, and judges it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from spotkeeper.cli import jobs
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import console, emit, note
from spotkeeper.cli.strike import check, strike
from spotkeeper.cli.target import Target, find_target
from spotkeeper.reconcile.store_api import CorruptError, Store
from spotkeeper.report.drill import DrillView, Evidence, Step, Struck, Targets, drill_view, patience_s, witness
from spotkeeper.spec import names
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Phase, Record, Slot, SlotState
from spotkeeper.spec.stack import StackState

EVERY_S = 0.5  # real


def drill(job: str, rank: int | None, stack: str | None, *, notice: bool, yes: bool, as_json: bool) -> None:
    """
    Raises:
        CliError: the job cannot be drilled now, nobody agreed, the machine could not be taken, or a target was missed.
    """
    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    record = jobs.find_job(store, job)
    check(target, state, announced=notice)
    struck = choose(store, state, record, rank, announced=notice, now=target.clock.now())
    if not yes:
        _agree(struck)
    targets = targets_of(store, record, target)
    strike(target, state, struck)
    try:
        view = follow(lambda: look(target, store, struck), struck, targets, shown(as_json))
    except KeyboardInterrupt:
        note(f"{struck.vm} is taken all the same; the job gets over it by itself: spotkeeper watch {struck.name}")
        raise
    if as_json:
        emit(view, True, "")
    _judge(view)


def choose(store: Store, state: StackState, record: Record, rank: int | None, *, announced: bool, now: float) -> Struck:
    """The machine: the rank's, or that of the highest rank on spot (the master's recovery is a drill of its own).

    Raises:
        CliError: the job does not train, or this rank has no machine that may be taken.
    """
    _refuse_unless_training(record)
    if rank is not None:
        jobs.check_rank(record, rank)
    members = {index: slot for index in record.members if (slot := record.ranks[index].cur) is not None}
    may = {index: slot for index, slot in members.items() if slot.node is None and slot.uid is not None}
    chosen = _rank(record, may, rank)
    slot = may[chosen]
    progress = None
    with contextlib.suppress(CorruptError):
        progress = store.read_progress(record.job)
    commit = None
    if progress is not None and progress.commit_gen is not None and progress.commit_step is not None:
        commit = progress.commit_gen, progress.commit_step
    return Struck(
        job=record.job,
        name=record.name,
        vm=names.vm_name(state.stack, record.job, chosen, slot.attempt),
        uid=slot.uid or "",
        zone=slot.zone,
        rank=chosen,
        attempt=slot.attempt,
        gen=record.gen,
        announced=announced,
        at=now,
        commit=commit,
        members=tuple((index, member.attempt) for index, member in sorted(members.items())),
    )


def _refuse_unless_training(record: Record) -> None:
    jobs.refuse_over(record)
    who = f"{record.name} ({record.job})"
    slots = [record.ranks[index].cur for index in record.members]
    waits = [slot is None or slot.state is not SlotState.MEMBER for slot in slots]
    if record.phase is not Phase.RUN or not record.gen or record.stop or record.roll is not None or any(waits):
        raise CliError(f"{who} does not train now", Exit.REFUSED, f"wait until it does: spotkeeper watch {record.name}")
    if any(slot is not None and slot.notice is not None for slot in slots):
        raise CliError(f"{who} is about to lose a machine already", Exit.REFUSED, "try again when it has got over it")


def _rank(record: Record, may: dict[int, Slot], rank: int | None) -> int:
    if rank is not None and rank not in may:
        why = "is on a static node" if rank in record.members else "has no machine now"
        raise CliError(f"rank {rank} of {record.name} {why}", Exit.REFUSED, _others(may))
    if rank is not None:
        return rank
    spot = [index for index, slot in may.items() if slot.model is Model.SPOT]
    if not may:
        raise CliError(f"{record.name} has no machine that may be taken: all are static nodes", Exit.REFUSED)
    return max(spot or may)


def _others(may: dict[int, Slot]) -> str:
    return "ranks that can be drilled: " + (", ".join(map(str, sorted(may))) or "none")


def _agree(struck: Struck) -> None:
    """Only a terminal is asked: whoever runs it elsewhere has said what shall happen.

    Raises:
        CliError: no.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    import typer

    how = "with its notice" if struck.announced else "without a word"
    saved = "the newest checkpoint is {}-{}".format(*struck.commit) if struck.commit else "nothing is saved yet"
    note(f"{struck.name} ({struck.job}) loses {struck.vm} (rank {struck.rank}, {struck.zone}) {how}; {saved}")
    if not typer.confirm("Take it?", err=True):
        raise CliError("nothing was changed", Exit.REFUSED)


def targets_of(store: Store, record: Record, target: Target) -> Targets:
    """A surprise may cost what the job file lets lie between two checkpoints."""
    from msgspec.structs import replace

    found = Targets().scaled(target.clock.scale)
    spec = store.read_spec(record.job, record.spec_key())
    interval_s = spec.checkpoint.interval_s if spec is not None else None
    return found if interval_s is None else replace(found, again_s=2 * interval_s)


def look(target: Target, store: Store, struck: Struck) -> Evidence:
    """
    Raises:
        CliError: its record is gone.
    """
    held = store.read_record(struck.job)
    if held is None:
        raise CliError(f"{struck.job}: its record is gone", Exit.MISSING)
    progress = None
    with contextlib.suppress(CorruptError):
        progress = store.read_progress(struck.job)
    ledger = (*store.list_ledger(struck.job), *held.value.outbox)
    return Evidence(held.value, ledger, store.list_facts(struck.job), progress, target.clock.now())


Show = Callable[[DrillView], None]


def follow(
    see: Callable[[], Evidence],
    struck: Struck,
    targets: Targets,
    show: contextlib.AbstractContextManager[Show],
    wait: Callable[[float], None] = time.sleep,
) -> DrillView:
    """Until every phase is reached, the job ends, or it takes so long that nobody waits any more."""
    seen: dict[Step, float] = {}
    with show as told:
        while True:
            found = see()
            seen = witness(struck, found, seen)
            view = drill_view(struck, found, seen, targets)
            told(view)
            if view.over or view.elapsed_s > patience_s(targets):
                return view
            wait(EVERY_S)


@contextlib.contextmanager
def _live() -> Iterator[Show]:
    from rich.live import Live

    from spotkeeper.report.drill_text import table

    with Live(console=console(), auto_refresh=False) as screen:
        yield lambda view: screen.update(table(view), refresh=True)


@contextlib.contextmanager
def _lines() -> Iterator[Show]:
    from spotkeeper.report.drill_text import opening, phase_line, verdict

    told: set[Step] = set()
    opened = False

    def show(view: DrillView) -> None:
        nonlocal opened
        if not opened:  # the first phase may take minutes
            opened = True
            print(opening(view.struck), flush=True)
        for phase in view.phases:
            if phase.at_s is not None and phase.step not in told:
                told.add(phase.step)
                print(phase_line(phase), flush=True)
        if view.over:
            print(verdict(view), flush=True)

    yield show


@contextlib.contextmanager
def _silent() -> Iterator[Show]:
    yield lambda view: None


def shown(as_json: bool) -> contextlib.AbstractContextManager[Show]:
    if as_json:
        return _silent()
    return _live() if sys.stdout.isatty() else _lines()


def _judge(view: DrillView) -> None:
    """
    Raises:
        CliError: a target was missed.
    """
    from spotkeeper.report.drill_text import misses

    if not view.holds:
        who = f"{view.struck.name} ({view.struck.job})"
        raise CliError(f"{who}: {'; '.join(misses(view))}", Exit.FAILED, f"spotkeeper report {view.struck.name}")
