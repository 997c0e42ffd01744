"""A record whose writer's clock was ahead of ours: what happened "later than now" happened now.

Every round stamps the record with its own clock. Clouds keep them within seconds of each other; one that had jumped
would freeze whatever waits for time since then (an offer that is cold, the hour of the launch fuse, a roll call) until
the others have caught up. A round that finds this writes the record as it is believed before it decides anything. Pure.

Deadlines of machines (``Slot.notice``, ``Slot.ends``) are not ours to judge, and ``Record.hold_ends``, at which disks
go, is never brought forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from msgspec.structs import replace

from spotkeeper.spec.record import Phase, Rank, Record, Slot

SKEW_S = 60.0  # of clocks that are as they should be, with room: Google promises less than a second

log = logging.getLogger("spotkeeper.reconcile")


def believed(record: Record, now: float) -> Record:
    """The record itself, unless something in it is said to have happened after ``now`` (virtual unix seconds)."""
    ahead = max(_happened(record)) - now
    if ahead <= SKEW_S or record.phase is Phase.DONE:
        return record
    log.warning("job %s: a function's clock was %.0f s ahead; those times are taken as now", record.job, ahead)

    def past(at: float) -> float:
        return min(at, now)

    def maybe(at: float | None) -> float | None:
        return None if at is None else past(at)

    def until(at: float) -> float:
        """As far away as it was by the clock that said so, or less."""
        return at if at <= now else max(now, at - ahead)

    def slot(one: Slot | None) -> Slot | None:
        return None if one is None else replace(one, since=past(one.since))

    def rank(one: Rank) -> Rank:
        refused_at, vacant_since = past(one.refused_at), past(one.vacant_since)
        return replace(one, cur=slot(one.cur), next=slot(one.next), refused_at=refused_at, vacant_since=vacant_since)

    fuses = record.fuses
    beyond_h = max(0.0, fuses.spent_at - now) / 3600.0
    return replace(
        record,
        gen_since=past(record.gen_since),
        stop_since=past(record.stop_since),
        stop_deadline=None if record.stop_deadline is None else until(record.stop_deadline),
        roll=None if record.roll is None else replace(record.roll, since=past(record.roll.since)),
        move=None if record.move is None else replace(record.move, since=past(record.move.since)),
        roll_at=past(record.roll_at),
        busy_at=past(record.busy_at),
        dry_since=maybe(record.dry_since),
        short_since=maybe(record.short_since),
        bout_until=until(record.bout_until),
        hold_until=None if record.hold_until is None else until(record.hold_until),
        ranks=tuple(map(rank, record.ranks)),
        budget=replace(record.budget, loss_times=tuple(map(past, record.budget.loss_times))),
        fuses=replace(
            fuses,
            hour=past(fuses.hour),
            doubted=past(fuses.doubted),
            closed_until=until(fuses.closed_until),
            spent=max(0.0, fuses.spent - beyond_h * (fuses.usd_hour or 0.0)),  # of hours that have not been
            spent_at=past(fuses.spent_at),
            swaps=tuple(map(past, fuses.swaps)),
        ),
        looked=tuple(replace(look, at=past(look.at)) for look in record.looked),
        moved=None if record.moved is None else replace(record.moved, at=past(record.moved.at)),
    )


def _happened(record: Record) -> Iterator[float]:
    fuses = record.fuses
    yield from (record.gen_since, record.stop_since, record.roll_at, record.busy_at)
    yield from (fuses.hour, fuses.doubted, fuses.spent_at, *fuses.swaps, *record.budget.loss_times)
    yield from (one.at for one in (*record.looked, record.moved) if one is not None)
    yield from (each.since for each in (record.roll, record.move) if each is not None)
    yield from (at for at in (record.dry_since, record.short_since) if at is not None)
    for rank in record.ranks:
        yield rank.refused_at
        yield rank.vacant_since
        if rank.cur is not None:
            yield rank.cur.since
        if rank.next is not None:
            yield rank.next.since


__all__ = ["SKEW_S", "believed"]
