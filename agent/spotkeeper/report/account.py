"""The account of a job: every machine it had, what each cost, and what became of the time that was paid for. Pure.

Node-hours are of the cloud's own clock, money is USD. Lost work is what was paid for and trained nothing that was
kept; ``goodput`` is the rest's share. The parts of lost work and what was trained add up to what was spent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from spotkeeper.report.money import HOUR_S, NO_PRICES, Attempt, PricesByPool, attempts, first_of_each
from spotkeeper.report.view import JobView, MoneyView, RecoveryView, reason_of
from spotkeeper.report.worktime import Part, Piece, pieces
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.market import NEVER_JOINED
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import LOOK, Outcome, Phase

WHOLE_S = 1.0  # EC2 tells when a machine ended in whole seconds, so before the call that ended it
NOBODY = "unknown"  # submitted before it was written down who did


class AttemptLine(Struct, frozen=True):
    """One machine of one rank. Times: virtual unix seconds. ``price``: USD an hour, the mean of what was paid."""

    rank: int
    attempt: int
    pool: str
    zone: str
    model: Model
    cause: str  # why it was asked for
    price: float
    asked: float
    joined: float | None
    start: float  # of billing
    end: float | None  # of billing; None: it runs
    ended: str  # why; "" while it runs
    hours: float = 0.0
    usd: float = 0.0
    reason: str = ""  # of the choice: why this zone and model


class Lost(Struct, frozen=True):
    """Paid time that trained nothing that was kept. ``cause``: what brought it about: "notice", "loss", "start" ..."""

    cause: str
    part: Part
    node_hours: float
    usd: float


class Account(Struct, frozen=True):
    """What ``spotkeeper report JOB --json`` prints. Durations: virtual seconds.

    Attributes:
        goodput: the share of the paid node-hours that trained and was kept, 0 to 1; None: nothing was paid for yet.
        never_joined: machines that were paid for, and never said hello.
        steps_again: steps that were done twice, as far as it is known.
    """

    job: str
    name: str
    user: str
    phase: Phase
    created: float
    elapsed_s: float
    money: MoneyView
    node_hours: float
    goodput: float | None
    attempts: tuple[AttemptLine, ...]
    lost: tuple[Lost, ...]
    recoveries: tuple[RecoveryView, ...]
    never_joined: int = 0
    refused: int = 0
    steps_again: int = 0
    outcome: Outcome | None = None
    reason: str = ""
    preemptions: int = 0
    deadline_in_s: float | None = None  # from now, or from its end, below zero where it was missed; None: it has none


def account(view: JobView, ledger: Iterable[Entry], now: float, prices: PricesByPool = NO_PRICES) -> Account:
    """``view`` of the same moment: what is shown elsewhere is shown here."""
    entries = first_of_each(ledger)
    machines = attempts(entries)
    found = pieces(entries, machines, now)
    paid = sum(piece.seconds for piece in found)
    kept = sum(piece.seconds for piece in found if piece.part is Part.TRAINED)
    never = {piece.machine for piece in found if piece.part is Part.NEVER_JOINED}
    return Account(
        job=view.job,
        name=view.name,
        user=user_of(entries),
        phase=view.phase,
        created=min((entry.at for entry in entries), default=now),
        elapsed_s=view.elapsed_s,
        money=view.money,
        node_hours=paid / HOUR_S,
        goodput=kept / paid if paid else None,
        attempts=tuple(_line(machine, entries, now, prices) for machine in machines),
        lost=_lost(found, now, prices),
        recoveries=view.recoveries,
        never_joined=len(never),
        refused=sum(machine.refused for machine in machines),
        steps_again=sum(entry.again or 0 for entry in entries if entry.event is Event.GENERATION),
        outcome=view.outcome,
        reason=view.reason,
        preemptions=view.preemptions.total,
        deadline_in_s=view.deadline_in_s,
    )


def user_of(entries: Sequence[Entry]) -> str:
    return next((entry.by for entry in entries if entry.event is Event.SUBMITTED and entry.by), NOBODY)


def _lost(found: Iterable[Piece], now: float, prices: PricesByPool) -> tuple[Lost, ...]:
    """The dearest first."""
    hours: dict[tuple[str, Part], float] = defaultdict(float)
    usd: dict[tuple[str, Part], float] = defaultdict(float)
    for piece in found:
        if piece.part is not Part.TRAINED and piece.seconds > 0:
            key = piece.cause or "start", piece.part
            hours[key] += piece.seconds / HOUR_S
            usd[key] += piece.seconds / HOUR_S * mean_price(piece.machine, now, prices)
    lines = (Lost(cause, part, hours[cause, part], usd[cause, part]) for cause, part in hours)
    return tuple(sorted(lines, key=lambda line: (-line.usd, -line.node_hours, line.cause)))


def mean_price(machine: Attempt, now: float, prices: PricesByPool) -> float:
    """USD an hour that it cost over its life."""
    start, end = machine.span(now)
    return machine.cost(now, prices) / (end - start) * HOUR_S if end > start else machine.price


def _line(machine: Attempt, entries: Sequence[Entry], now: float, prices: PricesByPool) -> AttemptLine:
    start, end = machine.span(now)
    own = [entry for entry in entries if (entry.rank, entry.attempt) == (machine.rank, machine.attempt)]
    reason = next((reason_of(entry, entries) for entry in own if entry.event is Event.INTENT), "")
    return AttemptLine(
        rank=machine.rank,
        attempt=machine.attempt,
        pool=machine.pool,
        zone=machine.zone,
        model=machine.model,
        cause=machine.cause,
        price=mean_price(machine, now, prices),
        asked=machine.asked,
        joined=machine.admitted,
        start=start,
        end=None if machine.end is None else end,
        ended=_ended(machine, own, entries),
        hours=(end - start) / HOUR_S,
        usd=machine.cost(now, prices),
        reason=reason,
    )


def _ended(machine: Attempt, own: Sequence[Entry], entries: Sequence[Entry]) -> str:
    """Why a machine is no more; "" while it is."""
    if machine.end is None:
        return ""
    at = {entry.event: entry for entry in reversed(own)}
    if machine.refused:
        return f"refused: {at[Event.REFUSED].cause or 'no capacity'}"
    if (loss := at.get(Event.LOSS)) is not None:
        why = f": {loss.detail}" if loss.detail and loss.cause == NEVER_JOINED else ""
        return f"{loss.cause or 'loss'}{why}"
    if Event.NOTICE in at and Event.REPRIEVE not in at:
        return "notice"
    return _given_back(machine, machine.end + WHOLE_S, own, entries)


def _given_back(machine: Attempt, end: float, own: Sequence[Entry], entries: Sequence[Entry]) -> str:
    """By the job itself: at its end, for a successor, or for a hold. ``end``: no earlier than the call for it."""
    over = next((entry for entry in entries if entry.event is Event.END), None)
    if over is not None and end >= over.at:
        return over.cause or "end"
    if machine.admitted is None:
        return "given up" if machine.listed else "never made"
    if machine.cause == LOOK and not any(entry.event is Event.PROMOTED for entry in own):
        return "it had looked"
    later = (e for e in entries if e.event is Event.PROMOTED and e.rank == machine.rank)
    follower = next((e for e in later if (e.attempt or 0) > machine.attempt), None)
    if follower is not None:
        return f"replaced: {follower.cause or 'swap'}"
    why = [one for one in entries if one.event in (Event.HOLD, Event.MOVE) and machine.start <= one.at <= end]
    return f"{why[-1].event.value}: {why[-1].cause}" if why else "given back"
