"""What the newest job of a name told of its steps, and on what it made them. Reads alone."""

from __future__ import annotations

from msgspec import Struct

from spotkeeper.cli.jobs import earlier
from spotkeeper.reconcile.store_api import CorruptError, Store
from spotkeeper.report.compare import Shape
from spotkeeper.report.money import attempts
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.stack import PoolState, StackState


class Ran(Struct, frozen=True):
    """``step_s``: real seconds. ``total_steps``: 0 where it did not tell. ``shape``: None where nobody knows it."""

    job: str
    step_s: float
    total_steps: int
    shape: Shape | None


def ran(store: Store | None, stack: StackState, name: str) -> Ran | None:
    """None: there is no such job, or it told of no step.

    Raises:
        StoreError: the bucket.
    """
    if store is None or (job := earlier(store, name)) is None:
        return None
    told = store.read_progress(job)
    if told is None or not told.step_s:
        return None
    return Ran(job, told.step_s, told.total_steps or 0, _shape(store, job, stack))


def shape_of(spec: JobSpec, pool: PoolState) -> Shape:
    """A job's machines, as many as it may have, in this pool."""
    return Shape(pool.machine_type, spec.size().max, spec.nproc or pool.nproc)


def _shape(store: Store, job: str, stack: StackState) -> Shape | None:
    """By its job file, and the pool of the machine that joined it last."""
    try:
        held = store.read_record(job)
        spec = store.read_spec(job, held.value.spec_key() if held is not None else "")
    except CorruptError:
        return None
    joined = [one for one in attempts(store.list_ledger(job)) if one.admitted is not None]
    last = max(joined, key=lambda one: one.admitted or 0.0, default=None)
    pool = next((pool for pool in stack.pools if last is not None and pool.name == last.pool), None)
    return shape_of(spec, pool) if spec is not None and pool is not None else None
