"""Adopts a job's record before its first round: drops what its submitter may not decide.

Submitters create records, and no condition of a cloud looks into what they write. A record could name machines, a
verified owner, a trial's results or ledger entries that the function never saw. The first round therefore writes the
record anew, as ``submit`` would have made it, before it takes the job's lease. Only the function writes leases, and
ledger entries but those of shells: a job that has one has an adopted record, which nobody but the function can change.
"""

from __future__ import annotations

from uuid import NAMESPACE_OID, UUID, uuid4, uuid5

from msgspec.structs import replace

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Node, Record
from spotkeeper.reconcile.store.store import Store

SUBMITTED = "submitted.job"  # id of the only ledger entry that a submitter writes
LATE_S = 3600.0  # most that a job may be older than its first round: the queue serves older jobs first


def adopt(store: Store, job: str, now: float) -> bool:
    """Write the record anew if it says what a submitter may not decide. Returns whether the job has a record.

    The record is read before the lease: if there is no lease, no round had decided anything in the record that was
    read, and the write fails if one has since.
    """
    read = store.read_record(job)
    if read is None:
        return False
    new = adopted(read.value, now)
    if new is not read.value and not store.has_begun(job):
        store.cas_record(replace(new, nonce=uuid4().hex), read.token)
    return True


def adopted(record: Record, now: float) -> Record:
    """Return what is believed of a record that no round has written; the same object if that is all of it."""
    entries = [entry for entry in record.outbox if (entry.id, entry.event) == (SUBMITTED, Event.SUBMITTED)][:1]
    outbox = tuple(Entry(at=entry.at, id=entry.id, event=entry.event, by=entry.by) for entry in entries)
    if record.over:  # a tick ends jobs without a record by such a one; it can only delete what is the job's own
        new = replace(record, owner="", trial=None, outbox=outbox)
    else:
        new = Record(
            job=record.job,
            uid=_uuid(record),
            name=record.name,
            spec_sha256=record.spec_sha256,
            created=max(record.created, now - LATE_S),
            ver=record.ver,
            nonce=record.nonce,
            nodes=(Node(),) * len(record.nodes),
            port_base=record.port_base,
            keep_disks=record.keep_disks,
            outbox=outbox,
        )
    return record if new == record else replace(new, ver=1)


def _uuid(record: Record) -> str:
    """Return the record's uid, or another one if it is none: no machine could be requested."""
    try:
        return str(UUID(record.uid))
    except ValueError:
        return str(uuid5(NAMESPACE_OID, f"spotkeeper/{record.job}"))
