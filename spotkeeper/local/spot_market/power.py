"""Runs VMs, and stops them for any reason: a deletion, a stop, a preemption, an expiry, a host error.

    RUNNING -> STOPPING -> (gone) | TERMINATED
    RUNNING -> REPAIRING -> RUNNING           host error with automaticRestart

``Ending`` is the reason why a VM leaves RUNNING, and decides whether the VM is deleted. The VM's disks are free only
after its last process has ended. Timers and ends of processes trigger all steps, without polling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotkeeper.local.compute.attachments import Attachments
from spotkeeper.local.compute.operations import Operations
from spotkeeper.local.core import errors
from spotkeeper.local.core.rest import parse_ref, timestamp
from spotkeeper.local.core.schema import Instance, ResourceStatus, ScheduleStatus, Scheduling
from spotkeeper.local.core.vm import Ending, LocalVm, VmTable
from spotkeeper.local.core.world import World
from spotkeeper.local.machines.host import Host
from spotkeeper.local.spot_market.bill import Billing, Line

EVENT_S = 3.0  # an audit log entry takes seconds to arrive


@dataclass
class Power:
    _world: World
    _operations: Operations
    _host: Host
    _billing: Billing
    _machines: VmTable
    _attachments: Attachments
    on_preempted: Callable[[LocalVm], None] = lambda _: None

    def __post_init__(self) -> None:
        self._world.handlers |= {
            "vm.acpi": self._press_power,
            "vm.cut": self._cut_power,
            "vm.gone": self._gone,
            "vm.expire": self._expire,
            "vm.restart": self._restart,
            "vm.event": self._report_preempted,
            "vm.host": self._host_fails,
        }

    # On

    def run(self, vm: LocalVm) -> None:
        now = self._world.now()
        vm = self._machines.show(
            vm, "RUNNING", last_start_timestamp=timestamp(now), resource_status=_until(vm.scheduling, now)
        )
        vm = self._machines.put(vm, boots=vm.boots + 1, pid=0, started=0)
        reserved = vm.reservation is not None
        self._billing.begin(Line(vm.path, vm.id, vm.zone, vm.machine, vm.spot, now, reserved=reserved))
        limit = vm.scheduling.max_run_duration
        if limit is not None:
            self._world.state.drop_timers("vm.expire", vm.path)
            self._world.soon(limit.seconds, "vm.expire", vm.path)
        self._world.state.after(lambda: self._power_on(vm.path))

    def _power_on(self, path: str) -> None:
        vm = self._machines.find(path)
        if vm is None or vm.wire.status != "RUNNING" or vm.pid:
            return
        pid, started = self._host.power_on(vm.id, vm.name, vm.address)
        with self._world.state.transaction():
            self._machines.put(vm, pid=pid, started=started)
        self._watch(vm.path, pid, started)

    def _watch(self, path: str, pid: int, started: int) -> None:
        self._host.watch(pid, started, lambda: self._guest_ended(path, pid))

    def resume(self) -> None:
        """After the control plane's restart, adopt each VM that still runs, and handle the end of each other VM."""
        for vm in self._machines.list():
            self._machines.sites.open(vm.path, vm.address)
            if vm.pid:
                self._watch(vm.path, vm.pid, vm.started)
            elif vm.wire.status == "RUNNING":
                self._resume_boot(vm)

    def _resume_boot(self, vm: LocalVm) -> None:
        """Resume a VM that is RUNNING without a recorded pid: find its init if it runs already, else start it."""
        found = self._host.find_init(vm.id)
        if found is None:
            self._power_on(vm.path)
            return
        with self._world.state.transaction():
            self._machines.put(vm, pid=found[0], started=found[1])
        self._watch(vm.path, *found)

    # Off

    def leave(self, vm: LocalVm, why: Ending, op_path: str = "") -> None:
        """Begin to stop a VM for the reason ``why``. ``op_path``: an operation that ends together with the stop.

        If the VM is already stopping, its first reason remains; only DELETE replaces the first reason.
        """
        ending = why if why is Ending.DELETE or vm.ending is Ending.NONE else vm.ending
        vm = self._machines.put(vm, ops=(*vm.ops, op_path) if op_path else vm.ops, ending=ending)
        if vm.wire.status == "RUNNING":
            self._power_off(vm)
        elif vm.wire.status == "TERMINATED":
            self._world.soon(self._world.timing.delete_s, "vm.gone", vm.path)
        elif vm.wire.status != "STOPPING":
            self._off(vm)  # nothing has booted yet

    def _power_off(self, vm: LocalVm) -> None:
        """Send ACPI off now; cut the power after the guest's shutdown period."""
        self._machines.show(vm, "STOPPING")
        timing = self._world.timing
        limit = timing.spot_off_s if vm.spot else timing.standard_off_s
        for kind in ("vm.acpi", "vm.cut", "vm.expire"):
            self._world.state.drop_timers(kind, vm.path)
        self._world.soon(limit, "vm.cut", vm.path)
        self._world.state.after(lambda: self._host.press_power(vm.pid, vm.started))

    def preempt(self, vm: LocalVm, *, notice: bool = True) -> None:
        """Preempt a spot VM: after its notice it has 30 s to shut down. ``notice=False``: it is killed at once."""
        if vm.preempted or vm.ending not in (Ending.NONE, Ending.STOCKOUT):
            return
        if vm.wire.status != "RUNNING":
            self.leave(vm, Ending.PREEMPT)
            return
        if not notice:
            self.lose(vm)
            return
        wait = vm.scheduling.preemption_notice_duration
        wait_s = float(wait.seconds) if wait else 0.0
        self._machines.put(vm, preempted=True, notice_until=self._world.now() + wait_s)
        self._world.soon(wait_s, "vm.acpi", vm.path)

    def _press_power(self, path: str) -> None:
        vm = self._machines.find(path)
        if vm is None or vm.wire.status != "RUNNING" or not vm.preempted:
            return
        vm = self._machines.put(vm, ending=Ending.PREEMPT)
        self._announce(vm)
        self._power_off(vm)

    def lose(self, vm: LocalVm) -> None:
        """Make the VM's host fail without notice: kill -9 of every process in the VM."""
        self._host.cut_power(vm.id, vm.pid)
        self._lost(vm)

    def _lost(self, vm: LocalVm) -> None:
        """Handle a lost VM as the provider does: preempt a spot VM, restart a standard VM with automaticRestart."""
        if vm.spot:
            vm = self._machines.put(vm, ending=Ending.PREEMPT, preempted=True)
            self._announce(vm)
            self._off(self._machines.show(vm, "STOPPING"))
        elif vm.scheduling.automatic_restart:
            self._billing.end(vm.id, preempted=False)
            self._operations.note("compute.instances.hostError", vm.ref, vm.id)
            self._machines.show(self._machines.put(vm, pid=0, started=0), "REPAIRING")
            self._world.soon(self._world.timing.host_error_s, "vm.restart", vm.path)
        else:
            vm = self._machines.put(vm, ending=Ending.CRASH)
            self._operations.note("compute.instances.hostError", vm.ref, vm.id)
            self._off(self._machines.show(vm, "STOPPING"))

    def _host_fails(self, path: str) -> None:
        vm = self._machines.find(path)
        if vm is not None and vm.wire.status == "RUNNING":
            self.lose(vm)

    def _restart(self, path: str) -> None:
        vm = self._machines.find(path)
        if vm is not None and vm.wire.status == "REPAIRING":
            self.run(self._machines.put(vm, maintenance="NONE", maintenance_at=0.0))

    def _expire(self, path: str) -> None:
        vm = self._machines.find(path)
        if vm is not None and vm.wire.status == "RUNNING":
            self.leave(vm, Ending.EXPIRE)

    def _cut_power(self, path: str) -> None:
        vm = self._machines.find(path)
        if vm is not None and vm.wire.status == "STOPPING":
            self._host.cut_power(vm.id, vm.pid)
            self._off(vm)

    def _guest_ended(self, path: str, pid: int) -> None:
        """Handle the end of a VM's init: the guest powered off, this cloud cut the power, or the init crashed."""
        with self._world.state.transaction():
            vm = self._machines.find(path)
            if vm is None or vm.pid != pid:
                return
            self._host.cut_power(vm.id, 0)  # remaining processes
            if vm.wire.status == "STOPPING":
                self._off(vm)
            elif vm.wire.status == "RUNNING" and self._host.was_clean(vm.id):
                self._off(self._machines.show(self._machines.put(vm, ending=Ending.GUEST), "STOPPING"))
            elif vm.wire.status == "RUNNING":
                self._lost(vm)

    def _off(self, vm: LocalVm) -> None:
        """Handle the end of the VM's last process: close the bill's line, and schedule the VM's removal."""
        self._billing.end(vm.id, vm.ending is Ending.PREEMPT)
        for kind in ("vm.acpi", "vm.cut", "vm.expire", "vm.stage", "vm.gone"):
            self._world.state.drop_timers(kind, vm.path)
        if vm.wire.status != "STOPPING":
            vm = self._machines.show(vm, "STOPPING")
        self._machines.put(vm, pid=0, started=0)
        self._world.soon(self._world.timing.delete_s, "vm.gone", vm.path)

    def _gone(self, path: str) -> None:
        """Delete the VM or, depending on the reason of its end, keep it TERMINATED with its disks."""
        vm = self._machines.find(path)
        if vm is None or vm.wire.status not in ("STOPPING", "TERMINATED"):
            return
        deleted = vm.ending is Ending.DELETE or (
            vm.ending in (Ending.PREEMPT, Ending.EXPIRE) and (vm.deletes_itself or vm.boots == 0)
        )
        if deleted:
            self.remove(vm)
        else:
            kept = self._machines.put(vm, ops=(), accepted=False)
            self._machines.show(kept, "TERMINATED", last_stop_timestamp=timestamp(self._world.now()))
        insert = self._operations.get(vm.insert_op)
        if insert is not None and insert.operation.status != "DONE":
            self._operations.end(insert.path, errors.failed_preempted_while_created(vm.path))
        for op in vm.ops:
            self._operations.end(op)

    def remove(self, vm: LocalVm) -> None:
        """Remove the VM and release its disks."""
        self._attachments.release(vm)
        self._machines.remove(vm)
        self._world.state.after(lambda: self._host.drop_vm(vm.id))

    def _announce(self, vm: LocalVm) -> None:
        self._operations.note("compute.instances.preempted", vm.ref, vm.id)
        self._world.soon(EVENT_S, "vm.event", f"{vm.path} {vm.id}")

    def _report_preempted(self, arg: str) -> None:
        path, _, number = arg.partition(" ")
        ref = parse_ref(path, "")
        if ref is not None:
            vm = self._machines.find(path)
            gone = LocalVm(path, ref.project, ref.place, Instance(id=int(number), name=ref.name), "")
            self.on_preempted(vm if vm is not None and vm.id == int(number) else gone)


def _until(scheduling: Scheduling, began: float) -> ResourceStatus | None:
    """Return the time, in the API's format, at which ``maxRunDuration`` ends a VM; None without it."""
    limit = scheduling.max_run_duration
    return None if limit is None else ResourceStatus(ScheduleStatus(timestamp(began + limit.seconds)))
