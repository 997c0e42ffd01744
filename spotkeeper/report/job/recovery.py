"""Every interruption of a job and its recovery, and the number of preemptions, from its ledger alone.

An interruption begins with its first sign: a notice, a loss, or the process exit that started a crash's roll call. A
change without such a sign (a swap back to spot, a move, a resize) begins with the order to stop. The next generation
ends the interruption. A machine requested meanwhile belongs to the recovery if it is in this generation; a machine of a
swap or a probe only if it was promoted.

A preemption is the end of a spot machine that had joined: the cloud took the machine, or the job released it while a
notice was in force. ``contract.market.fate`` decides this, and whether a notice came first. A withdrawn notice does not
count, nor does a machine that did not answer or never joined. Every displayed number of preemptions comes from this
module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.contract.ledger import SURPRISES, Entry, Event
from spotkeeper.contract.market import Fate, fate
from spotkeeper.contract.record import PROBE
from spotkeeper.contract.stack import Model
from spotkeeper.report.money.money import STOPS, Attempt, attempts, first_of_each

NOT_MEMBERS = ("standby", "noticed standby", "never joined")  # causes of losses that interrupted nothing
PLANNED = ("planned end",)  # cause of an expected loss: the machine's `max_run_hours` or reserved capacity is over
PAUSES = ("pause",)  # the cause of a stop that is not an interruption
WITHDRAWN = "stop withdrawn"  # the cause of a generation with the same machines as before
FAILED = "failure"  # the cause of a hold that waits for a person, which is not a recovery


class LostReplacement(Struct, frozen=True):
    """A machine that was requested for a recovery and ended before it could train."""

    node: int
    attempt: int
    at: float  # when the job gave it up (virtual unix seconds)
    why: str  # "no hello in time", "its backup was up first", "noticed standby", ...


class Recovery(Struct, frozen=True):
    """One interruption of a job, from its first sign to the next generation. Durations are virtual seconds."""

    cause: str  # "notice", "loss", "loss of 2", "crash", "move", ...
    announced: bool  # the interruption had a notice, or the function itself changed the gang
    nodes: tuple[int, ...]  # nodes with a lost or replaced machine; after a crash, also the node that failed
    gen: int  # the generation that ended the interruption (while recovering: the interrupted one)
    stopped_s: float  # from the stop to the generation; with ``start_s``: the time without training
    seconds: float | None = None  # from `began` to the generation; None: still recovering
    boot_s: float | None = None  # the longest boot of a replacement, INTENT to ADMITTED
    replacement: Model | None = None
    zone: str | None = None
    notice_s: float | None = None  # from the notice to the order to stop; the job trains meanwhile
    save_s: float | None = None  # duration of a save, by the newest measurement at that time
    start_s: float | None = None  # from the generation to its processes' first report
    steps_again: int | None = None  # steps made before the stop and repeated after it; None: unknown
    began: float = 0.0  # virtual unix seconds
    machines: tuple[tuple[int, int], ...] = ()  # replacements that took part, or still may: node and attempt
    never_joined: tuple[LostReplacement, ...] = ()  # replacements that ended before they could train


Key: TypeAlias = tuple[int, int]  # node, attempt
_Machines: TypeAlias = Mapping[Key, Attempt]


@dataclass
class _Trouble:
    """What the ledger says since the last generation; :meth:`counts` tells whether it is an interruption."""

    noticed: dict[int, float] = field(default_factory=dict)  # node -> time
    lost: dict[int, float] = field(default_factory=dict)  # without a notice
    failed: set[int] = field(default_factory=set)  # nodes whose own code failed first
    stopped: float | None = None
    cause: str = ""
    exited: float | None = None  # when a process ended by itself, which started a roll call
    withdrawn: bool = False  # the generation that ended it has no new machine: the change was given up
    asked: list[Key] = field(default_factory=list)  # attempts that may become replacements
    promoted: set[Key] = field(default_factory=set)  # standby attempts that became replacements
    never_joined: list[LostReplacement] = field(default_factory=list)

    def began(self) -> float | None:
        moments = [*self.noticed.values(), *self.lost.values()]
        if self.stopped is not None:
            moments.append(self.stopped)
        return min(moments, default=None)

    def counts(self) -> bool:
        """Whether these events are an interruption: a notice, a loss, or a stop other than a user's pause."""
        return bool(self.noticed or self.lost) or (self.stopped is not None and self.cause not in PAUSES)


def recoveries(ledger: Iterable[Entry], now: float) -> tuple[Recovery, ...]:
    """Return all recoveries in order. A withdrawn notice that started no generation is not an interruption."""
    entries = first_of_each(ledger)
    machines: _Machines = {(machine.node, machine.attempt): machine for machine in attempts(entries)}
    out: list[Recovery] = []
    first = {entry.gen: entry.at for entry in reversed(entries) if entry.event is Event.FIRST}
    trouble = _Trouble()
    gen = 0
    for entry in entries:
        if entry.event is Event.GENERATION:
            trouble.withdrawn = entry.cause == WITHDRAWN
            if gen and trouble.counts():
                out.append(_ended(_recovery(trouble, entry.at, entry.gen, machines), entry, first.get(entry.gen)))
            coming = [key for key in trouble.asked if not _came(trouble, key, machines, entry.at)]
            gen, trouble = entry.gen, _Trouble(asked=coming)
        elif entry.event in (Event.END, Event.DONE) or (entry.event is Event.HOLD and entry.cause == FAILED):
            trouble = _Trouble()
        else:
            _note(trouble, entry)
    if gen and trouble.counts():
        out.append(_recovery(trouble, None, gen, machines, now))
    return tuple(out)


def _ended(one: Recovery, by: Entry, first: float | None) -> Recovery:
    """Complete a recovery from the GENERATION entry that ended it; ``first``: when its first step was reported."""
    start_s = None if first is None else max(0.0, first - by.at)
    return replace(one, save_s=by.save_s, start_s=start_s, steps_again=by.again)


def _note(trouble: _Trouble, entry: Entry) -> None:
    if entry.event in STOPS and trouble.stopped is None:
        crashed = entry.event is Event.CRASH and trouble.exited is not None
        trouble.stopped = trouble.exited if crashed else entry.at
        trouble.cause = entry.cause or entry.event.value
    if entry.event is Event.ROLL and entry.cause == "exit" and trouble.exited is None:
        trouble.exited = entry.at
    if entry.node is None:
        return
    if entry.event is Event.CRASH:
        trouble.failed.add(entry.node)
    elif entry.event is Event.NOTICE:
        trouble.noticed.setdefault(entry.node, entry.at)
    elif entry.event is Event.REPRIEVE:
        trouble.noticed.pop(entry.node, None)
        trouble.asked = [key for key in trouble.asked if key[0] != entry.node or key in trouble.promoted]
    elif entry.event is Event.LOSS and entry.cause in NOT_MEMBERS:
        asked, trouble.asked = trouble.asked, [key for key in trouble.asked if key != (entry.node, entry.attempt)]
        if entry.attempt is not None and len(trouble.asked) < len(asked):
            why = entry.detail or entry.cause
            trouble.never_joined.append(LostReplacement(entry.node, entry.attempt, entry.at, why))
    elif entry.event is Event.LOSS and entry.node not in trouble.noticed and entry.cause not in PLANNED:
        trouble.lost.setdefault(entry.node, entry.at)
    elif entry.event in (Event.INTENT, Event.PROMOTED) and entry.attempt is not None:
        key = (entry.node, entry.attempt)
        trouble.asked += [key] if key not in trouble.asked else []
        trouble.promoted |= {key} if entry.event is Event.PROMOTED else set()


def _came(trouble: _Trouble, key: Key, machines: _Machines, end: float | None) -> bool:
    """Whether a machine belongs to a recovery: it was admitted before the recovery's ``end``.

    While the recovery lasts, ``end`` is None, and a machine that is not yet admitted belongs to it too. The machine of
    a swap and a probe belong to it only once they are promoted: a swap's machine boots beside a training machine, and
    a probe in another zone.
    """
    machine = machines.get(key)
    if machine is None or machine.refused or (_beside(machine) and key not in trouble.promoted):
        return False
    return end is None or (machine.admitted is not None and machine.admitted <= end)


def _beside(machine: Attempt) -> bool:
    """Whether a machine was requested for a swap or a probe: it boots while all nodes train."""
    return machine.cause == PROBE or machine.cause.startswith("swap")


def _failed(trouble: _Trouble, machines: _Machines, began: float) -> tuple[LostReplacement, ...]:
    """Return the replacements of an interruption that ended before they could train."""
    keyed = ((machines.get((one.node, one.attempt)), one) for one in trouble.never_joined)
    return tuple(one for machine, one in keyed if machine is not None and not _beside(machine) and one.at >= began)


def _recovery(trouble: _Trouble, end: float | None, gen: int, machines: _Machines, now: float = 0.0) -> Recovery:
    came = [machines[key] for key in trouble.asked if _came(trouble, key, machines, end)]
    boots = [machine.admitted - machine.asked for machine in came if machine.admitted is not None]
    began = trouble.began()
    assert began is not None
    until = now if end is None else end
    cause, noticed = _cause(trouble), min(trouble.noticed.values(), default=None)
    return Recovery(
        cause=cause,
        announced=not cause.startswith(SURPRISES),
        nodes=tuple(sorted({*trouble.noticed, *trouble.lost, *trouble.failed, *(machine.node for machine in came)})),
        began=began,
        stopped_s=0.0 if trouble.stopped is None else until - trouble.stopped,
        seconds=None if end is None else end - began,
        gen=gen,
        boot_s=max(boots, default=None),
        replacement=came[-1].model if came else None,
        zone=came[-1].zone if came else None,
        machines=tuple((machine.node, machine.attempt) for machine in came),
        never_joined=_failed(trouble, machines, began),
        notice_s=None if noticed is None or trouble.stopped is None else max(0.0, trouble.stopped - noticed),
    )


def _cause(trouble: _Trouble) -> str:
    if trouble.lost:
        return "loss" if len(trouble.lost) == 1 else f"loss of {len(trouble.lost)}"
    if trouble.noticed:
        return "notice"
    return f"{trouble.cause}, withdrawn" if trouble.withdrawn else trouble.cause


class Preemptions(Struct, frozen=True):
    """The number of preemptions of a job, with a notice (``announced``) and without."""

    announced: int = 0
    unannounced: int = 0

    @property
    def total(self) -> int:
        return self.announced + self.unannounced


def preemptions(ledger: Iterable[Entry]) -> Preemptions:
    stories: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in first_of_each(ledger):
        if entry.node is not None and entry.attempt is not None:
            stories[entry.node, entry.attempt].append(entry)
    fates = [fate((entry.event, entry.cause or "") for entry in story) for story in stories.values() if _spot(story)]
    return Preemptions(fates.count(Fate.ANNOUNCED), fates.count(Fate.UNANNOUNCED))


def _spot(story: list[Entry]) -> bool:
    """Whether these entries of one machine show a spot machine that had joined."""
    joined = any(entry.event is Event.ADMITTED for entry in story)
    return joined and any(entry.model is Model.SPOT for entry in story)
