"""What Spotkeeper says that a job cost is what the one-machine cloud bills, also where the market changes its price.

Tolerance. Both count a machine from RUNNING, which the listing tells to the millisecond; prices agree to the
millisecond too once they are told. The cloud stops counting when a machine is off; Spotkeeper when it finds it
gone, at its next look. So each machine's life may cost up to ``LOOKS`` looks more, at the price of that time: one
that was just under way, the one that finds it, and as many for the virtual seconds in which a machine goes down.
Between two questions (an hour) a change that was not told yet adds its difference for the time since.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from spotkeeper.local.cloud import LocalCloud
from spotkeeper.reconcile import market, paths
from spotkeeper.reconcile.gce import open_gce
from spotkeeper.reconcile.round import Options
from spotkeeper.reconcile.store import ObjectStore, open_store
from spotkeeper.reconcile.sweep import tick
from spotkeeper.report.money import Attempt, attempts, money
from spotkeeper.report.view import job_view
from spotkeeper.spec import names
from spotkeeper.spec.cloud import VmStatus
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.job import Ask, AskKind, JobSpec, Nodes
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.market import HOUR_S, Prices
from spotkeeper.spec.record import Phase, Rank, Record, SlotState
from spotkeeper.spec.stack import PoolState, Price, StackState

from tests.local.client import SPOT, Api, vm_body

A = "us-central1-a"
TYPE, ON_DEMAND = "g2-standard-4", 0.707
STACK = StackState(
    "test",
    "gcp",
    "local",
    "us-central1",
    "b",
    (
        PoolState(
            name="gpu",
            kind="spot",
            machine_type=TYPE,
            zones=(A,),
            nproc=1,
            max_nodes=4,
            max_on_demand=0,
            disk_gb=10,
            disk_type="pd-balanced",
            prices={A: Price(ON_DEMAND, round(0.4 * ON_DEMAND, 3))},
            templates={"spot": "projects/local/regions/us-central1/instanceTemplates/t-spot"},
        ),
    ),
)
JOB = "abcd2345"
SCALE = 400.0
GAP_S = 1500.0  # the price changes so often (virtual)
SHARES = (0.2, 0.5, 0.1, 0.6, 0.3, 0.7, 0.15, 0.45)
LOOKS = 3


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalCloud]:
    with a_cloud(tmp_path) as found:
        yield found


@contextmanager
def a_cloud(tmp_path: Path, scale: float = SCALE) -> Iterator[LocalCloud]:
    """One whose market changes its price every ``GAP_S``."""
    zone = {"zone": A, "capacity": [[16, 10 * len(SHARES)]], "price": [[share, 1] for share in SHARES] * 10}
    recording = tmp_path / "steps.json"
    recording.write_text(
        json.dumps({"collection": "test", "market": "steps", "gap_seconds": int(GAP_S), "gang": 16, "zones": [zone]})
    )
    found = LocalCloud.up(tmp_path / "cloud", scale=scale, market=str(recording), zones=(A,))
    try:
        api = Api(found.compute_endpoint)
        properties = vm_body("x") | {"machineType": TYPE, "scheduling": SPOT}
        properties.pop("name")
        api.ok(api.post("regions/us-central1/instanceTemplates", {"name": "t-spot", "properties": properties}))
        yield found
    finally:
        found.down(purge=True)


@dataclass
class Run:
    """A job of two ranks whose agents are played here: they say hello and report progress, and no more."""

    cloud: LocalCloud
    store: ObjectStore
    options: Options = field(default_factory=lambda: Options(settle_s=0.0))
    looks: list[float] = field(default_factory=list)

    def submit(self) -> None:
        now = self.cloud.clock.now()
        self.store.put(paths.STACK, msgspec.json.encode(STACK))
        self.store.put_spec(JOB, JobSpec("job", ("train.py",), nodes=Nodes(2, 2)))
        self.store.set_active(JOB)
        uid = "0b5e9a52-8f0c-4b3e-9f9b-0f3b9a6f2f11"
        assert self.store.create_record(Record(JOB, uid, "job", "", now, nonce="n", ranks=(Rank(), Rank())))

    def look(self) -> None:
        clock = self.cloud.clock
        gce = open_gce(STACK, clock, self.cloud.compute_endpoint)
        self.looks.append(clock.now())
        tick(self.store, gce, clock, self.options)
        record = self.record()
        for vm in gce.list(STACK.stack).vms:
            if vm.status is VmStatus.RUNNING:
                self.store.put_fact(JOB, Fact(vm.uid, "boot", vm.rank, vm.attempt, 0, Kind.HELLO))
        if record.gen:
            self.store.put_progress(JOB, Progress(record.gen, 1, clock.now()))

    def until(self, virtual: float) -> None:
        while self.cloud.clock.now() < virtual:
            self.look()
            time.sleep(0.02)  # the cloud goes on by itself

    def training(self) -> bool:
        record = self.record()
        return bool(record.gen) and all(r.cur and r.cur.state is SlotState.MEMBER for r in record.ranks)

    def wait(self, phase: Phase) -> None:
        ends = time.monotonic() + 30
        while self.record().phase is not phase or (phase is Phase.RUN and not self.training()):
            assert time.monotonic() < ends, self.record()
            self.look()

    def record(self) -> Record:
        held = self.store.read_record(JOB)
        assert held is not None
        return held.value

    def ledger(self) -> tuple[Entry, ...]:
        return (*self.store.list_ledger(JOB), *self.record().outbox)

    def prices(self) -> dict[str, Prices]:
        return {pool: held.value for pool, held in self.store.read_prices(("gpu",)).items()}

    def ask_prices(self) -> float:
        """The hour's question, as a later round would ask it; the moment of that."""
        later = self.cloud.clock.now() + HOUR_S
        market.look(self.store, open_gce(STACK, self.cloud.clock, self.cloud.compute_endpoint), STACK, later)
        return later

    def tolerance(self) -> float:
        """USD: see the head of this file."""
        longest = max(after - before for before, after in zip(self.looks, self.looks[1:], strict=False))
        lives = [one for one in attempts(self.ledger()) if one.listed]
        return LOOKS * longest / HOUR_S * max(SHARES) * ON_DEMAND * len(lives)


@pytest.fixture
def run(cloud: LocalCloud, tmp_path: Path) -> Run:
    return Run(cloud, open_store(f"sqlite://{tmp_path}/bucket.db"))


def at_launch(machines: tuple[Attempt, ...], now: float) -> float:
    """What it would have cost had the price of each launch stayed."""
    return sum(one.cost(now) for one in machines)


def test_the_money_line_and_the_bill_agree_while_the_market_changes_and_after_a_loss(run: Run) -> None:
    began = run.cloud.clock.now()
    run.submit()
    run.wait(Phase.RUN)
    run.until(began + 2.2 * GAP_S)
    victim = run.record().ranks[1].cur
    assert victim is not None
    run.cloud.preempt(names.vm_name(STACK.stack, JOB, 1, victim.attempt), notice=False)
    run.until(began + 5.5 * GAP_S)
    run.wait(Phase.RUN)
    now = run.cloud.clock.now()
    told = run.prices()["gpu"]
    assert now - told.told < HOUR_S + 600
    untold = (now - told.told) / HOUR_S * (max(SHARES) - min(SHARES)) * ON_DEMAND * 2
    view = job_view(run.record(), None, run.ledger(), STACK, now, prices=run.prices())
    assert view.money.spent == pytest.approx(run.cloud.bill().bill.spent, abs=run.tolerance() + untold)
    assert (view.preemptions.announced, view.preemptions.unannounced) == (0, 1)
    run.store.put_ask(JOB, Ask("cancel-1", AskKind.CANCEL, now, "me"))
    run.wait(Phase.DONE)
    the_end_agrees(run)


def the_end_agrees(run: Run) -> None:
    """Once the hour's question was asked, nothing but the looks is between the two."""
    later = run.ask_prices()
    ledger, billed = run.ledger(), run.cloud.bill().bill.spent
    said = money(ledger, STACK, later, run.prices()).spent
    assert billed <= said + 1e-3, "never less than the bill"
    assert said == pytest.approx(billed, abs=run.tolerance())
    launched = at_launch(attempts(ledger), later)
    assert abs(launched - said) > 0.1 * said, "with the prices of the launches alone the test would have to fail"
    intents = [entry for entry in ledger if entry.event is Event.INTENT]
    shares = {round((entry.price or 0.0) / ON_DEMAND, 6) for entry in intents}
    assert len(intents) == 3 and shares <= set(SHARES), "launched at the market's price, not the catalogue's"
