"""One line of plain words for each entry of a ledger."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from spotkeeper.spec.hang import CAUSE as HANG
from spotkeeper.spec.ledger import SURPRISES, Entry, Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.names import vm_name
from spotkeeper.spec.record import LOOK

NODE = "node:"  # how a grant of a static node begins
_MODEL = {Model.SPOT: "spot", Model.ON_DEMAND: "on-demand", Model.STATIC: "static"}


class EventLine(Struct, frozen=True):
    """``at`` virtual seconds since the job was submitted."""

    at: float
    event: Event
    text: str
    id: str = ""


_TEXTS: dict[Event, str] = {
    Event.SUBMITTED: "submitted",
    Event.ADMITTED: "{who} is up",
    Event.REFUSED: "{who}: no capacity for {what}",
    Event.GENERATION: "generation {gen} trains",
    Event.FIRST: "generation {gen}: its first step is reported",
    Event.STOP: "all save and stop",
    Event.NOTICE: "{who}: its machine will be taken away",
    Event.REPRIEVE: "{who}: the notice was withdrawn",
    Event.ENDING: "{who}: its machine comes to its longest run, a successor is asked for",
    Event.LOSS: "{who}: its machine is gone",
    Event.PROMOTED: "{who}: the replacement takes over",
    Event.GONE: "{who}: old machine given back{machine}",
    Event.CRASH: "the job's own code failed",
    Event.ROLL: "roll call",
    Event.BOUT: "on-demand for a while",
    Event.MOVE: "the job changes its zone",
    Event.FULL: "{who}: its disk has no room for a checkpoint; training goes on, the older one stays",
    Event.UNSAVED: "{who}: a checkpoint could not be saved; training goes on, the older one stays, the next is tried",
    Event.DAMAGED: "{who}: its copy of a checkpoint is damaged; where no machine has a whole one, an older one counts",
    Event.MIRRORED: "a copy of the checkpoint is in the bucket",
    Event.UNMIRRORED: "{who}: a checkpoint's copy in the bucket is damaged or gone; an older one counts",
    Event.FETCH: "no disk has what the job goes on from: it is fetched from the bucket",
    Event.AMISS: "{who}: something is amiss with its machine; its agent's log says more",
    Event.SAVED: "{who}: checkpoints are saved again",
    Event.LAG: "{who}: its machine is slow and holds the others up",
    Event.KEEPS_UP: "{who}: its machine keeps up again",
    Event.FUSE: "{who}: a money fuse has blown",
    Event.HOLD: "the job holds",
    Event.RESUME: "the job goes on",
    Event.ASK: "asked",
    Event.END: "ended",
    Event.DONE: "no machine of it is left",
}


def event_lines(entries: Iterable[Entry], since: float, stack: str = "", job: str = "") -> tuple[EventLine, ...]:
    """Entries (already one per id, in order) as lines; ``since``: when the job was submitted."""
    return tuple(EventLine(entry.at - since, entry.event, describe(entry, stack, job), entry.id) for entry in entries)


def _machine(entry: Entry, stack: str, job: str) -> str:
    """``: sk-prod-abcdefgh-r0001-a2``; where the stack is not known, which attempt's it was."""
    node = entry.detail.removeprefix(NODE) if entry.detail.startswith(NODE) else ""
    if node or entry.rank is None or entry.attempt is None:
        return f": {node}" if node else ""
    return f": {vm_name(stack, job, entry.rank, entry.attempt)}" if stack and job else f" (attempt {entry.attempt})"


def describe(entry: Entry, stack: str = "", job: str = "") -> str:
    """``rank 2: its machine will be taken away (spot, us-central1-b): 120 s``."""
    what = " ".join(part for part in (_MODEL.get(entry.model) if entry.model else None, entry.zone) if part)
    who = f"rank {entry.rank}" if entry.rank is not None else "the job"
    if entry.event is Event.INTENT:
        price = f" at ${entry.price:.3f}/h" if entry.price is not None else ""
        wants = "a machine looks for" if entry.cause == LOOK else "wants"
        text = f"{who}: {wants} {what or 'a machine'}{price}"
    elif entry.event is Event.ADMITTED and entry.cause == LOOK:
        text = f"{who}: there is {what or 'room'}: the machine that looks is up"
    elif entry.event is Event.REFUSED and entry.attempt is None:  # no machine was asked for
        return f"{who}: {entry.detail}"
    elif entry.event is Event.CRASH and entry.cause == HANG:
        return entry.detail
    elif entry.event is Event.STOP and (entry.cause or "").startswith(SURPRISES):
        text = "all stop"
    else:
        text = _TEXTS[entry.event].format(
            who=who, what=what or "it", gen=entry.gen, machine=_machine(entry, stack, job)
        )
    if entry.cause and entry.event not in (Event.ASK,) and entry.cause not in text:
        text += f" ({entry.cause})"
    elif entry.cause and entry.event is Event.ASK:
        text += f" to {entry.cause}"
    return f"{text}: {entry.detail}" if entry.detail and entry.event is not Event.GONE else text
