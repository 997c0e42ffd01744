"""The bucket in memory, as the function sees it: every verb passes a tap, every change wakes who waits for it.

``SimStore`` is ``tests.reconcile.memory.MemoryStore`` with watchers and a little caching. ``Tapped`` stands
between one process of the function and the store or the cloud: the place where it is counted, killed or frozen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobRequest
from spotkeeper.contract.ledger import Entry
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store.objects import Deadline
from tests.reconcile.memory import MemoryStore

if TYPE_CHECKING:
    from tests.sim.world import World

EFFECTS = frozenset(
    {
        "add_observations",
        "append_all",
        "append_ledger",
        "cas_allocation",
        "cas_notification",
        "cas_prices",
        "cas_record",
        "clear_active",
        "create_record",
        "delete",
        "delete_request",
        "delete_facts",
        "delete_name",
        "delete_notification",
        "drop_lease",
        "perform",
        "put",
        "put_request",
        "put_fact",
        "put_name",
        "put_notification",
        "put_progress",
        "put_spec",
        "put_static_hello",
        "put_tomb",
        "quarantine",
        "send",
        "set_active",
        "take_lease",
    }
)
"""Verbs that change something that outlives the process."""


class SimStore(MemoryStore):
    """One bucket for all processes of the function."""

    def __init__(self, stack: StackState, world: World) -> None:
        super().__init__(stack)
        self.world = world
        self._sorted: dict[str, tuple[Fact, ...]] = {}

    def create_record(self, record: Record) -> bool:
        new = super().create_record(record)
        self.world.record_written(None, record)
        return new

    def _cas_record(self, record: Record, token: str) -> str | None:
        before = self.records[record.job][0]
        won = super()._cas_record(record, token)
        if won is not None and before is not record:
            self.world.record_written(before, record)
        return won

    def cas_allocation(self, allocation: Allocation, token: str) -> str | None:
        won = super().cas_allocation(allocation, token)
        if won is not None:
            self.world.checks.allocation(allocation)
            self.world.version += 1
        return won

    def list_facts(self, job: str) -> tuple[Fact, ...]:
        if job not in self._sorted:
            self._sorted[job] = super().list_facts(job)
        return self._sorted[job]

    def put_fact(self, job: str, fact: Fact) -> bool:
        new = super().put_fact(job, fact)
        self.world.checks.fact(fact)
        if new:
            self._sorted.pop(job, None)
            self.world.version += 1
        return new

    def delete_facts(self, job: str, facts: tuple[Fact, ...]) -> None:
        super().delete_facts(job, facts)
        self._sorted.pop(job, None)

    def put_request(self, job: str, request: JobRequest) -> bool:
        self.world.version += 1
        return super().put_request(job, request)

    def append_ledger(self, job: str, entry: Entry) -> bool:
        new = super().append_ledger(job, entry)
        if new:
            self.world.entry(entry)
        return new

    def take_lease(self, job: str, nonce: str, now: float, ttl_s: float, *more: Callable[[], bool]) -> bool:
        taken = super().take_lease(job, nonce, now, ttl_s, *more)
        if taken:
            self.world.due(job, now + ttl_s)
        return taken

    def drop_lease(self, job: str, nonce: str, due: float | None) -> None:
        super().drop_lease(job, nonce, due)
        self.world.due(job, due)

    def read_progress(self, job: str) -> Progress | None:
        """A gang that trains reports once a minute; here when somebody looks."""
        self.world.report(job)
        return super().read_progress(job)


class Tapped:
    """Everything that one process of the function does to the outside goes through ``tap(verb, before)``."""

    def __init__(self, inner: object, tap: Callable[[str, bool], None], counts: Counter[str]) -> None:
        self._inner, self._tap, self._counts = inner, tap, counts

    def until(self, deadline: Deadline) -> Tapped:
        """Time here is the world's; tests/reconcile/controller/test_request_deadline.py tests deadlines."""
        return self

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self._inner, verb)
        tap, counts = self._tap, self._counts

        def call(*args: Any, **more: Any) -> Any:
            counts[verb] += 1
            tap(verb, True)
            answer = real(*args, **more)
            if verb == "take_lease" and not answer:
                counts["read_lease"] += 1  # the lease is taken: it was read, and nothing written
                counts[verb] -= 1
            tap(verb, False)
            return answer

        setattr(self, verb, call)
        return call
