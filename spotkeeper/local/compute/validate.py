"""Checks rules of Compute Engine beyond its schema: names, labels, combinations of scheduling fields. Pure.

``pulumi preview`` does not find violations of these rules, and the real API refuses them only during ``pulumi up``. So
this cloud refuses them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core.schema import AttachedDisk, InstanceProperties, JsonObject, JsonValue, Scheduling

_MODELS = ("SPOT", "STANDARD")
_ACTIONS = ("STOP", "DELETE")
_MAINTENANCE = ("MIGRATE", "TERMINATE")
MAX_METADATA = 256 * 1024
MIN_RUN_S, MAX_RUN_S = 30, 120 * 24 * 3600
MAX_NOTICE_S = 120


def name(value: str | None, field: str = "resource.name") -> str:
    """Return a resource's name; ApiError (400) if it is missing or does not match Google's pattern."""
    if not value:
        raise errors.required(field)
    if not catalog.NAME.match(value):
        why = f"Must be a match of regex '{catalog.NAME_PATTERN}'"
        raise errors.invalid(field, value, why)
    return value


def labels(values: Mapping[str, str] | None, field: str = "resource.labels") -> None:
    if len(values or ()) > 64:
        raise errors.invalid(field, len(values or ()), "At most 64 labels.")
    for key, value in (values or {}).items():
        if not catalog.LABEL_KEY.match(key):
            why = "Label keys are lower case: a letter, then up to 62 characters of [a-z0-9_-]."
            raise errors.invalid(field, key, why)
        if not catalog.LABEL_VALUE.match(value):
            raise errors.invalid(f"{field}.{key}", value, "Label values have up to 63 characters of [a-z0-9_-].")


def scheduling(value: Scheduling | None, accelerated: bool) -> Scheduling:
    """Refuse scheduling fields that contradict ``provisioningModel``; fill in the API's defaults."""
    given = value or Scheduling()
    at = "resource.scheduling"
    _one_of(given.provisioning_model, _MODELS, f"{at}.provisioningModel")
    _one_of(given.instance_termination_action, _ACTIONS, f"{at}.instanceTerminationAction")
    _one_of(given.on_host_maintenance, _MAINTENANCE, f"{at}.onHostMaintenance")
    if given.skip_guest_os_shutdown:
        raise errors.not_built("scheduling.skipGuestOsShutdown is not supported")
    spot = given.provisioning_model == "SPOT"
    if spot:
        _spot(given, at)
    elif given.preemptible:
        raise errors.not_built("scheduling.preemptible is supported only with provisioningModel SPOT")
    elif given.preemption_notice_duration is not None:
        raise errors.invalid(f"{at}.preemptionNoticeDuration", "set", "Only for provisioningModel SPOT.")
    elif given.instance_termination_action is not None and given.max_run_duration is None:
        why = "Only valid with provisioningModel SPOT or a maxRunDuration."
        raise errors.invalid(f"{at}.instanceTerminationAction", given.instance_termination_action, why)
    _durations(given, at)
    if accelerated and not spot and given.on_host_maintenance != "TERMINATE":
        why = "Instances with guest accelerators do not support live migration."
        raise errors.invalid(f"{at}.onHostMaintenance", given.on_host_maintenance or "MIGRATE", why)
    return Scheduling(
        provisioning_model="SPOT" if spot else "STANDARD",
        preemptible=spot,
        automatic_restart=False if spot else given.automatic_restart is not False,
        on_host_maintenance="TERMINATE" if spot else given.on_host_maintenance or "MIGRATE",
        instance_termination_action=given.instance_termination_action or ("STOP" if spot else None),
        max_run_duration=given.max_run_duration,
        preemption_notice_duration=given.preemption_notice_duration,
    )


def _spot(given: Scheduling, at: str) -> None:
    if given.automatic_restart:
        raise errors.invalid(f"{at}.automaticRestart", "true", "Automatic restart must be disabled for spot VMs.")
    if given.on_host_maintenance == "MIGRATE":
        raise errors.invalid(f"{at}.onHostMaintenance", "MIGRATE", "Spot VMs must terminate on host maintenance.")
    if given.preemptible is False:
        raise errors.invalid(f"{at}.preemptible", "false", "Must be true or unset where provisioningModel is SPOT.")


def _durations(given: Scheduling, at: str) -> None:
    run = given.max_run_duration
    if run is not None and not MIN_RUN_S <= run.seconds <= MAX_RUN_S:
        why = f"Between {MIN_RUN_S} and {MAX_RUN_S} seconds."
        raise errors.invalid(f"{at}.maxRunDuration.seconds", run.seconds, why)
    notice = given.preemption_notice_duration
    if notice is not None and not 0 <= notice.seconds <= MAX_NOTICE_S:
        why = f"At most {MAX_NOTICE_S} seconds."
        raise errors.invalid(f"{at}.preemptionNoticeDuration.seconds", notice.seconds, why)


def machine_type(value: str | None) -> catalog.MachineType:
    """Find a machine type by name or URL; refuse a type that is not in the catalogue, since it may be a typo."""
    if not value:
        raise errors.required("resource.machineType")
    found = catalog.machine_type(value.rsplit("/", 1)[-1])
    if found is None:
        raise errors.invalid("resource.machineType", value, "The referenced resource does not exist.")
    return found


def properties(value: InstanceProperties, in_template: bool) -> None:
    """Check the fields that templates and instances share."""
    if in_template and "/" in (value.machine_type or ""):
        raise errors.invalid("resource.properties.machineType", value.machine_type, "Must be a name, not a URL.")
    machine_type(value.machine_type)
    labels(value.labels)
    metadata(value.metadata.values() if value.metadata else {})
    disks(value.disks or [])
    if not value.network_interfaces:
        raise errors.invalid("resource.networkInterfaces", "", "At least one network interface is required.")
    if len(value.service_accounts or ()) > 1:
        raise errors.invalid("resource.serviceAccounts", len(value.service_accounts or ()), "At most one.")


def metadata(values: Mapping[str, str]) -> None:
    for key, value in values.items():
        if len(value.encode()) > MAX_METADATA:
            raise errors.invalid("resource.metadata", key, f"Value is longer than {MAX_METADATA} bytes.")


def disks(values: Iterable[AttachedDisk]) -> None:
    listed = list(values)
    if not listed or not listed[0].boot or any(disk.boot for disk in listed[1:]):
        raise errors.invalid("resource.disks", "", "The first disk, and no other, must be a boot disk.")
    for index, disk in enumerate(listed):
        attached_disk(disk, f"resource.disks[{index}]")


def attached_disk(disk: AttachedDisk, at: str) -> None:
    _one_of(disk.mode, ("READ_WRITE", "READ_ONLY"), f"{at}.mode")
    _one_of(disk.type, ("PERSISTENT", "SCRATCH"), f"{at}.type")
    if disk.mode == "READ_ONLY" or disk.type == "SCRATCH":
        raise errors.not_built(f"a {disk.mode or disk.type} disk is not supported")
    if (disk.source is None) == (disk.initialize_params is None):
        raise errors.invalid(at, "", "Exactly one of source and initializeParams is required.")
    if disk.initialize_params:
        disk_type(disk.initialize_params.disk_type, f"{at}.initializeParams.diskType")
        labels(disk.initialize_params.labels, f"{at}.initializeParams.labels")


def disk_type(value: str | None, at: str) -> str:
    found = (value or "pd-standard").rsplit("/", 1)[-1]
    if found not in catalog.DISK_TYPES:
        raise errors.invalid(at, value, "The referenced resource does not exist.")
    return found


def merge_patch(base: JsonObject, change: JsonObject) -> JsonObject:
    """Merge ``change`` into ``base`` by RFC 7396: objects are merged key by key, arrays and scalars are replaced."""
    out: JsonObject = dict(base)
    for key, value in change.items():
        old: JsonValue = out.get(key)
        out[key] = merge_patch(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _one_of(value: str | None, known: tuple[str, ...], at: str) -> None:
    if value is not None and value not in known:
        raise errors.invalid(at, value, f"Must be one of {', '.join(known)}.")
