"""Tells where the newest checkpoint is, and therefore on which machines nodes may train and when a gang may begin.

A node's *checkpoint disk* is the disk with its checkpoints: if the node was last a member on a static machine, that
machine's disk, otherwise the node's own. With replicated state one node must use a checkpoint disk that has the newest
checkpoint, and all other nodes can use any machine. With sharded state every node must use its own checkpoint disk. A
node waits for such a disk however cheap other machines are: no gang silently continues from an older checkpoint. If the
bucket has a copy of the newest checkpoint no node has to wait, since any machine can fetch the copy (``mirrors``).
"""

from __future__ import annotations

from collections.abc import Iterable

from spotkeeper.contract.facts import Commit, Kind, parse_commit
from spotkeeper.contract.record import Node, Phase, Slot
from spotkeeper.reconcile.decide.draft import Draft


def newest(draft: Draft) -> Commit | None:
    """Return the newest commit that was ever reported; None before the first."""
    known = max(
        draft.queries.newest_reported or (0, 0), committed(draft) or (0, 0), parse_commit(draft.record.told) or (0, 0)
    )
    return known if draft.record.gen and known > (0, 0) else None


def committed(draft: Draft) -> Commit | None:
    """Return the last commit in the job's reported progress, or None."""
    progress = draft.snapshot.progress
    if progress is None or progress.commit_gen is None or progress.commit_step is None:
        return None
    return progress.commit_gen, progress.commit_step


def given_up(draft: Draft) -> bool:
    """Whether the job may go on without the newest commit: a user allowed it, or every copy is damaged or lost."""
    commit = newest(draft)
    return commit is not None and commit <= (parse_commit(draft.record.given_up) or (0, 0))


def covered(draft: Draft) -> bool:
    """Whether the bucket has a copy of the newest commit or of a later one."""
    commit, copies = newest(draft), draft.record.mirror
    return commit is not None and bool(copies) and (parse_commit(copies[0].commit) or (0, 0)) >= commit


def text(commit: Commit) -> str:
    return f"{commit[0]}-{commit[1]}"


def costs_nothing(draft: Draft) -> bool:
    """Whether a stop that no user requested, to save money or to grow, loses no work.

    Before the first commit a stop costs all steps, since training begins again at step 0. After the last step a script
    runs what follows its training loop (an evaluation, an export). A stop would start that part from its beginning
    again, so with repeated stops it might never end.
    """
    return newest(draft) is not None and not past_loop(draft)


def past_loop(draft: Draft) -> bool:
    """Whether the script has made the last step of its loop."""
    progress = draft.snapshot.progress
    return bool(progress and progress.total_steps and progress.step >= progress.total_steps - 1)


def machines(draft: Draft, ready: Iterable[int]) -> list[tuple[int, Slot]]:
    """Return each of these nodes that is not vacant, with its ``cur``."""
    return [(index, slot) for index in ready if (slot := draft.nodes[index].cur)]


def attached(draft: Draft, ready: Iterable[int]) -> list[tuple[int, Slot]]:
    """Return the given nodes whose disk is attached to their machine, with that machine."""
    found = machines(draft, ready)
    return [(index, slot) for index, slot in found if draft.queries.attached(index, draft.nodes[index].disk, slot)]


def has_newest(draft: Draft, index: int, slot: Slot) -> bool:
    """Whether the newest commit is certainly on this machine's disk.

    True if the disk was attached when the generation began, and either had the commit then or the generation has
    committed since, which writes to every attached disk. What the machine itself reports takes precedence, since a save
    can fail on one machine alone.
    """
    if not slot.disk or any(
        draft.queries.said(index, slot, kind, draft.record.gen) for kind in (Kind.FULL, Kind.UNSAVED)
    ):
        return False
    reported, commit = draft.queries.checkpoint(index, slot), newest(draft)
    if (
        commit is not None
        and draft.queries.ended(index, slot, draft.record.gen)
        and (reported is None or reported < commit)
    ):
        return False
    progress, gen = draft.snapshot.progress, draft.record.gen
    if slot.has_newest or (progress is not None and progress.commit_gen == gen):
        return True
    return reported is not None and reported[0] == gen


def behind(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether these nodes would begin without the newest commit, although it was not given up."""
    return not given_up(draft) and lacks(draft, ready)


def lacks(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether none of these nodes is known to have the newest commit. True until a machine has mounted its disk.

    With sharded state too one node with the commit suffices: :func:`may_take` lets each node train only on the disk
    with its own part, so the other nodes have their parts as well.
    """
    commit = newest(draft)
    if commit is None:
        return False
    return not any(
        has_newest(draft, index, slot) or (draft.queries.checkpoint(index, slot) or (0, 0)) >= commit
        for index, slot in machines(draft, ready)
    )


def lacking(draft: Draft) -> bool:
    """Whether the job is between generations, and none of its machines has the newest commit (yet)."""
    record = draft.record
    if record.phase is not Phase.RUN or not record.gen or not record.stop:
        return False
    return lacks(draft, draft.filled())


def ruined(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether the newest commit is damaged on every checkpoint disk that has it.

    It is damaged on a disk if the disk's node is in ``ready``, uses the disk, and reports the damage. With sharded
    state one damaged part suffices, since the other parts are useless without it.
    """
    commit = newest(draft)
    keepers = [index for index, node in enumerate(draft.nodes) if commit is not None and node.keeps(commit[0])]
    if commit is None or not keepers:
        return False
    there = dict(machines(draft, ready))
    told = [
        index in there
        and there[index].machine == draft.nodes[index].machine
        and draft.queries.attached(index, draft.nodes[index].disk, there[index])
        and any(parse_commit(f.value) == commit for f in draft.queries.said(index, there[index], Kind.DAMAGED))
        for index in keepers
    ]
    return any(told) if sharded(draft) else all(told)


def gone(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether the newest commit is lost: each checkpoint disk that had it is mounted without it, or does not exist now.

    With sharded state one mounted disk without any checkpoint suffices: the parts on other disks are then useless.
    """
    commit, there = newest(draft), list(ready)
    if commit is None or not mounted(draft, there):
        return False
    keepers = [index for index, node in enumerate(draft.nodes) if node.keeps(commit[0])]
    if not keepers or not all(
        _comes_home(draft, index) if index in there else _no_home(draft, index) for index in keepers
    ):
        return False
    return blank(draft, there) if sharded(draft) else lacks(draft, there)


def _comes_home(draft: Draft, index: int) -> bool:
    node = draft.nodes[index]
    return node.cur is not None and node.cur.machine == node.machine


def _no_home(draft: Draft, index: int) -> bool:
    """Whether every zone answered and none lists the node's checkpoint disk. False for the disk of a static machine."""
    node = draft.nodes[index]
    return node.machine is None and draft.queries.complete and not draft.queries.disks.get((index, node.disk))


def mounted(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether each of these nodes has mounted its disk and reported its checkpoints."""
    slots = [(index, draft.nodes[index].cur) for index in ready]
    return all(
        slot is not None
        and draft.queries.attached(index, draft.nodes[index].disk, slot)
        and draft.queries.said(index, slot, Kind.ATTACHED)
        for index, slot in slots
    )


def blank(draft: Draft, ready: Iterable[int]) -> bool:
    """Whether one of these nodes has no checkpoint: it has no machine, or its disk is blank or not mounted.

    A member that is silent has reported none either, but its disk may have the newest one.
    """
    return any(
        (slot := draft.nodes[index].cur) is None
        or (draft.queries.checkpoint(index, slot) is None and not has_newest(draft, index, slot))
        for index in ready
    )


def told(draft: Draft, ready: Iterable[int]) -> Commit | None:
    """Return the newest checkpoint that the machines of these nodes reported, or None."""
    found = (draft.queries.checkpoint(index, slot) for index, slot in machines(draft, ready))
    return max(filter(None, found), default=None)


def origin(draft: Draft, ready: Iterable[int]) -> str:
    """Return a text on where training starts if the newest commit is lost; "" until every attached disk is mounted."""
    there = [index for index, _ in attached(draft, ready)]
    if not mounted(draft, there):
        return ""
    newest_told = told(draft, there)
    return f"from {text(newest_told)}" if newest_told is not None else "anew, from step 0"


def may_take(draft: Draft, index: int, machine: str | None) -> bool:
    """Whether the gang has the newest commit if this node trains on that static machine (None: on its own disk)."""
    commit, node = newest(draft), draft.nodes[index]
    if commit is None or machine == node.machine:
        return True
    if sharded(draft):
        return not node.wrote
    keepers = [other for at in draft.filled() if (other := draft.nodes[at]).keeps(commit[0])]
    nodes = {keeper.machine for keeper in keepers if keeper.machine is not None}
    others = (draft.nodes[at] for at in draft.filled() if at != index)
    if any((other.keeps(commit[0]) and _at_home(other)) or _on(other, nodes) for other in others):
        return True
    return not keepers or machine in nodes


def may_follow(draft: Draft, index: int, machine: str | None) -> bool:
    """Whether this node's replacement may train on static machine ``machine`` (None: on the node's own disk).

    The present machine can save again after this check, and a replacement on another disk would lack that commit. With
    replicated state another disk is therefore allowed only while some other member trains on the disk with its own
    checkpoints, since every save goes to that disk too; with sharded state, only if this node has saved nothing yet.
    """
    node = draft.nodes[index]
    if not may_take(draft, index, machine):
        return False
    if machine == node.machine or not draft.record.gen:
        return True
    if sharded(draft):
        return not node.wrote
    return any(at != index and slot.disk and _at_home(draft.nodes[at]) for at, slot in draft.members())


def pinned(draft: Draft) -> str | None:
    """Return a static machine with the newest checkpoint if no other disk and no copy in the bucket has it, or None.

    This machine binds the gang to its zone.
    """
    commit = newest(draft)
    if commit is None or given_up(draft) or covered(draft):
        return None
    homes = [draft.nodes[at].machine for at in draft.filled() if draft.nodes[at].keeps(commit[0])]
    return None if not homes or None in homes else homes[0]


def bound(draft: Draft, index: int) -> str | None:
    """Return the static machine for which this vacant node must wait; or None."""
    machine = draft.nodes[index].machine
    free = given_up(draft) or covered(draft)
    return machine if machine is not None and not free and not may_take(draft, index, None) else None


def _at_home(node: Node) -> bool:
    """Whether a node's ``cur`` and ``next`` use its checkpoint disk; if vacant, whether that disk is the node's own."""
    slots = [slot for slot in (node.cur, node.next) if slot is not None]
    return all(slot.machine == node.machine for slot in slots) if slots else node.machine is None


def _on(node: Node, nodes: set[str]) -> bool:
    slots = [slot for slot in (node.cur, node.next) if slot is not None]
    return bool(slots) and all(slot.machine in nodes for slot in slots)


def only(draft: Draft, index: int) -> str:
    """Return a text for the user on why a node must wait for the static machine that :func:`bound` returned."""
    if sharded(draft):
        return f"node {index}'s part of the newest checkpoint is only on this machine's disk"
    return "the newest checkpoint is only on this machine's disk"


def sharded(draft: Draft) -> bool:
    """Whether a checkpoint consists of all nodes' parts; otherwise each node that writes has a whole checkpoint.

    The files of a script that saves by itself count as parts, since it is unknown which files a node has.
    """
    spec = draft.snapshot.spec
    return spec is not None and (spec.stop == "signal" or not spec.checkpoint.replicated)
