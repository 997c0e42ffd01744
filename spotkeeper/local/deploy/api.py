"""Creates, updates and deletes one resource on a one-machine cloud, by ``table.py``; both drivers use it.

The deletion of a missing resource succeeds; the creation of an existing one fails with the cloud's error.
"""

from __future__ import annotations

import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from spotkeeper.local.core.rest import refusal_message, session
from spotkeeper.local.deploy import table
from spotkeeper.local.deploy.result import DeployError
from spotkeeper.local.deploy.table import Json, PlacedResource

OBJECT = "gcp:storage/bucketObject:BucketObject"
CALL_S = 30.0  # real seconds for one request
OPERATION_S = 120.0  # real seconds for an operation to end, whatever the clock's scale
_POLL_S = 0.05


class GoneError(DeployError):
    """Raised for 404: the resource does not exist."""


@dataclass(frozen=True)
class ResourceClient:
    """A client of the control plane. ``endpoint``: its root URL; ``token``: the operator's, sent with every call."""

    endpoint: str
    token: str = field(default="", repr=False)

    def create(self, t: PlacedResource) -> Json:
        """Create the resource and return the outputs that only the cloud knows; DeployError if the cloud refuses."""
        kind = table.kind_of(t.type)
        if kind.path:
            self._operation(self._call("POST", self._compute(table.collection(t)), kind.body(t)))
            return {}
        if t.type == OBJECT:
            self._upload(t)
            return {}
        answer = self._call("POST", self._local(t.type), {"name": t.name, "properties": t.inputs})
        return dict(answer.get("outputs") or {})

    def update(self, t: PlacedResource, keys: tuple[str, ...]) -> Json:
        """Change the inputs in ``keys`` of an existing resource."""
        if t.type == OBJECT:
            self._upload(t)
            return {}
        if not table.kind_of(t.type).path:
            answer = self._call("PUT", self._local(t.type, t.name), {"name": t.name, "properties": t.inputs})
            return dict(answer.get("outputs") or {})
        url = self._compute(f"{table.collection(t)}/{t.name}")
        for key in keys:
            self._set(t, url, key)
        return {}

    def reserve(self, scope: str, name: str, machine_type: str, count: int) -> None:
        """Make a reservation unless it exists. ``scope``: ``projects/<project>/zones/<zone>``."""
        url = self._compute(f"{scope}/reservations")
        try:
            self._call("GET", f"{url}/{name}")
        except GoneError:
            specific = {"count": str(count), "instanceProperties": {"machineType": machine_type}}
            body: Json = {"name": name, "specificReservation": specific, "specificReservationRequired": True}
            self._operation(self._call("POST", url, body))

    def delete(self, t: PlacedResource) -> None:
        """Delete the resource, if it exists."""
        try:
            if table.kind_of(t.type).path:
                self._operation(self._call("DELETE", self._compute(f"{table.collection(t)}/{t.name}")))
            elif t.type == OBJECT:
                self._call("DELETE", self._object(t))
            else:
                self._call("DELETE", self._local(t.type, t.name))
        except GoneError:
            return

    # Compute

    def _set(self, t: PlacedResource, url: str, key: str) -> None:
        """Set labels or metadata; the fingerprint in the call prevents the loss of another client's change."""
        now = self._call("GET", url)
        if key == "metadata":
            items = table.metadata_items(t.inputs.get("metadata") or {})
            body = {"items": items, "fingerprint": now.get("metadata", {}).get("fingerprint")}
            self._operation(self._call("POST", f"{url}/setMetadata", body))
        else:
            body = {"labels": t.inputs.get("labels") or {}, "labelFingerprint": now.get("labelFingerprint")}
            self._operation(self._call("POST", f"{url}/setLabels", body))

    def _operation(self, operation: Json) -> None:
        """Wait for the end of an operation; DeployError if it fails or does not end in time."""
        end = time.monotonic() + OPERATION_S
        while operation.get("status") != "DONE":
            if time.monotonic() > end:
                raise DeployError(f"{operation.get('targetLink')}: the operation is not done after {OPERATION_S:.0f} s")
            time.sleep(_POLL_S)
            path = urllib.parse.urlsplit(str(operation["selfLink"])).path.partition("/compute/v1/")[2]
            operation = self._call("GET", self._compute(path))
        if errors := operation.get("error", {}).get("errors"):
            raise DeployError("; ".join(f"{e.get('code')}: {e.get('message')}" for e in errors))

    def _compute(self, path: str) -> str:
        return f"{self.endpoint}/compute/v1/{path}"

    # Objects and other resources

    def _upload(self, t: PlacedResource) -> None:
        query = urllib.parse.urlencode({"uploadType": "media", "name": t.name})
        url = f"{self.endpoint}/upload/storage/v1/b/{t.inputs['bucket']}/o?{query}"
        text = t.inputs.get("content")
        data = Path(str(t.inputs["source"])).read_bytes() if text is None else str(text).encode()
        self._call("POST", url, data=data, content_type=str(t.inputs.get("contentType", "application/octet-stream")))

    def _object(self, t: PlacedResource) -> str:
        return f"{self.endpoint}/storage/v1/b/{t.inputs['bucket']}/o/{urllib.parse.quote(t.name, safe='')}"

    def _local(self, type_: str, name: str = "") -> str:
        url = f"{self.endpoint}/local/v1/resources/{table.short(type_)}"
        return f"{url}/{urllib.parse.quote(name, safe='')}" if name else url

    # HTTP

    def _call(self, method: str, url: str, json: Json | None = None, *, data: bytes | None = None,
              content_type: str | None = None) -> Json:  # fmt: skip
        headers = {"Authorization": f"Bearer {self.token}", **({"Content-Type": content_type} if content_type else {})}
        try:
            with session() as http:
                answer = http.request(method, url, json=json, data=data, headers=headers, timeout=CALL_S)
        except requests.RequestException as error:
            raise DeployError(f"the one-machine cloud at {self.endpoint} does not answer: {error}") from None
        if answer.status_code == 404:
            raise GoneError(f"{method} {url}: {refusal_message(answer)}")
        if not answer.ok:
            raise DeployError(f"{method} {url}: {answer.status_code} {refusal_message(answer)}")
        if not answer.content.strip():
            return {}
        parsed: Any = answer.json()
        return dict(parsed) if isinstance(parsed, dict) else {}
