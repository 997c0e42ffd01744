"""How far a job is, for the choice of machines: what is done and left, until when, at what cost, and what it runs on.

Nothing here is needed for safety; where it is not known there is no plan, and on-demand follows spot at once.
"""

from __future__ import annotations

import contextlib

from spotkeeper.reconcile.decide import fuses
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.select import FAR_H, HOUR_S, Runs, Way, Work
from spotkeeper.spec.cloud import Offer
from spotkeeper.spec.job import deadline_at, span_s
from spotkeeper.spec.record import Slot

LEAST_LEFT_S = 60.0


def work(draft: Draft) -> Work | None:
    """Where anybody knows how much is left: the job's own steps, else the job file's ``work``. None: nobody does."""
    spec = draft.seen.spec
    if spec is None:
        return None
    deadline, whole = _deadline(draft), None
    if spec.work is not None:
        with contextlib.suppress(ValueError):
            whole = span_s(spec.work)
    left, done = draft.seen.left_s, _done_s(draft)
    if left is None:  # where it trains, and has not told how far it is, as if it had just begun
        left = whole
    if left is None:
        return None if done is None else Work(FAR_H, None, 0.0, done / HOUR_S, _excess_h(draft, done))
    left = max(LEAST_LEFT_S, left)
    slack = planned = None
    if deadline is not None:
        total = max(left, whole or 0.0, 1.0)
        slack = (deadline - draft.now - left) / HOUR_S
        planned = max(0.0, deadline - draft.record.created - total) * left / total / HOUR_S
    return Work(left / HOUR_S, slack, planned or 0.0, (done or 0.0) / HOUR_S, _excess_h(draft, done))


def _deadline(draft: Draft) -> float | None:
    spec = draft.seen.spec
    if spec is None or spec.deadline is None:
        return None
    with contextlib.suppress(ValueError):
        return deadline_at(spec.deadline, draft.record.created)
    return None


def _done_s(draft: Draft) -> float | None:
    """Of its work, by its steps and their usual time. None: it has told of neither."""
    progress, step_s = draft.seen.progress, draft.seen.step_s
    return None if progress is None or not step_s else progress.step * step_s


def _excess_h(draft: Draft, done_s: float | None) -> float:
    """What the job has cost beyond on-demand for the work that is done, in on-demand hours of the whole gang.

    0 where it is not known: how much of the work is done, what on-demand costs, or with how many nodes it was done.
    """
    usd_hour, spec = fuses.on_demand(draft), draft.seen.spec
    if done_s is None or usd_hour <= 0 or spec is None or spec.size().min < spec.size().max:
        return 0.0
    return fuses.spent(draft) / usd_hour - done_s / HOUR_S


def runs(draft: Draft, slot: Slot) -> Runs:
    """What a rank has: for as long as its gang has trained so, that all who have the same are in one position."""
    age_s = max(0.0, draft.now - draft.record.gen_since)
    return Runs(slot.model, key(slot), age_s)


def key(slot: Slot) -> str:
    """Of the offer that a machine was got for."""
    return Offer(slot.pool, slot.zone, slot.model, 0.0).key()


def ways(draft: Draft) -> dict[str, Way]:
    """To zones where the gang's disks are not: they would follow by snapshots, as slowly as the last time."""
    spec, record = draft.seen.spec, draft.record
    if not record.gen or record.zone is None or spec is None or spec.spread:
        return {}
    way = Way(max(draft.times.copy_s, record.moved.s if record.moved is not None else 0.0))
    return {zone: way for zone in draft.seen.stack.zones() if zone != record.zone}


def max_wait_s(draft: Draft) -> float | None:
    spec = draft.seen.spec
    if spec is not None and spec.max_wait is not None:
        with contextlib.suppress(ValueError):
            return span_s(spec.max_wait)
    return None


def waits_since(draft: Draft) -> float:
    """Since when the gang has not trained, if it does not: its stop, or its submission. A retry is no new wait."""
    return draft.record.stop_since if draft.record.gen else draft.record.created
