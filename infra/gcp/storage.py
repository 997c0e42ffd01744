"""The bucket, which is the stack's only state, and the objects that Pulumi writes into it.

Pulumi writes three: the agent's bundle, the function's source, and ``stack/pools.json``
(``pools.py``).
Machines may read what they run and write logs, checkpoints and outputs, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.bundle import Archive
from infra.gcp.identity import Identity
from infra.protection import protection
from infra.settings import Settings

UNFINISHED_DAYS = 1  # a checkpoint's upload takes minutes; what was left of one bills until it is removed


@dataclass(frozen=True)
class Access:
    """A right inside the bucket; ``condition`` is about an object's name."""

    key: str
    role: str
    condition: str


def node_access(bucket: str) -> tuple[Access, ...]:
    """What a machine may touch: its program, its job's source; and write its logs, checkpoints and output."""
    objects = f"projects/_/buckets/{bucket}/objects"
    return (
        Access("bundles", "roles/storage.objectViewer", f'resource.name.startsWith("{objects}/bundles/")'),
        Access(
            "source", "roles/storage.objectViewer", f'resource.name.extract("{objects}/jobs/{{job}}/source/") != ""'
        ),
        Access("logs", "roles/storage.objectUser", f'resource.name.extract("{objects}/jobs/{{job}}/logs/") != ""'),
        Access("ckpt", "roles/storage.objectUser", f'resource.name.extract("{objects}/jobs/{{job}}/ckpt/") != ""'),
        Access("out", "roles/storage.objectUser", f'resource.name.extract("{objects}/jobs/{{job}}/out/") != ""'),
    )


def function_access(bucket: str) -> tuple[Access, ...]:
    """Its documents; of what machines run as root, and of what people declare, it may read the stack's own only.

    It tells agents which bundle to become: whoever could write one as well would be root's equal on every machine.
    A list is asked of the bucket, whose name begins with none of these.
    """
    objects = f"projects/_/buckets/{bucket}/objects"
    declared = ("bundles/", "function/", "stack/drain", "stack/pools.json")
    not_these = " && ".join(f'!resource.name.startsWith("{objects}/{path}")' for path in declared)
    return (
        Access("state", "roles/storage.objectUser", not_these),
        Access("stack", "roles/storage.objectViewer", f'resource.name.startsWith("{objects}/stack/")'),
    )


@dataclass(frozen=True)
class StorageArgs:
    settings: Settings
    bundle: Archive
    source: Archive
    identity: Identity


class Storage(pulumi.ComponentResource):
    """``bucket``, ``bundle`` and ``source`` (objects)."""

    def __init__(self, name: str, args: StorageArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Storage", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        self.bucket = self._bucket(args.settings)
        self.bundle = self._archive("bundle", f"bundles/{args.bundle.sha256}.tar", args.bundle)
        self.source = self._archive("source", f"function/{args.source.sha256}.zip", args.source)
        bucket, node, function = args.settings.bucket_name(), args.identity.node, args.identity.function
        self.access: list[pulumi.Resource] = [
            *(self._may("node", node, access) for access in node_access(bucket)),
            *(self._may("function", function, access) for access in function_access(bucket)),
        ]
        self.register_outputs({})

    def _may(self, who: str, account: gcp.serviceaccount.Account, access: Access) -> gcp.storage.BucketIAMMember:
        return gcp.storage.BucketIAMMember(
            f"{who}-{access.key}",
            bucket=self.bucket.name,
            role=access.role,
            member=account.member,
            condition=gcp.storage.BucketIAMMemberConditionArgs(title=access.key, expression=access.condition),
            opts=self._child,
        )

    def _bucket(self, settings: Settings) -> gcp.storage.Bucket:
        keep = settings.bucket.on_destroy
        return gcp.storage.Bucket(
            "bucket",
            name=settings.bucket_name(),
            location=(settings.bucket.location or settings.region).upper(),
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            force_destroy=keep == "delete",
            # Records are rewritten all day: soft delete would bill every version of them for a week.
            soft_delete_policy=gcp.storage.BucketSoftDeletePolicyArgs(retention_duration_seconds=0),
            lifecycle_rules=[
                gcp.storage.BucketLifecycleRuleArgs(
                    action=gcp.storage.BucketLifecycleRuleActionArgs(type="AbortIncompleteMultipartUpload"),
                    condition=gcp.storage.BucketLifecycleRuleConditionArgs(age=UNFINISHED_DAYS),
                )
            ],
            labels=naming.labels(settings.labels, settings.stack),
            opts=pulumi.ResourceOptions.merge(self._child, protection(keep)),
        )

    def _archive(self, name: str, key: str, archive: Archive) -> gcp.storage.BucketObject:
        return gcp.storage.BucketObject(
            name,
            bucket=self.bucket.name,
            name=key,
            source=pulumi.FileAsset(str(archive.path)),
            content_type="application/octet-stream",
            opts=self._child,
        )
