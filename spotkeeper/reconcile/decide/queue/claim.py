"""What a job's round tells the queue, and what it does when its reservation changes. Pure.

A round writes its job's claim into the allocation together with its grants. It acts on a smaller reservation only once
that is written: an elastic job shrinks, another one saves, stops and goes on hold (``Hold.QUEUE``), and comes back by
itself with its next reservation. A larger reservation counts at once, since its grants are written with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Grant, Short, Stop, list_price, resource
from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.job import PRIORITIES, JobSpec, allowed, pools_of, start_s
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.names import JOB_NAME
from spotkeeper.contract.record import Hold, Node, Phase
from spotkeeper.contract.stack import DEFAULT_TEAM, Model
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import resize, rungs
from spotkeeper.reconcile.decide.provisioning import offers
from spotkeeper.reconcile.decide.queue import order, reclaim, use
from spotkeeper.reconcile.decide.queue.scheduler import schedule
from spotkeeper.reconcile.decide.snapshot import admitted

LOST_SPOT_S = 300.0  # what giving up a spot machine costs beside the restart: the next one may be long in coming
ROUGHLY = 0.25  # a claim is written again if its estimates change by more than this share
DECIDED = (  # fields of a claim that stay as they were written
    "waits", "waited_s", "reserved_at", "started", "ending", "lapsed", "recalls", "barred", "gap", "whom", "took",
)  # fmt: skip
ASKED = 3  # most running jobs that are asked at once what taking their machines would cost; ticks ask all


def planned(draft: Draft) -> Allocation:
    """Return the allocation with this job's claim as it is now, and all reservations that follow from it.

    It is the allocation that was read if the claim is unchanged; ticks see to what only time changes.
    """
    read = draft.snapshot.allocation
    if draft.snapshot.blind:
        return read
    old, new = read.claim(draft.record.job), claim(draft)
    alone = not read.claims and new is not None and not new.sweep
    if old == new or (old is None and new is not None and new.reserved == new.max and alone):
        return read  # nobody has to know of a job without a claim that has its machines: its grants say so
    if draft.planned is None or draft.planned[0] != new:
        draft.planned = new, _with(draft, old, new)
    return draft.planned[1]


def released(draft: Draft, dropped: Sequence[Grant]) -> Allocation:
    """Return the planned allocation with the cost of these grants folded in, and what their room lets others have."""
    new, stack = planned(draft), draft.snapshot.stack
    keys = {(grant.job, grant.node, grant.attempt) for grant in dropped}
    gone, kept = list[Grant](), list[Grant]()
    for grant in new.grants:
        (gone if (grant.job, grant.node, grant.attempt) in keys else kept).append(grant)
    used = use.folded(new, gone, stack, draft.now)
    own = claim(draft, [grant for grant in kept if grant.job == draft.record.job])
    claims = tuple(one for one in new.claims if one.job != draft.record.job or own is not None)
    return schedule(replace(new, claims=claims, use=used, grants=tuple(kept)), stack, draft.now)


def _with(draft: Draft, old: Claim | None, new: Claim | None) -> Allocation:
    read = draft.snapshot.allocation
    if old is not None and new is not None and new.team != old.team:
        read = use.settled(read, draft.record.job, draft.snapshot.stack, draft.now)
    claims = [new if claim.job == draft.record.job else claim for claim in read.claims]
    if old is None:
        claims.append(new)
    changed = replace(read, claims=tuple(claim for claim in claims if claim is not None))
    return schedule(changed, draft.snapshot.stack, draft.now)


def woken(before: Allocation, after: Allocation) -> frozenset[str]:
    """Return the jobs that need a round because of this change.

    These are jobs whose reservation changed, or for which room came; and if a job has begun to wait, some jobs whose
    machines it may get: their rounds say what taking them would cost.
    """
    old = {claim.job: claim for claim in before.claims}
    granted = Counter(grant.job for grant in after.grants)
    room = len(after.grants) < len(before.grants)
    found = [
        claim.job
        for claim in after.claims
        if claim.reserved != (old[claim.job].reserved if claim.job in old else 0)
        or (room and claim.reserved > granted[claim.job])
    ]
    if any(claim.waiting and not (claim.job in old and old[claim.job].waiting) for claim in after.claims):
        known = {claim.job: claim.priority for claim in after.claims}
        found += sorted(granted, key=lambda job: (known.get(job, 0), job))[:ASKED]
    return frozenset(found)


def reserved(draft: Draft) -> int:
    """Return how many machines the job may have, once this pass's allocation is written."""
    own = planned(draft).claim(draft.record.job) or claim(draft)
    return 0 if own is None else own.reserved


def bars(draft: Draft) -> str:
    """Return why the job may ask for no machine, for users; "" if machines are reserved for it.

    Worked out once in a pass, since it costs a look at all claims and a large gang asks for each of its nodes.
    """
    if draft.unreserved is None:
        draft.unreserved = "" if reserved(draft) else _why_waits(draft)
    return draft.unreserved


def _why_waits(draft: Draft) -> str:
    allocation = planned(draft)
    own = allocation.claim(draft.record.job)
    if unlisted := rungs.unlisted(draft):
        return unlisted
    if own is None and _nobodys(draft):
        return "waiting to hear whose job it is"
    why = order.why(allocation, draft.snapshot.stack, own, draft.now) if own is not None else ""
    return f"waiting in the queue: {why or 'the machines that it may use are taken'}; spotkeeper queue shows its place"


# -- the claim


def claim(draft: Draft, grants: Sequence[Grant] | None = None) -> Claim | None:
    """Return the job's claim as it is now; None if it wants no machines and has no grants.

    ``grants``: the job's grants; None: those of the allocation that was read.
    """
    old, spec = draft.snapshot.allocation.claim(draft.record.job), draft.snapshot.spec
    if spec is None or not _wants(draft):
        return _nothing(draft, old, draft.queries.own_grants() if grants is None else grants)
    size, stop = spec.size(), _stop(draft)
    most = _most(draft, spec, stop)
    stack = draft.snapshot.stack
    team, priority = allowed(spec, stack, draft.record.owner)
    usable, every = {pool.name for pool in pools_of(spec, stack)}, {pool.name for pool in stack.pools}
    new = Claim(
        job=draft.record.job,
        min=_least(draft, size.min, most),
        max=most,
        since=draft.record.created,
        team=team.name,
        priority=PRIORITIES.index(priority),
        pools=() if usable == every else tuple(sorted(usable)),
        mix=tuple((group.pool, group.nodes) for group in spec.machines),
        on_demand=spec.policy == "on-demand",
        stop=stop,
        sweep=spec.trial.sweep if spec.trial is not None else "",
        parallel=spec.trial.parallel if spec.trial is not None else 0,
        name=_name(draft),
    )
    return _known(draft, new, old)


def _most(draft: Draft, spec: JobSpec, stop: Stop) -> int:
    """Return the most machines that the job may have.

    What a stop would cost work does not grow by itself: it would stop for that, and what it borrowed would not come
    back. A user may ask for it, but not of a job that a signal stops: that one always borrows for good.
    """
    size, asked, has = spec.size(), draft.record.asked, draft.size() if draft.record.gen else 0
    most = size.max if asked is None else max(size.min, min(asked, size.max))
    if stop is not Stop.NEVER or (spec.stop != "signal" and asked is not None and asked > has):
        return most
    return max(size.min, min(has, most))


def _least(draft: Draft, least: int, most: int) -> int:
    """Return the fewest machines with which the job can start.

    Between generations nobody can tell which disks have the newest checkpoint. So an elastic job that was stopped comes
    back with as many nodes as it had, and shrinks only while it trains.
    """
    return min(most, max(least, draft.size()) if draft.record.gen and not draft.members() else least)


def _wants(draft: Draft) -> bool:
    record = draft.record
    runs = record.phase is Phase.RUN and not _nobodys(draft) and not rungs.unlisted(draft)
    return runs or (record.phase is Phase.HOLD and record.hold is Hold.QUEUE)


def _nobodys(draft: Draft) -> bool:
    """Whether the call that tells whose job it is may still come: a tick's round can be faster.

    Until then the job would count as one of the team ``default``, and could take machines that its own team may not.
    """
    record, shared = draft.record, bool(draft.snapshot.stack.teams)
    new = not any(node.cur is not None for node in draft.nodes) and draft.now - record.created < draft.times.owner_s
    return shared and new and not record.owner


def _nothing(draft: Draft, old: Claim | None, grants: Sequence[Grant]) -> Claim | None:
    """Return the claim of a job that wants no machines: until its grants are gone, or while it waits at a rung."""
    trial = draft.record.trial
    if (old is None and trial is None) or not (grants or rungs.gives_up_disks(draft)):
        return None
    return Claim(
        job=draft.record.job,
        min=0,
        max=0,
        since=draft.record.created,
        team=old.team if old is not None else draft.team.name if draft.team is not None else DEFAULT_TEAM,
        priority=old.priority if old is not None else 1,
        sweep=trial.of.sweep if trial is not None else "",
        parallel=trial.of.parallel if trial is not None else 0,
        name=_name(draft),
    )


def _name(draft: Draft) -> str:
    """Return the job's name, for the reasons of other jobs. Its submitter can write any text into the record."""
    return draft.record.name if JOB_NAME.match(draft.record.name) else ""


def _known(draft: Draft, new: Claim, old: Claim | None) -> Claim:
    """Return the claim with what the queue decided before, and with fresh estimates if another job may need them."""
    if old is None or not old.max:
        new = _first(draft, new)
    else:
        new = replace(new, **{name: getattr(old, name) for name in DECIDED}, reserved=min(old.reserved, new.max))
        if 0 < new.reserved < new.min:
            new = replace(new, reserved=0, waits=draft.now)
    claims = draft.snapshot.allocation.claims
    others = any((claim.waiting or claim.short) and claim.job != new.job for claim in claims)
    fresh = _estimated(draft, new)
    if old is None or (others and not _alike(old, fresh, draft.now)):
        return fresh
    kept = {name: getattr(old, name) for name in ("started", "stop", "cost_s", "ends", "dry_since", "usd", "zone")}
    return old if replace(new, **kept, short=fresh.short) == old else fresh


def _first(draft: Draft, new: Claim) -> Claim:
    """Return the first claim of a job; one that has machines already keeps them (an older version started it).

    A submitter can create a record with any number of nodes.
    """
    if draft.record.phase is Phase.RUN and any(node.cur is not None for node in draft.nodes):
        return replace(new, reserved=min(draft.size(), new.max), reserved_at=draft.record.gen_since or draft.now)
    return replace(new, waits=draft.now)


def _estimated(draft: Draft, new: Claim) -> Claim:
    record, snapshot = draft.record, draft.snapshot
    started = new.started
    if started is None and new.reserved and record.gen and not record.stop and record.gen_since >= new.reserved_at:
        started = record.gen_since
    machines = [node.cur for node in draft.nodes if node.cur is not None]
    boots = [known.boot_s for slot in machines if (known := draft.queries.known(slot)) and known.boot_s is not None]
    restart_s = draft.save_s() + start_s(max(boots, default=None), snapshot.begin_s, draft.save_s())
    spot = sum(slot.model is Model.SPOT for slot in machines)
    ends = None if snapshot.left_s is None or not new.reserved else float(round(draft.now + snapshot.left_s))
    return replace(
        new,
        started=started,
        ending=_ending(draft, new, ends),
        cost_s=float(round((new.reserved or new.min) * restart_s + spot * LOST_SPOT_S)),
        ends=ends,
        dry_since=None if machines else record.dry_since,
        usd=least_usd(draft),
        zone=record.zone or "" if machines and not (snapshot.spec and snapshot.spec.spread) else "",
        short=_short(draft) if new.reserved else None,
    )


def _short(draft: Draft) -> Short | None:
    """Return the machines that the cloud refuses, until all have come: a request that is under way may be refused too.

    A gang that has data or a machine stays in its zone.
    """
    slots = [draft.nodes[index].cur for index in draft.filled()]
    if draft.record.dry_since is None or all(slot is not None and admitted(slot) for slot in slots):
        return None
    pools = {draft.pool(index) for index, slot in zip(draft.filled(), slots, strict=True) if slot is None}
    if len(pools) > 1:  # machines of one of the pools would be of no use
        return None
    wanted = {f"{offer.pool}/{offer.zone}" for offer in _acceptable(draft, *pools)}
    return Short(draft.record.dry_since, slots.count(None), tuple(sorted(wanted))) if wanted else None


def _acceptable(draft: Draft, pool: str = "") -> list[Offer]:
    """Return the dynamic offers that the job would take, refused ones included; ``pool``: of a mix's vacant nodes."""
    spreads = draft.snapshot.spec is not None and draft.snapshot.spec.spread
    stays = not spreads and (draft.record.gen or any(node.cur for node in draft.nodes))
    zone = draft.record.zone if stays else None
    found = offers.choices(draft, Node(), zone, pool=pool) if pool else offers.of_gang(draft, Node(), zone)
    return [choice.offer for choice in found]


def least_usd(draft: Draft) -> float:
    """Return the least list price of these offers, USD per hour, if the team's USD an hour are limited; else 0."""
    if draft.team is None or draft.team.max_usd_hour is None:
        return 0.0
    return min((list_price(draft.snapshot.stack, resource(offer)) for offer in _acceptable(draft)), default=0.0)


def _stop(draft: Draft) -> Stop:
    spec = draft.snapshot.spec
    if (spec is not None and spec.stop == "signal") or location.past_loop(draft):
        return Stop.NEVER
    return Stop.EARLY if location.newest(draft) is None else Stop.SAVED


def _ending(draft: Draft, new: Claim, ends: float | None) -> float | None:
    """Return since when the job has been about to end; not anew if it has more steps than it said at first."""
    spec = draft.snapshot.spec
    if new.ending is not None or not new.reserved or (spec is not None and spec.stop == "signal"):
        return new.ending
    soon = ends is not None and ends - draft.now < reclaim.ENDING_S
    return draft.now if soon or location.past_loop(draft) else None


def _alike(old: Claim, new: Claim, now: float) -> bool:
    def far(before: float, after: float) -> bool:
        return abs(after - before) > ROUGHLY * max(before, 1.0)

    if old.ends is not None and new.ends is not None:
        if far(old.ends - now, new.ends - now):
            return False
        new = replace(new, ends=old.ends)
    if old.dry_since is not None and new.dry_since is not None:
        new = replace(new, dry_since=old.dry_since)
    return not far(old.cost_s, new.cost_s) and old == replace(new, cost_s=old.cost_s)


# -- a changed reservation


def step(draft: Draft) -> None:
    """Fit the job's size to its reservation; pause a job whose machines go to another one."""
    record, spec = draft.record, draft.snapshot.spec
    if record.phase is not Phase.RUN or spec is None or draft.snapshot.blind:
        return
    if not draft.nodes:
        draft.set(nodes=(Node(),) * spec.size().max)
    written = draft.snapshot.allocation.claim(record.job)
    if written is not None and written.waiting:
        _pause(draft, written)
        return
    if record.pause or record.move is not None:
        return
    new = reserved(draft)
    if new < draft.size():
        new = 0 if written is None else max(new, written.reserved)
    if new < draft.size() and record.gen and not draft.members():
        return  # its claim is about to wait: see ``_least``
    if new and new != draft.size() and spec.size().min <= new <= len(draft.nodes):
        resize.fit(draft, new)
        whom = draft.snapshot.allocation.name(written.whom) if written else ""
        detail = f"{new} nodes: machines went to job {whom}" if whom else f"{new} nodes"
        if record.gen:
            draft.log(Event.REQUEST, f"queue.v{draft.before.ver + 1}", cause="queue", detail=detail)


def _pause(draft: Draft, written: Claim) -> None:
    """Have the job save, stop and go on hold; a job without machines only waits."""
    if draft.record.pause or not any(node.cur is not None for node in draft.nodes):
        return
    whom = draft.snapshot.allocation.name(written.whom)
    draft.recall(f"its machines go to job {whom}" if whom else "its team is at a limit")
    draft.halt(draft.now + (draft.save_s() + draft.times.stop_s if draft.members() else 0.0), "queue")


def resume(draft: Draft) -> None:
    """End a hold of the queue, once machines are reserved for the job again."""
    record, written = draft.record, draft.snapshot.allocation.claim(draft.record.job)
    waits = record.phase is Phase.HOLD and record.hold is Hold.QUEUE
    if waits and written is not None and written.reserved and reserved(draft):
        draft.release("queue")
