"""One CAS makes all ranks members of generation + 1, once each is admitted and its disk condition is met.

Replicated state: a member may train without its disk if another member of the new generation holds the
newest commit on an attached one. Sharded state, and a gang of which nobody holds it, wait for the disks.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from spotkeeper.reconcile.decide import kept, mirrors, redone
from spotkeeper.reconcile.decide.draft import DAY_S, Draft
from spotkeeper.reconcile.decide.needs import needed
from spotkeeper.reconcile.decide.seen import admitted
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Hold, Rank, Slot, SlotState


def step(draft: Draft) -> None:
    record = draft.record
    if record.move is not None or record.pause or record.roll is not None:
        return
    if record.gen and not record.stop:
        _grow(draft)
        return
    if not draft.halted():
        return
    ready = [index for index in draft.filled() if _ready(draft, index, draft.ranks[index])]
    if not ready or not (len(ready) == draft.size() or _smaller(draft, ready)):
        return
    if not _disks(draft, ready):
        _renew(draft, ready)
    else:
        _begin(draft, ready)


def _begin(draft: Draft, ready: list[int]) -> None:
    """All are there: go on from the newest commit, wait for it, or say that nobody has it."""
    commit = kept.newest(draft)
    lost = mirrors.lost(draft, ready)
    if lost and draft.now < max(_waits(draft, ready)) + draft.times.disk_s:
        return  # a disk may come back late
    done = lost and not mirrors.helps(draft, ready)
    if commit is not None and (done or (kept.behind(draft, ready) and kept.ruined(draft, ready))):
        draft.set(given_up=kept.text(commit))  # nobody has to be asked: there is no other way
    if mirrors.awaited(draft, ready):
        return
    if not kept.behind(draft, ready):
        _publish(draft, ready)
    elif len(ready) == draft.size() and draft.now >= max(_waits(draft, ready)) + draft.times.disk_s:
        wait = min(DAY_S, draft.times.hold_s * 2**draft.record.holds)  # each try boots the gang, for a bill
        draft.hold(Hold.CLOUD, _lacking(draft, ready), until=draft.now + wait)


def _ready(draft: Draft, index: int, rank: Rank) -> bool:
    """Admitted, there, and not about to go. A notice that outlived its deadline blocks nobody."""
    if rank.cur is None or not admitted(rank.cur):
        return False
    doomed = rank.cur.notice is not None and draft.now < rank.cur.notice + draft.times.stop_s
    return not doomed and not draft.view.gone(index, rank.cur)


def _smaller(draft: Draft, ready: list[int]) -> bool:
    """An elastic job goes on without ranks that found no machine for a while."""
    spec = draft.seen.spec
    if spec is None or not spec.checkpoint.replicated or len(ready) < spec.size().min:
        return False
    since = max(draft.record.stop_since, draft.record.created if not draft.record.gen else 0.0)
    if draft.now < since + draft.times.shrink_s:
        return False
    there = frozenset(ready)
    return all(draft.ranks[index].cur is None for index in draft.filled() if index not in there)


def _grow(draft: Draft) -> None:
    """Ranks that were left out are there, with none still on its way: save, stop, go on with them."""
    record = draft.record
    if len(draft.members()) < len(record.members) or any(needed(rank) for rank in draft.ranks):
        return
    members = frozenset(record.members)
    coming = [i for i in draft.filled() if i not in members and draft.ranks[i].cur is not None]
    asked = any((cur := draft.ranks[index].cur) and cur.cause == "resize" for index in coming)
    if not asked and not kept.costs_nothing(draft):
        return
    if coming and all(_ready(draft, index, draft.ranks[index]) for index in coming):  # one stop for all of them
        draft.halt(draft.now + draft.save_s() + draft.times.stop_s, "grow")


def _lacking(draft: Draft, ready: list[int]) -> str:
    commit = kept.newest(draft)
    assert commit is not None
    told = [held for index in ready if (slot := draft.ranks[index].cur) and (held := draft.view.holds(index, slot))]
    there = f"the newest there is {kept.text(max(told))}" if told else "there is none on any of them"
    lacks = f"no machine to be had holds the newest checkpoint, {kept.text(commit)}; {there}"
    return f"{lacks}. To go on without it: {draft.record.go_back()}"


def _waits(draft: Draft, ready: list[int]) -> list[float]:
    return [draft.record.stop_since, *(slot.since for index in ready if (slot := draft.ranks[index].cur))]


def _disks(draft: Draft, ready: list[int]) -> bool:
    slots = [(index, draft.ranks[index].cur) for index in ready]
    attached = [(i, slot) for i, slot in slots if slot and draft.view.attached(i, draft.ranks[i].disk, slot)]
    if len(attached) == len(ready):
        return True
    if kept.sharded(draft) or draft.record.gen == 0:
        return False
    return any(kept.holds(draft, index, slot) or _will_do(draft, index, slot) for index, slot in attached)


def _will_do(draft: Draft, index: int, slot: Slot) -> bool:
    """A disk that cannot be had (its machine never lets go) must not hold the job for ever.

    When the machines of the missing disks have waited long enough, one will do that holds the newest commit
    anybody reported. What was committed in the minute between that report and the loss may be done again.
    Where a user gave the newest commit up, any disk will do.
    """
    held, commit, given_up = draft.view.holds(index, slot), kept.committed(draft), kept.given_up(draft)
    if not given_up and (held is None or commit is None):
        return False
    waits = [r.cur.since for i, r in enumerate(draft.ranks) if r.cur and not draft.view.attached(i, r.disk, r.cur)]
    if draft.now < max([draft.record.stop_since, *waits]) + draft.times.disk_s:
        return False
    return given_up or (held is not None and commit is not None and held >= commit)


def _renew(draft: Draft, ready: list[int]) -> None:
    """A user gave up what is on disks of which none can be had, for other machines hold them: new ones instead."""
    waited = draft.now >= max(_waits(draft, ready)) + draft.times.disk_s
    if not kept.given_up(draft) or len(ready) < draft.size() or not waited:
        return
    own = [(index, draft.ranks[index], slot) for index in ready if (slot := draft.ranks[index].cur)]
    disks = [draft.view.disk(index, rank.disk, slot.zone) for index, rank, slot in own if slot.node is None]
    if len(disks) < len(own) or not all(disk is not None and disk.users for disk in disks):
        return
    if any(draft.view.attached(index, rank.disk, slot) for index, rank, slot in own):
        return
    for index, rank, _ in own:
        number = rank.disk_top + 1
        draft.put(index, disk=number, disk_top=number, node=None, wrote=0, held=0)


def _fresh(draft: Draft, ready: list[int]) -> set[int]:
    """Ranks whose attached disk will hold the newest commit when generation + 1 begins."""
    slots = [(index, draft.ranks[index].cur) for index in ready]
    attached = [(i, slot) for i, slot in slots if slot and draft.view.attached(i, draft.ranks[i].disk, slot)]
    if draft.record.gen == 0:
        return {index for index, _ in attached}
    if draft.record.fetch is not None:  # what a copy brought is nobody's own writing, and the newest there is
        fetched = draft.record.fetch.commit
        return {i for i, slot in attached if any(f.value == fetched for f in draft.view.said(i, slot, Kind.FETCHED))}
    sure = {index for index, slot in attached if kept.holds(draft, index, slot)}
    if sure or len(attached) < len(ready):
        return sure
    told = {index: held for index, slot in attached if (held := draft.view.holds(index, slot))}
    return {index for index, held in told.items() if held == max(told.values())} if len(told) == len(ready) else set()


def _publish(draft: Draft, ready: list[int]) -> None:
    """generation + 1: the only place where MEMBER is written."""
    record = draft.record
    gen = record.gen + 1
    ranks = list(draft.ranks)
    fresh = _fresh(draft, ready)
    cause, origin = _cause(draft, ready), _origin(draft, ready)
    done = redone.work(draft, cause)
    for index, rank in enumerate(ranks):
        if index not in ready or rank.cur is None:
            ranks[index] = replace(rank, cur=replace(rank.cur, disk=False, holds=False)) if rank.cur else rank
            continue
        since = rank.cur.since if rank.cur.state is SlotState.MEMBER else draft.now
        disk = draft.view.attached(index, rank.disk, rank.cur)
        cur = replace(rank.cur, state=SlotState.MEMBER, since=since, disk=disk, holds=index in fresh)
        ranks[index] = replace(rank, cur=cur, refused=(), **_remembers(gen, cur))
    draft.set(
        gen=gen,
        gen_since=draft.now,
        members=tuple(ready),
        ranks=tuple(ranks),
        stop=False,
        fetch=None,
        stop_deadline=None,
        roll=None,
        dry_since=None,
        short_since=None,
        reason="",
        holds=0,
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
    )


def _origin(draft: Draft, ready: list[int]) -> str:
    """Where a generation goes on from, if that is not the newest commit: it was given up."""
    commit = kept.newest(draft)
    if commit is None or not kept.given_up(draft) or not kept.lacks(draft, ready):
        return ""
    return ", ".join(["", f"without checkpoint {kept.text(commit)}", *filter(None, [kept.origin(draft, ready)])])


def _remembers(gen: int, cur: Slot) -> dict[str, Any]:
    """What a rank remembers of its membership when its machine is gone: where its checkpoints are."""
    if not cur.disk:
        return {}
    return {"node": cur.node, "wrote": gen} | ({"held": gen} if cur.holds else {})


def _cause(draft: Draft, ready: list[int]) -> str:
    """Why this generation begins, for the ledger. Without a new machine the stop before it was taken back."""
    record = draft.record
    if not record.gen:
        return "start"
    if record.budget.crashed_gen == record.gen:
        return "crash"
    for index in ready:
        cur = draft.ranks[index].cur
        if cur is not None and cur.state is not SlotState.MEMBER:
            if cur.past:
                return "reboot"
            return cur.cause if cur.cause not in (None, "start") else "grow"
    return "resize" if len(ready) < len(record.members) and record.size == len(ready) else "stop withdrawn"
