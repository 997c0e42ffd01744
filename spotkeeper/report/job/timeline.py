"""The life of every machine of a job as bars on one lane per node, from the ledger alone. Pure.

The bars of one machine do not overlap. Times are virtual unix seconds.

======== ======================================================================================
bar      meaning
======== ======================================================================================
BOOT     from the request to the machine's hello
NEVER    from the request to the machine's end, if it was given up without a hello
READY    admitted, does not train: beside a machine that trains, or before a generation starts
TRAIN    member of a running generation, without a preemption notice
SAVE     from the order to save and stop until the next generation starts
NOTICE   member of a running generation, from its preemption notice on
LEAVE    lost or released, until the cloud has deleted it
REFUSED  the cloud refused the request
======== ======================================================================================
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum

from msgspec import Struct

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.worktime import Life, generations
from spotkeeper.report.money.money import Attempt, Span, attempts, first_of_each, minus, stopped

SHORTEST_S = 1.0  # a bar shorter than this is left out


class BarKind(str, Enum):
    BOOT = "boot"
    NEVER = "never"
    READY = "ready"
    TRAIN = "train"
    SAVE = "save"
    NOTICE = "notice"
    LEAVE = "leave"
    REFUSED = "refused"


class Bar(Struct, frozen=True):
    """A part of one machine's life. ``shared``: another machine is on its lane too; ``row``: 0 upper half, 1 lower."""

    node: int
    attempt: int
    row: int
    shared: bool
    kind: BarKind
    start: float
    end: float
    model: Model
    zone: str
    price: float  # USD per hour, as requested


class Mark(Struct, frozen=True):
    """A moment on a lane: a notice, a loss, or a replacement that takes over."""

    at: float
    node: int
    event: Event
    text: str = ""


class Timeline(Struct, frozen=True):
    """All machines of a job. ``starts``: when each generation started to train, with its number and cause."""

    start: float
    end: float
    nodes: tuple[int, ...]
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    starts: tuple[tuple[float, int, str], ...]


def resumed_steps(ledger: Iterable[Entry]) -> list[float]:
    """Return the steps at which the generations after the first one resumed, for marks in charts."""
    resumed = (entry for entry in ledger if entry.event is Event.GENERATION and entry.gen > 1)
    return sorted({float(entry.step) for entry in resumed if entry.step is not None})


_STATES = (Event.GENERATION, Event.HOLD, Event.RESUME, Event.END, Event.DONE)
_MARKED = (Event.NOTICE, Event.LOSS, Event.PROMOTED)


def timeline(ledger: Iterable[Entry], now: float) -> Timeline:
    """Return the machines of a job until ``now`` (virtual unix seconds).

    For a job that is over, or on hold without a machine, until its last event: hours without anything would squeeze
    the rest.
    """
    entries = first_of_each(ledger)
    machines = attempts(entries)
    lives = generations(entries, machines, now)
    still = stopped(entries, now)
    rows = _rows(machines, now)
    notices = _notices(entries)
    lost = {(e.node, e.attempt): e.at for e in reversed(entries) if e.event is Event.LOSS}
    bars: list[Bar] = []
    for machine in machines:
        key = machine.node, machine.attempt
        others = [_whole(other, now) for other in machines if other.node == machine.node and other is not machine]
        for kind, began, ended in _parts(machine, lives, still, notices.get(key), lost.get(key), now):
            alone = minus([(began, ended)], others)
            pieces = [(span, False) for span in alone]
            pieces += [(span, True) for span in minus([(began, ended)], alone)]
            for span, shared in sorted(pieces):
                row = rows[key] if shared else 0
                bars.append(Bar(*key, row, shared, kind, *span, machine.model, machine.zone, machine.price))
    start = min((entry.at for entry in entries), default=now)
    state = next((entry.event for entry in reversed(entries) if entry.event in _STATES), None)
    over = state is Event.DONE or (state is Event.HOLD and all(machine.end is not None for machine in machines))
    end = max((entry.at for entry in entries), default=now) if over else now
    return Timeline(
        start=start,
        end=max(end, start + SHORTEST_S),
        nodes=tuple(sorted({machine.node for machine in machines})),
        bars=tuple(bars),
        marks=tuple(
            Mark(e.at, e.node, e.event, e.cause or "") for e in entries if e.event in _MARKED and e.node is not None
        ),
        starts=tuple((e.at, e.gen, e.cause or "") for e in entries if e.event is Event.GENERATION),
    )


def _whole(machine: Attempt, now: float) -> Span:
    return machine.asked, max(machine.asked, now if machine.end is None else machine.end)


def _notices(entries: Sequence[Entry]) -> dict[tuple[int, int], float]:
    """When each machine got the notice that stayed in force."""
    found: dict[tuple[int, int], float] = {}
    for entry in entries:
        if entry.node is None or entry.attempt is None:
            continue
        if entry.event is Event.NOTICE:
            found.setdefault((entry.node, entry.attempt), entry.at)
        elif entry.event is Event.REPRIEVE:
            found.pop((entry.node, entry.attempt), None)
    return found


def _rows(machines: Sequence[Attempt], now: float) -> dict[tuple[int, int], int]:
    """Return each machine's row: 1, the lower one, if it overlaps an earlier machine on row 0."""
    ends: dict[int, list[float]] = defaultdict(lambda: [float("-inf"), float("-inf")])
    rows = {}
    for machine in sorted(machines, key=lambda one: (one.asked, one.attempt)):
        free = ends[machine.node]
        row = 0 if free[0] <= machine.asked or free[0] <= free[1] else 1
        free[row] = max(free[row], now if machine.end is None else machine.end)
        rows[machine.node, machine.attempt] = row
    return rows


def _parts(
    machine: Attempt,
    lives: Sequence[Life],
    still: Sequence[Span],
    notice: float | None,
    lost: float | None,
    now: float,
) -> Iterable[tuple[BarKind, float, float]]:
    end = now if machine.end is None else machine.end
    if machine.refused:
        yield BarKind.REFUSED, machine.asked, max(end, machine.asked + SHORTEST_S)
        return
    never = machine.admitted is None and lost is not None
    joined = lost if never else machine.admitted
    up = end if joined is None else min(joined, end)
    gone = end if lost is None else min(max(up, lost), end)
    found = [(BarKind.NEVER if never else BarKind.BOOT, machine.asked, up), (BarKind.LEAVE, gone, end)]
    mine = [life for life in lives if machine in life.members]
    trained = [(max(up, life.start), min(gone, life.end)) for life in mine]
    warned = [(notice, gone)] if notice is not None else []
    found += [(BarKind.TRAIN, *span) for span in minus(trained, warned)]
    found += [(BarKind.NOTICE, *span) for span in minus(trained, minus(trained, warned))]
    idle = minus([(up, gone)], trained)
    saves = [(start, until) for start, until in still if any(abs(life.end - start) < SHORTEST_S for life in mine)]
    waits = minus(idle, saves)
    found += [(BarKind.READY, *span) for span in waits] + [(BarKind.SAVE, *span) for span in minus(idle, waits)]
    for kind, start, until in sorted(found, key=lambda part: part[1]):
        if until - start >= SHORTEST_S or (kind in (BarKind.BOOT, BarKind.NEVER) and until > start):
            yield kind, start, until
