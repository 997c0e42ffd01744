"""What the metadata server shows of a VM or a function: a tree of plain values, from the cloud's documents. Pure."""

from __future__ import annotations

from datetime import datetime

from spotkeeper.local import catalog
from spotkeeper.local.metadata import Machine
from spotkeeper.local.paths import timestamp
from spotkeeper.local.tokens import Principal
from spotkeeper.local.vm import Vm
from spotkeeper.local.wire import JsonObject, JsonValue

NUMBER = catalog.PROJECT_NUMBER
WINDOW_S = 4 * 3600.0


def of_vm(vm: Vm) -> Machine:
    """The tree of ``computeMetadata/v1`` and the claims of ``format=full``."""
    accounts = vm.wire.service_accounts or []
    email = accounts[0].email if accounts else catalog.DEFAULT_SERVICE_ACCOUNT
    scopes = list(accounts[0].scopes) if accounts else []
    claims: JsonObject = {
        "instance_creation_timestamp": int(datetime.fromisoformat(vm.wire.creation_timestamp or "").timestamp()),
        "instance_id": str(vm.id),
        "instance_name": vm.name,
        "project_id": vm.project,
        "project_number": NUMBER,
        "zone": vm.zone,
    }
    return Machine(
        {"instance": _instance(vm, email, scopes), "project": _project(vm.project)}, Principal(email, vm.path), claims
    )


def of_function(project: str, email: str) -> Machine:
    """As on Cloud Run: identity and project, and nothing of a machine."""
    instance: JsonObject = {"id": "function", "service-accounts": _accounts(email, [])}
    return Machine({"instance": instance, "project": _project(project)}, Principal(email), None)


def _instance(vm: Vm, email: str, scopes: list[str]) -> JsonObject:
    attributes: JsonObject = dict(vm.wire.metadata.values()) if vm.wire.metadata else {}
    scheduling = vm.scheduling
    disks: list[JsonValue] = [
        {"device-name": disk.device_name, "index": disk.index or 0, "interface": "SCSI", "mode": "READ_WRITE"}
        for disk in vm.wire.disks or []
    ]
    interfaces: list[JsonValue] = [
        {"ip": vm.address, "mac": "42:01:" + vm.address.replace(".", ":"), "network": _number(interface.network)}
        for interface in vm.wire.network_interfaces or []
    ]
    return {
        "attributes": attributes,
        "cpu-platform": vm.wire.cpu_platform,
        "description": vm.wire.description or "",
        "disks": disks,
        "hostname": f"{vm.name}.{vm.zone}.c.{vm.project}.internal",
        "id": vm.id,
        "machine-type": f"projects/{NUMBER}/machineTypes/{vm.machine}",
        "maintenance-event": vm.maintenance,
        "name": vm.name,
        "network-interfaces": interfaces,
        "preempted": _flag(vm.preempted),
        "scheduling": {
            "automatic-restart": _flag(scheduling.automatic_restart),
            "on-host-maintenance": scheduling.on_host_maintenance,
            "preemptible": _flag(scheduling.preemptible),
        },
        "service-accounts": _accounts(email, scopes),
        "tags": list(vm.wire.tags.items or []) if vm.wire.tags else [],
        "upcoming-maintenance": _window(vm.maintenance_at),
        "zone": f"projects/{NUMBER}/zones/{vm.zone}",
    }


def _window(start: float) -> JsonObject:
    """As Google shows it: what begins there ends within hours, and cannot be put off."""
    if not start:
        return {}
    begins = timestamp(start)
    return {
        "can-reschedule": "false",
        "latest-window-start-time": begins,
        "maintenance-status": "PENDING",
        "type": "UNSCHEDULED",
        "window-end-time": timestamp(start + WINDOW_S),
        "window-start-time": begins,
    }


def _accounts(email: str, scopes: list[str]) -> JsonObject:
    listed: list[JsonValue] = list(scopes)
    account: JsonObject = {"aliases": ["default"], "email": email, "scopes": listed}
    return {"default": account, email: account}


def _project(project: str) -> JsonObject:
    return {"attributes": {}, "numeric-project-id": NUMBER, "project-id": project}


def _number(link: str | None) -> str:
    return f"projects/{NUMBER}/networks/{(link or 'default').rsplit('/', 1)[-1]}"


def _flag(value: bool | None) -> str:
    return "TRUE" if value else "FALSE"
