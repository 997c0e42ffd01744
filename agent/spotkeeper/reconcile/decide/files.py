"""Other files for a job that holds: what a resume may replace, and what its disks hold fast.

All of a hold's machines are given up, so the next generation's agents fetch whatever the record names. One
write of the record replaces the job file; until then the old one is in force, whatever lies in the bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.record import Phase
from spotkeeper.spec.stack import StackState

SHORT = 12  # digits of a hash in the ledger: the objects are found by them


def adopt(draft: Draft, sha256: str) -> tuple[str, str]:
    """Put the job file of this hash in force: why not, or ''; and what changed, for the ledger."""
    old, new = draft.seen.spec, draft.seen.files.get(sha256)
    if draft.record.phase is not Phase.HOLD:
        return "only a job that holds takes other files: pause it first", ""
    if new is None:
        return f"its job file {sha256[:SHORT]} is not there, or makes no sense: resume it with the files again", ""
    if old is None:
        return "the job file that its disks were written under is gone: nothing says what they hold", ""
    if why := refusal(old, new, draft.seen.stack):
        return why, ""
    before = draft.record.spec_sha256
    draft.set(spec_sha256=sha256, mended=True, keep_disks=new.keep_disks)
    draft.seen = replace(draft.seen, spec=new)
    return "", _changed(old, new, before, sha256)


def refusal(old: JobSpec, new: JobSpec, stack: StackState | None) -> str:
    """Why a job with disks cannot go on with this job file, and the remedy; or ''. ``stack`` None: not known here."""
    found = list(_fixed(old, new, stack))
    if not found:
        return ""
    return f"{'; '.join(found)}. Leave that as it was, or submit the file under another name, as a job of its own"


def _fixed(old: JobSpec, new: JobSpec, stack: StackState | None) -> Iterator[str]:
    if new.name != old.name:
        yield f"name: it is {old.name}, and the file says {new.name}"
    if new.size() != old.size():
        resize = "" if old.size().min == old.size().max else f" (within its range: spotkeeper resize {old.name} NODES)"
        yield f"nodes: its ranks have their disks{resize}"
    if new.spread != old.spread:
        yield "spread: its disks are where they are"
    if new.checkpoint.replicated != old.checkpoint.replicated:
        yield "checkpoint.replicated: its checkpoints are of the other kind"
    if new.stop != old.stop:
        yield "stop: its checkpoints are of the other kind"
    if not old.checkpoint.replicated and new.nproc != old.nproc:
        yield "nproc: a sharded checkpoint fits only as many processes as wrote it"
    if new.seed != old.seed:
        yield "seed: its place in the data counts samples in the order of the old one"
    if stack is not None and _kinds(new, stack) != _kinds(old, stack):
        yield "pools, static: static nodes keep their data on disks of their own, so they stay in or out"


def _kinds(spec: JobSpec, stack: StackState) -> set[str]:
    """Kinds of the pools whose disks the job may have written."""
    named = (pool for pool in stack.pools if not spec.pools or pool.name in spec.pools)
    return {pool.kind for pool in named if pool.kind == "spot" or spec.static == "use"}


def _changed(old: JobSpec, new: JobSpec, before: str, after: str) -> str:
    """``with other files: job file 3f… -> 9a…, source 0c… -> 77…``."""
    parts = [f"job file {_short(before)} -> {_short(after)}"]
    if new.source_sha256 != old.source_sha256:
        parts.append(f"source {_short(old.source_sha256)} -> {_short(new.source_sha256)}")
    return f"with other files: {', '.join(parts)}"


def _short(sha256: str | None) -> str:
    return sha256[:SHORT] if sha256 else "none"
