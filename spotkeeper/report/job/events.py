"""The text of each event of a job: its node or machine, what happened, and what the reader can do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from spotkeeper.contract.facts import HANG
from spotkeeper.contract.ledger import SURPRISES, Entry, Event
from spotkeeper.contract.names import vm_name
from spotkeeper.contract.record import BACKUP, PROBE
from spotkeeper.contract.stack import Model
from spotkeeper.report.text.words import gigabytes, percent, usd

MACHINE = "machine:"  # the prefix of a static machine's grant
_A_MACHINE = {
    Model.SPOT: "a spot machine",
    Model.ON_DEMAND: "an on-demand machine",
    Model.STATIC: "a static machine",
    Model.RESERVED: "a reserved machine",
}


class EventLine(Struct, frozen=True):
    """One event of a job as text. ``at``: virtual seconds since submission; ``detail``: why, for ``--verbose``."""

    at: float
    event: Event
    text: str
    id: str = ""
    detail: str = ""


_TEXTS: dict[Event, str] = {
    Event.SUBMITTED: "job submitted",
    Event.ADMITTED: "{who}: its new machine is ready{where}",
    Event.REFUSED: "{who}: the cloud refused {machine}",
    Event.GENERATION: "generation {gen} trains",
    Event.FIRST: "generation {gen}: its first step is reported",
    Event.CHECKPOINT: "the job's first checkpoint is durable",
    Event.STOP: "all nodes save and stop",
    Event.STOPPED: "generation {gen}: its processes have stopped",
    Event.MOUNTED: "{who}: its disk is mounted",
    Event.NOTICE: "{who}: preemption notice{where}",
    Event.REPRIEVE: "{who}: its preemption notice was withdrawn",
    Event.ENDING: "{who}: its machine nears its planned end; requesting a replacement",
    Event.LOSS: "{who}: its machine is lost{where}",
    Event.PROMOTED: "{who}: the replacement takes over",
    Event.GONE: "{who}: old machine deleted{vm}",
    Event.CRASH: "the job's own code failed",
    Event.ROLL: "roll call: every agent must answer",
    Event.FALLBACK: "on-demand fallback: on-demand machines for a limited time",
    Event.MOVE: "the job moves to another zone",
    Event.EGRESS: "{who}: transfer between regions",
    Event.FULL: "{who}: its disk has no space for a checkpoint; training continues, the older checkpoint stays",
    Event.UNSAVED: "{who}: a checkpoint could not be saved; training continues, the older checkpoint stays",
    Event.DAMAGED: "{who}: its copy of a checkpoint is damaged; without another copy, an older checkpoint is used",
    Event.MIRRORED: "the bucket has a new copy of the checkpoint",
    Event.UNMIRRORED: "{who}: a checkpoint's copy in the bucket is damaged or missing; an older checkpoint is used",
    Event.FETCH: "no disk has the newest checkpoint; fetching it from the bucket",
    Event.PREFLIGHT_FAILED: "{who}: the machine failed a health check; its agent's log says more",
    Event.SAVED: "{who}: checkpoints are saved again",
    Event.UNLOOPED: "{who}: nothing was saved, because the script called attach() without a loop over run.steps()",
    Event.LAG: "{who}: its machine is slow and delays the others",
    Event.KEEPS_UP: "{who}: its machine keeps up again",
    Event.LIMIT: "a limit on spending or launches is reached",
    Event.RUNG: "the search compares its trials",
    Event.HOLD: "the job goes on hold",
    Event.RESUME: "the job resumes",
    Event.SHELL: "{who}: a shell was opened",
    Event.REQUEST: "request",
    Event.UNDELIVERED: "a notification could not be sent for six hours, and is given up",
    Event.END: "job ended",
    Event.DONE: "all machines of the job are deleted",
}


def event_lines(entries: Iterable[Entry], since: float, stack: str = "", job: str = "") -> tuple[EventLine, ...]:
    """Return ledger entries as lines; ``since``: when the job was submitted.

    The entries must be in order of time, without two of the same id.
    """
    return tuple(_lines(entries, since, stack, job))


def _lines(entries: Iterable[Entry], since: float, stack: str, job: str) -> Iterator[EventLine]:
    lost: dict[int, None] = {}  # nodes that lost their machine since the last generation, in order
    for entry in entries:
        if entry.event is Event.GENERATION:
            lost = {}
        elif entry.event is Event.LOSS and entry.node is not None:
            lost[entry.node] = None
        chosen = entry.event is Event.INTENT and entry.cause != BACKUP
        why = ": ".join(filter(None, (entry.cause, entry.detail))) if chosen else ""
        yield EventLine(entry.at - since, entry.event, describe(entry, stack, job, tuple(lost)), entry.id, why)


def describe(entry: Entry, stack: str = "", job: str = "", lost: tuple[int, ...] = ()) -> str:
    """Return the text of one event: ``node 2: preemption notice in us-central1-b: 120 s``.

    Args:
        stack, job: the stack's name and the job's id, from which a machine's name is made.
        lost: nodes that lost their machine since the last generation.
    """
    who = f"node {entry.node}" if entry.node is not None else "the job"
    where = f" in {entry.zone}" if entry.zone else ""
    machine = (_A_MACHINE[entry.model] if entry.model else "a machine") + where
    if entry.event is Event.INTENT:
        why = f": {entry.detail}" if entry.cause == BACKUP and entry.detail else ""
        return f"{who}: {_requesting(entry, machine)}{_price(entry)}{why}"
    if entry.event is Event.REFUSED and entry.attempt is None:  # the job waits, and requested no machine
        return f"{who}: {entry.detail}"
    if entry.event is Event.CRASH and entry.cause == HANG:
        return entry.detail
    if entry.event is Event.STOP and (entry.cause or "").startswith(SURPRISES):
        return _stopped(entry, lost)
    if entry.event is Event.ADMITTED and entry.cause == PROBE:
        text = f"{who}: {entry.zone or 'the other zone'} has capacity: the probing machine is ready"
    else:
        vm = _vm(entry, stack, job)
        text = _TEXTS[entry.event].format(who=who, where=where, gen=entry.gen, vm=vm, machine=machine)
    if entry.event is Event.EGRESS:
        text += f" of {gigabytes(entry.gb or 0.0)} for {usd(entry.usd or 0.0)}"
    if entry.event is Event.REQUEST:
        text += f" to {entry.cause}" if entry.cause else ""
    elif entry.cause and entry.cause not in text:
        text += f" ({entry.cause})"
    return f"{text}: {entry.detail}" if entry.detail and entry.event is not Event.GONE else text


def _requesting(entry: Entry, machine: str) -> str:
    if entry.cause == PROBE:
        return f"probing another zone with {machine}"
    return f"requesting a backup: {machine}" if entry.cause == BACKUP else f"requesting {machine}"


def _price(entry: Entry) -> str:
    """The price of a requested machine: `` at $2.54/h (23 % of on-demand)``; "" if unknown."""
    if entry.model is Model.RESERVED:
        return ", paid for already"
    if entry.price is None:
        return ""
    share = f" ({percent(entry.price / entry.on_demand)} of on-demand)" if entry.on_demand else ""
    return f" at {usd(entry.price)}/h" + (share if entry.model is Model.SPOT else "")


def _stopped(entry: Entry, lost: tuple[int, ...]) -> str:
    """The text of a stop after losses: ``all nodes stop: nodes 1, 2 lost their machines``."""
    if not lost:
        return f"all nodes stop ({entry.cause})"
    if len(lost) == 1:
        return f"all nodes stop: node {lost[0]} lost its machine"
    return f"all nodes stop: nodes {', '.join(map(str, sorted(lost)))} lost their machines"


def _vm(entry: Entry, stack: str, job: str) -> str:
    """The machine of an event, ``: sk-prod-abcdefgh-n0001-a2``; its attempt if the stack is unknown; "" without one."""
    static = entry.detail.removeprefix(MACHINE) if entry.detail.startswith(MACHINE) else ""
    if static or entry.node is None or entry.attempt is None:
        return f": {static}" if static else ""
    return f": {vm_name(stack, job, entry.node, entry.attempt)}" if stack and job else f" (attempt {entry.attempt})"
