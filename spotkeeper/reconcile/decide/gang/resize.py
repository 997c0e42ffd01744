"""Resizes a job between two generations: adds nodes, or parks the nodes that a user names, or whose loss costs least.

The record keeps all nodes that the job file allows, since a node's counters must never restart. A node is parked once
its machine has saved and stopped: it then has no machine, no disk and no replacement reason. It returns as a vacant
node with a blank disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import limits
from spotkeeper.reconcile.decide.provisioning import machine_health


def take(draft: Draft, nodes: int | None, drop: tuple[int, ...] = ()) -> str:
    """Accept a request for a new size. Returns "", or in one line why it is refused.

    ``nodes`` None is refused. ``drop``: the nodes to park; (): those whose loss costs least.
    """
    spec = draft.snapshot.spec
    if spec is None or nodes is None:
        return "no size was named"
    why = refusal(spec, nodes)
    if not why and draft.record.move is not None:
        why = f"the job is moving to {draft.record.move.zone}: resize it afterwards"
    if not why and nodes == draft.size() == (draft.record.asked or len(draft.nodes)):  # the queue may allow fewer
        why = f"the job has {nodes} already"
    if not why and (wrong := drop_refusal(draft.filled(), nodes, drop)):
        why = f"the job {wrong}"
    why = why or _lost_with(draft, drop)
    if why:
        return why
    draft.set(asked=nodes)
    if nodes < draft.size():
        fit(draft, nodes, drop)
    return ""


def drop_refusal(filled: Sequence[int], nodes: int, drop: Sequence[int]) -> str:
    """Return why a job with the nodes ``filled`` cannot shrink to ``nodes`` by parking ``drop``; or "".

    The text goes on after the job's name. An empty ``drop`` is never refused.
    """
    if not drop:
        return ""
    if other := sorted(set(drop) - set(filled)):
        return f"has no node {other[0]}: its nodes are {', '.join(map(str, filled))}"
    fewer = len(filled) - nodes
    if fewer <= 0:
        return f"has {len(filled)}, so a size of {nodes} drops no node: only a smaller size does"
    if fewer != len(set(drop)):
        return f"has {len(filled)}, so a size of {nodes} drops {fewer}, but {len(set(drop))} were named"
    return ""


def _lost_with(draft: Draft, drop: Sequence[int]) -> str:
    """Return why these nodes cannot be parked, if no other node has the newest checkpoint that they have; or ""."""
    if location.newest(draft) is None or not drop:
        return ""
    have = _keepers(draft)
    if not have or have - set(drop):
        return ""
    return f"only node {', '.join(map(str, sorted(have)))} has the newest checkpoint: name another node to drop"


def _keepers(draft: Draft) -> set[int]:
    """Return the nodes that have the newest commit: of the members, and of vacant nodes those whose disk has it."""
    members, commit = dict(draft.members()), location.newest(draft)
    return {
        index
        for index in draft.filled()
        if (
            location.has_newest(draft, index, members[index])
            if index in members
            else commit is not None and draft.nodes[index].keeps(commit[0])
        )
    }


def fit(draft: Draft, nodes: int, drop: tuple[int, ...] = ()) -> None:
    """Give the job this many nodes: park ``drop`` or those whose loss costs least, or bring parked ones back."""
    filled = draft.filled()
    parked = [index for index in range(len(draft.nodes)) if index not in filled]
    for index in parked[: max(0, nodes - len(filled))]:
        draft.put(index, cause="resize")
    gone = (drop or _cheapest(draft, len(filled) - nodes)) if nodes < len(filled) else ()
    draft.set(size=nodes, parked=tuple(sorted({*parked[max(0, nodes - len(filled)) :], *gone})))


def _cheapest(draft: Draft, count: int) -> tuple[int, ...]:
    """Return the ``count`` nodes whose loss costs least, but never all nodes with the newest checkpoint."""
    order = sorted(draft.filled(), key=lambda index: _loss(draft, index))
    gone, stays = order[:count], order[count:]
    have = _keepers(draft)
    if have and not have & set(stays):
        gone[-1 if gone[-1] in have else next(at for at, i in enumerate(gone) if i in have)] = stays[0]
    return tuple(gone)


def _loss(draft: Draft, index: int) -> tuple[float, ...]:
    """Return a sort key; the node with the smallest key is parked first.

    The order: nodes without a machine, nodes that do not train, nodes whose machine goes soon or has a hardware fault,
    nodes that lag, nodes that cost more. A static machine counts as free, since it costs the same when idle. Of equal
    nodes the highest is parked first, since the lowest is the master.
    """
    cur = draft.nodes[index].cur
    if cur is None:
        return 0.0, 0.0, 0.0, -index
    trains = cur.state is SlotState.MEMBER
    goes = cur.notice is not None or cur.ends is not None or cur.hardware_faults > 0
    price = 0.0 if cur.model is Model.STATIC else limits.price(draft, cur)
    slow = machine_health.lag(draft, index, cur)
    return 1.0 + trains, float(not goes), -float(slow), -price, -index


def refusal(spec: JobSpec, nodes: int) -> str:
    """Return why a job with this file can never have this size; or ""."""
    size = spec.size()
    if spec.machines:
        return "the job file says `machines`: each of its nodes has its pool, so their number is fixed"
    if size.min == size.max:
        return f"the job file says `nodes: {size.max}`; only `nodes: {{min, max}}` lets a job change its size"
    if not spec.checkpoint.replicated:
        return "the job's state is sharded: its checkpoints fit only the number of nodes that wrote them"
    if not size.min <= nodes <= size.max:
        return f"{nodes} is not within `nodes: {{min: {size.min}, max: {size.max}}}` of the job file"
    return ""


def step(draft: Draft) -> None:
    """Park the nodes that a resize removes. If any of them trains, the whole gang first saves and stops."""
    above = [index for index in range(len(draft.nodes)) if draft.parked(index)]
    training = [index for index, _ in draft.members() if index in above]
    if training and not draft.record.stop:
        draft.halt(draft.now + draft.save_s() + draft.times.stop_s, "resize")
    if training and draft.halted() and not _kept(draft):
        if have := holders(draft):
            _exchange(draft, above, min(have))
        else:
            _give_up(draft, tuple(index for index in above if index not in training))
        return
    for index in above:
        node = draft.nodes[index]
        if node.cur is not None and index in training and not draft.halted():
            continue
        if node.cur is not None or node.next is not None or node.refused:
            _park(draft, index)


def _kept(draft: Draft) -> bool:
    """Whether a node that stays has the newest commit, or no commit exists, so that a resize loses no step."""
    return location.newest(draft) is None or any(not draft.parked(index) for index in holders(draft))


def holders(draft: Draft) -> set[int]:
    """Return the members that have the newest commit on a disk that is attached."""
    return {
        index
        for index, slot in draft.members()
        if draft.queries.attached(index, draft.nodes[index].disk, slot) and location.has_newest(draft, index, slot)
    }


def _exchange(draft: Draft, above: Sequence[int], holder: int) -> None:
    """Let this node stay in place of another one; all have stopped, so it costs nothing more."""
    other = min(draft.filled(), key=lambda index: _loss(draft, index))
    draft.set(parked=tuple(sorted({*above, other} - {holder})))
    why = f"node {holder} stays in place of node {other}, because only it has the newest checkpoint"
    draft.log(Event.REQUEST, f"resize.v{draft.before.ver + 1}", cause="resize", detail=why)


def _give_up(draft: Draft, parked: tuple[int, ...]) -> None:
    """Keep all nodes that train. If the queue takes machines, the whole job stops, so that it keeps all disks."""
    size, record = len(draft.nodes) - len(parked), draft.record
    taken = record.asked != record.size
    draft.set(asked=record.asked if taken else size, size=size, parked=parked)
    claim = draft.snapshot.allocation.claim(record.job)
    if taken and claim is not None and claim.reserved < size:
        whom = draft.snapshot.allocation.name(claim.whom)
        draft.recall(f"its machines go to {f'job {whom}' if whom else 'other jobs'}")
    why = "the resize is given up, because no node has the newest checkpoint"
    draft.log(Event.REQUEST, f"resize.v{draft.before.ver + 1}", cause="resize", detail=why)


def _park(draft: Draft, index: int) -> None:
    """Park a node: supersede its machine, and give up its disk, as the checkpoints on it become outdated."""
    draft.put(index, next=None, replace_reason=None, refused=(), refused_at=0.0)
    draft.new_disk(index)
    if draft.nodes[index].cur is not None:
        draft.vacate(index, "resize")


def left(draft: Draft, index: int) -> bool:
    """Whether a node's old disks can be deleted although it does not use its newest disk yet.

    A parked node gives up its disk and gets the number of a new one. The old disk can be deleted while the gang trains
    and a member has the newest commit on its disk. The node itself must be either parked and no longer a member, or a
    member (which can train without a disk).
    """
    record = draft.record
    parked = draft.parked(index) and index not in record.members
    if record.stop or not record.gen or not (parked or any(index == member for member, _ in draft.members())):
        return False
    return any(location.has_newest(draft, member, slot) for member, slot in draft.members())
