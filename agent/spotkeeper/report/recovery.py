"""Every interruption of a job and how it got over it, from its ledger alone.

An interruption ends with the next generation. It began with the first sign of trouble:
a notice, a loss, the exit that a crash's roll call is about; where there was none (a swap
back to spot, a move, a resize), with the order to stop. Of the machines that boot meanwhile
it has those that took part in that generation; a swap's only where it was promoted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from spotkeeper.report.money import STOPS, Attempt, attempts, first_of_each
from spotkeeper.spec.ledger import SURPRISES, Entry, Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import LOOK

# Losses of machines that were in no generation: nothing was interrupted.
NOT_MEMBERS = ("standby", "noticed standby", "never joined")
PLANNED = ("max run",)  # a machine that was lost when its time was over: its stop says so
WISHED = ("pause",)  # somebody asked for it: no interruption
WITHDRAWN = "stop withdrawn"  # the cause of a generation of the same machines as before
FAILED = "failure"  # the cause of a hold that lasts until a person has mended something: no recovery of ours


@dataclass(frozen=True)
class Recovery:
    """From the first sign of trouble to the next generation. Durations in virtual seconds."""

    cause: str  # "notice", "loss", "loss of 2", "crash", "move", ...
    announced: bool  # nobody was surprised: a notice, or a change that reconcile itself made
    ranks: tuple[int, ...]  # whose machines were lost or replaced; of a crash, also the one that failed
    began: float  # virtual unix seconds
    stopped_s: float  # training stood still
    seconds: float | None  # from `began` to the generation; None: still recovering
    gen: int  # the generation that ended it (the one it interrupted, while recovering)
    boot_s: float | None = None  # the longest boot of a replacement, INTENT to ADMITTED
    replacement: Model | None = None
    zone: str | None = None
    notice_s: float | None = None  # from the notice to the order to stop: it trained on meanwhile
    save_s: float | None = None  # what a save takes, as it was measured by then
    start_s: float | None = None  # from the generation to its processes' first report
    steps_again: int | None = None  # done before the stop, and again after it; None: not known


Key: TypeAlias = tuple[int, int]  # rank, attempt
_Machines: TypeAlias = Mapping[Key, Attempt]


@dataclass
class _Open:
    """What has gone wrong since the last generation."""

    noticed: dict[int, float] = field(default_factory=dict)  # rank -> when
    lost: dict[int, float] = field(default_factory=dict)  # without a notice
    failed: set[int] = field(default_factory=set)  # its own code, before the others stopped for it
    stopped: float | None = None
    cause: str = ""
    exited: float | None = None  # a process ended by itself, which a roll call is about
    withdrawn: bool = False  # the generation that ended it has no new machine: what was begun was given up
    asked: list[Key] = field(default_factory=list)  # attempts that may come instead
    promoted: set[Key] = field(default_factory=set)  # and those of them that did, from standing by

    def began(self) -> float | None:
        moments = [*self.noticed.values(), *self.lost.values()]
        if self.stopped is not None:
            moments.append(self.stopped)
        return min(moments, default=None)

    def counts(self) -> bool:
        """Whether there was an interruption that nobody wished for."""
        return bool(self.noticed or self.lost) or (self.stopped is not None and self.cause not in WISHED)


def recoveries(ledger: Iterable[Entry], now: float) -> tuple[Recovery, ...]:
    """In order. A withdrawn notice that led to no new generation is none."""
    entries = first_of_each(ledger)
    machines: _Machines = {(machine.rank, machine.attempt): machine for machine in attempts(entries)}
    out: list[Recovery] = []
    first = {entry.gen: entry.at for entry in reversed(entries) if entry.event is Event.FIRST}
    trouble = _Open()
    gen = 0
    for entry in entries:
        if entry.event is Event.GENERATION:
            trouble.withdrawn = entry.cause == WITHDRAWN
            if gen and trouble.counts():
                out.append(_ended(_recovery(trouble, entry.at, entry.gen, machines), entry, first.get(entry.gen)))
            coming = [key for key in trouble.asked if not _came(trouble, key, machines, entry.at)]
            gen, trouble = entry.gen, _Open(asked=coming)
        elif entry.event in (Event.END, Event.DONE) or (entry.event is Event.HOLD and entry.cause == FAILED):
            trouble = _Open()
        else:
            _note(trouble, entry)
    if gen and trouble.counts():
        out.append(_recovery(trouble, None, gen, machines, now))
    return tuple(out)


def _ended(one: Recovery, by: Entry, first: float | None) -> Recovery:
    """With what the generation that ended it knows."""
    start_s = None if first is None else max(0.0, first - by.at)
    return replace(one, save_s=by.save_s, start_s=start_s, steps_again=by.again)


def _note(trouble: _Open, entry: Entry) -> None:
    if entry.event in STOPS and trouble.stopped is None:
        crashed = entry.event is Event.CRASH and trouble.exited is not None
        trouble.stopped = trouble.exited if crashed else entry.at
        trouble.cause = entry.cause or entry.event.value
    if entry.event is Event.ROLL and entry.cause == "exit" and trouble.exited is None:
        trouble.exited = entry.at
    if entry.rank is None:
        return
    if entry.event is Event.CRASH:
        trouble.failed.add(entry.rank)
    elif entry.event is Event.NOTICE:
        trouble.noticed.setdefault(entry.rank, entry.at)
    elif entry.event is Event.REPRIEVE:
        trouble.noticed.pop(entry.rank, None)
        trouble.asked = [key for key in trouble.asked if key[0] != entry.rank or key in trouble.promoted]
    elif entry.event is Event.LOSS and entry.cause in NOT_MEMBERS:
        trouble.asked = [key for key in trouble.asked if key != (entry.rank, entry.attempt)]
    elif entry.event is Event.LOSS and entry.rank not in trouble.noticed and entry.cause not in PLANNED:
        trouble.lost.setdefault(entry.rank, entry.at)
    elif entry.event in (Event.INTENT, Event.PROMOTED) and entry.attempt is not None:
        key = (entry.rank, entry.attempt)
        trouble.asked += [key] if key not in trouble.asked else []
        trouble.promoted |= {key} if entry.event is Event.PROMOTED else set()


def _came(trouble: _Open, key: Key, machines: _Machines, end: float | None) -> bool:
    """Whether this machine took part in the generation that ended the trouble (None: whether it may yet).

    A swap boots beside a machine that trains: a crash or a loss meanwhile is not its doing, nor its end. So does one
    that looks in another zone, until the gang moves there.
    """
    machine = machines.get(key)
    if machine is None or machine.refused:
        return False
    if (machine.cause == LOOK or machine.cause.startswith("swap")) and key not in trouble.promoted:
        return False
    return end is None or (machine.admitted is not None and machine.admitted <= end)


def _recovery(trouble: _Open, end: float | None, gen: int, machines: _Machines, now: float = 0.0) -> Recovery:
    came = [machines[key] for key in trouble.asked if _came(trouble, key, machines, end)]
    boots = [machine.admitted - machine.asked for machine in came if machine.admitted is not None]
    began = trouble.began()
    assert began is not None
    until = now if end is None else end
    cause, noticed = _cause(trouble), min(trouble.noticed.values(), default=None)
    return Recovery(
        cause=cause,
        announced=not cause.startswith(SURPRISES),
        ranks=tuple(sorted({*trouble.noticed, *trouble.lost, *trouble.failed, *(machine.rank for machine in came)})),
        began=began,
        stopped_s=0.0 if trouble.stopped is None else until - trouble.stopped,
        seconds=None if end is None else end - began,
        gen=gen,
        boot_s=max(boots, default=None),
        replacement=came[-1].model if came else None,
        zone=came[-1].zone if came else None,
        notice_s=None if noticed is None or trouble.stopped is None else max(0.0, trouble.stopped - noticed),
    )


def _cause(trouble: _Open) -> str:
    if trouble.lost:
        return "loss" if len(trouble.lost) == 1 else f"loss of {len(trouble.lost)}"
    if trouble.noticed:
        return "notice"
    return f"{trouble.cause}, withdrawn" if trouble.withdrawn else trouble.cause
