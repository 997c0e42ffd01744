"""The storm: takes machines away as clouds do, one act after the other.

An act waits until the job is steady, strikes, and waits until training steps again
with every rank filled. What each act cost is not judged here: ``watcher`` measured it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from spotkeeper.local.demo.watcher import Watcher
from spotkeeper.spec import names
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Hold, Phase, Record, Slot, SlotState

T = TypeVar("T")

STEADY_STEPS = 15  # steps of a generation before the next act
PATIENCE_S = 120.0  # real seconds an act may take before the demo gives up


class StormError(Exception):
    """An act did not end: the job did not come back, or finished too early."""


class Machines(Protocol):
    """What the storm may do to the one-machine cloud."""

    def preempt(self, vm: str, *, notice: bool) -> None: ...

    def set_capacity(self, zone: str, nodes: int | None) -> None:
        """Spot machines that may run in a zone; None: as the recorded market says."""

    def saving(self, vm: str) -> bool:
        """Whether a checkpoint is being written on that VM right now."""


@dataclass
class Storm:
    stack: str
    job: str
    machines: Machines
    watcher: Watcher
    read: Callable[[], Record | None]
    tell: Callable[[str], None]
    rng: random.Random

    def acts(self) -> list[tuple[str, Callable[[], None]]]:
        """In the order of this seed. The dry market comes last but one: it takes longest to heal."""
        acts: list[tuple[str, Callable[[], None]]] = [
            ("a spot machine, with a notice", lambda: self.one(announced=True)),
            ("a spot machine, with no notice", lambda: self.one(announced=False)),
            ("the master's machine", lambda: self.master(announced=self.rng.random() < 0.5)),
            ("two machines at once", self.two),
            ("a machine, while it writes a checkpoint", self.during_save),
        ]
        self.rng.shuffle(acts)
        acts.insert(2, ("all spot capacity, so that on-demand steps in", self.dry))
        return acts

    def run(self) -> None:
        """All acts, one after the other.

        Raises:
            StormError: an act did not end within ``PATIENCE_S``.
        """
        for title, act in self.acts():
            self.steady(f"before the storm takes {title}")
            self.tell(f"the storm takes {title}")
            act()
        self.steady("after the storm")

    # -- acts

    def one(self, *, announced: bool) -> None:
        rank, slot = self.rng.choice(self.spot_members(1))
        self.strike(rank, slot, announced)
        self.replaced([(rank, slot)])

    def master(self, *, announced: bool) -> None:
        record = self.record()
        rank = record.members[0]
        slot = record.ranks[rank].cur
        if slot is None or slot.model is Model.STATIC:
            raise StormError(f"the master is rank {rank}, a static node: nothing to take")
        self.strike(rank, slot, announced)
        self.replaced([(rank, slot)])

    def two(self) -> None:
        victims = self.rng.sample(self.spot_members(2), 2)
        for rank, slot in victims:
            self.strike(rank, slot, announced=False)
        self.replaced(victims)

    def during_save(self) -> None:
        victims = self.spot_members(1)
        rank, slot = self.until("a checkpoint to be written", lambda: self.caught_saving(victims), 0.002)
        self.strike(rank, slot, announced=False)
        self.replaced([(rank, slot)])

    def dry(self) -> None:
        """Capacity goes, a machine with it; on-demand steps in; capacity comes back, and spot with it."""
        rank, slot = self.rng.choice(self.spot_members(1))
        self.machines.set_capacity(slot.zone, 0)
        try:
            self.strike(rank, slot, announced=True)
            self.until(f"rank {rank} to run on-demand", lambda: self.model_of(rank) is Model.ON_DEMAND)
            self.steady("on-demand")
        finally:
            self.machines.set_capacity(slot.zone, None)
        self.tell(f"spot capacity is back in {slot.zone}")
        self.until(f"rank {rank} to return to spot", lambda: self.model_of(rank) is Model.SPOT)

    # -- how

    def strike(self, rank: int, slot: Slot, announced: bool) -> None:
        vm = names.vm_name(self.stack, self.job, rank, slot.attempt)
        self.machines.preempt(vm, notice=announced)

    def replaced(self, victims: list[tuple[int, Slot]]) -> None:
        for rank, slot in victims:
            self.until(f"rank {rank} to be replaced", partial(self.newer, rank, slot))

    def newer(self, rank: int, slot: Slot) -> bool:
        cur = self.record().ranks[rank].cur
        return cur is not None and cur.attempt > slot.attempt and cur.state is SlotState.MEMBER

    def model_of(self, rank: int) -> Model | None:
        cur = self.record().ranks[rank].cur
        return cur.model if cur is not None and cur.state is SlotState.MEMBER else None

    def caught_saving(self, victims: list[tuple[int, Slot]]) -> tuple[int, Slot] | None:
        for rank, slot in victims:
            if self.machines.saving(names.vm_name(self.stack, self.job, rank, slot.attempt)):
                return rank, slot
        return None

    def spot_members(self, least: int) -> list[tuple[int, Slot]]:
        """Waits, where a rank is on-demand for the moment, until so many are on spot and training is steady."""

        def look() -> list[tuple[int, Slot]] | None:
            found = self.on_spot()
            return found if len(found) >= least and self.is_steady() else None

        return self.until(f"{least} spot machines in the gang", look)

    def on_spot(self) -> list[tuple[int, Slot]]:
        return [
            (number, rank.cur)
            for number, rank in enumerate(self.record().ranks)
            if rank.cur is not None and rank.cur.state is SlotState.MEMBER and rank.cur.model is Model.SPOT
        ]

    def record(self) -> Record:
        record = self.read()
        if record is None:
            raise StormError(f"job {self.job} has no record")
        if record.phase in (Phase.END, Phase.DONE):
            raise StormError(f"the job ended ({record.reason or record.outcome}) before the storm was over")
        if record.hold is Hold.FAILURE:
            raise StormError(f"the job failed and holds: {record.reason}")
        return record

    def steady(self, when: str) -> None:
        self.until(f"steady training {when}", self.is_steady)

    def is_steady(self) -> bool:
        """Every rank a member and nothing pending, and the generation has trained for a while."""
        record = self.record()
        if record.stop or record.roll or record.move or record.phase is not Phase.RUN or not record.gen:
            return False
        if any(rank.cur is None or rank.cur.state is not SlotState.MEMBER or rank.next for rank in record.ranks):
            return False
        trace = self.watcher.traces().get(record.gen)
        if trace is None or not trace.first_step_at:
            return False
        start = trace.restored.step if trace.restored else 0
        return trace.last_step >= start + STEADY_STEPS

    def until(self, what: str, look: Callable[[], T | None], period_s: float = 0.1) -> T:
        """Look every ``period_s`` until it is there.

        Raises:
            StormError: not within ``PATIENCE_S`` real seconds.
        """
        for _ in ticks(PATIENCE_S, period_s):
            if found := look():
                return found
        raise StormError(f"waited {PATIENCE_S:.0f} s for {what}")


def ticks(seconds: float, period_s: float = 0.1) -> Iterator[None]:
    """Yield every ``period_s`` real seconds, for ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(period_s)
