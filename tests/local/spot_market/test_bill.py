"""A job's cost by Spotkeeper equals the one-machine cloud's bill, also when the market's price changes.

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

from spotkeeper.contract import names
from spotkeeper.contract.cloud import VmStatus
from spotkeeper.contract.facts import Fact, Kind
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import JobRequest, JobSpec, Nodes, RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.market import HOUR_S, Prices
from spotkeeper.contract.record import Node, Phase, Record, SlotState
from spotkeeper.contract.stack import PoolState, Price, StackState
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.reconcile.clouds.gce.cloud import open_gce
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions
from spotkeeper.reconcile.controller.tick import tick
from spotkeeper.reconcile.select import market
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store, open_store
from spotkeeper.report.job.view import job_view
from spotkeeper.report.money.money import Attempt, attempts, money
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
            max_machines=4,
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
        api = Api.of(found)
        properties = vm_body("x") | {"machineType": TYPE, "scheduling": SPOT}
        properties.pop("name")
        api.ok(api.post("regions/us-central1/instanceTemplates", {"name": "t-spot", "properties": properties}))
        yield found
    finally:
        found.down(purge=True)


@dataclass
class Run:
    """A job of two nodes with simulated agents, which send a hello and report progress."""

    cloud: LocalCloud
    store: Store
    options: RoundOptions = field(default_factory=lambda: RoundOptions(settle_s=0.0))
    looks: list[float] = field(default_factory=list)

    def submit(self) -> None:
        now = self.cloud.clock.now()
        self.store.put(paths.STACK, msgspec.json.encode(STACK))
        self.store.put_spec(JOB, JobSpec("job", ("train.py",), nodes=Nodes(2, 2)))
        self.store.set_active(JOB)
        uid = "0b5e9a52-8f0c-4b3e-9f9b-0f3b9a6f2f11"
        assert self.store.create_record(Record(JOB, uid, "job", "", now, nonce="n", nodes=(Node(), Node())))

    def look(self) -> None:
        clock = self.cloud.clock
        gce = open_gce(STACK, clock, self.cloud.compute_endpoint, self.cloud.token)
        self.looks.append(clock.now())
        tick(self.store, gce, clock, self.options)
        record = self.record()
        for vm in gce.list(STACK.stack).vms:
            if vm.status is VmStatus.RUNNING:
                self.store.put_fact(JOB, Fact(vm.uid, "boot", vm.node, vm.attempt, 0, Kind.HELLO))
        if record.gen:
            self.store.put_progress(JOB, Progress(record.gen, 1, clock.now()))

    def until(self, virtual: float) -> None:
        while self.cloud.clock.now() < virtual:
            self.look()
            time.sleep(0.02)  # the cloud's clock runs on

    def training(self) -> bool:
        record = self.record()
        return bool(record.gen) and all(r.cur and r.cur.state is SlotState.MEMBER for r in record.nodes)

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
        market.read(
            self.store, open_gce(STACK, self.cloud.clock, self.cloud.compute_endpoint, self.cloud.token), STACK, later
        )
        return later

    def tolerance(self) -> float:
        """USD; explained in this file's docstring."""
        longest = max(after - before for before, after in zip(self.looks, self.looks[1:], strict=False))
        lives = [one for one in attempts(self.ledger()) if one.listed]
        return LOOKS * longest / HOUR_S * max(SHARES) * ON_DEMAND * len(lives)


@pytest.fixture
def run(cloud: LocalCloud, tmp_path: Path) -> Run:
    return Run(cloud, open_store(f"sqlite://{tmp_path}/bucket.db"))


def at_launch(machines: tuple[Attempt, ...], now: float) -> float:
    """The cost if the price at each launch had stayed."""
    return sum(one.cost(now) for one in machines)


def test_the_money_line_and_the_bill_agree_while_the_market_changes_and_after_a_loss(run: Run) -> None:
    began = run.cloud.clock.now()
    run.submit()
    run.wait(Phase.RUN)
    run.until(began + 2.2 * GAP_S)
    victim = run.record().nodes[1].cur
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
    run.store.put_request(JOB, JobRequest("cancel-1", RequestKind.CANCEL, now, "me"))
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
