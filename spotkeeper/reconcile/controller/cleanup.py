"""Deletes what an ended job leaves in the bucket, and checkpoint copies that were replaced by a newer copy.

``bury`` cleans up after a job; ``withdraw`` ends a submission that never became a job. ``sweep_copies`` deletes
replaced copies, interrupted uploads, and copies of checkpoints that the job gave up. It keeps the copies that the
record names, and newer copies, whose upload perhaps still runs. The list of a copy's files is deleted before the files,
so that no reader mistakes half a copy for a whole one.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from spotkeeper.contract.facts import Fact, parse_commit
from spotkeeper.contract.names import JOB_NAME
from spotkeeper.contract.record import Outcome, Phase, Record
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store

AT_ONCE = 8
MOST = 400  # most objects deleted in one call: a round has other work to do


def bury(store: Store, record: Record, at: float) -> None:
    """Delete the name, requests, facts, source and checkpoint copies of a job that is DONE.

    The copies stay if the job's disks are kept. The marker in ``active/`` is deleted last, so that a later tick
    finishes an interrupted cleanup.
    """
    store.put_tomb(record.job, at)
    for path in store.list(paths.sources(record.job)):
        store.delete(path)
    if not record.nodes:  # a withdrawn submission: its job file is not needed
        store.delete(paths.spec(record.job))
    if JOB_NAME.match(record.name):  # an unknown name is replaced by the id, which may begin with a digit
        store.delete_name(record.name, record.job)
    for request in store.list_requests(record.job):
        store.delete_request(record.job, request.id)
    store.delete_facts(record.job, _obsolete_facts(store, record.job))
    if record.keep_disks or _delete(store, store.list(paths.copies(record.job))):
        store.clear_active(record.job)


def withdraw(store: Store, job: str, name: str, at: float, why: str) -> Record | None:
    """End a submission that has no record: write a record that is DONE, and return it; None if a record exists by now.

    A job without a record has no machine. A submit also writes the job's first record create-only, so only one of the
    two writes succeeds. A later tick deletes the submission's files: a user who calls this function has no right to
    delete them.
    """
    nonce = uuid4().hex
    end = Record(job, str(uuid4()), name, "", at, nonce=nonce, phase=Phase.DONE, outcome=Outcome.CANCELLED, reason=why)
    return end if store.create_record(end) else None


def _obsolete_facts(store: Store, job: str) -> tuple[Fact, ...]:
    """Return the obsolete facts of a DONE job: all except those of attempts that still have a grant."""
    facts = store.list_facts(job)
    grants = store.read_allocation().value.grants if facts else ()
    granted = {(grant.node, grant.attempt) for grant in grants if grant.job == job}
    return tuple(fact for fact in facts if (fact.node, fact.attempt) not in granted)


def sweep_copies(store: Store, record: Record) -> bool:
    """Delete replaced copies of checkpoints. Returns whether none is left.

    Raises:
        StoreError: the bucket does not answer; the next round deletes the rest.
    """
    kept, top = {one.commit for one in record.mirror}, parse_commit(record.mirror_top) or (0, 0)

    def goes(commit: str) -> bool:
        parsed = parse_commit(commit)
        return parsed is not None and parsed <= top and commit not in kept

    return _delete(store, [path for path in store.list(paths.copies(record.job)) if goes(paths.copy_of(path))])


def _delete(store: Store, doomed: Iterable[str]) -> bool:
    """Delete at most 400 of these objects (``MOST``). Returns whether none is left.

    In this order a file list (``0.json``) is deleted before the files that it lists (``0/...``).
    """
    ordered = sorted(doomed)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(store.delete, ordered[:MOST]))
    return len(ordered) <= MOST
