"""Typed structs for the part of Compute Engine's JSON that this cloud supports; ``rest.py`` converts them.

64-bit integers are strings of digits on the wire and ints here. Fields that are only stored and returned have the type
``JsonValue``. A field unknown to Google is refused with 400 in Google's words; a field that only Google supports
is refused with 501.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Union

from msgspec import Meta, Struct, field

if TYPE_CHECKING:
    JsonValue = Union[None, bool, int, float, str, list["JsonValue"], dict[str, "JsonValue"]]
else:
    JsonValue = Any  # msgspec does not support recursive aliases
JsonObject = dict[str, JsonValue]

# JSON has no 64-bit integers: Google writes these as strings of digits.
INT64 = frozenset(
    {"id", "diskSizeGb", "sizeGb", "seconds", "targetId", "sourceDiskId", "sourceSnapshotId", "storageBytes"}
    | {"downloadBytes", "sourceImageId", "maximumPersistentDisksSizeGb", "archiveSizeBytes"}
    | {"provisionedIops", "provisionedThroughput", "physicalBlockSizeBytes"}
)

DiskGb = Annotated[int, Meta(ge=1, le=65536)]


class RequestPart(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """The base of the objects in a request; an unknown field is an error."""


class AnswerPart(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The base of the objects in an answer."""


class Duration(RequestPart, frozen=True):
    seconds: int = 0
    nanos: int = 0


class Scheduling(RequestPart, frozen=True):
    """The provisioning model and the action at a preemption. ``validate.scheduling`` checks combinations of fields."""

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


class InitializeParams(RequestPart, frozen=True):
    disk_name: str | None = None
    disk_size_gb: DiskGb | None = None
    disk_type: str | None = None
    source_image: str | None = None
    source_snapshot: str | None = None
    labels: dict[str, str] | None = None
    description: str | None = None
    provisioned_iops: int | None = None
    provisioned_throughput: int | None = None


class AttachedDisk(RequestPart, frozen=True):
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


class AccessConfig(RequestPart, frozen=True):
    kind: str | None = None
    type: str | None = None
    name: str | None = None
    network_tier: str | None = None
    nat_ip: str | None = field(name="natIP", default=None)


class NetworkInterface(RequestPart, frozen=True):
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


class Metadata(RequestPart, frozen=True):
    kind: str | None = None
    fingerprint: str | None = None
    items: list[MetadataItem] | None = None

    def values(self) -> dict[str, str]:
        return {item.key: item.value or "" for item in self.items or ()}


class Tags(RequestPart, frozen=True):
    items: list[str] | None = None
    fingerprint: str | None = None


class ServiceAccount(Struct, frozen=True, forbid_unknown_fields=True):
    email: str = "default"
    scopes: list[str] = []


class Accelerator(RequestPart, frozen=True):
    accelerator_type: str | None = None
    accelerator_count: int | None = None


class ReservationAffinity(RequestPart, frozen=True):
    """Which reservations a VM may use; ``values``: the name of the one, if it is specific."""

    consume_reservation_type: str | None = None
    key: str | None = None
    values: list[str] | None = None

    @property
    def reservation(self) -> str | None:
        specific = self.consume_reservation_type == "SPECIFIC_RESERVATION"
        return next(iter(self.values or ()), None) if specific else None


class InstanceProperties(RequestPart, frozen=True):
    """The properties of a template; an instance also has a name and a zone."""

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
    reservation_affinity: ReservationAffinity | None = None
    network_performance_config: JsonValue = None
    confidential_instance_config: JsonValue = None
    private_ipv6_google_access: str | None = None
    key_revocation_action_type: str | None = None


class InstanceBody(InstanceProperties, frozen=True):
    """The body of instances.insert."""

    name: str | None = None
    zone: str | None = None
    hostname: str | None = None
    deletion_protection: bool | None = None
    shielded_instance_integrity_policy: JsonValue = None
    display_device: JsonValue = None
    kind: str | None = None
    params: JsonValue = None


class ScheduleStatus(AnswerPart, frozen=True):
    termination_timestamp: str | None = None


class ResourceStatus(AnswerPart, frozen=True):
    scheduling: ScheduleStatus = ScheduleStatus()


class Instance(InstanceProperties, frozen=True):
    """The answer of instances.get."""

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
    resource_status: ResourceStatus | None = None  # only with maxRunDuration


class DiskBody(RequestPart, frozen=True):
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


class Disk(DiskBody, frozen=True, kw_only=True):
    """The answer of disks.get."""

    kind: str
    id: int
    name: str
    zone: str
    size_gb: int
    type: str
    status: str
    creation_timestamp: str
    self_link: str
    users: list[str] | None = None
    source_snapshot_id: int | None = None
    last_attach_timestamp: str | None = None
    last_detach_timestamp: str | None = None


class SnapshotBody(RequestPart, frozen=True):
    name: str | None = None
    description: str | None = None
    labels: dict[str, str] | None = None
    source_disk: str | None = None
    storage_locations: list[str] | None = None
    snapshot_type: str | None = None
    guest_flush: bool | None = None
    kind: str | None = None


class Snapshot(SnapshotBody, frozen=True, kw_only=True):
    """The answer of snapshots.get."""

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
    label_fingerprint: str | None = None


class TemplateBody(RequestPart, frozen=True):
    name: str | None = None
    description: str | None = None
    properties: InstanceProperties | None = None
    kind: str | None = None


class SetMetadata(RequestPart, frozen=True):
    fingerprint: str | None = None
    items: list[MetadataItem] | None = None
    kind: str | None = None


class SetLabels(RequestPart, frozen=True):
    labels: dict[str, str] | None = None
    label_fingerprint: str | None = None


class SetPolicy(RequestPart, frozen=True):
    policy: JsonValue


class ErrorInfo(AnswerPart, frozen=True):
    domain: str
    metadatas: dict[str, str]
    reason: str


class ErrorDetail(AnswerPart, frozen=True):
    error_info: ErrorInfo


class OperationError(AnswerPart, frozen=True):
    code: str
    message: str
    error_details: list[ErrorDetail] | None = None


class OperationErrors(AnswerPart, frozen=True):
    errors: list[OperationError]


class Operation(AnswerPart, frozen=True):
    """An operation: PENDING -> RUNNING -> DONE. ``error`` may appear while it is RUNNING.

    A repeated requestId returns the same operation, even if it failed.
    """

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
    progress: int  # without a default, so that 0 is also written
    client_operation_id: str | None = None
    start_time: str | None = None
    end_time: str | None = None
    zone: str | None = None
    region: str | None = None
    error: OperationErrors | None = None
    http_error_status_code: int | None = None
    http_error_message: str | None = None


# Fields of Google's schema that this cloud does not support; they get 501 instead of "unknown name".
# tests/local/core/test_schema.py compares this list with the discovery document.
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

# Clients send back answers that they read, so Google ignores these fields in a request; this cloud does, too.
OUTPUT_ONLY = frozenset(
    {"id", "selfLink", "creationTimestamp", "status", "statusMessage", "fingerprint", "labelFingerprint", "users"}
    | {"lastStartTimestamp", "lastStopTimestamp", "lastSuspendedTimestamp", "lastAttachTimestamp", "region"}
    | {"lastDetachTimestamp", "resourceStatus", "cpuPlatform", "satisfiesPzi", "satisfiesPzs", "startRestricted"}
    | {"sourceDiskId", "sourceImageId", "sourceSnapshotId", "sourceInstantSnapshotId", "sourceMachineImageId"}
    | {"sourceConsistencyGroupPolicy", "sourceConsistencyGroupPolicyId"}
)
