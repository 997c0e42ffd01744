"""Compute Engine by REST over ``http.client``: connections, deadlines, the token. Knows no verb of ours.

Google's SDK costs 1 s of import and 148 MB, which is more than the whole function may.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock

DEFAULT_ENDPOINT = "https://compute.googleapis.com/compute/v1"
DEFAULT_METADATA_HOST = "169.254.169.254"
MAX_ANSWER = 32 * 1024 * 1024  # a page of 500 instances is 2.5 MB
KEPT_CONNECTIONS = 16
TOKEN_EARLY_S = 60.0  # a token is renewed this long before it ends
_TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105 - an address


class NoAnswerError(Exception):
    """No complete answer within the deadline: the call may or may not have happened."""


class Answer(Struct, frozen=True):
    status: int
    body: bytes


class _TokenReply(Struct, frozen=True):
    access_token: str
    expires_in: float


class MetadataToken:
    """The machine identity's access token, from the metadata server, kept until a minute before it ends."""

    def __init__(self, clock: Clock, host: str | None = None) -> None:
        self._clock = clock
        self._host = host or os.environ.get("GCE_METADATA_HOST") or DEFAULT_METADATA_HOST
        self._lock = threading.Lock()
        self._value = ""
        self._until = 0.0

    def __call__(self, deadline_s: float) -> str:
        with self._lock:
            if not self._value or self._clock.now() > self._until - TOKEN_EARLY_S:
                self._fetch(deadline_s)
            return self._value

    def drop(self) -> None:
        """The token was refused: ask for another next time."""
        with self._lock:
            self._value = ""

    def _fetch(self, deadline_s: float) -> None:
        wire = Wire(f"http://{self._host}")
        answer = wire.call("GET", _TOKEN_PATH, {"Metadata-Flavor": "Google"}, None, min(deadline_s, 5.0))
        if answer.status != 200:
            raise NoAnswerError(f"metadata server {self._host}: HTTP {answer.status} for an access token")
        try:
            reply = msgspec.json.decode(answer.body, type=_TokenReply)
        except msgspec.DecodeError as error:
            raise NoAnswerError(f"metadata server {self._host}: not a token: {error}") from error
        self._value, self._until = reply.access_token, self._clock.now() + reply.expires_in


class Api:
    """Calls under one endpoint, each with a deadline; thread-safe.

    Raises:
        ValueError: plain http to a host that is not this machine: a token must not cross an open line.
    """

    def __init__(self, endpoint: str, token: MetadataToken | None) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"SPOTKEEPER_COMPUTE_ENDPOINT={endpoint!r}: want https://host/compute/v1")
        if parts.scheme == "http" and not _is_loopback(parts.hostname):
            raise ValueError(f"SPOTKEEPER_COMPUTE_ENDPOINT={endpoint!r}: plain http only to this machine itself")
        self._wire = Wire(f"{parts.scheme}://{parts.netloc}")
        self._root = parts.path.rstrip("/")
        self._token = token

    def call(
        self,
        method: str,
        path: str,
        deadline_s: float,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> Answer:
        """One request. ``path`` is relative to the endpoint (``projects/...``).

        Raises:
            NoAnswerError: see there.
        """
        started = time.monotonic()
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = "Bearer " + self._token(deadline_s)
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        target = f"{self._root}/{quote(path)}" + (f"?{urlencode(query)}" if query else "")
        left = deadline_s - (time.monotonic() - started)
        answer = self._wire.call(method, target, headers, data, left)
        if answer.status == 401 and self._token is not None:
            self._token.drop()
        return answer


class Wire:
    """HTTP/1.1 to one host: kept connections, and a deadline for the whole answer, not for each byte."""

    def __init__(self, origin: str) -> None:
        parts = urlsplit(origin)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def call(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, left_s: float) -> Answer:
        """One request.

        The one retry of this module: a kept connection that the server had closed in the meantime
        fails before it gives a byte, and is replaced once. Whether the request was carried out is
        then as unknown as after any lost answer, and every call of ours may be repeated.
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
        # Socket timeouts start anew with every byte; only this ends a server that drips.
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
            raise http.client.HTTPException(f"the answer is cut, or larger than {MAX_ANSWER} bytes")
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
    """Make a blocked read return at once. Shutdown and not close: the descriptor must not be reused under it."""
    sock = connection.sock
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it had ended by itself


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _lazy_tls() -> Callable[[], ssl.SSLContext]:
    made: list[ssl.SSLContext] = []

    def get() -> ssl.SSLContext:
        if not made:
            made.append(ssl.create_default_context())  # 20 ms: not before the first call
        return made[0]

    return get


_tls = _lazy_tls()
