"""Makes the generation document and the answer to an agent from the record. Pure.

Nothing here reads the cloud: a machine's address, the id of its boot and whether its disk was attached were recorded
when it was admitted and became a member. So two instances of the function with the same record give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Grant
from spotkeeper.contract.facts import HANG
from spotkeeper.contract.generation import (
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
from spotkeeper.contract.job import PARAMS, JobSpec
from spotkeeper.contract.record import Phase, Record, Slot, SlotState, TrialProgress
from spotkeeper.contract.stack import StackState

PORT_BLOCK = 64  # ports of a job from its `port_base`, one per generation: processes of older ones cannot connect
ANSWERS_KEPT = 256  # most jobs in the cache

P = ParamSpec("P")
T = TypeVar("T")


def once(ask: Callable[Concatenate[Record, P], T]) -> Callable[Concatenate[Record, P], T]:
    """Cache a pure function of a record: keep the last result for each job while the record's version is the same."""
    kept: dict[str, tuple[Record, tuple[object, ...], T]] = {}

    def asked(record: Record, /, *rest: P.args, **named: P.kwargs) -> T:
        found = kept.get(record.job)
        if found is not None and not named and _same(found[0], record) and found[1] == rest:
            return found[2]
        answer = ask(record, *rest, **named)
        if not named:
            if len(kept) >= ANSWERS_KEPT:
                kept.clear()
            kept[record.job] = record, rest, answer
        return answer

    update_wrapper(asked, ask)
    return asked


def _same(one: Record, two: Record) -> bool:
    """Whether both are the same version of a record. Every write of a record has a new nonce."""
    return one is two or bool(one.nonce and (one.uid, one.ver, one.nonce) == (two.uid, two.ver, two.nonce))


class Speaker(Struct, frozen=True):
    """The identity of the machine that sent a request, from its verified token, never from the request's body."""

    uid: str  # unique instance id
    name: str
    zone: str


class SpeakerPlace(Struct, frozen=True):
    """A speaker's node, attempt and slot in a job's record. ``slot`` is None if the attempt is superseded."""

    node: int
    attempt: int
    slot: Slot | None = None
    cur: bool = False


def place(record: Record, stack: StackState, who: Speaker, grant: Grant | None = None) -> SpeakerPlace | None:
    """Return the node and attempt of a speaker; None if the record does not know such an attempt (yet).

    ``grant``: a static machine's grant, which says its job, node and attempt.
    """
    owned = names.parse_vm_name(who.name)
    if grant is not None and grant.resource == f"machine:{who.name}":
        node, attempt = grant.node, grant.attempt
    elif owned is not None and owned.stack == stack.stack and owned.job == record.job:
        node, attempt = owned.node, owned.number
    else:
        return None
    if node >= len(record.nodes):
        return SpeakerPlace(node, attempt)
    for slot in (record.nodes[node].cur, record.nodes[node].next):
        if slot is not None and slot.attempt == attempt:
            ours = slot.zone == who.zone and slot.uid in (None, who.uid)
            return SpeakerPlace(node, attempt, slot if ours else None, slot is record.nodes[node].cur)
    # A grant above `top` is for an intent about to be written, also when a hold ends: a static machine superseded now
    # would drop an attempt that has not begun.
    over = attempt <= record.nodes[node].top or record.over
    return SpeakerPlace(node, attempt) if over else None


def is_static(stack: StackState, who: Speaker) -> bool:
    return any(machine.name == who.name for pool in stack.pools for machine in pool.machines)


def role(record: Record, where: SpeakerPlace | None, boot: str) -> Role:
    """Return the speaker's role according to the record."""
    if where is None:
        return Role.UNKNOWN
    slot = where.slot
    if slot is None or record.phase is not Phase.RUN:
        return Role.SUPERSEDED
    member = where.cur and slot.state is SlotState.MEMBER and where.node in record.members and slot.boot == boot
    return Role.MEMBER if member else Role.STANDBY


def members(record: Record, spec: JobSpec | None, stack: StackState) -> tuple[Member, ...]:
    """Return the machines that are still in the newest generation, in the order of its nodes."""
    out = []
    counts = {pool.name: nproc(spec, stack, pool.name) for pool in stack.pools}
    for index in record.members:
        slot = record.nodes[index].cur if index < len(record.nodes) else None
        if slot is None or slot.state is not SlotState.MEMBER or slot.uid is None or slot.boot is None:
            continue
        out.append(
            Member(
                node=index,
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
    """Return the generation document, on which agents act."""
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
        upload=record.leaving and record.move is not None and record.move.bucket,
        stacks=record.roll is not None and record.roll.cause == HANG,
    )


def mean_life_s(record: Record) -> float | None:
    """Return the mean time between the job's losses, seconds, for the save interval; None before the first loss."""
    budget = record.budget
    if not budget.loss_times or not budget.preemptions:
        return None
    return max(1.0, (budget.loss_times[-1] - record.created) / budget.preemptions)


def nproc(spec: JobSpec | None, stack: StackState, pool_name: str) -> int:
    """Return the number of processes per node: from the job file, otherwise from the pool."""
    if spec is not None and spec.nproc is not None:
        return spec.nproc
    pool = stack.pool(pool_name)
    return pool.nproc if pool is not None else 1


def _mixed_world(spec: JobSpec, stack: StackState) -> int | None:
    """Return the number of processes of a mix of machines, whose work the library divides; None: it is no mix."""
    return sum(group.nodes * nproc(spec, stack, group.pool) for group in spec.machines) or None


def job_run(spec: JobSpec, count: int, trial: TrialProgress | None = None, mixed_world: int | None = None) -> JobRun:
    """Return what a node needs to run the job, with ``count`` processes on it.

    ``trial``: its part in a search; ``mixed_world``: processes of a mix of machines.
    """
    size, mirror = spec.size(), spec.checkpoint.mirror
    params = {PARAMS: msgspec.json.encode(spec.params).decode()} if spec.params else {}
    return JobRun(
        name=spec.name,
        command=spec.command,
        source_sha256=spec.source_sha256,
        env=spec.env | params,
        secrets=dict(spec.secrets),
        python=spec.python,
        requirements=spec.requirements or "",
        image=spec.image or "",
        nproc=count,
        launcher=spec.launcher,
        warm=spec.warm,
        stop=spec.stop,
        grace_s=spec.grace_s,
        interval_s=spec.checkpoint.interval_s,
        keep=spec.checkpoint.keep,
        snapshots=spec.checkpoint.snapshots,
        overhead_percent=spec.checkpoint.overhead_percent,
        peers_mb_s=spec.checkpoint.peers_mb_s if spec.checkpoint.peers else None,
        seed=spec.seed,
        max_world=size.max * count if size.min < size.max else mixed_world,
        hang=_hang(spec),
        until=trial.until if trial is not None else None,
        metric=trial.of.metric if trial is not None else "",
        scratch_gb=spec.scratch_gb,
        log_bytes=(spec.logs.keep_mb << 20) // size.max,
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
    """Return the answer to a sync.

    If ``record`` is None, no job knows this machine, so its role is IDLE for a static machine of the stack, else
    UNKNOWN. The answer includes the document if that is newer than ``sync.ver`` and the speaker belongs to the job.
    ``run`` (how to run the job) goes out with every document, and to a machine that stands by with every answer.
    """
    if record is None:
        what = Role.IDLE if is_static(stack, who) else Role.UNKNOWN
        return SyncReply(what, lease_minutes=stack.lease_minutes, bundle=stack.bundle_sha256)
    where = place(record, stack, who, grant)
    what = role(record, where, sync.boot)
    if where is None or what is Role.UNKNOWN:
        return SyncReply(Role.UNKNOWN, lease_minutes=stack.lease_minutes, bundle=stack.bundle_sha256)
    slot = where.slot
    fresh = record.ver > sync.ver
    over = record.over and not record.keep_disks
    run = None
    if spec is not None and slot is not None and (fresh or what is Role.STANDBY):
        run = job_run(spec, nproc(spec, stack, slot.pool), record.trial, _mixed_world(spec, stack))
    return SyncReply(
        role=what,
        job=record.job,
        node=where.node,
        attempt=where.attempt,
        disk=_disk(record, where) if what is not Role.SUPERSEDED else None,
        doc=generation(record, spec, stack) if fresh else None,
        run=run,
        lease_minutes=stack.lease_minutes,
        bundle=stack.bundle_sha256,
        over=over,
        moves=record.move is not None and what is Role.SUPERSEDED,
        mirrored=record.mirror[0].commit if record.mirror else None,
        mirrored_at=record.mirror[0].at if record.mirror else None,
        fetch=_fetch(record, where) if what is not Role.SUPERSEDED else None,
    )


def _fetch(record: Record, where: SpeakerPlace) -> FetchOrder | None:
    """Return the checkpoint copy that this machine must download, or None. Only a node's ``cur`` downloads copies."""
    fetch = record.fetch
    if fetch is None or where.node not in fetch.nodes or not where.cur:
        return None
    return FetchOrder(fetch.commit, where.node if fetch.source is None else fetch.source)


def _disk(record: Record, where: SpeakerPlace) -> int | None:
    """Return the number of the disk to mount; 0: a static machine's own disk. Only ``cur`` gets a disk."""
    if not where.cur or where.slot is None:
        return None
    return 0 if where.slot.machine is not None else record.nodes[where.node].disk


@once
def at_rest(record: Record) -> bool:
    """Whether the job is DONE, or all its nodes are members and no change is pending.

    The function then answers agents' polls with fewer reads of the bucket.
    """
    if record.phase is not Phase.RUN:
        return record.phase is Phase.DONE
    if record.stop or record.roll is not None or record.move is not None or record.pause:
        return False
    return all(
        node.next is None
        and node.cur is not None
        and node.cur.state is SlotState.MEMBER
        and node.cur.notice is None
        and node.cur.ends is None
        for node in (record.nodes[index] for index in record.filled())
    )
