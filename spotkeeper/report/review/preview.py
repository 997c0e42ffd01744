"""Reads the changes from `pulumi preview --json`, and decides which of them would lose data. Pure.

A review shows only a few harmless values of a resource, chosen by name, so that no secret can get into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from spotkeeper.contract import codec
from spotkeeper.contract.redact import redact

# Values that a review may show: sizes and places, never text that a user wrote.
SHOWN = frozenset(
    {"zone", "region", "location", "availabilityZone", "machineType", "instanceType", "size", "type", "iops",
     "throughput", "schedule", "scheduleExpression", "forceDestroy"}
)  # fmt: skip
VALUE_CHARS = 60
HOLDS_DATA = {
    "gcp:compute/disk:Disk": "a disk with its checkpoints",
    "gcp:compute/regionDisk:RegionDisk": "a disk with its checkpoints",
    "gcp:storage/bucket:Bucket": "a bucket with records, outputs and copies of checkpoints",
    "aws:ebs/volume:Volume": "a volume with its checkpoints",
    "aws:s3/bucket:Bucket": "a bucket with records, outputs and copies of checkpoints",
    "aws:s3/bucketV2:BucketV2": "a bucket with records, outputs and copies of checkpoints",
}
BUCKETS = frozenset(kind for kind, what in HOLDS_DATA.items() if what.startswith("a bucket"))
RULES = frozenset(  # resource types that hold a bucket's lifecycle rules
    {
        "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration",
        "aws:s3/bucketLifecycleConfigurationV2:BucketLifecycleConfigurationV2",
    }
)
EXPIRES = "a rule that deletes objects in the bucket by their age"
CUT_OFF = "the preview ends before its summary: it is incomplete, so the other changes are unknown"
MACHINES = frozenset({"gcp:compute/instance:Instance", "aws:ec2/instance:Instance"})
DRAIN = "drain"  # the resource whose deletion empties the stack (infra/drain)
JOB = "pulumi-python:dynamic/spotkeeper:Job"  # a job by git (infra/jobs.py)
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"  # the engine's mark for a value that is known only after `up`
SIGNATURE = "4dabf18193072939515e22adb298388d"  # the engine's key in a secret or another special value
_IGNORED = frozenset({"same", "read", "refresh", "read-replacement", "discard", "remove-pending-replace"})


class PreviewError(Exception):
    """Raised for text that is not a preview; the message says what to do."""


class Op(str, Enum):
    """The operation on a resource."""

    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    DELETE = "delete"
    KEEP = "keep"  # it leaves Pulumi's state and stays in the cloud (on_destroy: retain)


_OPS = {
    "create": Op.CREATE,
    "import": Op.CREATE,
    "update": Op.UPDATE,
    "replace": Op.REPLACE,
    "create-replacement": Op.REPLACE,
    "import-replacement": Op.REPLACE,
    "delete-replaced": Op.REPLACE,
    "discard-replaced": Op.REPLACE,
    "delete": Op.DELETE,
}


class Change(Struct, frozen=True, omit_defaults=True):
    """The change of one resource. ``why``: inputs that differ. ``data``: data that would be lost; "" if none."""

    op: Op
    type: str
    name: str
    why: tuple[str, ...] = ()
    data: str = ""
    warning: str = ""


class Preview(Struct, frozen=True):
    """A preview. ``same``: number of unchanged resources. ``errors``: why the preview failed, if it did."""

    changes: tuple[Change, ...]
    same: int
    errors: tuple[str, ...]

    def lost(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.data)


class Declared(Struct, frozen=True):
    """A resource as it will be after `up`; inputs that are known only then are :data:`UNKNOWN`."""

    type: str
    name: str
    inputs: dict[str, Any]
    protect: bool
    retain: bool


# --- the engine's digest ----------------------------------------------------------------


class _State(Struct, frozen=True):
    """A resource before or after the change; other fields are not read."""

    type: str = ""
    protect: bool = False
    retainOnDelete: bool = False  # noqa: N815  # Pulumi's name
    inputs: dict[str, Any] = {}


class _Step(Struct, frozen=True):
    op: str
    urn: str
    oldState: _State | None = None  # noqa: N815
    newState: _State | None = None  # noqa: N815
    diffReasons: tuple[str, ...] | None = None  # noqa: N815
    replaceReasons: tuple[str, ...] | None = None  # noqa: N815
    detailedDiff: dict[str, Any] | None = None  # noqa: N815


class _Diagnostic(Struct, frozen=True):
    message: str = ""
    severity: str = ""
    urn: str = ""


class _Digest(Struct, frozen=True):
    """The output of `pulumi preview --json`. It always has a ``config``, even without changes; other JSON has none."""

    config: dict[str, Any] | UnsetType = UNSET
    steps: tuple[_Step, ...] | None = None
    diagnostics: tuple[_Diagnostic, ...] | None = None
    changeSummary: dict[str, int] | None = None  # noqa: N815
    maybeCorrupt: bool = False  # noqa: N815

    def complete(self) -> bool:
        """Whether the engine finished. A finished summary is never empty, since it counts the stack itself."""
        return bool(self.changeSummary) and not self.maybeCorrupt


def read(text: bytes) -> Preview:
    """Read the output of ``pulumi preview --json``; raise PreviewError for other text."""
    digest = _digest(text)
    return Preview(
        changes=_merged(digest.steps or ()),
        same=(digest.changeSummary or {}).get("same", 0),
        errors=tuple(_errors(digest.diagnostics or ())) or (() if digest.complete() else (CUT_OFF,)),
    )


def declared(text: bytes) -> tuple[tuple[Declared, ...], bool]:
    """Return the resources as they will be after `up`, and whether the list is complete.

    Only the output of `pulumi preview --json --show-sames` includes the unchanged resources.

    Raises:
        PreviewError: as :func:`read`.
    """
    digest = _digest(text)
    steps = digest.steps or ()
    found = {
        step.urn: Declared(new.type, step.urn.rsplit("::", 1)[-1], new.inputs, new.protect, new.retainOnDelete)
        for step in steps
        if (new := step.newState) is not None and new.inputs and _OPS.get(step.op) is not Op.DELETE
    }
    same = sum(step.op == "same" for step in steps)
    return tuple(found.values()), digest.complete() and same == (digest.changeSummary or {}).get("same", 0)


def _digest(text: bytes) -> _Digest:
    try:
        digest = codec.decode(text, _Digest)
    except msgspec.DecodeError as error:
        raise PreviewError(_no_preview(text, str(error))) from None
    if digest.config is UNSET and not digest.steps and not digest.diagnostics:
        raise PreviewError(_no_preview(text, "it has neither steps nor a configuration"))
    return digest


def _no_preview(text: bytes, why: str) -> str:
    if not text.strip():
        return "it is empty: see the standard error of `pulumi preview`"
    if text.count(b"\n{") and text.lstrip().startswith(b"{"):
        return "it has an event on each line: unset PULUMI_ENABLE_STREAMING_JSON_PREVIEW"
    return f"it is not output of `pulumi preview --json`: {why}"


def _merged(steps: tuple[_Step, ...]) -> tuple[Change, ...]:
    """Return one change per resource: its first step that loses data, or else its first step."""
    found: dict[str, Change] = {}
    empty = [_bucket(step) for step in steps if step.op == "create" and _kind(step) in BUCKETS]
    for step in steps:
        change = _change(step)
        if change is None:
            continue
        if change.op is Op.CREATE and change.data == EXPIRES and _bucket(step) in empty:  # a new bucket holds no data
            change = replace(change, data="")
        before = found.get(step.urn)
        if before is None or (change.data and not before.data):
            found[step.urn] = change
    return tuple(found.values())


def _kind(step: _Step) -> str:
    return (step.newState or step.oldState or _State()).type or _type_of(step.urn)


def _bucket(step: _Step) -> str:
    """The name of the bucket that a step creates, or whose lifecycle rules it sets."""
    inputs = step.newState.inputs if step.newState else {}
    return str(inputs.get("bucket", inputs.get("name")))


def _change(step: _Step) -> Change | None:
    kind, name = _kind(step), step.urn.rsplit("::", 1)[-1]
    if kind.startswith(("pulumi:pulumi:", "pulumi:providers:")):
        return None
    warning = _exposed(step)
    if step.op in _IGNORED:
        return Change(Op.UPDATE, kind, name, (), warning=warning) if warning else None
    op = _OPS.get(step.op)
    if op is None:  # an operation of a newer engine; to ignore it could hide a loss
        unknown = "an unknown operation: check it yourself"
        return Change(Op.UPDATE, kind, name, (step.op,), _data(Op.DELETE, kind, name, step), unknown)
    if op is Op.DELETE and step.oldState is not None and step.oldState.retainOnDelete:
        kept = "stays in the cloud and is billed until you delete it" if kind in HOLDS_DATA else ""
        return Change(Op.KEEP, kind, name, warning=kept)
    return Change(op, kind, name, tuple(_why(step)), _data(op, kind, name, step), warning or _warning(op, kind))


def _type_of(urn: str) -> str:
    parts = urn.split("::")
    return parts[-2].rsplit("$", 1)[-1] if len(parts) >= 4 else "?"


def _data(op: Op, kind: str, name: str, step: _Step) -> str:
    """Describe the data that would be lost; "" if none. Replacing a retained disk counts: jobs get an empty disk."""
    gone = op in (Op.DELETE, Op.REPLACE)
    was = step.oldState.type if step.oldState else ""  # an alias may give a resource another type
    if gone and (kind in HOLDS_DATA or was in HOLDS_DATA):
        return HOLDS_DATA.get(kind) or HOLDS_DATA[was]
    if kind in BUCKETS | RULES and _expiring(step.newState) - _expiring(step.oldState):
        return EXPIRES
    if not gone:
        return ""
    if name == DRAIN:
        return "the stack's dynamic machines, node disks and snapshots, since deleting this resource empties the stack"
    if kind == JOB and op is Op.DELETE and (step.oldState or _State()).inputs.get("on_remove") == "cancel":
        return "a job, its disks and checkpoints: removing its file from the stack file's `jobs` cancels the job"
    return ""


def _expiring(state: _State | None) -> set[str]:
    """The bucket's lifecycle rules that delete objects, each as JSON. Rules that only abort uploads do not count."""
    inputs = state.inputs if state else {}
    rules = [*_list(inputs.get("lifecycleRules")), *_list(inputs.get("rules"))]
    return {msgspec.json.encode(rule, order="deterministic").decode() for rule in rules if _deletes(rule)}


def _list(value: object) -> list[Any]:
    """A list of rules; an unknown or secret value counts as one rule that deletes objects."""
    return value if isinstance(value, list) else [] if value is None else [str(value)]


def _deletes(rule: object) -> bool:
    """Whether a lifecycle rule of either cloud deletes objects; an unreadable rule counts as one that does."""
    if not isinstance(rule, dict) or SIGNATURE in rule:
        return True
    if rule.get("status") == "Disabled" or rule.get("enabled") is False:
        return False
    action = rule.get("action")
    kind = action.get("type") if isinstance(action, dict) else action
    return kind == "Delete" or any("xpiration" in name for name in rule)


def _warning(op: Op, kind: str) -> str:
    if kind in MACHINES and op in (Op.DELETE, Op.REPLACE):
        return "a static machine: its job stops, and resumes from the last checkpoint"
    if kind == JOB and op is Op.UPDATE:
        return "refused while the job runs: give the job another name, or cancel the running job"
    if kind == JOB and op is Op.DELETE:
        return "removed from the stack file's `jobs`, but the job continues (`cancel_removed_jobs` is off)"
    return ""


def _exposed(step: _Step) -> str:
    """The warning if a resource with data loses its protection, so that a later change can delete it; else ""."""
    old, new = step.oldState, step.newState
    if old is None or new is None or (old.type or new.type) not in HOLDS_DATA:
        return ""
    lifted = (old.protect and not new.protect) or (old.retainOnDelete and not new.retainOnDelete)
    forced = not old.inputs.get("forceDestroy") and bool(new.inputs.get("forceDestroy"))
    return "its protection ends: the next change or a destroy can delete its data" if lifted or forced else ""


def _why(step: _Step) -> Iterator[str]:
    """The paths of the inputs that differ; those that force a replacement come first."""
    names = [*(step.replaceReasons or ()), *(step.diffReasons or ()), *(step.detailedDiff or {})]
    old, new = (state.inputs if state else {} for state in (step.oldState, step.newState))
    for name in dict.fromkeys(names):
        yield f"{name}{_values(name, old, new)}"


def _values(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if name not in SHOWN:
        return ""
    before, after = _harmless(old.get(name)), _harmless(new.get(name))
    return f": {before} -> {after}" if before and after and before != after else ""


def _harmless(value: object) -> str:
    """Return a number or a short string as text, without secrets; "" for any other value."""
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, str) and len(value) <= VALUE_CHARS and not value.startswith("["):
        return redact(value)
    return ""


def _errors(diagnostics: tuple[_Diagnostic, ...]) -> Iterator[str]:
    for found in diagnostics:
        if found.severity != "error":
            continue
        where = found.urn.rsplit("::", 1)[-1]
        said = redact(found.message.removeprefix("error: ")).strip()
        yield f"{where}: {said}" if where else said
