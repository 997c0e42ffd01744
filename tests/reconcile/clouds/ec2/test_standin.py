"""The stand-in is as strict as EC2: what botocore's model of the service does not hold is refused or fails the test."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from spotkeeper.contract.cloud import ResultKind
from spotkeeper.reconcile.clouds.ec2.cloud import open_ec2
from tests.reconcile.clouds.ec2.region import STACK, A, Region, insert, new_site, region
from tests.reconcile.clouds.ec2.standin import protocol
from tests.reconcile.clouds.ec2.standin.protocol import Ec2Error
from tests.reconcile.clouds.ec2.standin.site import Fault, LostError, Site
from tests.reconcile.clouds.ec2.standin.things import Run, Vol, Volume
from tests.reconcile.clouds.ec2.standin.verbs import Ec2Service
from tests.sim.engine import Engine

LAUNCH = {
    "MinCount": "1",
    "MaxCount": "1",
    "ClientToken": "t1",
    "LaunchTemplate.LaunchTemplateId": "lt-spot",
    "LaunchTemplate.Version": "3",
    "SubnetId": "subnet-a",
    "TagSpecification.1.ResourceType": "instance",
    "TagSpecification.1.Tag.1.Key": "Name",
    "TagSpecification.1.Tag.1.Value": "x",
}
CARD = {"NetworkInterface.1.DeviceIndex": "0", "NetworkInterface.1.SubnetId": "subnet-a"}
DISK = {"AvailabilityZone": A, "Size": "10", "VolumeType": "gp3", "ClientToken": "v1"}


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def site(engine: Engine) -> Site:
    return new_site(engine)


@pytest.fixture
def service(site: Site) -> Ec2Service:
    return Ec2Service(site)


def body(action: str, params: dict[str, str], version: str = protocol.VERSION) -> bytes:
    return urlencode({"Action": action, "Version": version, **params}).encode()


def code(service: Ec2Service, action: str, params: dict[str, str], **more: str) -> str:
    """The error's code, or ""."""
    status, data = service.handle(body(action, params, **more))
    assert service.faults == []
    return "" if status == 200 else data.split(b"<Code>")[1].split(b"</Code>")[0].decode()


def put(service: Ec2Service, action: str, params: dict[str, str]) -> None:
    assert code(service, action, params) == ""


class TestRequests:
    @pytest.mark.parametrize(
        ("change", "wants"),
        [
            ({"Colour": "red"}, "UnknownParameter"),
            ({"TagSpecification.1.Tags.1.Key": "x"}, "UnknownParameter"),
            ({"SecurityGroupId.x": "sg"}, "UnknownParameter"),
            ({"MinCount": "one"}, "InvalidParameterValue"),
            ({"EbsOptimized": "True"}, "InvalidParameterValue"),
            ({"TagSpecification.1.ResourceType": "machine"}, "InvalidParameterValue"),
            ({"InstanceType": "p99.huge"}, "InvalidParameterValue"),
            ({"MinCount": None}, "MissingParameter"),
            ({"ClientToken": None}, "InvalidParameterValue"),
            ({"ClientToken": "x" * 65}, "InvalidParameterValue"),
            ({"MaxCount": "2"}, "InvalidParameterValue"),
            ({"LaunchTemplate.LaunchTemplateId": "lt-none"}, "InvalidLaunchTemplateId.NotFound"),
            ({"LaunchTemplate.Version": "99"}, "InvalidLaunchTemplateId.VersionNotFound"),
            ({"SubnetId": "subnet-none"}, "InvalidSubnetID.NotFound"),
            ({"SubnetId": None}, "MissingInput"),
            ({"Placement.AvailabilityZone": "us-x1-b"}, "InvalidParameterValue"),
            ({"Placement.GroupName": "none"}, "InvalidPlacementGroup.Unknown"),
            (CARD, "InvalidParameterCombination"),
            ({"TagSpecification.1.Tag.1.Key": "aws:x"}, "InvalidParameterValue"),
            ({"TagSpecification.1.Tag.1.Key": "a/b"}, "InvalidParameterValue"),
            ({"TagSpecification.1.Tag.1.Value": "x" * 257}, "InvalidParameterValue"),
            ({"TagSpecification.1.Tag.2.Key": "Name", "TagSpecification.1.Tag.2.Value": "y"}, "InvalidParameterValue"),
            ({}, ""),
        ],
    )  # fmt: skip
    def test_a_launch(self, service: Ec2Service, change: dict[str, str | None], wants: str) -> None:
        params = {name: value for name, value in {**LAUNCH, **change}.items() if value is not None}
        assert code(service, "RunInstances", params) == wants
        assert len(service.site.instances) == (wants == "")

    def test_an_on_demand_launch_makes_no_spot_request_to_tag(self, service: Ec2Service) -> None:
        params = {**LAUNCH, "LaunchTemplate.LaunchTemplateId": "lt-od", "LaunchTemplate.Version": "1"}
        params["TagSpecification.1.ResourceType"] = "spot-instances-request"
        assert code(service, "RunInstances", params) == "InvalidParameterValue"

    @pytest.mark.parametrize(
        ("change", "wants"),
        [
            ({"AvailabilityZone": "us-x1-z"}, "InvalidParameterValue"),
            ({"VolumeType": "pd-ssd"}, "InvalidParameterValue"),
            ({"Size": "0"}, "InvalidParameterValue"),
            ({"VolumeType": "io2"}, "InvalidParameterCombination"),
            ({"VolumeType": "gp2", "Throughput": "200"}, "InvalidParameterCombination"),
            ({"KmsKeyId": "k"}, "InvalidParameterDependency"),
            ({"SnapshotId": "snap-none"}, "InvalidSnapshot.NotFound"),
            ({"Size": None}, "MissingParameter"),
            ({}, ""),
        ],
    )
    def test_a_volume(self, service: Ec2Service, change: dict[str, str | None], wants: str) -> None:
        params = {name: value for name, value in {**DISK, **change}.items() if value is not None}
        assert code(service, "CreateVolume", params) == wants

    @pytest.mark.parametrize(
        ("action", "params", "wants"),
        [
            ("Nonsense", {}, "InvalidAction"),
            ("StartInstances", {"InstanceId.1": "i-12345678"}, "UnauthorizedOperation"),
            ("DescribeInstances", {"Filter.1.Name": "colour", "Filter.1.Value.1": "red"}, "InvalidParameterValue"),
            ("DescribeInstances", {"MaxResults": "3"}, "InvalidParameterValue"),
            ("DescribeInstances", {"InstanceId.1": "vm"}, "InvalidInstanceID.Malformed"),
            ("DescribeInstances", {"InstanceId.1": "i-12345678"}, "InvalidInstanceID.NotFound"),
            ("DescribeVolumes", {"VolumeId.1": "vol-1"}, "InvalidVolume.NotFound"),
            ("DescribeSnapshots", {}, "InvalidParameterValue"),
            ("TerminateInstances", {}, "MissingParameter"),
            ("AttachVolume", {"VolumeId": "v", "InstanceId": "i-12345678"}, "MissingParameter"),
            ("DescribeInstances", {"DryRun": "true"}, "DryRunOperation"),
        ],
    )
    def test_other_calls(self, service: Ec2Service, action: str, params: dict[str, str], wants: str) -> None:
        assert code(service, action, params) == wants

    def test_another_version_of_the_api(self, service: Ec2Service) -> None:
        assert code(service, "DescribeInstances", {}, version="2010-01-01") == "InvalidParameterValue"


class TestAnswers:
    @pytest.mark.parametrize(
        "answer",
        [
            {"Reservations": [{"Instances": [{"InstanceId": "i-1", "Colour": "red"}]}]},
            {"Reservations": [{"Instances": [{"InstanceId": 7}]}]},
            {"Reservations": {}},
            {"Reservations": [{"Instances": [{"State": {"Name": "asleep"}}]}]},
            {"Reservations": [{"Instances": [{"LaunchTime": "soon"}]}]},
        ],
    )
    def test_answers_outside_ec2s_model_fail(self, answer: dict[str, object]) -> None:
        with pytest.raises(AssertionError):
            protocol.write("DescribeInstances", answer)

    def test_an_error_of_the_stand_in_fails_the_test(self, service: Ec2Service) -> None:
        service._verbs["DescribeVolumes"] = lambda _: {"Colour": 1}
        assert service.handle(body("DescribeVolumes", {}))[0] == 500
        assert len(service.faults) == 1

    def test_texts_are_escaped(self, service: Ec2Service) -> None:
        put(service, "RunInstances", {**LAUNCH, "TagSpecification.1.Tag.1.Value": "<&>\"'"})
        assert b"<value>&lt;&amp;&gt;" in service.handle(body("DescribeInstances", {}))[1]
        assert b"<Message>" in Ec2Error("C", "<&>").body() and b"<&>" not in Ec2Error("C", "<&>").body()


class TestWorld:
    def test_a_machines_states_follow_in_order(self, service: Ec2Service, engine: Engine) -> None:
        put(service, "RunInstances", LAUNCH)
        (one,) = service.site.instances.values()
        states = [one.state]
        engine.run(engine.t + 6)
        states.append(one.state)
        put(service, "TerminateInstances", {"InstanceId.1": one.id})
        states.append(one.state)
        engine.run(engine.t + 21)
        states.append(one.state)
        assert states == [Run.PENDING, Run.RUNNING, Run.SHUTTING_DOWN, Run.TERMINATED]
        put(service, "TerminateInstances", {"InstanceId.1": one.id})
        engine.run(engine.t + 3601)
        assert code(service, "TerminateInstances", {"InstanceId.1": one.id}) == "InvalidInstanceID.NotFound"

    def test_a_token_outlives_its_machine_by_a_day(self, service: Ec2Service, engine: Engine) -> None:
        put(service, "RunInstances", LAUNCH)
        (one,) = service.site.instances.values()
        service.site.end(one)
        put(service, "RunInstances", LAUNCH)
        assert b"<name>terminated</name>" in service.handle(body("RunInstances", LAUNCH))[1]
        assert code(service, "RunInstances", {**LAUNCH, "EbsOptimized": "true"}) == "IdempotentParameterMismatch"
        engine.run(engine.t + 7200)
        assert one.id.encode() in service.handle(body("RunInstances", LAUNCH))[1], "listed no more, remembered still"
        assert not service.site.instances
        service.site.strict_tokens = True
        assert code(service, "RunInstances", LAUNCH) == "IdempotentInstanceTerminated"

    def test_a_volume_is_attached_to_one_running_machine_of_its_zone(self, service: Ec2Service, engine: Engine) -> None:
        put(service, "RunInstances", LAUNCH)
        put(service, "CreateVolume", DISK)
        (one,), (volume,) = service.site.instances.values(), service.site.volumes.values()
        attach = {"VolumeId": volume.id, "InstanceId": one.id, "Device": "/dev/sdf"}
        assert code(service, "AttachVolume", attach) == "IncorrectState"
        engine.run(engine.t + 6)
        assert code(service, "AttachVolume", {**attach, "Device": "sdf"}) == "InvalidParameterValue"
        put(service, "AttachVolume", attach)
        assert code(service, "AttachVolume", attach) == "VolumeInUse"
        assert code(service, "DeleteVolume", {"VolumeId": volume.id}) == "VolumeInUse"
        other = Volume("vol-2", A, 10, "gp3", {}, "", 0.0, 0.0, state=Vol.AVAILABLE)
        service.site.volumes[other.id] = other
        assert code(service, "AttachVolume", {**attach, "VolumeId": other.id}) == "InvalidParameterValue", "device"
        service.site.stop(one, ("x", "x"), 5.0)
        assert code(service, "DeleteVolume", {"VolumeId": volume.id}) == "VolumeInUse", "until it is gone"
        engine.run(engine.t + 6)
        put(service, "DeleteVolume", {"VolumeId": volume.id})

    def test_a_snapshot_takes_time_and_one_volume_gives_one_in_a_while(
        self, service: Ec2Service, engine: Engine
    ) -> None:
        put(service, "CreateVolume", DISK)
        (volume,) = service.site.volumes.values()
        assert code(service, "CreateSnapshot", {"VolumeId": volume.id}) == "IncorrectState"
        engine.run(engine.t + 3)
        put(service, "CreateSnapshot", {"VolumeId": volume.id})
        assert code(service, "CreateSnapshot", {"VolumeId": volume.id}) == "SnapshotCreationPerVolumeRateExceeded"
        (shot,) = service.site.snapshots.values()
        fill = {**DISK, "ClientToken": "v2", "SnapshotId": shot.id}
        assert code(service, "CreateVolume", fill) == "IncorrectState"
        engine.run(engine.t + 31)
        assert code(service, "CreateVolume", {**fill, "Size": "9"}) == "InvalidParameterValue", "smaller than it"
        put(service, "CreateVolume", fill)

    def test_injected_faults_occur_as_configured(self, service: Ec2Service) -> None:
        service.site.faults = [Fault("RunInstances", "InternalError", 500), Fault("RunInstances", done=True)]
        assert code(service, "RunInstances", LAUNCH) == "InternalError"
        assert not service.site.instances
        with pytest.raises(LostError):
            service.handle(body("RunInstances", LAUNCH))
        assert len(service.site.instances) == 1
        put(service, "RunInstances", LAUNCH)


def test_the_sdks_endpoint_variable_reaches_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """``AWS_ENDPOINT_URL``, which is for all services, and the one for EC2 before it."""
    with region(monkeypatch) as here:
        monkeypatch.delenv("AWS_ENDPOINT_URL_EC2")
        monkeypatch.setenv("AWS_ENDPOINT_URL", here.endpoint)
        ec2 = open_ec2(STACK, here.engine)  # type: ignore[arg-type]
        assert ec2.perform(insert(), 30).kind is ResultKind.ACCEPTED
        (instance,) = here.site.instances.values()
        instance.address = "127.0.0.9"
        (seen,) = ec2.list("demo").vms
        assert seen.address == "127.0.0.9", "a local API has local machines"
        assert_signed(here)


def assert_signed(here: Region) -> None:
    """The server notes a request that is not signed for EC2 among its faults."""
    import http.client

    assert here.service.faults == []
    connection = http.client.HTTPConnection(here.endpoint.removeprefix("http://"), timeout=10)
    connection.request("POST", "/", body("DescribeVolumes", {}))
    connection.getresponse().read()
    connection.close()
    assert here.service.faults.pop().startswith("not signed")
