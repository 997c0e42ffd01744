"""Submitting a job: the order of writes that makes a crash at any point harmless.

``active/<job>`` (with the time), ``spec.json``, ``source``, ``names/<name>`` (create-only),
``rec`` (create-only). Before ``rec`` nothing runs. ``active`` is first because ticks find
jobs there: one without a record is left alone for a day, then its files are deleted, at no
cost to ticks. Until then, whoever submits the same content again finishes what an
interrupted submission began, once it has its name.
"""

from __future__ import annotations

import contextlib
import getpass
import secrets
import uuid
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.pack import Source
from spotkeeper.cli.poke import poke
from spotkeeper.cli.target import Target
from spotkeeper.reconcile import paths
from spotkeeper.reconcile.store_api import CorruptError, Held, Store
from spotkeeper.report.held import mend
from spotkeeper.spec.job import JobSpec, spec_sha256
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.names import new_job_id
from spotkeeper.spec.record import Hold, Phase, Rank, Record

PORT_FIRST = 20_000
PORT_BLOCK = 64  # ports of a job: its block + generation mod 64
PORT_END = 32_768  # where Linux' ephemeral ports begin


class Submitted(Struct, frozen=True):
    """``new``: False where the same job ran already; ``holds``: it holds, and why."""

    job: str
    name: str
    new: bool
    holds: str | None = None


def submit_file(target: Target, file: Path, spec: JobSpec, source: Source | None) -> tuple[Submitted, bool]:
    """Submit a checked job file to a stack; the job, and whether the function has heard of it already.

    Raises:
        CliError: as :func:`submit`; or the stack is being destroyed.
        StoreError: the bucket.
    """
    store = target.store()
    if store.draining():
        again = f"bring it up again: {target.up()}"
        raise CliError(f"{file}: the stack {target.stack} is being destroyed", Exit.REFUSED, again)
    done = submit(store, spec, source, target.clock.now(), whoami())
    return done, not done.new or poke(target, done.job)


def whoami() -> str:
    """Who submits, for the ledger; "" where this machine has no name for its user (some containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def submit(store: Store, spec: JobSpec, source: Source | None, now: float, by: str = "") -> Submitted:
    """Put a checked job into the bucket; the next round starts it. ``by``: who submits, for the ledger.

    Raises:
        CliError: the name is taken by an unfinished job with other content, or the job was cancelled meanwhile.
        StoreError: the bucket.
    """
    full = with_source(spec, source)
    digest = spec_sha256(full)
    earlier = _same_name(store, full, digest)
    if earlier is not None:
        job, record = earlier
        if record is not None:
            return Submitted(job, spec.name, new=False, holds=record.reason if record.phase is Phase.HOLD else None)
    else:
        job = new_job_id()
        store.set_active(job, now)
        store.put_spec(job, full)
    if source is not None:
        store.put(paths.source(job, source.sha256), source.tar)
    if earlier is None and not store.put_name(spec.name, job):
        for path in store.list(paths.folder(job)):
            store.delete(path)
        store.clear_active(job)
        raise CliError(
            f"{spec.name}: another submission of this name came first", Exit.REFUSED, "submit again to see it"
        )
    store.set_active(job, now)  # of an earlier submission it may be gone
    store.append_ledger(job, Entry(at=now, id="submitted.job", event=Event.SUBMITTED, by=by))
    if not store.create_record(_record(store, job, full, digest, now)):
        theirs = store.read_record(job)
        if theirs is None or theirs.value.phase is not Phase.DONE:  # the same submission, by another shell
            return Submitted(job, spec.name, new=False)
        store.clear_active(job)
        raise CliError(f"{spec.name} ({job}): somebody cancelled it meanwhile", Exit.REFUSED, "submit it again")
    return Submitted(job, spec.name, new=True)


def with_source(spec: JobSpec, source: Source | None) -> JobSpec:
    """The job file together with what it sends: what a job's content is known by (``spec_sha256``)."""
    return msgspec.structs.replace(spec, source_sha256=source.sha256 if source else None)


def _same_name(store: Store, spec: JobSpec, digest: str) -> tuple[str, Record | None] | None:
    """The unfinished job of this name with this content, and its record if it is there; None: the name is free."""
    job = store.read_name(spec.name)
    if job is None:
        return None
    held = store.read_record(job)
    if held is not None and held.value.phase in (Phase.END, Phase.DONE):
        store.delete_name(spec.name, job)
        return None
    return _refuse_other(store, job, held, spec, digest)


def check_name(store: Store, spec: JobSpec) -> None:
    """Whether a submission would be taken; changes nothing. ``spec``: with its source.

    Raises:
        CliError: an unfinished job of this name has other content.
    """
    job = store.read_name(spec.name)
    held = store.read_record(job) if job is not None else None
    if job is not None and (held is None or held.value.phase not in (Phase.END, Phase.DONE)):
        _refuse_other(store, job, held, spec, spec_sha256(spec))


def _refuse_other(
    store: Store, job: str, held: Held[Record] | None, spec: JobSpec, digest: str
) -> tuple[str, Record | None]:
    """
    Raises:
        CliError: the unfinished ``job`` of this name has other content.
    """
    theirs = store.read_spec(job, held.value.spec_key() if held is not None else "")
    if theirs is not None and spec_sha256(theirs) == digest:
        return job, held.value if held is not None else None
    state = "runs already"
    end = f"have that one go on with these files (spotkeeper pause {spec.name}, then {mend(spec.name)}), or end it"
    if held is None:
        state, end = "is being submitted already", "end that one"
    elif held.value.phase is Phase.HOLD:
        state = "holds since it failed" if held.value.hold is Hold.FAILURE else "holds"
        end = f"resume that one with these files ({mend(spec.name)}), or end it with its checkpoints"
    raise CliError(
        f"{spec.name}: a job of this name {state} ({job}) with other content: {', '.join(differences(theirs, spec))}",
        Exit.REFUSED,
        f"give this one another `name`, or {end}: spotkeeper cancel {spec.name}",
    )


def differences(theirs: JobSpec | None, ours: JobSpec) -> list[str]:
    """Names of the fields that differ; values stay out, they may be long or private."""
    if theirs is None:
        return ["its job file is missing"]
    fields = [field for field in ours.__struct_fields__ if field != "source"]
    found = [field for field in fields if getattr(theirs, field) != getattr(ours, field)]
    return ["source" if field == "source_sha256" else field for field in found]


def _record(store: Store, job: str, spec: JobSpec, digest: str, now: float) -> Record:
    return Record(
        job=job,
        uid=str(uuid.uuid4()),
        name=spec.name,
        spec_sha256=digest,
        created=now,
        nonce=secrets.token_hex(8),
        ranks=tuple(Rank() for _ in range(spec.size().max)),
        port_base=free_port_block(_ports_in_use(store, job)),
        keep_disks=spec.keep_disks,
    )


def _ports_in_use(store: Store, job: str) -> Iterable[int]:
    for other in store.active_jobs():
        with contextlib.suppress(CorruptError):  # its block may be drawn again; `run_id` tells the two apart
            held = store.read_record(other) if other != job else None
            if held is not None:
                yield held.value.port_base


def free_port_block(used: Iterable[int]) -> int:
    """A block no other unfinished job of the stack has: jobs may share a host.

    Drawn, because a host may carry jobs of other stacks too, of which nobody here knows. With every
    block taken (199 jobs) the blocks are shared: torchrun's ``run_id`` then keeps two jobs apart, and
    a busy port costs one restart.
    """
    taken = set(used)
    blocks = range(PORT_FIRST, PORT_END - PORT_BLOCK, PORT_BLOCK)
    return secrets.choice([base for base in blocks if base not in taken] or blocks)
