"""Publishes the next generation: one write makes all nodes members, once each is admitted and has the disk it needs.

With replicated state a member may train without its disk if another member has the newest commit on an attached disk.
A gang with sharded state waits for all disks, and so do a gang in which no member has the newest commit and a job with
a scratch folder, which is on the node's disk.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Hold, Node, Slot, SlotState
from spotkeeper.reconcile.decide.checkpoint import location, mirrors
from spotkeeper.reconcile.decide.draft import DAY_S, Draft
from spotkeeper.reconcile.decide.gang import bucket_move
from spotkeeper.reconcile.decide.job import progress
from spotkeeper.reconcile.decide.provisioning.replacement import needed
from spotkeeper.reconcile.decide.snapshot import admitted


def step(draft: Draft) -> None:
    record = draft.record
    if record.leaving or record.pause or record.roll is not None:
        return
    if record.gen and not record.stop:
        _grow(draft)
        return
    if not draft.halted():
        return
    ready = [index for index in draft.filled() if _ready(draft, index, draft.nodes[index])]
    if not ready or not (len(ready) == draft.size() or _smaller(draft, ready)):
        return
    if not _disks(draft, ready):
        _renew(draft, ready)
    else:
        _begin(draft, ready)


def _begin(draft: Draft, ready: list[int]) -> None:
    """Begin a generation with these ready nodes, wait for the newest commit, or hold because no node has it."""
    commit = location.newest(draft)
    lost = mirrors.lost(draft, ready)
    if lost and draft.now < max(_waits(draft, ready)) + draft.times.disk_s:
        return  # the missing disk may still appear
    done = lost and not mirrors.helps(draft, ready)
    if commit is not None and (done or (location.behind(draft, ready) and location.ruined(draft, ready))):
        draft.set(given_up=location.text(commit))  # no copy of the commit is left, so no user has to decide
    if mirrors.awaited(draft, ready):
        return
    if not location.behind(draft, ready):
        _publish(draft, ready)
    elif len(ready) == draft.size() and draft.now >= max(_waits(draft, ready)) + draft.times.disk_s:
        held = min(30, draft.record.hold_count)  # a float has no 2 ** 1024
        wait = min(DAY_S, draft.times.hold_s * 2**held)  # each retry pays for the whole gang
        draft.hold(Hold.CLOUD, _lacking(draft, ready), until=draft.now + wait)


def _ready(draft: Draft, index: int, node: Node) -> bool:
    """Whether a node's machine is admitted and exists, and has no notice or has outlived the notice's deadline."""
    if node.cur is None or not admitted(node.cur):
        return False
    doomed = node.cur.notice is not None and draft.now < node.cur.notice + draft.times.stop_s
    return not doomed and not draft.queries.gone(index, node.cur)


def _smaller(draft: Draft, ready: list[int]) -> bool:
    """Whether an elastic job goes on without nodes that have had no machine for a while."""
    spec = draft.snapshot.spec
    if spec is None or not spec.checkpoint.replicated or len(ready) < spec.size().min:
        return False
    since = max(draft.record.stop_since, draft.record.created if not draft.record.gen else 0.0)
    if draft.now < since + draft.times.shrink_s:
        return False
    there = frozenset(ready)
    return all(draft.nodes[index].cur is None for index in draft.filled() if index not in there)


def _grow(draft: Draft) -> None:
    """Stop a generation that began without some nodes, so that the next one has them as well.

    It stops once every machine that these nodes have is ready. Nodes without a machine are not waited for.
    """
    record = draft.record
    if len(draft.members()) < len(record.members) or any(needed(node) for node in draft.nodes):
        return
    members = frozenset(record.members)
    coming = [i for i in draft.filled() if i not in members and draft.nodes[i].cur is not None]
    asked = any((cur := draft.nodes[index].cur) and cur.cause == "resize" for index in coming)
    if not asked and not location.costs_nothing(draft):
        return
    if coming and all(_ready(draft, index, draft.nodes[index]) for index in coming):  # a single stop for all of them
        draft.halt(draft.now + draft.save_s() + draft.times.stop_s, "grow")


def _lacking(draft: Draft, ready: list[int]) -> str:
    commit = location.newest(draft)
    assert commit is not None
    told = location.told(draft, ready)
    there = f"checkpoints up to {location.text(told)}" if told else "no checkpoint"
    lacks = f"no available machine has the newest checkpoint, {location.text(commit)}; available machines have {there}"
    return f"{lacks}. To continue without it: {draft.record.go_back()}"


def _waits(draft: Draft, ready: list[int]) -> list[float]:
    return [draft.record.stop_since, *(slot.since for _, slot in location.machines(draft, ready))]


def _disks(draft: Draft, ready: list[int]) -> bool:
    attached = location.attached(draft, ready)
    if len(attached) == len(ready):
        return True
    return not _scratch(draft) and _suffice(draft, attached)


def _scratch(draft: Draft) -> bool:
    return draft.snapshot.spec is not None and draft.snapshot.spec.scratch_gb > 0


def _suffice(draft: Draft, attached: list[tuple[int, Slot]]) -> bool:
    """Whether the attached disks have all checkpoints that the next generation needs."""
    if location.sharded(draft) or draft.record.gen == 0:
        return False
    return any(location.has_newest(draft, index, slot) or _will_do(draft, index, slot) for index, slot in attached)


def _will_do(draft: Draft, index: int, slot: Slot) -> bool:
    """Whether a generation may begin with this node's disk while other disks are missing.

    An old machine that never releases its disk must not stop the job for ever. So after a wait of ``Times.disk_s`` this
    disk suffices if it has the last commit in the job's stored progress (``location.committed``). If the gang made one
    more commit just before a loss, only the missing disks have that commit, and the steps up to it are repeated. If
    the newest commit was given up, any disk suffices.
    """
    reported, commit = draft.queries.checkpoint(index, slot), location.committed(draft)
    given_up = location.given_up(draft)
    if not given_up and (reported is None or commit is None):
        return False
    waits = [r.cur.since for i, r in enumerate(draft.nodes) if r.cur and not draft.queries.attached(i, r.disk, r.cur)]
    if draft.now < max([draft.record.stop_since, *waits]) + draft.times.disk_s:
        return False
    return given_up or (reported is not None and commit is not None and reported >= commit)


def _renew(draft: Draft, ready: list[int]) -> None:
    """Give nodes new, blank disks if other machines do not release the nodes' old disks within ``Times.disk_s``.

    New disks have no checkpoint, so all nodes get them only if the newest commit was given up, and a node of a job with
    a scratch folder only if the attached disks have the checkpoints: it loses its scratch files.
    """
    if len(ready) < draft.size() or draft.now < max(_waits(draft, ready)) + draft.times.disk_s:
        return
    own, attached = location.machines(draft, ready), location.attached(draft, ready)
    if _scratch(draft) and _suffice(draft, attached):
        own = [each for each in own if each not in attached]
    elif attached or not location.given_up(draft):
        return
    disks = [draft.queries.disk(i, draft.nodes[i].disk, slot.zone) for i, slot in own if slot.machine is None]
    if len(disks) < len(own) or not all(disk is not None and disk.users for disk in disks):
        return
    for index, _ in own:
        draft.new_disk(index)


def _fresh(draft: Draft, ready: list[int]) -> set[int]:
    """Return the nodes whose attached disk has the newest commit when the next generation begins."""
    attached = location.attached(draft, ready)
    if draft.record.gen == 0:
        return {index for index, _ in attached}
    if draft.record.fetch is not None:  # the copy that was fetched is the newest commit
        fetched = draft.record.fetch.commit
        return {index for index, slot in attached if draft.queries.fetched(index, slot, fetched) is not None}
    sure = {index for index, slot in attached if location.has_newest(draft, index, slot)}
    if sure or len(attached) < len(ready):
        return sure
    told = {index: reported for index, slot in attached if (reported := draft.queries.checkpoint(index, slot))}
    return (
        {index for index, reported in told.items() if reported == max(told.values())}
        if len(told) == len(ready)
        else set()
    )


def _publish(draft: Draft, ready: list[int]) -> None:
    """Write the next generation. No other function gives a slot the state MEMBER."""
    record = draft.record
    gen = record.gen + 1
    nodes = list(draft.nodes)
    fresh = _fresh(draft, ready)
    cause, origin = _cause(draft, ready), _origin(draft, ready)
    done = progress.lost_work(draft, cause)
    for index, node in enumerate(nodes):
        if index not in ready or node.cur is None:
            nodes[index] = replace(node, cur=replace(node.cur, disk=False, has_newest=False)) if node.cur else node
            continue
        since = node.cur.since if node.cur.state is SlotState.MEMBER else draft.now
        disk = draft.queries.attached(index, node.disk, node.cur)
        cur = replace(node.cur, state=SlotState.MEMBER, since=since, disk=disk, has_newest=index in fresh)
        nodes[index] = replace(node, cur=cur, refused=(), **_remembers(gen, cur))
    draft.set(
        gen=gen,
        gen_since=draft.now,
        members=tuple(ready),
        machine_type=next((kind for kind, _ in draft.kinds.most_common(1)), draft.record.machine_type),
        nodes=tuple(nodes),
        stop=False,
        fetch=None,
        stop_deadline=None,
        roll=None,
        dry_since=None,
        market_since=None,
        market_wait_s=0.0,
        short_since=None,
        reason="",
        hold_count=0,
    )
    count = f"{len(ready)} node" + ("" if len(ready) == 1 else "s")
    draft.log(
        Event.GENERATION,
        f"g{gen}",
        cause=cause,
        detail=f"{count}{origin}",
        step=done.step,
        again=done.again,
        step_s=done.step_s,
        save_s=done.save_s,
        holds=record.hold_count,
    )
    bucket_move.end(draft)


def _origin(draft: Draft, ready: list[int]) -> str:
    commit = location.newest(draft)
    if commit is None or not location.given_up(draft) or not location.lacks(draft, ready):
        return ""
    return ", ".join(
        ["", f"without checkpoint {location.text(commit)}", *filter(None, [location.origin(draft, ready)])]
    )


def _remembers(gen: int, cur: Slot) -> dict[str, Any]:
    if not cur.disk:
        return {}
    return {"machine": cur.machine, "wrote": gen} | ({"newest_generation": gen} if cur.has_newest else {})


def _cause(draft: Draft, ready: list[int]) -> str:
    """Return why the next generation begins, for the ledger.

    If its machines are those of the last generation, the cause is "stop withdrawn": the reason for the stop went away.
    """
    record = draft.record
    if not record.gen:
        return "start"
    if record.budget.crashed_gen == record.gen:
        return "crash"
    for index in ready:
        cur = draft.nodes[index].cur
        if cur is not None and cur.state is not SlotState.MEMBER:
            if cur.past:
                return "reboot"
            return cur.cause if cur.cause not in (None, "start") else "grow"
    return "resize" if len(ready) < len(record.members) and record.size == len(ready) else "stop withdrawn"
