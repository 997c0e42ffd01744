"""What all jobs of a stack cost: by job, by who submitted it, by calendar month (UTC). Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from msgspec import Struct

from spotkeeper.report.account import Account, AttemptLine


class Total(Struct, frozen=True):
    """``key``: a job's name with its id, a user, or a month (2026-11). Money is USD.

    Attributes:
        saved: of ``on_demand_only``, what was not spent; below zero where machines cost more.
        lost_hours, lost_usd: paid for, and trained nothing that was kept; of a month, each job's by its share there.
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


class Totals(Struct, frozen=True):
    """What ``spotkeeper report --all --json`` prints. All three add up to ``total``."""

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
    )


def _months(accounts: Sequence[Account], now: float) -> tuple[Total, ...]:
    """A machine that ran over the end of a month counts in both, each with its part."""
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
    whole, paid = _sum("", [one]), sum(hours.values())
    return {
        month: Total(
            month,
            1,
            machines[month],
            hours[month],
            usd[month],
            whole.on_demand_only * hours[month] / paid,
            whole.lost_hours * hours[month] / paid,
            whole.lost_usd * hours[month] / paid,
            whole.on_demand_only * hours[month] / paid - usd[month],
        )
        for month in hours
    }


def _added(month: str, parts: Iterable[Total]) -> Total:
    rows = list(parts)
    return Total(
        month,
        *(
            sum(getattr(row, name) for row in rows)
            for name in ("jobs", "machines", "node_hours", "usd", "on_demand_only", "lost_hours", "lost_usd", "saved")
        ),
    )


def shares(line: AttemptLine, now: float) -> tuple[tuple[str, float], ...]:
    """The months in which a machine was paid for, each with its share of the time."""
    end = now if line.end is None else line.end
    out, at = [], line.start
    while at < end and line.hours > 0:
        day = datetime.fromtimestamp(at, timezone.utc)
        after = day.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        after = after.replace(year=day.year + day.month // 12, month=day.month % 12 + 1)
        until = min(end, after.timestamp())
        out.append((f"{day:%Y-%m}", (until - at) / (end - line.start)))
        at = until
    return tuple(out)
