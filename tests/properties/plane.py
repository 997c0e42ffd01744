"""The one-machine cloud's control plane, in process: its Starlette application, its state machine and its timers
are the shipped ones; only what would be a process or a socket is a stand-in, and time stands until it is moved.

The GCE adapter reaches it through :class:`Line`, where answers get lost, lists come stale, and calls are
throttled. No event loop runs: a handler that never waits is finished by one ``send``.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from infra import naming
from infra.gcp import identity
from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import InsertVm
from spotkeeper.contract.names import parse_vm_name
from spotkeeper.local.access.auth import Principal
from spotkeeper.local.compute.resources import Declaration
from spotkeeper.local.core.catalog import ZONES
from spotkeeper.local.core.rest import Ref
from spotkeeper.local.core.vm import LocalVm
from spotkeeper.local.core.world import Config
from spotkeeper.local.machines import host as host_module
from spotkeeper.local.server.server import ControlPlane
from spotkeeper.reconcile.clouds.gce.api import Api, MetadataToken
from spotkeeper.reconcile.clouds.http_client import Answer, NoAnswerError
from tests.properties.actors import hook

START = 1_800_000_000.0
ORIGIN = "http://127.0.0.1:9100"
PROJECT = "local"
REGION = "us-central1"
THROTTLED = b'{"error":{"code":403,"message":"Rate Limit Exceeded","errors":[{"reason":"rateLimitExceeded"}]}}'
STALE_KEPT = 4


@dataclass
class Time:
    now: float = START


@dataclass(frozen=True)
class Still(Clock):
    """A clock that moves only when ``time`` does. ``skew`` seconds off."""

    time: Time = field(default_factory=Time)
    skew: float = 0.0

    def now(self) -> float:
        return self.time.now + self.skew

    def real_s(self, virtual_s: float) -> float:
        return virtual_s


class NoHost(host_module.Host):
    """Machines without processes. ``power`` hears of power-on, the power button and the cut."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.ended: dict[int, Callable[[], None]] = {}
        self.clean: set[int] = set()
        self.on_power: Callable[[int, str], None] = lambda vm_id, what: None

    def power_on(self, vm_id: int, name: str, address: str) -> tuple[int, int]:
        self.on_power(vm_id, "on")
        return vm_id, 1

    def press_power(self, pid: int, started: int) -> None:
        if pid:
            self.on_power(pid, "button")

    def cut_power(self, vm_id: int, pid: int) -> None:
        self.on_power(vm_id, "cut")

    def was_clean(self, vm_id: int) -> bool:
        return vm_id in self.clean

    def watch(self, pid: int, started: int, ended: Callable[[], None]) -> None:
        self.ended[pid] = ended

    def off(self, vm_id: int) -> None:
        """The guest has powered itself off."""
        self.clean.add(vm_id)
        self.ended[vm_id]()

    def copy_tree(self, source: Path, target: Path, done: Callable[[str | None], None]) -> None:
        done(None)

    def attach(self, vm_id: int, disk_id: int, device: str) -> None: ...
    def detach(self, vm_id: int, disk_id: int, device: str) -> None: ...
    def drop_vm(self, vm_id: int) -> None: ...
    def drop_disk(self, disk_id: int) -> None: ...
    def drop_snapshot(self, snapshot_id: int) -> None: ...


class NoSites:
    """Metadata servers: agents of the machine look into the plane themselves."""

    def open(self, path: str, address: str) -> None: ...
    def close(self, path: str) -> None: ...
    def changed(self, path: str) -> None: ...


@cache
def _seed_folder() -> Path:
    """Keys are made once: 60 ms a cloud otherwise."""
    folder = Path(tempfile.mkdtemp(prefix="sk-machine-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = Config(uid="abcdef012345", port=9100, clock=f"{START}:{START}:1", seed=1, per_zone=16)
    (folder / "cloud.json").write_bytes(msgspec.json.encode(config))
    ControlPlane(folder).world.state.close()
    (folder / "state.sqlite").unlink()
    return folder


class Plane:
    """A control plane in a folder of its own. ``advance`` lets time pass, timer by timer."""

    def __init__(self, time: Time) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sk-machine-"))
        for name in ("cloud.json", "key.pem", "secret"):
            shutil.copy2(_seed_folder() / name, self.folder / name)
        self.time = time
        self.plane = ControlPlane(self.folder)
        self.world, self.parts = self.plane.world, self.plane.parts
        self.world.clock = Still(time=time)
        self.world.state._db.execute("PRAGMA synchronous = OFF")
        self.host = NoHost(self.world)
        for part in (self.parts.power, self.parts.attachments, self.parts.disks):
            part._host = self.host
        self.parts.machines.sites = NoSites()
        self.events: list[str] = []  # names of preempted machines, on their way to the function
        self.parts.power.on_preempted = lambda vm: self.events.append(vm.name)
        for zone in ZONES:
            self.capacity(zone, 99)

    def close(self) -> None:
        self.world.state.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def advance(self, to: float) -> None:
        """Every timer that is due until then, each at its own time."""
        while (timer := self.world.state.first_timer()) is not None and timer.due <= to:
            self.time.now = max(self.time.now, timer.due)
            self.plane.timers._fire(timer)
        self.time.now = max(self.time.now, to)

    # -- what only a stand-in can be asked

    def vms(self) -> list[LocalVm]:
        return self.parts.machines.list()

    def vm(self, vm_id: int) -> LocalVm | None:
        return next((vm for vm in self.vms() if vm.id == vm_id), None)

    def disks(self) -> list[Any]:
        """Data disks; boot disks come and go with their machine."""
        return [disk for disk in self.parts.disks.list("projects/") if parse_vm_name(disk.name) is None]

    def snapshots(self) -> list[Any]:
        return list(self.parts.disks.snapshots("projects/"))

    def capacity(self, zone: str, nodes: int, *, spot: bool = True, reclaim: bool = False) -> None:
        with self.world.state.transaction():
            self.parts.spot.set_capacity(zone, nodes, spot=spot, reclaim=reclaim)

    def partition(self, zone: str, down: bool) -> None:
        with self.world.state.transaction():
            self.parts.spot.set_partition(zone, down)

    def preempt(self, vm: LocalVm, *, notice: bool) -> None:
        with self.world.state.transaction():
            self.parts.power.preempt(vm, notice=notice)

    def declare(self, name: str, properties: dict[str, Any]) -> str:
        """An instance template; its link."""
        link = f"projects/{PROJECT}/regions/{REGION}/instanceTemplates/{name}"
        body = msgspec.json.encode({"name": name, "properties": properties})
        status, answer = self.plane.compute.answer("POST", link.rpartition("/")[0], {}, body, None)
        assert status == 200, answer
        return link

    def declare_identities(self, stack: str, *, public_ip: bool = False) -> str:
        """The stack's accounts and rights, from the program's own data; the function's address."""
        domain = f"{PROJECT}.iam.gserviceaccount.com"
        who = {key: f"{naming.account(stack, key)}@{domain}" for key in identity.ACCOUNTS}
        custom = {
            role.key: naming.custom_role(stack, role.key, "100000000000000000007")
            for role in identity.roles(stack, public_ip)
        }
        with self.world.state.transaction():
            for key, email in who.items():
                self._declare("serviceaccount:account", naming.account(stack, key), accountId=email.partition("@")[0])
            for role in identity.roles(stack, public_ip):
                self._declare("projects:iAMCustomRole", custom[role.key], permissions=list(role.permissions))
            for held in identity.project_bindings(stack):
                role = f"projects/{PROJECT}/roles/{custom[held.role]}" if held.role in custom else held.role
                condition = {"condition": {"title": "t", "expression": held.condition}} if held.condition else {}
                member = f"serviceAccount:{who[held.who]}"
                self._declare("projects:iAMMember", f"{held.who}-{held.role}", role=role, member=member, **condition)
            self._declare(
                "serviceaccount:iAMMember", "function-uses-node", role="roles/iam.serviceAccountUser",
                member=f"serviceAccount:{who[identity.FUNCTION]}",
                serviceAccountId=f"projects/{PROJECT}/serviceAccounts/{who[identity.MACHINE]}",
            )  # fmt: skip
        return who[identity.FUNCTION]

    def _declare(self, type_: str, name: str, **properties: Any) -> None:
        self.parts.resources.create(type_, Declaration(name, properties))

    def request(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """One HTTP request to the application, as an ASGI server would make it."""
        parts = urlsplit(target)
        sent: list[dict[str, Any]] = []
        scope = {
            "type": "http",
            "method": method,
            "path": unquote(parts.path),
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "server": ("127.0.0.1", 9100),
            "scheme": "http",
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body or b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        running = self.plane.app(scope, receive, send)
        try:
            running.send(None)
        except StopIteration:
            start, *chunks = sent
            return Answer(start["status"], b"".join(chunk.get("body", b"") for chunk in chunks))
        raise AssertionError(f"{method} {target} waits for something")


@dataclass
class Line:
    """The wire between the adapter and the control plane (``http_client.Wire``'s one verb), and its weather."""

    plane: Plane
    lost: int = 0  # calls that are carried out though no answer comes
    throttled: int = 0
    stale: int = 0  # lists that show what was, a few answers ago
    down: bool = False
    on_call: Callable[[str, str, Answer], None] = lambda method, target, answer: None
    served_stale: int = 0
    _old: dict[str, deque[Answer]] = field(default_factory=dict)

    def call(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, left_s: float) -> Answer:
        path = urlsplit(target).path
        hook(f"{method} {path}")
        if self.down:
            raise NoAnswerError(f"{method} {path}: no answer")
        if self.throttled > 0:
            self.throttled -= 1
            return Answer(403, THROTTLED)
        answer = self.plane.request(method, target, headers, body)
        self.on_call(method, path, answer)
        lost = self.lost > 0 and method != "GET"
        if lost:
            self.lost -= 1
        hook(f"{method} {path} done")
        if lost:
            raise NoAnswerError(f"{method} {path}: the answer was lost")
        return self._aged(path, answer) if method == "GET" and "/aggregated/" in path else answer

    def _aged(self, path: str, answer: Answer) -> Answer:
        """The oldest of the last answers while the view is stale; the partial ones are as they were."""
        kept = self._old.setdefault(path, deque(maxlen=STALE_KEPT))
        kept.append(answer)
        if self.stale <= 0:
            return answer
        self.stale -= 1
        self.served_stale += 1
        return kept[0]


class Token(MetadataToken):
    """An account's access token, as its metadata server would give it: another one every half hour."""

    def __init__(self, plane: Plane, email: str) -> None:
        self._plane, self._email = plane, email
        self._kept, self._until = "", 0.0

    def __call__(self, deadline_s: float) -> str:
        now = self._plane.world.now()
        if now >= self._until:
            self._kept, life_s = self._plane.parts.tokens.access(Principal(self._email), now)
            self._until = now + life_s / 2
        return self._kept

    def drop(self) -> None:
        self._until = 0.0


def adapter_api(line: Line, email: str) -> Api:
    """The adapter's own ``Api``, with this line for its wire and this account's rights."""
    api = Api(f"{ORIGIN}/compute/v1", Token(line.plane, email))
    api._wire = line  # type: ignore[assignment]
    return api


__all__ = ["PROJECT", "REGION", "START", "ZONES", "InsertVm", "Line", "Plane", "Ref", "Still", "Time", "adapter_api"]
