"""Compute Engine's JSON, as far as this cloud speaks it: typed structs in, typed structs out.

64-bit integers are digits in a string on the wire and ints here. Fields that are only stored and
shown again are ``JsonValue``. A field Google does not know is a 400 as Google says it; one that Google
knows and this cloud does not is a 501. Nothing here has behaviour beyond conversion.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

import msgspec
from msgspec import Meta, Struct, field

from spotkeeper.spec import codec

if TYPE_CHECKING:
    JsonValue = Union[None, bool, int, float, str, list["JsonValue"], dict[str, "JsonValue"]]
else:
    JsonValue = Any  # msgspec takes no recursive alias
JsonObject = dict[str, JsonValue]

# JSON has no 64-bit integers: Google writes these as strings of digits.
INT64 = frozenset(
    {"id", "diskSizeGb", "sizeGb", "seconds", "targetId", "sourceDiskId", "sourceSnapshotId", "storageBytes"}
    | {"downloadBytes", "sourceImageId", "maximumPersistentDisksSizeGb", "archiveSizeBytes"}
    | {"provisionedIops", "provisionedThroughput", "physicalBlockSizeBytes"}
)

DiskGb = Annotated[int, Meta(ge=1, le=65536)]


class Duration(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    seconds: int = 0
    nanos: int = 0


class Scheduling(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """What may be taken away, and how. Cross-field rules: ``validate.scheduling``."""

    provisioning_model: str | None = None
    preemptible: bool | None = None
    automatic_restart: bool | None = None
    on_host_maintenance: str | None = None
    instance_termination_action: str | None = None
    max_run_duration: Duration | None = None
    preemption_notice_duration: Duration | None = None
    min_node_cpus: int | None = None
    availability_domain: int | None = None
    host_error_timeout_seconds: int | None = None
    location_hint: str | None = None
    protection_tier: str | None = None
    skip_guest_os_shutdown: bool | None = None

    @property
    def spot(self) -> bool:
        return self.provisioning_model == "SPOT"


class InitializeParams(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    disk_name: str | None = None
    disk_size_gb: DiskGb | None = None
    disk_type: str | None = None
    source_image: str | None = None
    source_snapshot: str | None = None
    labels: dict[str, str] | None = None
    description: str | None = None
    provisioned_iops: int | None = None
    provisioned_throughput: int | None = None


class AttachedDisk(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    kind: str | None = None
    type: str | None = None
    mode: str | None = None
    source: str | None = None
    device_name: str | None = None
    index: int | None = None
    boot: bool | None = None
    auto_delete: bool | None = None
    initialize_params: InitializeParams | None = None
    interface: str | None = None
    disk_size_gb: int | None = None
    guest_os_features: JsonValue = None
    licenses: list[str] | None = None
    architecture: str | None = None
    force_attach: bool | None = None


class AccessConfig(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    kind: str | None = None
    type: str | None = None
    name: str | None = None
    network_tier: str | None = None
    nat_ip: str | None = field(name="natIP", default=None)


class NetworkInterface(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    kind: str | None = None
    name: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    network_ip: str | None = field(name="networkIP", default=None)
    access_configs: list[AccessConfig] | None = None
    nic_type: str | None = None
    stack_type: str | None = None
    fingerprint: str | None = None


class MetadataItem(Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    value: str | None = None


class Metadata(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    kind: str | None = None
    fingerprint: str | None = None
    items: list[MetadataItem] | None = None

    def values(self) -> dict[str, str]:
        return {item.key: item.value or "" for item in self.items or ()}


class Tags(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    items: list[str] | None = None
    fingerprint: str | None = None


class ServiceAccount(Struct, frozen=True, forbid_unknown_fields=True):
    email: str = "default"
    scopes: list[str] = []


class Accelerator(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    accelerator_type: str | None = None
    accelerator_count: int | None = None


class InstanceProperties(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """What a template holds; of an instance, all but its name and place."""

    machine_type: str | None = None
    description: str | None = None
    can_ip_forward: bool | None = None
    tags: Tags | None = None
    labels: dict[str, str] | None = None
    metadata: Metadata | None = None
    disks: list[AttachedDisk] | None = None
    network_interfaces: list[NetworkInterface] | None = None
    service_accounts: list[ServiceAccount] | None = None
    scheduling: Scheduling | None = None
    guest_accelerators: list[Accelerator] | None = None
    min_cpu_platform: str | None = None
    resource_policies: list[str] | None = None
    shielded_instance_config: JsonValue = None
    advanced_machine_features: JsonValue = None
    reservation_affinity: JsonValue = None
    network_performance_config: JsonValue = None
    confidential_instance_config: JsonValue = None
    private_ipv6_google_access: str | None = None
    key_revocation_action_type: str | None = None


class InstanceBody(InstanceProperties, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """The body of instances.insert."""

    name: str | None = None
    zone: str | None = None
    hostname: str | None = None
    deletion_protection: bool | None = None
    shielded_instance_integrity_policy: JsonValue = None
    display_device: JsonValue = None
    kind: str | None = None
    params: JsonValue = None


class ScheduleStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    termination_timestamp: str | None = None


class ResourceStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    scheduling: ScheduleStatus = ScheduleStatus()


class Instance(InstanceProperties, frozen=True, rename="camel", omit_defaults=True):
    """What instances.get answers."""

    kind: str = ""
    id: int = 0
    name: str = ""
    zone: str = ""
    status: str = ""
    status_message: str | None = None
    creation_timestamp: str | None = None
    last_start_timestamp: str | None = None
    last_stop_timestamp: str | None = None
    self_link: str | None = None
    cpu_platform: str | None = None
    label_fingerprint: str | None = None
    fingerprint: str | None = None
    start_restricted: bool | None = None
    deletion_protection: bool | None = None
    hostname: str | None = None
    resource_status: ResourceStatus | None = None  # of a machine whose run is limited


class DiskBody(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    size_gb: DiskGb | None = None
    type: str | None = None
    labels: dict[str, str] | None = None
    label_fingerprint: str | None = None
    source_image: str | None = None
    source_snapshot: str | None = None
    zone: str | None = None
    access_mode: str | None = None
    physical_block_size_bytes: int | None = None
    provisioned_iops: int | None = None
    provisioned_throughput: int | None = None
    enable_confidential_compute: bool | None = None
    resource_policies: list[str] | None = None
    licenses: list[str] | None = None
    guest_os_features: JsonValue = None
    architecture: str | None = None
    kind: str | None = None
    params: JsonValue = None


class Disk(Struct, frozen=True, rename="camel", omit_defaults=True):
    kind: str
    id: int
    name: str
    zone: str
    size_gb: int
    type: str
    status: str
    creation_timestamp: str
    self_link: str
    description: str | None = None
    labels: dict[str, str] | None = None
    label_fingerprint: str | None = None
    users: list[str] | None = None
    source_image: str | None = None
    source_snapshot: str | None = None
    source_snapshot_id: int | None = None
    last_attach_timestamp: str | None = None
    last_detach_timestamp: str | None = None
    physical_block_size_bytes: int | None = None
    provisioned_iops: int | None = None
    provisioned_throughput: int | None = None
    access_mode: str | None = None
    resource_policies: list[str] | None = None
    guest_os_features: JsonValue = None
    licenses: list[str] | None = None
    architecture: str | None = None
    enable_confidential_compute: bool | None = None


class SnapshotBody(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    labels: dict[str, str] | None = None
    source_disk: str | None = None
    storage_locations: list[str] | None = None
    snapshot_type: str | None = None
    guest_flush: bool | None = None
    kind: str | None = None


class Snapshot(Struct, frozen=True, rename="camel", omit_defaults=True):
    kind: str
    id: int
    name: str
    status: str
    creation_timestamp: str
    self_link: str
    source_disk: str
    source_disk_id: int
    disk_size_gb: int
    storage_bytes: int = 0
    storage_bytes_status: str | None = None
    storage_locations: list[str] | None = None
    snapshot_type: str | None = None
    description: str | None = None
    labels: dict[str, str] | None = None
    label_fingerprint: str | None = None


class TemplateBody(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    properties: InstanceProperties | None = None
    kind: str | None = None


class SetMetadata(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    fingerprint: str | None = None
    items: list[MetadataItem] | None = None
    kind: str | None = None


class SetLabels(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    labels: dict[str, str] | None = None
    label_fingerprint: str | None = None


class SetPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    policy: JsonValue


class ErrorInfo(Struct, frozen=True, omit_defaults=True):
    domain: str
    metadatas: dict[str, str]
    reason: str


class ErrorDetail(Struct, frozen=True, rename="camel"):
    error_info: ErrorInfo


class OperationError(Struct, frozen=True, rename="camel", omit_defaults=True):
    code: str
    message: str
    error_details: list[ErrorDetail] | None = None


class OperationErrors(Struct, frozen=True):
    errors: list[OperationError]


class Operation(Struct, frozen=True, rename="camel", omit_defaults=True):
    """PENDING -> RUNNING -> DONE; ``error`` may show while RUNNING. A failed one keeps its requestId."""

    kind: str
    id: int
    name: str
    operation_type: str
    target_link: str
    target_id: int
    status: str
    user: str
    insert_time: str
    self_link: str
    # Zero is meant: `progress` has no default on the wire, so it is written even when 0.
    progress: int
    client_operation_id: str | None = None
    start_time: str | None = None
    end_time: str | None = None
    zone: str | None = None
    region: str | None = None
    error: OperationErrors | None = None
    http_error_status_code: int | None = None
    http_error_message: str | None = None


# Fields Google has and this cloud has not: an honest 501 instead of "unknown name".
# tests/local/test_wire.py holds this list against the discovery document.
NOT_BUILT: dict[type, frozenset[str]] = {
    Scheduling: frozenset(
        {"exposeHostTopology", "gracefulShutdown", "localSsdRecoveryTimeout", "nodeAffinities"}
        | {"onInstanceStopAction", "terminationTime"}
    ),
    AttachedDisk: frozenset({"diskEncryptionKey", "savedState", "shieldedInstanceInitialState"}),
    InitializeParams: frozenset(
        {"architecture", "enableConfidentialCompute", "licenses", "onUpdateAction", "replicaZones", "storagePool"}
        | {"resourceManagerTags", "resourcePolicies", "sourceImageEncryptionKey", "sourceSnapshotEncryptionKey"}
    ),
    NetworkInterface: frozenset(
        {"aliasIpRanges", "aliasIpv6Ranges", "enableVpcScopedDns", "igmpQuery", "internalIpv6PrefixLength"}
        | {"ipv6AccessConfigs", "ipv6AccessType", "ipv6Address", "networkAttachment", "parentNicName"}
        | {"queueCount", "serviceClassId", "vlan"}
    ),
    InstanceProperties: frozenset({"localSsdEncryptionMode", "resourceManagerTags", "workloadIdentityConfig"}),
    InstanceBody: frozenset(
        {"instanceEncryptionKey", "localSsdEncryptionMode", "sourceMachineImage", "sourceMachineImageEncryptionKey"}
        | {"workloadIdentityConfig"}
    ),
    DiskBody: frozenset(
        {"asyncPrimaryDisk", "asyncSecondaryDisks", "diskEncryptionKey", "licenseCodes", "locationHint", "options"}
        | {"replicaZones", "sourceDisk", "sourceImageEncryptionKey", "sourceInstantSnapshot", "storagePool"}
        | {"sourceMachineImage", "sourceMachineImageDiskDeviceName", "sourceMachineImageEncryptionKey"}
        | {"sourceSnapshotEncryptionKey", "sourceStorageObject"}
    ),
}

# Clients send back what they read: Google ignores these in a request, and so do we.
OUTPUT_ONLY = frozenset(
    {"id", "selfLink", "creationTimestamp", "status", "statusMessage", "fingerprint", "labelFingerprint", "users"}
    | {"lastStartTimestamp", "lastStopTimestamp", "lastSuspendedTimestamp", "lastAttachTimestamp", "region"}
    | {"lastDetachTimestamp", "resourceStatus", "cpuPlatform", "satisfiesPzi", "satisfiesPzs", "startRestricted"}
    | {"sourceDiskId", "sourceImageId", "sourceSnapshotId", "sourceInstantSnapshotId", "sourceMachineImageId"}
    | {"sourceConsistencyGroupPolicy", "sourceConsistencyGroupPolicyId"}
)

T = TypeVar("T")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<at>[^`]*)`)?")


class BodyError(ValueError):
    """The body is not what the method takes. ``known`` names a field Google has and we have not."""

    def __init__(self, message: str, known: str | None = None) -> None:
        super().__init__(message)
        self.known = known


def without_nulls(value: JsonValue) -> JsonValue:
    """Explicit nulls and blank enums go over the wire from real clients and mean "unset"."""
    if isinstance(value, dict):
        out = {key: without_nulls(item) for key, item in value.items()}
        return {key: item for key, item in out.items() if item is not None and not (item == "" and _is_enum(key))}
    if isinstance(value, list):
        kept: list[JsonValue] = [item for item in map(without_nulls, value) if item is not None]
        return kept if kept or not value else None
    return value


def _is_enum(key: str) -> bool:
    return key in ("instanceTerminationAction", "provisioningModel", "onHostMaintenance", "nicType", "stackType")


def parse(body: JsonValue, kind: type[T]) -> T:
    """A request body as its struct.

    Raises:
        BodyError: with Google's wording; ``known`` set for a field that exists in Compute Engine.
    """
    clean = without_nulls(body)
    if not isinstance(clean, dict):
        raise BodyError("Invalid JSON payload received. Expected an object.")
    wanted = {name.encode_name for name in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    clean = {key: value for key, value in clean.items() if key in wanted or key not in OUTPUT_ONLY}
    try:
        return codec.convert(clean, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _bad(str(error)) from None


def _bad(text: str) -> BodyError:
    found = _UNKNOWN.match(text)
    if not found:
        return BodyError(f"Invalid value in JSON payload: {text}")
    name, at = found["name"], found["at"] or ""
    if any(name in fields for fields in NOT_BUILT.values()):
        return BodyError(f"field '{at + '.' if at else ''}{name}'", known=name)
    return BodyError(f"Invalid JSON payload received. Unknown name \"{name}\" at '{at}': Cannot find field.")


def to_json(value: Struct) -> JsonObject:
    """A struct as wire JSON: unset fields left out, 64-bit integers as strings."""
    out = _stringify(msgspec.to_builtins(value))
    assert isinstance(out, dict)
    return out


def _stringify(value: JsonValue, key: str = "") -> JsonValue:
    if isinstance(value, dict):
        return {name: _stringify(item, name) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_stringify(item, key) for item in value]
    if key in INT64 and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


def encode(body: object) -> bytes:
    return msgspec.json.encode(body)
