"""The Pulumi resource whose deletion deletes the machines, disks and snapshots that the function created.

Those are not in Pulumi's state, so without this resource ``pulumi destroy`` would leave running machines, or fail
because machines use the network. The deletion writes ``stack/drain`` (then the function launches nothing), and deletes
all that has the stack's label and a job's label until two listings in a row show nothing. It refuses the bucket of
another stack, and never touches resources that Pulumi declared, since these have no job's label (``sk-job``).

An update that removes a region drains this region (``leaving.py``), before Pulumi deletes its subnetwork: after
``stack/pools.json`` is written without it, so that the function launches nothing there meanwhile. Whether a job still
needs the region is checked before that write (:class:`Regions`), and again by the drain.

Pulumi stores a reference to the provider's module and no copy of its code, so a destroy uses the code of the current
checkout. A new property therefore needs a default, for stacks that were created without this property.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
from pulumi.dynamic import CheckFailure, CheckResult, CreateResult, DiffResult, Resource, ResourceProvider, UpdateResult

from infra.drain import leaving
from infra.drain.emptying import DrainCloud, DrainError, empty
from infra.settings.model import Settings
from infra.shared import Component

PLACE = ("cloud", "stack", "project", "region")


class Drain(Resource):
    """The resource that drains the stack when it is deleted.

    ``drain_args`` in each cloud's ``function.py`` sets its properties. Both clouds: ``cloud``, ``stack``, ``bucket``
    and ``region`` (home). Google Cloud: ``project``, ``zones``, and its APIs' addresses ``compute`` and ``storage``.
    AWS: the addresses ``ec2`` and ``s3`` ("" for AWS's own), ``profile``, the AWS profile of `up` ("" if the
    operator's shell chooses it), and ``regions`` of a stack with several.
    """

    def __init__(self, name: str, properties: dict[str, Any], opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(DrainProvider(), name, properties, opts)


class Drained(Component):
    """The component with the ``drain``.

    A destroy deletes the drain before the static machines and before the resources that dynamic machines need.
    """

    def __init__(
        self,
        settings: Settings,
        args: dict[str, Any],
        descriptor: pulumi.Resource,
        needed: Sequence[Component],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """Declare the drain. The resources of the components in ``needed`` are deleted only after the drain."""
        super().__init__("Drained", settings, opts)
        parts = [part for component in needed for part in component.parts]
        self.drain = Drain("drain", args, pulumi.ResourceOptions(parent=self, depends_on=[descriptor, *parts]))
        self.register_outputs({})


class Regions(Resource, module="spotkeeper", name="Regions"):  # Pulumi's names for a type
    """The resource that refuses an `up` or preview without a region that a job needs.

    ``stack/pools.json`` depends on it, so a refused `up` leaves the function's regions as they are.
    """

    def __init__(self, properties: dict[str, Any], opts: pulumi.ResourceOptions) -> None:
        super().__init__(RegionsProvider(), "regions", dict(properties), opts)  # it adds to them


class RegionsProvider(ResourceProvider):
    """The provider of :class:`Regions`: it remembers the drain's properties, which name the regions."""

    serialize_as_secret_always = False

    def check(self, _olds: dict[str, Any], news: dict[str, Any]) -> CheckResult:
        return CheckResult(news, _refusals(_olds, news))

    def create(self, props: dict[str, Any]) -> CreateResult:
        return CreateResult(f"regions/{props['stack']}", dict(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        return DiffResult(changes=_changed(_olds, _news), replaces=[], stables=[], delete_before_replace=False)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        return UpdateResult(dict(_news))


class DrainProvider(ResourceProvider):
    """The provider of :class:`Drain`: delete drains the stack, create and update remove ``stack/drain``.

    It never lets Pulumi replace the resource: that would delete the old resource, and so drain a stack in use.
    """

    serialize_as_secret_always = False

    def check(self, _olds: dict[str, Any], news: dict[str, Any]) -> CheckResult:
        """Refuse a change that would leave machines and disks behind, or lose a job's only checkpoint.

        The former: another cloud, stack name, project or home region; the latter: without a region that a job needs.
        """
        moved = [name for name in PLACE if name in _olds and name in news and _olds[name] != news[name]]
        told = "cannot change from {} to {}: jobs' machines and disks would stay. Run `pulumi destroy` first"
        failures = [CheckFailure(name, told.format(_olds[name], news[name])) for name in moved]
        return CheckResult(news, failures or _refusals(_olds, news))

    def create(self, props: dict[str, Any]) -> CreateResult:
        cloud = opened(props)
        cloud.lift()
        return CreateResult(f"drain/{cloud.stack}", dict(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        changes = _changed(_olds, _news) or _marked(_news)
        return DiffResult(changes=changes, replaces=[], stables=[], delete_before_replace=False)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        if regions := leaving.regions(_olds, _news):
            cloud = opened(_olds)
            _report(f"{cloud.stack} in {', '.join(sorted(regions))}", leaving.drain(cloud, regions))
        opened(_news).lift()
        return UpdateResult(dict(_news))

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        cloud = opened(_props)
        if _id != f"drain/{cloud.stack}":
            raise DrainError(f"{_id} belongs to another stack than {cloud.stack}: nothing was deleted")
        _report(cloud.stack, empty(cloud))


def _marked(props: Mapping[str, Any]) -> bool:
    """Return whether an interrupted destroy left ``stack/drain``, with which the function launches nothing.

    If so, a preview shows a change: `up` will remove the object. A preview by a user who cannot read the bucket shows
    none.
    """
    try:
        return opened(props).marked()
    except DrainError:
        return False


def _changed(olds: Mapping[str, Any], news: Mapping[str, Any]) -> bool:
    return any(not name.startswith("__") and olds.get(name) != news.get(name) for name in {*olds, *news})


def _refusals(olds: Mapping[str, Any], news: Mapping[str, Any]) -> list[CheckFailure]:
    """Return why regions cannot be removed yet; [] for a user who cannot read the bucket: the drain checks again."""
    regions = leaving.regions(olds, news)
    try:
        return [CheckFailure("regions", why) for why in leaving.needed(opened(olds), regions)] if regions else []
    except DrainError:
        return []


def opened(props: Mapping[str, Any]) -> DrainCloud:
    """Return a client of the stack's cloud, made from the drain's properties in Pulumi's state."""
    if props.get("cloud", "gcp") == "aws":
        from infra.drain.aws import Ec2

        return Ec2.of(props)
    from infra.drain.gcp import ComputeEngine

    return ComputeEngine.of(props)


def _report(stack: str, gone: Counter[str]) -> None:
    counts = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in sorted(gone.items()))
    print(f"drain of {stack}: deleted {counts or 'nothing, since nothing was left'}", file=sys.stderr, flush=True)
