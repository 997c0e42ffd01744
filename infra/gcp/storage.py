"""The bucket with all of the stack's state, the rights to it, and the objects that Pulumi writes into it.

Pulumi writes three objects: the agent's bundle, the function's source, and ``stack/pools.json`` (see ``pools.py``).
Machines can read their programs and all jobs' sources, and write all jobs' logs, checkpoints and outputs, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.bundle import Archive
from infra.gcp.identity import GcpIdentity
from infra.settings.model import Settings
from infra.shared import Component, protection

UNFINISHED_DAYS = 1  # an upload takes minutes; parts of an unfinished one are billed until deleted


@dataclass(frozen=True)
class BucketAccess:
    """A right in the bucket. ``condition`` restricts it to objects with certain names; None: all objects."""

    key: str
    role: str
    condition: str | None = None


def machine_access(bucket: str) -> tuple[BucketAccess, ...]:
    """Return a machine's rights: read its programs and all sources, write all logs, checkpoints and outputs."""
    objects = _objects(bucket)
    return (
        BucketAccess("bundles", "roles/storage.objectViewer", f'resource.name.startsWith("{objects}/bundles/")'),
        BucketAccess("source", "roles/storage.objectViewer", _below(objects, "source/", "!=")),
        *(
            BucketAccess(name, "roles/storage.objectUser", _below(objects, f"{name}/", "!="))
            for name in ("logs", "ckpt", "out")
        ),
    )


def function_access(bucket: str) -> tuple[BucketAccess, ...]:
    """Return the function's rights in the bucket: it writes its own documents and only reads what Pulumi writes.

    It must not write bundles: it tells machines which bundle to run, so with a bundle of its own it could have them run
    any code as root. It can still list the whole bucket: the condition excludes prefixes of object names, but the
    resource of a list call is the bucket itself, whose name has none of these prefixes.
    """
    objects = _objects(bucket)
    declared = ("bundles/", "function/", "stack/drain", "stack/pools.json")
    others = " && ".join(f'!resource.name.startsWith("{objects}/{path}")' for path in declared)
    return (
        BucketAccess("state", "roles/storage.objectUser", others),
        BucketAccess("stack", "roles/storage.objectViewer", f'resource.name.startsWith("{objects}/stack/")'),
    )


def submitter_access(bucket: str) -> tuple[BucketAccess, ...]:
    """Return a submitter's rights: read everything, create jobs' documents, requests and studies, delete names.

    Submitters cannot change records: an overwrite needs the right to delete, which the role ``objectCreator`` lacks.
    The wildcard ``{job}`` of a condition (:func:`_below`) also matches text with slashes: ``jobs/{job}/rec`` matches
    ``jobs/<job>/ckpt/rec`` too. So the folders that submitters must not write are excluded by name.
    """
    objects = _objects(bucket)
    made = " || ".join(_below(objects, name, "!=") for name in ("requests/", "rec", "source/", "spec"))
    others = " && ".join(_below(objects, f"{name}/", "==") for name in ("ckpt", "facts", "ledger", "logs", "out"))
    return (
        BucketAccess("reads", "roles/storage.objectViewer"),
        BucketAccess("jobs", "roles/storage.objectCreator", f"({made}) && {others}"),
        BucketAccess("sweeps", "roles/storage.objectCreator", _of_sweeps(objects)),
        BucketAccess("active", "roles/storage.objectCreator", f'resource.name.startsWith("{objects}/active/")'),
        BucketAccess("names", "roles/storage.objectUser", f'resource.name.startsWith("{objects}/names/")'),
        BucketAccess("studies", "roles/storage.objectCreator", f'resource.name.startsWith("{objects}/studies/")'),
    )


def _of_sweeps(objects: str) -> str:
    """Return a condition that is true for a search's documents but its state, which only the function writes."""
    names = ("cohorts/", "source/", "spec.json", "stops/", "trials/")
    return " || ".join(f'resource.name.extract("{objects}/sweeps/{{sweep}}/{name}") != ""' for name in names)


def shell_access(bucket: str, reads: bool = True) -> tuple[BucketAccess, ...]:
    """Return a shell user's rights: to read the bucket (for finding the job) and to add ledger entries of shells.

    By the names of these entries, readers believe only that a shell was opened.

    Args:
        reads: whether to grant the right to read; False for a submitter, who already has it.
    """
    ledgers = f'{_below(_objects(bucket), "ledger/", "!=")} && resource.name.extract(".shell-{{id}}") != ""'
    adds = BucketAccess("tells", "roles/storage.objectCreator", ledgers)
    return (BucketAccess("reads", "roles/storage.objectViewer"), adds) if reads else (adds,)


def _objects(bucket: str) -> str:
    return f"projects/_/buckets/{bucket}/objects"


def _below(objects: str, name: str, sign: str) -> str:
    """Return a condition that is true for objects whose name begins with ``jobs/<job>/<name>``, or for all others.

    ``extract`` returns the part of the name at ``{job}``, and "" for a name without that beginning. ``sign`` compares
    the result with "": ``!=`` chooses the objects below ``jobs/<job>/<name>``, ``==`` all others.
    """
    return f'resource.name.extract("{objects}/jobs/{{job}}/{name}") {sign} ""'


class GcpStorage(Component):
    """The ``bucket``, with the objects ``bundle`` (the agent's) and ``source`` (the function's)."""

    def __init__(self, settings: Settings, bundle: Archive, source: Archive, identity: GcpIdentity) -> None:
        super().__init__("Storage", settings)
        self.bucket = self._bucket()
        self.bundle = self._archive("bundle", f"bundles/{bundle.sha256}.tar", bundle)
        self.source = self._archive("source", f"function/{source.sha256}.zip", source)
        bucket, node, function = settings.bucket_name(), identity.machine, identity.function
        self.access: list[pulumi.Resource] = [
            *(self._grant("node", node.member, access) for access in machine_access(bucket)),
            *(self._grant("function", function.member, access) for access in function_access(bucket)),
            *(
                self._grant(naming.address(who), who, access)
                for who in settings.submitters
                for access in submitter_access(bucket)
            ),
            *(
                self._grant(naming.address(who), who, access)
                for who in settings.ssh
                for access in shell_access(bucket, reads=who not in settings.submitters)
            ),
        ]
        self.register_outputs({})

    def _grant(self, who: str, member: pulumi.Input[str], access: BucketAccess) -> gcp.storage.BucketIAMMember:
        when = access.condition
        return gcp.storage.BucketIAMMember(
            f"{who}-{access.key}",
            bucket=self.bucket.name,
            role=access.role,
            member=member,
            condition=gcp.storage.BucketIAMMemberConditionArgs(title=access.key, expression=when) if when else None,
            opts=self.child,
        )

    def _bucket(self) -> gcp.storage.Bucket:
        settings = self.settings
        keep = settings.bucket.on_destroy
        return gcp.storage.Bucket(
            "bucket",
            name=settings.bucket_name(),
            location=(settings.bucket.location or settings.region).upper(),
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            force_destroy=keep == "delete",
            # Records are rewritten all day, and soft delete would bill every version for a week.
            soft_delete_policy=gcp.storage.BucketSoftDeletePolicyArgs(retention_duration_seconds=0),
            lifecycle_rules=[
                gcp.storage.BucketLifecycleRuleArgs(
                    action=gcp.storage.BucketLifecycleRuleActionArgs(type="AbortIncompleteMultipartUpload"),
                    condition=gcp.storage.BucketLifecycleRuleConditionArgs(age=UNFINISHED_DAYS),
                )
            ],
            labels=self.labels(),
            opts=pulumi.ResourceOptions.merge(self.child, protection(keep)),
        )

    def _archive(self, name: str, key: str, archive: Archive) -> gcp.storage.BucketObject:
        return gcp.storage.BucketObject(
            name,
            bucket=self.bucket.name,
            name=key,
            source=pulumi.FileAsset(str(archive.path)),
            content_type="application/octet-stream",
            opts=self.child,
        )
