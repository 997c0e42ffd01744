"""Names, labels and idempotency keys: how a machine is known to be ours.

Every name is at most 63 characters of ``[a-z][-a-z0-9]*`` (the stricter of GCE's
and EC2's rules). Numbers of attempts and disks only rise and are never used twice.
"""

from __future__ import annotations

import re
import secrets
import uuid
from typing import NamedTuple

LABEL_STACK = "sk-stack"
LABEL_POOL = "sk-pool"
LABEL_JOB = "sk-job"
LABEL_RANK = "sk-rank"
LABEL_ATTEMPT = "sk-attempt"

# Stack and pool names leave room for job, rank and attempt within 63 characters.
STACK_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,22}[a-z0-9])?\Z")
POOL_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,22}[a-z0-9])?\Z")
JOB_ID = re.compile(r"[a-z0-9]{8}\Z")
JOB_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?\Z")

_VM = re.compile(r"sk-(?P<stack>.+)-(?P<job>[a-z0-9]{8})-r(?P<rank>\d{4,5})-a(?P<number>\d+)\Z")
_DISK = re.compile(r"sk-(?P<stack>.+)-(?P<job>[a-z0-9]{8})-r(?P<rank>\d{4,5})-d(?P<number>\d+)\Z")
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # no 0/o, 1/l/i: ids are read aloud


class Owned(NamedTuple):
    """What a machine's or disk's name says. ``number``: the attempt, or the disk number."""

    stack: str
    job: str
    rank: int
    number: int


def new_job_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(8))


def vm_name(stack: str, job: str, rank: int, attempt: int) -> str:
    return f"sk-{stack}-{job}-r{rank:04d}-a{attempt}"


def disk_name(stack: str, job: str, rank: int, number: int) -> str:
    """Also the name of the snapshot that a zone move fills that disk from."""
    return f"sk-{stack}-{job}-r{rank:04d}-d{number}"


def static_node_name(stack: str, pool: str, index: int) -> str:
    return f"sk-{stack}-{pool}-s{index}"


def parse_vm_name(name: str) -> Owned | None:
    return _parse(_VM, name)


def parse_disk_name(name: str) -> Owned | None:
    return _parse(_DISK, name)


def _parse(pattern: re.Pattern[str], name: str) -> Owned | None:
    found = pattern.match(name)
    if not found:
        return None
    return Owned(found["stack"], found["job"], int(found["rank"]), int(found["number"]))


def labels(stack: str, pool: str, job: str, rank: int, attempt: int | None = None) -> dict[str, str]:
    """The complete labels of a dynamic VM (or of a rank's disk, which has no attempt)."""
    out = {LABEL_STACK: stack, LABEL_POOL: pool, LABEL_JOB: job, LABEL_RANK: str(rank)}
    if attempt is not None:
        out[LABEL_ATTEMPT] = str(attempt)
    return out


def idempotency_key(job_uid: str, verb: str, rank: int, number: int, zone: str) -> str:
    """GCE ``requestId`` / EC2 ``ClientToken`` of the one call that may create this thing."""
    return str(uuid.uuid5(uuid.UUID(job_uid), f"{verb}/{rank}/{number}/{zone}"))
