"""Copies of checkpoints in the bucket: which exist, and when one is fetched before a generation begins.

A machine reports each complete copy, and the record names it; no decision lists the bucket. A copy is fetched only if
no machine of the next generation has the checkpoint to continue from. A copy that is damaged or missing is dropped, and
the next older copy counts.
"""

from __future__ import annotations

from spotkeeper.contract.facts import BucketCopy, Commit, Fact, Kind, parse_commit
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Fetch, Mirrored
from spotkeeper.reconcile.decide.checkpoint import location
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.job import egress

MOST = 10  # the largest `keep` that a job file may set


def step(draft: Draft) -> None:
    """Record the copies that machines report, and the newest checkpoint on a disk, which can be newer than any copy."""
    spec, newest = draft.snapshot.spec, draft.queries.newest_reported
    known = max(parse_commit(draft.record.told) or (0, 0), location.committed(draft) or (0, 0))
    if spec is not None and spec.checkpoint.mirror and newest and newest > known:
        draft.set(told=location.text(newest))
    for fact in draft.queries.every(Kind.MIRRORED):
        _made(draft, fact)
    for fact in draft.queries.every(Kind.UNMIRRORED):
        _gone(draft, fact)


def _made(draft: Draft, fact: Fact) -> None:
    """Record a reported copy if its commit is newer than those of all earlier copies and than the commit given up."""
    sent, record = BucketCopy.parse(fact.value), draft.record
    commit = parse_commit(sent.commit) if sent is not None else None
    known = max(parse_commit(record.mirror_top) or (0, 0), parse_commit(record.given_up) or (0, 0))
    if sent is None or commit is None or commit <= known:
        return
    keep = (
        draft.snapshot.spec.checkpoint.mirror.keep
        if draft.snapshot.spec and draft.snapshot.spec.checkpoint.mirror
        else 1
    )
    new = Mirrored(sent.commit, fact.node, draft.now, sent.bytes)
    draft.set(mirror=(new, *record.mirror)[: min(keep, MOST)], mirror_top=sent.commit)
    draft.log(Event.MIRRORED, sent.commit, node=fact.node, detail=sent.commit)
    egress.to_bucket(draft, sent)


def _gone(draft: Draft, fact: Fact) -> None:
    left = tuple(one for one in draft.record.mirror if one.commit != fact.value)
    if len(left) < len(draft.record.mirror):
        draft.set(mirror=left, fetch=None)
        draft.log(Event.UNMIRRORED, fact.value, node=fact.node, detail=fact.value)


def stale(draft: Draft) -> tuple[Fact, ...]:
    """Return the facts about copies that the record already reflects, so that these facts may be deleted."""
    record = draft.record
    top, left = parse_commit(record.mirror_top) or (0, 0), {one.commit for one in record.mirror}
    made = (fact for fact in draft.queries.every(Kind.MIRRORED) if (_commit(fact) or (0, 0)) <= top)
    gone = (fact for fact in draft.queries.every(Kind.UNMIRRORED) if fact.value not in left)
    return (*made, *gone)


def lost(draft: Draft, ready: list[int]) -> bool:
    """Whether the newest commit was lost with its disks, and only copies of older ones exist."""
    known = location.given_up(draft) or location.covered(draft)
    return bool(draft.record.mirror) and not known and location.gone(draft, ready)


def helps(draft: Draft, ready: list[int]) -> bool:
    """Whether fetching the newest copy helps: all disks are mounted, and none has that checkpoint or a newer one."""
    copies = draft.record.mirror
    commit = parse_commit(copies[0].commit) if copies else None
    if commit is None or not location.mounted(draft, ready):
        return False
    if location.sharded(draft):
        begun = draft.record.fetch is not None and draft.record.fetch.commit == copies[0].commit
        return (begun or location.blank(draft, ready)) and not all(_has(draft, index, commit) for index in ready)
    told = location.told(draft, ready)
    return location.lacks(draft, ready) and (told is None or told < commit)


def awaited(draft: Draft, ready: list[int]) -> bool:
    """Whether the next generation must wait for a copy to be fetched. Records which nodes fetch it."""
    newest, copies = location.newest(draft), draft.record.mirror
    wanted = location.covered(draft) or location.given_up(draft) or lost(draft, ready)
    if newest is None or not wanted or not helps(draft, ready):
        if draft.record.fetch is not None and not _there(draft, ready):
            draft.set(fetch=None)
        return False
    # With replicated state one node fetches and the others receive it from there. With sharded state each needs its
    # part.
    parts = location.sharded(draft)
    fetch = Fetch(copies[0].commit, None if parts else copies[0].node, tuple(ready if parts else ready[:1]))
    if draft.record.fetch is None or draft.record.fetch.commit != fetch.commit:
        draft.log(Event.FETCH, f"v{draft.before.ver + 1}", detail=_words(newest, copies[0]))
    reason = f"fetching checkpoint {fetch.commit} from the bucket: no disk has this checkpoint or a newer one"
    draft.set(fetch=fetch, reason=reason)
    return True


def _there(draft: Draft, ready: list[int]) -> bool:
    fetch = draft.record.fetch
    commit = None if fetch is None else parse_commit(fetch.commit)
    return commit is not None and any(_has(draft, index, commit) for index in ready)


def _has(draft: Draft, index: int, commit: Commit) -> bool:
    slot = draft.nodes[index].cur
    return slot is not None and draft.queries.fetched(index, slot, location.text(commit)) is not None


def _commit(fact: Fact) -> Commit | None:
    told = BucketCopy.parse(fact.value)
    return parse_commit(told.commit) if told is not None else None


def _words(newest: Commit, source: Mirrored) -> str:
    commit = parse_commit(source.commit)
    if commit is None or commit >= newest:
        return f"checkpoint {source.commit}, the newest that was reported"
    steps = newest[1] - commit[1]
    again = f", and {steps} steps are repeated" if steps > 0 else ""
    return f"checkpoint {source.commit}; {location.text(newest)} is lost{again}"
