"""What a pushed event says: where to look, and nothing else. No field of it decides anything.

Google's own shape (a Pub/Sub push around an audit entry) is passed over but for the machine's name.
"""

from __future__ import annotations

import base64
import binascii
import re

from msgspec import Struct

from spotkeeper.reconcile.body import BodyError, parse
from spotkeeper.spec import codec
from spotkeeper.spec.names import parse_vm_name

_INSTANCE = re.compile(r"projects/(?P<project>[-a-z0-9:.]+)/zones/[-a-z0-9]+/instances/(?P<name>[-a-z0-9]+)\Z")


class PushMessage(Struct, frozen=True):
    data: str = ""


class Push(Struct, frozen=True):
    """A Pub/Sub push; its other fields are Google's business."""

    message: PushMessage


class ProtoPayload(Struct, frozen=True, rename="camel"):
    resource_name: str = ""


class LogEntry(Struct, frozen=True, rename="camel"):
    """A preemption's audit entry. Only the machine's name is read, and only as a hint where to look."""

    proto_payload: ProtoPayload = ProtoPayload()


def job_of_event(data: bytes, stack: str, project: str) -> str | None:
    """The job of the machine that a pushed audit entry names; None where it is none of the stack's.

    Google names the project by its id, at times by its number, which the stack does not know.

    Raises:
        BodyError: it is no push, or holds no log entry.
    """
    message = parse(data, Push).message
    try:
        inner = base64.b64decode(message.data, validate=True)
        entry = codec.decode(inner, LogEntry)
    except (binascii.Error, ValueError, RecursionError):
        raise BodyError("a push without a log entry") from None
    found = _INSTANCE.match(entry.proto_payload.resource_name)
    if found is None or not (found["project"] == project or found["project"].isdecimal()):
        return None
    owned = parse_vm_name(found["name"])
    return owned.job if owned is not None and owned.stack == stack else None
