"""Names of things: from any spelling a client sends to one canonical path, and back to a self link. Pure.

A canonical path is ``projects/p/zones/z/disks/d`` (or ``regions/r``, ``global``); it is also the key of the
thing's document. Clients send full URLs of any host, ``projects/...``, ``zones/...`` or ``global/...``.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import NamedTuple

_URL = re.compile(r"https?://[^/]+/compute/(?:v1|beta|alpha)/(?P<path>.+)\Z|https?://compute[^/]*/(?P<other>.+)\Z")
_FULL = re.compile(
    r"projects/(?P<project>[^/]+)/(?P<scope>global|zones/[^/]+|regions/[^/]+)/(?P<kind>[A-Za-z]+)/(?P<name>[^/]+)\Z"
)


class Ref(NamedTuple):
    """``scope``: ``global``, ``zones/<zone>`` or ``regions/<region>``; ``kind``: the REST collection."""

    project: str
    scope: str
    kind: str
    name: str

    @property
    def path(self) -> str:
        return f"projects/{self.project}/{self.scope}/{self.kind}/{self.name}"

    @property
    def place(self) -> str:
        """The zone's or region's own name; ``global`` for global."""
        return self.scope.rsplit("/", 1)[-1]

    def folder(self) -> str:
        """The prefix all things of this kind and scope share."""
        return f"projects/{self.project}/{self.scope}/{self.kind}/"


def parse(text: str, project: str) -> Ref | None:
    """Any spelling of a reference; None for what is none. Images of a family keep ``family`` in the name."""
    found = _URL.match(text)
    path = (found["path"] or found["other"]) if found else text
    if path.startswith(("zones/", "regions/", "global/")):
        path = f"projects/{project}/{path}"
    full = _FULL.match(path)
    return Ref(full["project"], full["scope"], full["kind"], full["name"]) if full else None


def timestamp(now: float) -> str:
    """RFC 3339 with milliseconds, as the API writes it."""
    return datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="milliseconds")


def last(text: str) -> str:
    return text.rstrip("/").rsplit("/", 1)[-1]
