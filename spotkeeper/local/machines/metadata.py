"""Metadata servers, one per machine at the machine's own address, and the tree of values that each serves.

They follow Google's protocol: a request without ``Metadata-Flavor: Google`` gets 403, proxies are refused, folders end
with a slash, ``recursive=true`` returns JSON with camel-cased keys, each subtree has an ETag, and ``wait_for_change``
returns only after a change of the requested subtree. They read the cloud's state and change nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from spotkeeper.clock import Clock
from spotkeeper.local.access.auth import Principal, Tokens
from spotkeeper.local.core import catalog
from spotkeeper.local.core.rest import last, timestamp
from spotkeeper.local.core.schema import JsonObject, JsonValue
from spotkeeper.local.core.vm import LocalVm

log = logging.getLogger("spotkeeper.local")
ROOT = "/computeMetadata/v1/"
NUMBER = catalog.PROJECT_NUMBER
WINDOW_S = 4 * 3600.0
MAX_WAIT_S = 3600.0  # virtual; the default of timeout_sec


@dataclass(frozen=True)
class GuestView:
    """What a machine's metadata server serves now: its tree (kebab-case keys), identity and token claims."""

    tree: JsonObject
    principal: Principal
    claims: JsonObject | None  # the claims google.compute_engine; None for a function


class MetadataServer:
    """The metadata server of one machine.

    ``look`` returns the machine's current values; :meth:`changed` wakes the requests that wait for a change.
    """

    def __init__(self, look: Callable[[], GuestView | None], tokens: Tokens, clock: Clock) -> None:
        self._look = look
        self._tokens = tokens
        self._clock = clock
        self._waiters: set[asyncio.Event] = set()

    def changed(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def answer(self, request: Request) -> Response:
        refusal = _refusal(request)
        if refusal is not None:
            return refusal
        if not request.url.path.startswith(ROOT):
            return await self._outside(request)
        path = request.url.path.removeprefix(ROOT)
        machine = self._look()
        if machine is None:
            return _plain("the machine is gone", 503)
        token = self._token(machine, path, request)
        if token is not None:
            return token
        if request.query_params.get("wait_for_change", "").lower() == "true":
            return await self._wait(path, request)
        return self._read(machine, path, request)

    async def _outside(self, request: Request) -> Response:
        """Answer for a path outside ``computeMetadata/v1``. Clients request ``/`` to detect a metadata server."""
        if request.url.path in ("/", "/computeMetadata", "/computeMetadata/"):
            return _plain("computeMetadata/\n" if request.url.path == "/" else "v1/\n", 200)
        return _plain("Not Found", 404)

    def _read(self, machine: GuestView, path: str, request: Request) -> Response:
        found, value = _lookup(machine.tree, path)
        if not found:
            return _plain(f"Error 404 (Not Found): {quote(path)}", 404)
        if isinstance(value, dict | list) and path and not path.endswith("/"):
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"{ROOT}{path}/{query}", 301, {"Metadata-Flavor": "Google"})
        body, kind = _render(value, request)
        headers = {"ETag": _etag(value), "Metadata-Flavor": "Google", "X-Frame-Options": "0"}
        return Response(body, 200, headers, media_type=kind)

    async def _wait(self, path: str, request: Request) -> Response:
        machine = self._look()
        known = request.query_params.get("last_etag") or (self._etag(machine, path) if machine else "")
        end = self._clock.now() + _timeout(request)
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            while machine is not None and self._etag(machine, path) == known:
                waiter.clear()
                left = self._clock.real_s(end - self._clock.now())
                if left <= 0 or gone.done():
                    break
                woken = asyncio.ensure_future(waiter.wait())
                await asyncio.wait({woken, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                machine = self._look()
        finally:
            gone.cancel()
            self._waiters.discard(waiter)
        return _plain("the machine is gone", 503) if machine is None else self._read(machine, path, request)

    def _etag(self, machine: GuestView, path: str) -> str:
        return _etag(_lookup(machine.tree, path)[1])

    def _token(self, machine: GuestView, path: str, request: Request) -> Response | None:
        """Answer a request for ``token`` or ``identity``, which are not in the tree; return None for other paths."""
        match = re.fullmatch(r"instance/service-accounts/([^/]+)/(token|identity)", path)
        if not match or match[1] not in ("default", machine.principal.email):
            return None
        now = self._clock.now()
        if match[2] == "token":
            token, life = self._tokens.access(machine.principal, now)
            body = {"access_token": token, "expires_in": life, "token_type": "Bearer"}
            return Response(json.dumps(body), 200, {"Metadata-Flavor": "Google"}, media_type="application/json")
        audience = request.query_params.get("audience")
        if not audience:
            return _plain("non-empty audience parameter required", 400)
        full = request.query_params.get("format", "standard") == "full"
        return _plain(self._tokens.identity(machine.principal.email, audience, now, machine.claims if full else None))


def _refusal(request: Request) -> Response | None:
    if "x-forwarded-for" in request.headers:
        return _plain("Request with X-Forwarded-For header is not allowed", 403)
    if request.headers.get("metadata-flavor") != "Google" and request.url.path != "/":
        return _plain("Missing Metadata-Flavor:Google header.", 403)
    if request.method != "GET":
        return _plain("Method Not Allowed", 405)
    return None


def _plain(text: str, status: int = 200) -> Response:
    return PlainTextResponse(text, status, {"Metadata-Flavor": "Google"})


def _timeout(request: Request) -> float:
    try:
        return max(0.0, float(request.query_params.get("timeout_sec", MAX_WAIT_S)))
    except ValueError:
        return MAX_WAIT_S


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _lookup(tree: JsonValue, path: str) -> tuple[bool, JsonValue]:
    at = tree
    for part in path.strip("/").split("/") if path.strip("/") else ():
        if isinstance(at, dict) and part in at:
            at = at[part]
        elif isinstance(at, list) and part.isdecimal() and int(part) < len(at):
            at = at[int(part)]
        else:
            return False, None
    return True, at


def _etag(value: JsonValue) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _render(value: JsonValue, request: Request) -> tuple[str, str]:
    recursive = request.query_params.get("recursive", "").lower() == "true"
    alt = request.query_params.get("alt") or ("json" if recursive else "text")
    if isinstance(value, dict | list) and not recursive:
        names = value if isinstance(value, dict) else {str(i): item for i, item in enumerate(value)}
        text = "".join(f"{k}/\n" if isinstance(v, dict | list) else f"{k}\n" for k, v in names.items())
        return text, "application/text"
    if alt == "json":
        return json.dumps(_camel(value)), "application/json"
    return (_flat(value, "") if isinstance(value, dict | list) else str(value)), "application/text"


def _flat(value: JsonValue, prefix: str) -> str:
    if isinstance(value, dict):
        return "".join(_flat(item, f"{prefix}{key}/") for key, item in value.items())
    if isinstance(value, list):
        return "".join(_flat(item, f"{prefix}{i}/") for i, item in enumerate(value))
    return f"{prefix[:-1]} {value}\n"


def _camel(value: JsonValue, key: str = "") -> JsonValue:
    """Convert keys to camel case, except names that users chose (attributes, e-mails)."""
    if isinstance(value, list):
        return [_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    keep = key in ("attributes", "service-accounts")
    return {(name if keep else _to_camel(name)): _camel(item, name) for name, item in value.items()}


def _to_camel(name: str) -> str:
    head, *rest = name.split("-")
    return head + "".join(part.capitalize() for part in rest)


def of_vm(vm: LocalVm) -> GuestView:
    """Return a VM's values: the tree of ``computeMetadata/v1`` and the claims of ``format=full``."""
    accounts = vm.wire.service_accounts or []
    email = accounts[0].email if accounts else catalog.DEFAULT_SERVICE_ACCOUNT
    scopes = list(accounts[0].scopes) if accounts else []
    claims: JsonObject = {
        "instance_creation_timestamp": int(datetime.fromisoformat(vm.wire.creation_timestamp or "").timestamp()),
        "instance_id": str(vm.id),
        "instance_name": vm.name,
        "project_id": vm.project,
        "project_number": NUMBER,
        "zone": vm.zone,
    }
    return GuestView(
        {"instance": _instance(vm, email, scopes), "project": _project(vm.project)}, Principal(email, vm.path), claims
    )


def of_function(project: str, email: str) -> GuestView:
    """Return what a function's metadata server serves: as on Cloud Run, only the function's identity and project."""
    instance: JsonObject = {"id": "function", "service-accounts": _accounts(email, [])}
    return GuestView({"instance": instance, "project": _project(project)}, Principal(email), None)


def _instance(vm: LocalVm, email: str, scopes: list[str]) -> JsonObject:
    attributes: JsonObject = dict(vm.wire.metadata.values()) if vm.wire.metadata else {}
    scheduling = vm.scheduling
    disks: list[JsonValue] = [
        {"device-name": disk.device_name, "index": disk.index or 0, "interface": "SCSI", "mode": "READ_WRITE"}
        for disk in vm.wire.disks or []
    ]
    interfaces: list[JsonValue] = [
        {"ip": vm.address, "mac": "42:01:" + vm.address.replace(".", ":"), "network": _number(interface.network)}
        for interface in vm.wire.network_interfaces or []
    ]
    return {
        "attributes": attributes,
        "cpu-platform": vm.wire.cpu_platform,
        "description": vm.wire.description or "",
        "disks": disks,
        "hostname": f"{vm.name}.{vm.zone}.c.{vm.project}.internal",
        "id": vm.id,
        "machine-type": f"projects/{NUMBER}/machineTypes/{vm.machine}",
        "maintenance-event": vm.maintenance,
        "name": vm.name,
        "network-interfaces": interfaces,
        "preempted": _flag(vm.preempted),
        "scheduling": {
            "automatic-restart": _flag(scheduling.automatic_restart),
            "on-host-maintenance": scheduling.on_host_maintenance,
            "preemptible": _flag(scheduling.preemptible),
        },
        "service-accounts": _accounts(email, scopes),
        "tags": list(vm.wire.tags.items or []) if vm.wire.tags else [],
        "upcoming-maintenance": _window(vm.maintenance_at),
        "zone": f"projects/{NUMBER}/zones/{vm.zone}",
    }


def _window(start: float) -> JsonObject:
    """Return ``upcoming-maintenance`` in Google's form: a window of hours from ``start``; {} if ``start`` is 0."""
    if not start:
        return {}
    begins = timestamp(start)
    return {
        "can-reschedule": "false",
        "latest-window-start-time": begins,
        "maintenance-status": "PENDING",
        "type": "UNSCHEDULED",
        "window-end-time": timestamp(start + WINDOW_S),
        "window-start-time": begins,
    }


def _accounts(email: str, scopes: list[str]) -> JsonObject:
    listed: list[JsonValue] = list(scopes)
    account: JsonObject = {"aliases": ["default"], "email": email, "scopes": listed}
    return {"default": account, email: account}


def _project(project: str) -> JsonObject:
    return {"attributes": {}, "numeric-project-id": NUMBER, "project-id": project}


def _number(link: str | None) -> str:
    return f"projects/{NUMBER}/networks/{last(link or 'default')}"


def _flag(value: bool | None) -> str:
    return "TRUE" if value else "FALSE"


class Listener(Protocol):
    def close(self) -> None: ...


Listen = Callable[[str], Awaitable[Listener]]


class MetadataSites:
    """Opens and closes metadata servers. ``look`` returns a VM's or a function's values; ``listen`` opens a socket."""

    def __init__(self, look: Callable[[str], GuestView | None], tokens: Tokens, clock: Clock, listen: Listen) -> None:
        self._look = look
        self._tokens = tokens
        self._clock = clock
        self._listen = listen
        self._address: dict[str, str] = {}
        self._servers: dict[str, MetadataServer] = {}
        self._listeners: dict[str, Listener] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def at(self, address: str) -> MetadataServer | None:
        """Return the server at an address of 127/8; None if there is none."""
        return self._servers.get(address)

    def open(self, path: str, address: str) -> None:
        if path in self._address:
            return
        self._address[path] = address
        self._servers[address] = MetadataServer(lambda: self._look(path), self._tokens, self._clock)
        task = asyncio.get_running_loop().create_task(self._open(path, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, path: str, address: str) -> None:
        try:
            listener = await self._listen(address)
        except OSError:
            log.exception("%s: no metadata server at %s", path, address)
            return
        if self._address.get(path) == address:
            self._listeners[path] = listener
        else:
            listener.close()

    def changed(self, path: str) -> None:
        server = self._servers.get(self._address.get(path, ""))
        if server is not None:
            server.changed()

    def close(self, path: str) -> None:
        address = self._address.pop(path, None)
        server = self._servers.pop(address, None) if address else None
        if server is not None:
            server.changed()  # waiting requests learn that the machine is gone
        listener = self._listeners.pop(path, None)
        if listener is not None:
            listener.close()
