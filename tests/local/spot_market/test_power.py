"""The life of machines and disks: stockouts, preemptions, host errors, attachments."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.local.core import procs
from spotkeeper.local.core.views import VmView
from spotkeeper.local.lifecycle.cloud import LocalCloud
from tests.local.client import SPOT, Api, RefusedError, eventually

ZONE = "us-central1-a"
INSTANCES = f"zones/{ZONE}/instances"
DISKS = f"zones/{ZONE}/disks"
# Prints the guest's events on its serial console; a child that leaves its group and session stays in the VM.
SCRIPT = """
trap 'echo saw SIGTERM; exit 0' TERM
setsid --fork bash -c 'cd /; exec sleep 4321'
echo up at $SPOTKEEPER_ADDRESS
while :; do sleep 0.02; done
"""


def spot(api: Api, name: str, **body: Any) -> None:
    api.ok(api.vm(name, script=SCRIPT, scheduling=SPOT, **body))


def view(cloud: LocalCloud, name: str) -> VmView:
    return next(vm for vm in cloud.status().vms if vm.name == name)


def serial(vm: VmView) -> str:
    return Path(vm.serial).read_text()


def up(cloud: LocalCloud, name: str) -> VmView:
    """Wait until its startup script runs."""
    vm = view(cloud, name)
    assert eventually(lambda: f"up at {vm.address}" in serial(vm)), serial(vm)
    return vm


def processes(cloud: LocalCloud, vm: VmView) -> set[int]:
    return procs.marked(procs.mark(procs.VM, f"{cloud.config.uid}-{vm.id}"))


def data_disk(api: Api, name: str, zone: str = ZONE) -> None:
    api.ok(api.post(f"zones/{zone}/disks", {"name": name, "sizeGb": "20", "labels": {"sk-stack": "test"}}))


def attach(api: Api, vm: str, disk: str) -> Any:
    body = {"source": f"projects/local/{DISKS}/{disk}", "deviceName": "sk-data", "autoDelete": False}
    return api.post(f"{INSTANCES}/{vm}/attachDisk", body)


def device(vm: VmView) -> Path:
    return Path(vm.root) / "dev/disk/by-id/google-sk-data"


def test_a_preemption_with_notice_sets_metadata_then_sends_acpi_off(api: Api, cloud: LocalCloud) -> None:
    spot(api, "noticed", metadata={"items": [
        {"key": "startup-script", "value": SCRIPT},
        {"key": "shutdown-script", "value": "echo shutdown script ran; ls /proc/self >/dev/null"},
    ]})  # fmt: skip
    vm = up(cloud, "noticed")
    assert len(processes(cloud, vm)) >= 3
    before = cloud.clock.now()
    cloud.preempt("noticed")
    noticed = view(cloud, "noticed")
    assert (noticed.status, noticed.preempted) == ("RUNNING", True)
    assert noticed.notice_until == pytest.approx(before + 120, abs=15)
    assert api.gone(f"{INSTANCES}/noticed")
    assert cloud.clock.now() - before >= 120  # it had its notice
    said = serial(vm)
    assert said.index("shutdown script ran") < said.index("saw SIGTERM") < said.index("] off")
    assert not processes(cloud, vm)
    assert not Path(vm.root).exists()
    kinds = [operation["operationType"] for operation in api.get(f"zones/{ZONE}/operations")["items"]]
    assert "compute.instances.preempted" in kinds


def test_a_guest_that_does_not_shut_down_is_killed(api: Api, cloud: LocalCloud) -> None:
    stubborn = "trap '' TERM; echo up at $SPOTKEEPER_ADDRESS; while :; do sleep 0.05; done"
    scheduling = {key: value for key, value in SPOT.items() if key != "preemptionNoticeDuration"}
    hang = {"key": "shutdown-script", "value": "trap '' TERM; sleep 600"}
    items = [{"key": "startup-script", "value": stubborn}, hang]
    api.ok(api.vm("stubborn", scheduling=scheduling, metadata={"items": items}))
    vm = up(cloud, "stubborn")
    before = cloud.clock.now()
    cloud.preempt("stubborn")  # no notice duration: ACPI off at once
    assert api.gone(f"{INSTANCES}/stubborn")
    assert 30 <= cloud.clock.now() - before < 100
    assert not processes(cloud, vm)


def test_an_unannounced_loss_leaves_no_process_and_frees_the_disk(api: Api, cloud: LocalCloud) -> None:
    data_disk(api, "kept")
    spot(api, "lost")
    vm = up(cloud, "lost")
    api.ok(attach(api, "lost", "kept"))
    (device(vm) / "checkpoint").write_text("42")
    cloud.preempt("lost", notice=False)
    assert not processes(cloud, vm)  # before anything else is done
    assert "saw SIGTERM" not in serial(vm)
    assert api.gone(f"{INSTANCES}/lost")
    assert "users" not in api.get(f"{DISKS}/kept")
    spot(api, "next")
    replacement = up(cloud, "next")
    api.ok(attach(api, "next", "kept"))
    assert (device(replacement) / "checkpoint").read_text() == "42"
    api.ok(api.delete(f"{INSTANCES}/next"))
    assert api.exists(f"{DISKS}/kept")  # autoDelete false
    assert not api.exists(f"{DISKS}/next")  # the boot disk went with its VM
    api.ok(api.delete(f"{DISKS}/kept"))


def both_attach(api: Api, disk: str, *vms: str) -> list[Any]:
    """Two operations, both accepted before either begins; repeated where a busy machine is too slow for that."""
    for _ in range(20):
        with ThreadPoolExecutor() as pool:
            asked = [(vm, pool.submit(attach, api, vm, disk)) for vm in vms]
        taken = [(vm, call.result()) for vm, call in asked if call.exception() is None]
        if len(taken) == len(vms):
            return [operation for _, operation in taken]
        for vm, operation in taken:
            assert "error" not in api.done(operation)
            api.ok(api.post(f"{INSTANCES}/{vm}/detachDisk", deviceName="sk-data"))
    raise AssertionError("never were both accepted")


def test_a_disk_is_attached_to_one_vm(api: Api, cloud: LocalCloud) -> None:
    data_disk(api, "single")
    for name in ("one", "two"):
        spot(api, name)
    first, second = both_attach(api, "single", "one", "two")
    first, second = sorted((api.done(first), api.done(second)), key=lambda operation: "error" in operation)
    assert "error" not in first
    assert second["error"]["errors"][0]["code"] == "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE"
    assert second["httpErrorStatusCode"] == 400
    won, lost = (operation["targetLink"].rsplit("/", 1)[-1] for operation in (first, second))
    for refusal in (lambda: attach(api, lost, "single"), lambda: api.delete(f"{DISKS}/single")):
        with pytest.raises(RefusedError, match="400 resourceInUseByAnotherResource"):
            refusal()
    holder = up(cloud, won)
    old = device(holder).resolve()
    (old / "mine").write_text("x")
    api.ok(api.post(f"{INSTANCES}/{won}/detachDisk", deviceName="sk-data"))
    assert not device(holder).is_symlink()
    assert not old.exists()  # the path of the earlier attachment is dead
    api.ok(attach(api, lost, "single"))
    assert (device(up(cloud, lost)) / "mine").exists()
    for name in ("one", "two"):
        api.ok(api.delete(f"{INSTANCES}/{name}"))
    api.ok(api.delete(f"{DISKS}/single"))


def test_a_disk_stays_attached_until_its_vm_has_ended(api: Api, cloud: LocalCloud) -> None:
    data_disk(api, "slow")
    slow = {"key": "shutdown-script", "value": "sleep 0.25"}
    spot(api, "dying", metadata={"items": [{"key": "startup-script", "value": SCRIPT}, slow]})
    spot(api, "waiting")
    vm = up(cloud, "dying")
    api.ok(attach(api, "dying", "slow"))
    operation = api.delete(f"{INSTANCES}/{vm.id}")
    assert eventually(lambda: api.status(f"{INSTANCES}/dying") == "STOPPING")
    with pytest.raises(RefusedError, match="400 resourceInUseByAnotherResource"):
        attach(api, "waiting", "slow")
    api.ok(operation)
    api.ok(attach(api, "waiting", "slow"))
    api.ok(api.delete(f"{INSTANCES}/waiting"))
    api.ok(api.delete(f"{DISKS}/slow"))


def test_a_stockout_lists_the_vm_for_seconds_and_then_fails_in_the_operation(api: Api, cloud: LocalCloud) -> None:
    cloud.set_capacity(ZONE, 0)
    try:
        operation = api.vm("nowhere", scheduling=SPOT)
        assert api.status(f"{INSTANCES}/nowhere") in ("PROVISIONING", "STAGING")
        seen = []
        path = f"zones/{ZONE}/operations/{operation['name']}"
        while (now := api.get(path))["status"] != "DONE":
            seen.append((now["status"], "error" in now))
        assert ("RUNNING", True) in seen  # visible before its end
        assert now["error"]["errors"][0]["code"] == "ZONE_RESOURCE_POOL_EXHAUSTED"
        assert now["error"]["errors"][0]["errorDetails"][0]["errorInfo"]["reason"] == "stockout"
        assert now["httpErrorStatusCode"] == 503
        assert not api.exists(f"{INSTANCES}/nowhere")
        assert not api.exists(f"{DISKS}/nowhere")
        api.ok(api.vm("od-has-room", scheduling={"provisioningModel": "STANDARD"}))
        api.ok(api.delete(f"{INSTANCES}/od-has-room"))
    finally:
        cloud.set_capacity(ZONE, 4)


def test_falling_capacity_preempts_only_the_excess(api: Api, cloud: LocalCloud) -> None:
    zone = "us-central1-c"
    for name in ("c-1", "c-2", "c-3"):
        api.ok(api.vm(name, zone, scheduling=SPOT))
    cloud.set_capacity(zone, 1)
    doomed = [vm.name for vm in cloud.status().vms if vm.zone == zone and vm.preempted]
    assert len(doomed) == 2
    cloud.set_capacity(zone, 1)  # VMs under notice do not count
    assert [vm.name for vm in cloud.status().vms if vm.zone == zone and vm.preempted] == doomed
    assert eventually(lambda: [vm.name not in doomed for vm in cloud.status().vms if vm.zone == zone] == [True])
    cloud.set_capacity(zone, 4)
    for vm in cloud.status().vms:
        if vm.zone == zone:
            api.ok(api.delete(f"zones/{zone}/instances/{vm.name}"))


def test_a_vm_deleted_while_it_is_created_never_runs(api: Api, cloud: LocalCloud) -> None:
    insert = api.vm("brief", scheduling=SPOT)
    api.ok(api.delete(f"{INSTANCES}/brief"))
    assert api.done(insert)["error"]["errors"]
    assert not api.exists(f"{INSTANCES}/brief")


def test_a_standard_vm_restarts_after_a_host_error(api: Api, cloud: LocalCloud) -> None:
    data_disk(api, "floor")
    attached = {"source": f"projects/local/{DISKS}/floor", "deviceName": "sk-data", "mode": "READ_WRITE"}
    boot = {"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "10"}}
    api.ok(api.vm("static", script=SCRIPT, disks=[boot, attached]))
    vm = up(cloud, "static")
    (Path(vm.root) / "var/lib/kept").write_text("root disk")
    (device(vm) / "kept").write_text("data disk")
    cloud.preempt("static", notice=False)
    assert not processes(cloud, vm)
    assert api.status(f"{INSTANCES}/static") == "REPAIRING"
    assert eventually(lambda: serial(vm).count("up at") == 2)
    again = view(cloud, "static")
    assert (again.id, again.status, again.pid != vm.pid) == (vm.id, "RUNNING", True)
    assert (Path(vm.root) / "var/lib/kept").exists() and (device(vm) / "kept").exists()
    api.ok(api.delete(f"{INSTANCES}/static"))
    api.ok(api.delete(f"{DISKS}/floor"))


def test_a_guest_that_powers_itself_off_is_terminated_and_keeps_its_name(api: Api, cloud: LocalCloud) -> None:
    api.ok(api.vm("leaver", script="kill -TERM $SPOTKEEPER_INIT_PID; sleep 100", scheduling=SPOT))
    assert eventually(lambda: api.status(f"{INSTANCES}/leaver") == "TERMINATED")
    with pytest.raises(RefusedError, match="409 alreadyExists"):
        api.vm("leaver")
    api.ok(api.post(f"{INSTANCES}/leaver/start"))
    assert api.status(f"{INSTANCES}/leaver") in ("RUNNING", "STOPPING", "TERMINATED")
    api.ok(api.delete(f"{INSTANCES}/leaver"))


def test_a_killed_init_ends_the_whole_vm(api: Api, cloud: LocalCloud) -> None:
    spot(api, "killed")
    vm = up(cloud, "killed")
    os.kill(vm.pid, 9)
    assert api.gone(f"{INSTANCES}/killed")
    assert not processes(cloud, vm)


def test_a_process_that_hides_its_environment_dies_with_its_vm(api: Api, cloud: LocalCloud) -> None:
    hide = "echo up at $SPOTKEEPER_ADDRESS; env -i /bin/sleep 987654 & sleep 1000"
    api.ok(api.vm("hider", script=hide, scheduling=SPOT))
    vm = up(cloud, "hider")
    assert eventually(lambda: _sleepers("987654"))
    cloud.preempt("hider", notice=False)
    assert not _sleepers("987654")
    assert api.gone(f"{INSTANCES}/{vm.name}")


def test_max_run_duration_ends_with_the_termination_action(api: Api, cloud: LocalCloud) -> None:
    began = cloud.clock.now()
    api.ok(api.vm("bounded", scheduling=SPOT | {"maxRunDuration": {"seconds": "60"}}))
    told = api.get(f"{INSTANCES}/bounded")
    ends = datetime.fromisoformat(told["resourceStatus"]["scheduling"]["terminationTimestamp"]).timestamp()
    assert ends - datetime.fromisoformat(told["lastStartTimestamp"]).timestamp() == pytest.approx(60, abs=0.01)
    assert api.gone(f"{INSTANCES}/bounded")
    assert cloud.clock.now() - began >= 60
    assert "bounded" not in {vm.name for vm in cloud.status().vms}


def test_a_snapshot_copies_a_disk_to_another_zone(api: Api, cloud: LocalCloud) -> None:
    data_disk(api, "here")
    spot(api, "writer")
    vm = up(cloud, "writer")
    api.ok(attach(api, "writer", "here"))
    (device(vm) / "state").write_text("step 7")
    api.ok(api.delete(f"{INSTANCES}/writer"))
    api.ok(api.post(f"{DISKS}/here/createSnapshot", {"name": "snap"}))
    shot = api.get("global/snapshots/snap")
    assert (shot["status"], shot["diskSizeGb"]) == ("READY", "20")
    body = {"name": "there", "sourceSnapshot": "global/snapshots/snap"}
    operation = api.post("zones/us-central1-b/disks", body)
    assert api.status("zones/us-central1-b/disks/there") == "CREATING"
    api.ok(operation)
    api.ok(api.vm("reader", "us-central1-b", script=SCRIPT, scheduling=SPOT))
    source = "projects/local/zones/us-central1-b/disks/there"
    path = "zones/us-central1-b/instances/reader"
    with pytest.raises(RefusedError, match="zone"):
        api.post(f"{path}/attachDisk", {"source": f"projects/local/{DISKS}/here"})
    api.ok(api.post(f"{path}/attachDisk", {"source": source, "deviceName": "sk-data"}))
    assert (device(up(cloud, "reader")) / "state").read_text() == "step 7"
    api.ok(api.delete(path))
    for gone in ("zones/us-central1-b/disks/there", f"{DISKS}/here", "global/snapshots/snap"):
        api.ok(api.delete(gone))


def test_simulated_maintenance_preempts(api: Api, cloud: LocalCloud) -> None:
    spot(api, "drilled")
    api.ok(api.post(f"{INSTANCES}/drilled/simulateMaintenanceEvent"))
    assert view(cloud, "drilled").preempted
    assert api.gone(f"{INSTANCES}/drilled")


def test_the_bill_grows_with_time_and_spot_is_cheaper(api: Api, cloud: LocalCloud) -> None:
    before = cloud.bill().bill
    api.ok(api.vm("od-billed"))
    spot(api, "spot-billed")
    began = cloud.clock.now()
    time.sleep(0.3)
    hours = (cloud.clock.now() - began) / 3600
    after = cloud.bill().bill
    assert after.node_hours - before.node_hours >= 2 * hours
    assert 0 < after.spent - before.spent < after.on_demand_only - before.on_demand_only
    for name in ("od-billed", "spot-billed"):
        api.ok(api.delete(f"{INSTANCES}/{name}"))
    ended = cloud.bill()
    lines = {line.vm.rsplit("/", 1)[-1]: line for line in ended.lines}
    for name, price in (("od-billed", 0.134), ("spot-billed", 0.134 * 0.23)):
        line = lines[name]
        assert line.end is not None
        assert line.spot is (name == "spot-billed") and price > 0
    assert cloud.bill().bill.spent == ended.bill.spent  # the bill stands still


def test_nothing_is_left_after_the_tests(api: Api, cloud: LocalCloud) -> None:
    left = cloud.left_over()
    assert (left.vms, left.disks, left.processes) == (0, 0, 0)


def _sleepers(word: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if argv[-2:-1] == [word.encode()] and b"sleep" in argv[0]:
            found.append(int(path.parent.name))
    return found
