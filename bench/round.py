"""decide() and the generation document for 100 ranks: how long a round takes outside its calls.

Three rounds are timed, all passes of each: all well (the common one), a notice for one rank, and an
unannounced loss of two.
"""

from __future__ import annotations

import statistics
import time

from msgspec import Struct
from msgspec.structs import replace
from spotkeeper.reconcile.decide import Seen, decide
from spotkeeper.reconcile.document import generation
from spotkeeper.spec import names
from spotkeeper.spec.cloud import Disk, Listing, Vm, VmStatus
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Alloc, Grant, Rank, Record, Slot, SlotState
from spotkeeper.spec.stack import PoolState, Price, StackState

JOB, STACK, ZONE, NOW = "abcd2345", "bench", "z-a", 1_800_000_000.0
GOAL_MS = 20.0


class Figure(Struct, frozen=True):
    """Median milliseconds of all passes of a round with their documents, by what it had to do."""

    ranks: int
    quiet_ms: float
    notice_ms: float
    loss_ms: float

    def worst(self) -> float:
        return max(self.quiet_ms, self.notice_ms, self.loss_ms)


def gang(ranks: int) -> tuple[Record, Seen]:
    """A job of so many ranks that trains, and the snapshot a round would take of it."""
    price = {ZONE: Price(on_demand=1.0, spot=0.3)}
    pool = PoolState("pool", "spot", "m", (ZONE,), 8, 2 * ranks, ranks, 100, "pd", price)
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
            holds=True,
        )
        for n in range(ranks)
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
        ranks=tuple(Rank(top=1, cur=slot, zone=ZONE) for slot in slots),
        members=tuple(range(ranks)),
    )
    vms = tuple(
        Vm(names.vm_name(STACK, JOB, n, 1), f"u{n}", ZONE, VmStatus.RUNNING, "pool", JOB, n, 1, "10.0.0.1")
        for n in range(ranks)
    )
    disks = tuple(
        Disk(names.disk_name(STACK, JOB, n, 0), ZONE, JOB, n, 0, (names.vm_name(STACK, JOB, n, 1),))
        for n in range(ranks)
    )
    facts = tuple(Fact(f"u{n}", f"b{n}", n, 1, 0, Kind.HELLO) for n in range(ranks))
    grants = tuple(Grant(JOB, n, 1, "slot:pool") for n in range(ranks))
    listing = Listing(vms, disks, (), frozenset({ZONE}))
    spec = JobSpec("bench", ("train.py",), ranks)
    return record, Seen(stack, spec, listing, NOW + 30, facts, alloc=Alloc(1, "", grants))


def _passes(record: Record, seen: Seen) -> int:
    """As a round runs them, up to its calls; the number of calls it would make."""
    for _ in range(8):
        decision = decide(record, seen)
        if decision.record is not None:
            record = decision.record
            generation(record, seen.spec, seen.stack)
        elif decision.grants is not None:
            seen = Seen(**{**seen.__dict__, "alloc": decision.grants})
        else:
            return len(decision.actions)
    raise AssertionError("out of passes")


def _median_ms(record: Record, seen: Seen, repeats: int) -> float:
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        _passes(record, seen)
        took.append((time.perf_counter() - begin) * 1000)
    return statistics.median(took)


def measure(ranks: int = 100, repeats: int = 30) -> Figure:
    """Median of ``repeats`` passes each; no store, no cloud."""
    record, seen = gang(ranks)
    noticed = (*seen.facts, Fact("u3", "b3", 3, 1, 1, Kind.NOTICE, f"{NOW + 120:.0f}"))
    lost = replace(seen.listing, vms=seen.listing.vms[2:])
    return Figure(
        ranks,
        _median_ms(record, seen, repeats),
        _median_ms(record, Seen(**{**seen.__dict__, "facts": noticed}), repeats),
        _median_ms(record, Seen(**{**seen.__dict__, "listing": lost}), repeats),
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
        f"decide + document, {found.ranks} ranks: all well {found.quiet_ms:.1f} ms, a notice {found.notice_ms:.1f} ms, "
        f"two lost {found.loss_ms:.1f} ms (goal {GOAL_MS:.0f} ms)"
    )
