"""The control plane's process: one event loop, one SQLite file, all addresses of one cloud.

    python -m spotkeeper.local.server.server <folder>

The keeper starts the process, and restarts it after a kill: its state is on disk, and its child processes live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from spotkeeper.contract import codec
from spotkeeper.local.access import peer
from spotkeeper.local.access.auth import METADATA_HOSTS, RequestGuard, foreign_refusal
from spotkeeper.local.bucket.bucket_api import BucketApi, StorageApi
from spotkeeper.local.compute.compute_api import ComputeApi
from spotkeeper.local.compute.resources import Declaration
from spotkeeper.local.core.errors import ApiError, forbidden
from spotkeeper.local.core.market import Market
from spotkeeper.local.core.rest import json_answer, refused
from spotkeeper.local.core.world import Config, Database, TimerLoop, World
from spotkeeper.local.lifecycle.folder import CODE, code_digest
from spotkeeper.local.machines.metadata import GuestView, Listener, MetadataSites, of_function, of_vm
from spotkeeper.local.server.admin import Admin
from spotkeeper.local.server.wiring import CloudParts
from spotkeeper.local.serverless.functions import site_name

log = logging.getLogger("spotkeeper.local")
EXIT_CHECK_S = 0.25
MAX_UNREAD_BYTES = 64 << 20
MAX_UNREAD_S = 5.0  # real; after this time the connection is closed, and the client gets the reset


def load_world(folder: Path) -> World:
    """Load the cloud of a folder; OSError or msgspec.DecodeError if ``cloud.json`` is missing or damaged."""
    config = codec.decode((folder / "cloud.json").read_bytes(), Config)
    clock = config.virtual_clock
    seed, per_zone, calm_s = config.seed, config.per_zone, config.calm_s
    market = Market.load(
        config.market, config.zones, epoch=clock.virtual_epoch, seed=seed, per_zone=per_zone, calm_s=calm_s
    )
    return World(folder, config, clock, Database(folder / "state.sqlite"), market)


class ControlPlane:
    def __init__(self, folder: Path) -> None:
        self.world = load_world(folder)
        self.parts = CloudParts(self.world)
        self.compute = ComputeApi(self.parts)
        self.guard = RequestGuard(folder, self.parts.tokens, self.world.now)
        self.timers = TimerLoop(self.world)
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self.parts.operations.on_done(self._wake)
        self.server = _Server(self)
        self.sites = MetadataSites(self._guest_view, self.parts.tokens, self.world.clock, self.server.listen)
        self.parts.machines.sites = self.sites
        self.parts.functions.open_site = self.sites.open
        self.parts.functions.close_site = self.sites.close
        self.app = Starlette(routes=self._routes())

    def _routes(self) -> list[Route]:
        storage = StorageApi(self.parts, self.guard.principal)
        bucket = BucketApi(self.parts, self.guard.principal)
        resources = "/local/v1/resources/{type}"
        return [
            Route("/compute/{version}/{path:path}", self._compute, methods=["GET", "POST", "DELETE", "PUT", "PATCH"]),
            Route("/batch/compute/{version}", self._batch, methods=["POST"]),
            Route("/batch", self._batch, methods=["POST"]),
            Route("/oauth2/v3/certs", Admin(self.parts).jwks),
            Route(resources, self._declare, methods=["POST"]),
            Route(resources + "/{name:path}", self._declared, methods=["GET", "PUT", "DELETE"]),
            *Admin(self.parts).routes(),
            *storage.routes(),
            *bucket.routes(),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request at any address. At a machine's address serve the machine's metadata."""
        receive, send = drained(scope, receive, send)
        request = Request(scope, receive)
        site = self.sites.at((scope.get("server") or ("", 0))[0])
        error = self.guard.refusal(request) if site is None else foreign_refusal(request, METADATA_HOSTS)
        if error is not None:
            await refused(error)(scope, receive, send)
        elif site is None:
            await self.app(scope, receive, send)
        else:
            response = await site.answer(request)
            await response(scope, receive, send)

    def _guest_view(self, path: str) -> GuestView | None:
        name = site_name(path)
        if name is not None:
            doc = self.parts.functions.find(name)
            return of_function(self.world.config.project, doc.email) if doc else None
        vm = self.parts.machines.find(path)
        return of_vm(vm) if vm else None

    # Compute Engine

    async def _compute(self, request: Request) -> Response:
        version = request.path_params["version"]
        if version not in ("v1", "beta"):
            return refused(ApiError(404, "notFound", f"no such API version: {request.url.path}"))
        path = request.path_params["path"].rstrip("/")
        body = await request.body()
        if request.method == "POST" and path.endswith("/wait"):
            await self._wait_done(path.removesuffix("/wait"))
        query, principal = dict(request.query_params), self.guard.principal(request)
        status, answer = self.compute.answer(request.method, path, query, body, principal, version)
        return json_answer(answer, status)

    async def _batch(self, request: Request) -> Response:
        kind, body = request.headers.get("content-type", ""), await request.body()
        try:
            body, kind = self.compute.batch(kind, body, self.guard.principal(request))
        except ApiError as error:
            return refused(error)
        return Response(body, media_type=kind)

    async def _wait_done(self, path: str) -> None:
        """Wait until an operation is DONE, at most two virtual minutes (``operations.wait``)."""
        doc = self.parts.operations.get(path)
        if doc is None or doc.operation.status == "DONE":
            return
        event = asyncio.Event()
        self._waiting.setdefault(path, set()).add(event)
        try:
            await asyncio.wait_for(event.wait(), self.world.clock.real_s(self.world.timing.wait_s))
        except TimeoutError:
            log.debug("wait for %s timed out", path)
        finally:
            self._waiting.get(path, set()).discard(event)

    def _wake(self, path: str) -> None:
        for event in self._waiting.pop(path, ()):
            event.set()

    # The other resources

    async def _declare(self, request: Request) -> Response:
        body = await request.body()
        return self._resource(lambda: self.parts.resources.create(request.path_params["type"], _declared(body)))

    async def _declared(self, request: Request) -> Response:
        type_, name = request.path_params["type"], request.path_params["name"]
        resources = self.parts.resources
        if request.method == "DELETE":
            return self._resource(lambda: resources.delete(type_, name))
        if request.method == "GET":
            return self._resource(lambda: resources.need(type_, name))
        body = await request.body()
        return self._resource(lambda: resources.update(type_, _declared(body, name)))

    def _resource(self, act: Callable[[], msgspec.Struct | None]) -> Response:
        try:
            with self.world.state.transaction():
                found = act()
        except ApiError as error:
            return refused(error)
        except msgspec.DecodeError as error:
            return refused(ApiError(400, "badRequest", str(error)))
        return json_answer(found or {})

    # Start

    async def begin(self) -> None:
        """Resume market, disk copies, VMs, functions and timers; called when the control plane has begun to answer."""
        with self.world.state.transaction():
            self.parts.spot.begin()
            self.parts.disks.resume_copies()
        self.parts.power.resume()
        self.parts.functions.resume()
        task = asyncio.get_running_loop().create_task(self.timers.run())
        task.add_done_callback(_timers_ended)
        self._timers = task  # a reference, so that it is not garbage-collected


def _declared(body: bytes, name: str | None = None) -> Declaration:
    found = codec.decode(body, Declaration)
    if name is not None and found.name != name:
        raise ApiError(400, "invalid", f"the body's name {found.name!r} differs from the path's name {name!r}")
    return found


def _timers_ended(task: asyncio.Task[None]) -> None:
    """End the process if the timer loop ends, so that the keeper starts a new one."""
    if not task.cancelled():
        log.critical("the timer loop ended", exc_info=task.exception())
        asyncio.get_running_loop().stop()


def drained(scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Wrap ``send`` so that it reads the rest of the request's body before the answer ends.

    An answer, mostly a refusal, may be ready before the whole body is read. If the server then closed the connection,
    the kernel would send a reset, and the client would fail with "Connection reset by peer" and not read the answer.
    """
    headers = dict(scope["headers"])
    if b"expect" in headers or (headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers):
        return receive, send  # no body to read: a client that expects "100 Continue" sends none after a refusal
    unread = True

    async def receive_on() -> Message:
        nonlocal unread
        message = await receive()
        unread = unread and message["type"] == "http.request" and message.get("more_body", False)
        return message

    async def read_rest() -> None:
        size = 0
        while unread and size < MAX_UNREAD_BYTES:
            size += len((await receive_on()).get("body", b""))

    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False) and unread:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(read_rest(), MAX_UNREAD_S)
        await send(message)

    return receive_on, send_on


class OwnersOnly(H11Protocol):
    """A connection whose requests get 403 unless the client is a process of the operator."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not peer.is_operators(transport.get_extra_info("socket")):
            self.app = _refuse_user


async def _refuse_user(scope: Scope, receive: Receive, send: Send) -> None:
    receive, send = drained(scope, receive, send)
    message = f"Only processes of user {os.getuid()}, who runs this cloud, may call it: run the client as that user."
    await refused(forbidden(message))(scope, receive, send)


class _Server(uvicorn.Server):
    """A uvicorn server that can open and close sockets while it runs: one socket for each machine's address."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(
            uvicorn.Config(
                plane,
                http=OwnersOnly,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=1,
            )
        )
        self._plane = plane

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self._plane.begin()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(EXIT_CHECK_S)

    async def listen(self, address: str) -> Listener:
        """Open a socket at an address; OSError if it cannot be bound."""
        protocol = functools.partial(OwnersOnly, config=self.config, server_state=self.server_state, app_state={})
        sock = bind(address, self._plane.world.config.port)
        return await asyncio.get_running_loop().create_server(protocol, sock=sock, backlog=self.config.backlog)


def bind(address: str, port: int) -> socket.socket:
    """Bind a socket, with SO_REUSEADDR, so that a restart does not wait until old connections time out."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    plane = ControlPlane(folder)
    (folder / CODE).write_text(code_digest())
    sock = bind("127.0.0.1", plane.world.config.port)
    plane.server.run(sockets=[sock])


if __name__ == "__main__":
    main()
