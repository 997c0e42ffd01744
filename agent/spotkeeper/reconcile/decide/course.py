"""How far a job is, for the choice of machines: what is left, until when, and how long it may wait for spot.

Nothing here is needed for safety; where it is not known there is no plan, and on-demand follows spot at once.
"""

from __future__ import annotations

import contextlib

from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.select import Work
from spotkeeper.spec.job import deadline_at, span_s

HOUR_S = 3600.0
LEAST_LEFT_S = 60.0


def work(draft: Draft) -> Work | None:
    """Under a deadline, where anybody knows how much is left: the job's own steps, else the job file's ``work``."""
    spec, record = draft.seen.spec, draft.record
    if spec is None or spec.deadline is None:
        return None
    try:
        deadline = deadline_at(spec.deadline, record.created)
        whole = span_s(spec.work) if spec.work is not None else None
    except ValueError:
        return None
    left = draft.seen.left_s
    if left is None and record.gen and whole is not None:
        left = whole  # it trains, and has not told how far it is: as if it had just begun
    if left is None:
        left = whole
    if left is None:
        return None
    left = max(LEAST_LEFT_S, left)
    total = max(left, whole or 0.0, 1.0)
    planned = max(0.0, deadline - record.created - total) * left / total
    return Work(left / HOUR_S, (deadline - draft.now - left) / HOUR_S, planned / HOUR_S)


def max_wait_s(draft: Draft) -> float | None:
    spec = draft.seen.spec
    if spec is not None and spec.max_wait is not None:
        with contextlib.suppress(ValueError):
            return span_s(spec.max_wait)
    return None


def waits_since(draft: Draft) -> float:
    """Since when the gang has not trained, if it does not: its stop, or its submission. A retry is no new wait."""
    return draft.record.stop_since if draft.record.gen else draft.record.created
