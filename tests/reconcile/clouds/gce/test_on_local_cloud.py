"""The adapter against the one-machine cloud's control plane: a machine's whole life, told in our words."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import requests

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
    Listing,
    ResultKind,
    Vm,
    VmStatus,
)
from spotkeeper.contract.stack import Model, PoolState, Price, StackState
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.reconcile.clouds.gce.cloud import Gce, open_gce

A, B = "us-central1-a", "us-central1-b"
JOB, UID = "abcd2345", str(uuid.uuid4())
ON_DEMAND = "projects/local/regions/us-central1/instanceTemplates/sk-demo-p-od"
TEMPLATE = "projects/local/regions/us-central1/instanceTemplates/sk-demo-p-spot"
POOL = PoolState(
    name="p",
    kind="spot",
    machine_type="e2-standard-4",
    zones=(A, B),
    nproc=1,
    max_machines=8,
    max_on_demand=0,
    disk_gb=10,
    disk_type="pd-balanced",
    prices={A: Price(1.0, 0.3), B: Price(1.0, 0.3)},
    templates={"spot": TEMPLATE},
)
STACK = StackState("demo", "gcp", "local", "us-central1", "b", (POOL,))
PROPERTIES = {
    "machineType": "e2-standard-4",
    "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "10"}}],
    "networkInterfaces": [{"network": "global/networks/default"}],
    "metadata": {"items": [{"key": "startup-script", "value": "sleep 1000"}]},
    "scheduling": {
        "provisioningModel": "SPOT",
        "preemptible": True,
        "automaticRestart": False,
        "onHostMaintenance": "TERMINATE",
        "instanceTerminationAction": "DELETE",
    },
}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloud]:
    folder: Path = tmp_path_factory.mktemp("cloud")
    running = LocalCloud.up(folder, scale=100)
    try:
        for zone in (A, B):
            running.set_capacity(zone, 4)
        body = {"name": TEMPLATE.rpartition("/")[2], "properties": PROPERTIES}
        url = f"{running.compute_endpoint}/{TEMPLATE.rpartition('/')[0]}"
        answer = requests.post(url, json=body, headers=running.headers, timeout=10)
        assert answer.status_code == 200, answer.text
        yield running
    finally:
        running.down(purge=True)


@pytest.fixture
def gce(cloud: LocalCloud) -> Gce:
    return open_gce(STACK, cloud.clock, cloud.compute_endpoint, cloud.token)


def until(gce: Gce, true: Callable[[Listing], bool], seconds: float = 20.0) -> Listing:
    """Look until it holds: what is observed ends by itself, elsewhere."""
    ends = time.monotonic() + seconds
    while True:
        listing = gce.list("demo")
        if true(listing):
            return listing
        assert time.monotonic() < ends, listing
        time.sleep(0.05)


def insert(node: int, attempt: int = 1, zone: str = A) -> InsertVm:
    return InsertVm(JOB, UID, node, attempt, "p", zone, Model.SPOT)


def vm_of(listing: Listing, node: int, attempt: int = 1) -> Vm | None:
    return next((vm for vm in listing.vms if (vm.node, vm.attempt) == (node, attempt)), None)


def running(node: int, attempt: int = 1) -> Callable[[Listing], bool]:
    def true(listing: Listing) -> bool:
        vm = vm_of(listing, node, attempt)
        return vm is not None and vm.status is VmStatus.RUNNING

    return true


def made(gce: Gce, action: Action) -> ResultKind:
    return gce.perform(action, 10).kind


def test_a_machine_and_its_disk_are_created_and_deleted(gce: Gce) -> None:
    assert gce.list("demo").answered >= {A, B}
    assert made(gce, insert(0)) is ResultKind.ACCEPTED
    assert made(gce, insert(0)) is ResultKind.ACCEPTED, "repeated with its key"
    assert made(gce, CreateDisk(JOB, UID, 0, 1, "p", A)) is ResultKind.ACCEPTED
    listing = until(gce, lambda seen: running(0)(seen) and any(disk.ready for disk in seen.disks))
    vm = vm_of(listing, 0)
    assert vm is not None and vm.uid.isdigit() and vm.address and vm.created > 0
    assert (vm.model, vm.pool, vm.job) == (Model.SPOT, "p", JOB)

    disk = names.disk_name("demo", JOB, 0, 1)
    assert made(gce, AttachDisk(disk, vm.name, vm.uid, A)) is ResultKind.ACCEPTED
    listing = until(gce, lambda seen: any(d.users for d in seen.disks))
    assert listing.disks[0].users == (vm.name,)
    assert made(gce, DeleteDisk(disk, A)) is ResultKind.IN_USE

    assert made(gce, insert(1)) is ResultKind.ACCEPTED
    other = vm_of(until(gce, running(1)), 1)
    assert other is not None
    assert made(gce, AttachDisk(disk, other.name, other.uid, A)) is ResultKind.IN_USE, "one writer"

    assert made(gce, DetachDisk(disk, vm.name, vm.uid, A)) is ResultKind.ACCEPTED
    until(gce, lambda seen: not any(d.users for d in seen.disks))
    assert made(gce, DetachDisk(disk, vm.name, vm.uid, A)) is ResultKind.ACCEPTED, "not attached any more"

    for one in (vm, other):
        assert made(gce, DeleteVm(one.name, one.uid, A)) is ResultKind.ACCEPTED
    until(gce, lambda seen: not seen.vms)
    assert made(gce, DeleteVm(vm.name, vm.uid, A)) is ResultKind.ACCEPTED, "gone"
    assert made(gce, insert(0)) is ResultKind.DEAD_KEY, "its key is used up"
    assert made(gce, DeleteDisk(disk, A)) is ResultKind.ACCEPTED
    until(gce, lambda seen: not seen.disks)
    assert made(gce, CreateDisk(JOB, UID, 0, 1, "p", A)) is ResultKind.DEAD_KEY


def test_a_disk_moves_zone_by_snapshot(gce: Gce) -> None:
    assert made(gce, CreateDisk(JOB, UID, 5, 1, "p", A)) is ResultKind.ACCEPTED
    until(gce, lambda seen: any(disk.ready for disk in seen.disks))
    assert made(gce, CreateSnapshot(JOB, UID, 5, 1, A, 2)) is ResultKind.ACCEPTED
    listing = until(gce, lambda seen: any(snapshot.ready for snapshot in seen.snapshots))
    (snapshot,) = listing.snapshots
    assert (snapshot.job, snapshot.node, snapshot.number) == (JOB, 5, 2)
    assert made(gce, CreateDisk(JOB, UID, 5, 2, "p", B, snapshot=snapshot.name)) is ResultKind.ACCEPTED
    until(gce, lambda seen: any(disk.ready and disk.zone == B for disk in seen.disks))
    assert made(gce, DeleteDisk(names.disk_name("demo", JOB, 5, 1), A)) is ResultKind.ACCEPTED
    assert made(gce, DeleteDisk(names.disk_name("demo", JOB, 5, 2), B)) is ResultKind.ACCEPTED
    assert made(gce, DeleteSnapshot(snapshot.name)) is ResultKind.ACCEPTED
    until(gce, lambda seen: not seen.disks and not seen.snapshots)


def test_a_stockout_is_found_by_its_key(gce: Gce, cloud: LocalCloud) -> None:
    cloud.set_capacity(B, 0)
    action = insert(7, zone=B)
    assert made(gce, action) in (ResultKind.ACCEPTED, ResultKind.CAPACITY)
    listing = until(gce, lambda seen: bool(seen.results))
    failed = [result for result in listing.results if result.kind is ResultKind.CAPACITY]
    assert [result.action for result in failed] == [action]
    until(gce, lambda seen: vm_of(seen, 7) is None)
    elsewhere = open_gce(STACK, cloud.clock, cloud.compute_endpoint, cloud.token).list("demo")
    (known,) = (result.action for result in elsewhere.results)
    assert isinstance(known, InsertVm)
    assert (known.job, known.node, known.attempt, known.zone) == (JOB, 7, 1, B), "another process learns it too"
    cloud.set_capacity(B, 4)


def test_a_partitioned_zone_did_not_answer(gce: Gce, cloud: LocalCloud) -> None:
    assert made(gce, insert(8)) is ResultKind.ACCEPTED
    until(gce, running(8))
    cloud.partition(B)
    try:
        listing = gce.list("demo")
        assert A in listing.answered and B not in listing.answered
        assert vm_of(listing, 8) is not None
        assert made(gce, insert(9, zone=B)) is ResultKind.AMBIGUOUS
    finally:
        cloud.partition(B, False)
    listing = gce.list("demo")
    assert listing.answered >= {A, B}
    vm = vm_of(listing, 8)
    assert vm is not None
    assert made(gce, DeleteVm(vm.name, vm.uid, A)) is ResultKind.ACCEPTED
    until(gce, lambda seen: not seen.vms)


def test_a_preempted_machine_is_listed_stopping_and_its_disk_stays(gce: Gce, cloud: LocalCloud) -> None:
    assert made(gce, insert(3)) is ResultKind.ACCEPTED
    assert made(gce, CreateDisk(JOB, UID, 3, 1, "p", A)) is ResultKind.ACCEPTED
    listing = until(gce, lambda seen: running(3)(seen) and any(disk.ready for disk in seen.disks))
    vm = vm_of(listing, 3)
    assert vm is not None
    disk = names.disk_name("demo", JOB, 3, 1)
    made(gce, AttachDisk(disk, vm.name, vm.uid, A))
    until(gce, lambda seen: any(d.users for d in seen.disks))
    cloud.preempt(vm.name, notice=False)
    listing = until(gce, lambda seen: vm_of(seen, 3) is None and not any(d.users for d in seen.disks))
    assert [d.name for d in listing.disks] == [disk]
    assert made(gce, DeleteDisk(disk, A)) is ResultKind.ACCEPTED


def test_a_reservation_keeps_machines_for_those_that_name_it(cloud: LocalCloud) -> None:
    """The zone has no on-demand machine left, but the reservation has one."""
    link = ON_DEMAND.rpartition("/")
    standard = {**PROPERTIES, "scheduling": {"provisioningModel": "STANDARD"}}
    reserved = {"count": "1", "instanceProperties": {"machineType": "e2-standard-4"}}
    for url, body in (
        (link[0], {"name": link[2], "properties": standard}),
        (
            f"projects/local/zones/{A}/reservations",
            {"name": "res", "specificReservation": reserved, "specificReservationRequired": True},
        ),
    ):
        answer = requests.post(f"{cloud.compute_endpoint}/{url}", json=body, headers=cloud.headers, timeout=10)
        assert answer.status_code == 200, answer.text
    pool = msgspec.structs.replace(POOL, templates={"on-demand": ON_DEMAND})
    stack = msgspec.structs.replace(STACK, pools=(pool,))
    gce = open_gce(stack, cloud.clock, cloud.compute_endpoint, cloud.token)
    cloud.set_capacity(A, 0, model="on-demand")
    try:
        first, second = (InsertVm(JOB, UID, 20, n, "p", A, Model.RESERVED, "res") for n in (1, 2))
        assert made(gce, first) is ResultKind.ACCEPTED
        vm = vm_of(until(gce, running(20)), 20)
        assert vm is not None and (vm.model, vm.reservation) == (Model.RESERVED, "res")
        (shown,) = (one for one in cloud.status().vms if one.name == vm.name)
        assert (shown.model, shown.price) == ("reserved", 0.0)

        assert made(gce, second) in (ResultKind.ACCEPTED, ResultKind.CAPACITY)
        listing = until(gce, lambda seen: any(one.action == second for one in seen.results))
        assert {one.kind for one in listing.results if one.action == second} == {ResultKind.CAPACITY}
        missing = gce.perform(msgspec.structs.replace(second, attempt=3, reservation="none"), 10)
        assert missing.kind is ResultKind.PERMANENT and "do not exist" in missing.detail
    finally:
        cloud.set_capacity(A, None, model="on-demand")
    assert made(gce, DeleteVm(vm.name, vm.uid, A)) is ResultKind.ACCEPTED
    until(gce, lambda seen: not seen.vms)


def test_quota_and_wrong_templates(gce: Gce, cloud: LocalCloud) -> None:
    assert (
        made(open_gce(_with_template("none"), cloud.clock, cloud.compute_endpoint, cloud.token), insert(4))
        is ResultKind.PERMANENT
    )
    cloud.set_quota(A, 0)
    try:
        assert made(gce, insert(4, attempt=2)) is ResultKind.QUOTA
    finally:
        cloud.set_quota(A, 1000)


def _with_template(name: str) -> StackState:
    pool = msgspec.structs.replace(POOL, templates={"spot": TEMPLATE.replace("sk-demo-p-spot", name)})
    return msgspec.structs.replace(STACK, pools=(pool,))
