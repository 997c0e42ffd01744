"""The EC2 adapter over HTTP against the strict stand-in, which botocore's own service model judges."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.contract import names
from spotkeeper.contract.cloud import (
    Action,
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    ResultKind,
    VmStatus,
)
from spotkeeper.contract.market import Chances, Guess, PriceRun
from spotkeeper.contract.stack import Interface, Model, ReservedCapacity, StackState
from spotkeeper.reconcile.clouds.ec2 import errors
from spotkeeper.reconcile.clouds.ec2.api import Api
from spotkeeper.reconcile.clouds.ec2.cloud import open_ec2
from spotkeeper.reconcile.clouds.ec2.errors import classify, detail_of
from spotkeeper.reconcile.clouds.ec2.listing import PAGE
from tests.reconcile.clouds.ec2 import iam
from tests.reconcile.clouds.ec2.region import JOB, POOL, STACK, UID, A, B, Region, insert, region
from tests.reconcile.clouds.ec2.standin import protocol
from tests.reconcile.clouds.ec2.standin.site import Delays, Fault
from tests.reconcile.clouds.ec2.standin.things import Reserved, Snapshot, Vol, Volume
from tests.reconcile.clouds.gce.test_gce import silent_server

DISK = names.disk_name("demo", JOB, 0, 1)
AGAIN = "; repeated with the same client token"
COPY = names.disk_name("demo", JOB, 0, 2)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    with region(monkeypatch) as found:
        yield found


def with_reserved(block: bool = False) -> StackState:
    pool = replace(POOL, reservations=(ReservedCapacity("cr-1", A, 1, block=block),))
    return replace(STACK, pools=(pool,))


def into_reserved(node: int = 0) -> InsertVm:
    return InsertVm(JOB, UID, node, 1, "gpu", A, Model.RESERVED, "cr-1")


class TestLaunches:
    def test_a_launch_says_all_that_differs_from_its_template(self, here: Region) -> None:
        vm = here.machine(node=7, attempt=3)
        (asked,) = here.asked("RunInstances")
        key = names.idempotency_key(JOB, UID, "insert", 7, 3, A)
        assert (asked["ClientToken"], asked["MinCount"], asked["MaxCount"]) == (key, 1, 1)
        assert asked["LaunchTemplate"] == {"LaunchTemplateId": "lt-spot", "Version": "3"}
        assert asked["Placement"] == {"AvailabilityZone": A, "GroupName": "sk-demo-gpu-a"}
        assert asked["SubnetId"] == "subnet-a"
        assert set(asked) == {
            "ClientToken",
            "LaunchTemplate",
            "MaxCount",
            "MinCount",
            "Placement",
            "SubnetId",
            "TagSpecifications",
        }
        ours = {
            "Name": "sk-demo-abcd2345-n0007-a3",
            "sk-stack": "demo",
            "sk-pool": "gpu",
            "sk-job": JOB,
            "sk-node": "7",
            "sk-attempt": "3",
        }
        instance = here.instance(vm)
        assert instance.tags == {**POOL.tags, **ours}, "complete from the start: an agent reads them"
        assert instance.boot == dict.fromkeys(("volume", "network-interface", "spot-instances-request"), ours)
        assert (vm.name, vm.uid, vm.zone, vm.status) == (ours["Name"], instance.id, A, VmStatus.RUNNING)
        assert (vm.pool, vm.job, vm.node, vm.attempt, vm.model) == ("gpu", JOB, 7, 3, Model.SPOT)
        assert vm.address == instance.address and vm.created == instance.launched

    def test_on_demand_has_its_own_template_and_no_spot_request(self, here: Region) -> None:
        vm = here.machine(model=Model.ON_DEMAND, zone=B)
        assert vm.model is Model.ON_DEMAND and vm.zone == B
        assert set(here.instance(vm).boot) == {"volume", "network-interface"}
        assert here.asked("RunInstances")[0]["Placement"] == {"AvailabilityZone": B}, "no group is declared there"

    @pytest.mark.parametrize("block", [False, True])
    def test_a_launch_into_reserved_capacity_names_it_and_no_placement_group(self, here: Region, block: bool) -> None:
        here.site.reserved = {"cr-1": Reserved("cr-1", A, "g6.xlarge", 1, block)}
        here.site.market.capacity = lambda zone, spot: 0  # the reserved machine is none of these
        ec2 = open_ec2(with_reserved(block), here.engine, here.endpoint)  # type: ignore[arg-type]
        result = ec2.perform(into_reserved(), 30)
        assert result.kind is ResultKind.ACCEPTED, result.detail
        (asked,) = here.asked("RunInstances")
        assert asked["CapacityReservationSpecification"] == {
            "CapacityReservationTarget": {"CapacityReservationId": "cr-1"}
        }
        assert asked.get("InstanceMarketOptions") == ({"MarketType": "capacity-block"} if block else None)
        assert asked["Placement"] == {"AvailabilityZone": A}
        assert asked["LaunchTemplate"] == {"LaunchTemplateId": "lt-od", "Version": "1"}
        (vm,) = here.pass_(6.0).vms
        assert (vm.model, vm.reservation, vm.status) == (Model.RESERVED, "cr-1", VmStatus.RUNNING)

        full = ec2.perform(into_reserved(node=1), 30)
        assert full.kind is ResultKind.CAPACITY and "ReservationCapacityExceeded" in full.detail

    @pytest.mark.parametrize(
        ("there", "told"),
        [
            ((), "InvalidCapacityReservationId.NotFound"),
            ((Reserved("cr-1", A, "g6.xlarge", 1, active=False),), "InvalidCapacityReservationState"),
            ((Reserved("cr-1", B, "g6.xlarge", 1),), "do not match"),
            ((Reserved("cr-1", A, "p5.48xlarge", 1),), "do not match"),
            ((Reserved("cr-1", A, "g6.xlarge", 1, block=True),), "market type"),
        ],
    )
    def test_reserved_capacity_that_is_not_as_declared_is_refused_for_good(
        self, here: Region, there: tuple[Reserved, ...], told: str
    ) -> None:
        here.site.reserved = {one.id: one for one in there}
        ec2 = open_ec2(with_reserved(), here.engine, here.endpoint)  # type: ignore[arg-type]
        result = ec2.perform(into_reserved(), 30)
        assert result.kind is ResultKind.PERMANENT and told in result.detail

    def test_network_cards_name_the_subnet_and_groups_themselves(self, here: Region) -> None:
        """EC2 refuses a subnet beside interfaces, and so does the stand-in."""
        cards = tuple(Interface(n, 0 if n == 0 else 1, "efa" if n == 0 else "efa-only") for n in range(4))
        pool = replace(
            POOL,
            interfaces=cards,
            security_groups=("sg-1",),
            templates={"on-demand": "lt-efa"},
            template_versions={"on-demand": "1"},
        )
        ec2 = open_ec2(replace(STACK, pools=(pool,)), here.engine, here.endpoint)  # type: ignore[arg-type]
        assert ec2.perform(insert(model=Model.ON_DEMAND), 30).kind is ResultKind.ACCEPTED
        (asked,) = here.asked("RunInstances")
        assert "SubnetId" not in asked
        nics = asked["NetworkInterfaces"]
        assert isinstance(nics, list) and [nic["NetworkCardIndex"] for nic in nics] == [0, 1, 2, 3]
        assert nics[3] == {
            "NetworkCardIndex": 3,
            "DeviceIndex": 1,
            "InterfaceType": "efa-only",
            "SubnetId": "subnet-a",
            "Groups": ["sg-1"],
            "DeleteOnTermination": True,
        }

    @pytest.mark.parametrize("change", [{"pool": "none"}, {"pool": "floor"}])
    def test_a_launch_without_a_template_is_not_sent(self, here: Region, change: dict[str, str]) -> None:
        assert here.kind(replace(insert(), **change)) is ResultKind.PERMANENT
        assert not here.service.asked

    def test_a_repeated_token_makes_one_machine(self, here: Region) -> None:
        assert [here.kind(insert()) for _ in range(3)] == [ResultKind.ACCEPTED] * 3
        assert len(here.site.instances) == 1
        assert here.kind(insert(attempt=2)) is ResultKind.ACCEPTED
        assert len(here.site.instances) == 2

    def test_a_token_reused_for_another_request_is_an_error(self, here: Region) -> None:
        """A template that was declared anew between two rounds: the attempt is given up, not the job."""
        here.kind(insert())
        pool = replace(POOL, template_versions={"spot": "2", "on-demand": "1"})
        ec2 = open_ec2(replace(STACK, pools=(pool,)), here.engine, here.endpoint)  # type: ignore[arg-type]
        here.site.templates["lt-spot"].versions["2"] = here.site.templates["lt-spot"].versions["3"]
        result = ec2.perform(insert(), 30)
        assert result.kind is ResultKind.DEAD_KEY and "IdempotentParameterMismatch" in result.detail

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize("later_s", [0.0, 30.0, 7200.0])
    def test_a_token_whose_machine_is_gone_is_dead(self, here: Region, strict: bool, later_s: float) -> None:
        """While it goes, when it is gone, and when EC2 lists it no more."""
        here.site.strict_tokens = strict
        vm = here.machine()
        here.kind(DeleteVm(vm.name, vm.uid, A))
        here.pass_(later_s)
        assert here.kind(insert()) is ResultKind.DEAD_KEY

    def test_a_lost_answer_is_asked_again_with_the_same_token(
        self, here: Region, caplog: pytest.LogCaptureFixture
    ) -> None:
        here.site.faults.append(Fault("RunInstances", done=True))
        assert here.kind(insert()) is ResultKind.ACCEPTED
        assert len(here.asked("RunInstances")) == 2 and len(here.site.instances) == 1
        here.site.faults.append(Fault("RunInstances", "InternalError", 500))
        assert here.kind(insert(node=1)) is ResultKind.ACCEPTED
        assert len(here.site.instances) == 2
        lost, failed = caplog.messages
        assert "RemoteDisconnected" in lost and "InternalError" in failed
        assert all(line.startswith("run_instances: ") and line.endswith(AGAIN) for line in (lost, failed))

    def test_twice_lost_answers_are_ambiguous_and_refusals_final(self, here: Region) -> None:
        here.site.faults.append(Fault("RunInstances", times=2))
        assert here.kind(insert()) is ResultKind.AMBIGUOUS
        here.site.faults.append(Fault("RunInstances", "InsufficientInstanceCapacity", 500))
        before = len(here.asked("RunInstances"))
        assert here.kind(insert()) is ResultKind.CAPACITY, "though it is an HTTP 500"
        assert len(here.asked("RunInstances")) == before + 1

    def test_capacity_is_by_zone_and_quotas_by_model(self, here: Region) -> None:
        here.site.market.capacity = lambda zone, spot: 0 if zone == A else None
        assert here.kind(insert()) is ResultKind.CAPACITY
        assert here.kind(insert(zone=B)) is ResultKind.ACCEPTED
        here.site.market.spot_quota, here.site.market.on_demand_quota = 1, 0
        assert here.kind(insert(node=1, zone=B)) is ResultKind.QUOTA
        assert here.kind(insert(node=2, zone=B, model=Model.ON_DEMAND)) is ResultKind.QUOTA

    def test_a_launch_that_fails_later_is_found_in_the_listing(self, here: Region) -> None:
        here.kind(insert())
        (instance,) = here.site.instances.values()
        here.site.fail(instance, "Client.InternalError", "Client.InternalError: Client error on launch")
        listing = here.look()
        (result,) = listing.results
        assert listing.vms == () and result.kind is ResultKind.PERMANENT and "on launch" in result.detail
        assert "kms_key" in result.detail
        assert result.action == replace(insert(), uid="") and result.at == instance.launched

    def test_an_interruption_is_no_failed_launch(self, here: Region) -> None:
        vm = here.machine()
        here.site.interrupt(here.instance(vm), 0.0)
        here.engine.run(here.engine.t + 60.0)
        listing = here.look()
        assert listing.vms == () and listing.results == ()

    def test_a_fresh_placement_group_does_not_hold_the_job(self, here: Region) -> None:
        here.site.groups.clear()
        result = here.do(insert())
        assert result.kind is ResultKind.THROTTLED and "InvalidPlacementGroup.Unknown" in result.detail
        here.site.groups.add("sk-demo-gpu-a")
        assert here.kind(insert()) is ResultKind.ACCEPTED

    def test_a_missing_spot_role_names_the_command_that_makes_it(self, here: Region) -> None:
        here.site.spot_role = False
        assert here.kind(insert(model=Model.ON_DEMAND)) is ResultKind.ACCEPTED
        result = here.do(insert(node=1))
        assert result.kind is ResultKind.PERMANENT
        assert "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com" in result.detail

    def test_launches_respect_ec2s_token_bucket(self, here: Region) -> None:
        kinds = [here.kind(insert(node=node)) for node in range(7)]
        assert kinds == [ResultKind.ACCEPTED] * 5 + [ResultKind.THROTTLED] * 2
        here.pass_(1.0)
        assert here.kind(insert(node=6)) is ResultKind.ACCEPTED


class TestDisks:
    def test_a_repeated_creation_makes_one_disk(self, here: Region) -> None:
        disk = here.disk()
        assert (disk.name, disk.zone, disk.job, disk.node, disk.number) == (DISK, A, JOB, 0, 1)
        assert disk.ready and disk.users == ()
        assert here.kind(CreateDisk(JOB, UID, 0, 1, "gpu", A)) is ResultKind.ACCEPTED
        assert len(here.site.volumes) == 1
        asked = here.asked("CreateVolume")[0]
        assert (asked["Size"], asked["VolumeType"], asked["Encrypted"], asked["AvailabilityZone"]) == (
            50,
            "gp3",
            True,
            A,
        )
        assert asked["ClientToken"] == names.idempotency_key(JOB, UID, "disk", 0, 1, A)
        here.kind(CreateDisk(JOB, UID, 1, 1, "gpu", A, more_gb=51))
        assert here.asked("CreateVolume")[-1]["Size"] == 101
        here.site.volumes.popitem()
        (volume,) = here.site.volumes.values()
        assert volume.tags == {"Name": DISK, "sk-stack": "demo", "sk-pool": "gpu", "sk-job": JOB, "sk-node": "0"}

    def test_a_disk_is_found_in_the_last_listing_or_by_its_name_and_zone(self, here: Region) -> None:
        here.disk()
        here.disk(zone=B)
        fresh = open_ec2(STACK, here.engine, here.endpoint)  # type: ignore[arg-type]
        assert fresh.perform(DeleteDisk(DISK, A), 30).kind is ResultKind.ACCEPTED
        assert [volume.zone for volume in here.site.volumes.values()] == [B], "the other one has the same name"
        here.service.asked.clear()
        assert here.kind(DeleteDisk(DISK, B)) is ResultKind.ACCEPTED
        assert here.asked("DescribeVolumes") == [] and not here.site.volumes, "the last listing had its id"

    def test_a_disk_has_its_pools_performance_and_key(self, here: Region) -> None:
        pool = replace(POOL, disk_iops=6000, disk_mbps=500, disk_key="arn:aws:kms:k")
        ec2 = open_ec2(replace(STACK, pools=(pool,)), here.engine, here.endpoint)  # type: ignore[arg-type]
        assert ec2.perform(CreateDisk(JOB, UID, 0, 1, "gpu", A), 30).kind is ResultKind.ACCEPTED
        (asked,) = here.asked("CreateVolume")
        assert (asked["Iops"], asked["Throughput"], asked["KmsKeyId"]) == (6000, 500, "arn:aws:kms:k")

    def test_a_disk_is_attached_to_one_running_machine(self, here: Region) -> None:
        disk = here.disk()
        here.kind(insert())
        (instance,) = here.site.instances.values()
        attach = AttachDisk(DISK, names.vm_name("demo", JOB, 0, 1), instance.id, A)
        assert here.kind(attach) is ResultKind.IN_USE, "not before it runs"
        listing = here.pass_(6.0)
        vm = listing.vms[0]
        assert here.kind(attach) is ResultKind.ACCEPTED
        listing = here.look()
        assert listing.disks[0].users == (vm.name,) and listing.vms[0].disks == (DISK,), "held from the first moment"
        other = here.machine(node=1)
        assert here.kind(AttachDisk(disk.name, other.name, other.uid, A)) is ResultKind.IN_USE, "one writer"
        assert here.kind(DeleteDisk(DISK, A)) is ResultKind.IN_USE
        assert here.kind(DetachDisk(DISK, other.name, other.uid, A)) is ResultKind.ACCEPTED, "it was not attached there"
        assert here.look().disks[0].users == (vm.name,)
        assert here.kind(DetachDisk(DISK, vm.name, vm.uid, A)) is ResultKind.ACCEPTED
        assert here.look().disks[0].users == (vm.name,), "until it is off"
        assert here.pass_(3.0).disks[0].users == ()
        assert here.kind(DetachDisk(DISK, vm.name, vm.uid, A)) is ResultKind.ACCEPTED, "is off"
        assert all("Force" not in asked for asked in here.asked("DetachVolume"))
        assert here.kind(DeleteDisk(DISK, A)) is ResultKind.ACCEPTED
        assert here.look().disks == ()
        assert here.kind(DeleteDisk(DISK, A)) is ResultKind.ACCEPTED, "was gone"

    def test_an_ending_machine_keeps_its_disk_until_it_has_ended(self, here: Region) -> None:
        here.disk()
        vm = here.machine()
        here.kind(AttachDisk(DISK, vm.name, vm.uid, A))
        here.pass_(3.0)
        assert here.kind(DeleteVm(vm.name, vm.uid, A)) is ResultKind.ACCEPTED
        listing = here.look()
        assert listing.vms[0].status is VmStatus.STOPPING and listing.disks[0].users == (vm.name,)
        assert here.kind(DeleteVm(vm.name, vm.uid, A)) is ResultKind.ACCEPTED
        listing = here.pass_(25.0)
        assert listing.vms == () and listing.disks[0].users == ()

    @pytest.mark.parametrize(
        ("link", "held"), [("attaching", 1), ("attached", 1), ("detaching", 1), ("busy", 1), ("detached", 0)]
    )
    def test_only_a_detached_disk_is_free(self, here: Region, link: str, held: int) -> None:
        here.disk()
        vm = here.machine()
        (volume,) = here.site.volumes.values()
        volume.holder, volume.link = vm.uid, link
        listing = here.look()
        assert (listing.vms[0].disks, listing.disks[0].users) == ((DISK,) * held, (vm.name,) * held)

    def test_a_disk_cannot_be_attached_in_another_zone(self, here: Region) -> None:
        here.disk()
        vm = here.machine(zone=B)
        result = here.do(AttachDisk(DISK, vm.name, vm.uid, A))
        assert result.kind is ResultKind.PERMANENT and "ZoneMismatch" in result.detail

    def test_a_token_with_a_missing_disk_is_dead_only_on_proof(self, here: Region) -> None:
        """A number is burnt for a proof only: there may be data under it."""
        here.disk()
        (volume,) = here.site.volumes.values()
        here.site.drop_volume(volume)
        again = CreateDisk(JOB, UID, 0, 1, "gpu", A)
        assert here.kind(again) is ResultKind.ACCEPTED, "it may only not be visible yet"
        here.pass_(300.0)
        assert here.kind(again) is ResultKind.DEAD_KEY
        here.site.faults.append(Fault("DescribeVolumes", "RequestLimitExceeded", 503))
        assert here.kind(again) is ResultKind.THROTTLED, "nothing is proven"

    def test_a_token_of_an_old_disk_names_the_disk(self, here: Region) -> None:
        here.disk()
        (volume,) = here.site.volumes.values()
        here.pass_(300.0)
        done = here.do(CreateDisk(JOB, UID, 0, 1, "gpu", A))
        assert (done.kind, done.detail) == (ResultKind.ACCEPTED, volume.id)

    def test_a_failed_disk_is_deleted_and_its_number_burnt(self, here: Region) -> None:
        here.kind(CreateDisk(JOB, UID, 0, 1, "gpu", A))
        (volume,) = here.site.volumes.values()
        volume.state = Vol.ERROR
        assert here.look().disks == ()
        assert here.kind(CreateDisk(JOB, UID, 0, 1, "gpu", A)) is ResultKind.DEAD_KEY
        assert not here.site.volumes

    def test_another_size_with_the_same_token_is_an_error(self, here: Region) -> None:
        """A pool that was declared anew: a disk that is there, with its data, is what was wanted."""
        again = CreateDisk(JOB, UID, 0, 1, "gpu", A)
        here.disk()
        ec2 = open_ec2(replace(STACK, pools=(replace(POOL, disk_gb=99),)), here.engine, here.endpoint)  # type: ignore[arg-type]
        assert ec2.perform(again, 30).kind is ResultKind.ACCEPTED
        (volume,) = here.site.volumes.values()
        here.site.drop_volume(volume)
        assert ec2.perform(again, 30).kind is ResultKind.DEAD_KEY

    def test_a_snapshot_moves_a_disk_to_another_zone(self, here: Region) -> None:
        here.disk()
        (source,) = here.site.volumes.values()
        source.contents = "trained"
        shot = CreateSnapshot(JOB, UID, 0, 1, A, 2)
        assert here.kind(shot) is ResultKind.ACCEPTED
        assert here.kind(shot) is ResultKind.ACCEPTED and len(here.site.snapshots) == 1, "a snapshot has no token"
        listing = here.look()
        (seen,) = listing.snapshots
        assert (seen.name, seen.job, seen.node, seen.number, seen.ready) == (COPY, JOB, 0, 2, False)
        fill = CreateDisk(JOB, UID, 0, 2, "gpu", B, snapshot=COPY)
        assert here.kind(fill) is ResultKind.IN_USE, "it takes time"
        assert here.pass_(31.0).snapshots[0].ready
        assert here.kind(fill) is ResultKind.ACCEPTED
        listing = here.pass_(3.0)
        there = next(disk for disk in listing.disks if disk.zone == B)
        assert (there.name, there.number, there.ready) == (COPY, 2, True)
        assert next(v for v in here.site.volumes.values() if v.zone == B).contents == "trained"
        assert (
            here.kind(DeleteDisk(DISK, A)) is ResultKind.ACCEPTED
            and here.kind(DeleteSnapshot(COPY)) is ResultKind.ACCEPTED
        )
        listing = here.look()
        assert [disk.zone for disk in listing.disks] == [B] and listing.snapshots == ()
        assert here.kind(DeleteSnapshot(COPY)) is ResultKind.ACCEPTED

    def test_the_older_of_two_snapshots_counts_and_both_are_deleted(self, here: Region) -> None:
        """Two rounds at once may make one each."""
        here.disk()
        here.kind(CreateSnapshot(JOB, UID, 0, 1, A, 2))
        here.pass_(31.0)
        (first,) = here.site.snapshots.values()
        here.site.add_snapshot(Snapshot("snap-0ff", first.volume, 50, dict(first.tags), here.engine.t, 0.0))
        listing = here.look()
        assert len(listing.snapshots) == 1 and listing.snapshots[0].ready
        here.kind(CreateDisk(JOB, UID, 0, 2, "gpu", B, snapshot=COPY))
        assert here.asked("CreateVolume")[-1]["SnapshotId"] == first.id
        here.kind(DeleteSnapshot(COPY))
        assert not here.site.snapshots

    def test_a_snapshot_that_failed_is_made_again(self, here: Region) -> None:
        here.disk()
        here.kind(CreateSnapshot(JOB, UID, 0, 1, A, 2))
        (failed,) = here.site.snapshots.values()
        failed.state = "error"
        assert here.look().snapshots == ()
        here.pass_(20.0)
        assert here.kind(CreateSnapshot(JOB, UID, 0, 1, A, 2)) is ResultKind.ACCEPTED
        assert [shot.state for shot in here.site.snapshots.values()] == ["pending"]

    def test_resources_that_are_not_visible_yet_are_retried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with region(monkeypatch, delays=Delays(seen=(5.0, 5.0))) as here:
            assert here.kind(insert()) is ResultKind.ACCEPTED
            (instance,) = here.site.instances.values()
            assert here.look().vms == ()
            assert here.kind(insert()) is ResultKind.ACCEPTED and len(here.site.instances) == 1
            assert here.kind(AttachDisk(DISK, "vm", instance.id, A)) is ResultKind.IN_USE
            here.kind(CreateDisk(JOB, UID, 0, 1, "gpu", A))
            assert here.kind(AttachDisk(DISK, "vm", instance.id, A)) is ResultKind.IN_USE
            assert len(here.pass_(6.0).vms) == 1


class TestListing:
    def test_one_request_lists_all_zones(self, here: Region) -> None:
        here.machine()
        here.machine(node=1, zone=B)
        here.service.asked.clear()
        listing = here.look()
        assert {vm.zone for vm in listing.vms} == {A, B} == listing.answered
        assert sorted(name for name, _ in here.service.asked) == [
            "DescribeInstances",
            "DescribeSnapshots",
            "DescribeVolumes",
        ]
        for _, asked in here.service.asked:
            assert asked["Filters"] == [{"Name": "tag:sk-stack", "Values": ["demo"]}] and asked["MaxResults"] == PAGE

    def test_all_pages_are_read(self, here: Region) -> None:
        here.site.throttling = False
        for node in range(7):
            here.kind(insert(node=node))
        here.service.pages = 3
        assert len(here.look().vms) == 7

    def test_an_outage_of_a_zone_hides_that_zone_only(self, here: Region, caplog: pytest.LogCaptureFixture) -> None:
        here.machine()
        here.machine(node=1, zone=B)
        here.site.dark = {B}
        caplog.clear()
        listing = here.look()
        whats = ("disks", "instances")
        told = [f"listing the {what} of all zones at once failed" for what in whats]
        told += [f"zone {B}: listing its {what} failed" for what in whats]
        assert sorted(line.partition(" failed: ")[0] + " failed" for line in caplog.messages) == told
        assert listing.answered == {A} and [vm.zone for vm in listing.vms] == [A]
        assert here.kind(insert(node=2, zone=B)) is ResultKind.AMBIGUOUS
        here.site.dark = {A, B}
        assert here.look().answered == frozenset()
        here.site.dark = set()
        assert len(here.look().vms) == 2

    @pytest.mark.parametrize("operation", ["DescribeInstances", "DescribeVolumes"])
    def test_a_throttled_listing_makes_no_further_requests(self, here: Region, operation: str) -> None:
        here.machine()
        here.site.faults.append(Fault(operation, "RequestLimitExceeded", 503, times=9))
        here.service.asked.clear()
        assert here.look().answered == frozenset()
        assert len(here.asked(operation)) == 1

    def test_a_failed_list_of_snapshots_leaves_no_zone_answered(self, here: Region) -> None:
        here.machine()
        here.site.faults.append(Fault("DescribeSnapshots", "InternalError", 500, times=9))
        assert here.look().answered == frozenset()

    def test_static_machines_are_listed_and_foreign_ones_ignored(
        self, here: Region, caplog: pytest.LogCaptureFixture
    ) -> None:
        machine = here.static_machine()
        machine.tags |= {"sk-node": "4", "sk-attempt": "2"}  # which a static machine does not have
        here.machine()
        stranger = here.instance(here.machine(node=1))
        stranger.tags["sk-node"] = "4"  # its name says another
        other = here.instance(here.machine(node=2))
        other.tags["sk-stack"] = "other"
        caplog.clear()
        static, ours = sorted(here.look().vms, key=lambda vm: vm.job)
        assert (static.name, static.job, static.model, static.pool) == ("sk-demo-floor-s0", "", Model.STATIC, "floor")
        assert (static.uid, static.node, static.attempt) == (machine.id, 0, 0) and ours.node == 0
        why = "has labels of this stack that do not match its name: the machine is ignored"
        assert caplog.messages == [f"{stranger.id} {why}"]

    def test_boot_volumes_and_static_disks_are_not_listed(self, here: Region) -> None:
        here.disk()
        (mine,) = here.site.volumes.values()
        for name in ("sk-demo-abcd2345-n0000-a1", "sk-demo-floor-s0-data", "x"):
            here.site.add_volume(
                Volume(here.site.id("vol"), A, 8, "gp3", {**mine.tags, "Name": name}, "", here.engine.t, 0.0)
            )
        assert [disk.name for disk in here.pass_(5.0).disks] == [DISK]

    def test_a_disk_attached_to_an_unlisted_machine_counts_as_used(self, here: Region) -> None:
        here.disk()
        vm = here.machine()
        here.kind(AttachDisk(DISK, vm.name, vm.uid, A))
        here.instance(vm).tags.clear()
        listing = here.look()
        assert listing.vms == () and listing.disks[0].users == (vm.uid,)

    def test_a_stale_listing_is_no_loss(self, here: Region) -> None:
        """Listings are eventually consistent: who was there and is not, and is not dead, is asked for by its id."""
        vm = here.machine()
        real = here.service._verbs["DescribeInstances"]

        def behind(params: dict[str, object]) -> dict[str, object]:
            by_id = params["Filters"][0]["Name"] == "instance-id"  # type: ignore[index]
            return real(params) if by_id else {"Reservations": []}

        here.service._verbs["DescribeInstances"] = behind
        assert [one.uid for one in here.look().vms] == [vm.uid]
        assert [one.uid for one in here.look().vms] == [vm.uid]
        here.site.end(here.instance(vm))
        assert here.look().vms == ()

    @pytest.mark.parametrize(
        ("state", "status"),
        [
            ("pending", VmStatus.PENDING),
            ("running", VmStatus.RUNNING),
            ("shutting-down", VmStatus.STOPPING),
            ("stopping", VmStatus.STOPPING),
            ("stopped", VmStatus.DEAD),
            ("new-word", VmStatus.PENDING),
        ],
    )
    def test_states(self, state: str, status: VmStatus) -> None:
        from spotkeeper.reconcile.clouds.ec2.schema import InstanceIn, State

        assert InstanceIn("i-1", State(state)).status is status

    def test_every_instance_state_of_ec2_is_known(self) -> None:
        from spotkeeper.reconcile.clouds.ec2.schema import STATUS

        assert set(STATUS) == set(protocol.model().shape_for("InstanceStateName").enum)

    def test_a_foreign_address_does_not_count(self, here: Region, caplog: pytest.LogCaptureFixture) -> None:
        vm = here.machine()
        here.instance(vm).address = "169.254.169.254"
        (seen,) = here.look().vms
        assert (seen.status, seen.address) == (VmStatus.PENDING, "")
        why = "runs, but has no address in SPOTKEEPER_ADDRESSES: it does not count as running"
        assert caplog.messages == [f"{vm.name} {why}"]

    def test_a_machine_is_found_by_id_after_its_end(self, here: Region, caplog: pytest.LogCaptureFixture) -> None:
        vm = here.machine()
        assert here.ec2.find(vm.uid, 5) == replace(vm, disks=())
        here.site.end(here.instance(vm))
        assert here.look().vms == ()
        found = here.ec2.find(vm.uid, 5)
        assert found is not None and (found.name, found.status) == (vm.name, VmStatus.DEAD)
        assert here.ec2.find("i-0fedcba9876543210", 5) is None
        here.site.faults.append(Fault("DescribeInstances", "UnauthorizedOperation", 403))
        assert here.ec2.find(vm.uid, 5) is None
        (line,) = caplog.messages
        assert line.startswith(f"machine {vm.uid}: ") and "UnauthorizedOperation" in line


class TestHints:
    def test_prices_by_zone_as_they_changed(self, here: Region) -> None:
        now = here.engine.t
        here.site.market.prices = [
            (A, now - 900_000, "0.20"),
            (A, now - 3600, "0.25"),
            (A, now - 1800, "0.250"),
            (B, now - 7200, "0.4"),
            (A, now - 60, "none"),
            (B, now - 30, "-1"),
        ]
        runs = here.ec2.price_history("gpu", 5)
        expected = (
            PriceRun(now - 900_000, 0.20, A),
            PriceRun(now - 7200, 0.4, B),
            PriceRun(now - 3600, 0.25, A),
        )
        assert runs == expected
        (asked,) = here.asked("DescribeSpotPriceHistory")
        assert (asked["InstanceTypes"], asked["ProductDescriptions"]) == (["g6.xlarge"], ["Linux/UNIX"])

    def test_missing_values_are_unknown(self, here: Region) -> None:
        assert here.ec2.price_history("gpu", 5) is None, "EC2 tells none"
        assert here.ec2.price_history("none", 5) is None
        here.site.faults += [
            Fault("DescribeSpotPriceHistory", "UnauthorizedOperation", 403),
            Fault("GetSpotPlacementScores", times=2),
        ]
        assert here.ec2.price_history("gpu", 5) is None
        here.site.market.scores = {"x-az1": 9}
        assert here.ec2.chances("gpu", 5) is None
        assert here.ec2.chances("none", 5) is None

    def test_scores_name_zones_by_id_and_the_account_names_them(self, here: Region) -> None:
        here.site.market.scores = {"x-az1": 9, "x-az2": 3, "x-az9": 10}
        assert here.ec2.chances("gpu", 5) == Chances(here.engine.t, {A: Guess(0.3), B: Guess(0.9)})
        here.ec2.chances("gpu", 5)
        assert len(here.asked("DescribeAvailabilityZones")) == 1
        asked = here.asked("GetSpotPlacementScores")[0]
        assert (asked["TargetCapacity"], asked["SingleAvailabilityZone"], asked["RegionNames"]) == (8, True, ["us-x1"])
        here.site.market.scores = {"x-az9": 10}
        assert here.ec2.chances("gpu", 5) is None


REFUSALS = {
    ResultKind.CAPACITY: (
        *("InsufficientInstanceCapacity", "SpotMaxPriceTooLow", "Unsupported", "InsufficientFreeAddressesInSubnet"),
    ),
    ResultKind.QUOTA: (
        *("MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded", "VolumeLimitExceeded"),
    ),
    ResultKind.THROTTLED: (
        *("RequestLimitExceeded", "Throttling", "InvalidLaunchTemplateId.NotFound", "InvalidSubnetID.NotFound"),
        *("InvalidLaunchTemplateId.VersionNotFound", "InvalidGroup.NotFound"),
    ),
    ResultKind.PERMANENT: (
        *("UnsupportedOperation", "UnauthorizedOperation", "InvalidAMIID.NotFound", "InvalidParameterValue"),
        *("AuthFailure", "OptInRequired", "SomethingNew"),
    ),
    ResultKind.DEAD_KEY: ("IdempotentParameterMismatch", "IdempotentInstanceTerminated"),
    ResultKind.AMBIGUOUS: ("InternalError", "Unavailable", "RequestExpired"),
    ResultKind.IN_USE: ("VolumeInUse", "IncorrectState"),
}  # fmt: skip


class TestForgetting:
    def test_a_terminated_machine_loses_its_tags_before_it_is_forgotten(self, here: Region) -> None:
        """EC2: "tags are gradually disassociated". What is not known for ours is nobody's, and its token is used up."""
        vm = here.machine()
        here.site.stop(here.instance(vm), ("Server.SpotInstanceTermination", "taken"), 1.0)
        here.engine.run(here.engine.t + 5.0)
        here.instance(vm).tags.clear()
        listing = here.look()
        assert (listing.vms, listing.ran, listing.results) == ((), (), ()) and listing.answered == {A, B}
        assert here.ec2.find(vm.uid, 5) is None
        assert here.kind(insert()) is ResultKind.DEAD_KEY


class TestErrors:
    @pytest.mark.parametrize(("kind", "code"), [(kind, code) for kind, codes in REFUSALS.items() for code in codes])
    def test_codes(self, here: Region, kind: ResultKind, code: str) -> None:
        here.site.faults.append(Fault("RunInstances", code, 400, times=2))
        result = here.do(insert())
        assert result.kind is kind and code in result.detail

    @pytest.mark.parametrize(
        "said",
        [
            "Value (arn:aws:iam::123456789012:instance-profile/sk-demo-vm) for parameter iamInstanceProfile.arn is "
            "invalid. Invalid IAM Instance Profile ARN",
            'IAM Instance Profile "arn:aws:iam::1:instance-profile/sk-demo-vm" has no associated IAM Roles',
        ],
    )
    def test_a_fresh_instance_profile_does_not_hold_the_job(self, here: Region, said: str) -> None:
        """EC2 learns of it within two minutes; a hold would let the first job of a new stack wait for half an hour."""
        here.site.faults.append(Fault("RunInstances", "InvalidParameterValue", 400, said=said))
        assert here.kind(insert()) is ResultKind.THROTTLED
        assert here.kind(insert()) is ResultKind.ACCEPTED, "by the same token"

    def test_a_gang_too_large_to_be_copied_at_once_is_copied_one_after_the_other(self, here: Region) -> None:
        """A limit on "snapshots that you can have in the pending state" is no reason to give the move up."""
        here.disk()
        here.site.faults.append(Fault("CreateSnapshot", "PendingSnapshotLimitExceeded", 400))
        copy = CreateSnapshot(JOB, UID, 0, 1, A, 2)
        assert here.kind(copy) is ResultKind.THROTTLED
        assert here.kind(copy) is ResultKind.ACCEPTED

    def test_error_codes_come_before_the_status(self) -> None:
        assert classify("InsufficientInstanceCapacity", 500) is ResultKind.CAPACITY
        assert classify("Anything", 503) is ResultKind.AMBIGUOUS
        assert classify("Anything", 429) is ResultKind.THROTTLED
        assert all(isinstance(kind, ResultKind) for kind in errors.CODES.values())

    def test_details_are_one_short_line(self) -> None:
        assert len(detail_of("C", "a\nb\r\n" + "x" * 999)) == 300 and "\n" not in detail_of("C", "a\nb")

    def test_a_request_that_ec2s_model_refuses_is_permanent(self, here: Region) -> None:
        pool = replace(POOL, templates={"spot": "lt"}, template_versions={"spot": 3})  # type: ignore[dict-item]
        ec2 = open_ec2(replace(STACK, pools=(pool,)), here.engine, here.endpoint)  # type: ignore[arg-type]
        done = ec2.perform(insert(), 30)
        assert done.kind is ResultKind.PERMANENT
        assert "Invalid type for parameter LaunchTemplate.Version, value: 3" in done.detail
        assert not here.service.asked

    def test_a_slow_server_is_cut_off_at_the_deadline(self, here: Region) -> None:
        with silent_server(drip=False) as hanging, silent_server(drip=True) as dripping:
            for endpoint in (hanging, dripping):
                started = time.monotonic()
                ec2 = open_ec2(STACK, Clock(), endpoint.removesuffix("/compute/v1"))
                assert ec2.perform(DeleteVm("v", "i-0123456789abcdef0", A), 1.0).kind is ResultKind.AMBIGUOUS
                assert time.monotonic() - started < 20.0, "that it ends at all: the machine may be busy"

    @pytest.mark.parametrize("body", [b"", b"<html>", b"\xff", b"<x/>", b"<DescribeInstancesResponse/>"])
    @pytest.mark.parametrize("status", [200, 502])
    def test_a_proxys_page_is_no_answer(
        self, here: Region, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes
    ) -> None:
        here.machine()
        monkeypatch.setattr(here.service, "handle", lambda _: (status, body))
        assert here.look().answered == frozenset(), "an empty list would be a lost fleet"
        assert here.kind(insert(node=1)) is ResultKind.AMBIGUOUS

    def test_an_unreachable_server_is_no_answer(self, here: Region) -> None:
        there = open_ec2(STACK, Clock(), "http://127.0.0.1:1")
        assert there.perform(insert(), 2).kind is ResultKind.AMBIGUOUS
        assert there.list("demo").answered == frozenset()

    @pytest.mark.parametrize(
        ("endpoint", "why"),
        [
            ("http://ec2.example", "plain http is allowed only to this machine"),
            ("https://me@ec2.example", "want https://host"),
        ],
    )
    def test_credentials_are_never_sent_over_plain_http_or_to_an_odd_address(self, endpoint: str, why: str) -> None:
        api = Api("us-x1", endpoint)
        for opened in (api.open, lambda: api.call("describe_instances", 5, {})):
            with pytest.raises(ValueError, match=why) as refused:
                opened()
            assert str(refused.value) == f"AWS_ENDPOINT_URL={endpoint!r}: {why}"


def every_action(here: Region) -> None:
    """Each verb, and each call that one may be made of."""
    vm = here.machine()
    here.disk()
    attach = (AttachDisk(DISK, vm.name, vm.uid, A), DetachDisk(DISK, vm.name, vm.uid, A))
    move: tuple[Action, ...] = (CreateSnapshot(JOB, UID, 0, 1, A, 2), CreateDisk(JOB, UID, 0, 2, "gpu", B, COPY))
    rest = (DeleteSnapshot(COPY), DeleteDisk(COPY, B), DeleteDisk(DISK, A), DeleteVm(vm.name, vm.uid, A))
    for action in (*attach, *move, *rest):
        assert here.kind(action) is ResultKind.ACCEPTED
        here.pass_(31.0)
    here.pass_(60.0)
    here.do(InsertVm(JOB, UID, 0, 1, "gpu", A, Model.SPOT))
    here.ec2.price_history("gpu", 5)
    here.ec2.chances("gpu", 5)


def test_every_call_is_among_the_rights_and_every_right_is_for_a_call(here: Region) -> None:
    every_action(here)
    made = {f"ec2:{name}" for name, _ in here.service.asked}
    assert made | set(iam.WITH_THEM) == set(iam.ACTIONS)
    assert all("DryRun" not in params for _, params in here.service.asked)


def test_no_sdk_is_imported_before_the_first_call() -> None:
    import subprocess
    import sys

    code = (
        "import sys; import spotkeeper.reconcile.service.aws_lambda, spotkeeper.reconcile.service.http\n"
        "import spotkeeper.reconcile.clouds.ec2.cloud\n"
        "assert not {'boto3', 'botocore'} & set(sys.modules)\n"
        "import spotkeeper.reconcile.clouds.gce.cloud; assert 'botocore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
