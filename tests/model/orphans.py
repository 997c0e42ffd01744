"""As much of a store as the shipped sweep asks for, to end a job that has no record."""

from __future__ import annotations

from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.record import Record
from spotkeeper.reconcile.store.documents import Versioned
from tests.model.values import NOW, World


class Clock:
    scale = 1.0

    def now(self) -> float:
        return NOW


class Desk:
    """As much of a store as the sweep asks of it."""

    def __init__(self, world: World, job: int) -> None:
        self.world, self.job = world, job
        self.written: Record | None = None

    def read_allocation(self) -> Versioned[Allocation]:
        return Versioned(self.world.allocation, "")

    def read_record(self, job: str) -> Versioned[Record] | None:
        found = self.world.records[self.job]
        return None if found is None else Versioned(found, "")

    def create_record(self, record: Record) -> bool:
        if self.world.records[self.job] is not None:
            return False
        self.written = record
        return True

    def cas_record(self, record: Record, token: str) -> str:
        self.written = record
        return token

    def set_active(self, job: str) -> None:
        """Every job gets its rounds here."""
