"""Arithmetic on spans of time: ``(start, end)`` pairs in seconds, start <= end."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same moments without overlaps, in order."""
    out: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return tuple(out)


def minus(spans: Iterable[Span], holes: Iterable[Span]) -> tuple[Span, ...]:
    """What is left of ``spans`` outside ``holes``, in order."""
    cut = union(holes)
    out: list[Span] = []
    for start, end in union(spans):
        at = start
        for hole_start, hole_end in cut:
            if hole_end <= at or hole_start >= end:
                continue
            if hole_start > at:
                out.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            out.append((at, end))
    return tuple(out)


def seconds(spans: Iterable[Span]) -> float:
    """Total length; overlaps count as often as they come."""
    return sum(end - start for start, end in spans)
