"""Guards the dashboard: an ASGI app that wraps the dashboard's and checks each HTTP request and websocket first.

Any program and any web page on this machine can reach a port of its loopback. So each request must have the cookie
that a browser gets by opening the one-time address. It must name this server in ``Host`` (against DNS rebinding), and a
websocket or a request that changes something must come from a page of this server (``Origin``). Cookies do not depend
on the port, so the cookie's name contains it; otherwise two dashboards would log each other out.

Behind a proxy that authenticates users, a header with a secret, which the proxy sends, takes the place of the cookie.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = "/open"
ALIVE = "/alive"
PROXY_HEADER = b"x-spotkeeper-proxy"
# Vue compiles its templates in the browser, which needs 'unsafe-eval'; NiceGUI starts its pages by inline scripts.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
HOW = "Open this dashboard by the address that `spotkeeper dashboard` printed."
CODE_S = 1800.0  # real; how long a one-time address works
USED = (
    "This address was used already, is older than half an hour, or is wrong. The file dashboard-*.html that the"
    " dashboard keeps in ~/.local/state/spotkeeper always opens it.\n"
)


class Guard:
    """The guard in front of an ASGI app.

    Args:
        port: where the server listens, on the loopback.
        on_open: called after a one-time address was used; :meth:`opening` then returns the next one.
        proxy: the address under which a proxy serves the dashboard (``https://host``); "" without a proxy.
        proxy_secret: what the proxy sends in the header ``X-Spotkeeper-Proxy`` of each request.
        clock: real seconds.
    """

    def __init__(
        self,
        app: App,
        port: int,
        *,
        on_open: Callable[[], None] = lambda: None,
        proxy: str = "",
        proxy_secret: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self.on_open, self._clock = app, on_open, clock
        self._codes: list[tuple[str, float]] = []  # with the end of each; the last one is the newest
        self.renew()
        self._cookie = f"spotkeeper-{port}"
        self._token = secrets.token_urlsafe(32)
        self._proxy = proxy.rstrip("/")
        self._proxy_secret = proxy_secret
        local = (f"127.0.0.1:{port}", f"localhost:{port}")
        self._hosts = frozenset(local if not proxy else (urlsplit(self._proxy).netloc, *local))
        self._origins = frozenset(f"http://{host}" for host in local) | ({self._proxy} if proxy else set())

    def opening(self, path: str = "/") -> str:
        """Return the path that lets one browser in, once, and shows ``path`` there."""
        return f"{OPEN}?code={self._codes[-1][0]}&to={path}"

    def renew(self) -> None:
        """Make the next one-time address. Unused earlier ones work until their end."""
        now = self._clock()
        self._codes = [one for one in self._codes if now < one[1]]
        self._codes.append((secrets.token_urlsafe(32), now + CODE_S))

    def _take(self, code: str) -> bool:
        """Whether a code is valid; from then on it is not."""
        now = self._clock()
        found = [one for one in self._codes if hmac.compare_digest(code.encode(), one[0].encode())]
        self._codes = [one for one in self._codes if one not in found]
        return any(now < end for _, end in found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            return
        headers: list[tuple[bytes, bytes]] = list(scope.get("headers", ()))
        websocket = scope["type"] == "websocket"
        why = self._foreign(headers, websocket or scope.get("method") not in ("GET", "HEAD"))
        if not why and not websocket and scope["path"] == ALIVE:
            await _answer(send, 200, "alive\n")
            return
        if not why and not websocket and scope["path"] == OPEN:
            await self._open(scope, send)
            return
        if why or not self._known(headers):
            await _refuse(websocket, receive, send, why or HOW)
            return
        await self._app(scope, receive, send if websocket else _hardened(send))

    def _foreign(self, headers: list[tuple[bytes, bytes]], changes: bool) -> str:
        """Why this request does not come from a page of this server; "" if it does."""
        if [value for name, value in headers if name == b"host" and value.decode("latin-1") in self._hosts] != _all(
            headers, b"host"
        ) or not _all(headers, b"host"):
            return "The Host header names another server."
        origins = [value.decode("latin-1") for value in _all(headers, b"origin")]
        if any(origin not in self._origins for origin in origins) or (changes and not origins):
            return "This request comes from a page of another server."
        return ""

    def _known(self, headers: list[tuple[bytes, bytes]]) -> bool:
        if self._proxy:
            told = _all(headers, PROXY_HEADER)
            return len(told) == 1 and hmac.compare_digest(told[0], self._proxy_secret.encode())
        # Not SimpleCookie: it gives up at the first odd cookie, and other servers on this host set cookies too.
        mine = f"{self._cookie}={self._token}".encode()
        pairs = (pair.strip() for value in _all(headers, b"cookie") for pair in value.split(b";"))
        return any(hmac.compare_digest(pair, mine) for pair in pairs)

    async def _open(self, scope: Scope, send: Send) -> None:
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        code, to = asked.get("code", [""])[0], asked.get("to", ["/"])[0]
        if self._proxy or not self._take(code):
            if not self._codes:
                self.renew()
            await _answer(send, 403, USED)
            return
        self.renew()
        self.on_open()
        # `//host` would lead away; Strict would withhold the cookie after the redirect from a file.
        to = to if to.startswith("/") and not to.startswith(("//", "/\\")) and to.isprintable() else "/"
        cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Lax; Path=/"
        await _answer(send, 303, "", ((b"location", to.encode()), (b"set-cookie", cookie.encode())))


def _all(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name == wanted]


async def _refuse(websocket: bool, receive: Receive, send: Send, why: str) -> None:
    if websocket:
        await receive()  # the connect message; closing before accepting answers 403
        await send({"type": "websocket.close", "code": 4403})
        return
    await _answer(send, 403, f"{why}\n")


async def _answer(send: Send, status: int, text: str, more: Iterable[tuple[bytes, bytes]] = ()) -> None:
    body = text.encode()
    plain = ((b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()))
    headers = [*plain, (b"cache-control", b"no-store"), *HEADERS, *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _hardened(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            ours = {name for name, _ in HEADERS}
            kept = [pair for pair in message.get("headers", ()) if bytes(pair[0]).lower() not in ours]
            message = {**message, "headers": [*kept, *HEADERS]}
        await send(message)

    return with_headers
