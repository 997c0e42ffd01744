"""Runs the dashboard's server on the loopback, and lets one browser in.

The one-time address contains a code. The browser gets it from a file that only this user can read, since process lists
show a browser's arguments. Once the code is used, the file gets the next one, for further browsers.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import html
import os
import signal
import socket
import stat
import tempfile
import webbrowser
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.dashboard.guard import CODE_S, App, Guard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import FrameType

    from fastapi import FastAPI

    from spotkeeper.dashboard.actions import Commands
    from spotkeeper.dashboard.feed import JobFeed

HOST = "127.0.0.1"
PREFIX, SUFFIX = "dashboard-", ".html"  # of the file that opens the dashboard
RECONNECT_S = 30.0  # a laptop that slept keeps its page
CLOSE_S = 5  # the longest wait for open requests at the end
PROXY_SECRET = "SPOTKEEPER_PROXY_SECRET"  # noqa: S105 - the name of a variable
LEAST_SECRET = 32  # characters
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's malloc.h
_LARGE_BYTES = 1 << 18  # of a buffer that is no part of the heap


def bound(port: int) -> socket.socket:
    """Return a socket on the loopback. ``port``: 0 for any free one.

    Raises:
        CliError: the port is taken.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((HOST, port))
    except OSError as error:
        made.close()
        raise CliError(f"cannot listen on {HOST}:{port}: {error.strerror}", Exit.REFUSED, "--port 0") from None
    return made


def application(feed: JobFeed, commands: Commands) -> FastAPI:
    """Return the ASGI app with all pages. Call it once per process, since NiceGUI keeps its pages in globals."""
    from fastapi import FastAPI
    from nicegui import app as pages_app
    from nicegui import background_tasks, ui

    from spotkeeper.dashboard import pages

    # Quasar would show each request of the page as a progress bar that screen readers cannot name.
    pages_app.config.quasar_config["loadingBar"]["skipHijack"] = True
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    pages.register(feed, commands)
    pages_app.add_exception_handler(404, pages.missing)
    ui.run_with(
        app,
        title="Spotkeeper",
        favicon=pages.ICON,
        dark=None,
        language="en-US",
        reconnect_timeout=RECONNECT_S,
        binding_refresh_interval=None,
        show_welcome_message=False,
    )
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(of: FastAPI) -> AsyncIterator[None]:
        async with inner(of):
            background_tasks.create(feed.run(), name="reads of the bucket")
            yield

    app.router.lifespan_context = lifespan
    return app


def bound_memory() -> None:
    """Make all threads share one heap, and return large buffers to the system once they are freed.

    By default each reading thread's own heap keeps what it freed, a third of all memory; and once glibc has freed a
    large object of the bucket, it takes later ones from the heap, which then never shrinks: a fifth of the rest.
    """
    with suppress(AttributeError):  # a C library without mallopt
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


class Address(Struct, frozen=True):
    """How a browser reaches the server.

    ``url``: the one-time address, "" behind a proxy; ``file``: the HTML file that opens the one-time address.
    """

    url: str
    port: int
    file: str


class Opening:
    """The file that opens the dashboard in a browser, readable by this user alone.

    It is locked while this process runs, so that a later one can tell which files a killed process has left.
    """

    def __init__(self, port: int, path: str) -> None:
        self.root, self._path = f"http://{HOST}:{port}", path
        folder = _folder() or Path(tempfile.gettempdir())
        remove_stale(folder)
        while True:
            self._handle, name = tempfile.mkstemp(prefix=f"{PREFIX}{port}-", suffix=SUFFIX, dir=folder)  # mode 0600
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            if os.fstat(self._handle).st_nlink:  # another start may have removed it before it was locked
                break
            os.close(self._handle)
        self.file = Path(name)

    def write(self, guard: Guard) -> None:
        address = html.escape(self.root + guard.opening(self._path))
        page = (
            f'<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
            f'<meta http-equiv="refresh" content="0;url={address}"><title>Spotkeeper</title>\n'
        )
        os.pwrite(self._handle, page.encode(), 0)
        os.ftruncate(self._handle, len(page.encode()))

    def remove(self) -> None:
        with suppress(OSError):
            self.file.unlink()
        os.close(self._handle)


def remove_stale(folder: Path) -> None:
    """Remove this user's files of dashboards that were killed. Links, and files of others, are left alone."""
    for file in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError):
            handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                about = os.fstat(handle)
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its process runs
                    file.unlink()
            finally:
                os.close(handle)


def _folder() -> Path | None:
    """Return a folder in the home folder, since confined browsers can read no other; None if it is not writable."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "spotkeeper"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def proxy_secret(proxy: str) -> str:
    """Return the secret that a proxy must send; "" without a proxy.

    Raises:
        CliError: the secret is missing or short, or the address is not https.
    """
    if not proxy:
        return ""
    if not proxy.startswith("https://"):
        raise CliError(f"--behind {proxy}: want the proxy's address, https://...", Exit.USAGE)
    secret = os.environ.get(PROXY_SECRET, "")
    if len(secret) < LEAST_SECRET:
        why = f"--behind needs {PROXY_SECRET}: the secret that the proxy sends, at least {LEAST_SECRET} characters"
        raise CliError(why, Exit.USAGE, f'export {PROXY_SECRET}="$(openssl rand -hex 32)"')
    return secret


def serve(
    feed: JobFeed,
    commands: Commands,
    up: Callable[[Address], None],
    *,
    port: int = 0,
    path: str = "/",
    browser: bool = True,
    proxy: str = "",
) -> None:
    """Serve until Ctrl-C, SIGTERM or a closed terminal.

    ``path``: the page that the browser opens. ``up``: called once the server answers.
    """
    import uvicorn

    secret = proxy_secret(proxy)
    bound_memory()
    listener = bound(port)
    port = listener.getsockname()[1]
    app: App = application(feed, commands)
    guard = Guard(app, port, proxy=proxy, proxy_secret=secret)
    config = uvicorn.Config(
        guard,
        log_level="warning",
        lifespan="on",
        server_header=False,
        ws_max_size=1 << 20,
        timeout_graceful_shutdown=CLOSE_S,
    )

    async def renew() -> None:
        """Keep a valid one-time address in the file."""
        while True:
            await asyncio.sleep(CODE_S / 2)
            guard.renew()
            opening.write(guard)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            feed.end()
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                up(Address("" if proxy else opening.root + guard.opening(path), port, str(opening.file)))
                self.renewal = asyncio.create_task(renew())
                if browser and not proxy:
                    webbrowser.open(opening.file.as_uri())

    server = Server(config)
    # uvicorn raises the signal that ended it again at its end; the default action would leave the file there
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    opening = Opening(port, path)
    guard.on_open = lambda: opening.write(guard)
    try:
        opening.write(guard)
        server.run(sockets=[listener])
    finally:
        opening.remove()
        listener.close()
        for number, handler in before.items():
            signal.signal(number, handler)
