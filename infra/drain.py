"""The resource whose deletion empties the stack of what reconcile made.

Nothing dynamic is in Pulumi's state, so a plain ``pulumi destroy`` would leave machines
that bill, or fail on a network that is in use. Deleting this resource writes
``stack/drain`` (from then on no pass inserts anything), then deletes machines, rank disks
and snapshots of this stack by label until two looks in a row find nothing. It refuses to
touch a stack that is not its own, and never touches what Pulumi declared (no ``sk-job``).

The provider stands in an importable module, so that Pulumi keeps a reference to it and
not a copy of its code.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource, ResourceProvider, UpdateResult
from spotkeeper.spec.names import LABEL_JOB, LABEL_STACK

DRAIN_OBJECT = "stack/drain"
POOLS_OBJECT = "stack/pools.json"
DEADLINE_S = 1800.0  # real seconds; a machine may use its whole shutdown
CLEAN_LOOKS = 2  # an insert accepted just before the drain shows up in the second look
_PAUSE_S = 2.0
_CALL_S = 60.0


class DrainError(Exception):
    """The stack could not be emptied; what is left, and what to do, is in the message."""


class NotFoundError(Exception):
    """The thing is gone already, which is what was wanted."""


@dataclass(frozen=True)
class DrainArgs:
    stack: str
    project: str
    zones: Sequence[str]
    bucket: pulumi.Input[str]
    compute: str
    storage: str


class Drain(Resource):
    """Declares the drain; see the module."""

    def __init__(self, name: str, args: DrainArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        properties: dict[str, Any] = {
            "stack": args.stack,
            "project": args.project,
            "zones": list(args.zones),
            "bucket": args.bucket,
            "compute": args.compute,
            "storage": args.storage,
        }
        super().__init__(DrainProvider(), name, properties, opts)


class DrainProvider(ResourceProvider):
    """Create lifts an old drain; delete drains. Never replaced: half of a replacement would drain a live stack."""

    serialize_as_secret_always = False

    def create(self, props: dict[str, Any]) -> CreateResult:
        target = Target.of(props)
        Emptying(target, Api(access_token(target))).lift()
        return CreateResult(f"drain/{target.stack}", dict(props))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        names = [name for name in Target.names() if _olds.get(name) != _news.get(name)]
        return DiffResult(changes=bool(names), replaces=[], stables=[], delete_before_replace=False)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        return UpdateResult(dict(_news))

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        target = Target.of(_props)
        if _id != f"drain/{target.stack}":
            raise DrainError(f"{_id} does not drain the stack {target.stack}: nothing was deleted")
        Emptying(target, Api(access_token(target))).run()


@dataclass(frozen=True)
class Target:
    """What to empty, as it stands in Pulumi's state."""

    stack: str
    project: str
    zones: tuple[str, ...]
    bucket: str
    compute: str
    storage: str

    @classmethod
    def of(cls, props: Mapping[str, Any]) -> Target:
        """``SPOTKEEPER_COMPUTE_ENDPOINT`` wins: a cloud on one machine may have moved to another port."""
        values = {name: props[name] for name in cls.names()}
        compute = os.environ.get("SPOTKEEPER_COMPUTE_ENDPOINT") or str(values["compute"])
        return cls(**{**values, "zones": tuple(values["zones"]), "compute": compute.rstrip("/")})

    @staticmethod
    def names() -> tuple[str, ...]:
        return ("stack", "project", "zones", "bucket", "compute", "storage")


def access_token(target: Target) -> str | None:
    """The operator's own right to call Google; None for a cloud that is not on the internet."""
    if urllib.parse.urlsplit(target.compute).scheme == "http":
        return None
    if token := os.environ.get("GOOGLE_OAUTH_ACCESS_TOKEN"):
        return token
    import google.auth
    import google.auth.transport.requests

    credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    credentials.refresh(google.auth.transport.requests.Request())  # type: ignore[no-untyped-call]
    return str(credentials.token)


@dataclass(frozen=True)
class Api:
    """JSON over HTTP, with the operator's token."""

    token: str | None = field(repr=False)

    def call(self, method: str, url: str, body: bytes | None = None) -> dict[str, Any]:
        """One call.

        Raises:
            NotFoundError: 404.
            DrainError: any other refusal, with the answer's text.
        """
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(url, method=method, data=body, headers=headers)  # noqa: S310 - our own endpoints
        try:
            with urllib.request.urlopen(request, timeout=_CALL_S) as answer:  # noqa: S310
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise NotFoundError(url) from None
            raise DrainError(f"{method} {url}: {error.code} {error.read()[:500].decode(errors='replace')}") from None
        except OSError as error:
            raise DrainError(f"{method} {url}: {error}") from None
        return json.loads(text) if text.strip() else {}


@dataclass(frozen=True)
class Thing:
    """Something of this stack that reconcile made; ``url`` is what to delete."""

    kind: str
    name: str
    url: str
    blocked: bool = False  # a disk that a machine still holds


@dataclass(frozen=True)
class Emptying:
    """The drain itself. ``pause`` and ``now`` are real time."""

    target: Target
    api: Api
    pause: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic

    def lift(self) -> None:
        """Remove an old ``stack/drain``: a stack that is built again may insert again."""
        with contextlib.suppress(NotFoundError):  # the usual case: it was never drained
            self.api.call("DELETE", self._object(DRAIN_OBJECT))

    def run(self) -> None:
        """Until two looks in a row find nothing.

        Raises:
            DrainError: another stack's bucket, or still not empty at the deadline.
        """
        self._own()
        self._announce()
        clean, end = 0, self.now() + DEADLINE_S
        while clean < CLEAN_LOOKS:
            left = list(self.things())
            clean = 0 if left else clean + 1
            for thing in left:
                self._delete(thing)
            if self.now() > end:
                names = ", ".join(thing.name for thing in left[:10])
                raise DrainError(f"after {DEADLINE_S:.0f} s still there: {names}. Delete them, then destroy again")
            if clean < CLEAN_LOOKS:
                self.pause(_PAUSE_S)

    def things(self) -> Iterator[Thing]:
        """One look: machines, then free disks, then snapshots."""
        compute = f"{self.target.compute}/projects/{self.target.project}"
        zones = self._zones(compute)
        for zone in zones:
            for item in self._list(f"{compute}/zones/{zone}/instances"):
                yield Thing("instance", item["name"], f"{compute}/zones/{zone}/instances/{item['name']}")
        for zone in zones:
            for item in self._list(f"{compute}/zones/{zone}/disks"):
                url = f"{compute}/zones/{zone}/disks/{item['name']}"
                yield Thing("disk", item["name"], url, blocked=bool(item.get("users")))
        for item in self._list(f"{compute}/global/snapshots"):
            yield Thing("snapshot", item["name"], f"{compute}/global/snapshots/{item['name']}")

    def _zones(self, compute: str) -> list[str]:
        """The stack's, and any other that holds something of it: a zone may leave a stack before its disks do."""
        found = set(self.target.zones)
        for kind in ("instances", "disks"):
            for page in self._pages(f"{compute}/aggregated/{kind}"):
                for scope, part in page.get("items", {}).items():
                    if scope.startswith("zones/") and any(self._is_ours(item) for item in part.get(kind, ())):
                        found.add(scope.removeprefix("zones/"))
        return sorted(found)

    def _own(self) -> None:
        """Whether this bucket is this stack's. Without the descriptor nothing can have been made."""
        try:
            state = self.api.call("GET", self._object(POOLS_OBJECT) + "?alt=media")
        except NotFoundError:
            return
        if state.get("stack") != self.target.stack:
            raise DrainError(
                f"bucket {self.target.bucket} belongs to the stack {state.get('stack')!r}, "
                f"not to {self.target.stack!r}: nothing was deleted"
            )

    def _announce(self) -> None:
        name = urllib.parse.quote(DRAIN_OBJECT, safe="")
        url = f"{self.target.storage}/upload/storage/v1/b/{self.target.bucket}/o?uploadType=media&name={name}"
        with contextlib.suppress(NotFoundError):  # the bucket is gone: no function can read a record either
            self.api.call("POST", url, b"{}")

    def _list(self, url: str) -> Iterator[dict[str, Any]]:
        for page in self._pages(url):
            yield from (item for item in page.get("items", ()) if self._is_ours(item))

    def _pages(self, url: str) -> Iterator[dict[str, Any]]:
        query = {"filter": f"labels.{LABEL_STACK}={self.target.stack}"}
        while True:
            page = self.api.call("GET", f"{url}?{urllib.parse.urlencode(query)}")
            yield page
            if not (token := page.get("nextPageToken")):
                return
            query["pageToken"] = token

    def _is_ours(self, item: Mapping[str, Any]) -> bool:
        """Believe the labels, not the filter: a mistake here deletes another team's machines."""
        labels = item.get("labels", {})
        return labels.get(LABEL_STACK) == self.target.stack and bool(labels.get(LABEL_JOB))

    def _delete(self, thing: Thing) -> None:
        if thing.blocked:
            return  # goes with the next look, when its machine has let go
        with contextlib.suppress(NotFoundError):  # reconcile, or its own end, was faster
            self.api.call("DELETE", thing.url)

    def _object(self, name: str) -> str:
        return f"{self.target.storage}/storage/v1/b/{self.target.bucket}/o/{urllib.parse.quote(name, safe='')}"
