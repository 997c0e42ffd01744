"""A region of the stand-in with a stack in it, for the tests of the adapter and of the function on AWS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from spotkeeper.contract import names
from spotkeeper.contract.cloud import Action, CreateDisk, Disk, InsertVm, Listing, Result, ResultKind, Vm
from spotkeeper.contract.stack import Model, PoolState, Price, StackState, StaticMachine
from spotkeeper.reconcile.clouds.ec2.cloud import Ec2, open_ec2
from tests.reconcile.clouds.ec2.standin.server import serve, session
from tests.reconcile.clouds.ec2.standin.site import Delays, Site
from tests.reconcile.clouds.ec2.standin.things import OWNER, Instance, Template
from tests.reconcile.clouds.ec2.standin.verbs import Ec2Service
from tests.sim.engine import Engine

JOB, UID = "abcd2345", "0b5e9a52-8f0c-4b3e-9f9b-0f3b9a6f2f11"
A, B = "us-x1-a", "us-x1-b"
REGION = "us-x1"
ROLE = f"arn:aws:iam::{OWNER}:role/sk-demo-vm"
PRICES = {A: Price(1.0, 0.3), B: Price(1.0, 0.3)}
POOL = PoolState(
    name="gpu",
    kind="spot",
    machine_type="g6.xlarge",
    zones=(A, B),
    nproc=1,
    max_machines=8,
    max_on_demand=4,
    disk_gb=50,
    disk_type="gp3",
    prices=PRICES,
    templates={"spot": "lt-spot", "on-demand": "lt-od"},
    template_versions={"spot": "3", "on-demand": "1"},
    placement={A: "sk-demo-gpu-a"},
    subnets={A: "subnet-a", B: "subnet-b"},
    tags={"sk-bucket": "b", "sk-function": "https://f.example"},
)
FLOOR = PoolState(
    name="floor",
    kind="static",
    machine_type="m7i.large",
    zones=(A,),
    nproc=1,
    max_machines=1,
    max_on_demand=0,
    disk_gb=50,
    disk_type="gp3",
    prices=PRICES,
    machines=(StaticMachine("sk-demo-floor-s0", A),),
)
STACK = StackState("demo", "aws", OWNER, REGION, "b", (POOL, FLOOR), node_identity=ROLE)
STILL = Delays(
    seen=(0.0, 0.0), start=(5.0, 5.0), gone=(20.0, 20.0), disk=(2.0, 2.0), attach=(2.0, 2.0), shot=(30.0, 30.0)
)
G6 = {"InstanceType": "g6.xlarge", "SecurityGroupIds": ["sg-1"]}


def new_site(engine: Engine, delays: Delays = STILL) -> Site:
    site = Site(engine, {A: "x-az2", B: "x-az1"}, delays=delays)
    site.subnets = {"subnet-a": A, "subnet-b": B}
    site.groups = {"sk-demo-gpu-a"}
    spot = {**G6, "InstanceMarketOptions": {"MarketType": "spot"}}
    site.templates = {
        "lt-spot": Template("lt-spot", {"2": G6, "3": spot}, default="2"),
        "lt-od": Template("lt-od", {"1": G6}),
        "lt-efa": Template("lt-efa", {"1": {"InstanceType": "p4d.24xlarge"}}),
    }
    return site


@dataclass
class Region:
    """``ec2``: the adapter, over HTTP. Time is the engine's: nothing happens before ``pass_``."""

    engine: Engine
    site: Site
    service: Ec2Service
    endpoint: str
    ec2: Ec2
    abroad: dict[str, Ec2Service] = field(default_factory=dict)  # other regions at the same endpoint, by name

    def pass_(self, seconds: float) -> Listing:
        self.engine.run(self.engine.t + seconds)
        return self.look()

    def look(self) -> Listing:
        return self.ec2.list("demo")

    def do(self, action: Action, deadline_s: float = 20.0) -> Result:
        return self.ec2.perform(action, deadline_s)

    def kind(self, action: Action) -> ResultKind:
        return self.do(action).kind

    def asked(self, operation: str) -> list[dict[str, object]]:
        return [params for name, params in self.service.asked if name == operation]

    def machine(self, node: int = 0, attempt: int = 1, zone: str = A, model: Model = Model.SPOT) -> Vm:
        """One that runs."""
        assert self.kind(insert(node, attempt, zone, model)) is ResultKind.ACCEPTED
        listing = self.pass_(6.0)
        return next(vm for vm in listing.vms if (vm.node, vm.attempt, vm.job) == (node, attempt, JOB))

    def disk(self, node: int = 0, number: int = 1, zone: str = A) -> Disk:
        assert self.kind(CreateDisk(JOB, UID, node, number, "gpu", zone)) is ResultKind.ACCEPTED
        listing = self.pass_(3.0)
        return next(disk for disk in listing.disks if (disk.node, disk.number) == (node, number))

    def instance(self, vm: Vm) -> Instance:
        return self.site.instances[vm.uid]

    def static_machine(self) -> Instance:
        tags = {"Name": "sk-demo-floor-s0", names.LABEL_STACK: "demo", names.LABEL_POOL: "floor"}
        machine = Instance("i-0123456789abcdef0", A, "subnet-a", False, "m7i.large", tags, "", "10.9.9.9", 0.0, 0.0)
        self.site.launch(machine)
        return machine


def insert(node: int = 0, attempt: int = 1, zone: str = A, model: Model = Model.SPOT) -> InsertVm:
    return InsertVm(JOB, UID, node, attempt, "gpu", zone, model)


@contextmanager
def region(
    monkeypatch: pytest.MonkeyPatch,
    stack: StackState = STACK,
    delays: Delays = STILL,
    service: type[Ec2Service] = Ec2Service,
) -> Iterator[Region]:
    """Afterwards every request must have been EC2's, and every answer too."""
    engine = Engine()
    site = new_site(engine, delays)
    asked, abroad = service(site), dict[str, Ec2Service]()
    with serve(asked, abroad) as endpoint:
        identity(monkeypatch, endpoint)
        monkeypatch.setattr("spotkeeper.reconcile.clouds.ec2.api.Api._session", lambda _: session())
        ec2 = open_ec2(stack, engine)  # type: ignore[arg-type]
        yield Region(engine, site, asked, endpoint, ec2, abroad)
    assert [one.faults for one in (asked, *abroad.values()) if one.faults] == []


def identity(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """As Lambda's runtime has it: in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", endpoint)
