"""Removes regions from a stack that stays in use: refuses while a job needs one, then deletes what jobs left there.

A job needs a region while it trains there or moves there, and while its newest checkpoint is nowhere else: on the disks
that a job on hold, or an ended one with ``keep_disks``, has there. A job on hold does not if the bucket has a copy of
that checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from infra.drain.emptying import DrainCloud, DrainError, empty
from spotkeeper.contract.cloud import disks_kept
from spotkeeper.contract.facts import parse_commit
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.names import JOB_ID
from spotkeeper.contract.record import Phase, Record
from spotkeeper.contract.stack import region_of
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import CorruptError, decode, decode_versioned


def regions(olds: Mapping[str, Any], news: Mapping[str, Any]) -> frozenset[str]:
    """Return the regions that an update of the drain removes from the stack."""
    return _regions(olds) - _regions(news) if olds else frozenset()


def _regions(props: Mapping[str, Any]) -> frozenset[str]:
    named = {*props.get("regions", ()), *map(region_of, props.get("zones", ()))}
    return frozenset({*named, str(props.get("region", ""))})


def needed(cloud: DrainCloud, left: frozenset[str]) -> list[str]:
    """Return for each job that needs one of the regions a line with its name, the reason and the remedy."""
    disks: dict[str, list[str]] = {}
    for thing in cloud.things():
        if thing.kind == "disk" and region_of(thing.zone) in left:
            disks.setdefault(thing.job, []).append(thing.name)
    jobs = sorted(job for job in {*cloud.active(), *disks} if JOB_ID.match(job))
    return [why for job in jobs for why in _reasons(cloud, job, left, disks.get(job, []))]


def drain(cloud: DrainCloud, left: frozenset[str]) -> Counter[str]:
    """Delete the machines and disks in these regions; return the number of deleted things by kind.

    Raises:
        DrainError: a job needs a region; or see :func:`infra.drain.emptying.empty`.
    """
    if why := needed(cloud, left):
        raise DrainError("; ".join(why))
    return empty(cloud, regions=left)


def _reasons(cloud: DrainCloud, job: str, left: frozenset[str], disks: list[str]) -> Iterator[str]:
    path = paths.record(job)
    data = cloud.read(path)
    if data is None:  # a submission under way, or disks that the next tick deletes
        return
    try:
        record = decode_versioned(data, Record, path)
    except CorruptError as error:
        yield f"job {job} may have checkpoints in {_names(left)}: {error}"
        return
    there = sorted(zone for zone in record.zones() if region_of(zone) in left)
    name = f"job {record.name}"
    if record.over:
        if record.keep_disks and disks:
            told = f"{name} has ended, and its file says `keep_disks`: {disks_kept(disks)} in {_names(left)}"
            yield f"{told}. Copy what you need, and delete them"
    elif not there:
        return
    elif record.phase is not Phase.HOLD:
        yield (
            f"{name} is in {', '.join(there)}: move it to another region (`spotkeeper move {record.name} ZONE`) or "
            f"cancel it (`spotkeeper cancel {record.name}`), and run this again"
        )
    elif not _covered(cloud, record):
        yield (
            f"{name} is on hold, and its only checkpoint is in {', '.join(there)}: resume it and move it to another "
            f"region (`spotkeeper resume {record.name}`, `spotkeeper move {record.name} ZONE`) or cancel it "
            f"(`spotkeeper cancel {record.name}`), and run this again"
        )


def _covered(cloud: DrainCloud, record: Record) -> bool:
    """Whether the bucket has a copy of the newest checkpoint of a job on hold, or the job has never trained."""
    if not record.gen:
        return True
    if not record.mirror:
        return False
    path, newest = paths.progress(record.job), parse_commit(record.told) or (0, 0)
    if (data := cloud.read(path)) is not None:
        try:
            progress = decode(data, Progress, path)
        except CorruptError:
            return False
        newest = max(newest, (progress.commit_gen or 0, progress.commit_step or 0))
    return (parse_commit(record.mirror[0].commit) or (0, 0)) >= newest


def _names(left: frozenset[str]) -> str:
    return ", ".join(sorted(left))
