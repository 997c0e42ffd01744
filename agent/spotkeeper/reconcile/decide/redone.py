"""What a stop cost in work: the step a generation goes on from, and how many steps before the stop are done again.

For the ledger alone; nothing is decided by it. The lowest member reports once a minute and at the end of its
processes. Where it died with its machine, the steps since its last report are reckoned from their usual time.
"""

from __future__ import annotations

from msgspec import Struct

from spotkeeper.reconcile.decide import kept
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.ledger import SURPRISES

REPORTS_S = 60.0  # virtual: no report for longer means that it stood still


class Work(Struct, frozen=True):
    """Steps; what a step and a save take in virtual seconds. None: not known."""

    step: int | None = None  # the one it goes on from
    again: int | None = None  # done before the stop, and again after it
    step_s: float | None = None
    save_s: float | None = None


def work(draft: Draft, cause: str) -> Work:
    """Of the stop that the next generation ends. ``cause``: why it begins."""
    record, progress = draft.record, draft.seen.progress
    if not record.gen:
        return Work()
    step, step_s, save_s = _restored(draft), draft.seen.step_s, draft.seen.save_s
    if progress is None or progress.gen != record.gen or step is None:
        return Work(step, None, step_s, save_s)
    return Work(step, max(0, _reached(draft, cause, progress.step, progress.at) - step), step_s, save_s)


def _restored(draft: Draft) -> int | None:
    commit = kept.newest(draft)
    if kept.given_up(draft):
        return None
    told = [f.value for f in draft.view.every(Kind.RELEASED) if f.gen == draft.record.gen and f.value.isdigit()]
    return max([commit[1] if commit is not None else 0, *map(int, told)])


def _reached(draft: Draft, cause: str, step: int, at: float) -> int:
    """A stop that was announced saved what it reached, or at least what was reported."""
    record, step_s = draft.record, draft.seen.step_s
    lowest = min(record.members, default=0)
    slot = draft.ranks[lowest].cur if lowest < len(draft.ranks) else None
    final = slot is not None and draft.view.ended(lowest, slot, record.gen)
    if final or not step_s or not cause.startswith(SURPRISES):
        return step
    return step + int(min(max(0.0, record.stop_since - at), REPORTS_S) / step_s)
