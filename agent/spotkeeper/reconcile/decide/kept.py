"""Where the newest checkpoint lies, and what follows from it: who may train elsewhere, and who may begin.

A rank's checkpoints lie at its *home*: its own disk, or the static node's on which it was a member last. Where
state is replicated, one rank that is at home with the newest checkpoint frees the others. Where none is, the one
that keeps it takes nothing but its home, however cheap: an older checkpoint is never gone on from without a word.
A copy of that very checkpoint in the bucket frees them all, for it can be fetched anywhere (``mirrors``).
"""

from __future__ import annotations

from collections.abc import Iterable

from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import Commit, parse_commit
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.record import Phase, Rank, Slot


def newest(draft: Draft) -> Commit | None:
    """The newest commit that anybody reported; None: there is none yet."""
    known = max(draft.view.newest_held or (0, 0), committed(draft) or (0, 0), parse_commit(draft.record.told) or (0, 0))
    return known if draft.record.gen and known > (0, 0) else None


def committed(draft: Draft) -> Commit | None:
    """The last commit that the progress of the job tells of; None: it tells of none."""
    progress = draft.seen.progress
    if progress is None or progress.commit_gen is None or progress.commit_step is None:
        return None
    return progress.commit_gen, progress.commit_step


def given_up(draft: Draft) -> bool:
    """Whether the job shall go on without the newest commit, where that cannot be had: a user said so, or it rotted."""
    commit = newest(draft)
    return commit is not None and commit <= (parse_commit(draft.record.given_up) or (0, 0))


def covered(draft: Draft) -> bool:
    """Whether the bucket has a copy of the newest commit, or of a later one that nobody has told of yet."""
    commit, copies = newest(draft), draft.record.mirror
    return commit is not None and bool(copies) and (parse_commit(copies[0].commit) or (0, 0)) >= commit


def text(commit: Commit) -> str:
    return f"{commit[0]}-{commit[1]}"


def costs_nothing(draft: Draft) -> bool:
    """Whether a stop that nobody asked for, to save money or to grow, loses no work.

    A script that has never saved would begin anew. One whose last step is done runs what comes after its loop (an
    evaluation, an export), which a stop would begin anew each time: it might never end.
    """
    if newest(draft) is None:
        return False
    progress = draft.seen.progress
    return progress is None or not progress.total_steps or progress.step < progress.total_steps - 1


def holds(draft: Draft, index: int, slot: Slot) -> bool:
    """Whether the newest commit is on this machine's disk, beyond doubt.

    It was there when the generation began, or it was written since: then every member with a disk wrote it.
    A disk that came back late holds an older one until the first commit of a generation that it is part of.
    A save may have failed here alone: where the end of the generation was reported, that report counts.
    """
    if not slot.disk or any(draft.view.said(index, slot, kind, draft.record.gen) for kind in (Kind.FULL, Kind.UNSAVED)):
        return False
    held, commit = draft.view.holds(index, slot), newest(draft)
    if commit is not None and draft.view.ended(index, slot, draft.record.gen) and (held is None or held < commit):
        return False
    progress, gen = draft.seen.progress, draft.record.gen
    if slot.holds or (progress is not None and progress.commit_gen == gen):
        return True
    return held is not None and held[0] == gen


def behind(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether these would begin from an older checkpoint than the newest known, or anew, and nobody said they may."""
    return not given_up(draft) and lacks(draft, ready)


def lacks(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether none of these holds the newest commit.

    So it is until disks are mounted; and so it stays where the only copy is where none of them is. Of sharded
    state every rank has its part, and takes none but its home: that one of them has the newest says enough.
    """
    commit = newest(draft)
    if commit is None:
        return False
    slots = [(index, slot) for index in ready if (slot := draft.ranks[index].cur)]
    return not any(
        holds(draft, index, slot) or (draft.view.holds(index, slot) or (0, 0)) >= commit for index, slot in slots
    )


def lacking(draft: Draft) -> bool:
    """Whether the job regroups, and no machine that it has holds the newest commit (yet)."""
    record = draft.record
    if record.phase is not Phase.RUN or not record.gen or not record.stop:
        return False
    return lacks(draft, draft.filled())


def ruined(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether every copy of the newest commit is known to be damaged: each keeper is here, at home, and says so.

    Of sharded state one part is enough: without it nobody can use the others.
    """
    commit = newest(draft)
    keepers = [index for index, rank in enumerate(draft.ranks) if commit is not None and _keeps(rank, commit)]
    if commit is None or not keepers:
        return False
    there = {index: slot for index in ready if (slot := draft.ranks[index].cur)}
    told = [
        index in there
        and there[index].node == draft.ranks[index].node
        and draft.view.attached(index, draft.ranks[index].disk, there[index])
        and any(parse_commit(f.value) == commit for f in draft.view.said(index, there[index], Kind.DAMAGED))
        for index in keepers
    ]
    return any(told) if sharded(draft) else all(told)


def gone(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether nobody can have the newest commit any more: who kept it is here, at home, and finds it there no more.

    So it is where disks were lost. Of sharded state one blank disk is enough: without its part nobody can use the rest.
    """
    commit, there = newest(draft), list(ready)
    if commit is None or not mounted(draft, there):
        return False
    keepers = [index for index, rank in enumerate(draft.ranks) if _keeps(rank, commit)]
    if not keepers or not all(
        _comes_home(draft, index) if index in there else _no_home(draft, index) for index in keepers
    ):
        return False
    return blank(draft, there) if sharded(draft) else lacks(draft, there)


def _comes_home(draft: Draft, index: int) -> bool:
    rank = draft.ranks[index]
    return rank.cur is not None and rank.cur.node == rank.node


def _no_home(draft: Draft, index: int) -> bool:
    """Its own disk is nowhere, by a whole answer; of a static node's nobody can say so."""
    rank = draft.ranks[index]
    return rank.node is None and draft.view.complete and not draft.view.disks.get((index, rank.disk))


def mounted(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether each of these has its disk, and has said what is on it."""
    slots = [(index, draft.ranks[index].cur) for index in ready]
    return all(
        slot is not None
        and draft.view.attached(index, draft.ranks[index].disk, slot)
        and draft.view.said(index, slot, Kind.ATTACHED)
        for index, slot in slots
    )


def blank(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether one of these has told of no checkpoint at all."""
    return any((slot := draft.ranks[index].cur) is None or draft.view.holds(index, slot) is None for index in ready)


def told(draft: Draft, ready: Iterable[int]) -> Commit | None:
    """The newest that the machines of these told of."""
    slots = ((index, slot) for index in ready if (slot := draft.ranks[index].cur))
    return max((held for index, slot in slots if (held := draft.view.holds(index, slot))), default=None)


def origin(draft: Draft, ready: Iterable[int]) -> str:
    """Where a generation begins without the newest commit, in words; "" where nobody has looked on every disk."""
    slots = [(index, slot) for index in ready if (slot := draft.ranks[index].cur)]
    there = [index for index, slot in slots if draft.view.attached(index, draft.ranks[index].disk, slot)]
    if not mounted(draft, there):
        return ""
    newest_told = told(draft, there)
    return f"from {text(newest_told)}" if newest_told is not None else "anew, from step 0"


def may_take(draft: Draft, index: int, node: str | None) -> bool:
    """Whether this rank may train on that static node (None: on its own disk), and the newest checkpoint be had."""
    commit, rank = newest(draft), draft.ranks[index]
    if commit is None or node == rank.node:
        return True
    if sharded(draft):
        return not rank.wrote
    keepers = [other for at in draft.filled() if _keeps(other := draft.ranks[at], commit)]
    nodes = {keeper.node for keeper in keepers if keeper.node is not None}
    others = (draft.ranks[at] for at in draft.filled() if at != index)
    if any((_keeps(other, commit) and _at_home(other)) or _on(other, nodes) for other in others):
        return True
    return not keepers or node in nodes


def may_follow(draft: Draft, index: int, node: str | None) -> bool:
    """Whether a successor of this rank's machine may train there: it begins from what is saved until then.

    Its predecessor may still save, after this look. So another member must: it has all that this one will have
    written, and brings it along.
    """
    rank = draft.ranks[index]
    if not may_take(draft, index, node):
        return False
    if node == rank.node or not draft.record.gen:
        return True
    if sharded(draft):
        return not rank.wrote
    return any(at != index and slot.disk and _at_home(draft.ranks[at]) for at, slot in draft.members())


def pinned(draft: Draft) -> str | None:
    """The static node that alone keeps the newest checkpoint, so that the gang cannot leave its zone."""
    commit = newest(draft)
    if commit is None or given_up(draft) or covered(draft):
        return None
    homes = [draft.ranks[at].node for at in draft.filled() if _keeps(draft.ranks[at], commit)]
    return None if not homes or None in homes else homes[0]


def bound(draft: Draft, index: int) -> str | None:
    """The static node without which this vacant rank may not go on, where there is one."""
    node = draft.ranks[index].node
    free = given_up(draft) or covered(draft)
    return node if node is not None and not free and not may_take(draft, index, None) else None


def _keeps(rank: Rank, commit: Commit) -> bool:
    """It wrote in the generation of that commit, or had it when a later one began that has committed nothing."""
    return rank.wrote == commit[0] or rank.held > commit[0]


def _at_home(rank: Rank) -> bool:
    """Its machine and its successor are where its checkpoints are; without any, its own disk waits for them."""
    slots = [slot for slot in (rank.cur, rank.next) if slot is not None]
    return all(slot.node == rank.node for slot in slots) if slots else rank.node is None


def _on(rank: Rank, nodes: set[str]) -> bool:
    """Its machine and its successor are among these: whoever's home it is, the newest checkpoint is there."""
    slots = [slot for slot in (rank.cur, rank.next) if slot is not None]
    return bool(slots) and all(slot.node in nodes for slot in slots)


def only(draft: Draft, index: int) -> str:
    """What a rank that may go nowhere else misses there."""
    if sharded(draft):
        return f"rank {index}'s part of the newest checkpoint is there"
    return "it alone has the newest checkpoint"


def sharded(draft: Draft) -> bool:
    """Whether a checkpoint is made of all ranks' parts; else each rank that writes has all of it.

    What a script saves by itself is taken for such a part: nobody here can say what another rank has of it.
    """
    spec = draft.seen.spec
    return spec is not None and (spec.stop == "signal" or not spec.checkpoint.replicated)
