"""Submit a search's trials: an interrupted submission goes on where it stopped, and no trial is submitted twice.

The order of writes is: the source, ``spec.json``, the cohort with the drawn values, then for each trial its job (as
``submit.py`` does) and ``trials/<number>``. A trial's job is made from these documents alone, and its id follows from
them, so whoever goes on submits the same job under the same id. Each write creates an object and replaces none.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from msgspec.structs import replace

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.lookup import new_request
from spotkeeper.client.pack import Source
from spotkeeper.client.submit import differences, free_port_block, ports_in_use, submit, with_source
from spotkeeper.client.sweep_status import Sweep, find_sweep
from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.record import Phase
from spotkeeper.contract.sweepfile import Cohort, SweepSpec, trial_job
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store

AT_ONCE = 4  # trials submitted in parallel


def begin(store: Store, spec: SweepSpec, source: Source | None, cohort: Cohort) -> Sweep:
    """Store a checked search and its first cohort, or go on with the same search.

    Raises:
        CliError: a search of this name exists already, with other content.
        StoreError: the bucket failed.
    """
    name = spec.file.name
    spec = replace(spec, job=with_source(spec.job, source))
    stored = store.read_sweep_spec(name)
    if stored is None:
        if source is not None:
            store.put_sweep_source(name, source.sha256, source.tar)
        stored = spec if store.create_sweep_spec(spec) else store.read_sweep_spec(name)
    if stored is None or (other := _differences(stored, spec)):
        raise CliError(
            f"{name}: a search of this name exists already, with other content: {', '.join(other)}",
            Exit.REFUSED,
            f"give this search another `name`; more trials of that one: spotkeeper sweep extend {name} --trials +20",
        )
    store.create_cohort(name, cohort)
    return find_sweep(store, name)


def _differences(stored: SweepSpec, spec: SweepSpec) -> list[str]:
    fields = [field for field in spec.file.__struct_fields__ if field != "job"]
    found = [field for field in fields if getattr(stored.file, field) != getattr(spec.file, field)]
    return found + [f"job.{field}" for field in differences(stored.job, spec.job)]


def extend(store: Store, sweep: Sweep, cohort: Cohort) -> Sweep:
    """Store a further cohort.

    Raises:
        CliError: another one came first.
        StoreError: the bucket failed.
    """
    if not store.create_cohort(sweep.name, cohort):
        again = f"spotkeeper sweep status {sweep.name}"
        raise CliError(f"{sweep.name}: another `extend` came first", Exit.REFUSED, again)
    return find_sweep(store, sweep.name)


def source_of(store: Store, sweep: Sweep) -> Source | None:
    """Return the source of a search's trials; None if they have none.

    Raises:
        CliError: it is gone.
    """
    sha256 = sweep.spec.job.source_sha256
    if sha256 is None:
        return None
    tar = store.get(paths.sweep_source(sweep.name, sha256))
    if tar is None:
        raise CliError(f"{sweep.name}: the source of its trials is gone from the bucket", Exit.MISSING)
    return Source(tar, sha256, 0)


def submit_missing(
    store: Store, sweep: Sweep, source: Source | None, now: float, by: str, tell: Callable[[str], object]
) -> Iterator[tuple[int, str]]:
    """Submit the trials that are not submitted yet; yields number and job of each, in the order of their numbers.

    Args:
        tell: notifies the function of a job, called from several threads.

    Raises:
        CliError: the name of a trial belongs to an unfinished job with other content, another job is named as the
            trial, or the search was stopped meanwhile; others may be submitted.
        StoreError: the bucket failed.
    """
    blocks, lock, stopped = _Blocks(store), threading.Lock(), threading.Event()

    def meanwhile() -> CliError:
        again = f"spotkeeper sweep status {sweep.name}"
        return CliError(f"{sweep.name}: the search was stopped meanwhile", Exit.REFUSED, again)

    def one(number: int) -> tuple[int, str]:
        if stopped.is_set():
            raise meanwhile()
        with lock:
            ports = blocks.next()
        job, over = _submitted(store, sweep, number, source, now, by, ports)
        if not store.create_trial(sweep.name, number, job):
            remedy = f"cancel that job and job {job}, and give the search another `name`"
            other = store.read_trial(sweep.name, number) or "none"
            raise CliError(f"{sweep.name}: somebody named job {other} as trial {number}", Exit.REFUSED, remedy)
        # A stop writes its mark before it looks for trials, so either it or this finds the other.
        if any(number < stop.below for stop in store.list_stops(sweep.name)):
            stopped.set()
            if not over:
                store.put_request(job, new_request(RequestKind.CANCEL, now, by))
                tell(job)
            raise meanwhile()
        if not over:
            tell(job)
        return number, job

    with ThreadPoolExecutor(AT_ONCE) as pool:  # after an error or Ctrl-C, no further trial begins
        yield from pool.map(one, sweep.missing())


class _Blocks:
    """Blocks of ports for new jobs: the records of the unfinished jobs are read once, not for each trial."""

    def __init__(self, store: Store) -> None:
        self._store, self._taken = store, set[int]()
        self._read = False

    def next(self) -> int:
        if not self._read:
            self._taken, self._read = set(ports_in_use(self._store)), True
        block = free_port_block(self._taken)
        self._taken.add(block)
        return block


def _submitted(
    store: Store, sweep: Sweep, number: int, source: Source | None, now: float, by: str, ports: int
) -> tuple[str, bool]:
    """Submit a trial unless it is; return its job, and whether that is over already."""
    spec = trial_job(sweep.spec, sweep.cohort(number), number)
    for attempt in count():
        job = sweep.spec.job_id(number, attempt)
        read = store.read_record(job)
        if read is None:
            return submit(store, spec, source, now, by, job, ports).job, False
        if read.value.nodes:  # a record without nodes ends a submission that was incomplete for a day
            return job, read.value.phase is Phase.DONE
    raise AssertionError


def new_nonce() -> str:
    """Return what makes the ids of a new search's trials."""
    return secrets.token_hex(8)
