"""A gang is bought whole or not at all: machines that cannot train yet are paid for a bounded time only.

=============== ======================================================= =====================================
what is short   what some of its machines would do                      instead
=============== ======================================================= =====================================
the stack's     take what is left, as the next gang does, until neither  nothing is asked for until there is
caps            can have the rest                                       room for all that are missing
the market      wait, paid for, while the others are sought             after ``gang_s`` all are given back;
                                                                        the job holds and tries again, ever
                                                                        more seldom
=============== ======================================================= =====================================

So a try costs ``gang_s`` of all machines but one at the most, and tries come ``gang_s`` apart, then twice that, four
times, eight times. Static nodes are paid for in any case; ``max_wait`` is a time that somebody chose to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator

from spotkeeper.reconcile.decide import waits
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import admitted
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Hold, Slot

SELDOM = 8  # times gang_s between two tries, at the most


def trains(draft: Draft) -> bool:
    return draft.record.gen > 0 and not draft.record.stop


def forgo(draft: Draft) -> None:
    """There is no room for all that are missing: without them the others would wait for it, so none is asked for."""
    spec = draft.seen.spec
    missing = [grant for grant in draft.wanted if draft.ranks[grant.rank].cur is None]
    there = sum(draft.ranks[index].cur is not None for index in draft.filled())
    if spec is not None and not trains(draft) and there + len(missing) < min(spec.size().min, draft.size()):
        draft.forgo(missing)


def step(draft: Draft) -> None:
    """Some have waited for the rest for long enough: all are given back, and the job tries again later."""
    record, times = draft.record, draft.times
    if trains(draft) or record.move is not None or record.pause or draft.wanted or draft.seen.blind:
        return
    vacant = [index for index in draft.filled() if draft.ranks[index].cur is None]
    if not vacant or draft.seen.draining:
        return
    there = len(vacant) < draft.size()
    if (record.short_since is not None) is not there:  # from zone to zone it goes on: they are paid for in each
        draft.set(short_since=draft.now if there else None)
    since, count = draft.record.short_since, sum(1 for _ in _paid(draft))
    if since is None or not count or draft.now < since + times.gang_s:
        return
    until = draft.now + times.gang_s * min(SELDOM, 2**record.holds)
    if (asked := waits.on_demand_from(draft, vacant[0])) is not None:
        if draft.seen.spec is not None and draft.seen.spec.max_wait is not None:
            return
        until = min(until, asked)
    told = f"{count} machine{'s' * (count > 1)} that waited with it given back"
    draft.hold(Hold.CAPACITY, f"{record.reason or 'no capacity'}; {told}", until=until)


def _paid(draft: Draft) -> Iterator[Slot]:
    """Machines that are there and paid for by the hour."""
    for rank in draft.ranks:
        if rank.cur is not None and admitted(rank.cur) and rank.cur.model is not Model.STATIC:
            yield rank.cur
