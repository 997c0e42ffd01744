"""Formats numbers for people, and untrusted text as Markdown that stays plain text. Pure.

A pull request's comment quotes a branch that is not reviewed yet: a resource can be called ``](javascript:...)``, a
message can close its table or mention many people by @. GitHub decodes entities and backslashes before it looks for
mentions, so only code spans and blocks are safe: all text from outside this project goes through ``code`` or ``block``.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence


def duration(seconds: float | None) -> str:
    """Format a duration: ``4s``, ``3m20s``, ``2h05m``, ``3d04h``; ``-`` for None."""
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
    """Format an amount of USD: ``$1,234.50``; a positive amount below half a cent is ``<$0.01``."""
    if 0.0 < amount < 0.005:
        return "<$0.01"
    return f"-${-amount:,.2f}" if amount <= -0.005 else f"${abs(amount):,.2f}"


def gigabytes(amount: float) -> str:
    """Format an amount of GB; below 1 GB as MB: ``60.0 GB``, ``35 MB``, ``<1 MB``."""
    if amount >= 0.9995:
        return f"{amount:,.1f} GB"
    return "<1 MB" if 0.0 < amount < 0.0005 else f"{1000 * amount:.0f} MB"


def percent(share: float) -> str:
    """Format a share from 0 to 1: ``23 %``."""
    return f"{100 * share:.0f} %"


def value_word(value: float | None) -> str:
    """Format a metric's value with at least four significant digits: ``2.1130``, ``0.01234``, ``1.234e-05``.

    None or NaN is ``not a number``; an infinite value is ``inf`` or ``-inf``.
    """
    if value is None or math.isnan(value):
        return "not a number"
    size = abs(value)
    return f"{value:.7g}" if size >= 1e4 else f"{value:.4f}" if size >= 0.1 else f"{value:.4g}"


_BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40  # characters


def sparkline(steps: Sequence[int], values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """Draw a curve as block characters: the last value of each part of the steps; a space if it is not finite."""
    if not steps:
        return ""
    first, span = steps[0], steps[-1] - steps[0] + 1
    width = min(width, span)
    last = dict(zip(((step - first) * width // span for step in steps), values, strict=True))
    numbers = [value for value in last.values() if math.isfinite(value)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    out, value = "", values[0]
    for part in range(width):
        value = last.get(part, value)
        out += bar(value, low, high)
    return out


def bar(value: float, low: float, high: float) -> str:
    """Draw a value between ``low`` and ``high`` as a block character; a space if it is not finite."""
    if not math.isfinite(value):
        return " "
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0  # halves: no difference overflows
    return _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 crash``, ``2 crashes``, ``0 preemptions``."""
    plural = "" if number == 1 else "es" if noun.endswith("sh") else "s"
    return f"{number} {noun}{plural}"


def saved(percent: float) -> str:
    """Format a saving in percent: ``71 % saved``; ``9 % more`` if machines cost more than their on-demand price."""
    whole = round(percent)
    return f"{whole} % saved" if whole >= 0 else f"{-whole} % more"


LONGEST = 200  # characters of a code span
LONGEST_BLOCK = 4000


def code(text: str, longest: int = LONGEST) -> str:
    """Return text as a one-line code span: links, mentions, images, HTML and ends of table cells have no effect."""
    line = " ".join("".join(map(_visible, text)).split())
    line = line if len(line) <= longest else f"{line[: longest - 3]}..."
    return f"`{line.replace('`', chr(39)).replace('|', '¦')}`" if line else ""


def block(text: str, longest: int = LONGEST_BLOCK) -> str:
    """Return lines as a code block that no line can close."""
    kept = "".join(char if char == "\n" else _visible(char) for char in text)[:longest].rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", kept)), default=0))
    return f"{fence}text\n{kept}\n{fence}"


def _visible(char: str) -> str:
    """Return a space for a control character, a mark of text direction or white space, else the character itself."""
    return " " if unicodedata.category(char)[0] in "CZ" else char


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a Markdown table; cells are Markdown. ``right``: indices of right-aligned columns."""
    marks = ["---:" if at in right else "---" for at in range(len(head))]
    return [f"| {' | '.join(line)} |" for line in (head, marks, *rows)]
