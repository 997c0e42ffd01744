"""Pulumi components that both clouds share: component base, exports, static machines' disks, placement groups.

Two resources create nothing in a cloud: ``DiskGuard`` refuses to replace a static machine's disk, ``Settled`` waits
until new rights apply. Pulumi stores a reference to a provider's module and no copy of its code, so their providers
must be importable; they call no cloud.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
from pulumi.dynamic import CheckFailure, CheckResult, CreateResult, DiffResult, Resource, ResourceProvider, UpdateResult

from infra import naming
from infra.settings.model import Settings
from infra.settings.pool import OnDestroy, Pool

Text = pulumi.Output[str]
IAM_SPREADS_S = 120  # "usually within 2 minutes": https://cloud.google.com/iam/docs/access-change-propagation
# alerts.about -> a mail's text. Only a job's `max_usd` waits for a person; the other limits end by themselves.
ALARM_TEXTS = {
    "holds": "a job is on hold and waits for a person",
    "spend": "a limit on spending or launches is reached: the job gets no further machine for now",
    "orphans": "machines or disks belong to an unknown job",
}
_REMEDY = (
    "an empty disk would replace it. Declare a pool with another name, copy the data, then remove this pool; or set"
    " `allow_data_loss: true` if the data may be lost"
)


@dataclass(frozen=True)
class Exports:
    """The stack's outputs, for the command and for other stacks; the same in both clouds.

    ``ready`` is not an output: jobs are submitted once this resource exists. A destroy deletes it first, and then what
    jobs need.
    """

    bucket: Text
    function_url: Text
    bundle_sha256: str
    pools: list[str]
    static_machines: list[str]
    kept_disks: list[str]
    ready: pulumi.Resource


class Component(pulumi.ComponentResource):
    """A group of resources of type ``spotkeeper:<cloud>:<kind>``, named after its kind.

    Attributes:
        settings: the stack's settings.
        prefix: ``sk-<stack>``, the prefix of the stack's resource names.
        child: options of the component's resources.
        parts: resources that dynamic machines need; a destroy drains the stack before it deletes them.
    """

    def __init__(self, kind: str, settings: Settings, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(f"spotkeeper:{settings.cloud}:{kind}", kind.lower(), None, opts)
        self.settings = settings
        self.prefix = naming.stack(settings.stack)
        self.child = pulumi.ResourceOptions(parent=self)
        self.parts: list[pulumi.Resource] = []

    def home_key(self, key: str) -> str:
        """Return the name in Pulumi of a resource in the home region, with that region if it is not the first.

        Under one name a moved resource would be replaced, and providers delete what bears the program's name before
        they create it anew: a lost region would refuse, and the stack would have no home.
        """
        return key_in(key, self.settings.home_region(), self.settings)

    def labels(self, pool: str | None = None) -> dict[str, str]:
        return naming.labels(self.settings.labels, self.settings.stack, pool)

    def tags(self, name: str, pool: str | None = None) -> dict[str, str]:
        return naming.tags(self.settings.labels, self.settings.stack, name, pool)


def key_in(key: str, region: str, settings: Settings) -> str:
    """Return the name in Pulumi of a region's resource, so that a region's addition renames none of the home region."""
    return key if region == settings.region else f"{key}-{region}"


def protection(on_destroy: OnDestroy) -> pulumi.ResourceOptions:
    """Return the resource options for what `pulumi destroy` does to data.

    With ``protect`` Pulumi refuses to run. With ``retain`` it forgets the resource, and the cloud keeps it.
    """
    return pulumi.ResourceOptions(
        protect=True if on_destroy == "protect" else None, retain_on_delete=True if on_destroy == "retain" else None
    )


class Disks(Component):
    """The data disks of static machines. Dynamic machines have disks that the function makes, outside Pulumi's state.

    ``ids``: machine -> id of its disk. ``kept``: names of disks that outlive a destroy and continue to bill.
    """

    def __init__(
        self,
        settings: Settings,
        declare: Callable[[Component, Pool, str, str, pulumi.ResourceOptions], Text],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Declare the disks; ``declare``: (component, pool, name, zone, options) -> the id of one disk."""
        super().__init__("Disks", settings, opts)
        guard = [DiskGuard(settings, self.child)] if settings.static() else []
        self.ids: dict[str, Text] = {}
        self.kept: list[str] = []
        for pool in settings.static():
            for index in range(pool.size):
                name = naming.static_disk(settings.stack, pool.name, index)
                options = pulumi.ResourceOptions.merge(
                    pulumi.ResourceOptions(parent=self, depends_on=guard), protection(pool.disk.on_destroy)
                )
                machine = naming.static_machine(settings.stack, pool.name, index)
                self.ids[machine] = declare(self, pool, name, pool.machine_zone(index), options)
                if pool.disk.on_destroy != "delete":
                    self.kept.append(name)
        self.register_outputs({})


class PlacementGroups(Component):
    """The placement groups: one for each zone of a pool that has a placement strategy.

    A launch names a group; a group in a template would tie the template to one zone. ``groups``: pool -> zone -> the
    group's id or name, whichever a launch needs.
    """

    def __init__(
        self,
        settings: Settings,
        declare: Callable[[Component, Pool, str], tuple[pulumi.Resource, Text]],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Declare the groups; ``declare``: (component, pool, zone) -> (the group, its id or name for a launch)."""
        super().__init__("Placement", settings, opts)
        self.groups: dict[str, dict[str, Text]] = {}
        for pool in settings.pools:
            if pool.placement is None:
                continue
            found = {zone: declare(self, pool, zone) for zone in pool.zones}
            self.parts += [group for group, _ in found.values()]
            self.groups[pool.name] = {zone: name for zone, (_, name) in found.items()}
        self.register_outputs({})


# --- resources that create nothing in a cloud ---------------------------------------------------------


class DiskGuard(Resource, module="spotkeeper", name="Places"):  # Pulumi's names for a type
    """The resource that refuses an `up` or preview that would replace a static machine's disk by an empty one.

    A disk cannot move, shrink or change its type: the provider would create a new disk instead. If the disk has
    ``on_destroy: protect``, Pulumi refuses that; with ``delete`` or ``retain`` the machine would go on with an empty
    disk. All disks depend on this resource, so it refuses before a disk is touched.
    """

    def __init__(self, settings: Settings, opts: pulumi.ResourceOptions) -> None:
        properties = {"stack": settings.stack, "disks": disks(settings), "allow_data_loss": settings.allow_data_loss}
        super().__init__(DiskGuardProvider(), "places", properties, opts)


def disks(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return, by disk name, the properties of static machines' disks that must not change.

    On AWS ``type`` is always "", since a disk can change its type there.
    """
    return {
        naming.static_disk(settings.stack, pool.name, index): {
            "zone": pool.machine_zone(index),
            "type": pool.disk.type if settings.cloud == "gcp" else "",
            "size_gb": pool.disk.size_gb,
        }
        for pool in settings.static()
        for index in range(pool.size)
    }


class DiskGuardProvider(ResourceProvider):
    """The provider of :class:`DiskGuard`: it remembers the disks and refuses a change that would lose a disk."""

    serialize_as_secret_always = False

    def check(self, _olds: dict[str, Any], news: dict[str, Any]) -> CheckResult:
        wrong = () if news["allow_data_loss"] else replaced(_olds.get("disks") or {}, news["disks"])
        return CheckResult(news, [CheckFailure("disks", each) for each in wrong])

    def create(self, props: dict[str, Any]) -> CreateResult:
        return CreateResult(f"places/{props['stack']}", dict(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        changes = any(_olds.get(name) != _news[name] for name in ("disks", "allow_data_loss"))
        return DiffResult(changes=changes, replaces=[], stables=[], delete_before_replace=False)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        return UpdateResult(dict(_news))


def replaced(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a message for each disk that the provider would replace. Removing or growing a disk is no problem."""
    for name, new in after.items():
        old = before.get(name)
        if old is None:
            continue
        if old["zone"] != new["zone"]:
            yield f"{name} is in {old['zone']} and cannot move to {new['zone']}: {_REMEDY}"
        elif old["type"] != new["type"]:
            yield f"{name} is a {old['type']} and cannot become a {new['type']}: {_REMEDY}"
        elif old["size_gb"] > new["size_gb"]:
            yield f"{name} has {old['size_gb']:g} GB and cannot shrink to {new['size_gb']:g}: {_REMEDY}"


class Settled(Resource, module="spotkeeper", name="Settled"):  # Pulumi's names for a type
    """The resource that waits ``seconds`` when it is created and when ``rights`` change, and otherwise not at all.

    Google takes minutes to apply new rights: a build that starts right after its account got its roles fails ("Access
    to bucket gcf-v2-sources-... denied").
    """

    def __init__(self, rights: Sequence[str], seconds: int, opts: pulumi.ResourceOptions) -> None:
        super().__init__(SettledProvider(), "settled", {"rights": list(rights), "seconds": seconds}, opts)


class SettledProvider(ResourceProvider):
    """The provider of :class:`Settled`, which only waits."""

    serialize_as_secret_always = False

    def create(self, props: dict[str, Any]) -> CreateResult:
        time.sleep(props["seconds"])
        return CreateResult("settled", dict(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        changes = _olds.get("rights") != _news["rights"]
        return DiffResult(changes=changes, replaces=[], stables=[], delete_before_replace=False)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        time.sleep(_news["seconds"])
        return UpdateResult(dict(_news))
