"""Handles users' requests (cancel, pause, resume, move, swap, resize), and ends holds and jobs.

Each request is handled exactly once (its id goes into ``requests_done`` in the same write) and leaves a ledger entry,
which gives the reason if it is refused. A resume can replace the job file in the record. Since a held job has no
machines, all agents of the next generation then fetch the new file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from spotkeeper.contract.cloud import disks_kept
from spotkeeper.contract.job import JobRequest, JobSpec, RequestKind, named_pools
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Outcome, Phase, SlotState
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import DAY_S, Draft
from spotkeeper.reconcile.decide.gang import resize, rungs, zone_move
from spotkeeper.reconcile.decide.job import limits

KEPT = 64  # number of handled request ids that the record remembers
SHORT = 12  # hash digits shown in the ledger: enough to find the object


def step(draft: Draft) -> None:
    waiting = draft.snapshot.requests
    for request in waiting:
        done = draft.record.requests_done
        if request.id in done:
            continue
        refused = _take(draft, request)
        draft.set(requests_done=_kept((*done, request.id), {each.id for each in waiting}))
        detail = f"refused: {refused}" if refused else f"by {request.by}" if request.by else ""
        draft.log(Event.REQUEST, request.id, node=request.node, cause=request.kind.value, detail=detail)
        if draft.record.over:
            return


def _kept(done: tuple[str, ...], waiting: set[str]) -> tuple[str, ...]:
    """Return the ids of handled requests to remember: the newest, and those of requests that still exist."""
    return tuple(one for at, one in enumerate(done, start=KEPT - len(done)) if at >= 0 or one in waiting)


def _take(draft: Draft, request: JobRequest) -> str:
    """Carry out a request. Returns "", or in one line why the request is refused."""
    if draft.record.over:
        return "the job has ended"
    return _TAKERS[request.kind](draft, request)


def _cancel(draft: Draft, request: JobRequest) -> str:
    draft.end(Outcome.CANCELLED, f"cancelled by {request.by}" if request.by else "cancelled")
    return ""


def _pause(draft: Draft, request: JobRequest) -> str:
    reason = f"paused by {request.by}" if request.by else "paused"
    if draft.record.phase is Phase.HOLD and draft.record.hold is Hold.QUEUE:
        draft.set(hold=Hold.PAUSE, reason=reason)  # it leaves the queue, and no longer goes on by itself
        return ""
    if draft.record.phase is Phase.HOLD:
        return "the job is on hold already"
    if not draft.members():
        draft.hold(Hold.PAUSE, reason)
        return ""
    draft.set(pause=reason, recalled=False)
    draft.halt(draft.now + draft.save_s() + draft.times.stop_s, "pause")
    return ""


def _resume(draft: Draft, request: JobRequest) -> str:
    changed = ""
    if draft.record.hold is Hold.RUNG:
        return "the job waits for the other trials of its search, and goes on or ends by itself"
    if request.spec_sha256 is not None and request.spec_sha256 != draft.record.spec_sha256:
        refused, changed = _adopt(draft, request.spec_sha256)
        if refused:
            return refused
    holds = draft.record.phase is Phase.HOLD
    if draft.record.recalled or (holds and draft.record.hold is Hold.QUEUE):
        return "" if changed else "the job waits in the queue, and goes on by itself: spotkeeper queue"
    if not holds and not draft.record.pause and not (request.go_back and location.lacking(draft)):
        return "the job is not on hold" + (", and does not wait for a checkpoint" if request.go_back else "")
    limits.forgive(draft)
    lost = location.newest(draft) if request.go_back else None
    if lost is not None:
        draft.set(given_up=location.text(lost))
        changed = ", ".join(
            filter(None, (changed, f"without checkpoint {location.text(lost)} unless a machine has it"))
        )
    if holds:
        draft.release("resume", changed)
        return ""
    draft.set(pause="", recalled=False)
    if lost is not None:
        draft.log(Event.RESUME, f"v{draft.before.ver + 1}", cause="resume", detail=changed)
    return ""


def expire_hold(draft: Draft) -> None:
    """End a hold whose time is over: try again, or end the job and delete its disks."""
    record = draft.record
    if record.phase is not Phase.HOLD:
        return
    if record.hold_until is not None and draft.now >= record.hold_until:
        draft.release("retry")
    elif record.hold_ends is not None and draft.now >= record.hold_ends:
        _over(draft)
    elif record.hold_late is not None:
        draft.set(hold_late=None)  # an earlier round's clock was ahead: the hold is not over


def _over(draft: Draft) -> None:
    """End the job once two rounds, at least an hour apart, have found that the time of its hold is over.

    The end deletes the disks, so one reading of a clock does not suffice. If that clock was ahead, a round with the
    right time clears ``hold_late`` within the hour.
    """
    record = draft.record
    if record.hold_late is None:
        draft.set(hold_late=draft.now)
    elif draft.now >= record.hold_late + draft.times.sure_s:
        draft.end(Outcome.FAILED, f"no resume in time: {record.reason}")


def _swap(draft: Draft, request: JobRequest) -> str:
    if request.node is None or not 0 <= request.node < len(draft.nodes):
        return f"node {request.node} is not one of 0..{len(draft.nodes) - 1}"
    cur = draft.nodes[request.node].cur
    if cur is None or cur.state is not SlotState.MEMBER:
        return f"node {request.node} is being replaced already"
    if cur.model is Model.STATIC:
        return f"node {request.node} trains on a static machine, whose disk has the node's data"
    if draft.nodes[request.node].replace_reason is None:
        draft.put(request.node, replace_reason="user", next=None)
    return ""


def paused(draft: Draft) -> None:
    """Turn a requested pause into a hold once the members have saved and stopped."""
    if draft.record.pause and draft.record.phase is Phase.RUN and draft.halted():
        if limits.spent_up(draft) and draft.snapshot.spec is not None:
            draft.hold(Hold.SPEND, draft.record.pause, ends=draft.now + draft.snapshot.spec.hold_days * DAY_S)
        elif draft.record.recalled:
            draft.hold(Hold.QUEUE, draft.record.pause)
        else:
            draft.hold(Hold.PAUSE, draft.record.pause)


def finish(draft: Draft) -> None:
    """Move an ended job to DONE, once every zone answered and nothing of it is left.

    The job has no live attempt, so ordinary calls delete its resources. A static machine that has not dropped its grant
    yet does not delay DONE. The record stays as the tombstone (rule 9 of ``docs/protocol.md``).
    """
    record, queries = draft.record, draft.queries
    if record.phase is not Phase.END or not queries.complete or draft.snapshot.blind:
        return
    slots = [grant for grant in queries.own_grants() if grant.machine is None]
    disks = () if record.keep_disks else queries.disks
    if queries.vms or disks or queries.snapshots or slots or _claims(draft) or rungs.unreported(draft):
        return
    draft.set(phase=Phase.DONE)
    kept = disks_kept(disk.name for same in queries.disks.values() for disk in same)
    cause = record.outcome.value if record.outcome else None
    draft.log(Event.DONE, "job", cause=cause, detail=f"but {kept}" if kept else "")


def _claims(draft: Draft) -> bool:
    """Whether the allocation still has the job's claim to machines; a claim to none only counts its last grants."""
    claim = draft.snapshot.allocation.claim(draft.record.job)
    return claim is not None and claim.max > 0


# -- a resume with other files


def _adopt(draft: Draft, sha256: str) -> tuple[str, str]:
    """Put the job file of this hash in force. Returns why it is refused, or "", and the changes for the ledger."""
    old, new = draft.snapshot.spec, draft.snapshot.files.get(sha256)
    if draft.record.phase is not Phase.HOLD:
        return "only a job on hold accepts other files: pause the job first", ""
    if new is None:
        return f"the new job file {sha256[:SHORT]} is missing or invalid: repeat the resume with the files", ""
    if old is None:
        return "the job's present job file is missing, so the new file cannot be checked against the job's disks", ""
    if why := file_refusal(old, new, draft.snapshot.stack):
        return why, ""
    before = draft.record.spec_sha256
    draft.set(spec_sha256=sha256, spec_replaced=True, keep_disks=new.keep_disks)
    draft.snapshot = replace(draft.snapshot, spec=new)
    return "", _changed(old, new, before, sha256)


def file_refusal(old: JobSpec, new: JobSpec, stack: StackState | None) -> str:
    """Return why a job with disks cannot go on with this job file, and the remedy; or "". ``stack`` None: unknown."""
    found = list(_fixed(old, new, stack))
    if not found:
        return ""
    return f"{'; '.join(found)}. Change that back, or submit the file under another name as a new job"


def _fixed(old: JobSpec, new: JobSpec, stack: StackState | None) -> Iterator[str]:
    if new.name != old.name:
        yield f"name: the job's name is {old.name}, the file says {new.name}"
    if new.size() != old.size() and not new.machines:
        resize = "" if old.size().min == old.size().max else f" (within the range: spotkeeper resize {old.name} NODES)"
        yield f"nodes: cannot change, since the job has a disk for each present node{resize}"
    elif new.machines != old.machines:
        yield "machines: cannot change, since each present node has its disk and its pool"
    if new.scratch_gb != old.scratch_gb:
        yield "scratch_gb: cannot change, since the job's disks have the size that the old value needs"
    if new.spread != old.spread:
        yield "spread: cannot change, since the job's disks stay in their zones"
    if new.checkpoint.replicated != old.checkpoint.replicated:
        yield "checkpoint.replicated: cannot change, since the job's checkpoints have the format of the old value"
    if new.stop != old.stop:
        yield "stop: cannot change, since the job's checkpoints were written in the format that the old value needs"
    if not old.checkpoint.replicated and new.nproc != old.nproc:
        yield "nproc: cannot change, since a sharded checkpoint fits only as many processes as wrote it"
    if new.trial != old.trial:
        yield "trial: cannot change, since the other trials of the search count on it"
    if new.seed != old.seed:
        yield "seed: cannot change, since a checkpoint counts the samples in the order of the old seed"
    if stack is not None and _kinds(new, stack) != _kinds(old, stack):
        yield "pools, static: cannot start or stop using static machines, since checkpoints stay on their present disks"


def _kinds(spec: JobSpec, stack: StackState) -> set[str]:
    """Return the kinds of pools (spot, static) that the job can use; disks of their machines can have checkpoints."""
    return {pool.kind for pool in named_pools(spec, stack) if pool.kind == "spot" or spec.static == "use"}


def _changed(old: JobSpec, new: JobSpec, before: str, after: str) -> str:
    """Describe a changed job file: ``with other files: job file 3f… -> 9a…, source 0c… -> 77…``."""
    parts = [f"job file {_short(before)} -> {_short(after)}"]
    if new.source_sha256 != old.source_sha256:
        parts.append(f"source {_short(old.source_sha256)} -> {_short(new.source_sha256)}")
    return f"with other files: {', '.join(parts)}"


def _short(sha256: str | None) -> str:
    return sha256[:SHORT] if sha256 else "none"


_TAKERS: dict[RequestKind, Callable[[Draft, JobRequest], str]] = {
    RequestKind.CANCEL: _cancel,
    RequestKind.PAUSE: _pause,
    RequestKind.RESUME: _resume,
    RequestKind.RESIZE: lambda draft, request: resize.take(draft, request.nodes, request.drop),
    RequestKind.MOVE: lambda draft, request: zone_move.take(draft, request.zone),
    RequestKind.SWAP: _swap,
}
