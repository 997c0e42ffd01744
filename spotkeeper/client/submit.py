"""Submit a job: the order of writes makes a crash at any point harmless.

The order is: ``active/<job>`` (with the time), ``spec.json``, ``source``, ``names/<name>``, ``rec`` (the record).
Nothing runs before ``rec`` exists. ``active`` comes first because ticks find jobs there: if a job still has no record a
day after its submission began, a tick deletes its files. Before that, a submission that was interrupted after it wrote
its name can be completed: the user submits the same content again. Each write creates an object and replaces none,
because submitters have the right to create objects only; but the name of an ended job is deleted, so that it can be
used again.
"""

from __future__ import annotations

import contextlib
import secrets
import uuid
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.pack import Source
from spotkeeper.client.target import Target, notify, whoami
from spotkeeper.contract.job import JobSpec, spec_sha256
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.names import new_job_id
from spotkeeper.contract.record import Hold, Node, Phase, Record
from spotkeeper.reconcile.store.documents import CorruptError, Versioned
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.hold import resume_with
from spotkeeper.report.job.waiting import WaitingView

PORT_FIRST = 20_000
PORT_BLOCK = 64  # ports per job; a generation uses block start + generation mod 64
PORT_END = 32_768  # where Linux' ephemeral ports begin


class Submitted(Struct, frozen=True):
    """A submitted job. ``new``: False if the same job already existed. ``on_hold``: why it is on hold, if it is.

    ``queue``: its place in the queue, if it waits there after the function was notified. ``ungranted``: what it does
    not get of its ``team`` and ``priority``.
    """

    job: str
    name: str
    new: bool
    on_hold: str | None = None
    queue: WaitingView | None = None
    ungranted: tuple[str, ...] = ()


def submit_file(target: Target, file: Path, spec: JobSpec, source: Source | None) -> tuple[Submitted, bool]:
    """Submit a checked job file to a stack; returns the job, and whether the function was notified of it.

    Raises:
        CliError: as :func:`submit`; or the stack is being destroyed.
        StoreError: the bucket failed.
    """
    store = target.store()
    if store.draining():
        again = f"bring it up again: {target.up()}"
        raise CliError(f"{file}: the stack {target.stack} is being destroyed", Exit.REFUSED, again)
    done = submit(store, spec, source, target.clock.now(), whoami())
    return done, tell(target, store, done)


def tell(target: Target, store: Store, done: Submitted) -> bool:
    """Notify the function of a job, unless it knows whose it is; return False if it was not reached."""
    return not (done.new or lookup.unowned(store, [done.job])) or notify(target, store, done.job)


def submit(
    store: Store,
    spec: JobSpec,
    source: Source | None,
    now: float,
    by: str = "",
    job: str | None = None,
    ports: int | None = None,
) -> Submitted:
    """Put a checked job into the bucket; the next round starts it.

    Args:
        by: the submitter, for the ledger.
        job: the new job's id; None: a random one.
        ports: its block of ports, from :func:`free_port_block`; None: one that no unfinished job uses.

    Raises:
        CliError: an unfinished job of this name has other content, or the job was cancelled meanwhile.
        StoreError: the bucket failed.
    """
    full = with_source(spec, source)
    digest = spec_sha256(full)
    earlier = _same_name(store, full, digest)
    if earlier is not None:
        job, record = earlier
        if record is not None:
            held = record.hold is not None and not record.hold.passes
            return Submitted(job, spec.name, new=False, on_hold=record.reason if held else None)
    else:
        job = job or new_job_id()
        store.set_active(job, now)
        store.put_spec(job, full)
    if source is not None:
        store.put_source(job, source.sha256, source.tar)
    if earlier is None and not store.put_name(spec.name, job):
        from spotkeeper.reconcile.controller.cleanup import withdraw

        withdraw(store, job, spec.name, now, "another submission of this name came first")  # a tick deletes its files
        why = f"{spec.name}: another submission of this name came first"
        raise CliError(why, Exit.REFUSED, "submit again to see which job has the name")
    store.set_active(job, now)  # the ``active`` object of an interrupted submission may be gone
    if not store.create_record(_record(store, job, full, digest, now, by, ports)):
        theirs = store.read_record(job)
        if theirs is None or theirs.value.phase is not Phase.DONE:  # the same submission, by another shell
            return Submitted(job, spec.name, new=False)
        raise CliError(f"{spec.name} ({job}): was cancelled meanwhile", Exit.REFUSED, "submit it again")
    return Submitted(job, spec.name, new=True)


def with_source(spec: JobSpec, source: Source | None) -> JobSpec:
    """Return the spec with the hash of its source. ``spec_sha256`` of this spec identifies the job's content."""
    return msgspec.structs.replace(spec, source_sha256=source.sha256 if source else None)


def _same_name(store: Store, spec: JobSpec, digest: str) -> tuple[str, Record | None] | None:
    """Return the unfinished job of this name and its record, if any; None if the name is free.

    Raises:
        CliError: that job has other content.
    """
    job = store.read_name(spec.name)
    if job is None:
        return None
    read = store.read_record(job)
    if read is not None and read.value.over:
        store.delete_name(spec.name, job)
        return None
    return _refuse_other(store, job, read, spec, digest)


def check_name(store: Store, spec: JobSpec) -> None:
    """Raise CliError if an unfinished job of this name has other content. ``spec`` has its source's hash."""
    job = store.read_name(spec.name)
    read = store.read_record(job) if job is not None else None
    if job is not None and (read is None or not read.value.over):
        _refuse_other(store, job, read, spec, spec_sha256(spec))


def _refuse_other(
    store: Store, job: str, read: Versioned[Record] | None, spec: JobSpec, digest: str
) -> tuple[str, Record | None]:
    """Raise CliError if the unfinished ``job`` of this name has other content; else return the job and its record."""
    theirs = store.read_spec(job, read.value.spec_key() if read is not None else "")
    if theirs is not None and spec_sha256(theirs) == digest:
        return job, read.value if read is not None else None
    state = "runs already"
    end = f"give the old job these files (spotkeeper pause {spec.name}, then {resume_with(spec.name)}), or end it"
    if read is None:
        state, end = "is being submitted already", "end the old job"
    elif read.value.phase is Phase.HOLD:
        state = "is on hold because it failed" if read.value.hold is Hold.FAILURE else "is on hold"
        end = f"give the old job these files ({resume_with(spec.name)}), or end it and delete its checkpoints"
    raise CliError(
        f"{spec.name}: a job of this name {state} ({job}), with other content: {', '.join(differences(theirs, spec))}",
        Exit.REFUSED,
        f"give this job another `name`, or {end}: spotkeeper cancel {spec.name}",
    )


def differences(theirs: JobSpec | None, ours: JobSpec) -> list[str]:
    """Return the names of fields that differ, without their values, which can be long or private."""
    if theirs is None:
        return ["its job file is missing"]
    fields = [field for field in ours.__struct_fields__ if field != "source"]
    found = [field for field in fields if getattr(theirs, field) != getattr(ours, field)]
    return ["source" if field == "source_sha256" else field for field in found]


def _record(store: Store, job: str, spec: JobSpec, digest: str, now: float, by: str, ports: int | None) -> Record:
    """Return a new job's record. Its outbox has the first ledger entry, which a round then writes to the ledger."""
    return Record(
        job=job,
        uid=str(uuid.uuid4()),
        name=spec.name,
        spec_sha256=digest,
        created=now,
        nonce=secrets.token_hex(8),
        nodes=tuple(Node() for _ in range(spec.size().max)),
        port_base=free_port_block(ports_in_use(store, job)) if ports is None else ports,
        keep_disks=spec.keep_disks,
        outbox=(Entry(at=now, id="submitted.job", event=Event.SUBMITTED, by=by),),
    )


def ports_in_use(store: Store, job: str = "") -> Iterable[int]:
    """Yield the port blocks of the unfinished jobs but ``job``."""
    for other in store.active_jobs():
        with contextlib.suppress(CorruptError):  # an unreadable job's block may be drawn again: see free_port_block
            read = store.read_record(other) if other != job else None
            if read is not None:
                yield read.value.port_base


def free_port_block(used: Iterable[int]) -> int:
    """Return a random port block that no unfinished job of the stack uses, because jobs can share a host.

    The choice is random because a host can also run jobs of other stacks. Once all 199 blocks are taken, jobs share
    blocks. They cannot join each other, since each has its own ``run_id`` of torchrun, and a job whose port is busy
    restarts once.
    """
    taken = set(used)
    blocks = range(PORT_FIRST, PORT_END - PORT_BLOCK, PORT_BLOCK)
    return secrets.choice([base for base in blocks if base not in taken] or blocks)
