"""Numbers in words that people read: durations, money, losses, counts. Pure, and without any of the views."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """``4s``, ``3m20s``, ``2h05m``, ``3d04h``; ``-`` for None."""
    if seconds is None:
        return "-"
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def usd(amount: float) -> str:
    """``$1,234.50``; below a dollar ``$0.0123``."""
    return f"${amount:,.2f}" if abs(amount) >= 1 else f"${amount:.4f}"


def loss_word(loss: float) -> str:
    """``2.1130``, ``0.01234``, ``1.234e-05``: at least four digits that say something, however small it is."""
    return f"{loss:.4f}" if loss == 0.0 or abs(loss) >= 0.1 else f"{loss:.4g}"


def count(number: int, noun: str) -> str:
    """``1 crash``, ``2 crashes``, ``0 preemptions``."""
    plural = "" if number == 1 else "es" if noun.endswith("sh") else "s"
    return f"{number} {noun}{plural}"


def saved(percent: float) -> str:
    """``71 % saved``; where machines cost more than their on-demand price, ``9 % more``."""
    whole = round(percent)
    return f"{whole} % saved" if whole >= 0 else f"{-whole} % more"
