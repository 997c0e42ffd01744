"""Divides the paid time of machines by its use: every paid second is in exactly one part. Pure.

============== ======================================================================================
part           meaning
============== ======================================================================================
TRAINED        the node trained, and the steps are kept
AGAIN          the node trained steps that were repeated, since no checkpoint had them
BOOTING        from the start of billing to the machine's hello
STANDING_BY    ready beside a machine that trained (make before break)
STANDING_STILL ready while the job was stopped: saving, waiting for another machine, or starting again
LEAVING        from the decision to release the machine until the cloud has deleted it
NEVER_JOINED   the machine never said hello
============== ======================================================================================

All parts but TRAINED are lost work. The member of a generation is, for each node, the machine that was admitted before
the generation began and not lost. If a node has two such machines, its member is the promoted one, or else the older
one. A probe in another zone is a member only after the gang has moved there. A generation trains from its first step
until the decision to stop it; without a report of steps (`stop: signal`), from the decision to start it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import PROBE
from spotkeeper.report.money.money import (
    ENDS,
    HOUR_S,
    NO_PRICES,
    STILL,
    Attempt,
    PricesByPool,
    Span,
    attempts,
    mean_price,
    minus,
)


class WorkPart(str, Enum):
    """A use of paid time; the module's docstring defines each."""

    TRAINED = "trained"
    AGAIN = "repeated steps"
    BOOTING = "booting"
    STANDING_BY = "standing by"
    STANDING_STILL = "standing still"
    LEAVING = "leaving"
    NEVER_JOINED = "never joined"


class Piece(NamedTuple):
    """Some paid time of one machine, with its use and the cause."""

    machine: Attempt
    part: WorkPart
    cause: str
    seconds: float


class Life(NamedTuple):
    """A generation that trained from ``start`` (its first step) to ``end`` with ``members``.

    ``cause``: why it ended; ``again_s``: seconds of its training that the next generation repeated.
    """

    start: float
    end: float
    cause: str
    again_s: float
    members: frozenset[Attempt]


class Still(NamedTuple):
    """A span without training. ``cause``: why training stopped, or "start" before the first generation."""

    span: Span
    cause: str


def pieces(entries: Sequence[Entry], machines: Sequence[Attempt], now: float) -> tuple[Piece, ...]:
    """Divide the paid time of all machines into pieces. ``entries``: the ledger in order, one entry for each id."""
    told = _Firsts(entries)
    lives = _lives(entries, machines, told, now)
    stills = _stills(lives, entries, now)
    trained: dict[Attempt, list[Life]] = defaultdict(list)
    for life in lives:
        for machine in life.members:
            trained[machine].append(life)
    return tuple(piece for machine in machines for piece in _of(machine, trained[machine], stills, told, now))


def trained_usd(entries: Sequence[Entry], now: float, prices: PricesByPool = NO_PRICES) -> float:
    """Return what machines cost while they trained steps that are kept, USD."""
    found = pieces(entries, attempts(entries), now)
    return sum(
        piece.seconds / HOUR_S * mean_price(piece.machine, now, prices)
        for piece in found
        if piece.part is WorkPart.TRAINED
    )


class _Firsts:
    """Looks up the first entry of each kind of event, by machine."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.at: dict[tuple[int, int, Event], Entry] = {}
        for entry in entries:
            if entry.node is not None and entry.attempt is not None:
                self.at.setdefault((entry.node, entry.attempt, entry.event), entry)

    def first(self, machine: Attempt, event: Event) -> Entry | None:
        return self.at.get((machine.node, machine.attempt, event))

    def moment(self, machine: Attempt, event: Event) -> float | None:
        entry = self.first(machine, event)
        return None if entry is None else entry.at


def generations(entries: Sequence[Entry], machines: Sequence[Attempt], now: float) -> list[Life]:
    """Return the generations in order, each with the machines that trained in it."""
    return _lives(entries, machines, _Firsts(entries), now)


def _lives(entries: Sequence[Entry], machines: Sequence[Attempt], told: _Firsts, now: float) -> list[Life]:
    begun: list[Entry] = []
    ended: list[tuple[float, str]] = []
    for entry in entries:
        if entry.event is Event.GENERATION:
            if len(ended) < len(begun):
                ended.append((entry.at, entry.cause or ""))
            begun.append(entry)
        elif entry.event in (*STILL, *ENDS) and len(ended) < len(begun):
            ended.append((entry.at, entry.cause or entry.event.value))
    if len(ended) < len(begun):
        ended.append((max(now, begun[-1].at), ""))
    first = {entry.gen: entry.at for entry in reversed(entries) if entry.event is Event.FIRST}
    lost_s = [(entry.again or 0) * (entry.step_s or 0.0) for entry in begun[1:]]
    return [
        Life(min(max(gen.at, first.get(gen.gen, gen.at)), end), end, cause, again_s, _members(gen.at, machines, told))
        for gen, (end, cause), again_s in zip(begun, ended, [*lost_s, 0.0][: len(begun)], strict=True)
    ]


def _members(at: float, machines: Sequence[Attempt], told: _Firsts) -> frozenset[Attempt]:
    ready: dict[int, list[Attempt]] = defaultdict(list)
    for machine in machines:
        lost = told.moment(machine, Event.LOSS)
        over = min((t for t in (lost, machine.end) if t is not None), default=float("inf"))
        if machine.admitted is None or not machine.admitted <= at < over:
            continue
        moved_in = told.moment(machine, Event.PROMOTED)
        if machine.cause != PROBE or (moved_in is not None and moved_in <= at):
            ready[machine.node].append(machine)
    return frozenset(_current(found, at, told) for found in ready.values())


def _current(found: list[Attempt], at: float, told: _Firsts) -> Attempt:
    promoted = [one for one in found if (moment := told.moment(one, Event.PROMOTED)) is not None and moment <= at]
    return max(promoted, key=_number) if promoted else min(found, key=_number)


def _number(machine: Attempt) -> int:
    return machine.attempt


def _stills(lives: Sequence[Life], entries: Sequence[Entry], now: float) -> list[Still]:
    over = next((entry.at for entry in entries if entry.event in ENDS), now)
    if not lives:
        return [Still((float("-inf"), max(over, now)), "start")]
    out = [Still((float("-inf"), lives[0].start), "start")]
    for before, after in zip(lives, [*lives[1:], None], strict=True):
        until = after.start if after is not None else over
        if until > before.end:
            out.append(Still((before.end, until), before.cause))
    return out


def _of(machine: Attempt, lives: Sequence[Life], stills: Sequence[Still], told: _Firsts, now: float) -> Iterable[Piece]:
    start, end = machine.span(now)
    if end <= start:
        return
    if machine.admitted is None:
        joins = machine.end is None  # the machine may still join
        yield Piece(
            machine, WorkPart.BOOTING if joins else WorkPart.NEVER_JOINED, machine.cause or "start", end - start
        )
        return
    lost = told.first(machine, Event.LOSS)
    up = min(max(machine.admitted, start), end)
    gone = end if lost is None else max(up, min(lost.at, end))
    worked = [(max(up, life.start), max(up, life.start, min(gone, life.end))) for life in lives]
    if up > start:
        yield Piece(machine, WorkPart.BOOTING, machine.cause or "start", up - start)
    yield from _trained(machine, lives, worked)
    idle = minus([(up, end)], worked)
    before, after = minus(idle, [(gone, end)]), minus(idle, [(up, gone)])
    last = max((e for _, e in worked), default=end)
    why = (lost.cause or "") if lost is not None else next((life.cause for life in reversed(lives)), machine.cause)
    for span in before:
        yield from _idle(machine, span, stills, last, why)
    yield from (Piece(machine, WorkPart.LEAVING, why, e - s) for s, e in after)


def _trained(machine: Attempt, lives: Sequence[Life], worked: Sequence[Span]) -> Iterable[Piece]:
    for life, (start, end) in zip(lives, worked, strict=True):
        again = min(life.again_s, max(0.0, end - start))
        if again:
            yield Piece(machine, WorkPart.AGAIN, life.cause, again)
        yield Piece(machine, WorkPart.TRAINED, "", max(0.0, end - start) - again)


def _idle(machine: Attempt, span: Span, stills: Sequence[Still], last: float, why: str) -> Iterable[Piece]:
    """Divide a span in which a machine did not train into pieces.

    While the job was stopped, they are STANDING_STILL; otherwise they are STANDING_BY before ``last`` and LEAVING after
    it. The caller passes the time at which the machine last trained as ``last`` (its end if it never trained), and the
    cause of its end as ``why``.
    """
    left: Sequence[Span] = [span]
    for still in stills[max(0, bisect_right(stills, span[0], key=lambda one: one.span[0]) - 1) :]:
        inside = max(span[0], still.span[0]), min(span[1], still.span[1])
        if still.span[0] >= span[1]:
            break
        if inside[1] > inside[0]:
            yield Piece(machine, WorkPart.STANDING_STILL, still.cause, inside[1] - inside[0])
            left = minus(left, [inside])
    for start, end in left:
        by = start < last
        yield Piece(
            machine, WorkPart.STANDING_BY if by else WorkPart.LEAVING, machine.cause if by else why, end - start
        )
