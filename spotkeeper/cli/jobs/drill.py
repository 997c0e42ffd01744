"""``drill``: preempts one machine of a running job, and compares each phase of the recovery with its target."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from spotkeeper.cli.jobs.preempt import check, preempt
from spotkeeper.cli.output import agree, emit, note, result_console, say
from spotkeeper.client import find_target, lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.logs import check_node
from spotkeeper.client.target import Target
from spotkeeper.contract import names
from spotkeeper.contract.record import Phase, Record, Slot, SlotState
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.drill import DrillStep, DrillView, Evidence, Targets, Victim, drill_view, patience_s, witness

EVERY_S = 0.5  # real


def run(job: str, node: int | None, stack: str | None, *, notice: bool, yes: bool, as_json: bool) -> None:
    """Preempt one machine of a job, follow the recovery, and print its phases.

    Raises:
        CliError: the job is not training, the user declined, the machine could not be preempted, or a target was
            missed.
    """
    target = find_target(stack)
    store = target.store()
    state = target.state(store)
    record = lookup.find_job(store, job)
    check(target, state, announced=notice)
    victim = choose(store, state, record, node, announced=notice, now=target.clock.now())
    if not yes:
        _agree(victim)
    targets = targets_of(store, record, target)
    preempt(target, state, victim)
    if as_json:
        note(f"{victim.vm} is preempted; the JSON follows when {victim.name} trains again")
    try:
        view = follow(lambda: read(target, store, victim), victim, targets, shown(as_json))
    except KeyboardInterrupt:
        note(f"{victim.vm} is still preempted; to see the job recover: spotkeeper watch {victim.name}")
        raise
    if as_json:
        emit(view, True, "")
    _judge(view)


def choose(store: Store, state: StackState, record: Record, node: int | None, *, announced: bool, now: float) -> Victim:
    """Choose the machine to preempt: that of ``node``, else of the highest node on spot, else of the highest node.

    Raises:
        CliError: the job is not training, or this node has no machine that a drill may preempt.
    """
    _refuse_unless_training(record)
    if node is not None:
        check_node(record, node)
    members = {index: slot for index in record.members if (slot := record.nodes[index].cur) is not None}
    may = {index: slot for index, slot in members.items() if slot.machine is None and slot.uid is not None}
    chosen = _node(record, may, node)
    slot = may[chosen]
    if record.nodes[chosen].next is not None:  # requested before the drill: nothing would tell when
        why = f"node {chosen} of {record.name} is already getting another machine"
        raise CliError(why, Exit.REFUSED, f"try again once that machine trains: spotkeeper watch {record.name}")
    return Victim(
        job=record.job,
        name=record.name,
        vm=names.vm_name(state.stack, record.job, chosen, slot.attempt),
        uid=slot.uid or "",
        zone=slot.zone,
        node=chosen,
        attempt=slot.attempt,
        gen=record.gen,
        announced=announced,
        at=now,
        commit=lookup.committed(store, record.job),
        members=tuple((index, member.attempt) for index, member in sorted(members.items())),
    )


def _refuse_unless_training(record: Record) -> None:
    lookup.refuse_over(record)
    who = f"{record.name} ({record.job})"
    slots = [record.nodes[index].cur for index in record.members]
    waits = [slot is None or slot.state is not SlotState.MEMBER for slot in slots]
    if record.phase is not Phase.RUN or not record.gen or record.stop or record.roll is not None or any(waits):
        raise CliError(
            f"{who} is not training now", Exit.REFUSED, f"wait until the job trains: spotkeeper watch {record.name}"
        )
    if any(slot is not None and slot.notice is not None for slot in slots):
        raise CliError(f"{who} is already about to lose a machine", Exit.REFUSED, "try again once the job trains again")


def _node(record: Record, may: dict[int, Slot], node: int | None) -> int:
    if node is not None and node not in may:
        why = "is a static machine" if node in record.members else "has no machine now"
        raise CliError(f"node {node} of {record.name} {why}", Exit.REFUSED, _others(may))
    if node is not None:
        return node
    spot = [index for index, slot in may.items() if slot.model is Model.SPOT]
    if not may:
        raise CliError(f"{record.name} has only static machines, which a drill does not preempt", Exit.REFUSED)
    return max(spot or may)


def _others(may: dict[int, Slot]) -> str:
    return "nodes that can be drilled: " + (", ".join(map(str, sorted(may))) or "none")


def _agree(victim: Victim) -> None:
    how = "with a notice" if victim.announced else "without a notice"
    saved = "the newest checkpoint is {}-{}".format(*victim.commit) if victim.commit else "nothing is saved yet"
    what = f"{victim.name} ({victim.job}) loses {victim.vm} (node {victim.node}, {victim.zone}) {how}; {saved}"
    option = "" if victim.announced else " --no-notice"
    agree(what, "Preempt it?", f"spotkeeper drill {victim.name} --node {victim.node}{option} --yes")


def targets_of(store: Store, record: Record, target: Target) -> Targets:
    """Return the targets in virtual seconds, adapted to the speed of the stack's clock by :meth:`Targets.scaled`.

    If the job file sets a save interval, the target for lost work is twice this interval.
    """
    from msgspec.structs import replace

    found = Targets().scaled(target.clock.scale)
    spec = store.read_spec(record.job, record.spec_key())
    interval_s = spec.checkpoint.interval_s if spec is not None else None
    return found if interval_s is None else replace(found, again_s=2 * interval_s)


def read(target: Target, store: Store, victim: Victim) -> Evidence:
    """Read the documents that show the recovery's state now; CliError if the job's record is gone."""
    record = lookup.record_of(store, victim.job)
    ledger, facts = (*store.list_ledger(victim.job), *record.outbox), store.list_facts(victim.job)
    return Evidence(record, ledger, facts, lookup.progress_of(store, victim.job), target.clock.now())


Show = Callable[[DrillView], None]


def follow(
    see: Callable[[], Evidence],
    victim: Victim,
    targets: Targets,
    show: contextlib.AbstractContextManager[Show],
    wait: Callable[[float], None] = time.sleep,
) -> DrillView:
    """Follow the recovery until every phase is reached, the job ends, or :func:`patience_s` has passed."""
    seen: dict[DrillStep, float] = {}
    with show as display:
        while True:
            found = see()
            seen = witness(victim, found, seen)
            view = drill_view(victim, found, seen, targets)
            display(view)
            if view.over or view.elapsed_s > patience_s(targets):
                return view
            wait(EVERY_S)


@contextlib.contextmanager
def _live() -> Iterator[Show]:
    from rich.live import Live

    from spotkeeper.report.drill import table

    with Live(console=result_console(), auto_refresh=False) as screen:
        yield lambda view: screen.update(table(view), refresh=True)


@contextlib.contextmanager
def _lines() -> Iterator[Show]:
    from spotkeeper.report.drill import LEGEND, opening, phase_line, verdict

    printed: set[DrillStep] = set()
    opened = False

    def show(view: DrillView) -> None:
        nonlocal opened
        if not opened:  # the first phase may take minutes
            opened = True
            say(f"{opening(view.victim)}\n{LEGEND}")
        for phase in view.phases:
            if phase.at_s is not None and phase.step not in printed:
                printed.add(phase.step)
                say(phase_line(phase))
        if view.over:
            say(verdict(view))

    yield show


@contextlib.contextmanager
def _silent() -> Iterator[Show]:
    yield lambda view: None


def shown(as_json: bool) -> contextlib.AbstractContextManager[Show]:
    if as_json:
        return _silent()
    return _live() if sys.stdout.isatty() else _lines()


def _judge(view: DrillView) -> None:
    from spotkeeper.report.drill import misses

    if not view.passed:
        who = f"{view.victim.name} ({view.victim.job})"
        raise CliError(f"{who}: {'; '.join(misses(view))}", Exit.FAILED, f"spotkeeper report {view.victim.name}")
