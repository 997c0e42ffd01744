"""How the two clouds behave: what a call does, and what happens by itself. Decides nothing.

GCE: a name is one machine's per zone and free again after it; a request id is remembered for minutes, and a
replay of one whose machine is gone says so; a machine that was accepted may be taken away for want of
capacity while it comes up, which only the list of operations tells. EC2: a token is dead for ever once its
machine is; a refusal is told at once; a machine may speak before it is listed, and is listed after its death.
Both: deletion takes time, in which the machine holds its disk and may write; a disk has one writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spotkeeper.contract.cloud import (
    Action,
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    Result,
    ResultKind,
)
from spotkeeper.contract.stack import Model
from tests.model.values import JOBS, POOL, TORN, D, Life, P, Sky, V


class Done(NamedTuple):
    """One thing that a call may come to. ``fault``: what it costs of the faults that may happen."""

    say: str
    sky: Sky
    kind: ResultKind = ResultKind.ACCEPTED
    fault: int = 0
    why: str = ""  # a property that it breaks


def perform(sky: Sky, action: Action, ec2: bool, faults: frozenset[str]) -> Iterator[Done]:
    """Everything that a call may come to; the first is what happens on a good day."""
    if sky.dead and getattr(action, "zone", "") == sky.dead:
        yield Done(f"calls zone {sky.dead}, which does not answer", sky)
        return
    match action:
        case InsertVm():
            yield from _insert(sky, action, ec2, faults)
        case DeleteVm():
            yield Done(f"deletes {action.uid}", _stopping(sky, action.uid, action.name))
        case AttachDisk():
            yield Done(f"attaches {action.disk} to {action.vm_uid}", _attach(sky, action))
        case DetachDisk():
            yield _detach(sky, action)
        case CreateDisk():
            say = f"creates disk {action.number} of node {action.node} in {action.zone}"
            yield from _copied(sky, say, _create(sky, action), faults, action.snapshot is not None)
        case DeleteDisk():
            kept = frozenset(d for d in sky.disks if (d.name, d.zone) != (action.disk, action.zone) or d.user)
            yield Done(f"deletes disk {action.disk} in {action.zone}", sky._replace(disks=kept))
        case CreateSnapshot():
            say = f"copies disk {action.number} of node {action.node}"
            yield from _copied(sky, say, _snapshot(sky, action), faults)
        case DeleteSnapshot():
            kept_snaps = frozenset(p for p in sky.snaps if p.name != action.name)
            yield Done(f"deletes snapshot {action.name}", sky._replace(snaps=kept_snaps))


def spent(sky: Sky, action: Action, forgets: bool) -> ResultKind | None:
    """What a call comes to where it can change nothing, now or ever; None where it still may.

    A unique id never comes back, nor does the name of a snapshot or of a disk's number that is gone; a key that
    was used stays so, unless the cloud ``forgets`` it.
    """
    match action:
        case InsertVm():
            key = (JOBS.index(action.job), action.node, action.attempt, action.zone)
            there = any((v.job, v.node, v.attempt, v.zone) == key for v in sky.vms)
            return ResultKind.DEAD_KEY if key in sky.keys and not there and not forgets else None
        case DeleteVm():
            hit = any(action.uid in (v.uid, v.name) and v.life < Life.STOPPING for v in sky.vms)
            return None if hit else ResultKind.ACCEPTED
        case AttachDisk():
            hit = any(action.vm_uid in (v.uid, v.name) and v.life < Life.STOPPING for v in sky.vms)
            return None if hit else ResultKind.ACCEPTED
        case DetachDisk():
            return None if sky.vm(action.vm_uid) is not None else ResultKind.ACCEPTED
        case _:
            return None


def _insert(sky: Sky, action: InsertVm, ec2: bool, faults: frozenset[str]) -> Iterator[Done]:
    job = JOBS.index(action.job)
    key = (job, action.node, action.attempt, action.zone)
    what = f"inserts attempt {action.attempt} of node {action.node} in {action.zone}"
    there = [v for v in sky.vms if (v.job, v.node, v.attempt, v.zone) == key]
    if key not in sky.keys:
        born = V(*key)
        yield Done(what, sky._replace(vms=sky.vms | {born}, keys=sky.keys | {key}))
        if "refused" in faults and ec2:
            yield Done(f"{what}: no capacity", sky, ResultKind.CAPACITY, 1)
    elif there and not (ec2 and all(v.life in (Life.STOPPING, Life.DEAD) for v in there)):
        yield Done(f"{what}, which is there", sky)
    else:
        yield Done(f"{what}: the key is used up", sky, ResultKind.DEAD_KEY)
        if "forgotten" in faults and not ec2:
            twin = V(*key)._replace(twin=1)
            yield Done(f"{what}: the key is forgotten, a twin is made", sky._replace(vms=sky.vms | {twin}), fault=1)


def _stopping(sky: Sky, uid: str, name: str) -> Sky:
    """Delete by unique id. A cloud that got a name instead would delete the machine that has this name now."""
    hit = [v for v in sky.vms if uid in (v.uid, v.name) and v.life in (Life.COMING, Life.RUNNING)]
    return sky._replace(vms=(sky.vms - set(hit)) | {v._replace(life=Life.STOPPING) for v in hit})


def _attach(sky: Sky, action: AttachDisk) -> Sky:
    uid = next((v.uid for v in sky.vms if action.vm_uid in (v.uid, v.name) and v.life is Life.RUNNING), None)
    if uid is None:
        return sky
    done = (
        d._replace(user=uid) if (d.name, d.zone) == (action.disk, action.zone) and not d.user else d for d in sky.disks
    )
    return sky._replace(disks=frozenset(done))


def _detach(sky: Sky, action: DetachDisk) -> Done:
    hit = [d for d in sky.disks if (d.name, d.zone, d.user) == (action.disk, action.zone, action.vm_uid)]
    writer = sky.vm(action.vm_uid)
    why = "S2: takes the disk from a machine that writes to it" if hit and writer and writer.alive else ""
    disks = (sky.disks - set(hit)) | {d._replace(user="") for d in hit}
    return Done(f"detaches {action.disk} from {action.vm_uid}", sky._replace(disks=disks), why=why)


def _copied(sky: Sky, say: str, after: Sky, faults: frozenset[str], copies: bool = True) -> Iterator[Done]:
    """A disk is made or copied; once the cloud has refused one copy, it refuses all."""
    if not (copies and sky.uncopied):
        yield Done(say, after)
    if copies and (sky.uncopied or "uncopied" in faults):
        refused = sky._replace(uncopied=True)
        yield Done(f"{say}: refused", refused, ResultKind.PERMANENT, 0 if sky.uncopied else 1)


def _create(sky: Sky, action: CreateDisk) -> Sky:
    job = JOBS.index(action.job)
    if any((d.job, d.node, d.number, d.zone) == (job, action.node, action.number, action.zone) for d in sky.disks):
        return sky
    source = next((p for p in sky.snaps if p.name == action.snapshot), None)
    if action.snapshot is not None and source is None:
        return sky
    disk = D(job, action.node, action.number, action.zone, commit=source.commit if source else 0)
    return sky._replace(disks=sky.disks | {disk})


def _snapshot(sky: Sky, action: CreateSnapshot) -> Sky:
    job = JOBS.index(action.job)
    source = [
        d for d in sky.disks if (d.job, d.node, d.number, d.zone) == (job, action.node, action.number, action.zone)
    ]
    if not source or any(p.number == action.copy and (p.job, p.node) == (job, action.node) for p in sky.snaps):
        return sky
    writer = sky.vm(source[0].user) if source[0].user else None
    commit = TORN if writer is not None and writer.alive else source[0].commit
    return sky._replace(snaps=sky.snaps | {P(job, action.node, action.copy, commit)})


# -- what happens by itself


def gone(sky: Sky, v: V, ec2: bool) -> Sky:
    """The machine's end: its disk is free."""
    rest = {v._replace(life=Life.DEAD, alive=False, writes=False, noticed=0, planned=False, gen=0)} if ec2 else set()
    disks = frozenset(d._replace(user="") if d.user == v.uid else d for d in sky.disks)
    return sky._replace(vms=(sky.vms - {v}) | rest, disks=disks)


def put(sky: Sky, v: V, **changes: object) -> Sky:
    return sky._replace(vms=(sky.vms - {v}) | {v._replace(**changes)})


def drift(sky: Sky, ec2: bool, faults: frozenset[str]) -> Iterator[Done]:
    """What may happen to machines without anybody's call."""
    for v in sky.vms:
        if v.life is Life.COMING:
            yield Done(f"{v.uid} {'is listed' if ec2 else 'comes up'}", put(sky, v, life=Life.RUNNING))
            if "refused" in faults and not ec2:
                yield Done(f"there is no capacity for {v.uid} after all", taken_away(sky, v), fault=1)
        elif v.life is Life.STOPPING:
            yield Done(f"{v.uid} is gone", gone(sky, v, ec2))
        elif v.life is Life.DEAD:
            yield Done(f"{v.uid} is listed no more", sky._replace(vms=sky.vms - {v}))
        if v.life not in (Life.COMING, Life.RUNNING):
            continue
        if v.noticed:
            yield Done(f"{v.uid} is taken at its deadline", put(sky, v, life=Life.STOPPING))
        if v.noticed == 1:
            yield Done(f"the deadline of {v.uid} has passed", put(sky, v, noticed=2))
        if "expires" in faults and v.life is Life.RUNNING and not v.noticed:
            yield Done(f"the longest run of {v.uid} ends before long", put(sky, v, noticed=1, planned=True), fault=1)
        if "killed" in faults:
            yield Done(f"{v.uid} is taken without notice", put(sky, v, life=Life.STOPPING), fault=1)
        if "hangs" in faults and not v.hung:
            yield Done(f"the agent of {v.uid} hangs", put(sky, v, hung=True), fault=1)
        if "reboots" in faults and v.life is Life.RUNNING:
            fresh = {"boot": v.boot + 1, "alive": False, "gen": 0, "writes": False, "hung": False}
            yield Done(f"{v.uid} reboots", put(sky, v, **fresh), fault=1)
    yield from _node(sky, faults)


def taken_away(sky: Sky, v: V) -> Sky:
    """GCE accepts, lists, and then has no capacity: the operation fails."""
    action = InsertVm(JOBS[v.job], "", v.node, v.attempt, POOL, v.zone, Model.SPOT)
    return gone(sky, v, False)._replace(ops=sky.ops | {Result(action, ResultKind.CAPACITY)})


def _node(sky: Sky, faults: frozenset[str]) -> Iterator[Done]:
    machine = sky.machine
    if machine is None:
        return
    if not machine.up:
        back = machine._replace(up=True, boot=machine.boot + 1, hung=False)
        yield Done("the static machine is back", sky._replace(machine=back))
        return
    stopped = {"alive": False, "gen": 0}
    if "killed" in faults:
        yield Done("the static machine is down", sky._replace(machine=machine._replace(up=False, **stopped)), fault=1)
    if "hangs" in faults and not machine.hung:
        yield Done("the static machine's agent hangs", sky._replace(machine=machine._replace(hung=True)), fault=1)
    if "reboots" in faults:
        fresh = machine._replace(boot=machine.boot + 1, hung=False, **stopped)
        yield Done("the static machine reboots", sky._replace(machine=fresh), fault=1)
