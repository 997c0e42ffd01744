"""A table: which permissions each call of Compute Engine requires, and on which resources.

A method without an entry is refused. A call can name a resource by its number. As conditions compare names, a
binding with a condition gives no permission for such a call.

Sources: "IAM permissions" of each method in https://cloud.google.com/compute/docs/reference/rest/v1, and "Required
permissions" of https://cloud.google.com/compute/docs/instances/create-start-instance. Attaching a disk requires the
right to act as the machine's identity (https://github.com/googleapis/google-cloud-java/issues/10391).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from spotkeeper.local.core import catalog, errors
from spotkeeper.local.core import schema as w
from spotkeeper.local.core.rest import NAME, REGION, ZONE, ApiCall, Ref, parse_ref

ACT_AS = "iam.serviceAccounts.actAs"


class RequiredPermission(NamedTuple):
    """A permission that a call requires on a resource.

    ``name``: the resource's path; None if the call has the resource's number instead of its name.
    """

    permission: str
    name: str | None


PermissionsOf = Callable[[ApiCall], Iterable[RequiredPermission]]
Merge = Callable[[ApiCall], w.InstanceProperties]
Accounts = Callable[[Ref], list[str]]


class Rights:
    """Finds the permissions that a call requires.

    ``merge`` returns the fields of an insert's body and template; ``accounts`` returns the e-mails of a VM's accounts.
    """

    def __init__(self, merge: Merge, accounts: Accounts) -> None:
        self._merge = merge
        self._accounts = accounts
        self._table = [
            (verb, re.compile(rf"projects/(?P<project>[^/]+){pattern}\Z"), required)
            for verb, pattern, required in self._methods()
        ]

    def of(self, call: ApiCall) -> tuple[RequiredPermission, ...]:
        """Return the permissions that a call requires; ApiError (501) for a method that is not in the table."""
        for verb, pattern, required in self._table:
            if verb == call.method and pattern.match(call.path):
                return tuple(required(call))
        raise errors.not_built(f"the permissions for {call.method} {call.path} are unknown")

    def _methods(self) -> Iterator[tuple[str, str, PermissionsOf]]:
        for kind in ("instances", "disks"):
            yield "GET", f"/aggregated/{kind}", _in_project(f"compute.{kind}.list")
            yield "GET", f"{ZONE}/{kind}", _in_project(f"compute.{kind}.list")
            yield "GET", f"{ZONE}/{kind}/{NAME}", _on(kind, f"compute.{kind}.get")
            yield "DELETE", f"{ZONE}/{kind}/{NAME}", _on(kind, f"compute.{kind}.delete")
            yield "POST", f"{ZONE}/{kind}/{NAME}/setLabels", _on(kind, f"compute.{kind}.setLabels")
        yield "POST", f"{ZONE}/instances", self._insert
        yield "POST", f"{ZONE}/instances/{NAME}/attachDisk", self._attach
        for verb in ("detachDisk", "setMetadata", "start", "stop", "simulateMaintenanceEvent"):
            yield "POST", f"{ZONE}/instances/{NAME}/{verb}", _on("instances", f"compute.instances.{verb}")
        yield "POST", f"{ZONE}/disks", _insert_disk
        yield "POST", f"{ZONE}/disks/{NAME}/createSnapshot", _create_snapshot
        yield "GET", "/global/snapshots", _in_project("compute.snapshots.list")
        yield "GET", f"/global/snapshots/{NAME}", _on("snapshots", "compute.snapshots.get")
        yield "DELETE", f"/global/snapshots/{NAME}", _on("snapshots", "compute.snapshots.delete")
        for scope, kind in ((ZONE, "zoneOperations"), (REGION, "regionOperations"), ("/global", "globalOperations")):
            yield "GET", f"{scope}/operations", _in_project(f"compute.{kind}.list")
            yield "GET", f"{scope}/operations/{NAME}", _in_project(f"compute.{kind}.get")
            yield "POST", f"{scope}/operations/{NAME}/wait", _in_project(f"compute.{kind}.get")
        for method in ("capacity", "capacityHistory"):
            yield "POST", f"{REGION}/advice/{method}", _in_project(f"compute.advice.{method}")

    def _insert(self, call: ApiCall) -> Iterator[RequiredPermission]:
        """Yield an insert's permissions. A template's field requires the same permission as a field of the body."""
        project, body = call.at["project"], self._merge(call)
        name = _text(call.body, "name")
        machine = call.ref("instances", name).path
        yield RequiredPermission("compute.instances.create", machine)
        if link := call.query.get("sourceInstanceTemplate"):
            yield RequiredPermission("compute.instanceTemplates.useReadOnly", _path(link, project))
        for field, permission in (
            (body.labels, "setLabels"), (body.metadata, "setMetadata"), (body.tags, "setTags"),
            (body.service_accounts, "setServiceAccount"),
        ):  # fmt: skip
            if field:
                yield RequiredPermission(f"compute.instances.{permission}", machine)
        for account in body.service_accounts or ():
            yield RequiredPermission(ACT_AS, account.email)
        for index, disk in enumerate(body.disks or ()):
            yield from _disk_of(call, disk, name if disk.boot else f"{name}-{index}")
        for card in body.network_interfaces or ():
            subnetwork = _subnetwork(call, card)
            yield RequiredPermission("compute.subnetworks.use", subnetwork)
            if card.access_configs:
                yield RequiredPermission("compute.subnetworks.useExternalIp", subnetwork)
        for policy in body.resource_policies or ():
            yield RequiredPermission("compute.resourcePolicies.use", _path(policy, project))

    def _attach(self, call: ApiCall) -> Iterator[RequiredPermission]:
        yield from _on("instances", "compute.instances.attachDisk")(call)
        read_only = _text(call.body, "mode") == "READ_ONLY"
        use = "compute.disks.useReadOnly" if read_only else "compute.disks.use"
        yield RequiredPermission(use, _path(_text(call.body, "source"), call.at["project"]))
        for email in self._accounts(call.ref("instances")):
            yield RequiredPermission(ACT_AS, email)


def _in_project(permission: str) -> PermissionsOf:
    return lambda call: [RequiredPermission(permission, f"projects/{call.at['project']}")]


def _on(kind: str, permission: str) -> PermissionsOf:
    return lambda call: [RequiredPermission(permission, _named(call.ref(kind)))]


def _named(ref: Ref) -> str | None:
    return None if ref.name.isdecimal() else ref.path


def _path(link: str, project: str) -> str | None:
    ref = parse_ref(link, project)
    return _named(ref) if ref else None


def _text(body: object, field: str) -> str:
    value = body.get(field) if isinstance(body, dict) else None
    return value if isinstance(value, str) else ""


def _disk_of(call: ApiCall, disk: w.AttachedDisk, name: str) -> Iterator[RequiredPermission]:
    if disk.source is not None:
        yield RequiredPermission("compute.disks.use", _path(disk.source, call.at["project"]))
        return
    made = disk.initialize_params or w.InitializeParams()
    path = call.ref("disks", made.disk_name or name).path
    yield RequiredPermission("compute.disks.create", path)
    if made.labels:
        yield RequiredPermission("compute.disks.setLabels", path)
    yield from _image(made.source_image, call)


def _image(link: str | None, call: ApiCall) -> Iterator[RequiredPermission]:
    """Yield the permission for an image of this project. Any other project's image counts as public and needs none."""
    path = _path(link, call.at["project"]) if link else None
    if path is not None and path.startswith(f"projects/{call.at['project']}/"):
        yield RequiredPermission("compute.images.useReadOnly", path)


def _subnetwork(call: ApiCall, card: w.NetworkInterface) -> str | None:
    if card.subnetwork:
        return _path(card.subnetwork, call.at["project"])
    return Ref(call.at["project"], f"regions/{catalog.region_of(call.at['zone'])}", "subnetworks", "default").path


def _insert_disk(call: ApiCall) -> Iterator[RequiredPermission]:
    path = call.ref("disks", _text(call.body, "name")).path
    yield RequiredPermission("compute.disks.create", path)
    if isinstance(call.body, dict) and call.body.get("labels"):
        yield RequiredPermission("compute.disks.setLabels", path)
    if snapshot := _text(call.body, "sourceSnapshot"):
        yield RequiredPermission("compute.snapshots.useReadOnly", _path(snapshot, call.at["project"]))
    yield from _image(_text(call.body, "sourceImage"), call)


def _create_snapshot(call: ApiCall) -> Iterator[RequiredPermission]:
    yield from _on("disks", "compute.disks.createSnapshot")(call)
    path = Ref(call.at["project"], "global", "snapshots", _text(call.body, "name")).path
    yield RequiredPermission("compute.snapshots.create", path)
    if isinstance(call.body, dict) and call.body.get("labels"):
        yield RequiredPermission("compute.snapshots.setLabels", path)
