"""Money fuses: what stops spending when the fault is ours, or somebody makes us believe that machines die.

=========== ===================================================== ===================================
fuse        blows when                                            then
=========== ===================================================== ===================================
launches    a rank, or the whole job, was given too many machines no further machine within that hour
            within the hour; refused ones do not count
breaker     more than a fifth of the ranks, two at least, vanish  no replacement, and nobody is given
            within a minute for reasons that are no preemption    up for silence, for two minutes
spend       the job has spent its ``max_usd`` since it was        all save and stop; a hold, ended by
            submitted or last resumed                             resume (as much again, or another cap
                                                                  in the job file) or hold_days
=========== ===================================================== ===================================

The stack's caps on machines are in ``alloc``; fuses that need no function (``maxRunDuration``, the agent's
lease, the boot watchdog) are on the machines. What was spent is an estimate, for a
fuse and for choices (``course``), not for a bill: what the machines cost an hour is noted whenever it changes,
and one that is being given back counts until it is off. Disks are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.cloud import VmStatus
from spotkeeper.spec.context import pools_of
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Phase, Rank, Slot, SlotState

SHARE = 0.2  # of the ranks; fewer may well have failed by themselves
AT_LEAST = 2
HOUR_S = 3600.0
NOTED = 0.01  # a change of what an hour costs: below that no record is written for it


# -- launches


def bars(draft: Draft, index: int) -> str:
    """Why no machine may be asked for now, for this rank; "" where one may."""
    fuses, times = draft.record.fuses, draft.times
    if draft.now < fuses.closed_until and draft.ranks[index].cur is None:
        return "waiting: too many machines vanished at once, and not by preemption"
    if draft.now >= fuses.hour + HOUR_S:
        return ""
    if draft.ranks[index].launches >= times.launches_rank:
        return f"waiting: rank {index} was given {times.launches_rank} machines within an hour"
    whole = times.launches_rank + times.launches_job * len(draft.ranks)
    if sum(rank.launches for rank in draft.ranks) >= whole:
        return f"waiting: the job was given {whole} machines within an hour"
    return ""


def tell(draft: Draft, index: int, why: str) -> None:
    """Once, in the record and in the ledger."""
    if draft.ranks[index].cur is None and draft.record.reason != why:
        draft.set(reason=why)
        draft.log(Event.FUSE, f"v{draft.before.ver + 1}", rank=index, detail=why)


def launched(draft: Draft, index: int) -> None:
    """An intent is written: count it, in the hour that began with the first one."""
    if draft.now >= draft.record.fuses.hour + HOUR_S:
        draft.set(fuses=replace(draft.record.fuses, hour=draft.now))
        draft.set(ranks=tuple(replace(rank, launches=0) if rank.launches else rank for rank in draft.ranks))
    draft.put(index, launches=draft.ranks[index].launches + 1)


def refused(draft: Draft, index: int, slot: Slot) -> None:
    """It came to nothing and cost nothing: waiting for capacity blows no fuse, and what it was counted for is back."""
    draft.put(index, launches=max(0, draft.ranks[index].launches - 1))
    counted = price(draft, slot) * max(0.0, draft.now - slot.since) / HOUR_S
    draft.set(fuses=replace(draft.record.fuses, spent=draft.record.fuses.spent - counted))


# -- the breaker


def _mass(draft: Draft, count: int) -> bool:
    return count >= AT_LEAST and count > SHARE * len(draft.ranks)


def deaf(draft: Draft, missing: int) -> bool:
    """Whether so many do not answer a roll call that it may be us who do not hear: they get more time, once."""
    roll, fuses = draft.record.roll, draft.record.fuses
    assert roll is not None
    if fuses.closed_until < roll.since and _mass(draft, missing):
        _trip(draft, f"{missing} of {len(draft.ranks)} ranks do not answer")
    return draft.now < draft.record.fuses.closed_until


def doubt(draft: Draft) -> None:
    """A rank vanished for a reason that is no preemption. Call it for each."""
    fuses = draft.record.fuses
    recent = draft.now <= fuses.doubted + draft.times.breaker_window_s
    count = fuses.doubts + 1 if recent else 1
    draft.set(fuses=replace(fuses, doubts=count, doubted=fuses.doubted if recent else draft.now))
    just_now = draft.now <= fuses.closed_until + draft.times.breaker_window_s
    if _mass(draft, count) and not just_now:
        _trip(draft, f"{count} of {len(draft.ranks)} ranks vanished at once, and not by preemption")


def is_doubtful(slot: Slot, cause: str) -> bool:
    """Whether the loss of this machine can hardly be a preemption: it fell silent, or nobody preempts its kind."""
    return cause == "silence" or (cause == "loss" and slot.model is not Model.SPOT)


def _trip(draft: Draft, why: str) -> None:
    draft.set(fuses=replace(draft.record.fuses, closed_until=draft.now + draft.times.breaker_s))
    draft.log(Event.FUSE, f"v{draft.before.ver + 1}.breaker", cause="breaker", detail=why)


# -- the spend cap


def step(draft: Draft) -> None:
    """The cap is reached: everybody saves and stops, and ``asks.paused`` makes it a hold."""
    _note(draft)
    if not spent_up(draft) or draft.record.pause or draft.record.phase is not Phase.RUN:
        return
    assert draft.seen.spec is not None
    why = _told(draft, draft.seen.spec.max_usd or 0.0)
    draft.set(pause=why)
    draft.halt(draft.now + (draft.save_s() + draft.times.stop_s if draft.members() else 0.0), "spend")
    draft.log(Event.FUSE, f"v{draft.before.ver + 1}.spend", cause="spend", detail=why)


def _told(draft: Draft, cap: float) -> str:
    """Which allowance is spent: after a resume for as much again, the job file's cap is not the sum.

    The sum itself is not told: it grows until the machines are gone, and status shows it as it is then.
    """
    before = draft.record.fuses.forgiven
    return f"max_usd: ${cap:.2f} is spent" + (f" since it was resumed at ${before:.2f}" if before else "")


def spent_up(draft: Draft) -> bool:
    spec = draft.seen.spec
    if spec is None or spec.max_usd is None:
        return False
    return spent(draft) - draft.record.fuses.forgiven >= spec.max_usd


def forgive(draft: Draft) -> None:
    """Somebody resumes it knowingly: from here on it may spend as much again.

    A job file that came with the resume counts already: with a higher cap, only the rest is left.
    """
    if spent_up(draft):
        draft.set(fuses=replace(draft.record.fuses, forgiven=spent(draft)))


def accrue(draft: Draft) -> None:
    """Before a record is written: what its machines have cost since the last time."""
    now, rate = spent(draft), _rate(draft, draft.ranks)
    draft.set(fuses=replace(draft.record.fuses, spent=now, spent_at=draft.now, usd_hour=rate))


def _note(draft: Draft) -> None:
    """Prices have changed, or a machine is off: from now on an hour costs something else."""
    fuses = draft.before.fuses
    if fuses.usd_hour is None:
        return
    rate = _rate(draft, draft.before.ranks)
    if abs(rate - fuses.usd_hour) > NOTED * fuses.usd_hour:
        draft.set(fuses=replace(draft.record.fuses, usd_hour=rate))


def spent(draft: Draft) -> float:
    """USD until now: what was noted, and what the machines cost since, at what they cost then."""
    fuses = draft.before.fuses
    hours = max(0.0, draft.now - fuses.spent_at) / 3600.0 if fuses.spent_at else 0.0
    rate = _rate(draft, draft.before.ranks) if fuses.usd_hour is None else fuses.usd_hour
    return max(0.0, draft.record.fuses.spent + hours * rate)  # less what this pass found refused


def _rate(draft: Draft, ranks: Sequence[Rank]) -> float:
    """USD an hour of these ranks' machines, static nodes included: the cap is on the sum that the job's status shows.

    While the job runs, machines that it has given up and that are still on are in it too.
    """
    slots = [slot for rank in ranks for slot in (rank.cur, rank.next) if slot is not None]
    if draft.record.phase is Phase.RUN:
        slots += _leaving(draft, ranks)
    some = {(slot.pool, slot.zone, slot.model): slot for slot in slots}
    prices = {key: price(draft, slot) for key, slot in some.items()}  # of 10,000 ranks' machines a few kinds
    return sum(prices[slot.pool, slot.zone, slot.model] for slot in slots)


def _leaving(draft: Draft, ranks: Sequence[Rank]) -> Iterator[Slot]:
    live = {(n, slot.attempt) for n, rank in enumerate(ranks) for slot in (rank.cur, rank.next) if slot is not None}
    for key, vms in draft.view.vms.items():
        if key not in live:
            for vm in vms:
                if vm.status is not VmStatus.DEAD and vm.model is not Model.STATIC:
                    yield Slot(vm.attempt, SlotState.ADMITTED, vm.pool, vm.zone, vm.model, draft.now)


def price(draft: Draft, slot: Slot) -> float:
    """USD an hour: what the cloud tells where it does, as for a choice; else the stack's price."""
    key = slot.pool, slot.zone, slot.model
    told = next((one.price for one in draft.seen.market if (one.pool, one.zone, one.model) == key), None)
    if told is not None:
        return told
    pool = draft.seen.stack.pool(slot.pool)
    listed = pool.prices.get(slot.zone) if pool is not None else None
    if listed is None:
        return 0.0
    usd = listed.of(slot.model)
    return listed.on_demand if usd is None else usd


def on_demand(draft: Draft) -> float:
    """USD an hour of the whole gang by list prices on-demand, as the dearest machines that it may have; 0: unknown.

    Nobody has noted what it had when: what a static node cost, or another machine type, is nothing that spot has lost.
    """
    spec, zone, size = draft.seen.spec, draft.record.zone, draft.size()
    found: list[float] = []
    for pool in pools_of(spec, draft.seen.stack) if spec is not None else ():
        usd = max((price.on_demand for z, price in pool.prices.items() if zone in (None, z)), default=0.0)
        found += [usd] * min(size, pool.max_nodes)
    return sum(sorted(found, reverse=True)[:size])


# -- when to look again


def due(draft: Draft) -> Iterator[float]:
    fuses, spec = draft.record.fuses, draft.seen.spec
    if fuses.closed_until > draft.now:
        yield fuses.closed_until
    if any(rank.cur is None and rank.launches for rank in draft.ranks) and fuses.hour + HOUR_S > draft.now:
        yield fuses.hour + HOUR_S
    if spec is None or spec.max_usd is None or draft.record.pause:
        return
    rate = _rate(draft, draft.before.ranks) if draft.before.gen else 0.0
    if rate > 0:
        left = spec.max_usd + fuses.forgiven - spent(draft)
        yield draft.now + max(draft.times.soon_s, left / rate * 3600.0)
