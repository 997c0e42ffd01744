"""Moves the home of a stack in several regions: the function of one region stops, then another one takes over.

``stack/pools.json`` names the home region. A function of any other region raises :class:`AwayError` for every request,
so one write of this object stops the old function. ``stack/allocation`` names the region that has taken over. Until
that is the home region, no round decides anything. The first tick at home takes over; one that is interrupted changes
nothing that trains, and the next tick begins again:

1. It lists all machines and disks. All zones must answer, but for those of the old home.
2. It writes every unfinished record with higher attempt numbers. If the old region is lost, the bucket may lack the
   writes of its last minutes; so a number that the record calls free may be in use. A record that is older than what
   the listing shows (``_behind``) gives up all its machines, and its nodes continue on the disks that are listed.
3. It writes the allocation, with a grant for every listed machine and its own region.

A round of the old function may still be under way for a minute, like any other round that has stalled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import uuid4

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.cloud import Cloud, Disk, Listing
from spotkeeper.contract.record import Node, Phase, Record
from spotkeeper.contract.stack import StackState, region_of
from spotkeeper.reconcile.controller import repair
from spotkeeper.reconcile.store.documents import Versioned
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import Store

# Attempts by which a takeover raises each node's counter: more than a node can use (`Times.launches_node` an hour) in
# the minutes whose writes may be missing.
RAISE = 100

log = logging.getLogger("spotkeeper.reconcile")


class AwayError(StoreError):
    """This function is not in the stack's home region, and so does nothing."""


def check_home(stack: StackState, region: str) -> None:
    """Raise AwayError if the stack's home is another region than this function's (``region``; "": unknown)."""
    if region and stack.regions and region != stack.region:
        raise AwayError(f"the home of stack {stack.stack} is {stack.region}: the function in {region} does nothing")


def is_settled(stack: StackState, allocation: Allocation) -> bool:
    """Whether the home region has taken over; also before the first tick of a stack in several regions."""
    return not stack.regions or allocation.home in ("", stack.region)


def settle(store: Store, cloud: Cloud, stack: StackState, read: Versioned[Allocation], now: float) -> str:
    """Note the home region in an allocation that names no region, or take over from the region that it names.

    Returns "", or why the takeover must wait for the next tick.
    """
    old = read.value.home
    if not old:
        first = replace(read.value, ver=read.value.ver + 1, nonce=uuid4().hex, home=stack.region)
        store.cas_allocation(first, read.token)  # a lost race: the next tick
        return ""
    listing = cloud.list(stack.stack)
    silent = sorted(zone for zone in set(stack.zones()) - listing.answered if region_of(zone) != old)
    if silent:
        return f"{stack.region} takes over from {old} once {', '.join(silent)} answers"
    jobs = sorted({*store.active_jobs(), *(vm.job for vm in listing.vms), *(disk.job for disk in listing.disks)} - {""})
    try:
        written = [
            repair.rewritten(store, job, stack, now, lambda record: raised(record, listing, now)) for job in jobs
        ]
    except repair.RepairError as error:
        return f"{stack.region} takes over from {old} with the next tick: {error}"
    records = [record for record in written if record is not None]
    grants = {(grant.job, grant.node, grant.attempt): grant for grant in read.value.grants}
    for grant in (*repair.live_grants(records), *repair.listed_grants(listing, now)):
        grants.setdefault((grant.job, grant.node, grant.attempt), grant)
    made = replace(
        read.value,
        ver=read.value.ver + 1,
        nonce=uuid4().hex,
        grants=tuple(grants[key] for key in sorted(grants)),
        home=stack.region,
    )
    if store.cas_allocation(made, read.token) is None:
        return f"{stack.region} takes over from {old} with the next tick: stack/allocation changed meanwhile"
    log.warning("%s has taken over from %s: %d jobs", stack.region, old, len(records))
    return ""


def raised(record: Record, listing: Listing, now: float) -> Record:
    """Return the record with attempt numbers that no machine can have had; see the module's text."""
    if record.over:
        return record
    disks = [[d for d in listing.disks if (d.job, d.node) == (record.job, i)] for i in range(len(record.nodes))]
    tops = [0] * len(disks)
    for vm in listing.vms:
        if vm.job == record.job and vm.node < len(tops):
            tops[vm.node] = max(tops[vm.node], vm.attempt)
    behind = _behind(record, disks, tops)
    nodes = tuple(
        _fresh(node, disks[index], max(node.top, tops[index]) + RAISE, now)
        if behind
        else replace(node, top=node.top + RAISE)
        for index, node in enumerate(record.nodes)
    )
    if not behind:
        return replace(record, nodes=nodes)
    stops = record.phase is Phase.RUN and record.gen > 0
    zone = next((node.zone for node in nodes if node.zone), record.zone) if record.zone else None
    gen = record.gen + RAISE if record.gen else 0
    return replace(
        record,
        nodes=nodes,
        gen=gen,
        stop=stops,
        stop_since=now,
        stop_deadline=None,
        move=None,
        roll=None,
        zone=zone,
    )


def _behind(record: Record, disks: Sequence[Sequence[Disk]], tops: Sequence[int]) -> bool:
    """Whether the listing shows numbers that this record has never used: later writes of it are lost."""
    return any(
        tops[index] > node.top or any(disk.number > node.disk_top for disk in disks[index])
        for index, node in enumerate(record.nodes)
    )


def _fresh(node: Node, disks: Sequence[Disk], top: int, now: float) -> Node:
    """Return the node without machines, on the disk that it used last: the attached one, else its own, else another."""
    used = [disk for disk in disks if disk.users]
    own = [disk for disk in disks if disk.number == node.disk]
    found = next(iter((*used, *own, *sorted(disks, key=lambda disk: disk.number))), None)
    return replace(
        node,
        top=top,
        disk=node.disk if found is None else found.number,
        disk_top=max([node.disk_top, *(disk.number for disk in disks)]),
        zone=node.zone if found is None else found.zone,
        cur=None,
        next=None,
        replace_reason=None,
        copy=None,
        cause="loss",
        vacant_since=now,
    )
