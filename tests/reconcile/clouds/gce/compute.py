"""A scripted Compute Engine on loopback: answers what a test says, and judges every request and answer by
Google's own discovery document."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from spotkeeper.contract import names
from spotkeeper.contract.stack import PoolState, Price, StackState, StaticMachine
from spotkeeper.local.compute.query import apply_mask, parse_mask
from tests import discovery, web

JOB, UID = "abcd2345", "0b5e9a52-8f0c-4b3e-9f9b-0f3b9a6f2f11"
A, B = "us-x1-a", "us-x1-b"
VM = names.vm_name("demo", JOB, 7, 3)
DISK = names.disk_name("demo", JOB, 7, 1)
LINK = "https://compute.googleapis.com/compute/v1/projects/p"
STACK = StackState(
    stack="demo",
    cloud="gcp",
    project="p",
    region="us-x1",
    bucket="b",
    pools=(
        PoolState(
            name="gpu",
            kind="spot",
            machine_type="g2-standard-4",
            zones=(A, B),
            nproc=1,
            max_machines=8,
            max_on_demand=2,
            disk_gb=50,
            disk_type="pd-balanced",
            prices={A: Price(1.0, 0.3), B: Price(1.0, 0.3)},
            templates={"spot": f"{LINK}/regions/us-x1/instanceTemplates/sk-demo-gpu-spot"},
            placement={A: f"{LINK}/regions/us-x1/resourcePolicies/sk-demo-gpu-a"},
        ),
        PoolState(
            name="floor",
            kind="static",
            machine_type="n2-standard-4",
            zones=(A,),
            nproc=1,
            max_machines=1,
            max_on_demand=0,
            disk_gb=50,
            disk_type="pd-balanced",
            prices={A: Price(1.0)},
            machines=(StaticMachine("sk-demo-floor-s0", A),),
        ),
    ),
)


@dataclass(frozen=True)
class Asked:
    method: str  # discovery method id
    params: dict[str, str]
    query: dict[str, str]
    body: Any
    headers: dict[str, str]
    beta: bool = False


@dataclass
class Google:
    """A scripted Compute Engine. ``script``: method id -> answer(s); a list is used up, one answer each call."""

    script: dict[str, Any] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    endpoint: str = ""

    def of(self, method: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == f"compute.{method}"]

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(handler.path)
        beta = parts.path.startswith("/compute/beta/")  # of the methods that are asked there, v1 has the same form
        found = discovery.match(handler.command, parts.path.replace("/compute/beta/", "/compute/v1/", 1))
        query = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
        decoded = json.loads(body) if body else None
        assert found is not None, f"no method of Google's is {handler.command} {parts.path}"
        discovery.validate_query(found.method_id, query)
        discovery.validate_request(found.method_id, decoded)
        with self.lock:
            self.asked.append(Asked(found.method_id, found.params, query, decoded, dict(handler.headers), beta))
            scripted = self.script.get(found.method_id.removeprefix("compute."), {})
            if isinstance(scripted, list):
                scripted = scripted.pop(0)
            if callable(scripted) and not isinstance(scripted, Raw):
                scripted = scripted(self.asked[-1])
        if isinstance(scripted, Raw):
            return scripted.status, scripted.body
        scripted = dict(scripted)
        status = scripted.pop("_status", 200)
        if status == 200:
            discovery.validate_response(found.method_id, scripted)
            scripted = apply_mask(parse_mask(query["fields"]), scripted) or {} if "fields" in query else scripted
        else:
            discovery.validate_error(scripted)
        return status, json.dumps(scripted).encode()


@dataclass(frozen=True)
class Raw:
    """An answer that is no JSON of Google's: a proxy's page, half a body."""

    status: int
    body: bytes


@contextmanager
def serve() -> Iterator[Google]:
    """Run it; afterwards, every request must have been one of Google's."""
    state = Google()

    class Handler(web.Handler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            try:
                status, data = state.answer(self, self.body())
            except Exception as error:
                state.faults.append(f"{self.command} {self.path}: {error}")
                status, data = 500, b"{}"
            self.answer(status, data)

        do_GET = do_POST = do_DELETE = serve

    with web.serving(Handler) as server:
        state.endpoint = f"{server.url}/compute/v1"
        yield state
    assert state.faults == []


def operation(**fields: Any) -> dict[str, Any]:
    return {
        "kind": "compute#operation",
        "name": "operation-1",
        "id": "77",
        "status": "RUNNING",
        "progress": 0,
        **fields,
    }


def refusal(status: int, reason: str, message: str = "no", **more: Any) -> dict[str, Any]:
    entry = {"message": message, "domain": "global", "reason": reason}
    return {"_status": status, "error": {"code": status, "message": message, "errors": [entry], **more}}


def failed(code: str, status: int = 0, message: str = "failed", reason: str = "") -> dict[str, Any]:
    entry: dict[str, Any] = {"code": code, "message": message}
    if reason:
        entry["errorDetails"] = [{"errorInfo": {"reason": reason, "domain": "compute.googleapis.com"}}]
    return operation(error={"errors": [entry]}, httpErrorStatusCode=status, status="DONE")


def instance(**fields: Any) -> dict[str, Any]:
    base = {
        "kind": "compute#instance",
        "id": "4242",
        "name": VM,
        "zone": f"{LINK}/zones/{A}",
        "status": "RUNNING",
        "creationTimestamp": "2026-11-20T10:00:00.000-08:00",
        "labels": names.labels("demo", "gpu", JOB, 7, 3),
        "scheduling": {"provisioningModel": "SPOT", "preemptible": True},
        "networkInterfaces": [{"networkIP": "10.0.0.9", "name": "nic0"}],
        "disks": [
            {"boot": True, "source": f"{LINK}/zones/{A}/disks/{VM}", "deviceName": "boot"},
            {"boot": False, "source": f"{LINK}/zones/{A}/disks/{DISK}", "deviceName": "sk-data"},
        ],
    }
    return {**base, **fields}


def disk(**fields: Any) -> dict[str, Any]:
    base = {
        "id": "5",
        "name": DISK,
        "zone": f"{LINK}/zones/{A}",
        "status": "READY",
        "sizeGb": "50",
        "labels": names.labels("demo", "gpu", JOB, 7),
        "users": [f"{LINK}/zones/{A}/instances/{VM}"],
    }
    return {**base, **fields}


def scopes(what: str, **zones: list[dict[str, Any]]) -> dict[str, Any]:
    """An aggregated list; underscores in names stand for dashes. Empty zones carry Google's own warning."""
    empty = {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": "no results"}}
    items = {f"zones/{zone.replace('_', '-')}": ({what: found} if found else empty) for zone, found in zones.items()}
    return {"items": items}


@dataclass
class SmallCloud:
    """A Compute Engine that does what it is asked, at once: enough for a job to start. Put on a ``Google``."""

    vms: dict[str, dict[str, Any]] = field(default_factory=dict)
    disks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run_on(self, google: Google) -> None:
        google.script |= {
            "instances.aggregatedList": lambda _: self._listed("instances", self.vms),
            "disks.aggregatedList": lambda _: self._listed("disks", self.disks),
            "snapshots.list": lambda _: {},
            "zoneOperations.list": lambda _: {},
            "instances.insert": self.insert,
            "instances.get": self.get,
            "disks.insert": self.create,
            "instances.attachDisk": self.attach,
            "instances.delete": self.delete,
            "disks.delete": self.delete_disk,
        }

    def _listed(self, what: str, things: dict[str, dict[str, Any]]) -> dict[str, Any]:
        zones: dict[str, list[dict[str, Any]]] = {A: [], B: []}
        for thing in things.values():
            zones[thing["zone"].rpartition("/")[2]].append(thing)
        return scopes(what, **{zone.replace("-", "_"): found for zone, found in zones.items()})

    def insert(self, asked: Asked) -> dict[str, Any]:
        name, zone = asked.body["name"], asked.params["zone"]
        self.vms[name] = instance(
            id=str(5000 + len(self.vms)), name=name, zone=f"{LINK}/zones/{zone}", labels=asked.body["labels"], disks=[]
        )
        return operation(targetId=self.vms[name]["id"])

    def create(self, asked: Asked) -> dict[str, Any]:
        name, zone = asked.body["name"], asked.params["zone"]
        self.disks[name] = disk(name=name, zone=f"{LINK}/zones/{zone}", labels=asked.body["labels"], users=[])
        return operation()

    def get(self, asked: Asked) -> dict[str, Any] | Raw:
        return self.vms.get(asked.params["instance"]) or refusal(404, "notFound")

    def attach(self, asked: Asked) -> dict[str, Any]:
        vm = self.vms[asked.params["instance"]]
        name = asked.body["source"].rpartition("/")[2]
        if self.disks[name]["users"]:
            return refusal(400, "resourceInUseByAnotherResource")
        self.disks[name]["users"] = [f"{vm['zone']}/instances/{vm['name']}"]
        vm["disks"] = [{"boot": False, "source": f"{vm['zone']}/disks/{name}", "deviceName": "sk-data"}]
        return operation()

    def delete(self, asked: Asked) -> dict[str, Any]:
        name = asked.params["instance"]
        if self.vms.pop(name, None) is None:
            return refusal(404, "notFound")
        for found in self.disks.values():
            found["users"] = [user for user in found["users"] if not user.endswith(f"/{name}")]
        return operation()

    def delete_disk(self, asked: Asked) -> dict[str, Any]:
        if self.disks.pop(asked.params["disk"], None) is None:
            return refusal(404, "notFound")
        return operation()
