"""Handles nodes without a machine: records why they wait, and gives up a gang that gets only some of its machines.

All machines of a gang are bought or none, since machines that cannot train yet cost money.

================= ===================================== ==================================================
shortage          problem                               solution
================= ===================================== ==================================================
the stack's caps  two gangs each take a part of what    a gang requests nothing until the caps have room
                  is left, and neither can start        for all machines that it lacks
the market        some machines are paid for while      after ``gang_s`` all are released; the job goes
                  they wait for the others              on hold and retries, at growing intervals
================= ===================================== ==================================================

So a try costs at most what all machines of the gang but one cost in the time ``gang_s``. The waits between tries are 1,
2, 4 and then always 8 times ``gang_s``. Nothing is released if all machines are static, while ``max_wait`` still
delays on-demand, or while the job takes over machines of others (``queue/takeover.py``).

Under ``policy: spot`` no other machines follow, so ``max_wait`` ends the wait: the job goes on hold until a resume.
"""

from __future__ import annotations

from spotkeeper.contract.job import pools_of
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Node
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import DAY_S, Draft
from spotkeeper.reconcile.decide.job import limits, progress
from spotkeeper.reconcile.decide.provisioning import offers
from spotkeeper.reconcile.decide.queue import takeover
from spotkeeper.reconcile.decide.snapshot import admitted
from spotkeeper.reconcile.select.offers import time_of_day

SELDOM = 8  # longest time between two tries, as a multiple of gang_s

# -- why a node has no machine


def nothing(draft: Draft, index: int, capped: set[Model]) -> bool:
    """Record why this node gets no machine and since when, and let refused offers expire.

    ``capped``: provisioning models of the offers that were not refused but exceed the stack's caps. Returns whether the
    caps are the only obstacle.
    """
    node = draft.nodes[index]
    if node.cur is not None:
        return False
    if machine := location.bound(draft, index):
        why = location.only(draft, index)
        say(draft, index, f"waiting for static machine {machine}: {why}; to go on without it: {draft.record.go_back()}")
        return False
    if not capped and not _buys(draft):
        say(draft, index, "waiting for a static machine: all are in use or down")
        return False
    sold_out = not capped or (capped == {Model.ON_DEMAND} and _sold_out(draft, node))
    if not sold_out:
        others = "waiting for machines that other jobs give up: "
        why = "waiting for the job's last machines to go: " if _leaving(draft) else others
        say(draft, index, f"{why}until then, pools or stack are at their limits")
        return True
    if not capped and node.refused and draft.now >= node.refused_at + draft.times.cold_s:
        draft.put(index, refused=())
    draft.sold_out = True
    why = _no_quota(draft, node) or _above_max_price(draft, index) or _no_offers(draft, index, bool(capped))
    until = on_demand_from(draft, index)
    say(draft, index, why if until is None else f"{why}; on-demand from {time_of_day(until)} at the latest")
    if draft.record.dry_since is None:
        draft.set(dry_since=draft.now)
    return False


def _leaving(draft: Draft) -> bool:
    """Whether machines that the job has given up or lost still count against the caps."""
    slots = {(at, slot.attempt) for at, node in enumerate(draft.nodes) for slot in (node.cur, node.next) if slot}
    return any((one.node, one.attempt) not in slots for one in draft.queries.own_grants() if one.machine is None)


def say(draft: Draft, index: int, reason: str) -> None:
    """Record and log why a node waits, if the reason is new."""
    if draft.nodes[index].cur is None and draft.record.reason != reason:
        draft.set(reason=reason)
        draft.log(Event.REFUSED, f"wait.v{draft.before.ver + 1}", node=index, cause="wait", detail=reason)


def on_demand_from(draft: Draft, index: int) -> float | None:
    """Return when on-demand joins the node's offers, virtual unix seconds; None: it has joined, or never will."""
    node = draft.nodes[index]
    return offers.selection(draft, node, offers.home_zone(draft, node), pool=draft.pool(index)).until


def _buys(draft: Draft) -> bool:
    spec = draft.snapshot.spec
    return spec is not None and any(pool.kind != "static" for pool in pools_of(spec, draft.snapshot.stack))


def _sold_out(draft: Draft, node: Node) -> bool:
    spot = f"/{Model.SPOT.value}"
    return draft.now < node.refused_at + draft.times.cold_s and any(key.endswith(spot) for key in node.refused)


def _no_quota(draft: Draft, node: Node) -> str:
    """Return a text on the used-up quota and where to raise it; "" if the cloud refused for capacity."""
    stack = draft.snapshot.stack
    if not node.quota:
        return ""
    page = f"https://console.cloud.google.com/iam-admin/quotas?project={stack.project}"
    if stack.cloud == "aws":
        page = f"https://{stack.region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas"
    return f"waiting for quota: {node.quota}; raise it at {page}"


def _above_max_price(draft: Draft, index: int) -> str:
    spec, zone, only = draft.snapshot.spec, offers.bound_to(draft), draft.pool(index)
    if spec is None or spec.max_price is None or spec.policy == "on-demand":
        return ""
    told = {(one.pool, one.zone): one.price for one in draft.snapshot.market if one.model is Model.SPOT}
    prices = [
        usd
        for pool in pools_of(spec, draft.snapshot.stack)
        if pool.kind == "spot" and only in ("", pool.name)
        for at, listed in pool.prices.items()
        if zone in (None, at) and (usd := told.get((pool.name, at)) or listed.spot) is not None
    ]
    least = min(prices, default=0.0)
    if least <= spec.max_price:
        return ""
    where = f"pool {only}" if only else zone or "the pools of the job"
    cheapest = f"the cheapest spot machine in {where} costs ${least:.2f} an hour"
    return f"waiting: max_price is ${spec.max_price:g}, and {cheapest}"


def _no_offers(draft: Draft, index: int, capped: bool) -> str:
    """Return why no offer is left: spot was refused, and on-demand was refused too or exceeds ``max_on_demand``."""
    spec, where = draft.snapshot.spec, offers.bound_to(draft) or "any zone"
    where += f" (pool {draft.pool(index)})" if draft.pool(index) else ""
    if offers.out_of_pools(draft):
        return f"waiting: zone {where} was removed from the job's pools, so the job moves as soon as it can"
    if capped:
        return f"waiting for spot capacity in {where}: the pools' max_on_demand is reached"
    if spec is None or spec.max_on_demand is None or spec.policy == "spot" or offers.on_demand_left(draft) > 0:
        return f"waiting for capacity in {where}"
    if spec.policy == "on-demand":
        return f"waiting: the job's max_on_demand of {spec.max_on_demand} is reached"
    return f"waiting for spot capacity in {where}: the job's max_on_demand of {spec.max_on_demand} is reached"


# -- the longest wait under ``policy: spot``


def limit_wait(draft: Draft) -> None:
    """Hold a job that buys only spot, once the market has had no machines for it for ``max_wait``.

    The clock runs while the cloud refuses requests, also while a gang that never gets all machines has used up its
    launches or moves to another zone. It stops while all machines are there, or queue or caps allow none. A hold leaves
    a move as it is: its copies of the disks serve the resumed job.
    """
    record, spec = draft.record, draft.snapshot.spec
    if spec is None or spec.policy != "spot" or spec.max_wait is None:
        return
    probing = any(node.probing for node in draft.nodes)  # another zone, since its own has none
    if (draft.sold_out or probing or _launched_out(draft) or _leaves_dry_zone(draft)) and not trains(draft):
        if record.market_since is None:
            draft.set(market_since=draft.now)
        if progress.spot_wait_over(draft):
            told = (
                f"it did not get its spot machines within max_wait ({spec.max_wait}), and `policy: spot` buys no others"
            )
            draft.hold(Hold.MAX_WAIT, f"{record.reason}; {told}", ends=draft.now + spec.hold_days * DAY_S)
    elif record.move is None and not draft.wanted and not _requested(draft):
        draft.stop_wait()


def _leaves_dry_zone(draft: Draft) -> bool:
    """Whether a job that the market refused a machine moves to a zone where no machine waits for it either."""
    moves = draft.record.move is not None and draft.record.market_since is not None
    return moves and not any(node.next is not None for node in draft.nodes)


def _launched_out(draft: Draft) -> bool:
    """Whether a job that the market refused a machine may request none now, since it had too many launches."""
    vacant = (index for index in draft.filled() if draft.nodes[index].cur is None)
    return draft.record.market_since is not None and any(limits.bars(draft, index) for index in vacant)


def _requested(draft: Draft) -> bool:
    """Whether the cloud has not yet made a machine that the job requested: it may still refuse it."""
    slots = [draft.nodes[index].cur for index in draft.filled()]
    return any(slot is not None and not admitted(slot) for slot in slots) and None not in slots


# -- all or nothing


def trains(draft: Draft) -> bool:
    return draft.record.gen > 0 and not draft.record.stop


def forgo(draft: Draft) -> None:
    """Withdraw this pass's requests for grants, if the caps have no room for all machines that the gang lacks."""
    spec = draft.snapshot.spec
    missing = [grant for grant in draft.wanted if draft.nodes[grant.node].cur is None]
    there = sum(draft.nodes[index].cur is not None for index in draft.filled())
    if spec is not None and not trains(draft) and there + len(missing) < min(spec.size().min, draft.size()):
        draft.forgo(missing)


def give_back(draft: Draft) -> None:
    """Hold the job and release all machines, if some have waited too long for the rest. The job retries later."""
    record, times = draft.record, draft.times
    if trains(draft) or record.move is not None or record.pause or draft.wanted or draft.snapshot.blind:
        return
    vacant = [index for index in draft.filled() if draft.nodes[index].cur is None]
    if not vacant or draft.snapshot.draining:
        return
    there = len(vacant) < draft.size()
    if (record.short_since is not None) is not there:  # a change of zone keeps it: the machines still cost money
        draft.set(short_since=draft.now if there else None)
    slots = (node.cur for node in draft.nodes)
    count = sum(slot is not None and admitted(slot) and slot.model is not Model.STATIC for slot in slots)
    since = draft.record.short_since
    if since is None or not count or draft.now < since + times.gang_s:
        return
    if takeover.under_way(draft.snapshot.allocation.claim(record.job), draft.now):
        return
    until = draft.now + times.gang_s * min(SELDOM, 2**record.hold_count)
    if (at := on_demand_from(draft, vacant[0])) is not None:
        if draft.snapshot.spec is not None and draft.snapshot.spec.max_wait is not None:
            return
        until = min(until, at)
    if (ends := progress.spot_wait_ends(draft)) is not None:
        until = min(until, max(ends, draft.now))
    told = f"released {count} machine{'s' * (count > 1)} that waited for the other machines"
    draft.hold(Hold.CAPACITY, f"{record.reason or 'no capacity'}; {told}", until=until)
