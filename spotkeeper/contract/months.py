"""Calendar months in UTC, of which users' and teams' money is counted. Times are virtual unix seconds. Pure."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import lru_cache


def month_of(at: float) -> str:
    """Return a time's month, as ``2026-11``."""
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m}"


@lru_cache(maxsize=8)
def month_start(at: float) -> float:
    day = datetime.fromtimestamp(at, timezone.utc)
    return day.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()


def next_month(at: float) -> float:
    """Return when the month after this time's begins."""
    return month_start(month_start(at) + 32 * 86_400.0)
