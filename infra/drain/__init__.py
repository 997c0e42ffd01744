"""The resource whose deletion empties the stack of what reconcile made.

Nothing dynamic is in Pulumi's state, so a plain ``pulumi destroy`` would leave machines
that bill, or fail on a network that is in use. Deleting this resource writes
``stack/drain`` (from then on no pass inserts anything), then deletes machines, rank disks
and snapshots of this stack by label or tag until two looks in a row find nothing. It refuses
to touch a stack that is not its own, and never touches what Pulumi declared (no ``sk-job``).

The provider stands in an importable module, so that Pulumi keeps a reference to it and
not a copy of its code: a destroy from a newer checkout drains as that checkout does. So a
property that is added needs a default, for stacks that were made without it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import pulumi
from pulumi.dynamic import CheckFailure, CheckResult, CreateResult, DiffResult, Resource, ResourceProvider, UpdateResult

from infra.drain.emptying import Cloud, DrainError, empty

__all__ = [
    "AwsDrainArgs",
    "Drain",
    "DrainError",
    "DrainProvider",
    "Drained",
    "DrainedArgs",
    "GcpDrainArgs",
    "HasParts",
]


PLACE = ("cloud", "stack", "project", "region")


@dataclass(frozen=True)
class GcpDrainArgs:
    """``compute``, ``storage``: where the cloud answers."""

    stack: str
    project: str
    zones: Sequence[str]
    bucket: pulumi.Input[str]
    compute: str
    storage: str
    cloud: str = "gcp"


@dataclass(frozen=True)
class AwsDrainArgs:
    """``ec2``, ``s3``: where the cloud answers; "" means AWS itself, or what ``AWS_ENDPOINT_URL`` says."""

    stack: str
    region: str
    bucket: pulumi.Input[str]
    ec2: str = ""
    s3: str = ""
    cloud: str = "aws"


class Drain(Resource):
    """Declares the drain; see the module."""

    def __init__(
        self, name: str, args: GcpDrainArgs | AwsDrainArgs, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        properties: dict[str, Any] = {each.name: getattr(args, each.name) for each in fields(args)}
        if "zones" in properties:
            properties["zones"] = list(properties["zones"])
        super().__init__(DrainProvider(), name, properties, opts)


class HasParts(Protocol):
    """A component, by the resources it is made of."""

    parts: list[pulumi.Resource]


@dataclass(frozen=True)
class DrainedArgs:
    """``stands_on``: components that must outlive the machines of reconcile."""

    drain: GcpDrainArgs | AwsDrainArgs
    descriptor: pulumi.Resource
    stands_on: Sequence[HasParts]


class Drained(pulumi.ComponentResource):
    """``drain``: deleted before anything that a dynamic machine stands on, and before the static nodes: while the
    function lives it would replace them."""

    def __init__(self, name: str, args: DrainedArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(f"spotkeeper:{args.drain.cloud}:Drained", name, None, opts)
        needed = [part for component in args.stands_on for part in component.parts]
        self.drain = Drain(
            "drain", args.drain, pulumi.ResourceOptions(parent=self, depends_on=[args.descriptor, *needed])
        )
        self.register_outputs({})


class DrainProvider(ResourceProvider):
    """Create lifts an old drain, and so does an update; delete drains.

    Never replaced: half of a replacement would drain a live stack.
    """

    serialize_as_secret_always = False

    def check(self, _olds: dict[str, Any], news: dict[str, Any]) -> CheckResult:
        """A stack stays what and where it is: elsewhere nobody would look for the machines and disks that it left."""
        moved = [name for name in PLACE if name in _olds and name in news and _olds[name] != news[name]]
        told = "was {}, and is {}: machines and disks of jobs would be left behind. `pulumi destroy` first, then `up`"
        return CheckResult(news, [CheckFailure(name, told.format(_olds[name], news[name])) for name in moved])

    def create(self, props: dict[str, Any]) -> CreateResult:
        cloud = opened(props)
        cloud.lift()
        return CreateResult(f"drain/{cloud.stack}", dict(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        names = [name for name in {*_olds, *_news} if not name.startswith("__") and _olds.get(name) != _news.get(name)]
        changes = bool(names) or _marked(_news)
        return DiffResult(changes=changes, replaces=[], stables=[], delete_before_replace=False)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        opened(_news).lift()
        return UpdateResult(dict(_news))

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        cloud = opened(_props)
        if _id != f"drain/{cloud.stack}":
            raise DrainError(f"{_id} does not drain the stack {cloud.stack}: nothing was deleted")
        _tell(cloud.stack, empty(cloud))


def _marked(props: Mapping[str, Any]) -> bool:
    """Whether a destroy that was cut off left its mark, under which a stack that lives on would insert nothing.

    Asked in previews too, whose reader may not be allowed to look: then there is nothing to say of it.
    """
    try:
        return opened(props).marked()
    except DrainError:
        return False


def opened(props: Mapping[str, Any]) -> Cloud:
    """The cloud of a drain, as it stands in Pulumi's state."""
    if props.get("cloud", "gcp") == "aws":
        from infra.drain.aws import Ec2

        return Ec2.of(props)
    from infra.drain.gcp import ComputeEngine

    return ComputeEngine.of(props)


def _tell(stack: str, gone: Counter[str]) -> None:
    """Pulumi shows what a provider says on its standard error."""
    said = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in sorted(gone.items()))
    print(f"drain of {stack}: {said or 'nothing was there'}; all gone", file=sys.stderr, flush=True)
