"""Takes warm copies: snapshots of a training gang's disks, stored in the region to which the gang would go.

Snapshots of a disk are incremental, so the snapshots of a move there then store only what has changed since, and the
gang stands still for less time. A warm copy is of a disk that is being written: no disk is ever created from it, and
its number is used for nothing else (S2 of ``docs/protocol.md``). ``StackState.warm_usd`` limits what a job's warm
copies transfer in a month: each of them must be paid by the time since the one before it.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.cloud import CreateSnapshot, DiskSnapshot
from spotkeeper.contract.record import Owed, Warm
from spotkeeper.contract.stack import region_of
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import egress, transfer
from spotkeeper.reconcile.decide.provisioning import offers
from spotkeeper.reconcile.decide.snapshot import FINAL

MONTH_S = 30 * 86_400.0
LEAST_S = 600.0  # between two warm copies, whatever they cost


def step(draft: Draft) -> None:
    """Count the newest warm copies once they are complete, and number the next ones when they are due."""
    budget, warm, commit = draft.snapshot.stack.warm_usd, draft.record.warm, location.newest(draft)
    if warm is not None and warm.usd is None:
        _count(draft, warm)
        return
    if budget is None or commit is None or not _calm(draft):
        return
    if warm is not None and draft.now < warm.at + max(LEAST_S, (warm.usd or 0.0) / budget * MONTH_S):
        return
    region = _likely(draft)
    if region is None or (warm is not None and (warm.region, warm.commit) == (region, location.text(commit))):
        return
    here = region_of(draft.record.zone or "")
    if sum(draft.snapshot.stack.egress_usd(here, region, _gb(draft, index)) for index in draft.filled()) > budget:
        return
    for index in draft.filled():
        node = draft.nodes[index]
        draft.put(index, warm=node.disk_top + 1, disk_top=node.disk_top + 1, warms=node.warms + 1)
    draft.set(warm=Warm(region, draft.now, location.text(commit)))


def wanted(draft: Draft) -> tuple[CreateSnapshot, ...]:
    """Return the calls that make the newest warm copies, of attached disks."""
    record, warm = draft.record, draft.record.warm
    if warm is None or warm.usd is not None or not _calm(draft):
        return ()
    zone = record.zone or ""
    return tuple(
        CreateSnapshot(record.job, record.uid, index, node.disk, zone, node.warm, warm.region)
        for index, node in enumerate(draft.nodes)
        if node.warm is not None
        and _missing(draft.queries.snapshots.get((index, node.warm)), warm.region)
        and draft.queries.disk(index, node.disk, zone) is not None
    )


def _missing(found: DiskSnapshot | None, region: str) -> bool:
    """Whether a call has to make it; where a cloud stores snapshots at home first, another one then copies them."""
    return found is None or (found.ready and bool(found.regions) and region not in found.regions)


def owe(draft: Draft) -> None:
    """Once a move or the job's end overtakes the newest warm copies, charge those that the cloud shows."""
    record, warm = draft.record, draft.record.warm
    if warm is None or warm.usd is not None or (record.move is None and not record.over):
        return
    here, cost = region_of(draft.before.zone or ""), 0.0
    copies = []
    for index, node in enumerate(draft.before.nodes):
        if node.warm is not None:
            gb = _gb(draft, index)
            copies.append(Owed(index, node.warm, here, warm.region, draft.now, gb, warm=True))
            cost += draft.snapshot.stack.egress_usd(here, warm.region, gb)
    egress.owe(draft, copies)
    draft.set(warm=replace(warm, usd=cost))


def kept(draft: Draft, index: int, number: int) -> bool:
    """Whether a snapshot is a node's warm copy; the one before it stays until the newest is complete and counted.

    What the newest transferred can be measured only against the one before it.
    """
    node = draft.nodes[index] if index < len(draft.nodes) else None
    if node is None or node.warm is None or draft.record.over:
        return False
    newest, warm = draft.queries.snapshots.get((index, node.warm)), draft.record.warm
    if number == node.warm:
        return True
    there = newest is not None and warm is not None and newest.in_region(warm.region) and warm.usd is not None
    return node.disk < number < node.warm and not there


def region_for(draft: Draft, zone: str) -> str:
    """Return where to store a move's snapshots to ``zone``: with the warm copies, if they are there; "": anywhere."""
    warm = draft.record.warm
    return warm.region if warm is not None and warm.region == region_of(zone) else ""


def _calm(draft: Draft) -> bool:
    record, stack = draft.record, draft.snapshot.stack
    if not stack.regions or record.zone is None or not record.gen or draft.snapshot.draining:
        return False
    if record.stop or record.roll or record.pause or record.move or len(draft.members()) < draft.size():
        return False
    return record.zone in draft.queries.answered and all(
        slot.machine is None and slot.disk for _, slot in draft.members()
    )


def _likely(draft: Draft) -> str | None:
    """Return the region of the best offer abroad; None if the job may go nowhere."""
    here = region_of(draft.record.zone or "")
    found = (choice.offer.zone for choice in offers.of_gang(draft, offers.gang_as_node(draft), None))
    return next((region_of(zone) for zone in found if region_of(zone) != here), None)


def _gb(draft: Draft, index: int) -> float:
    """Return the GB that a node's next warm copy transfers: as its last one did, else its whole disk."""
    last = draft.queries.snapshots.get((index, draft.nodes[index].warm or -1))
    return last.gb if last is not None and last.gb > 0 else transfer.disk_gb(draft)


def _count(draft: Draft, warm: Warm) -> None:
    """Add the cost of complete warm copies to the job's; a refused one counts as if it were complete."""
    numbers = {(index, node.warm) for index, node in enumerate(draft.nodes) if node.warm is not None}
    refused = {
        (told.action.node, told.action.copy)
        for told in draft.queries.results
        if isinstance(told.action, CreateSnapshot) and told.kind in FINAL
    }
    made = {
        key: found
        for key in numbers
        if (found := draft.queries.snapshots.get(key)) is not None and found.in_region(warm.region)
    }
    if numbers - refused - made.keys():
        return
    here, total = region_of(draft.record.zone or ""), 0.0
    for index, number in sorted(made):
        gb = _gb(draft, index)
        if usd := draft.snapshot.stack.egress_usd(here, warm.region, gb):
            total += usd
            detail = f"{here} -> {warm.region}"
            egress.charge(draft, f"r{index}.w{number}", gb, usd, node=index, cause="warm copy", detail=detail)
    draft.set(warm=replace(warm, usd=total))
