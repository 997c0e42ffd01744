"""The generation document and the answer to an agent: pure views of the record.

Nothing here reads the cloud. Addresses, boots and whether a member's disk was attached are in the record
since admission and publication, so two functions that hold the same record give the same answer.
"""

from __future__ import annotations

from msgspec import Struct

from spotkeeper.reconcile.recent import once
from spotkeeper.spec import names
from spotkeeper.spec.generation import (
    DocState,
    FetchOrder,
    Generation,
    HangRun,
    JobRun,
    Member,
    MirrorRun,
    Role,
    Sync,
    SyncReply,
)
from spotkeeper.spec.hang import CAUSE as HANG
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.record import Grant, Phase, Record, Slot, SlotState
from spotkeeper.spec.stack import StackState

PORT_BLOCK = 64  # ports of a job, from its `port_base`: one per generation, so stragglers of an older one knock in vain


class Speaker(Struct, frozen=True):
    """Who speaks, from a verified identity token; never from a body."""

    uid: str  # unique instance id
    name: str
    zone: str


class Place(Struct, frozen=True):
    """What a speaker is in a job's record. ``slot`` is None where its attempt is superseded."""

    rank: int
    attempt: int
    slot: Slot | None = None
    cur: bool = False


def place(record: Record, stack: StackState, who: Speaker, grant: Grant | None = None) -> Place | None:
    """The rank and attempt of a speaker; None where the record knows nothing of such an attempt (yet).

    ``grant``: a static node's entry of the allocation document, which is what ties it to a job.
    """
    owned = names.parse_vm_name(who.name)
    if grant is not None and grant.resource == f"node:{who.name}":
        rank, attempt = grant.rank, grant.attempt
    elif owned is not None and owned.stack == stack.stack and owned.job == record.job:
        rank, attempt = owned.rank, owned.number
    else:
        return None
    if rank >= len(record.ranks):
        return Place(rank, attempt)
    for slot in (record.ranks[rank].cur, record.ranks[rank].next):
        if slot is not None and slot.attempt == attempt:
            ours = slot.zone == who.zone and slot.uid in (None, who.uid)
            return Place(rank, attempt, slot if ours else None, slot is record.ranks[rank].cur)
    # A grant above `top` is for an intent about to be written, also while a hold is being left: asked to go now, a
    # static node would give its word for an attempt that has yet to begin.
    over = attempt <= record.ranks[rank].top or record.phase in (Phase.END, Phase.DONE)
    return Place(rank, attempt) if over else None


def role(record: Record, where: Place | None, boot: str) -> Role:
    """What the function thinks the speaking machine is."""
    if where is None:
        return Role.UNKNOWN
    slot = where.slot
    if slot is None or record.phase is not Phase.RUN:
        return Role.SUPERSEDED
    member = where.cur and slot.state is SlotState.MEMBER and where.rank in record.members and slot.boot == boot
    return Role.MEMBER if member else Role.STANDBY


def members(record: Record, spec: JobSpec | None, stack: StackState) -> tuple[Member, ...]:
    """The machines of the newest generation that still are in it, in its order."""
    out = []
    counts = {pool.name: nproc(spec, stack, pool.name) for pool in stack.pools}
    for index in record.members:
        slot = record.ranks[index].cur if index < len(record.ranks) else None
        if slot is None or slot.state is not SlotState.MEMBER or slot.uid is None or slot.boot is None:
            continue
        out.append(
            Member(
                rank=index,
                attempt=slot.attempt,
                uid=slot.uid,
                boot=slot.boot,
                address=slot.address or "",
                nproc=counts.get(slot.pool) or nproc(spec, stack, slot.pool),
                disk=slot.disk,
            )
        )
    return tuple(out)


def state(record: Record) -> DocState:
    if record.phase is not Phase.RUN:
        return DocState.DONE
    if record.stop:
        return DocState.SAVE_STOP
    return DocState.ROLL_CALL if record.roll is not None else DocState.RUN


@once
def generation(record: Record, spec: JobSpec | None, stack: StackState) -> Generation:
    """The document as agents act on it."""
    listed = members(record, spec, stack)
    return Generation(
        job=record.job,
        uid=record.uid,
        ver=record.ver,
        gen=record.gen,
        state=state(record),
        members=listed,
        master=listed[0].address if listed else "",
        port=record.port_base + record.gen % PORT_BLOCK,
        run_id=f"{record.uid}-{record.gen}",
        deadline=record.stop_deadline if record.stop else None,
        replicated=spec.checkpoint.replicated if spec is not None else True,
        mean_life_s=mean_life_s(record),
        stacks=record.roll is not None and record.roll.cause == HANG,
    )


def mean_life_s(record: Record) -> float | None:
    """Observed mean time between the job's losses, for the save interval; None before the first."""
    budget = record.budget
    if not budget.loss_times or not budget.preemptions:
        return None
    return max(1.0, (budget.loss_times[-1] - record.created) / budget.preemptions)


def nproc(spec: JobSpec | None, stack: StackState, pool_name: str) -> int:
    """Processes per node: the job's word, else the pool's."""
    if spec is not None and spec.nproc is not None:
        return spec.nproc
    pool = stack.pool(pool_name)
    return pool.nproc if pool is not None else 1


def job_run(spec: JobSpec, count: int) -> JobRun:
    """What a node must know to run the job; ``count`` processes on this node."""
    size, mirror = spec.size(), spec.checkpoint.mirror
    return JobRun(
        name=spec.name,
        command=spec.command,
        source_sha256=spec.source_sha256,
        env=dict(spec.env),
        secrets=dict(spec.secrets),
        python=spec.python,
        requirements=spec.requirements or "",
        nproc=count,
        launcher=spec.launcher,
        warm=spec.warm,
        stop=spec.stop,
        grace_s=spec.grace_s,
        interval_s=spec.checkpoint.interval_s,
        keep=spec.checkpoint.keep,
        seed=spec.seed,
        max_world=size.max * count if size.min < size.max else None,
        hang=_hang(spec),
        mirror=MirrorRun(60.0 * mirror.every_min, 1e6 * mirror.mb_s) if mirror is not None else None,
    )


def _hang(spec: JobSpec) -> HangRun | None:
    hang = spec.hang
    return None if hang == "off" else HangRun(hang.factor, 60.0 * hang.floor_min, 60.0 * hang.idle_min)


def reply(
    record: Record | None,
    spec: JobSpec | None,
    stack: StackState,
    who: Speaker,
    sync: Sync,
    grant: Grant | None = None,
) -> SyncReply:
    """The answer to a sync.

    ``record`` None: no job knows this machine; a static node of the stack is idle, anything else unknown.
    The document is in it where it is newer than ``sync.ver`` and the speaker belongs to the job; ``run``
    goes with every document, and to a machine that stands by.
    """
    if record is None:
        known = any(node.name == who.name for pool in stack.pools for node in pool.nodes)
        return SyncReply(
            Role.IDLE if known else Role.UNKNOWN, lease_minutes=stack.lease_minutes, bundle=stack.bundle_sha256
        )
    where = place(record, stack, who, grant)
    what = role(record, where, sync.boot)
    if where is None or what is Role.UNKNOWN:
        return SyncReply(Role.UNKNOWN, lease_minutes=stack.lease_minutes, bundle=stack.bundle_sha256)
    slot = where.slot
    fresh = record.ver > sync.ver
    over = record.phase in (Phase.END, Phase.DONE) and not record.keep_disks
    wants_run = spec is not None and slot is not None and (fresh or what is Role.STANDBY)
    return SyncReply(
        role=what,
        job=record.job,
        rank=where.rank,
        attempt=where.attempt,
        disk=_disk(record, where) if what is not Role.SUPERSEDED else None,
        doc=generation(record, spec, stack) if fresh else None,
        run=job_run(spec, nproc(spec, stack, slot.pool)) if wants_run and spec and slot else None,
        lease_minutes=stack.lease_minutes,
        bundle=stack.bundle_sha256,
        over=over,
        mirrored=record.mirror[0].commit if record.mirror else None,
        mirrored_at=record.mirror[0].at if record.mirror else None,
        fetch=_fetch(record, where) if what is not Role.SUPERSEDED else None,
    )


def _fetch(record: Record, where: Place) -> FetchOrder | None:
    """What this machine shall have from the bucket: only who has its rank's disk."""
    fetch = record.fetch
    if fetch is None or where.rank not in fetch.ranks or not where.cur:
        return None
    return FetchOrder(fetch.commit, where.rank if fetch.source is None else fetch.source)


def _disk(record: Record, where: Place) -> int | None:
    """The disk only ever goes to cur. A static node's own disk is called 0 (and is not the rank's disk 0)."""
    if not where.cur or where.slot is None:
        return None
    return 0 if where.slot.node is not None else record.ranks[where.rank].disk


@once
def at_rest(record: Record) -> bool:
    """Every rank a member, nothing pending: one read less for each of its agents' polls."""
    if record.phase is not Phase.RUN:
        return record.phase is Phase.DONE
    if record.stop or record.roll is not None or record.move is not None or record.pause:
        return False
    return all(
        rank.next is None
        and rank.cur is not None
        and rank.cur.state is SlotState.MEMBER
        and rank.cur.notice is None
        and rank.cur.ends is None
        for rank in (record.ranks[index] for index in record.filled())
    )
