"""The control plane's process: one event loop, one SQLite file, all addresses of one cloud.

    python -m spotkeeper.local.server <folder>

Started by the keeper, killed without ceremony, started again: everything it must know is on disk, and
everything it runs goes on without it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
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
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from spotkeeper.clock import Clock
from spotkeeper.local import batch, guestview, sources
from spotkeeper.local.admin import Admin, refused
from spotkeeper.local.bucket_api import BucketApi
from spotkeeper.local.cloudparts import Parts
from spotkeeper.local.compute_api import ComputeApi
from spotkeeper.local.errors import ApiError
from spotkeeper.local.functions import site_name
from spotkeeper.local.market import Market
from spotkeeper.local.metadata import Machine
from spotkeeper.local.paths import Ref
from spotkeeper.local.resources import Declared
from spotkeeper.local.sites import Listener, MetadataSites
from spotkeeper.local.state import State
from spotkeeper.local.storage import StorageApi
from spotkeeper.local.tokens import Principal
from spotkeeper.local.world import Config, TimerLoop, World
from spotkeeper.spec import codec

log = logging.getLogger("spotkeeper.local")
EXIT_CHECK_S = 0.25


def load_world(folder: Path) -> World:
    """The cloud in a folder, as ``cloud.json`` describes it.

    Raises:
        OSError, msgspec.DecodeError: there is none.
    """
    config = codec.decode((folder / "cloud.json").read_bytes(), Config)
    real, virtual, scale = (float(part) for part in config.clock.split(":"))
    clock = Clock(real, virtual, scale)
    market = Market.load(
        config.market,
        config.zones,
        epoch=virtual,
        seed=config.seed,
        per_zone=config.per_zone,
        calm_s=config.calm_s,
    )
    return World(folder, config, clock, State(folder / "state.sqlite"), market)


class ControlPlane:
    def __init__(self, folder: Path) -> None:
        self.world = load_world(folder)
        self.parts = Parts(self.world)
        self.compute = ComputeApi(self.parts)
        self.timers = TimerLoop(self.world)
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._started: dict[str, float] = {}
        self.parts.operations.on_done(self._wake)
        self.server = _Server(self)
        self.sites = MetadataSites(self._look, self.parts.tokens, self.world.clock, self.server.listen)
        self.parts.machines.sites = self.sites
        self.parts.functions.open_site = self.sites.open
        self.parts.functions.close_site = self.sites.close
        self.app = Starlette(routes=self._routes())

    def _routes(self) -> list[Route]:
        parts, endpoint = self.parts, self.world.config.endpoint
        storage = StorageApi(endpoint, parts.buckets, parts.resources, self._who, parts.machines.find)
        bucket = BucketApi(self.world, parts.buckets, parts.resources, parts.policies, self._who)
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
        """Every address leads here; a machine's own address leads to its metadata server."""
        address = (scope.get("server") or ("", 0))[0]
        site = self.sites.at(address)
        if site is None:
            await self.app(scope, receive, send)
            return
        response = await site.answer(Request(scope, receive))
        await response(scope, receive, send)

    # Identity

    def _who(self, request: Request) -> Principal | None:
        """Who an access token speaks for; None without one, or where it does not hold."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        return self.parts.tokens.read(token.strip(), self.world.now()) if kind.lower() == "bearer" else None

    def _may_come_in(self, request: Request) -> bool:
        """A token that does not hold is refused; who shows none of ours is the operator of this machine."""
        token = request.headers.get("authorization", "")
        return "ya29.local." not in token or self._who(request) is not None

    def _look(self, path: str) -> Machine | None:
        name = site_name(path)
        if name is not None:
            doc = self.parts.functions.find(name)
            return guestview.of_function(self.world.config.project, doc.email) if doc else None
        vm = self.parts.machines.find(path)
        return guestview.of_vm(vm) if vm else None

    # Compute Engine

    async def _compute(self, request: Request) -> Response:
        if request.path_params["version"] not in ("v1", "beta"):
            return refused(ApiError(404, "notFound", f"no such API version: {request.url.path}"))
        path = request.path_params["path"].rstrip("/")
        body = await request.body()
        if not self._may_come_in(request):
            return refused(ApiError(401, "authError", "Request had invalid authentication credentials."))
        if request.method == "POST" and path.endswith("/wait"):
            await self._wait_done(path.removesuffix("/wait"))
        answer = self.compute.answer(request.method, path, dict(request.query_params), body, self._who(request))
        return Response(msgspec.json.encode(answer.body), answer.status, media_type="application/json")

    async def _batch(self, request: Request) -> Response:
        principal = self._who(request)

        def one(method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, bytes]:
            answer = self.compute.answer(method, path, query, body, principal)
            return answer.status, msgspec.json.encode(answer.body)

        try:
            body, kind = batch.answer(request.headers.get("content-type", ""), await request.body(), one)
        except ApiError as error:
            return refused(error)
        return Response(body, media_type=kind)

    async def _wait_done(self, path: str) -> None:
        """``operations.wait``: until DONE, two virtual minutes at most; then answered like a get."""
        doc = self.parts.operations.get(path)
        if doc is None or doc.operation.status == "DONE":
            return
        event = asyncio.Event()
        self._waiting.setdefault(path, set()).add(event)
        try:
            await asyncio.wait_for(event.wait(), self.world.clock.real_s(self.world.timing.wait_s))
        except TimeoutError:
            log.debug("wait for %s ran out", path)
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
        return Response(msgspec.json.encode(found) if found else b"{}", media_type="application/json")

    # Life

    async def begin(self) -> None:
        """Once the control plane answers: pick up what an earlier life left."""
        with self.world.state.transaction():
            self.parts.spot.begin()
            self.parts.disks.resume_copies()
        self.parts.power.resume()
        self.parts.functions.resume()
        task = asyncio.get_running_loop().create_task(self.timers.run())
        task.add_done_callback(_timers_ended)
        self._timers = task  # keeps it alive


def _declared(body: bytes, name: str | None = None) -> Declared:
    found = codec.decode(body, Declared)
    if name is not None and found.name != name:
        raise ApiError(400, "invalid", f"name {found.name!r} is not the path's {name!r}")
    return found


def _timers_ended(task: asyncio.Task[None]) -> None:
    """A cloud without timers is a cloud that stands still: end, and let the keeper start a new one."""
    if not task.cancelled():
        log.critical("the timer loop ended", exc_info=task.exception())
        asyncio.get_running_loop().stop()


class _Server(uvicorn.Server):
    """uvicorn with more sockets opened and closed while it runs: one per machine, on the machine's address."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(
            uvicorn.Config(
                plane,
                http="h11",
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
        """Raises OSError: the address cannot be bound."""
        protocol = functools.partial(H11Protocol, config=self.config, server_state=self.server_state, app_state={})
        sock = bind(address, self._plane.world.config.port)
        return await asyncio.get_running_loop().create_server(protocol, sock=sock, backlog=128)


def bind(address: str, port: int) -> socket.socket:
    """A listening socket's precursor. SO_REUSEADDR: a restart must not wait for old connections to time out."""
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
    (folder / sources.FILE).write_text(sources.digest())
    sock = bind("127.0.0.1", plane.world.config.port)
    plane.server.run(sockets=[sock])


__all__ = ["ControlPlane", "Ref", "bind", "load_world", "main"]

if __name__ == "__main__":
    main()
