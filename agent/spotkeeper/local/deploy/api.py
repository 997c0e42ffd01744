"""Makes, changes and removes one resource on a one-machine cloud: the calls behind ``table.py``.

Both drivers end here. Every call is repeatable: making what is there with the same name
is an error of the cloud's, removing what is gone is none.
"""

from __future__ import annotations

import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from spotkeeper.local.deploy import table
from spotkeeper.local.deploy.result import DeployError
from spotkeeper.local.deploy.table import Json, Target

CALL_S = 30.0  # real seconds for one request
OPERATION_S = 120.0  # real seconds for an operation to end, whatever the clock's scale
_POLL_S = 0.05


class GoneError(DeployError):
    """404: there is no such thing."""


@dataclass(frozen=True)
class Api:
    """``endpoint``: root of the control plane."""

    endpoint: str

    def create(self, t: Target) -> Json:
        """Make it; what only the cloud could know of it (a function's address).

        Raises:
            DeployError: refused, with the cloud's words.
        """
        kind = table.kind_of(t.type)
        if kind.path:
            self._operation(self._call("POST", self._compute(table.collection(t)), kind.body(t)))
            return {}
        if t.type == OBJECT:
            self._upload(t)
            return {}
        answer = self._call("POST", self._local(t.type), {"name": t.name, "properties": t.inputs})
        return dict(answer.get("outputs") or {})

    def update(self, t: Target, keys: tuple[str, ...]) -> Json:
        """Change the named inputs in place."""
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

    def delete(self, t: Target) -> None:
        """Remove it; what is gone is removed."""
        try:
            if table.kind_of(t.type).path:
                self._operation(self._call("DELETE", self._compute(f"{table.collection(t)}/{t.name}")))
            elif t.type == OBJECT:
                self._call("DELETE", self._object(t))
            else:
                self._call("DELETE", self._local(t.type, t.name))
        except GoneError:
            return

    # --- compute -----------------------------------------------------------------------

    def _set(self, t: Target, url: str, key: str) -> None:
        """Labels and metadata carry a fingerprint: somebody else's change must not be undone unseen."""
        now = self._call("GET", url)
        if key == "metadata":
            items = table.metadata_items(t.inputs.get("metadata") or {})
            body = {"items": items, "fingerprint": now.get("metadata", {}).get("fingerprint")}
            self._operation(self._call("POST", f"{url}/setMetadata", body))
        else:
            body = {"labels": t.inputs.get("labels") or {}, "labelFingerprint": now.get("labelFingerprint")}
            self._operation(self._call("POST", f"{url}/setLabels", body))

    def _operation(self, operation: Json) -> None:
        """Wait until it is done.

        Raises:
            DeployError: it ended in an error, or not in time.
        """
        end = time.monotonic() + OPERATION_S
        while operation.get("status") != "DONE":
            if time.monotonic() > end:
                raise DeployError(f"{operation.get('targetLink')}: not done after {OPERATION_S:.0f} s")
            time.sleep(_POLL_S)
            path = urllib.parse.urlsplit(str(operation["selfLink"])).path.partition("/compute/v1/")[2]
            operation = self._call("GET", self._compute(path))
        if errors := operation.get("error", {}).get("errors"):
            raise DeployError("; ".join(f"{e.get('code')}: {e.get('message')}" for e in errors))

    def _compute(self, path: str) -> str:
        return f"{self.endpoint}/compute/v1/{path}"

    # --- objects and the rest ------------------------------------------------------------

    def _upload(self, t: Target) -> None:
        query = urllib.parse.urlencode({"uploadType": "media", "name": t.name})
        url = f"{self.endpoint}/upload/storage/v1/b/{t.inputs['bucket']}/o?{query}"
        text = t.inputs.get("content")
        data = Path(str(t.inputs["source"])).read_bytes() if text is None else str(text).encode()
        self._send("POST", url, data=data, content_type=str(t.inputs.get("contentType", "application/octet-stream")))

    def _object(self, t: Target) -> str:
        return f"{self.endpoint}/storage/v1/b/{t.inputs['bucket']}/o/{urllib.parse.quote(t.name, safe='')}"

    def _local(self, type_: str, name: str = "") -> str:
        url = f"{self.endpoint}/local/v1/resources/{table.short(type_)}"
        return f"{url}/{urllib.parse.quote(name, safe='')}" if name else url

    # --- the wire --------------------------------------------------------------------------

    def _call(self, method: str, url: str, body: Json | None = None) -> Json:
        return self._send(method, url, json=body)

    def _send(self, method: str, url: str, *, json: Json | None = None, data: bytes | None = None,
              content_type: str | None = None) -> Json:  # fmt: skip
        headers = {"Content-Type": content_type} if content_type else {}
        try:
            answer = requests.request(method, url, json=json, data=data, headers=headers, timeout=CALL_S)
        except requests.RequestException as error:
            raise DeployError(f"the one-machine cloud at {self.endpoint} does not answer: {error}") from None
        if answer.status_code == 404:
            raise GoneError(f"{method} {url}: {_reason(answer)}")
        if not answer.ok:
            raise DeployError(f"{method} {url}: {answer.status_code} {_reason(answer)}")
        if not answer.content.strip():
            return {}
        parsed: Any = answer.json()
        return dict(parsed) if isinstance(parsed, dict) else {}


OBJECT = "gcp:storage/bucketObject:BucketObject"


def _reason(answer: requests.Response) -> str:
    """The message of Google's error envelope, or the beginning of whatever came."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]
