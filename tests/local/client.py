"""A Compute Engine client for tests: it checks every request and answer against Google's discovery document."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import requests

from spotkeeper.local.lifecycle.cloud import LocalCloud
from tests import discovery

Json = Any


class RefusedError(Exception):
    """An error answer, in Google's envelope."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code, self.reason, self.message = code, reason, message


@dataclass
class Api:
    """``strict``: off for bodies that are wrong on purpose."""

    root: str  # .../compute/v1
    project: str = "local"
    strict: bool = True
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, cloud: LocalCloud, **more: Any) -> Api:
        """As its operator."""
        return cls(cloud.compute_endpoint, token=cloud.token, **more)

    def call(self, method: str, path: str, body: Json = None, **query: str) -> Json:
        """One call below ``projects/<project>/``.

        Raises:
            RefusedError: any error answer.
        """
        below = f"projects/{self.project}/{path}".rstrip("/")
        url = f"{self.root}/{below}"
        known = discovery.match(method, f"/compute/v1/{below}")
        assert known is not None, f"{method} {path}: Compute Engine has no such method"
        if self.strict:
            discovery.validate_query(known.method_id, query)
            discovery.validate_request(known.method_id, body)
        answer = requests.request(method, url, json=body, params=query, headers=self._headers(), timeout=30)
        if answer.status_code != 200:
            discovery.validate_error(answer.json())
            error = answer.json()["error"]
            assert error["code"] == answer.status_code
            raise RefusedError(answer.status_code, error["errors"][0]["reason"], error["message"])
        discovery.validate_response(known.method_id, answer.json())
        return answer.json()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def get(self, path: str, **query: str) -> Json:
        return self.call("GET", path, **query)

    def post(self, path: str, body: Json = None, **query: str) -> Json:
        return self.call("POST", path, body, **query)

    def delete(self, path: str, **query: str) -> Json:
        return self.call("DELETE", path, **query)

    def done(self, operation: Json) -> Json:
        """Wait for the operation's end."""
        path = operation["selfLink"].split(f"/projects/{self.project}/")[1]
        for _ in range(20):
            operation = self.post(f"{path}/wait")
            if operation["status"] == "DONE":
                return operation
        raise AssertionError(f"{operation['operationType']} of {operation['targetLink']} does not end")

    def ok(self, operation: Json) -> Json:
        """Wait for the operation's end, without an error."""
        operation = self.done(operation)
        assert "error" not in operation, operation["error"]
        return operation

    # Shortcuts

    def vm(self, name: str, zone: str = "us-central1-a", script: str = "sleep 1000", **body: Json) -> Json:
        """Insert a VM without a template; the operation."""
        return self.post(f"zones/{zone}/instances", vm_body(name, zone, script) | body)

    def gone(self, path: str, timeout_s: float = 10.0) -> bool:
        return eventually(lambda: not self.exists(path), timeout_s)

    def exists(self, path: str) -> bool:
        try:
            self.get(path)
        except RefusedError as refused:
            assert refused.code == 404
            return False
        return True

    def status(self, path: str) -> str:
        return str(self.get(path)["status"])


SPOT = {
    "provisioningModel": "SPOT",
    "preemptible": True,
    "automaticRestart": False,
    "onHostMaintenance": "TERMINATE",
    "instanceTerminationAction": "DELETE",
    "preemptionNoticeDuration": {"seconds": "120"},
}


def vm_body(name: str, zone: str = "us-central1-a", script: str = "sleep 1000") -> Json:
    return {
        "name": name,
        "machineType": f"zones/{zone}/machineTypes/e2-standard-4",
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "10"}}],
        "networkInterfaces": [{"network": "global/networks/default"}],
        "metadata": {"items": [{"key": "startup-script", "value": script}]},
        "labels": {"sk-stack": "test", "sk-job": "abcdefgh"},
    }


def eventually(condition: Any, timeout_s: float = 10.0) -> bool:
    """Poll until the check holds, for some seconds."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
