"""Every interruption of a job and how it got over it, from its ledger alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spotkeeper.report.money import Attempt, attempts, first_of_each
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.record import Model

# What can interrupt, strongest first: a loss after a notice is the notice's doing.
TRIGGERS = (Event.NOTICE, Event.LOSS, Event.CRASH, Event.MOVE, Event.ROLL, Event.HOLD, Event.ASK, Event.STOP)


@dataclass(frozen=True)
class Recovery:
    """From the first sign of trouble to the next generation. Durations in virtual seconds."""

    cause: str  # "notice", "loss", "crash", "move", ...
    announced: bool
    ranks: tuple[int, ...]  # whose machines were lost or replaced
    began: float  # notice, loss or crash
    stopped_s: float  # training stood still
    seconds: float | None  # from `began` to the generation; None: still recovering
    gen: int  # the generation that ended it (the one it interrupted, while recovering)
    boot_s: float | None = None  # the longest boot of a replacement, INTENT to ADMITTED
    replacement: Model | None = None
    zone: str | None = None


def recoveries(ledger: Iterable[Entry], now: float) -> tuple[Recovery, ...]:
    """In order. A withdrawn notice that led to no new generation is none."""
    entries = first_of_each(ledger)
    machines = {(machine.rank, machine.attempt): machine for machine in attempts(entries)}
    out: list[Recovery] = []
    open_: list[Entry] = []
    gen = 0
    for entry in entries:
        if entry.event is Event.GENERATION:
            if gen and open_:
                out.append(_recovery(open_, entry, machines, entry.gen))
            gen, open_ = max(gen, entry.gen), []
        elif entry.event in (Event.END, Event.DONE):
            open_ = []
        elif entry.event is Event.REPRIEVE:
            open_ = [e for e in open_ if not (e.event is Event.NOTICE and e.rank == entry.rank)]
        elif entry.event in TRIGGERS or (open_ and entry.event in (Event.INTENT, Event.PROMOTED)):
            open_.append(entry)
    if gen and any(e.event in TRIGGERS for e in open_):
        out.append(_recovery(open_, None, machines, gen, now))
    return tuple(out)


def _recovery(
    entries: list[Entry],
    end: Entry | None,
    machines: dict[tuple[int, int], Attempt],
    gen: int,
    now: float = 0.0,
) -> Recovery:
    triggers = [entry for entry in entries if entry.event in TRIGGERS]
    first = min(triggers or entries, key=lambda e: (TRIGGERS.index(e.event) if e.event in TRIGGERS else 99, e.at))
    noticed = {entry.rank for entry in triggers if entry.event is Event.NOTICE}
    lost = {entry.rank for entry in triggers if entry.event is Event.LOSS}
    new = [
        machines[entry.rank, entry.attempt]
        for entry in entries
        if entry.event in (Event.INTENT, Event.PROMOTED)
        and entry.rank is not None
        and entry.attempt is not None
        and (entry.rank, entry.attempt) in machines
    ]
    had = [machine for machine in new if not machine.refused]
    boots = [machine.admitted - machine.start for machine in had if machine.admitted is not None]
    until = end.at if end else now
    halts = [entry.at for entry in triggers if entry.event is not Event.NOTICE]
    ranks = {rank for rank in noticed | lost | {machine.rank for machine in had} if rank is not None}
    return Recovery(
        cause=_cause(first, lost - noticed),
        announced=bool(noticed) and not lost - noticed,
        ranks=tuple(sorted(ranks)),
        began=first.at,
        stopped_s=max(0.0, until - min(halts)) if halts else 0.0,
        seconds=end.at - first.at if end else None,
        gen=gen,
        boot_s=max(boots, default=None),
        replacement=had[-1].model if had else None,
        zone=had[-1].zone if had else None,
    )


def _cause(first: Entry, unannounced: set[int | None]) -> str:
    if unannounced:
        return "loss" if len(unannounced) == 1 else f"loss of {len(unannounced)}"
    if first.event in (Event.STOP, Event.ASK, Event.HOLD) and first.cause:
        return first.cause
    return first.event.value
