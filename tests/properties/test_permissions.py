"""The function's calls under the rights that the program declares for it, conditions on names included."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import msgspec
import pytest

from spotkeeper.contract.cloud import (
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    ResultKind,
)
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.clouds.gce.api import Api
from tests.properties.plane import Line, Plane, Time, adapter_api
from tests.properties.world import World

JOB, ZONE, UID = "abcd2345", "us-central1-a", str(uuid.UUID(int=7))
VM, DISK, SNAPSHOT = f"sk-demo-{JOB}-n0000-a1", f"sk-demo-{JOB}-n0000-d1", f"sk-demo-{JOB}-n0000-d2"
INSERT = InsertVm(JOB, UID, 0, 1, "p", ZONE, Model.SPOT)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.line.on_call = lambda _method, _path, _answer: None
    made.plane.host.on_power = lambda _vm, _what: None  # machines without agents
    yield made
    made.close()


def done(world: World, action: object) -> tuple[ResultKind, str]:
    """What the adapter makes of it, with all that it begins at its end."""
    result = world.instances[0].cloud.perform(action, 10.0)  # type: ignore[arg-type]
    world.plane.advance(world.now + 120)
    return result.kind, result.detail


def machine(world: World) -> str:
    assert done(world, INSERT) == (ResultKind.ACCEPTED, "")
    (vm,) = world.plane.vms()
    assert vm.wire.status == "RUNNING"
    return str(vm.id)


def test_every_verb_is_within_the_functions_rights(world: World) -> None:
    uid = machine(world)
    for action in (
        CreateDisk(JOB, UID, 0, 1, "p", ZONE),
        AttachDisk(DISK, VM, uid, ZONE),
        DetachDisk(DISK, VM, uid, ZONE),
        CreateSnapshot(JOB, UID, 0, 1, ZONE, 2),
        CreateDisk(JOB, UID, 0, 2, "p", ZONE, snapshot=SNAPSHOT),
        DeleteSnapshot(SNAPSHOT),
        DeleteDisk(DISK, ZONE),
        DeleteVm(VM, uid, ZONE),
    ):
        assert done(world, action) == (ResultKind.ACCEPTED, ""), action
    assert world.plane.vms() == [] and [disk.name for disk in world.plane.disks()] == [SNAPSHOT]


@pytest.mark.parametrize("verb", ["delete", "attach", "detach"])
def test_a_machine_with_the_same_name_and_another_id_is_left_alone(world: World, verb: str) -> None:
    """Another machine under the name of the one that was seen: there already, or between two calls, gone."""
    machine(world)
    done(world, CreateDisk(JOB, UID, 0, 1, "p", ZONE))
    other = "1" * 19
    action = {
        "delete": DeleteVm(VM, other, ZONE),
        "attach": AttachDisk(DISK, VM, other, ZONE),
        "detach": DetachDisk(DISK, VM, other, ZONE),
    }[verb]
    kind, _ = done(world, action)
    assert kind is (ResultKind.PERMANENT if verb == "attach" else ResultKind.ACCEPTED)
    (vm,), (disk,) = world.plane.vms(), world.plane.disks()
    assert vm.wire.status == "RUNNING" and not disk.users


def call(world: World, method: str, path: str, body: object = None) -> tuple[int, str]:
    api: Api = adapter_api(world.line, world.account)
    answer = api.call(method, f"projects/local/{path}", 10.0, {}, body)  # type: ignore[arg-type]
    said = msgspec.json.decode(answer.body)
    return answer.status, said["error"]["message"] if answer.status != 200 else ""


def test_a_machine_addressed_by_number_meets_no_condition(world: World) -> None:
    uid = machine(world)
    for method, path, permission in (
        ("DELETE", f"zones/{ZONE}/instances/{uid}", "compute.instances.delete"),
        ("POST", f"zones/{ZONE}/instances/{uid}/detachDisk", "compute.instances.detachDisk"),
        ("GET", f"zones/{ZONE}/instances/{uid}", "compute.instances.get"),
    ):
        assert call(world, method, path) == (403, f"Required '{permission}' permission")


def test_declared_resources_are_out_of_the_functions_reach(world: World) -> None:
    for path in (f"zones/{ZONE}/instances/sk-demo-floor-s0", f"zones/{ZONE}/disks/sk-demo-floor-s0-data"):
        status, said = call(world, "DELETE", path)
        assert status == 403 and said.endswith(f"permission for 'projects/local/{path}'")
    assert call(world, "POST", f"zones/{ZONE}/instances/{VM}/setMetadata", {})[0] == 404, "its own, were it there"
    assert call(world, "POST", f"zones/{ZONE}/instances/{VM}/stop")[0] == 403, "no right that no verb needs"


def test_a_public_address_needs_a_right_of_its_own() -> None:
    """The right is declared where ``network.public_ip`` is set, and only there."""
    plane = Plane(Time())
    try:
        account = plane.declare_identities("demo")
        body = {
            "name": VM,
            "machineType": f"zones/{ZONE}/machineTypes/e2-standard-4",
            "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "10"}}],
            "networkInterfaces": [{"network": "global/networks/default"}],
        }
        api, path = adapter_api(Line(plane), account), f"projects/local/zones/{ZONE}/instances"
        card = {"network": "global/networks/default", "accessConfigs": [{"type": "ONE_TO_ONE_NAT"}]}
        refused = api.call("POST", path, 10.0, {}, {**body, "networkInterfaces": [card]})
        assert refused.status == 403 and b"compute.subnetworks.useExternalIp" in refused.body
        assert api.call("POST", path, 10.0, {}, body).status == 200
    finally:
        plane.close()
