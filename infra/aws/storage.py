"""The bucket, which is the stack's only state, and the objects that Pulumi writes into it.

Pulumi writes four: the agent's bundle, the startup script, the function's archive, and
``stack/pools.json`` (``pools.py``). What machines may touch is in ``identity.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra import naming
from infra.aws.identity import Arns, Statement, document
from infra.boot import Scripts
from infra.bundle import Archive
from infra.protection import protection
from infra.settings import Settings

# Documents that are compared and swapped: a write that names no version would undo somebody's. A job's id has eight
# characters; `*` would be slashes too, and so an output that somebody calls `rec`.
SWAPPED: tuple[str, ...] = ("jobs/????????/rec", "stack/alloc")
UNFINISHED_DAYS = 1  # a checkpoint's upload takes minutes; what was left of one bills until it is removed


def bucket_rules(settings: Settings) -> tuple[Statement, ...]:
    """What nobody may do, whatever his rights."""
    arns = Arns(settings)
    return (
        Statement(
            "TlsOnly",
            ("s3:*",),
            (arns.bucket(), *arns.objects("*")),
            {"Bool": {"aws:SecureTransport": "false"}},
            {"AWS": "*"},
            "Deny",
        ),
        Statement(
            "CompareAndSwapOnly",
            ("s3:PutObject",),
            arns.objects(*SWAPPED),
            {"Null": {"s3:if-match": "true", "s3:if-none-match": "true"}},
            {"AWS": "*"},
            "Deny",
        ),
    )


@dataclass(frozen=True)
class StorageArgs:
    settings: Settings
    bundle: Archive
    source: Archive
    scripts: Scripts


class Storage(pulumi.ComponentResource):
    """``bucket``; ``bundle``, ``boot`` and ``source`` (objects); ``guards``: what keeps it closed."""

    def __init__(self, name: str, args: StorageArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:aws:Storage", name, None, opts)
        self._settings = args.settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.bucket = self._bucket()
        self.guards = self._guards()
        self.bundle = self._object("bundle", f"bundles/{args.bundle.sha256}.tar", archive=args.bundle)
        self.boot = self._object("boot", f"boot/{args.scripts.sha256}.sh", content=args.scripts.startup)
        self.source = self._object("source", f"function/{args.source.sha256}.zip", archive=args.source)
        self.register_outputs({})

    def _bucket(self) -> aws.s3.Bucket:
        """Without versions: records are rewritten all day, and a checkpoint that is replaced would bill a day more."""
        keep = self._settings.bucket.on_destroy
        called = self._settings.bucket_name()
        return aws.s3.Bucket(
            "bucket",
            bucket=called,
            force_destroy=keep == "delete",
            tags=naming.tags(self._settings.labels, self._settings.stack, called),
            opts=pulumi.ResourceOptions.merge(self._child, protection(keep)),
        )

    def _guards(self) -> Sequence[pulumi.Resource]:
        """They stay where the bucket does: one that a destroy leaves behind must not be left open."""
        keep = self._settings.bucket.on_destroy
        opts = pulumi.ResourceOptions.merge(self._child, protection(keep) if keep == "retain" else None)
        closed = aws.s3.BucketPublicAccessBlock(
            "closed",
            bucket=self.bucket.bucket,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=opts,
        )
        owner = aws.s3.BucketOwnershipControls(
            "owner",
            bucket=self.bucket.bucket,
            rule=aws.s3.BucketOwnershipControlsRuleArgs(object_ownership="BucketOwnerEnforced"),
            opts=opts,
        )
        rules = aws.s3.BucketPolicy(
            "rules",
            bucket=self.bucket.bucket,
            policy=document(bucket_rules(self._settings)),
            # S3 refuses one of the two while it puts the other into force.
            opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[closed])),
        )
        return (closed, owner, rules, self._lifecycle(opts))

    def _lifecycle(self, opts: pulumi.ResourceOptions) -> aws.s3.BucketLifecycleConfiguration:
        return aws.s3.BucketLifecycleConfiguration(
            "lifecycle",
            bucket=self.bucket.bucket,
            rules=[
                aws.s3.BucketLifecycleConfigurationRuleArgs(
                    id="unfinished-uploads",
                    status="Enabled",
                    filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=""),
                    abort_incomplete_multipart_upload=(
                        aws.s3.BucketLifecycleConfigurationRuleAbortIncompleteMultipartUploadArgs(
                            days_after_initiation=UNFINISHED_DAYS
                        )
                    ),
                )
            ],
            opts=opts,
        )

    def _object(
        self, name: str, key: str, archive: Archive | None = None, content: str | None = None
    ) -> aws.s3.BucketObjectv2:
        """Its content never changes under its key, which names its hash."""
        return aws.s3.BucketObjectv2(
            name,
            bucket=self.bucket.bucket,
            key=key,
            source=pulumi.FileAsset(str(archive.path)) if archive else None,
            content=content,
            content_type="application/octet-stream" if archive else "text/x-shellscript",
            opts=self._child,
        )
