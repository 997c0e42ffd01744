"""``decide()`` and the generation document for 100 nodes: time of a round outside its calls.

Three rounds are timed, with all their passes: nothing to do (the common one), a notice for one node, and an unannounced
loss of two.
"""

from __future__ import annotations

import statistics
import time

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import Disk, Listing, Vm, VmStatus
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.record import Node, Record, Slot, SlotState
from spotkeeper.contract.stack import Model, PoolState, Price, StackState
from spotkeeper.reconcile.controller.document import generation
from spotkeeper.reconcile.decide import Snapshot, decide

JOB, STACK, ZONE, NOW = "abcd2345", "bench", "z-a", 1_800_000_000.0
GOAL_MS = 20.0


class Figure(Struct, frozen=True):
    """Median milliseconds of all passes of a round with their documents, by what the round had to do."""

    nodes: int
    quiet_ms: float
    notice_ms: float
    loss_ms: float

    def worst(self) -> float:
        return max(self.quiet_ms, self.notice_ms, self.loss_ms)


def gang(nodes: int) -> tuple[Record, Snapshot]:
    """A training job of ``nodes`` nodes, and a round's snapshot of it."""
    price = {ZONE: Price(on_demand=1.0, spot=0.3)}
    pool = PoolState("pool", "spot", "m", (ZONE,), 8, 2 * nodes, nodes, 100, "pd", price)
    stack = StackState(STACK, "gcp", "p", "z", "b", (pool,))
    slots = [
        Slot(
            1,
            SlotState.MEMBER,
            "pool",
            ZONE,
            Model.SPOT,
            NOW,
            None,
            f"u{n}",
            f"b{n}",
            "10.0.0.1",
            disk=True,
            has_newest=True,
        )
        for n in range(nodes)
    ]
    record = Record(
        job=JOB,
        uid="00000000-0000-0000-0000-000000000001",
        name="bench",
        spec_sha256="",
        created=NOW,
        gen=1,
        gen_since=NOW,
        zone=ZONE,
        nodes=tuple(Node(top=1, cur=slot, zone=ZONE) for slot in slots),
        members=tuple(range(nodes)),
    )
    vms = tuple(
        Vm(names.vm_name(STACK, JOB, n, 1), f"u{n}", ZONE, VmStatus.RUNNING, "pool", JOB, n, 1, "10.0.0.1")
        for n in range(nodes)
    )
    disks = tuple(
        Disk(names.disk_name(STACK, JOB, n, 0), ZONE, JOB, n, 0, (names.vm_name(STACK, JOB, n, 1),))
        for n in range(nodes)
    )
    facts = tuple(Fact(f"u{n}", f"b{n}", n, 1, 0, Kind.HELLO) for n in range(nodes))
    grants = tuple(Grant(JOB, n, 1, "slot:pool") for n in range(nodes))
    listing = Listing(vms, disks, (), frozenset({ZONE}))
    spec = JobSpec("bench", ("train.py",), nodes)
    return record, Snapshot(stack, spec, listing, NOW + 30, facts, allocation=Allocation(1, "", grants))


def _passes(record: Record, snapshot: Snapshot) -> int:
    """Run the passes of a round up to its calls; return the number of calls it would make."""
    for _ in range(8):
        decision = decide(record, snapshot)
        if decision.record is not None:
            record = decision.record
            generation(record, snapshot.spec, snapshot.stack)
        elif decision.grants is not None:
            snapshot = Snapshot(**{**snapshot.__dict__, "allocation": decision.grants})
        else:
            return len(decision.actions)
    raise AssertionError("out of passes")


def _median_ms(record: Record, snapshot: Snapshot, repeats: int) -> float:
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        _passes(record, snapshot)
        took.append((time.perf_counter() - begin) * 1000)
    return statistics.median(took)


def measure(nodes: int = 100, repeats: int = 30) -> Figure:
    """Median of ``repeats`` rounds each; no store, no cloud."""
    record, snapshot = gang(nodes)
    noticed = (*snapshot.facts, Fact("u3", "b3", 3, 1, 1, Kind.NOTICE, f"{NOW + 120:.0f}"))
    lost = replace(snapshot.listing, vms=snapshot.listing.vms[2:])
    return Figure(
        nodes,
        _median_ms(record, snapshot, repeats),
        _median_ms(record, Snapshot(**{**snapshot.__dict__, "facts": noticed}), repeats),
        _median_ms(record, Snapshot(**{**snapshot.__dict__, "listing": lost}), repeats),
    )


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    worst = measure().worst()
    return [
        {
            "name": "round.100_ranks_ms",
            "value": round(worst, 2),
            "unit": "ms",
            "goal": f"<= {GOAL_MS:.0f}",
            "holds": worst <= GOAL_MS,
            "against": "all passes of a round and their documents, outside store and cloud calls",
        }
    ]


if __name__ == "__main__":
    found = measure()
    print(
        f"decide + document, {found.nodes} nodes: all well {found.quiet_ms:.1f} ms, a notice {found.notice_ms:.1f} ms, "
        f"two lost {found.loss_ms:.1f} ms (goal {GOAL_MS:.0f} ms)"
    )
