"""An HTTP/1.1 client on the standard library with keep-alive, no redirects, and a deadline for the whole answer.

It is imported at the function's cold start, so it needs only the standard library. Every address comes from a setting,
never from a body, a record or an event.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

MAX_ANSWER = 32 * 1024 * 1024  # a page of 500 instances is 2.5 MB
KEPT_CONNECTIONS = 16


class NoAnswerError(Exception):
    """No complete answer within the deadline: the call may or may not have happened."""


class Answer(Struct, frozen=True):
    status: int
    body: bytes


class Wire:
    """A client of one host that reuses connections; a deadline covers the whole answer, not each read."""

    def __init__(self, origin: str) -> None:
        parts = urlsplit(origin)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def call(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, left_s: float) -> Answer:
        """Make one request and return the answer.

        There is one retry: if a reused connection fails before the answer's first byte, mostly because the server has
        closed it, a new connection is tried. The first request was perhaps carried out too, so every request must be
        safe to repeat.
        """
        ends = time.monotonic() + left_s
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._exchange(kept, method, target, headers, body, ends)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
                kept.close()
                if time.monotonic() >= ends:
                    raise NoAnswerError(f"{method} {self._host}: no answer in time") from error
        try:
            return self._exchange(self._connection(), method, target, headers, body, ends)
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"{method} {self._host}:{self._port}: {type(error).__name__}: {error}") from error

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(self._host, self._port, context=_tls())
        return http.client.HTTPConnection(self._host, self._port)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
        ends: float,
    ) -> Answer:
        left = max(0.001, ends - time.monotonic())
        connection.timeout = left
        if connection.sock is not None:
            connection.sock.settimeout(left)
        # Socket timeouts restart with every byte; only this timer ends an answer that trickles in.
        watchdog = threading.Timer(left, _cut, (connection,))
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.request(method, target, body=body, headers=dict(headers))
            response = connection.getresponse()
            data = response.read(MAX_ANSWER + 1)
        except BaseException:
            connection.close()
            raise
        finally:
            watchdog.cancel()
        if len(data) > MAX_ANSWER or not response.isclosed():
            connection.close()
            raise http.client.HTTPException(f"the answer is incomplete, or larger than {MAX_ANSWER} bytes")
        if response.will_close:
            connection.close()
        else:
            self._keep(connection)
        return Answer(response.status, data)

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < KEPT_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()


def _cut(connection: http.client.HTTPConnection) -> None:
    """Make a blocked read return at once. Closing the socket would free the descriptor that the read still uses."""
    sock = connection.sock
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the connection had already ended


def split_origin(url: str, setting: str, want: str) -> SplitResult:
    """Return the parts of an http or https address from a setting, after checking its scheme, host and port.

    Raises:
        ValueError: another scheme, a user before the host (``http://127.0.0.1@evil``), an invalid port, or plain http
            to a host that is not this machine: the token could be read on the way.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{setting}={url!r}: {error}; want {want}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or port == 0:
        raise ValueError(f"{setting}={url!r}: want {want}")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"{setting}={url!r}: plain http is allowed only to this machine")
    return parts


def is_loopback(host: str) -> bool:
    """Return whether plain http to this host stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _lazy_tls() -> Callable[[], ssl.SSLContext]:
    made: list[ssl.SSLContext] = []

    def get() -> ssl.SSLContext:
        if not made:
            made.append(ssl.create_default_context())  # takes 20 ms, so it is made at the first call
        return made[0]

    return get


_tls = _lazy_tls()
