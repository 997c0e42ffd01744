"""Implements Google's REST conventions: references to resources, requests, JSON bodies, fingerprints and answers.

A canonical path is ``projects/p/zones/z/disks/d`` (or ``regions/r``, ``global``); it is also the key of the resource's
document. Clients send full URLs of any host, ``projects/...``, ``zones/...`` or ``global/...``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NamedTuple, TypeVar

import msgspec
import requests
from msgspec import Struct
from starlette.responses import Response

from spotkeeper.contract import codec
from spotkeeper.local.core import errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.schema import INT64, NOT_BUILT, OUTPUT_ONLY, JsonObject, JsonValue

T = TypeVar("T")
NAME, ZONE, REGION = "(?P<name>[^/]+)", "/zones/(?P<zone>[^/]+)", "/regions/(?P<region>[^/]+)"
_URL = re.compile(r"https?://[^/]+/compute/(?:v1|beta|alpha)/(?P<path>.+)\Z|https?://compute[^/]*/(?P<other>.+)\Z")
_FULL = re.compile(
    r"projects/(?P<project>[^/]+)/(?P<scope>global|zones/[^/]+|regions/[^/]+)/(?P<kind>[A-Za-z]+)/(?P<name>[^/]+)\Z"
)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<at>[^`]*)`)?")
_ENUMS = frozenset(
    {"instanceTerminationAction", "provisioningModel", "onHostMaintenance", "nicType", "stackType"}
)  # clients send these enums blank


class Ref(NamedTuple):
    """A reference to a resource.

    ``scope``: ``global``, ``zones/<zone>`` or ``regions/<region>``; ``kind``: the REST collection.
    """

    project: str
    scope: str
    kind: str
    name: str

    @property
    def path(self) -> str:
        return f"projects/{self.project}/{self.scope}/{self.kind}/{self.name}"

    @property
    def place(self) -> str:
        """The name of the zone or region, or ``global``."""
        return self.scope.rsplit("/", 1)[-1]

    def folder(self) -> str:
        """The common prefix of all paths of this kind and scope."""
        return f"projects/{self.project}/{self.scope}/{self.kind}/"


def parse_ref(text: str, project: str) -> Ref | None:
    """Parse any spelling of a reference; return None if it is malformed."""
    found = _URL.match(text)
    path = (found["path"] or found["other"]) if found else text
    if path.startswith(("zones/", "regions/", "global/")):
        path = f"projects/{project}/{path}"
    full = _FULL.match(path)
    return Ref(full["project"], full["scope"], full["kind"], full["name"]) if full else None


def timestamp(now: float) -> str:
    """Format a time as the API does: RFC 3339 with milliseconds."""
    return datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="milliseconds")


def last(text: str) -> str:
    """Return the last part of a path or link."""
    return text.rstrip("/").rsplit("/", 1)[-1]


def fingerprint(value: object) -> str:
    """Return the fingerprint of labels or metadata; a client that changes them must send it back."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()[:8]
    return base64.b64encode(digest).decode()


@dataclass(frozen=True)
class ApiCall:
    """A parsed request. ``at``: the variable parts of the path by name, such as ``project``, ``zone`` and ``name``."""

    method: str
    path: str
    at: Mapping[str, str]
    query: Mapping[str, str]
    body: JsonValue

    @property
    def scope(self) -> str:
        """The scope of the named resource: ``zones/z``, ``regions/r`` or ``global``."""
        if "zone" in self.at:
            return f"zones/{self.at['zone']}"
        return f"regions/{self.at['region']}" if "region" in self.at else "global"

    def ref(self, kind: str, name: str = "") -> Ref:
        return Ref(self.at["project"], self.scope, kind, name or self.at.get("name", ""))

    @property
    def request_id(self) -> str | None:
        return self.query.get("requestId") or None


Handler = Callable[[ApiCall], JsonObject]
Route = tuple[str, str, Handler]
"""HTTP method, pattern of the path below ``projects/<project>``, and handler."""


# Bodies


def decode(body: bytes) -> JsonValue:
    """Parse a JSON body, an empty one as an empty object; ApiError (400) for invalid JSON."""
    if not body.strip():
        return {}
    try:
        value: JsonValue = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "parseError", f"Invalid JSON payload received. {error}") from None
    return value


def without_nulls(value: JsonValue) -> JsonValue:
    """Drop explicit nulls and blank enums, which clients send for "unset"."""
    if isinstance(value, dict):
        out = {key: without_nulls(item) for key, item in value.items()}
        return {key: item for key, item in out.items() if item is not None and not (item == "" and key in _ENUMS)}
    if isinstance(value, list):
        kept: list[JsonValue] = [item for item in map(without_nulls, value) if item is not None]
        return kept if kept or not value else None
    return value


def parse_body(body: JsonValue, kind: type[T]) -> T:
    """Convert a request body to its struct; ApiError 400 if it is invalid, 501 for an unsupported field."""
    clean = without_nulls(body)
    if not isinstance(clean, dict):
        raise ApiError(400, "badRequest", "Invalid JSON payload received. Expected an object.")
    wanted = {name.encode_name for name in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    clean = {key: value for key, value in clean.items() if key in wanted or key not in OUTPUT_ONLY}
    try:
        return codec.convert(clean, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


def _refusal(text: str) -> ApiError:
    found = _UNKNOWN.match(text)
    if not found:
        return ApiError(400, "badRequest", f"Invalid value in JSON payload: {text}")
    name, at = found["name"], found["at"] or ""
    if any(name in fields for fields in NOT_BUILT.values()):
        return errors.not_built(f"the field '{at + '.' if at else ''}{name}' is not supported")
    message = f"Invalid JSON payload received. Unknown name \"{name}\" at '{at}': Cannot find field."
    return ApiError(400, "badRequest", message)


def to_json(value: Struct) -> JsonObject:
    """Convert a struct to JSON: without unset fields, 64-bit integers as strings."""
    out = _stringify(msgspec.to_builtins(value))
    assert isinstance(out, dict)
    return out


def _stringify(value: JsonValue, key: str = "") -> JsonValue:
    if isinstance(value, dict):
        return {name: _stringify(item, name) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_stringify(item, key) for item in value]
    if key in INT64 and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value


# Answers


def json_answer(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def refused(error: ApiError) -> Response:
    """The answer with an error in Google's envelope."""
    return json_answer(error.body(), error.code)


# Clients on this machine


def session() -> requests.Session:
    """Return an HTTP session that ignores proxy settings: a proxy cannot reach this machine's loopback address."""
    made = requests.Session()
    made.trust_env = False
    return made


def refusal_message(answer: requests.Response) -> str:
    """Return the message in Google's error envelope, or the status and the start of any other body."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code} {answer.text[:300]}".strip()
