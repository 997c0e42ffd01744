"""Limits on launches and spending, in case Spotkeeper has a fault or receives false reports of lost machines.

=========== ===================================================== ===================================
limit       reached when                                          then
=========== ===================================================== ===================================
launches    a node, or the whole job, was given too many machines no further machine within that hour
            within the hour; refused requests do not count
breaker     more than a fifth of the nodes (at least two) vanish  for two minutes no machine is
            within a minute, and not because of preemptions       replaced, or given up as silent
spend       the job has spent its ``max_usd`` since it was        all save and stop; a hold, until a
            submitted or last resumed                             resume allows ``max_usd`` again or
                                                                  ``hold_days`` are over
=========== ===================================================== ===================================

The stack's caps on machines are in ``allocation``; limits that work without the function (``maxRunDuration``, the
agent's lease, the boot watchdog) are on the machines. The money spent is an estimate for limits and choices, not a
bill: it is the sum over time of the hourly cost. A released machine counts until it is off. Disks do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.job import pools_of
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Node, Phase, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.draft import HOUR_S, Draft

SHARE = 0.2  # the share of the nodes that may fail independently of each other
AT_LEAST = 2
SPARE = 0.5  # share of the hourly launches that probes and backups may use; the rest replaces lost machines
NOTED = 0.01  # the record is updated when the hourly cost changes by more than this share


# -- launches


def bars(draft: Draft, index: int) -> str:
    """Return why no machine may be requested for this node now; "" if one may."""
    limits, times = draft.record.limits, draft.times
    if draft.now < limits.closed_until and draft.nodes[index].cur is None:
        return "waiting: too many machines vanished at once without preemption"
    if _new_hour(draft):
        return ""
    if draft.nodes[index].launches >= times.launches_node:
        return f"waiting: node {index} was given {times.launches_node} machines within an hour, which is the limit"
    whole = times.launches_node + times.launches_job * len(draft.nodes)
    if sum(node.launches for node in draft.nodes) >= whole:
        return f"waiting: the job was given {whole} machines within an hour, which is the limit"
    return ""


def spare(draft: Draft, nodes: Sequence[int]) -> bool:
    """Whether one more launch of each of these nodes leaves half of the hour's launches for losses."""
    times, size = draft.times, len(draft.nodes)
    every = sum(node.launches for node in draft.nodes) + len(nodes)
    job = every <= SPARE * (times.launches_node + times.launches_job * size) or _new_hour(draft)
    return job and all(node_spare(draft, index) for index in nodes)


def node_spare(draft: Draft, index: int) -> bool:
    """Whether one more launch of this node leaves half of its launches of the hour for losses."""
    return draft.nodes[index].launches + 1 <= SPARE * draft.times.launches_node or _new_hour(draft)


def _new_hour(draft: Draft) -> bool:
    return draft.now >= draft.record.limits.hour + HOUR_S


def tell(draft: Draft, index: int, why: str) -> None:
    """Record and log why a limit keeps a node waiting, if the reason is new."""
    if draft.nodes[index].cur is None and draft.record.reason != why:
        draft.set(reason=why)
        draft.log(Event.LIMIT, f"v{draft.before.ver + 1}", node=index, detail=why)


def launched(draft: Draft, index: int) -> None:
    """Count a launch of this node. The counts restart at 0 an hour after their first launch."""
    if _new_hour(draft):
        draft.set(limits=replace(draft.record.limits, hour=draft.now))
        draft.set(nodes=tuple(replace(node, launches=0) if node.launches else node for node in draft.nodes))
    draft.put(index, launches=draft.nodes[index].launches + 1)


def refused(draft: Draft, index: int, slot: Slot) -> None:
    """Take back the count and cost of a refused launch, so that a wait for capacity does not reach a limit."""
    draft.put(index, launches=max(0, draft.nodes[index].launches - 1))
    counted = price(draft, slot) * max(0.0, draft.now - slot.since) / HOUR_S
    draft.set(limits=replace(draft.record.limits, spent=draft.record.limits.spent - counted))


# -- the breaker


def _mass(draft: Draft, count: int) -> bool:
    return count >= AT_LEAST and count > SHARE * len(draft.nodes)


def deaf(draft: Draft, missing: int) -> bool:
    """Whether nodes that do not answer a roll call get more time, once in each roll call.

    They do if they are so many that the fault is probably the function's, not their machines'.
    """
    roll, limits = draft.record.roll, draft.record.limits
    assert roll is not None
    if limits.closed_until < roll.since and _mass(draft, missing):
        _trip(draft, f"{missing} of {len(draft.nodes)} nodes do not answer the roll call")
    return draft.now < draft.record.limits.closed_until


def count_unexplained(draft: Draft) -> None:
    """Count a node that vanished without a preemption. If too many vanish at once, the breaker stops replacements."""
    limits = draft.record.limits
    recent = draft.now <= limits.unexplained_since + draft.times.breaker_window_s
    count = limits.unexplained + 1 if recent else 1
    draft.set(
        limits=replace(limits, unexplained=count, unexplained_since=limits.unexplained_since if recent else draft.now)
    )
    just_now = draft.now <= limits.closed_until + draft.times.breaker_window_s
    if _mass(draft, count) and not just_now:
        _trip(draft, f"{count} of {len(draft.nodes)} nodes vanished at once without preemption")


def is_unexplained(slot: Slot, cause: str) -> bool:
    """Whether this loss can hardly be a preemption: the machine is silent, or not of a kind that clouds preempt."""
    return cause == "silence" or (cause == "loss" and slot.model is not Model.SPOT)


def _trip(draft: Draft, why: str) -> None:
    draft.set(limits=replace(draft.record.limits, closed_until=draft.now + draft.times.breaker_s))
    draft.log(Event.LIMIT, f"v{draft.before.ver + 1}.breaker", cause="breaker", detail=why)


# -- the spend cap


def step(draft: Draft) -> None:
    """Tell all nodes to save and stop if the job has spent its ``max_usd``; ``requests.paused`` then holds it."""
    _note(draft)
    if not spent_up(draft) or draft.record.pause or draft.record.phase is not Phase.RUN:
        return
    assert draft.snapshot.spec is not None
    why = _told(draft, draft.snapshot.spec.max_usd or 0.0)
    draft.set(pause=why)
    draft.halt(draft.now + (draft.save_s() + draft.times.stop_s if draft.members() else 0.0), "spend")
    draft.log(Event.LIMIT, f"v{draft.before.ver + 1}.spend", cause="spend", detail=why)


def _told(draft: Draft, cap: float) -> str:
    before = draft.record.limits.forgiven
    return f"max_usd: ${cap:.2f} is spent" + (
        f" since the last resume, when the job had cost ${before:.2f}" if before else ""
    )


def spent_up(draft: Draft) -> bool:
    spec = draft.snapshot.spec
    if spec is None or spec.max_usd is None:
        return False
    return spent(draft) - draft.record.limits.forgiven >= spec.max_usd


def forgive(draft: Draft) -> None:
    """At a resume, let a job that has spent its ``max_usd`` spend it once more: its cost so far no longer counts.

    If a new job file raised ``max_usd`` above that cost, the cost still counts, so the job may spend the difference.
    """
    if spent_up(draft):
        draft.set(limits=replace(draft.record.limits, forgiven=spent(draft)))


def accrue(draft: Draft) -> None:
    """Before a write of the record, add the cost of the job's machines since the last write."""
    now, rate = spent(draft), _rate(draft, draft.nodes)
    draft.set(limits=replace(draft.record.limits, spent=now, spent_at=draft.now, usd_hour=rate))


def _note(draft: Draft) -> None:
    """Record a new hourly cost, after a change of prices or when a machine is off."""
    limits = draft.before.limits
    if limits.usd_hour is None:
        return
    rate = _rate(draft, draft.before.nodes)
    if abs(rate - limits.usd_hour) > NOTED * limits.usd_hour:
        draft.set(limits=replace(draft.record.limits, usd_hour=rate))


def spent(draft: Draft) -> float:
    """Return what the job has cost until now, USD: the recorded sum plus the time since at the recorded rate."""
    limits = draft.before.limits
    hours = max(0.0, draft.now - limits.spent_at) / 3600.0 if limits.spent_at else 0.0
    rate = _rate(draft, draft.before.nodes) if limits.usd_hour is None else limits.usd_hour
    return max(0.0, draft.record.limits.spent + hours * rate)  # refused launches were subtracted


def _rate(draft: Draft, nodes: Sequence[Node]) -> float:
    """Return the cost of these nodes' machines, static machines included, USD per hour.

    While the job runs, superseded machines count until they are off.
    """
    slots = [slot for node in nodes for slot in (node.cur, node.next) if slot is not None]
    if draft.record.phase is Phase.RUN:
        slots += _leaving(draft, nodes)
    some = {(slot.pool, slot.zone, slot.model): slot for slot in slots}
    prices = {key: price(draft, slot) for key, slot in some.items()}  # 10,000 nodes have few kinds
    return sum(prices[slot.pool, slot.zone, slot.model] for slot in slots)


def _leaving(draft: Draft, nodes: Sequence[Node]) -> Iterator[Slot]:
    live = {(n, slot.attempt) for n, node in enumerate(nodes) for slot in (node.cur, node.next) if slot is not None}
    for key, vms in draft.queries.vms.items():
        if key not in live:
            for vm in vms:
                if vm.status is not VmStatus.DEAD and vm.model is not Model.STATIC:
                    yield Slot(vm.attempt, SlotState.ADMITTED, vm.pool, vm.zone, vm.model, draft.now)


def price(draft: Draft, slot: Slot) -> float:
    """Return the price of a slot's machine, USD per hour: the cloud's if known, otherwise the stack file's."""
    known = draft.queries.known(slot)
    if known is not None and known.price is not None:
        return known.price
    pool = draft.snapshot.stack.pool(slot.pool)
    listed = pool.prices.get(slot.zone) if pool is not None else None
    if listed is None:
        return 0.0
    usd = listed.of(slot.model)
    return listed.on_demand if usd is None else usd


def on_demand(draft: Draft) -> float:
    """Return the list price of the whole gang on-demand, USD per hour, on the most expensive allowed machines.

    0 if unknown. The record does not say when the gang had which machine types. So the highest price is compared with
    the job's cost: otherwise a job on expensive machine types could seem to cost more on spot than on-demand.
    """
    spec, zone, size = draft.snapshot.spec, draft.record.zone, draft.size()
    found: list[float] = []
    for pool in pools_of(spec, draft.snapshot.stack) if spec is not None else ():
        usd = max((price.on_demand for z, price in pool.prices.items() if zone in (None, z)), default=0.0)
        found += [usd] * min(spec.most_of(pool.name) if spec is not None and spec.machines else size, pool.max_machines)
    return sum(sorted(found, reverse=True)[:size])


# -- when the next round is due


def due(draft: Draft) -> Iterator[float]:
    limits, spec = draft.record.limits, draft.snapshot.spec
    if limits.closed_until > draft.now:
        yield limits.closed_until
    if any(node.cur is None and node.launches for node in draft.nodes) and limits.hour + HOUR_S > draft.now:
        yield limits.hour + HOUR_S
    if spec is None or spec.max_usd is None or draft.record.pause:
        return
    rate = _rate(draft, draft.before.nodes) if draft.before.gen else 0.0
    if rate > 0:
        left = spec.max_usd + limits.forgiven - spent(draft)
        yield draft.now + max(draft.times.soon_s, left / rate * 3600.0)
