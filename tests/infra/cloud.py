"""A control plane that only remembers: what was posted stands, what was deleted is gone.

Compute bodies are judged by Google's discovery document. It has no VMs, no clock and no
rules of its own; the one-machine cloud is tested elsewhere.
"""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests import discovery, web

BUCKET = "/storage/v1/b/sk-local-dev/o"


class Cloud:
    """``things``: path -> document. ``calls``: method and path, in order."""

    def __init__(self) -> None:
        self.things: dict[str, Any] = {}
        self.calls: list[tuple[str, str]] = []
        self.refuse: dict[str, int] = {}  # path -> status, for faults
        self.lock = threading.Lock()
        self.endpoint = ""
        self.token = "of-the-operator"  # noqa: S105 - of a stand-in
        self.bearers: set[str] = set()  # what calls carried

    def changing(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] != "GET"]

    def handle(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, Any]:
        with self.lock:
            self.calls.append((method, path))
            for part, status in self.refuse.items():
                if part in path and method != "GET":
                    return status, {"error": {"code": status, "message": f"refused: {part}"}}
            if path.startswith("/compute/v1/"):
                return self._compute(method, path, json.loads(body) if body else None)
            if path.startswith("/upload/storage/v1/b/"):
                bucket = path.split("/")[5]
                self.things[f"/storage/v1/b/{bucket}/o/{query['name']}"] = body.decode(errors="replace")
                return 200, {"name": query["name"]}
            if method == "GET" and path.endswith("/o"):
                begin = f"{path}/{query.get('prefix', '')}"
                return 200, {"items": [{"name": key[len(path) + 1 :]} for key in self.things if key.startswith(begin)]}
            return self._plain(method, path, json.loads(body) if body and method in ("POST", "PUT") else None)

    def _compute(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        found = discovery.match(method, path)
        assert found is not None, f"{method} {path} is not Compute Engine v1"
        if method in ("POST", "PATCH"):
            discovery.validate_request(found.method_id, body)
        if found.method_id.endswith((".setMetadata", ".setLabels")):
            verb = found.method_id.rsplit(".", 1)[1]
            thing = self.things[path.rpartition("/")[0]]
            thing["metadata" if verb == "setMetadata" else "labels"] = body if verb == "setMetadata" else body["labels"]
        elif method == "POST":
            key = f"{path}/{body['name']}"
            if key in self.things:
                return 409, {"error": {"code": 409, "message": f"{key} already exists"}}
            self.things[key] = body
        elif method == "DELETE":
            if self.things.pop(path, None) is None:
                return 404, {"error": {"code": 404, "message": "not found"}}
        elif found.method_id.endswith((".list", ".aggregatedList")):
            return 200, {"items": self._listed(path)}
        elif path in self.things:
            thing = self.things[path]
            return 200, {
                **thing,
                "metadata": {**thing.get("metadata", {}), "fingerprint": "abcd"},
                "labelFingerprint": "abcd",
            }
        else:
            return 404, {"error": {"message": "not found"}}
        return 200, {"status": "DONE", "selfLink": f"{self.endpoint}{path}/operation"}

    def _listed(self, path: str) -> Any:
        """Of one place, or of all zones, by zone."""
        project, _, kind = path.partition("/aggregated/")
        if not kind:
            return [thing for key, thing in self.things.items() if key.startswith(f"{path}/")]
        out: dict[str, dict[str, list[Any]]] = {}
        for key, thing in self.things.items():
            scope, _, name = key.removeprefix(f"{project}/").partition(f"/{kind}/")
            if scope.startswith("zones/") and name:
                out.setdefault(scope, {kind: []})[kind].append(thing)
        return out

    def _plain(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        path = urllib.parse.unquote(path)
        if method == "POST":
            path = f"{path}/{body['name']}"
            if path in self.things:
                return 409, {"error": {"message": f"{path} already exists"}}
        elif path not in self.things:
            return 404, {"error": {"message": "not found"}}
        if method == "GET":
            thing = self.things[path]
            return 200, json.loads(thing) if isinstance(thing, str) else thing
        if method == "DELETE":
            del self.things[path]
            if "storage:bucket/" in path:  # with everything in it, as force_destroy asks
                inside = f"/storage/v1/b/{path.rsplit('/', 1)[1]}/o/"
                self.things = {key: thing for key, thing in self.things.items() if not key.startswith(inside)}
            return 204, None
        self.things[path] = body
        outputs = {"state": "ENABLED"}  # more than any program asks for
        if "cloudfunctionsv2:function" in path:
            outputs |= {"url": "http://127.0.0.1:9999/function", "uri": "http://127.0.0.1:9999"}
        return 200, {"outputs": outputs}


@contextmanager
def serve() -> Iterator[Cloud]:
    """A cloud on a free port of this machine."""
    cloud = Cloud()

    class Handler(web.Handler):
        def _any(self) -> None:
            parts = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(parts.query))
            cloud.bearers.add(self.headers.get("Authorization", ""))
            try:
                status, answer = cloud.handle(self.command, parts.path, query, self.body())
            except AssertionError as error:
                status, answer = 400, {"error": {"message": str(error)}}
            self.answer(status, b"" if answer is None else json.dumps(answer).encode())

        do_GET = do_POST = do_PUT = do_DELETE = _any

    with web.serving(Handler) as server:
        cloud.endpoint = server.url
        yield cloud


def props_of(cloud: Cloud, *zones: str) -> dict[str, Any]:
    """What Pulumi's state has of the drain of the stack ``dev`` on it."""
    return {
        "stack": "dev", "project": "local", "region": "us-central1", "zones": list(zones), "bucket": "sk-local-dev",
        "compute": f"{cloud.endpoint}/compute/v1", "storage": cloud.endpoint,
    }  # fmt: skip
