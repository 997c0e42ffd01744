"""What became of the time that machines were paid for: every paid second is in one part, and in one only. Pure.

============== ======================================================================================
part           meaning
============== ======================================================================================
TRAINED        its rank trained, and what it did is kept
AGAIN          it trained, and the steps were done again: they came after the newest checkpoint
BOOTING        from the start of billing to its hello
STANDING_BY    ready, beside a machine that trained (make before break)
STANDING_STILL ready, while the job was stopped: it saved, waited for another machine, or started anew
LEAVING        given up, until the cloud was rid of it
NEVER_JOINED   it was paid for, and never said hello
============== ======================================================================================

All but the first are lost work. Who was a member of a generation is read from the events: the rank's machine that
was admitted and not lost by then; of two, the one that was promoted, or the older. One that looked in another zone is
a member only from when the gang has moved there. A stop's own steps until the
members agree, and the way from a generation's order to its first step, count as trained: the ledger has the times of
decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from spotkeeper.report.money import ENDS, STOPS, Attempt
from spotkeeper.report.spans import Span, minus
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.record import LOOK


class Part(str, Enum):
    TRAINED = "trained"
    AGAIN = "again"
    BOOTING = "booting"
    STANDING_BY = "standing by"
    STANDING_STILL = "standing still"
    LEAVING = "leaving"
    NEVER_JOINED = "never joined"


class Piece(NamedTuple):
    """Some paid time of one machine. ``seconds`` may be less than the span's: steps done again lie within others."""

    machine: Attempt
    part: Part
    cause: str
    seconds: float


class Life(NamedTuple):
    """A generation: it trained from ``start`` to ``end``; ``cause``: why it ended. ``again_s``: done in it in vain."""

    start: float
    end: float
    cause: str
    again_s: float
    members: frozenset[Attempt]


class Still(NamedTuple):
    """The job did not train. ``cause``: of the stop, or of the start."""

    span: Span
    cause: str


def pieces(entries: Sequence[Entry], machines: Sequence[Attempt], now: float) -> tuple[Piece, ...]:
    """``entries``: one per id, in order."""
    told = _Told(entries)
    lives = _lives(entries, machines, told, now)
    stills = _stills(lives, entries, now)
    trained: dict[Attempt, list[Life]] = defaultdict(list)
    for life in lives:
        for machine in life.members:
            trained[machine].append(life)
    return tuple(piece for machine in machines for piece in _of(machine, trained[machine], stills, told, now))


class _Told:
    """The first time of each kind of event, by machine."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.at: dict[tuple[int, int, Event], Entry] = {}
        for entry in entries:
            if entry.rank is not None and entry.attempt is not None:
                self.at.setdefault((entry.rank, entry.attempt, entry.event), entry)

    def first(self, machine: Attempt, event: Event) -> Entry | None:
        return self.at.get((machine.rank, machine.attempt, event))

    def moment(self, machine: Attempt, event: Event) -> float | None:
        entry = self.first(machine, event)
        return None if entry is None else entry.at


def _lives(entries: Sequence[Entry], machines: Sequence[Attempt], told: _Told, now: float) -> list[Life]:
    begun: list[Entry] = []
    ended: list[tuple[float, str]] = []
    for entry in entries:
        if entry.event is Event.GENERATION:
            if len(ended) < len(begun):
                ended.append((entry.at, entry.cause or ""))
            begun.append(entry)
        elif entry.event in (*STOPS, *ENDS) and len(ended) < len(begun):
            ended.append((entry.at, entry.cause or entry.event.value))
    if len(ended) < len(begun):
        ended.append((max(now, begun[-1].at), ""))
    follow = [*begun[1:], None][: len(begun)]
    return [
        Life(gen.at, end, cause, _again_s(after), _members(gen.at, machines, told))
        for gen, (end, cause), after in zip(begun, ended, follow, strict=True)
    ]


def _again_s(after: Entry | None) -> float:
    return after.again * after.step_s if after is not None and after.again and after.step_s else 0.0


def _members(at: float, machines: Sequence[Attempt], told: _Told) -> frozenset[Attempt]:
    ready: dict[int, list[Attempt]] = defaultdict(list)
    for machine in machines:
        lost = told.moment(machine, Event.LOSS)
        over = min((t for t in (lost, machine.end) if t is not None), default=float("inf"))
        if machine.admitted is None or not machine.admitted <= at < over:
            continue
        moved_in = told.moment(machine, Event.PROMOTED)
        if machine.cause != LOOK or (moved_in is not None and moved_in <= at):
            ready[machine.rank].append(machine)
    return frozenset(_current(found, at, told) for found in ready.values())


def _current(found: list[Attempt], at: float, told: _Told) -> Attempt:
    promoted = [one for one in found if (moment := told.moment(one, Event.PROMOTED)) is not None and moment <= at]
    return max(promoted, key=_number) if promoted else min(found, key=_number)


def _number(machine: Attempt) -> int:
    return machine.attempt


def _stills(lives: Sequence[Life], entries: Sequence[Entry], now: float) -> list[Still]:
    """Between generations, and before the first: what was waited for then has the stop's cause."""
    over = next((entry.at for entry in entries if entry.event in ENDS), now)
    if not lives:
        return [Still((float("-inf"), max(over, now)), "start")]
    out = [Still((float("-inf"), lives[0].start), "start")]
    for before, after in zip(lives, [*lives[1:], None], strict=True):
        until = after.start if after is not None else over
        if until > before.end:
            out.append(Still((before.end, until), before.cause))
    return out


def _of(machine: Attempt, lives: Sequence[Life], stills: Sequence[Still], told: _Told, now: float) -> Iterable[Piece]:
    start, end = machine.span(now)
    if end <= start:
        return
    if machine.admitted is None:
        joins = machine.end is None  # it may yet
        yield Piece(machine, Part.BOOTING if joins else Part.NEVER_JOINED, machine.cause or "start", end - start)
        return
    lost = told.first(machine, Event.LOSS)
    up = min(max(machine.admitted, start), end)
    gone = end if lost is None else max(up, min(lost.at, end))
    worked = [(max(up, life.start), max(up, life.start, min(gone, life.end))) for life in lives]
    if up > start:
        yield Piece(machine, Part.BOOTING, machine.cause or "start", up - start)
    yield from _trained(machine, lives, worked)
    idle = minus([(up, end)], worked)
    before, after = minus(idle, [(gone, end)]), minus(idle, [(up, gone)])
    last = max((e for _, e in worked), default=end)
    why = (lost.cause or "") if lost is not None else next((life.cause for life in reversed(lives)), machine.cause)
    for span in before:
        yield from _idle(machine, span, stills, last, why)
    yield from (Piece(machine, Part.LEAVING, why, e - s) for s, e in after)


def _trained(machine: Attempt, lives: Sequence[Life], worked: Sequence[Span]) -> Iterable[Piece]:
    for life, (start, end) in zip(lives, worked, strict=True):
        again = min(life.again_s, max(0.0, end - start))
        if again:
            yield Piece(machine, Part.AGAIN, life.cause, again)
        yield Piece(machine, Part.TRAINED, "", max(0.0, end - start) - again)


def _idle(machine: Attempt, span: Span, stills: Sequence[Still], last: float, why: str) -> Iterable[Piece]:
    """Admitted, there, and not training: with the others that stood still, beside one that trained, or on its way out.

    ``last``: when it last trained; its end, where it never did. ``why``: it was given up.
    """
    left: Sequence[Span] = [span]
    for still in stills[max(0, bisect_right(stills, span[0], key=lambda one: one.span[0]) - 1) :]:
        inside = max(span[0], still.span[0]), min(span[1], still.span[1])
        if still.span[0] >= span[1]:
            break
        if inside[1] > inside[0]:
            yield Piece(machine, Part.STANDING_STILL, still.cause, inside[1] - inside[0])
            left = minus(left, [inside])
    for start, end in left:
        by = start < last
        yield Piece(machine, Part.STANDING_BY if by else Part.LEAVING, machine.cause if by else why, end - start)
