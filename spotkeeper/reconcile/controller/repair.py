"""Rebuilds an unreadable ``stack/allocation`` from the records, the jobs' ledgers and the cloud's listing.

Rounds may run meanwhile. A round that read the allocation before it was damaged could still write an intent for one of
its grants. So every unfinished record is first written again with a new version and nonce, and that round's
compare-and-swap of the record fails. A round that reads the record later can add no attempt until the allocation is
rebuilt. So the result can have a grant too many, which an ordinary round releases, but never a grant too few:

* a live attempt is in its record;
* any other attempt that ever had an intent is in its job's ledger, with GONE once its grant was released;
* a machine that is in neither a record nor a ledger is in the cloud's listing;
* a grant without an intent has no machine, and no round can write the intent any more, since its record was rewritten.

Claims and the teams' use are rebuilt as far as records and ledgers tell: which jobs wait since when, how often a job
gave up machines in the last day, and what each released grant cost, from its intent to GONE. Unknown are reservations
without machines, whose jobs wait again, and which jobs may not take machines from each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from uuid import uuid4

from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Claim, Grant, TeamUse
from spotkeeper.contract.cloud import Cloud, Listing, Offer
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Phase, Record
from spotkeeper.contract.stack import DEFAULT_TEAM, Model, StackState
from spotkeeper.reconcile.controller.adoption import adopt
from spotkeeper.reconcile.controller.ledger import LedgerWriter
from spotkeeper.reconcile.decide import Draft, Snapshot
from spotkeeper.reconcile.decide.queue import claim, use
from spotkeeper.reconcile.decide.queue.reclaim import DAY_S
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError, NewerError
from spotkeeper.reconcile.store.store import Store

TRIES = 10  # tries to write a record that rounds write at the same time
TOMBS = paths.tomb("00000000").removesuffix("00000000")
USE_S = 40 * DAY_S  # older releases count in no month and, halved each day, in no team's use
NOTHING = Listing((), ())
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
    records = [record for job in sorted(jobs) if (record := rewritten(store, job, stack, now)) is not None]
    listing = cloud.list(stack.stack)
    silent = sorted(set(stack.zones()) - listing.answered)
    if silent:
        raise RepairError(f"no answer from {', '.join(silent)}: repeat the repair when the cloud answers for all zones")
    jobs |= {vm.job for vm in listing.vms} - {""}
    outboxes = {record.job: record.outbox for record in records}
    grants: dict[Key, Grant] = {}
    released: list[tuple[float, Grant]] = []
    recalled: dict[str, tuple[float, ...]] = {}
    for job in sorted(jobs):
        entries = (*store.list_ledger(job), *outboxes.get(job, ()))
        found = tuple(_told(job, entries))
        grants |= {(job, grant.node, grant.attempt): grant for over_at, grant in found if over_at is None}
        released += [(over_at, grant) for over_at, grant in found if over_at is not None]
        recalled[job] = tuple(sorted({entry.at for entry in entries if _recall(entry)}))
    for grant in (*live_grants(records), *listed_grants(listing, now)):
        key = (grant.job, grant.node, grant.attempt)
        told = grants.setdefault(key, grant)
        if told.reservation is not None:  # the ledger has no name of reserved capacity
            grants[key] = replace(told, resource=grant.resource)
    _check_nodes(grants.values())
    specs = {record.job: _spec(store, record) for record in records}
    teams = {
        record.job: stack.team_of(record.owner, spec.team if (spec := specs[record.job]) else "").name
        for record in records
    }
    made = Allocation(
        ver=1,
        nonce=uuid4().hex,
        home=stack.region if stack.regions else "",
        grants=tuple(grants[key] for key in sorted(grants)),
        claims=tuple(_claims(records, specs, recalled, grants.values(), stack, now)),
        use=_use(released, teams, stack, now),
    )
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


def rewritten(
    store: Store, job: str, stack: StackState, now: float, change: Callable[[Record], Record] = lambda record: record
) -> Record | None:
    """Write an unfinished record again, changed, and return it; return a finished one as it is.

    None: unreadable or missing. Raises RepairError if rounds keep changing it.
    """
    with suppress(CorruptError):
        if adopt(store, job, now):  # what a submitter wrote names no machine
            store.begin(job)  # else a round would adopt the record that is written here
    for _ in range(TRIES):
        try:
            read = store.read_record(job)
        except CorruptError:
            return None  # no round can write it either: a round that read it earlier finds it changed
        if read is None or read.value.phase is Phase.DONE:
            return read.value if read else None
        LedgerWriter().flush(store, read.value, stack)
        record = replace(change(read.value), ver=read.value.ver + 1, nonce=uuid4().hex, outbox=())
        if store.cas_record(record, read.token) is not None:
            return record
    raise RepairError(f"rounds keep changing the record of job {job}: repeat the repair")


def live_grants(records: Iterable[Record]) -> Iterator[Grant]:
    for record in records:
        for index, node in enumerate(record.nodes):
            for slot in (node.cur, node.next):
                if slot is not None:
                    offer = Offer(slot.pool, slot.zone, slot.model, 0.0, slot.machine, slot.reservation)
                    yield Grant.of(record.job, index, slot.attempt, offer, slot.since)


def _told(job: str, entries: Collection[Entry]) -> Iterator[tuple[float | None, Grant]]:
    """Yield the grants whose intent is in the ledger, and when each was released; None: it has no GONE entry."""
    gone: dict[tuple[int | None, int | None], float] = {}
    for entry in entries:
        if entry.event is Event.GONE:
            gone.setdefault((entry.node, entry.attempt), entry.at)
    for entry in entries:
        if entry.event is Event.INTENT and entry.node is not None and entry.attempt is not None and entry.model:
            machine = entry.detail or None if entry.model is Model.STATIC else None
            offer = Offer(entry.pool or "", entry.zone or "", entry.model, 0.0, machine)
            grant = Grant.of(job, entry.node, entry.attempt, offer, entry.at)
            yield gone.get((entry.node, entry.attempt)), grant


def listed_grants(listing: Listing, now: float) -> Iterator[Grant]:
    for vm in listing.vms:
        if vm.job:
            offer = Offer(vm.pool, vm.zone, vm.model, 0.0, reservation=vm.reservation)
            yield Grant.of(vm.job, vm.node, vm.attempt, offer, now)


def _check_nodes(grants: Iterable[Grant]) -> None:
    holders: dict[str, Grant] = {}
    for grant in grants:
        machine = grant.machine
        other = holders.setdefault(machine, grant) if machine is not None else grant
        if other is not grant:
            raise RepairError(
                f"jobs {other.job} and {grant.job} both seem to have static machine {machine}: cancel one of them first"
            )


# -- the queue


def _spec(store: Store, record: Record) -> JobSpec | None:
    try:
        return store.read_spec(record.job, record.spec_key())
    except CorruptError:
        return None


def _recall(entry: Entry) -> bool:
    """Whether machines were taken from the job: it went on hold for the queue, or shrank."""
    return entry.event in (Event.HOLD, Event.REQUEST) and entry.cause == Hold.QUEUE.value


def _claims(
    records: Iterable[Record],
    specs: Mapping[str, JobSpec | None],
    recalled: Mapping[str, tuple[float, ...]],
    grants: Iterable[Grant],
    stack: StackState,
    now: float,
) -> Iterator[Claim]:
    """Yield the claims of all jobs that want machines, and of trials whose machines are being deleted.

    A job that never trained has waited since it was submitted; one that gave its machines up, since then.
    """
    granted: dict[str, list[Grant]] = defaultdict(list)
    for grant in grants:
        granted[grant.job].append(grant)
    for record in records:
        draft = Draft(record, Snapshot(stack=stack, spec=specs[record.job], listing=NOTHING, now=now))
        found = claim.claim(draft, granted[record.job])
        if found is not None:
            recalls = tuple(at for at in recalled[record.job] if now - at < DAY_S)
            held = recalled[record.job][-1:] if record.phase is Phase.HOLD else ()
            since = record.created if not record.gen else max(held, default=now)
            yield replace(found, waits=min(now, since) if found.waiting else None, recalls=recalls)


def _use(
    released: Iterable[tuple[float, Grant]], teams: Mapping[str, str], stack: StackState, now: float
) -> tuple[TeamUse, ...]:
    """Return what released grants have cost each team."""
    known: tuple[TeamUse, ...] = ()
    for at, grant in sorted(released, key=lambda each: each[0]):
        if now - USE_S <= at <= now:
            one = Claim(grant.job, 0, 0, 0.0, teams.get(grant.job, DEFAULT_TEAM))
            known = use.folded(Allocation(claims=(one,), use=known), (grant,), stack, at)
    return known
