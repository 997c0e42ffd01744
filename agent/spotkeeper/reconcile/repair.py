"""``stack/alloc`` made anew, where it makes no sense: from the records, the jobs' ledgers and the cloud.

Safe beside rounds, by compare-and-swap alone. A round that read the allocation while it was whole could
still write an intent for a grant that nobody can see any more: so every unfinished record is written once
more, unchanged but for its version, and that round's write fails. A round that reads a record after that
finds the allocation unreadable, or made anew. From then on live attempts only become fewer until the
allocation is there again, so it may name a grant too many, which an ordinary round releases, and none too few:

* a live attempt is in its record;
* any other attempt that ever had an intent is in its job's ledger, with GONE once its grant was given back;
* a machine that outlived all of that is listed;
* a grant without an intent has no machine, and its number cannot be used any more (see above).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from uuid import uuid4

from msgspec.structs import replace

from spotkeeper.reconcile import alloc, paths
from spotkeeper.reconcile.ledger import Writer
from spotkeeper.reconcile.store_api import CorruptError, NewerError, Store
from spotkeeper.spec.cloud import Cloud, Listing, Offer
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Alloc, Grant, Phase, Record

TRIES = 10  # of a record that rounds write at the same time
TOMBS = paths.tomb("00000000").removesuffix("00000000")
Key = tuple[str, int, int]


class RepairError(Exception):
    """Nothing was changed but versions of records; the text says why, and what to do."""


def rebuild_alloc(store: Store, cloud: Cloud, now: float) -> Alloc:
    """Write the allocation anew.

    Raises:
        RepairError: it is well, or of a newer version, or a zone did not answer, or two hold one node.
        StoreError: the bucket.
    """
    token = _damaged(store)
    stack = store.read_stack()
    if stack is None:
        raise RepairError("the bucket holds no stack: bring it up first")
    jobs = {*store.active_jobs(), *(path.removeprefix(TOMBS) for path in store.list(TOMBS))}
    records = [record for job in sorted(jobs) if (record := _rewritten(store, job)) is not None]
    listing = cloud.list(stack.stack)
    silent = sorted(set(stack.zones()) - listing.answered)
    if silent:
        raise RepairError(f"no answer from {', '.join(silent)}: run it again when the cloud answers for all zones")
    jobs |= {vm.job for vm in listing.vms} - {""}
    grants: dict[Key, Grant] = {}
    for grant in (*_live(records, now), *_told(store, sorted(jobs), records, now), *_listed(listing, now)):
        grants.setdefault((grant.job, grant.rank, grant.attempt), grant)
    _check_nodes(grants.values())
    made = Alloc(ver=1, nonce=uuid4().hex, grants=tuple(grants[key] for key in sorted(grants)))
    if store.cas_alloc(made, token) is None:
        raise RepairError("somebody wrote stack/alloc meanwhile: look at `spotkeeper status`")
    return made


def _damaged(store: Store) -> str:
    """The token of what stands there instead of an allocation."""
    try:
        store.read_alloc()
    except NewerError as error:
        raise RepairError(f"{error}; {error.remedy}") from None
    except CorruptError as error:
        return error.token
    raise RepairError("stack/alloc is well: nothing to repair")


def _rewritten(store: Store, job: str) -> Record | None:
    """An unfinished record as written once more; a finished one as it is; None where it cannot be read."""
    for _ in range(TRIES):
        try:
            held = store.read_record(job)
        except CorruptError:
            return None  # no round writes it either: whoever read it before finds it changed
        if held is None or held.value.phase is Phase.DONE:
            return held.value if held else None
        Writer().flush(store, held.value)
        record = replace(held.value, ver=held.value.ver + 1, nonce=uuid4().hex, outbox=())
        if store.cas_record(record, held.token) is not None:
            return record
    raise RepairError(f"the record of {job} changes all the time: run it again")


def _live(records: Iterable[Record], now: float) -> Iterator[Grant]:
    for record in records:
        for index, rank in enumerate(record.ranks):
            for slot in (rank.cur, rank.next):
                if slot is not None:
                    offer = Offer(slot.pool, slot.zone, slot.model, 0.0, slot.node)
                    yield Grant(record.job, index, slot.attempt, alloc.resource(offer), now)


def _told(store: Store, jobs: Iterable[str], records: Iterable[Record], now: float) -> Iterator[Grant]:
    """Attempts whose intent is in the ledger, and whose grant was not given back."""
    waiting = {record.job: record.outbox for record in records}
    for job in jobs:
        entries = (*store.list_ledger(job), *waiting.get(job, ()))
        gone = {(entry.rank, entry.attempt) for entry in entries if entry.event is Event.GONE}
        for entry in entries:
            if entry.event is not Event.INTENT or entry.rank is None or entry.attempt is None or entry.model is None:
                continue
            if (entry.rank, entry.attempt) not in gone:
                node = entry.detail or None if entry.model is Model.STATIC else None
                offer = Offer(entry.pool or "", entry.zone or "", entry.model, 0.0, node)
                yield Grant(job, entry.rank, entry.attempt, alloc.resource(offer), now)


def _listed(listing: Listing, now: float) -> Iterator[Grant]:
    for vm in listing.vms:
        if vm.job:
            offer = Offer(vm.pool, vm.zone, vm.model, 0.0)
            yield Grant(vm.job, vm.rank, vm.attempt, alloc.resource(offer), now)


def _check_nodes(grants: Iterable[Grant]) -> None:
    held: dict[str, Grant] = {}
    for grant in grants:
        node = alloc.node_of(grant)
        other = held.setdefault(node, grant) if node is not None else grant
        if other is not grant:
            raise RepairError(f"static node {node}: both {other.job} and {grant.job} seem to have it; cancel one first")
