"""Copies of checkpoints in the bucket: which there are, and when one is fetched before a generation begins.

The record knows of a copy by a machine's word, once it is complete; nobody lists a bucket to decide. The order is disk,
peer, bucket: a copy is fetched only where no machine of the next generation holds what the job goes on from. One that
cannot be had is struck out, and the next older one counts. What the bucket has, no rank has to go home for (``kept``).
"""

from __future__ import annotations

from spotkeeper.reconcile.decide import kept
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import Commit, parse_commit
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Fetch, Mirrored

MOST = 10  # that a job's file may ask for


def step(draft: Draft) -> None:
    """Take in what machines say of copies; and of their disks, for a copy is worth what no disk has more of."""
    spec, held = draft.seen.spec, draft.view.newest_held
    known = max(parse_commit(draft.record.told) or (0, 0), kept.committed(draft) or (0, 0))
    if spec is not None and spec.checkpoint.mirror and held and held > known:
        draft.set(told=kept.text(held))
    for fact in draft.view.every(Kind.MIRRORED):
        _made(draft, fact)
    for fact in draft.view.every(Kind.UNMIRRORED):
        _gone(draft, fact)


def _made(draft: Draft, fact: Fact) -> None:
    """Newer than any before, and of no line that was given up: an upload may end long after its generation."""
    commit, record = parse_commit(fact.value), draft.record
    known = max(parse_commit(record.mirror_top) or (0, 0), parse_commit(record.given_up) or (0, 0))
    if commit is None or commit <= known:
        return
    keep = draft.seen.spec.checkpoint.mirror.keep if draft.seen.spec and draft.seen.spec.checkpoint.mirror else 1
    new = Mirrored(fact.value, fact.rank, draft.now)
    draft.set(mirror=(new, *record.mirror)[: min(keep, MOST)], mirror_top=fact.value)
    draft.log(Event.MIRRORED, fact.value, rank=fact.rank, detail=fact.value)


def _gone(draft: Draft, fact: Fact) -> None:
    left = tuple(one for one in draft.record.mirror if one.commit != fact.value)
    if len(left) < len(draft.record.mirror):
        draft.set(mirror=left, fetch=None)
        draft.log(Event.UNMIRRORED, fact.value, rank=fact.rank, detail=fact.value)


def stale(draft: Draft) -> tuple[Fact, ...]:
    """Words about copies that the record has taken in: nobody needs them any more, also of machines that go on."""
    record = draft.record
    top, left = parse_commit(record.mirror_top) or (0, 0), {one.commit for one in record.mirror}
    made = (fact for fact in draft.view.every(Kind.MIRRORED) if (parse_commit(fact.value) or (0, 0)) <= top)
    gone = (fact for fact in draft.view.every(Kind.UNMIRRORED) if fact.value not in left)
    return (*made, *gone)


def lost(draft: Draft, ready: list[int]) -> bool:
    """Whether the newest commit went with the disks, and there are copies, all older: one of them will have to do."""
    known = kept.given_up(draft) or kept.covered(draft)
    return bool(draft.record.mirror) and not known and kept.gone(draft, ready)


def helps(draft: Draft, ready: list[int]) -> bool:
    """Whether all disks are mounted, and the newest copy is newer than what they have, and not fetched yet."""
    copies = draft.record.mirror
    commit = parse_commit(copies[0].commit) if copies else None
    if commit is None or not kept.mounted(draft, ready):
        return False
    if kept.sharded(draft):
        begun = draft.record.fetch is not None and draft.record.fetch.commit == copies[0].commit
        return (begun or kept.blank(draft, ready)) and not all(_has(draft, index, commit) for index in ready)
    told = kept.told(draft, ready)
    return kept.lacks(draft, ready) and (told is None or told < commit)


def awaited(draft: Draft, ready: list[int]) -> bool:
    """Whether the next generation waits until a copy is on the disks that need it; says who fetches which."""
    newest, copies = kept.newest(draft), draft.record.mirror
    wanted = kept.covered(draft) or kept.given_up(draft) or lost(draft, ready)
    if newest is None or not wanted or not helps(draft, ready):
        if draft.record.fetch is not None and not _there(draft, ready):
            draft.set(fetch=None)
        return False
    # Of replicated state one rank is enough: the others have it from there. Of sharded state each needs its part.
    parts = kept.sharded(draft)
    fetch = Fetch(copies[0].commit, None if parts else copies[0].rank, tuple(ready if parts else ready[:1]))
    if draft.record.fetch is None or draft.record.fetch.commit != fetch.commit:
        draft.log(Event.FETCH, f"v{draft.before.ver + 1}", detail=_words(newest, copies[0]))
    reason = f"fetching checkpoint {fetch.commit} from the bucket: no disk has it, or a newer one"
    draft.set(fetch=fetch, reason=reason)
    return True


def _there(draft: Draft, ready: list[int]) -> bool:
    """Whether the copy that was awaited is where it was wanted."""
    fetch = draft.record.fetch
    commit = None if fetch is None else parse_commit(fetch.commit)
    return commit is not None and any(_has(draft, index, commit) for index in ready)


def _has(draft: Draft, index: int, commit: Commit) -> bool:
    slot = draft.ranks[index].cur
    return slot is not None and any(
        parse_commit(fact.value) == commit for fact in draft.view.said(index, slot, Kind.FETCHED)
    )


def _words(newest: Commit, source: Mirrored) -> str:
    """What is fetched, and what is lost."""
    commit = parse_commit(source.commit)
    if commit is None or commit >= newest:
        return f"checkpoint {source.commit}, the newest that was told of"
    steps = newest[1] - commit[1]
    again = f", and {steps} steps are done again" if steps > 0 else ""
    return f"checkpoint {source.commit}; {kept.text(newest)} is lost{again}"


__all__ = ["awaited", "helps", "lost", "stale", "step"]
