"""Computes a job's progress (work done and left, deadline, cost) for the choice of machines, and work lost by stops.

Safety does not depend on it. If the work is unknown, the job goes on-demand as soon as spot is refused. Lost work is
only for the ledger: the lowest member reports its step once or twice a minute and when its processes end. If its
machine was lost, the steps since the last report are estimated from the usual time of a step.
"""

from __future__ import annotations

import contextlib

from msgspec import Struct

from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.job import deadline_at, span_s
from spotkeeper.contract.ledger import SURPRISES
from spotkeeper.contract.record import Slot
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import egress, limits
from spotkeeper.reconcile.select.offers import FAR_H, HOUR_S, MoveCost, Runs
from spotkeeper.reconcile.select.rule import Work

LEAST_LEFT_S = 60.0
REPORTS_S = 60.0  # interval of progress reports, virtual seconds


def work(draft: Draft) -> Work | None:
    """Return the job's work, slack and excess cost, from its reported steps or its file's ``work``; None: unknown."""
    spec = draft.snapshot.spec
    if spec is None:
        return None
    deadline, whole = _deadline(draft), None
    if spec.work is not None:
        with contextlib.suppress(ValueError):
            whole = span_s(spec.work)
    left, done = draft.snapshot.left_s, _done_s(draft)
    if left is None:  # without a report, assume that all work is left
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
    spec = draft.snapshot.spec
    if spec is None or spec.deadline is None:
        return None
    with contextlib.suppress(ValueError):
        return deadline_at(spec.deadline, draft.record.created)
    return None


def _done_s(draft: Draft) -> float | None:
    """Return the work done, virtual seconds, by steps and their usual time; None: not reported."""
    progress, step_s = draft.snapshot.progress, draft.snapshot.step_s
    return None if progress is None or not step_s else progress.step * step_s


def _excess_h(draft: Draft, done_s: float | None) -> float:
    """Return how much more the job has cost than its work would cost on-demand, in on-demand hours of the gang.

    0 if the work done, the on-demand price or the number of nodes that did the work is unknown.
    """
    usd_hour, spec = limits.on_demand(draft), draft.snapshot.spec
    if done_s is None or usd_hour <= 0 or spec is None or spec.size().min < spec.size().max:
        return 0.0
    return limits.spent(draft) / usd_hour - done_s / HOUR_S


def runs(draft: Draft, slot: Slot) -> Runs:
    """Return the slot's machine for ``select()``; its age is the time since the newest generation began."""
    age_s = max(0.0, draft.now - draft.record.gen_since)
    return Runs(slot.model, key(slot), age_s)


def key(slot: Slot) -> str:
    """Return the key of the offer that the slot's machine came from."""
    return Offer(slot.pool, slot.zone, slot.model, 0.0, reservation=slot.reservation).key()


def move_costs(draft: Draft) -> dict[str, MoveCost]:
    """Return the cost of coming to each other zone, with the time that copying the disks took in the last move.

    Before the first generation there is nothing to copy, but the job's data may lie in another region.
    """
    spec, record, zones = draft.snapshot.spec, draft.record, draft.snapshot.stack.zones()
    if spec is None or (spec.spread and record.gen):
        return {}
    if not record.gen:
        return {zone: MoveCost(0.0, usd) for zone in zones if (usd := egress.usd(draft, zone))}
    if record.zone is None:
        return {}
    copy_s = max(draft.times.copy_s, record.moved.s if record.moved is not None else 0.0)
    return {zone: MoveCost(copy_s, egress.usd(draft, zone)) for zone in zones if zone != record.zone}


def max_wait_s(draft: Draft) -> float | None:
    spec = draft.snapshot.spec
    if spec is not None and spec.max_wait is not None:
        with contextlib.suppress(ValueError):
            return span_s(spec.max_wait)
    return None


def waits_since(draft: Draft) -> float:
    """Return when the present wait began: at the stop or the submission. A retry begins no new wait."""
    return draft.record.stop_since if draft.record.gen else draft.record.created


def spot_wait_ends(draft: Draft) -> float | None:
    """Return when a job that buys only spot has lacked machines for ``max_wait``, if the market stays without.

    None: its policy is another one, its file has no ``max_wait``, or the market is not the obstacle now.
    """
    spec, since, most_s = draft.snapshot.spec, draft.record.market_since, max_wait_s(draft)
    if spec is None or spec.policy != "spot" or since is None or most_s is None:
        return None
    return since + max(0.0, most_s - draft.record.market_wait_s)


def spot_wait_over(draft: Draft) -> bool:
    ends = spot_wait_ends(draft)
    return ends is not None and draft.now >= ends


# -- work lost by a stop


class LostWork(Struct, frozen=True):
    """The work that a stop loses; None: unknown.

    Attributes:
        step: the step from which the next generation continues.
        again: the number of steps that must be repeated.
        step_s, save_s: how long a step and a save take, virtual seconds.
    """

    step: int | None = None
    again: int | None = None
    step_s: float | None = None
    save_s: float | None = None


def lost_work(draft: Draft, cause: str) -> LostWork:
    """Return the work lost by the stop before the next generation. ``cause``: why that generation begins."""
    record, progress = draft.record, draft.snapshot.progress
    if not record.gen:
        return LostWork()
    step, step_s, save_s = _restored(draft), draft.snapshot.step_s, draft.snapshot.save_s
    if progress is None or progress.gen != record.gen or step is None:
        return LostWork(step, None, step_s, save_s)
    return LostWork(step, max(0, _reached(draft, cause, progress.step, progress.at) - step), step_s, save_s)


def _restored(draft: Draft) -> int | None:
    commit = location.newest(draft)
    if location.given_up(draft):
        return None
    told = [f.value for f in draft.queries.every(Kind.RELEASED) if f.gen == draft.record.gen and f.value.isdecimal()]
    return max([commit[1] if commit is not None else 0, *map(int, told)])


def _reached(draft: Draft, cause: str, step: int, at: float) -> int:
    """Return the last step before the stop: as reported, or estimated if the stop was a surprise (a loss, a crash)."""
    record, step_s = draft.record, draft.snapshot.step_s
    lowest = min(record.members, default=0)
    slot = draft.nodes[lowest].cur if lowest < len(draft.nodes) else None
    final = slot is not None and draft.queries.ended(lowest, slot, record.gen)
    if final or not step_s or not cause.startswith(SURPRISES):
        return step
    return step + int(min(max(0.0, record.stop_since - at), REPORTS_S) / step_s)
