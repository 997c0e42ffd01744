"""The bucket with all of the stack's state, and the objects that Pulumi writes into it.

Pulumi writes four objects: the agent's bundle, the startup script, the function's archive, and ``stack/pools.json``
(see ``pools.py``). The rights to the bucket are in ``rights.py``.
"""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.aws.rights import Arns, Statement, document
from infra.boot import Scripts
from infra.bundle import Archive
from infra.settings.model import Settings
from infra.shared import Component, protection

# Compare-and-swapped documents, which unconditional writes would corrupt. A job's id has eight characters; `*` would
# also match slashes, and thereby an output that a job names `rec`.
SWAPPED: tuple[str, ...] = ("jobs/????????/rec", "stack/allocation")
UNFINISHED_DAYS = 1  # an upload takes minutes; parts of an unfinished one are billed until deleted


def bucket_rules(settings: Settings) -> tuple[Statement, ...]:
    """Return what the bucket's policy denies: plain HTTP, and unconditional writes of compare-and-swapped documents."""
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


class AwsStorage(Component):
    """The ``bucket``, with the objects ``bundle`` (agent), ``boot`` (startup script) and ``source`` (function).

    ``archive``: the function's archive.
    """

    def __init__(
        self,
        settings: Settings,
        bundle: Archive,
        source: Archive,
        scripts: Scripts,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("Storage", settings, opts)
        self.archive = source
        self.bucket = self._bucket()
        self._close()
        self.bundle = self._object("bundle", f"bundles/{bundle.sha256}.tar", archive=bundle)
        self.boot = self._object("boot", f"boot/{scripts.sha256}.sh", content=scripts.startup)
        self.source = self._object("source", f"function/{source.sha256}.zip", archive=source)
        self.register_outputs({})

    def _bucket(self) -> aws.s3.Bucket:
        """Declare the bucket without versioning: records are rewritten all day, and old versions would bill."""
        keep = self.settings.bucket.on_destroy
        called = self.settings.bucket_name()
        return aws.s3.Bucket(
            "bucket",
            bucket=called,
            force_destroy=keep == "delete",
            tags=self.tags(called),
            opts=pulumi.ResourceOptions.merge(self.child, protection(keep)),
        )

    def _close(self) -> None:
        """Keep the bucket private. If a destroy retains the bucket, it also retains these settings."""
        keep = self.settings.bucket.on_destroy
        opts = pulumi.ResourceOptions.merge(self.child, protection(keep) if keep == "retain" else None)
        closed = aws.s3.BucketPublicAccessBlock(
            "closed",
            bucket=self.bucket.bucket,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=opts,
        )
        aws.s3.BucketOwnershipControls(
            "owner",
            bucket=self.bucket.bucket,
            rule=aws.s3.BucketOwnershipControlsRuleArgs(object_ownership="BucketOwnerEnforced"),
            opts=opts,
        )
        aws.s3.BucketPolicy(
            "rules",
            bucket=self.bucket.bucket,
            policy=document(bucket_rules(self.settings)),
            # S3 refuses to apply the public access block and the policy at the same time.
            opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[closed])),
        )
        aws.s3.BucketLifecycleConfiguration(
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
        """Declare an object whose key contains the hash of its content, so that an object never changes."""
        return aws.s3.BucketObjectv2(
            name,
            bucket=self.bucket.bucket,
            key=key,
            source=pulumi.FileAsset(str(archive.path)) if archive else None,
            content=content,
            content_type="application/octet-stream" if archive else "text/x-shellscript",
            opts=self.child,
        )
