"""Names, labels and idempotency keys, which identify Spotkeeper's machines and disks.

A name has at most 63 characters of ``[a-z][-a-z0-9]*`` (the stricter of GCE's and EC2's rules). Numbers of attempts and
disks only rise and are never used twice.
"""

from __future__ import annotations

import re
import secrets
import uuid
from typing import NamedTuple

LABEL_STACK = "sk-stack"
LABEL_POOL = "sk-pool"
LABEL_JOB = "sk-job"
LABEL_NODE = "sk-node"
LABEL_ATTEMPT = "sk-attempt"

# Stack and pool names are short enough for job, node and attempt to fit within 63 characters.
STACK_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,22}[a-z0-9])?\Z")
POOL_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,22}[a-z0-9])?\Z")
JOB_ID = re.compile(r"[a-z0-9]{8}\Z")
JOB_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?\Z")

_VM = re.compile(r"sk-(?P<stack>.+)-(?P<job>[a-z0-9]{8})-n(?P<node>\d{4,5})-a(?P<number>\d+)\Z")
_DISK = re.compile(r"sk-(?P<stack>.+)-(?P<job>[a-z0-9]{8})-n(?P<node>\d{4,5})-d(?P<number>\d+)\Z")
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # no 0/o, 1/l/i: ids are read aloud


class Owned(NamedTuple):
    """The parts of a machine's or disk's name. ``number``: the attempt, or the disk number."""

    stack: str
    job: str
    node: int
    number: int


def new_job_id(number: int | None = None) -> str:
    """Return a job id: of a large number, or a random one."""
    number = secrets.randbits(64) if number is None else number
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(8))


def vm_name(stack: str, job: str, node: int, attempt: int) -> str:
    return f"sk-{stack}-{job}-n{node:04d}-a{attempt}"


def disk_name(stack: str, job: str, node: int, number: int) -> str:
    """Return the name of a node's disk. A snapshot from which a zone move makes this disk has the same name."""
    return f"sk-{stack}-{job}-n{node:04d}-d{number}"


def static_machine_name(stack: str, pool: str, index: int) -> str:
    return f"sk-{stack}-{pool}-s{index}"


def session_document(stack: str) -> str:
    """Return the name of the Session Manager document that opens shells on the stack's machines (AWS)."""
    return f"sk-{stack}-ssh"


def parse_vm_name(name: str) -> Owned | None:
    return _parse(_VM, name)


def parse_disk_name(name: str) -> Owned | None:
    return _parse(_DISK, name)


def _parse(pattern: re.Pattern[str], name: str) -> Owned | None:
    found = pattern.match(name)
    if not found:
        return None
    stack, job, node, number = found.groups()
    return Owned(stack, job, int(node), int(number))


def labels(stack: str, pool: str, job: str, node: int, attempt: int | None = None) -> dict[str, str]:
    """Return all labels of a dynamic VM, or of a node's disk, which has no attempt."""
    out = {LABEL_STACK: stack, LABEL_POOL: pool, LABEL_JOB: job, LABEL_NODE: str(node)}
    if attempt is not None:
        out[LABEL_ATTEMPT] = str(attempt)
    return out


def idempotency_key(job: str, uid: str, verb: str, node: int, number: int, zone: str) -> str:
    """Return the GCE ``requestId`` or EC2 ``ClientToken`` for the call that creates a machine, disk or snapshot.

    A submitter chooses ``uid``; the job's id keeps the keys of other jobs out of reach.
    """
    return str(uuid.uuid5(uuid.UUID(uid), f"{job}/{verb}/{node}/{number}/{zone}"))
