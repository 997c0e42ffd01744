"""Slow machines: what their agents say of them, and a swap where the job file wants one.

In a synchronous gang all wait for the slowest, so one slow machine costs what all of them cost. A swap costs a
machine beside it for a boot, and one stop. There is one at a time and a few an hour at most, so that a job that is
slow by nature cannot burn machines; a static node stays, for its data is on its own disk.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Slot

WISH = "straggler"
CAUSE = "swap of a straggler"
HOUR_S = 3600.0


def step(draft: Draft, *, calm: bool) -> None:
    """Wish for another machine in the place of the slowest, or take that back. ``calm``: no need is under way."""
    for index, rank in enumerate(draft.ranks):
        if rank.wish == WISH and not draft.record.stop and rank.cur is not None and _caught_up(draft, index, rank.cur):
            draft.put(index, wish=None)
    spec, record = draft.seen.spec, draft.record
    if spec is None or spec.stragglers != "replace" or not calm or draft.seen.draining:
        return
    if record.stop or record.roll or record.pause or record.move or draft.now < record.gen_since + draft.times.settle_s:
        return
    lags = {index: slowness for index, slot in draft.members() if (slowness := lag(draft, index, slot))}
    recent = tuple(at for at in record.fuses.swaps if draft.now - at < HOUR_S)
    if not lags or len(recent) >= draft.times.swaps_hour:
        return
    draft.set(fuses=replace(record.fuses, swaps=(*recent, draft.now)))
    draft.put(max(lags, key=lags.__getitem__), wish=WISH, refused=())


def lag(draft: Draft, index: int, slot: Slot) -> int:
    """How slow its agent says it is in this generation, in percent of the gang's middle; 0: it keeps up."""
    if slot.model is Model.STATIC:
        return 0
    gen = draft.record.gen
    said = [fact.value.partition("-") for fact in draft.view.said(index, slot, Kind.LAGS, gen)]
    over = {fact.value for fact in draft.view.said(index, slot, Kind.KEEPS_UP, gen)}
    return max((int(percent) for which, _, percent in said if which not in over), default=0)


def _caught_up(draft: Draft, index: int, slot: Slot) -> bool:
    """Whether all that it said of its slowness is over. A generation in which it says nothing proves nothing."""
    said = {(fact.gen, fact.value.partition("-")[0]) for fact in draft.view.said(index, slot, Kind.LAGS)}
    return said <= {(fact.gen, fact.value) for fact in draft.view.said(index, slot, Kind.KEEPS_UP)}
