"""Requests, refusals, and the strict, size-limited parsing of request bodies.

Bodies are parsed only after authentication. An answer to a bad body repeats nothing of it.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from enum import Enum
from typing import BinaryIO, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper.contract.names import parse_vm_name

T = TypeVar("T")

MAX_BODY = 16 * 1024
MAX_DEPTH = 6
MAX_KEYS = 512  # a sync has at most 32 facts of 4 keys, and progress
MAX_INT = 2**53  # beyond it JSON readers disagree about what a number is

# Matches a string to the end of the text if its closing quote is missing: a pattern that failed there would retry at
# every quote, and 16 KB of quotes would cost a third of a second.
_STRING = re.compile(rb'"(?:[^"\\]+|\\.?)*+"?', re.DOTALL)
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))

_INSTANCE = re.compile(r"projects/(?P<project>[-a-z0-9:.]+)/zones/[-a-z0-9]+/instances/(?P<name>[-a-z0-9]+)\Z")


class Headers(Protocol):
    def get(self, key: str) -> str | None: ...


class Request(Protocol):
    """The part of a Flask request that the function reads."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Headers: ...
    @property
    def content_length(self) -> int | None: ...
    @property
    def stream(self) -> BinaryIO: ...


class Refusal(str, Enum):
    """The values of ``error`` in the answer to a refused request; :data:`STATUS` has the HTTP status of each."""

    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    METHOD = "method_not_allowed"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"


STATUS = {
    Refusal.INVALID: 400,
    Refusal.UNAUTHORIZED: 401,
    Refusal.NOT_FOUND: 404,
    Refusal.METHOD: 405,
    Refusal.TOO_LARGE: 413,
    Refusal.UNSUPPORTED: 415,
    Refusal.INTERNAL: 500,
    Refusal.UNAVAILABLE: 503,
}


class RequestRefusedError(Exception):
    """The request is refused. ``reason`` is for the log; ``allow``: the method that the path accepts."""

    def __init__(self, refusal: Refusal, reason: str = "", allow: str = "") -> None:
        super().__init__(reason or refusal.value)
        self.refusal, self.allow = refusal, allow


class BodyError(ValueError):
    """The path does not accept this body. The message is for the log and repeats nothing of the body."""


def read_body(request: Request) -> bytes:
    """Return the body of a POST, at most ``MAX_BODY`` bytes, not parsed yet."""
    encoding = request.headers.get("Content-Encoding")
    if encoding not in (None, "", "identity"):
        raise RequestRefusedError(Refusal.UNSUPPORTED, "a compressed body")
    if (request.content_length or 0) > MAX_BODY:
        raise RequestRefusedError(Refusal.TOO_LARGE)
    data = request.stream.read(MAX_BODY + 1)
    if len(data) > MAX_BODY:
        raise RequestRefusedError(Refusal.TOO_LARGE)
    kind = (request.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    if data and kind != "application/json":
        raise RequestRefusedError(Refusal.UNSUPPORTED, "not application/json")
    return data


def parse(data: bytes, kind: type[T]) -> T:
    """Return the body as a struct. Cheap checks come first and refuse most bad bodies in microseconds.

    Raises:
        BodyError: not UTF-8, not JSON, not of this type, nested too deeply, a duplicate key, or too large a number.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise BodyError("not UTF-8") from None
    if _deeper(data, MAX_DEPTH):
        raise BodyError("too deep")
    try:
        body = codec.decode(data, kind)
    except msgspec.DecodeError:
        raise BodyError(f"not a {kind.__name__}") from None
    _strict(text)
    return body


def _deeper(data: bytes, most: int) -> bool:
    """Return whether brackets nest deeper than ``most`` or do not balance. Each step removes the innermost pairs."""
    brackets = _STRING.sub(b"", data).translate(_SQUARE, _NO_BRACKET)
    for _ in range(most):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _strict(text: str) -> None:
    """Refuse what msgspec accepts but JSON readers read in different ways: duplicate keys, and very large numbers."""
    keys = 0

    def once(pairs: list[tuple[str, object]]) -> None:
        nonlocal keys
        keys += len(pairs)
        if len({key for key, _ in pairs}) != len(pairs):
            raise BodyError("a duplicate key")

    try:
        json.loads(text, object_pairs_hook=once, parse_constant=_constant, parse_int=_int, parse_float=_float)
    except BodyError:
        raise
    except (ValueError, RecursionError):
        raise BodyError("not JSON") from None
    if keys > MAX_KEYS:
        raise BodyError("too many keys")


def _constant(_: str) -> NoReturn:
    raise BodyError("not a JSON number")


def _int(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > MAX_INT:
        raise BodyError("a number too large")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BodyError("a number too large")
    return value


# -- pushed events: hints where to look; no field of one decides anything


class PushMessage(Struct, frozen=True):
    data: str = ""


class Push(Struct, frozen=True):
    """A Pub/Sub push; its other fields are ignored."""

    message: PushMessage


class ProtoPayload(Struct, frozen=True, rename="camel"):
    resource_name: str = ""


class LogEntry(Struct, frozen=True, rename="camel"):
    """A preemption's audit entry. Only the machine's name is read, as a hint that its job needs a round."""

    proto_payload: ProtoPayload = ProtoPayload()


def job_of_event(data: bytes, stack: str, project: str) -> str | None:
    """Return the job of the machine that a pushed audit entry names; None if the machine is not the stack's.

    Google names the project by its id or its number. The stack does not know the number, so any number is accepted.

    Raises:
        BodyError: the body is not a push with a log entry.
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
