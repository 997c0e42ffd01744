"""Rebuilds an unreadable ``stack/allocation`` from the records, the jobs' ledgers and the cloud's listing.

Rounds may run meanwhile. A round that read the allocation before it was damaged could still write an intent for one of
its grants. So every unfinished record is first written again with a new version and nonce, and that round's
compare-and-swap of the record fails. A round that reads the record later can add no attempt until the allocation is
rebuilt. So the result can have a grant too many, which an ordinary round releases, but never a grant too few:

* a live attempt is in its record;
* any other attempt that ever had an intent is in its job's ledger, with GONE once its grant was released;
* a machine that is in neither a record nor a ledger is in the cloud's listing;
* a grant without an intent has no machine, and no round can write the intent any more, since its record was rewritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from uuid import uuid4

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant, resource
from spotkeeper.contract.cloud import Cloud, Listing, Offer
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Phase, Record
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.reconcile.controller.ledger import LedgerWriter
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError, NewerError
from spotkeeper.reconcile.store.store import Store

TRIES = 10  # tries to write a record that rounds write at the same time
TOMBS = paths.tomb("00000000").removesuffix("00000000")
Key = tuple[str, int, int]


class RepairError(Exception):
    """The allocation was not rebuilt. The text says why and what to do. Some records were perhaps rewritten."""


def rebuild_allocation(store: Store, cloud: Cloud, now: float) -> Allocation:
    """Rebuild the allocation and write it.

    Raises:
        RepairError: the allocation is readable, a newer version of Spotkeeper wrote it, the stack is missing, a zone
            did not answer, a record could not be rewritten, or two jobs have the same static machine.
        StoreError: the bucket failed.
    """
    token = _damaged(store)
    stack = store.read_stack()
    if stack is None:
        raise RepairError("the bucket contains no stack: run `pulumi up` first")
    jobs = {*store.active_jobs(), *(path.removeprefix(TOMBS) for path in store.list(TOMBS))}
    records = [record for job in sorted(jobs) if (record := _rewritten(store, job, stack)) is not None]
    listing = cloud.list(stack.stack)
    silent = sorted(set(stack.zones()) - listing.answered)
    if silent:
        raise RepairError(f"no answer from {', '.join(silent)}: repeat the repair when the cloud answers for all zones")
    jobs |= {vm.job for vm in listing.vms} - {""}
    grants: dict[Key, Grant] = {}
    for grant in (*_live(records, now), *_told(store, sorted(jobs), records, now), *_listed(listing, now)):
        grants.setdefault((grant.job, grant.node, grant.attempt), grant)
    _check_nodes(grants.values())
    made = Allocation(ver=1, nonce=uuid4().hex, grants=tuple(grants[key] for key in sorted(grants)))
    if store.cas_allocation(made, token) is None:
        raise RepairError("another process wrote stack/allocation meanwhile: repeat the repair if it is still damaged")
    return made


def _damaged(store: Store) -> str:
    """Return the version token of the unreadable allocation, for the compare-and-swap that replaces it.

    Raises:
        RepairError: the allocation is readable, or a newer version of Spotkeeper wrote it.
    """
    try:
        store.read_allocation()
    except NewerError as error:
        raise RepairError(f"{error}; {error.remedy}") from None
    except CorruptError as error:
        return error.token
    raise RepairError("stack/allocation is valid: nothing to repair")


def _rewritten(store: Store, job: str, stack: StackState) -> Record | None:
    """Write an unfinished record again and return it; return a finished one as it is. None: unreadable or missing."""
    for _ in range(TRIES):
        try:
            read = store.read_record(job)
        except CorruptError:
            return None  # no round can write it either: a round that read it earlier finds it changed
        if read is None or read.value.phase is Phase.DONE:
            return read.value if read else None
        LedgerWriter().flush(store, read.value, stack)
        record = replace(read.value, ver=read.value.ver + 1, nonce=uuid4().hex, outbox=())
        if store.cas_record(record, read.token) is not None:
            return record
    raise RepairError(f"rounds keep changing the record of job {job}: repeat the repair")


def _live(records: Iterable[Record], now: float) -> Iterator[Grant]:
    for record in records:
        for index, node in enumerate(record.nodes):
            for slot in (node.cur, node.next):
                if slot is not None:
                    offer = Offer(slot.pool, slot.zone, slot.model, 0.0, slot.machine)
                    yield Grant(record.job, index, slot.attempt, resource(offer), now)


def _told(store: Store, jobs: Iterable[str], records: Iterable[Record], now: float) -> Iterator[Grant]:
    """Yield grants of attempts whose intent is in the ledger without a GONE entry."""
    waiting = {record.job: record.outbox for record in records}
    for job in jobs:
        entries = (*store.list_ledger(job), *waiting.get(job, ()))
        gone = {(entry.node, entry.attempt) for entry in entries if entry.event is Event.GONE}
        for entry in entries:
            if entry.event is not Event.INTENT or entry.node is None or entry.attempt is None or entry.model is None:
                continue
            if (entry.node, entry.attempt) not in gone:
                machine = entry.detail or None if entry.model is Model.STATIC else None
                offer = Offer(entry.pool or "", entry.zone or "", entry.model, 0.0, machine)
                yield Grant(job, entry.node, entry.attempt, resource(offer), now)


def _listed(listing: Listing, now: float) -> Iterator[Grant]:
    for vm in listing.vms:
        if vm.job:
            offer = Offer(vm.pool, vm.zone, vm.model, 0.0)
            yield Grant(vm.job, vm.node, vm.attempt, resource(offer), now)


def _check_nodes(grants: Iterable[Grant]) -> None:
    holders: dict[str, Grant] = {}
    for grant in grants:
        machine = grant.machine
        other = holders.setdefault(machine, grant) if machine is not None else grant
        if other is not grant:
            raise RepairError(
                f"jobs {other.job} and {grant.job} both seem to have static machine {machine}: cancel one of them first"
            )
