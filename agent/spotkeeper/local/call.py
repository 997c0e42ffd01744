"""One request to Compute Engine's REST, taken apart, and its answer. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from spotkeeper.local import errors
from spotkeeper.local import wire as w
from spotkeeper.local.errors import ApiError
from spotkeeper.local.paths import Ref
from spotkeeper.local.wire import BodyError, JsonObject, JsonValue

T = TypeVar("T")
NAME, ZONE, REGION = "(?P<name>[^/]+)", "/zones/(?P<zone>[^/]+)", "/regions/(?P<region>[^/]+)"


@dataclass(frozen=True)
class Call:
    """One request, taken apart. ``at``: the named parts of the path."""

    method: str
    path: str
    at: Mapping[str, str]
    query: Mapping[str, str]
    body: JsonValue

    @property
    def scope(self) -> str:
        """``zones/z``, ``regions/r`` or ``global``."""
        if "zone" in self.at:
            return f"zones/{self.at['zone']}"
        return f"regions/{self.at['region']}" if "region" in self.at else "global"

    def ref(self, kind: str, name: str = "") -> Ref:
        return Ref(self.at["project"], self.scope, kind, name or self.at.get("name", ""))

    @property
    def request_id(self) -> str | None:
        return self.query.get("requestId") or None

    def parsed(self, kind: type[T]) -> T:
        """
        Raises:
            ApiError: 400 for a body that is none of this kind, 501 for a field that is not built.
        """
        try:
            return w.parse(self.body, kind)
        except BodyError as bad:
            if bad.known is not None:
                raise errors.not_built(str(bad)) from None
            raise ApiError(400, "badRequest", str(bad)) from None


Handler = Callable[[Call], JsonObject]
Route = tuple[str, str, Handler]
"""Verb, pattern of the path below its project, and who answers."""


class Answer(NamedTuple):
    status: int
    body: JsonObject


def decode(body: bytes) -> JsonValue:
    """
    Raises:
        ApiError: 400 for what is no JSON.
    """
    if not body.strip():
        return {}
    try:
        value: JsonValue = json.loads(body)
    except ValueError as error:
        raise ApiError(400, "parseError", f"Invalid JSON payload received. {error}") from None
    return value
