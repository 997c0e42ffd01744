"""The account of a job, and the totals of a stack: machines, their cost, and how the paid time was used. Pure.

Node-hours are hours of the cloud's clock, money is USD. Lost work is all paid time without kept steps, including the
time in which machines boot or wait; ``goodput`` is the share of paid time with kept steps. The money spent is the cost
of lost work, that of training, and egress between regions. Totals are by job, by submitter and by calendar month (UTC).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import NEVER_JOINED
from spotkeeper.contract.months import month_of, next_month
from spotkeeper.contract.record import PROBE, Outcome, Phase
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.recovery import Recovery
from spotkeeper.report.job.view import JobView, reason_of
from spotkeeper.report.job.worktime import Piece, WorkPart, pieces
from spotkeeper.report.money.money import (
    HOUR_S,
    NO_PRICES,
    Attempt,
    Money,
    PricesByPool,
    attempts,
    first_of_each,
    mean_price,
)

WHOLE_S = 1.0  # EC2 rounds the end of a machine down to seconds, so it may be before the call that ended the machine
UNKNOWN_USER = "unknown"


class AttemptLine(Struct, frozen=True):
    """One machine of a node. Times: virtual unix seconds. ``price``: USD an hour, the mean over its life."""

    node: int
    attempt: int
    pool: str
    zone: str
    model: Model
    cause: str  # why the machine was requested
    price: float
    asked: float
    joined: float | None
    start: float  # when billing starts
    end: float | None  # when billing ends; None while it runs
    ended: str  # why the machine ended; "" while it runs
    hours: float = 0.0
    usd: float = 0.0
    reason: str = ""  # why this zone and model were chosen


class LostHours(Struct, frozen=True):
    """Paid time without kept steps, summed by cause ("notice", "loss", "start" ...) and part."""

    cause: str
    part: WorkPart
    node_hours: float
    usd: float


class EgressLine(Struct, frozen=True):
    """A transfer between regions: of a node's disk (``checkpoint``), or of the job's ``data``, which has no node."""

    at: float
    what: str
    way: str  # "us-central1 -> us-east1"
    gb: float
    usd: float
    node: int | None = None


class Account(Struct, frozen=True):
    """The account of one job, as ``spotkeeper report JOB --json`` prints it. Durations: virtual seconds.

    Attributes:
        goodput: the share of the paid node-hours whose steps are kept, 0 to 1; None before any payment.
        never_joined: machines that were paid for and never said hello.
        steps_again: steps that were done twice, as far as known.
    """

    job: str
    name: str
    user: str
    phase: Phase
    created: float
    elapsed_s: float
    money: Money
    node_hours: float
    goodput: float | None
    attempts: tuple[AttemptLine, ...]
    lost: tuple[LostHours, ...]
    recoveries: tuple[Recovery, ...]
    never_joined: int = 0
    refused: int = 0
    steps_again: int = 0
    outcome: Outcome | None = None
    reason: str = ""
    preemptions: int = 0
    transfers: tuple[EgressLine, ...] = ()
    deadline_in_s: float | None = None  # from now, or from the job's end; negative if missed; None without a deadline


def account(view: JobView, ledger: Iterable[Entry], now: float, prices: PricesByPool = NO_PRICES) -> Account:
    """Return a job's account: all that it paid for until ``now``. ``view``: the state of this job at ``now``."""
    entries = first_of_each(ledger)
    machines = attempts(entries)
    found = pieces(entries, machines, now)
    paid = sum(piece.seconds for piece in found)
    kept = sum(piece.seconds for piece in found if piece.part is WorkPart.TRAINED)
    never = {piece.machine for piece in found if piece.part is WorkPart.NEVER_JOINED}
    return Account(
        job=view.job,
        name=view.name,
        user=view.user or UNKNOWN_USER,
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
        transfers=tuple(
            EgressLine(entry.at, entry.cause or "", entry.detail, entry.gb or 0.0, entry.usd or 0.0, entry.node)
            for entry in entries
            if entry.event is Event.EGRESS
        ),
        deadline_in_s=view.deadline_in_s,
    )


def _lost(found: Iterable[Piece], now: float, prices: PricesByPool) -> tuple[LostHours, ...]:
    hours: dict[tuple[str, WorkPart], float] = defaultdict(float)
    usd: dict[tuple[str, WorkPart], float] = defaultdict(float)
    for piece in found:
        if piece.part is not WorkPart.TRAINED and piece.seconds > 0:
            key = piece.cause or "start", piece.part
            hours[key] += piece.seconds / HOUR_S
            usd[key] += piece.seconds / HOUR_S * mean_price(piece.machine, now, prices)
    lines = (LostHours(cause, part, hours[cause, part], usd[cause, part]) for cause, part in hours)
    return tuple(sorted(lines, key=lambda line: (-line.usd, -line.node_hours, line.cause)))


def _line(machine: Attempt, entries: Sequence[Entry], now: float, prices: PricesByPool) -> AttemptLine:
    start, end = machine.span(now)
    own = [entry for entry in entries if (entry.node, entry.attempt) == (machine.node, machine.attempt)]
    reason = next((reason_of(entry, entries) for entry in own if entry.event is Event.INTENT), "")
    return AttemptLine(
        node=machine.node,
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
    """The cause of a machine's end; "" while it exists."""
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
    """Return why the job released a machine: the job's end, a replacement, a hold or a move.

    ``end``: the machine's end. The caller rounds it up, so that it is not before the call that deleted the machine.
    """
    over = next((entry for entry in entries if entry.event is Event.END), None)
    if over is not None and end >= over.at:
        return over.cause or "end"
    if machine.admitted is None:
        return "given up" if machine.listed else "never made"
    if machine.cause == PROBE and not any(entry.event is Event.PROMOTED for entry in own):
        return "probe ended"
    later = (e for e in entries if e.event is Event.PROMOTED and e.node == machine.node)
    follower = next((e for e in later if (e.attempt or 0) > machine.attempt), None)
    if follower is not None:
        return f"replaced: {follower.cause or 'swap'}"
    why = [one for one in entries if one.event in (Event.HOLD, Event.MOVE) and machine.start <= one.at <= end]
    return f"{why[-1].event.value}: {why[-1].cause}" if why else "released"


class Total(Struct, frozen=True):
    """The totals of one job, user or month. Money is USD.

    Attributes:
        key: a job's name with its id, a user, or a month (2026-11).
        saved: ``on_demand_only`` less ``usd``; negative if machines cost more.
        egress: transfers between regions, a part of ``usd``.
        lost_hours, lost_usd: lost work; that of a job is divided among months in proportion to the job's hours.
    """

    key: str
    jobs: int
    machines: int
    node_hours: float
    usd: float
    on_demand_only: float
    lost_hours: float
    lost_usd: float
    saved: float
    egress: float = 0.0


class Totals(Struct, frozen=True):
    """The totals of a stack, as ``spotkeeper report --all --json`` prints them; each grouping adds up to ``total``."""

    total: Total
    jobs: tuple[Total, ...]
    users: tuple[Total, ...]
    months: tuple[Total, ...]


def totals(accounts: Sequence[Account], now: float) -> Totals:
    users: dict[str, list[Account]] = defaultdict(list)
    for one in accounts:
        users[one.user].append(one)
    return Totals(
        total=_sum("all", accounts),
        jobs=tuple(_sum(f"{one.name} ({one.job})", [one]) for one in accounts),
        users=tuple(_sum(user, of) for user, of in sorted(users.items())),
        months=_months(accounts, now),
    )


def _sum(key: str, accounts: Sequence[Account]) -> Total:
    usd, demand = (sum(getattr(one.money, name) for one in accounts) for name in ("spent", "on_demand_only"))
    return Total(
        key=key,
        jobs=len(accounts),
        machines=sum(line.hours > 0 for one in accounts for line in one.attempts),
        node_hours=sum(one.node_hours for one in accounts),
        usd=usd,
        on_demand_only=demand,
        lost_hours=sum(lost.node_hours for one in accounts for lost in one.lost),
        lost_usd=sum(lost.usd for one in accounts for lost in one.lost),
        saved=demand - usd,
        egress=sum(one.money.egress for one in accounts),
    )


def _months(accounts: Sequence[Account], now: float) -> tuple[Total, ...]:
    """Totals by month. A machine that ran in several months counts in each of them with its time in that month.

    A transfer counts in the month of its ledger entry.
    """
    found: dict[str, list[Total]] = defaultdict(list)
    for one in accounts:
        for month, part in _by_month(one, now).items():
            found[month].append(part)
    return tuple(_added(month, found[month]) for month in sorted(found))


def _by_month(one: Account, now: float) -> dict[str, Total]:
    hours: dict[str, float] = defaultdict(float)
    usd: dict[str, float] = defaultdict(float)
    machines: dict[str, int] = defaultdict(int)
    for line in one.attempts:
        for month, share in shares(line, now):
            hours[month] += line.hours * share
            usd[month] += line.usd * share
            machines[month] += 1
    moved: dict[str, float] = defaultdict(float)
    for transfer in one.transfers:
        month = month_of(transfer.at)
        moved[month] += transfer.usd
        hours[month] += 0.0
    whole, paid = _sum("", [one]), sum(hours.values())
    parts = {}
    for month, ran in hours.items():
        share, cost = ran / paid if paid else 0.0, usd[month] + moved[month]
        demand, lost = whole.on_demand_only * share, (whole.lost_hours * share, whole.lost_usd * share)
        parts[month] = Total(month, 1, machines[month], ran, cost, demand, *lost, demand - cost, moved[month])
    return parts


def _added(month: str, parts: Iterable[Total]) -> Total:
    rows = list(parts)
    return Total(
        month,
        *(sum(getattr(row, name) for row in rows) for name in Total.__struct_fields__[1:]),
    )


def shares(line: AttemptLine, now: float) -> tuple[tuple[str, float], ...]:
    """The months in which a machine was paid for, each with its share of the time, from 0 to 1."""
    end = now if line.end is None else line.end
    out, at = [], line.start
    while at < end and line.hours > 0:
        until = min(end, next_month(at))
        out.append((month_of(at), (until - at) / (end - line.start)))
        at = until
    return tuple(out)
