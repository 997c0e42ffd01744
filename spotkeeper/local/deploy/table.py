"""The table of Pulumi resource types: their calls on the one-machine cloud, and their outputs.

Compute types become Compute Engine's own REST bodies. Bucket objects go through the Storage API. All other types
(functions, schedules, topics, identities) go as declared to ``/local/v1/resources/<module>:<type>/<name>``. A type
without an entry is an error, so that a program with resources that this cloud does not support fails.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
"""JSON that is converted from one foreign schema (Pulumi's) to another (Google's)."""

DRAIN = "pulumi-python:dynamic:Resource"
REGIONS = "pulumi-python:dynamic/spotkeeper:Regions"
PLACES = "pulumi-python:dynamic/spotkeeper:Places"
SETTLED = "pulumi-python:dynamic/spotkeeper:Settled"
SELF_LINK = "https://www.googleapis.com/compute/v1"


@dataclass(frozen=True)
class ProviderDefaults:
    """The provider's configuration: project and region for resources that do not name their own."""

    project: str
    region: str


@dataclass(frozen=True)
class PlacedResource:
    """A resource to be made: its type, name, inputs (Pulumi's names, plain values) and the provider's defaults."""

    type: str
    name: str  # the name in the cloud
    inputs: Json
    defaults: ProviderDefaults

    @property
    def project(self) -> str:
        return str(self.inputs.get("project") or self.defaults.project)

    @property
    def region(self) -> str:
        return str(self.inputs.get("region") or self.inputs.get("location") or self.defaults.region)


FromResource = Callable[[PlacedResource], Json]


@dataclass(frozen=True)
class ResourceType:
    """An entry of the table: how to make resources of one type."""

    outputs: FromResource  # returns what the provider computes without a call
    path: str = ""  # collection below the Compute API, for compute types
    body: FromResource = field(default=lambda t: t.inputs)  # the request that creates it
    in_place: frozenset[str] | None = frozenset()  # inputs that change without a replacement; None: all but the name
    auto_name: bool = False  # the provider names the resource, so that its replacement has another name
    ignore: frozenset[str] = frozenset()  # inputs whose changes do not change the resource
    binding: bool = False  # an IAM binding, which has no name of its own, so that the program's name is used


class UnknownTypeError(Exception):
    """Raised if the program declares a type without an entry in the table."""


def dynamic(type_: str) -> bool:
    """Whether the program has its own provider for the type, so that the table needs no entry."""
    return type_.startswith("pulumi-python:dynamic")


def kind_of(type_: str) -> ResourceType:
    if type_ not in KINDS:
        raise UnknownTypeError(f"{type_}: the one-machine cloud has no such resource; add it to {__name__}")
    return KINDS[type_]


def short(type_: str) -> str:
    """Return a type's name on the control plane: ``gcp:storage/bucket:Bucket`` becomes ``storage:bucket``."""
    module, _, name = type_.split(":")[1].partition("/")
    return f"{module}:{name}"


def physical_name(type_: str, logical: str, inputs: Json) -> str:
    """Return a resource's name in the cloud.

    It is the one that the program gives the resource or, for a template, one derived from the template's content.

    Unlike a random name, a derived name is the same whether Pulumi's engine or this module deploys; a changed template
    gets another name.
    """
    kind = kind_of(type_)
    if kind.binding:
        return logical
    if kind.auto_name and not inputs.get("name"):
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
        return f"{logical}-{digest[:7]}"
    given = (inputs.get(key) for key in ("accountId", "roleId", "repositoryId", "name"))
    return str(next(filter(None, given), logical))


def target(type_: str, logical: str, inputs: Json, defaults: ProviderDefaults) -> PlacedResource:
    return PlacedResource(type_, physical_name(type_, logical, inputs), inputs, defaults)


def computed(type_: str, logical: str, inputs: Json, defaults: ProviderDefaults) -> tuple[str, Json]:
    """Return the id and the computed outputs of a resource, without a call of the cloud."""
    if dynamic(type_):
        return f"{logical}/{inputs['stack']}" if "stack" in inputs else logical, {}
    it = target(type_, logical, inputs, defaults)
    outputs = kind_of(type_).outputs(it)
    known = {"project": it.project} | ({} if kind_of(type_).binding else {"name": it.name}) | outputs
    return str(outputs["id"]), known


@dataclass(frozen=True)
class InputChange:
    """What changed between two declarations of a resource.

    ``keys``: the changed inputs; ``replaces``: those that require a replacement; ``delete_first``: delete the old
    resource before its replacement is made.
    """

    keys: tuple[str, ...]
    replaces: tuple[str, ...]
    delete_first: bool

    def __bool__(self) -> bool:
        return bool(self.keys)


def compare(type_: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> InputChange:
    """Compare inputs. ``delete_first`` is True if the replacement needs the same name as the old resource."""
    kind = kind_of(type_)
    known = (set(old) | set(new)) - kind.ignore
    keys = tuple(sorted(key for key in known if old.get(key) != new.get(key)))
    fixed = {"name", "zone", "region", "location", "bucket", "project", "accountId", "roleId", "repositoryId"}
    replaces = tuple(key for key in keys if (key in fixed if kind.in_place is None else key not in kind.in_place))
    return InputChange(keys, replaces, delete_first=bool(replaces) and "name" not in keys and not kind.auto_name)


# Compute Engine


def link(t: PlacedResource, path: str) -> str:
    return f"{SELF_LINK}/projects/{t.project}/{path}"


def collection(t: PlacedResource) -> str:
    """The path of a resource's collection, such as ``projects/p/zones/z/disks``."""
    path = kind_of(t.type).path.format(zone=t.inputs.get("zone"), region=t.region)
    return f"projects/{t.project}/{path}"


def _compute_outputs(t: PlacedResource) -> Json:
    path = f"{collection(t)}/{t.name}"
    return {"id": path, "selfLink": f"{SELF_LINK}/{path}", "name": t.name}


def _some(**fields: Any) -> Json:
    return {key: value for key, value in fields.items() if value is not None and value not in ([], {})}


def _named_body(t: PlacedResource, *keys: str, **fields: Any) -> Json:
    """Return a request body: the name, the inputs in ``keys``, and ``fields``; empty values are omitted."""
    return _some(name=t.name, **{key: t.inputs.get(key) for key in keys}, **fields)


def _network(t: PlacedResource) -> Json:
    profile = _url(t.inputs["networkProfile"]) if t.inputs.get("networkProfile") else None
    routing = _some(routingMode=t.inputs.get("routingMode"))
    return _named_body(t, "autoCreateSubnetworks", "mtu", networkProfile=profile, routingConfig=routing)


def _subnetwork(t: PlacedResource) -> Json:
    return _named_body(t, "ipCidrRange", "privateIpGoogleAccess", network=_url(t.inputs["network"]))


def _firewall(t: PlacedResource) -> Json:
    allowed = [_some(IPProtocol=rule["protocol"], ports=rule.get("ports")) for rule in t.inputs.get("allows", ())]
    network = _url(t.inputs["network"])
    return _named_body(t, "direction", "sourceTags", "targetTags", network=network, allowed=allowed)


def _resource_policy(t: PlacedResource) -> Json:
    """Return the body of a resource policy, without ``maxDistance``, which only the beta API has."""
    policy = t.inputs["groupPlacementPolicy"]
    known = {key: policy.get(key) for key in ("collocation", "vmCount", "availabilityDomainCount")}
    return _named_body(t, groupPlacementPolicy=_some(**known))


def _disk(t: PlacedResource) -> Json:
    return _named_body(
        t,
        "labels",
        sizeGb=str(t.inputs["size"]),
        type=link(t, f"zones/{t.inputs['zone']}/diskTypes/{t.inputs.get('type', 'pd-standard')}"),
        provisionedIops=_digits(t.inputs.get("provisionedIops")),
        provisionedThroughput=_digits(t.inputs.get("provisionedThroughput")),
    )


def _template(t: PlacedResource) -> Json:
    disks = [
        _disk_made_at_boot(disk, disk.get("sourceImage"), disk.get("diskSizeGb"), disk.get("diskType"))
        for disk in t.inputs.get("disks", ())
    ]
    properties = _some(machineType=t.inputs["machineType"], disks=disks, **_machine(t, short_types=True))
    return {"name": t.name, "properties": properties}


def _disk_made_at_boot(disk: Json, image: object, size: object, type_: object) -> Json:
    """Return a new disk as the API expects it. Its labels are inputs of the disk itself or of ``initializeParams``."""
    labels = disk.get("labels", disk.get("initializeParams", {}).get("labels"))
    return _some(
        boot=disk.get("boot"),
        autoDelete=disk.get("autoDelete"),
        deviceName=disk.get("deviceName"),
        type="PERSISTENT",
        mode="READ_WRITE",
        initializeParams=_some(sourceImage=image, diskSizeGb=_digits(size), diskType=type_, labels=labels),
    )


def _instance(t: PlacedResource) -> Json:
    zone = f"zones/{t.inputs['zone']}"
    boot = t.inputs["bootDisk"]
    params = boot.get("initializeParams", {})
    type_ = link(t, f"{zone}/diskTypes/{params['type']}") if params.get("type") else None
    disks = [_disk_made_at_boot({**boot, "boot": True}, params.get("image"), params.get("size"), type_)]
    disks += [
        _some(
            source=_url(disk["source"]), deviceName=disk.get("deviceName"), mode=disk.get("mode"),
            type="PERSISTENT", boot=False, autoDelete=False,
        )
        for disk in t.inputs.get("attachedDisks", ())
    ]  # fmt: skip
    policy = t.inputs.get("resourcePolicies")
    return _named_body(
        t,
        machineType=link(t, f"{zone}/machineTypes/{t.inputs['machineType']}"),
        disks=disks,
        resourcePolicies=[_url(policy)] if policy else None,
        **_machine(t, short_types=False),
    )


def _machine(t: PlacedResource, short_types: bool) -> Json:
    """The fields that templates and instances share."""
    account = t.inputs.get("serviceAccount")
    metadata = t.inputs.get("metadata") or {}
    types = "" if short_types else link(t, f"zones/{t.inputs.get('zone')}/acceleratorTypes/")
    return _some(
        networkInterfaces=[
            _some(
                subnetwork=_url(card["subnetwork"]) if card.get("subnetwork") else None,
                nicType=card.get("nicType"),
                accessConfigs=[{"type": "ONE_TO_ONE_NAT", "name": "external"} for _ in card.get("accessConfigs") or ()],
            )
            for card in t.inputs.get("networkInterfaces", ())
        ],
        scheduling=_scheduling(t.inputs.get("scheduling") or {}),
        guestAccelerators=[
            {"acceleratorType": f"{types}{a['type']}", "acceleratorCount": a["count"]}
            for a in t.inputs.get("guestAccelerators") or ()
        ],
        serviceAccounts=[{"email": account["email"], "scopes": account["scopes"]}] if account else None,
        shieldedInstanceConfig=t.inputs.get("shieldedInstanceConfig"),
        labels=t.inputs.get("labels"),
        tags=_some(items=t.inputs.get("tags")),
        metadata={"items": metadata_items(metadata)},
    )


def metadata_items(metadata: Mapping[str, str]) -> list[Json]:
    return [{"key": key, "value": metadata[key]} for key in sorted(metadata)]


def _scheduling(given: Json) -> Json:
    durations = [name for name in ("maxRunDuration", "preemptionNoticeDuration") if name in given]
    return {**given, **{name: {"seconds": str(given[name]["seconds"])} for name in durations}}


def _digits(value: object) -> str | None:
    """Convert a 64-bit integer to a string, its form on the wire."""
    return None if value is None else str(value)


def _url(value: str) -> str:
    return value if value.startswith("http") else f"{SELF_LINK}/{value}"


# Other types: outputs that the provider computes


def _account(t: PlacedResource) -> Json:
    email = f"{t.inputs['accountId']}@{t.project}.iam.gserviceaccount.com"
    name = f"projects/{t.project}/serviceAccounts/{email}"
    number = str(10**20 + int.from_bytes(hashlib.sha256(email.encode()).digest()[:8], "big"))
    return {"id": name, "name": name, "email": email, "member": f"serviceAccount:{email}", "uniqueId": number}


def _function(t: PlacedResource) -> Json:
    return {
        "id": f"projects/{t.project}/locations/{t.region}/functions/{t.name}",
        "url": f"https://{t.region}-{t.project}.cloudfunctions.net/{t.name}",
    }


def _sink(t: PlacedResource) -> Json:
    writer = f"serviceAccount:{t.name}@gcp-sa-logging.iam.gserviceaccount.com"
    return {"id": f"projects/{t.project}/sinks/{t.name}", "writerIdentity": writer}


def _custom_role(t: PlacedResource) -> Json:
    name = f"projects/{t.project}/roles/{t.inputs['roleId']}"
    return {"id": name, "name": name}


def _bucket(t: PlacedResource) -> Json:
    return {"id": t.name, "url": f"gs://{t.name}", "selfLink": f"https://www.googleapis.com/storage/v1/b/{t.name}"}


def _object(t: PlacedResource) -> Json:
    return {"id": f"{t.inputs['bucket']}-{t.name}", "outputName": t.name}


def _member(t: PlacedResource) -> Json:
    parts = [str(t.inputs[key]) for key in _MEMBER_OF if key in t.inputs]
    return {"id": "/".join([*parts, str(t.inputs["role"]), str(t.inputs["member"])])}


_MEMBER_OF = ("bucket", "topic", "subscription", "subnetwork", "secretId", "serviceAccountId", "project", "name")


def _service_identity(t: PlacedResource) -> Json:
    """Return the service account of a Google service, such as Pub/Sub; its e-mail contains the service's name."""
    service = str(t.inputs["service"])
    email = f"service-1@gcp-sa-{service.partition('.')[0]}.iam.gserviceaccount.com"
    return {"id": f"projects/{t.project}/services/{service}", "email": email, "member": f"serviceAccount:{email}"}


def _named(t: PlacedResource) -> Json:
    return {"id": f"projects/{t.project}/{short(t.type).replace(':', '/')}/{t.name}"}


def _compute(path: str, body: FromResource, in_place: tuple[str, ...] = (), **more: Any) -> ResourceType:
    return ResourceType(_compute_outputs, path, body, frozenset(in_place), **more)


def _in_project(collection: str) -> ResourceType:
    def outputs(t: PlacedResource) -> Json:
        return {"id": f"projects/{t.project}/{collection.format(region=t.region)}/{t.name}"}

    return ResourceType(outputs, in_place=None)


_NAMED = ResourceType(_named, in_place=None)
_MEMBER = ResourceType(_member, binding=True)
KINDS: dict[str, ResourceType] = {
    "gcp:compute/network:Network": _compute("global/networks", _network),
    "gcp:compute/subnetwork:Subnetwork": _compute("regions/{region}/subnetworks", _subnetwork),
    "gcp:compute/firewall:Firewall": _compute("global/firewalls", _firewall),
    "gcp:compute/resourcePolicy:ResourcePolicy": _compute("regions/{region}/resourcePolicies", _resource_policy),
    "gcp:compute/disk:Disk": _compute("zones/{zone}/disks", _disk, ("labels",)),
    "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate": _compute(
        "regions/{region}/instanceTemplates", _template, auto_name=True
    ),
    "gcp:compute/instance:Instance": _compute(
        "zones/{zone}/instances", _instance, ("metadata", "labels"), ignore=frozenset({"allowStoppingForUpdate"})
    ),
    # An archive's name contains the hash of its content, so a new path alone is not a change.
    "gcp:storage/bucketObject:BucketObject": ResourceType(_object, in_place=None, ignore=frozenset({"source"})),
    "gcp:storage/bucket:Bucket": ResourceType(_bucket, in_place=None),
    "gcp:storage/bucketIAMMember:BucketIAMMember": _MEMBER,
    "gcp:serviceaccount/account:Account": ResourceType(_account, in_place=frozenset({"displayName"})),
    "gcp:serviceaccount/iAMMember:IAMMember": _MEMBER,
    "gcp:projects/iAMCustomRole:IAMCustomRole": ResourceType(
        _custom_role, in_place=frozenset({"permissions", "title"})
    ),
    "gcp:projects/iAMMember:IAMMember": _MEMBER,
    "gcp:cloudrunv2/serviceIamMember:ServiceIamMember": _MEMBER,
    "gcp:cloudfunctionsv2/function:Function": ResourceType(_function, in_place=None),
    "gcp:cloudscheduler/job:Job": _NAMED,
    "gcp:pubsub/topic:Topic": _in_project("topics"),
    "gcp:pubsub/topicIAMMember:TopicIAMMember": _MEMBER,
    "gcp:pubsub/subscription:Subscription": _in_project("subscriptions"),
    "gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember": _MEMBER,
    "gcp:projects/serviceIdentity:ServiceIdentity": ResourceType(_service_identity, binding=True),
    "gcp:secretmanager/secretIamMember:SecretIamMember": _MEMBER,
    "gcp:compute/subnetworkIAMMember:SubnetworkIAMMember": _MEMBER,
    "gcp:artifactregistry/repository:Repository": _in_project("locations/{region}/repositories"),
    "gcp:logging/metric:Metric": _in_project("metrics"),
    "gcp:logging/projectSink:ProjectSink": ResourceType(_sink, in_place=None),
    "gcp:monitoring/notificationChannel:NotificationChannel": _in_project("notificationChannels"),
    "gcp:monitoring/alertPolicy:AlertPolicy": _in_project("alertPolicies"),
    "gcp:billing/budget:Budget": _NAMED,
    "pulumi:providers:gcp": _NAMED,  # the provider itself, not a resource of the cloud
}
