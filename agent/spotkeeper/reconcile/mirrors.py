"""Deleting copies of checkpoints that nobody will fetch: older ones once a newer is complete, all with the job.

What the record names stays, and what is newer than all of it, for that may be on its way. Everything else goes: what
was replaced, what an upload left by halves, what a line of the job that was given up has left. A copy loses its lists
before its parts, so nobody ever takes half of one for a whole. Lists a folder when a machine has told of a copy, never
to decide anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from spotkeeper.reconcile import paths
from spotkeeper.reconcile.decide.seen import parse_commit
from spotkeeper.reconcile.store_api import Store
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.record import Record

AT_ONCE = 8
MOST = 400  # objects of one look: a round has other things to do


def told(facts: Iterable[Fact]) -> bool:
    """Whether these say anything of copies: until they are dropped, there may be something to delete."""
    return any(fact.kind in (Kind.MIRRORED, Kind.UNMIRRORED) for fact in facts)


def sweep(store: Store, record: Record) -> bool:
    """Delete what is replaced; True once nothing of it is left.

    Raises:
        StoreError: the bucket does not answer; the next round goes on.
    """
    kept, top = {one.commit for one in record.mirror}, parse_commit(record.mirror_top) or (0, 0)

    def goes(commit: str) -> bool:
        parsed = parse_commit(commit)
        return parsed is not None and parsed <= top and commit not in kept

    return _delete(store, [path for path in store.list(paths.copies(record.job)) if goes(paths.copy_of(path))])


def clear(store: Store, job: str) -> bool:
    """Delete all that a job has; True once nothing is left."""
    return _delete(store, store.list(paths.copies(job)))


def _delete(store: Store, doomed: Iterable[str]) -> bool:
    """Lists first. Of very many only some, in this order."""
    ordered = sorted(doomed, key=lambda path: (not path.endswith(".json"), path))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(store.delete, ordered[:MOST]))
    return len(ordered) <= MOST
