"""A stack in two regions of EC2: one that is slow, throttled or gone is unknown, and keeps nothing from the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.cloud import (
    Action,
    CreateDisk,
    CreateSnapshot,
    DeleteSnapshot,
    DeleteVm,
    Result,
    ResultKind,
    Vm,
)
from spotkeeper.contract.market import Prices
from spotkeeper.contract.stack import Abroad, Model
from spotkeeper.reconcile.clouds.ec2 import schema
from spotkeeper.reconcile.clouds.ec2.cloud import Ec2, open_ec2
from spotkeeper.reconcile.clouds.ec2.copies import Copies
from spotkeeper.reconcile.clouds.http_client import NoAnswerError
from tests.reconcile.clouds.ec2.region import G6, JOB, POOL, STACK, STILL, UID, A, B, identity, insert, new_site
from tests.reconcile.clouds.ec2.standin.server import Here, serve, session
from tests.reconcile.clouds.ec2.standin.site import Fault, Site
from tests.reconcile.clouds.ec2.standin.things import Template
from tests.reconcile.clouds.ec2.standin.verbs import Ec2Service
from tests.sim.engine import Engine

HOME, ABROAD, C = "us-x1", "eu-y1", "eu-y1-c"
KEYS = {region: f"arn:aws:kms:{region}:123456789012:key/k" for region in (HOME, ABROAD)}
DUAL = {"sk-storage": "https://s3.dualstack.us-x1.amazonaws.com"}
FAR = replace(
    POOL,
    zones=(A, B, C),
    prices={**POOL.prices, C: POOL.prices[A]},
    templates={**POOL.templates, f"{ABROAD}/spot": "lt-far"},
    template_versions={**POOL.template_versions, f"{ABROAD}/spot": "5"},
    subnets={**POOL.subnets, C: "subnet-c"},
    placement={**POOL.placement, C: "sk-demo-gpu-c"},
    disk_key=KEYS[HOME],
    abroad={ABROAD: Abroad(("sg-far",), KEYS[ABROAD], DUAL)},
)
BOTH = replace(STACK, regions=(HOME, ABROAD), pools=(FAR, *STACK.pools[1:]))
COPY = names.disk_name("demo", JOB, 0, 2)


class Line(Here):
    """A line to a region. ``before``: what happens before each of its calls."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def _send(self, request: Any, **more: object) -> Any:
        self.before()
        return super()._send(request, **more)


def gone() -> None:
    raise NoAnswerError("the region does not answer")


@dataclass
class World:
    engine: Engine
    sites: dict[str, Site]
    services: dict[str, Ec2Service]
    lines: dict[str, Line]
    ec2: Ec2

    def do(self, action: Action) -> Result:
        return self.ec2.perform(action, 20.0)

    def pass_(self, seconds: float) -> None:
        self.engine.run(self.engine.t + seconds)

    def made(self, action: Action) -> None:
        assert self.do(action).kind is ResultKind.ACCEPTED
        self.pass_(6.0)

    def fault(self, region: str, operation: str, code: str = "", status: int = 400, **more: Any) -> None:
        self.sites[region].faults.append(Fault(operation, code, status, **more))

    def asked(self, region: str, operation: str) -> list[dict[str, Any]]:
        return [params for name, params in self.services[region].asked if name == operation]

    def copies(self) -> list[str]:
        return [region for region, site in self.sites.items() for _ in site.snapshots]

    def snapshot(self) -> None:
        """Of a disk at home, for its node's disk abroad."""
        self.made(CreateDisk(JOB, UID, 0, 1, "gpu", A))
        self.disk().contents = (1, 70)
        self.made(CreateSnapshot(JOB, UID, 0, 1, A, 2))
        self.pass_(40.0)

    def disk(self, region: str = HOME) -> Any:
        (found,) = self.sites[region].volumes.values()
        return found


def sites(engine: Engine) -> dict[str, Site]:
    home, abroad = new_site(engine), Site(engine, {C: "y-az1"}, delays=STILL, region=ABROAD)
    home.region, home.abroad, abroad.abroad = HOME, {ABROAD: abroad}, {HOME: home}
    abroad.subnets, abroad.groups = {"subnet-c": C}, {"sk-demo-gpu-c"}
    spot = {**G6, "InstanceMarketOptions": {"MarketType": "spot"}}
    abroad.templates = {"lt-far": Template("lt-far", {"5": spot}, default="5")}
    return {HOME: home, ABROAD: abroad}


@pytest.fixture
def world() -> Iterator[World]:
    engine = Engine()
    found = sites(engine)
    services = {region: Ec2Service(site) for region, site in found.items()}
    lines = {region: Line(service, region) for region, service in services.items()}
    yield World(engine, found, services, lines, Ec2(BOTH, lines, engine))  # type: ignore[arg-type]
    assert [service.faults for service in services.values()] == [[], []]


CREATE = CreateDisk(JOB, UID, 0, 2, "gpu", C, snapshot=COPY)
LISTS = ("DescribeInstances", "DescribeVolumes", "DescribeSnapshots")


# -- one look


def test_one_look_covers_all_regions(world: World) -> None:
    world.made(insert(0, 1, A))
    world.made(insert(1, 1, C))
    listing = world.ec2.list("demo")
    assert listing.answered == {A, B, C}
    assert {(vm.node, vm.zone) for vm in listing.vms} == {(0, A), (1, C)}


@pytest.mark.parametrize("region", [HOME, ABROAD])
def test_a_region_that_is_gone_is_unknown_and_the_other_is_not(world: World, region: str) -> None:
    world.made(insert(0, 1, A))
    world.made(insert(1, 1, C))
    world.lines[region].before = gone
    listing = world.ec2.list("demo")
    assert listing.answered == ({C} if region == HOME else {A, B})
    assert {vm.zone for vm in listing.vms} == ({C} if region == HOME else {A})
    world.lines[region].before = lambda: None
    assert world.ec2.list("demo").answered == {A, B, C}


@pytest.mark.parametrize("operation", LISTS)
def test_a_throttled_region_is_unknown_and_the_other_is_not(world: World, operation: str) -> None:
    world.made(insert(0, 1, A))
    world.fault(ABROAD, operation, "RequestLimitExceeded", 503)
    listing = world.ec2.list("demo")
    assert listing.answered == {A, B} and [vm.zone for vm in listing.vms] == [A]


def test_a_slow_region_takes_no_time_from_the_other(world: World) -> None:
    """It answers only once the other one has been asked for everything."""
    answered, left = threading.Event(), {*LISTS}
    handle = world.services[HOME].handle

    def home(body: bytes) -> tuple[int, bytes]:
        found = handle(body)
        left.discard(world.services[HOME].asked[-1][0])
        if not left:
            answered.set()
        return found

    world.services[HOME].handle = home  # type: ignore[method-assign]
    world.lines[ABROAD].before = lambda: None if answered.wait(20.0) else gone()
    assert world.ec2.list("demo").answered == {A, B, C}


def test_a_machine_is_found_in_any_region(world: World) -> None:
    world.made(insert(1, 1, C))
    (uid,) = world.sites[ABROAD].instances
    found = world.ec2.find(uid, 20.0)
    assert isinstance(found, Vm) and found.zone == C
    world.lines[HOME].before = gone
    assert world.ec2.find(uid, 20.0) == found


# -- actions


def test_a_machine_abroad_is_made_from_its_regions_template(world: World) -> None:
    world.made(insert(1, 1, C))
    (asked,) = world.asked(ABROAD, "RunInstances")
    assert asked["LaunchTemplate"] == {"LaunchTemplateId": "lt-far", "Version": "5"}
    assert (asked["SubnetId"], asked["Placement"]["GroupName"]) == ("subnet-c", "sk-demo-gpu-c")
    (machine,) = world.sites[ABROAD].instances.values()
    assert machine.tags["sk-storage"] == DUAL["sk-storage"] and "sk-bucket" in machine.tags
    assert not world.asked(HOME, "RunInstances")
    result = world.do(insert(1, 2, C, Model.ON_DEMAND))
    assert (result.kind, result.detail) == (ResultKind.PERMANENT, f"pool 'gpu' has no on-demand template for {C}")


def test_a_used_up_quota_is_its_regions(world: World) -> None:
    world.sites[ABROAD].market.spot_quota = 0
    result = world.do(insert(1, 1, C))
    assert (result.kind, result.detail[:7]) == (ResultKind.QUOTA, f"{ABROAD}: ")
    world.made(insert(1, 2, A))


def test_a_machine_is_ended_where_it_is(world: World) -> None:
    world.made(insert(1, 1, C))
    (uid,) = world.sites[ABROAD].instances
    world.lines[HOME].before = gone
    world.made(DeleteVm("", uid, C))
    assert not world.sites[ABROAD].instances[uid].there


def test_a_disk_goes_abroad_as_a_copy_of_its_snapshot_under_the_key_of_the_region(world: World) -> None:
    world.snapshot()
    (original,) = world.sites[HOME].snapshots.values()
    original.tags["aws:backup:source"] = "a"  # which no request may set
    assert [world.do(CREATE).kind for _ in range(3)] == [ResultKind.IN_USE] * 3
    assert world.copies() == [HOME, ABROAD], "copied once"
    (shot,) = world.ec2.list("demo").snapshots
    assert shot.ready, "so that the disk is asked for until the copy is complete"
    (asked,) = world.asked(ABROAD, "CopySnapshot")
    assert (asked["SourceRegion"], asked["Encrypted"], asked["KmsKeyId"]) == (HOME, True, KEYS[ABROAD])
    world.pass_(40.0)
    world.made(CREATE)
    found = world.disk(ABROAD)
    assert (found.zone, found.contents, found.key) == (C, (1, 70), KEYS[ABROAD])
    (shot,) = world.ec2.list("demo").snapshots
    assert (shot.name, shot.ready) == (COPY, True), "a snapshot and its copy are one"
    world.made(DeleteSnapshot(COPY))
    assert world.copies() == [] and world.ec2.list("demo").snapshots == ()


def test_a_copy_whose_answer_is_lost_is_found_by_its_name(world: World) -> None:
    world.snapshot()
    world.fault(ABROAD, "CopySnapshot", done=True)
    assert world.do(CREATE).kind is ResultKind.AMBIGUOUS
    other = Ec2(BOTH, world.lines, world.engine)  # type: ignore[arg-type]  # the function was killed
    assert other.perform(CREATE, 20.0).kind is ResultKind.IN_USE
    assert world.copies() == [HOME, ABROAD]


def test_two_copies_that_could_not_see_each_other_are_both_billed_and_deleted(world: World) -> None:
    world.sites[HOME].written = 37
    world.snapshot()
    world.sites[ABROAD].delays.seen = (50.0, 50.0)
    processes = (world.ec2, Ec2(BOTH, world.lines, world.engine))  # type: ignore[arg-type]
    for process in (*processes, *processes):
        assert process.perform(CREATE, 20.0).kind is ResultKind.IN_USE
    assert world.copies() == [HOME, ABROAD, ABROAD], "each process made one"
    world.pass_(60.0)
    world.sites[ABROAD].delays.seen = (0.0, 0.0)
    assert regions(world) == {2: (2 * 37.0, {HOME: True, ABROAD: True})}, "both are billed"
    world.made(CREATE)
    assert [world.do(DeleteSnapshot(COPY)).kind, world.copies()] == [ResultKind.ACCEPTED, []]


def test_a_failed_copy_is_made_anew(world: World) -> None:
    world.snapshot()
    world.do(CREATE)
    (failed,) = world.sites[ABROAD].snapshots.values()
    failed.state = "error"
    assert world.do(CREATE).kind is ResultKind.IN_USE
    (again,) = world.sites[ABROAD].snapshots.values()
    assert again.id != failed.id


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ResourceLimitExceeded", ResultKind.IN_USE),  # too many at once: the next round asks again
        ("RequestLimitExceeded", ResultKind.THROTTLED),
        ("InvalidKmsKey.InvalidKeyState", ResultKind.PERMANENT),
    ],
)
def test_a_refused_copy_leaves_the_snapshot_at_home(world: World, code: str, kind: ResultKind) -> None:
    world.snapshot()
    world.fault(ABROAD, "CopySnapshot", code)
    assert (world.do(CREATE).kind, world.copies()) == (kind, [HOME])
    world.sites[ABROAD].faults.clear()
    assert world.do(CREATE).kind is ResultKind.IN_USE


# -- warm copies


def warm(world: World, number: int) -> Result:
    return world.do(CreateSnapshot(JOB, UID, 0, 1, A, number, ABROAD))


def trained(world: World) -> None:
    """A disk of ten blocks, which a machine uses, and its first warm copy, which takes two calls."""
    world.made(CreateDisk(JOB, UID, 0, 1, "gpu", A))
    world.disk().blocks = dict.fromkeys(range(10), 1)
    warm_copy(world, 2)


def warm_copy(world: World, number: int) -> None:
    for detail in ("", "is not complete yet"):
        assert (warm(world, number).kind, warm(world, number).detail) == (ResultKind.ACCEPTED, "is not complete yet")
        world.pass_(6.0 if not detail else 40.0)
    assert warm(world, number).kind is ResultKind.IN_USE
    assert warm(world, number).detail == "is there already"
    world.pass_(60.0)


def regions(world: World) -> dict[int, tuple[float, dict[str, bool]]]:
    return {shot.number: (shot.gb, shot.regions) for shot in world.ec2.list("demo").snapshots}


def test_a_warm_copy_is_a_snapshot_at_home_and_then_its_copy_abroad(world: World) -> None:
    trained(world)
    assert regions(world) == {2: (10.0, {HOME: True, ABROAD: True})}
    (asked,) = world.asked(ABROAD, "CopySnapshot")
    assert (asked["Encrypted"], asked["KmsKeyId"]) == (True, KEYS[ABROAD])
    world.disk().blocks |= {0: 2, 10: 1}
    warm_copy(world, 3)
    assert regions(world)[3] == (2.0, {HOME: True, ABROAD: True}), "what has changed since"
    assert world.sites[ABROAD].copied == [(HOME, ABROAD, 10.0), (HOME, ABROAD, 2.0)]
    asked_before = world.sites[HOME].calls["ListChangedBlocks"]
    regions(world)
    assert world.sites[HOME].calls["ListChangedBlocks"] == asked_before == 1, "measured once"


def test_a_difference_of_many_pages_is_measured_over_several_listings(world: World) -> None:
    trained(world)
    world.services[HOME].pages = 2
    world.disk().blocks |= dict.fromkeys(range(7), 2)
    warm_copy(world, 3)
    blocks, left = world.lines[HOME].blocks, iter([2, 9])
    for whole in (False, True):
        pages = next(left)

        def some(query: dict[str, object], ends: float) -> Any:
            nonlocal pages
            pages -= 1
            if pages < 0:
                gone()
            return blocks(query, ends)

        world.lines[HOME].blocks = some  # type: ignore[method-assign]
        assert regions(world)[3] == (7.0 if whole else 11.0 - 1.0, {HOME: True, ABROAD: whole})


def test_a_difference_that_may_not_be_measured_counts_as_the_whole_disk(world: World) -> None:
    trained(world)
    world.disk().blocks |= {0: 2}
    warm_copy(world, 3)
    world.fault(HOME, "ListChangedBlocks", "AccessDeniedException", 403, times=9)
    assert regions(world)[3] == (10.0, {HOME: True, ABROAD: True})


@pytest.mark.parametrize("code", ["ResourceLimitExceeded", "RequestLimitExceeded", "InvalidKmsKey.InvalidKeyState"])
def test_a_refused_warm_copy_is_no_copy(world: World, code: str) -> None:
    world.made(CreateDisk(JOB, UID, 0, 1, "gpu", A))
    world.made(CreateSnapshot(JOB, UID, 0, 1, A, 2, ABROAD))
    world.pass_(40.0)
    world.fault(ABROAD, "CopySnapshot", code)
    assert warm(world, 2).kind is not ResultKind.ACCEPTED and regions(world)[2][1] == {HOME: True}


def test_a_warm_copy_waits_while_its_region_is_silent(world: World) -> None:
    world.made(CreateDisk(JOB, UID, 0, 1, "gpu", A))
    world.made(CreateSnapshot(JOB, UID, 0, 1, A, 2, ABROAD))
    world.pass_(40.0)
    world.lines[ABROAD].before = gone
    assert (warm(world, 2).kind, world.copies()) == (ResultKind.AMBIGUOUS, [HOME])


def test_an_unfinished_snapshot_is_not_copied(world: World) -> None:
    world.made(CreateDisk(JOB, UID, 0, 1, "gpu", A))
    world.made(CreateSnapshot(JOB, UID, 0, 1, A, 2))
    assert world.do(CREATE).kind is ResultKind.AMBIGUOUS
    assert world.copies() == [HOME] and not world.asked(ABROAD, "CopySnapshot")


@pytest.mark.parametrize("region", [HOME, ABROAD])
def test_nothing_is_copied_while_a_region_is_silent(world: World, region: str) -> None:
    world.snapshot()
    world.lines[region].before = gone
    assert (world.do(CREATE).kind, world.copies()) == (ResultKind.AMBIGUOUS, [HOME])


def test_a_silent_region_keeps_only_its_own_copy_from_being_deleted(world: World) -> None:
    world.snapshot()
    world.do(CREATE)
    world.lines[ABROAD].before = gone
    result = world.do(DeleteSnapshot(COPY))
    assert (result.kind, world.copies()) == (ResultKind.AMBIGUOUS, [ABROAD]) and ABROAD in result.detail
    world.lines[ABROAD].before = lambda: None
    assert [shot.name for shot in world.ec2.list("demo").snapshots] == [COPY], "so it is deleted later"
    assert (world.do(DeleteSnapshot(COPY)).kind, world.copies()) == (ResultKind.ACCEPTED, [])


# -- prices and scores


def test_prices_and_scores_come_from_each_region(world: World) -> None:
    world.sites[HOME].market.prices = [(A, 100.0, "0.300000"), (B, 100.0, "0.320000")]
    world.sites[ABROAD].market.prices = [(C, 200.0, "0.210000")]
    for site, score in zip(world.sites.values(), (3, 9), strict=True):
        site.market.scores = dict.fromkeys(site.zones.values(), score)
    runs, told = world.ec2.price_history("gpu", 20.0), world.ec2.chances("gpu", 20.0)
    assert runs is not None and told is not None
    prices = Prices("gpu", 0.0, 0.0, runs)
    assert {zone: prices.at(world.engine.t, zone) for zone in (A, B, C)} == {A: 0.3, B: 0.32, C: 0.21}
    assert {zone: guess.had for zone, guess in told.by_zone.items()} == {A: 0.3, B: 0.3, C: 0.9}
    world.lines[ABROAD].before = gone
    runs, told = world.ec2.price_history("gpu", 20.0), world.ec2.chances("gpu", 20.0)
    assert runs is not None and told is not None
    assert {run.zone for run in runs} == {A, B} == set(told.by_zone)


@pytest.mark.parametrize("home", [HOME, ABROAD])
def test_requests_are_signed_for_their_region(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once the stack's home has moved."""
    engine = Engine()
    services = {region: Ec2Service(site) for region, site in sites(engine).items()}
    with serve(services[HOME], {ABROAD: services[ABROAD]}) as endpoint:
        identity(monkeypatch, endpoint)
        monkeypatch.setattr("spotkeeper.reconcile.clouds.ec2.api.Api._session", lambda _: session())
        listing = open_ec2(replace(BOTH, region=home), engine).list("demo")  # type: ignore[arg-type]
    assert listing.answered == {A, B, C}
    assert [len(service.asked) for service in services.values()] == [3, 3]
    assert [service.faults for service in services.values()] == [[], []]


def test_a_snapshot_tells_what_a_copy_of_it_transfers() -> None:
    labels = {"Name": COPY, names.LABEL_STACK: "demo", names.LABEL_JOB: JOB}
    tags = [{"Key": key, "Value": value} for key, value in labels.items()]
    told = {"SnapshotId": "snap-1", "State": "completed", "Tags": tags}
    shots = [msgspec.convert(told | {"FullSnapshotSizeInBytes": size}, schema.SnapshotIn) for size in (37 * 10**9, 0)]
    (known,), (unknown,) = (Copies({}).joined({HOME: [shot]}, "demo", 0.0) for shot in shots)
    assert (known.gb, unknown.gb) == (37.0, 0.0)
