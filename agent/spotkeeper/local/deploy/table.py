"""The one table: Pulumi resource types -> calls on the one-machine cloud, and what they answer.

Compute types become Compute Engine's own REST bodies. Bucket objects go through the
Storage API. Everything else (functions, schedules, topics, identities) is handed over as
declared, to ``/local/v1/resources/<module>:<type>/<name>``.

A type that is not here is an error: a program that declares more than this cloud knows
must not seem to work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
"""JSON on its way from one foreign schema (Pulumi's) to another (Google's)."""

DRAIN = "pulumi-python:dynamic:Resource"
PLACES = "pulumi-python:dynamic/spotkeeper:Places"
SELF_LINK = "https://www.googleapis.com/compute/v1"


@dataclass(frozen=True)
class Place:
    """Where resources go that do not say it themselves: the provider's configuration."""

    project: str
    region: str


@dataclass(frozen=True)
class Target:
    """A resource with its type, its place and its inputs (Pulumi's names, plain values)."""

    type: str
    name: str  # physical
    inputs: Json
    place: Place

    @property
    def project(self) -> str:
        return str(self.inputs.get("project") or self.place.project)

    @property
    def region(self) -> str:
        return str(self.inputs.get("region") or self.inputs.get("location") or self.place.region)


Body = Callable[[Target], Json]
Outputs = Callable[[Target], Json]


@dataclass(frozen=True)
class Kind:
    """How one type is made.

    Attributes:
        path: collection below the Compute API, for compute types; "" for the others.
        body: the request that creates it.
        outputs: what the provider computes, as far as it can be known without asking.
        in_place: inputs that may change without a replacement.
        auto_name: whether the provider names it (and a change makes another).
        ignore: inputs that say nothing new about the resource.
        binding: who may do what; has no name of its own, so that the program's serves.
    """

    outputs: Outputs
    path: str = ""
    body: Body = field(default=lambda t: t.inputs)
    in_place: frozenset[str] | None = frozenset()  # None: everything but the name
    auto_name: bool = False
    ignore: frozenset[str] = frozenset()
    binding: bool = False


# --- what a driver asks ----------------------------------------------------------------


class UnknownTypeError(Exception):
    """The program declares a type that this cloud does not have."""


def dynamic(type_: str) -> bool:
    """Whether the program brings the provider itself: no call of this table makes it."""
    return type_.startswith("pulumi-python:dynamic")


def kind_of(type_: str) -> Kind:
    try:
        return KINDS[type_]
    except KeyError:
        raise UnknownTypeError(f"{type_}: the one-machine cloud has no such resource; add it to {__name__}") from None


def short(type_: str) -> str:
    """``gcp:storage/bucket:Bucket`` -> ``storage:bucket``, the type's name on the control plane."""
    module, _, name = type_.split(":")[1].partition("/")
    return f"{module}:{name}"


def physical_name(type_: str, logical: str, inputs: Json) -> str:
    """The name in the cloud: the program's, or one derived from the content, as for a template.

    Content in place of chance gives both drivers the same name, and a changed template another.
    """
    kind = kind_of(type_)
    if kind.binding:
        return logical
    if kind.auto_name and not inputs.get("name"):
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
        return f"{logical}-{digest[:7]}"
    given = (inputs.get(key) for key in ("accountId", "roleId", "repositoryId", "name"))
    return str(next(filter(None, given), logical))


def target(type_: str, logical: str, inputs: Json, place: Place) -> Target:
    return Target(type_, physical_name(type_, logical, inputs), inputs, place)


def computed(
    type_: str, logical: str, inputs: Json, place: Place = Place("spotkeeper-test", "us-central1")
) -> tuple[str, Json]:
    """Id and computed outputs of a resource before (or without) any call."""
    if dynamic(type_):
        return f"{logical}/{inputs.get('stack')}", {}
    it = target(type_, logical, inputs, place)
    outputs = kind_of(type_).outputs(it)
    known = {"project": it.project} | ({} if kind_of(type_).binding else {"name": it.name}) | outputs
    return str(outputs["id"]), known


@dataclass(frozen=True)
class Change:
    """What differs between two declarations of a resource."""

    keys: tuple[str, ...]
    replaces: tuple[str, ...]
    delete_first: bool

    def __bool__(self) -> bool:
        return bool(self.keys)


def compare(type_: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Change:
    """``old`` and ``new`` are inputs; a fixed name can only be taken again once it is free."""
    kind = kind_of(type_)
    known = (set(old) | set(new)) - kind.ignore
    keys = tuple(sorted(key for key in known if old.get(key) != new.get(key)))
    fixed = {"name", "zone", "region", "location", "bucket", "project", "accountId", "roleId", "repositoryId"}
    replaces = tuple(key for key in keys if (key in fixed if kind.in_place is None else key not in kind.in_place))
    return Change(keys, replaces, delete_first=bool(replaces) and "name" not in keys and not kind.auto_name)


# --- Compute Engine --------------------------------------------------------------------


def link(t: Target, path: str) -> str:
    return f"{SELF_LINK}/projects/{t.project}/{path}"


def collection(t: Target) -> str:
    """``projects/p/zones/z/disks``: where the resource is posted."""
    path = kind_of(t.type).path.format(zone=t.inputs.get("zone"), region=t.region)
    return f"projects/{t.project}/{path}"


def _compute_outputs(t: Target) -> Json:
    path = f"{collection(t)}/{t.name}"
    return {"id": path, "selfLink": f"{SELF_LINK}/{path}", "name": t.name}


def _some(**fields: Any) -> Json:
    """Only what was said: an absent field is not an empty one."""
    return {key: value for key, value in fields.items() if value is not None and value not in ([], {})}


def _network(t: Target) -> Json:
    return _some(
        name=t.name,
        autoCreateSubnetworks=t.inputs.get("autoCreateSubnetworks"),
        mtu=t.inputs.get("mtu"),
        networkProfile=_url(profile) if (profile := t.inputs.get("networkProfile")) else None,
        routingConfig=_some(routingMode=t.inputs.get("routingMode")),
    )


def _subnetwork(t: Target) -> Json:
    return _some(
        name=t.name,
        network=_url(t.inputs["network"]),
        ipCidrRange=t.inputs["ipCidrRange"],
        privateIpGoogleAccess=t.inputs.get("privateIpGoogleAccess"),
    )


def _firewall(t: Target) -> Json:
    return _some(
        name=t.name,
        network=_url(t.inputs["network"]),
        direction=t.inputs.get("direction"),
        sourceTags=t.inputs.get("sourceTags"),
        targetTags=t.inputs.get("targetTags"),
        allowed=[_some(IPProtocol=rule["protocol"], ports=rule.get("ports")) for rule in t.inputs.get("allows", ())],
    )


def _resource_policy(t: Target) -> Json:
    """``maxDistance`` is in the beta API only; on one machine all machines are close."""
    policy = t.inputs["groupPlacementPolicy"]
    return _some(
        name=t.name,
        groupPlacementPolicy=_some(
            collocation=policy.get("collocation"),
            vmCount=policy.get("vmCount"),
            availabilityDomainCount=policy.get("availabilityDomainCount"),
        ),
    )


def _disk(t: Target) -> Json:
    return _some(
        name=t.name,
        sizeGb=str(t.inputs["size"]),
        type=link(t, f"zones/{t.inputs['zone']}/diskTypes/{t.inputs.get('type', 'pd-standard')}"),
        labels=t.inputs.get("labels"),
        provisionedIops=_digits(t.inputs.get("provisionedIops")),
        provisionedThroughput=_digits(t.inputs.get("provisionedThroughput")),
    )


def _template(t: Target) -> Json:
    disks = [
        _disk_made_at_boot(disk, disk.get("sourceImage"), disk.get("diskSizeGb"), disk.get("diskType"))
        for disk in t.inputs.get("disks", ())
    ]
    return {
        "name": t.name,
        "properties": _some(machineType=t.inputs["machineType"], disks=disks, **_machine(t, short_types=True)),
    }


def _disk_made_at_boot(disk: Json, image: object, size: object, type_: object) -> Json:
    """Templates say of it in one place what instances say in two; both name its type differently."""
    labels = disk.get("labels", disk.get("initializeParams", {}).get("labels"))
    return _some(
        boot=disk.get("boot"),
        autoDelete=disk.get("autoDelete"),
        deviceName=disk.get("deviceName"),
        type="PERSISTENT",
        mode="READ_WRITE",
        initializeParams=_some(sourceImage=image, diskSizeGb=_digits(size), diskType=type_, labels=labels),
    )


def _instance(t: Target) -> Json:
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
    return _some(
        name=t.name,
        machineType=link(t, f"{zone}/machineTypes/{t.inputs['machineType']}"),
        disks=disks,
        resourcePolicies=[_url(policy)] if policy else None,
        **_machine(t, short_types=False),
    )


def _machine(t: Target, short_types: bool) -> Json:
    """What templates and instances have in common."""
    account = t.inputs.get("serviceAccount")
    metadata = t.inputs.get("metadata") or {}
    zone = t.inputs.get("zone")
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
            {
                "acceleratorType": a["type"] if short_types else link(t, f"zones/{zone}/acceleratorTypes/{a['type']}"),
                "acceleratorCount": a["count"],
            }
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
    out = dict(given)
    for name in ("maxRunDuration", "preemptionNoticeDuration"):
        if name in out:
            out[name] = {"seconds": str(out[name]["seconds"])}
    return out


def _digits(value: object) -> str | None:
    """64-bit integers travel as texts."""
    return None if value is None else str(value)


def _url(value: str) -> str:
    """Ids (``projects/p/...``) as links."""
    return value if value.startswith("http") else f"{SELF_LINK}/{value}"


# --- the others: what the provider would compute ----------------------------------------


def _account(t: Target) -> Json:
    email = f"{t.inputs['accountId']}@{t.project}.iam.gserviceaccount.com"
    name = f"projects/{t.project}/serviceAccounts/{email}"
    return {"id": name, "name": name, "email": email, "member": f"serviceAccount:{email}"}


def _function(t: Target) -> Json:
    return {
        "id": f"projects/{t.project}/locations/{t.region}/functions/{t.name}",
        "url": f"https://{t.region}-{t.project}.cloudfunctions.net/{t.name}",
    }


def _sink(t: Target) -> Json:
    writer = f"serviceAccount:{t.name}@gcp-sa-logging.iam.gserviceaccount.com"
    return {"id": f"projects/{t.project}/sinks/{t.name}", "writerIdentity": writer}


def _in_project(what: str) -> Outputs:
    return lambda t: {"id": f"projects/{t.project}/{what}/{t.name}"}


def _custom_role(t: Target) -> Json:
    name = f"projects/{t.project}/roles/{t.inputs['roleId']}"
    return {"id": name, "name": name}


def _bucket(t: Target) -> Json:
    return {"id": t.name, "url": f"gs://{t.name}", "selfLink": f"https://www.googleapis.com/storage/v1/b/{t.name}"}


def _object(t: Target) -> Json:
    return {"id": f"{t.inputs['bucket']}-{t.name}", "outputName": t.name}


def _member(t: Target) -> Json:
    parts = [str(t.inputs[key]) for key in _MEMBER_OF if key in t.inputs]
    return {"id": "/".join([*parts, str(t.inputs["role"]), str(t.inputs["member"])])}


_MEMBER_OF = ("bucket", "topic", "subscription", "subnetwork", "secretId", "serviceAccountId", "project", "name")


def _repository(t: Target) -> Json:
    return {"id": f"projects/{t.project}/locations/{t.region}/repositories/{t.name}"}


def _service_identity(t: Target) -> Json:
    """Google's own account for one of its services in a project; it has no name but the service's."""
    service = str(t.inputs["service"])
    email = f"service-1@gcp-sa-{service.partition('.')[0]}.iam.gserviceaccount.com"
    return {"id": f"projects/{t.project}/services/{service}", "email": email, "member": f"serviceAccount:{email}"}


def _named(t: Target) -> Json:
    return {"id": f"projects/{t.project}/{short(t.type).replace(':', '/')}/{t.name}"}


_COMPUTE = "gcp:compute/"
KINDS: dict[str, Kind] = {
    f"{_COMPUTE}network:Network": Kind(_compute_outputs, "global/networks", _network),
    f"{_COMPUTE}subnetwork:Subnetwork": Kind(_compute_outputs, "regions/{region}/subnetworks", _subnetwork),
    f"{_COMPUTE}firewall:Firewall": Kind(_compute_outputs, "global/firewalls", _firewall),
    f"{_COMPUTE}resourcePolicy:ResourcePolicy": Kind(
        _compute_outputs, "regions/{region}/resourcePolicies", _resource_policy
    ),
    f"{_COMPUTE}disk:Disk": Kind(_compute_outputs, "zones/{zone}/disks", _disk, frozenset({"labels"})),
    f"{_COMPUTE}regionInstanceTemplate:RegionInstanceTemplate": Kind(
        _compute_outputs, "regions/{region}/instanceTemplates", _template, auto_name=True
    ),
    f"{_COMPUTE}instance:Instance": Kind(
        _compute_outputs,
        "zones/{zone}/instances",
        _instance,
        frozenset({"metadata", "labels"}),
        ignore=frozenset({"allowStoppingForUpdate"}),
    ),
    # An archive's name is its content's hash: another path to it is no change.
    "gcp:storage/bucketObject:BucketObject": Kind(_object, in_place=None, ignore=frozenset({"source"})),
    "gcp:storage/bucket:Bucket": Kind(_bucket, in_place=None),
    "gcp:storage/bucketIAMMember:BucketIAMMember": Kind(_member, binding=True),
    "gcp:serviceaccount/account:Account": Kind(_account, in_place=frozenset({"displayName"})),
    "gcp:serviceaccount/iAMMember:IAMMember": Kind(_member, binding=True),
    "gcp:projects/iAMCustomRole:IAMCustomRole": Kind(_custom_role, in_place=frozenset({"permissions", "title"})),
    "gcp:projects/iAMMember:IAMMember": Kind(_member, binding=True),
    "gcp:cloudrunv2/serviceIamMember:ServiceIamMember": Kind(_member, binding=True),
    "gcp:cloudfunctionsv2/function:Function": Kind(_function, in_place=None),
    "gcp:cloudscheduler/job:Job": Kind(_named, in_place=None),
    "gcp:pubsub/topic:Topic": Kind(_in_project("topics"), in_place=None),
    "gcp:pubsub/topicIAMMember:TopicIAMMember": Kind(_member, binding=True),
    "gcp:pubsub/subscription:Subscription": Kind(_in_project("subscriptions"), in_place=None),
    "gcp:pubsub/subscriptionIAMMember:SubscriptionIAMMember": Kind(_member, binding=True),
    "gcp:projects/serviceIdentity:ServiceIdentity": Kind(_service_identity, binding=True),
    "gcp:secretmanager/secretIamMember:SecretIamMember": Kind(_member, binding=True),
    "gcp:compute/subnetworkIAMMember:SubnetworkIAMMember": Kind(_member, binding=True),
    "gcp:artifactregistry/repository:Repository": Kind(_repository, in_place=None),
    "gcp:logging/projectSink:ProjectSink": Kind(_sink, in_place=None),
    "gcp:monitoring/notificationChannel:NotificationChannel": Kind(_in_project("notificationChannels"), in_place=None),
    "gcp:monitoring/alertPolicy:AlertPolicy": Kind(_in_project("alertPolicies"), in_place=None),
    "gcp:billing/budget:Budget": Kind(_named, in_place=None),
}
