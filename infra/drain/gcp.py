"""The drain on Compute Engine and on the one-machine cloud, with the operator's own rights."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from infra import naming
from infra.drain.emptying import ACTIVE_FOLDER, DRAIN_OBJECT, SETTLE_S, DrainError, LaterError, Thing
from spotkeeper.contract.names import LABEL_JOB, LABEL_STACK

_CALL_S = 60.0
_PAUSE_S = 10.0  # real Compute Engine lists a new machine within seconds
_PAUSE_LOCAL_S = 2.0
_BUSY = (429, 500, 502, 503, 504)
_IN_USE = ("resourceInUseByAnotherResource", "resourceNotReady")  # e.g. a disk during a snapshot
_AT_ONCE = 16  # parallel deletions: a thousand machines take a minute


class NotFoundError(Exception):
    """HTTP 404: the resource does not exist."""


@dataclass(frozen=True)
class Api:
    """A client for JSON over HTTP that sends the operator's token."""

    token: str | None = field(repr=False)

    def call(self, method: str, url: str, body: bytes | None = None) -> dict[str, Any]:
        """Make one call; return the decoded answer. Errors are those of :meth:`fetch`."""
        text = self.fetch(method, url, body)
        return json.loads(text) if text.strip() else {}

    def fetch(self, method: str, url: str, body: bytes | None = None) -> bytes:
        """Make one call; return the answer's body.

        Raises:
            NotFoundError: HTTP 404.
            LaterError: no answer, throttling, or another operation uses the resource.
            DrainError: any other refusal, with the answer's text.
        """
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(url, method=method, data=body, headers=headers)  # noqa: S310 - our own endpoints
        try:
            with urllib.request.urlopen(request, timeout=_CALL_S) as answer:  # noqa: S310
                found: bytes = answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise NotFoundError(url) from None
            said = error.read()[:2000].decode(errors="replace")
            later = error.code in _BUSY or any(reason in said for reason in _IN_USE)
            raise (LaterError if later else DrainError)(f"{method} {url}: {error.code} {said[:500]}") from None
        except OSError as error:
            raise LaterError(f"{method} {url}: {error}") from None
        return found


def access_token(compute: str) -> str | None:
    """Return the operator's token for Google; for the one-machine cloud ``SPOTKEEPER_COMPUTE_TOKEN``, if it is set."""
    if urllib.parse.urlsplit(compute).scheme == "http":
        return os.environ.get("SPOTKEEPER_COMPUTE_TOKEN")
    if token := os.environ.get("GOOGLE_OAUTH_ACCESS_TOKEN"):
        return token
    import google.auth
    import google.auth.exceptions
    import google.auth.transport.requests

    try:
        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
        credentials.refresh(google.auth.transport.requests.Request())  # type: ignore[no-untyped-call]
    except google.auth.exceptions.GoogleAuthError as error:
        remedy = "gcloud auth application-default login"
        raise DrainError(f"no login to Google Cloud ({error}): run {remedy}") from None
    return str(credentials.token)


@dataclass(frozen=True)
class ComputeEngine:
    """A client of Google Cloud for the drain of one stack; implements :class:`infra.drain.emptying.DrainCloud`."""

    stack: str
    project: str
    zones: tuple[str, ...]
    bucket: str
    compute: str
    storage: str
    api: Api

    @classmethod
    def of(cls, props: Mapping[str, Any]) -> ComputeEngine:
        """Return a client for the stack that a drain's properties name.

        ``SPOTKEEPER_COMPUTE_ENDPOINT`` replaces a one-machine cloud's address, whose port can change between starts. It
        does not replace Google's address: then a real stack would look empty if the variable were set by mistake.
        """
        texts = {name: str(props[name]) for name in ("stack", "project", "bucket", "storage")}
        declared = str(props["compute"])
        moved = os.environ.get("SPOTKEEPER_COMPUTE_ENDPOINT") if declared.startswith("http:") else None
        compute = (moved or declared).rstrip("/")
        return cls(**texts, zones=tuple(props["zones"]), compute=compute, api=Api(access_token(compute)))

    @property
    def pause_s(self) -> float:
        return _PAUSE_S if self.compute.startswith("https:") else _PAUSE_LOCAL_S

    @property
    def settle_s(self) -> float:
        """Return :attr:`DrainCloud.settle_s`; it is 0 in the one-machine cloud, where calls take milliseconds."""
        return SETTLE_S if self.compute.startswith("https:") else 0.0

    def owner(self) -> str | None:
        found = self.read(naming.POOLS_OBJECT)
        return None if found is None else str(json.loads(found).get("stack"))

    def announce(self) -> None:
        name = urllib.parse.quote(DRAIN_OBJECT, safe="")
        url = f"{self.storage}/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}"
        with contextlib.suppress(NotFoundError):  # the bucket is gone
            self.api.call("POST", url, b"{}")

    def lift(self) -> None:
        with contextlib.suppress(NotFoundError):  # usually the mark does not exist
            self.api.call("DELETE", self._object(DRAIN_OBJECT))

    def marked(self) -> bool:
        try:
            self.api.call("GET", self._object(DRAIN_OBJECT))
        except NotFoundError:
            return False
        return True

    def active(self) -> list[str]:
        url, found = f"{self.storage}/storage/v1/b/{self.bucket}/o", list[str]()
        try:
            for page in self._pages(url, prefix=ACTIVE_FOLDER):
                found += [item["name"].removeprefix(ACTIVE_FOLDER) for item in page.get("items", ())]
        except NotFoundError:  # no bucket
            return []
        return found

    def read(self, name: str) -> bytes | None:
        try:
            return self.api.fetch("GET", self._object(name) + "?alt=media")
        except NotFoundError:
            return None

    def things(self) -> Iterator[Thing]:
        """List machines, then disks, then snapshots: Compute Engine does not delete a disk that a machine uses."""
        zones = self._zones()
        for zone in zones:
            for item in self._list(f"{self._root}/zones/{zone}/instances"):
                url = f"{self._root}/zones/{zone}/instances/{item['name']}"
                yield Thing("machine", item["name"], url, job=item["labels"][LABEL_JOB], zone=zone)
        for zone in zones:
            for item in self._list(f"{self._root}/zones/{zone}/disks"):
                url = f"{self._root}/zones/{zone}/disks/{item['name']}"
                used = bool(item.get("users"))
                yield Thing("disk", item["name"], url, used, job=item["labels"][LABEL_JOB], zone=zone)
        for item in self._list(f"{self._root}/global/snapshots"):
            url = f"{self._root}/global/snapshots/{item['name']}"
            yield Thing("snapshot", item["name"], url, job=item["labels"][LABEL_JOB])

    def delete(self, things: Sequence[Thing]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for _ in threads.map(self._delete, things):
                pass

    def _delete(self, thing: Thing) -> None:
        with contextlib.suppress(NotFoundError, LaterError):  # it is gone, or busy
            self.api.call("DELETE", thing.where)

    @property
    def _root(self) -> str:
        return f"{self.compute}/projects/{self.project}"

    def _zones(self) -> list[str]:
        """Return the stack file's zones, and other zones with resources of the stack from an earlier stack file."""
        found = set(self.zones)
        for kind in ("instances", "disks"):
            for page in self._pages(f"{self._root}/aggregated/{kind}", filter=self._label):
                for scope, part in page.get("items", {}).items():
                    if part.get("warning", {}).get("code") == "UNREACHABLE" and self._near(scope):
                        raise LaterError(f"{scope} does not answer")
                    if scope.startswith("zones/") and any(self._is_own(item) for item in part.get(kind, ())):
                        found.add(scope.removeprefix("zones/"))
        return sorted(found)

    def _near(self, scope: str) -> bool:
        """Return whether ``scope`` (``zones/<zone>``) is in a region of the stack; it has no resources elsewhere."""
        return scope.removeprefix("zones/").rpartition("-")[0] in {zone.rpartition("-")[0] for zone in self.zones}

    def _list(self, url: str) -> Iterator[dict[str, Any]]:
        for page in self._pages(url, filter=self._label):
            yield from (item for item in page.get("items", ()) if self._is_own(item))

    @property
    def _label(self) -> str:
        return f"labels.{LABEL_STACK}={self.stack}"

    def _pages(self, url: str, **query: str) -> Iterator[dict[str, Any]]:
        while True:
            page = self.api.call("GET", f"{url}?{urllib.parse.urlencode(query)}")
            yield page
            if not (token := page.get("nextPageToken")):
                return
            query["pageToken"] = token

    def _is_own(self, item: Mapping[str, Any]) -> bool:
        """Return whether the labels show that the function made the item for this stack.

        The listing is filtered already, but a mistake would delete another team's machines.
        """
        labels = item.get("labels", {})
        return labels.get(LABEL_STACK) == self.stack and bool(labels.get(LABEL_JOB))

    def _object(self, name: str) -> str:
        return f"{self.storage}/storage/v1/b/{self.bucket}/o/{urllib.parse.quote(name, safe='')}"
