"""Chaos: preempts machines as clouds do, one fault after another.

A fault waits until training is steady, preempts, and waits until the preempted machine is replaced. ``proof`` measures
the cost of each fault.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from spotkeeper.contract import names
from spotkeeper.contract.record import Hold, Phase, Record, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.local.demo.proof import Watcher
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.train.checkpoint.store import COMMIT

T = TypeVar("T")

REMEDY = "On a busy machine recoveries take longer: repeat the demo with ARGS=--steps=1400"
STEADY_STEPS = 15  # steps of a generation before the next fault
PATIENCE_S = 120.0  # most real seconds that a fault waits for an event


class ChaosError(Exception):
    """Raised if the job did not recover from a fault, or ended too early."""


@dataclass
class Chaos:
    """Preempts machines of one job. ``report`` is called with a description of each fault."""

    stack: str
    job: str
    cloud: LocalCloud
    watcher: Watcher
    read: Callable[[], Record | None]
    report: Callable[[str], None]
    rng: random.Random
    _roots: dict[str, Path] = field(default_factory=dict)

    def faults(self) -> list[tuple[str, Callable[[], None]]]:
        """Return all faults in an order that the seed chooses; the loss of all capacity is always the third fault."""
        faults: list[tuple[str, Callable[[], None]]] = [
            ("preempts a spot machine with a notice", lambda: self.one(announced=True)),
            ("preempts a spot machine without a notice", lambda: self.one(announced=False)),
            ("preempts the master's machine", lambda: self.master(announced=self.rng.random() < 0.5)),
            ("preempts two machines at once", self.two),
            ("preempts a machine while it writes a checkpoint", self.during_save),
        ]
        self.rng.shuffle(faults)
        dry = "preempts a machine whose zone has no spot capacity left, so that on-demand fallback begins"
        faults.insert(2, (dry, self.dry))
        return faults

    def run(self) -> None:
        """Cause all faults one by one; ChaosError if a recovery takes more than ``PATIENCE_S`` real seconds."""
        for title, fault in self.faults():
            self.until("training is steady before the next fault", self.is_steady)
            self.report(title)
            fault()
        self.until("training is steady after the last fault", self.is_steady)

    # Faults

    def one(self, *, announced: bool) -> None:
        node, slot = self.rng.choice(self.spot_members(1))
        self.preempt(node, slot, announced)
        self.replaced([(node, slot)])

    def master(self, *, announced: bool) -> None:
        record = self.record()
        node = record.members[0]
        slot = record.nodes[node].cur
        if slot is None or slot.model is Model.STATIC:
            raise ChaosError(f"the master is node {node}, a static machine, which cannot be preempted")
        self.preempt(node, slot, announced)
        self.replaced([(node, slot)])

    def two(self) -> None:
        victims = self.rng.sample(self.spot_members(2), 2)
        for node, slot in victims:
            self.preempt(node, slot, announced=False)
        self.replaced(victims)

    def during_save(self) -> None:
        victims = self.spot_members(1)
        node, slot = self.until("a machine writes a checkpoint", lambda: self.caught_saving(victims), 0.002)
        self.preempt(node, slot, announced=False)
        self.replaced([(node, slot)])

    def dry(self) -> None:
        """End a zone's capacity and preempt a machine, so that on-demand fallback begins; then restore the capacity."""
        node, slot = self.rng.choice(self.spot_members(1))
        self.cloud.set_capacity(slot.zone, 0, reclaim=False)
        try:
            self.preempt(node, slot, announced=True)
            self.until(f"node {node} runs on-demand", lambda: self.model_of(node) is Model.ON_DEMAND)
            self.until("training is steady on-demand", self.is_steady)
        finally:
            self.cloud.set_capacity(slot.zone, None, reclaim=False)
        self.report(f"spot capacity is back in {slot.zone}")
        self.until(f"node {node} is on a spot machine again", lambda: self.model_of(node) is Model.SPOT)

    # Steps

    def preempt(self, node: int, slot: Slot, announced: bool) -> None:
        vm = names.vm_name(self.stack, self.job, node, slot.attempt)
        self.cloud.preempt(vm, notice=announced)

    def replaced(self, victims: list[tuple[int, Slot]]) -> None:
        for node, slot in victims:
            self.until(f"the machine of node {node} is replaced", partial(self.newer, node, slot))

    def newer(self, node: int, slot: Slot) -> bool:
        cur = self.record().nodes[node].cur
        return cur is not None and cur.attempt > slot.attempt and cur.state is SlotState.MEMBER

    def model_of(self, node: int) -> Model | None:
        cur = self.record().nodes[node].cur
        return cur.model if cur is not None and cur.state is SlotState.MEMBER else None

    def caught_saving(self, victims: list[tuple[int, Slot]]) -> tuple[int, Slot] | None:
        for node, slot in victims:
            if self.saving(names.vm_name(self.stack, self.job, node, slot.attempt)):
                return node, slot
        return None

    def saving(self, vm: str) -> bool:
        """Whether the VM is writing a checkpoint: its folder exists, but its COMMIT does not exist yet."""
        if vm not in self._roots:
            self._roots = {view.name: Path(view.root) for view in self.cloud.status().vms}
        folder = self._roots.get(vm, Path("/nonexistent")) / "mnt" / "sk-data" / self.job / "ckpt"
        with contextlib.suppress(OSError):
            return any(
                not (home / COMMIT).exists() for home in folder.iterdir() if home.name.replace("-", "").isdecimal()
            )
        return False

    def spot_members(self, least: int) -> list[tuple[int, Slot]]:
        """Wait until at least ``least`` nodes are on spot machines and training is steady; return these nodes."""

        def members() -> list[tuple[int, Slot]] | None:
            found = self.on_spot()
            return found if len(found) >= least and self.is_steady() else None

        return self.until(f"the gang trains steadily and has {least} spot machines", members)

    def on_spot(self) -> list[tuple[int, Slot]]:
        return [
            (number, node.cur)
            for number, node in enumerate(self.record().nodes)
            if node.cur is not None and node.cur.state is SlotState.MEMBER and node.cur.model is Model.SPOT
        ]

    def record(self) -> Record:
        record = self.read()
        if record is None:
            raise ChaosError(f"job {self.job} has no record")
        if record.over:
            raise ChaosError(f"the job ended ({record.reason or record.outcome}) before the last fault. {REMEDY}")
        if record.hold is Hold.FAILURE:
            raise ChaosError(f"the job failed and is on hold: {record.reason}")
        return record

    def is_steady(self) -> bool:
        """Whether every node is a member, no change is pending, and the generation has made ``STEADY_STEPS`` steps."""
        record = self.record()
        if record.stop or record.roll or record.move or record.phase is not Phase.RUN or not record.gen:
            return False
        if any(node.cur is None or node.cur.state is not SlotState.MEMBER or node.next for node in record.nodes):
            return False
        trace = self.watcher.traces().get(record.gen)
        if trace is None or not trace.first_step_at:
            return False
        start = trace.restored.step if trace.restored else 0
        return trace.last_step >= start + STEADY_STEPS

    def until(self, event: str, poll: Callable[[], T | None], period_s: float = 0.1) -> T:
        """Call ``poll`` every ``period_s`` until its result counts as true, and return this result.

        Raises:
            ChaosError: ``event``, which is awaited, did not happen within ``PATIENCE_S`` real seconds.
        """
        for _ in ticks(PATIENCE_S, period_s):
            if found := poll():
                return found
        raise ChaosError(f"timed out after {PATIENCE_S:.0f} s, waiting until {event}")


def ticks(seconds: float, period_s: float = 0.1) -> Iterator[None]:
    """Yield every ``period_s`` real seconds, for ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(period_s)
