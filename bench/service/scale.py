"""Time of a round by the gang's size, and 10,000 simultaneous reports.

``round.10000_ranks_ms`` is a round's own work in steady state, as in the function: unpack and decode the stored record,
parse the facts' keys, decode Google's listing pages, ``decide()``. It waits for nothing. ``tests/scale`` simulates the
bursts in virtual time, with the limits of a bucket and the platform; their figures are counts and virtual seconds.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation is part of the tests

import msgspec
from msgspec.structs import replace

from bench.service.round import gang
from spotkeeper.contract import codec, names
from spotkeeper.contract.cloud import Listing
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.record import Record
from spotkeeper.reconcile.clouds.base import Addresses
from spotkeeper.reconcile.clouds.gce.schema import Aggregated, DiskIn, InstanceIn, to_disk, to_vm
from spotkeeper.reconcile.decide import Snapshot, decide
from spotkeeper.reconcile.service.runtime import spare_the_collector
from spotkeeper.reconcile.store.documents import decode_versioned, encode_versioned
from tests.scale.burst import Burst

GOALS = {100: 20.0, 10_000: 300.0}
REPEATS = {100: 50, 10_000: 7}
PAGE = 500
REPORTS = (10, 100, 1_000, 10_000)
COVERED_S = 10.0
DEATHS = 0.3
DEATH_RUNS = 40


def own_work(nodes: int, folder: Path) -> tuple[float, float, int]:
    """Measure a quiet round. ``folder`` has the listing pages, one file each: a round has one at a time in memory.

    Returns (median milliseconds, peak MB of the process, bytes of the stored record).
    """
    spare_the_collector()  # as in the function
    record, snapshot = gang(nodes)
    record = replace(record, nonce="n")
    stored = encode_versioned(record)
    keys = [fact.key() for fact in snapshot.facts]
    pages = tuple(sorted(folder.glob(f"{what}-*")) for what in ("instances", "disks"))
    took = []
    for _ in range(REPEATS[nodes]):
        begin = time.perf_counter()
        held = decode_versioned(stored, Record, "record")
        facts = tuple(fact for key in keys if (fact := Fact.parse(key)) is not None)
        listing = _listed(pages, snapshot)
        decision = decide(held, Snapshot(**{**snapshot.__dict__, "facts": facts, "listing": listing}))
        assert decision.quiet, decision
        took.append((time.perf_counter() - begin) * 1000.0)
    return statistics.median(took), _peak_mb(), len(encode_versioned(_as_named(record)))


def _peak_mb() -> float:
    """Peak memory of this program; ru_maxrss may be the parent's, from before the exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024.0 for line in lines if line.startswith("VmHWM:"))


def _as_named(record: Record) -> Record:
    """Unique ids as clouds give them, which do not compress."""
    slots = [
        replace(
            node.cur, uid=str(10**18 + 7919**4 * n % 10**18), boot=str(uuid.UUID(int=(7919 * (n + 1)) ** 9 % 2**128))
        )
        for n, node in enumerate(record.nodes)
        if node.cur is not None
    ]
    return replace(record, nodes=tuple(map(lambda node, cur: replace(node, cur=cur), record.nodes, slots)))


def write_pages(nodes: int, folder: Path) -> None:
    """Write Google's answers to the two lists of a round, 500 to a page, with the fields that are requested."""
    _, snapshot = gang(nodes)
    link = "https://www.googleapis.com/compute/v1/projects/p"
    vms = [
        {
            "id": str(10**18 + vm.node),
            "name": vm.name,
            "zone": f"{link}/zones/{vm.zone}",
            "status": "RUNNING",
            "creationTimestamp": "2026-11-20T10:00:00.000-08:00",
            "lastStartTimestamp": "2026-11-20T10:00:05.000-08:00",
            "labels": names.labels(snapshot.stack.stack, "pool", vm.job, vm.node, vm.attempt),
            "scheduling": {"provisioningModel": "SPOT"},
            "networkInterfaces": [{"networkIP": vm.address}],
            "disks": [{"source": f"{link}/zones/{vm.zone}/disks/{vm.name}", "boot": True}],
        }
        for vm in snapshot.listing.vms
    ]
    disks = [
        {
            "name": disk.name,
            "zone": f"{link}/zones/{disk.zone}",
            "status": "READY",
            "labels": names.labels(snapshot.stack.stack, "pool", disk.job, disk.node),
            "users": [f"{link}/zones/{disk.zone}/instances/{user}" for user in disk.users],
        }
        for disk in snapshot.listing.disks
    ]
    for what, items in (("instances", vms), ("disks", disks)):
        for start in range(0, len(items), PAGE):
            page = {"items": {"zones/z-a": {what: items[start : start + PAGE]}}}
            (folder / f"{what}-{start:06}").write_bytes(msgspec.json.encode(page))


def _listed(pages: tuple[list[Path], ...], snapshot: Snapshot) -> Listing:
    """The listing as ``Gce.list`` makes it from these pages."""
    stack, addresses = snapshot.stack.stack, Addresses()
    vms = [
        one
        for page in pages[0]
        for one in codec.decode(page.read_bytes(), Aggregated[InstanceIn]).items["zones/z-a"].instances
    ]
    disks = [
        one for page in pages[1] for one in codec.decode(page.read_bytes(), Aggregated[DiskIn]).items["zones/z-a"].disks
    ]
    found = tuple(vm for item in vms if (vm := to_vm(item, stack, addresses)) is not None)
    assert len(found) == len(snapshot.listing.vms)
    return Listing(
        tuple(replace(vm, uid=f"u{vm.node}") for vm in found),
        tuple(disk for item in disks if (disk := to_disk(item, stack)) is not None),
        (),
        snapshot.listing.answered,
    )


def bursts() -> list[dict[str, object]]:
    outcomes = [Burst(nodes).run() for nodes in REPORTS]
    worst = max(outcomes, key=lambda one: one.seconds)
    with_deaths = [Burst(100, DEATHS, seed).run() for seed in range(DEATH_RUNS)]
    seconds = sorted(one.seconds for one in with_deaths)
    counts = {(one.rounds, one.record_writes) for one in outcomes}
    return [
        {
            "name": "burst.rounds",
            "value": max(one.rounds for one in outcomes),
            "unit": "rounds",
            "goal": "<= 2, and 2 writes of the record",
            "holds": counts == {(2, 2)},
            "against": "one round a report",
        },
        {
            "name": "burst.covered_s",
            "value": round(worst.seconds, 2),
            "unit": "virtual s",
            "goal": f"<= {COVERED_S:.0f}",
            "holds": worst.seconds <= COVERED_S,
            "against": f"the last accepted of {worst.nodes} reports (the worst of {REPORTS})",
        },
        {
            "name": "burst.covered_with_deaths_s",
            "value": round(statistics.median(seconds), 2),
            "unit": "virtual s",
            "goal": f"<= {COVERED_S:.0f}",
            "holds": statistics.median(seconds) <= COVERED_S,
            "against": f"median of {DEATH_RUNS} bursts of 100 in which {DEATHS:.0%} of lease holders die; "
            f"p95 {seconds[int(0.95 * len(seconds))]:.1f}, {sum(one.killed for one in with_deaths)} deaths",
        },
    ]


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``. Each size is measured in a process of its own, whose memory is its peak."""
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
    ):
        write_pages(10_000, Path(folder))
        milliseconds, megabytes, stored = pool.apply(own_work, (10_000, Path(folder)))
    rows: list[dict[str, object]] = [
        {
            "name": "round.10000_ranks_ms",
            "value": round(milliseconds, 1),
            "unit": "ms",
            "goal": f"<= {GOALS[10_000]:.0f}",
            "holds": milliseconds <= GOALS[10_000],
            "against": "a quiet round's own work: record, fact keys, listing, decide",
        },
        {
            "name": "round.10000_ranks_rss_mb",
            "value": round(megabytes, 1),
            "unit": "MB",
            "goal": "<= 150",
            "holds": megabytes <= 150.0,
            "against": "peak of the process that does it",
        },
        {
            "name": "record.10000_ranks_mb",
            "value": round(stored / 1e6, 3),
            "unit": "MB",
            "goal": "<= 1",
            "holds": stored <= 1_000_000,
            "against": "as stored (packed)",
        },
    ]
    return rows + bursts()


if __name__ == "__main__":
    for row in figures():
        print(f"{row['name']:32} {row['value']:>10} {row['unit']:10} {row['goal']:36} {row['against']}")
