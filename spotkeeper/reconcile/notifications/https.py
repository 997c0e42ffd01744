"""Sends one request to a public https address, within a bounded time, without redirects.

The host's addresses are resolved and checked, and the connection goes to a checked address: the name is not resolved
again, so a name that changes its address (DNS rebinding) cannot lead into the network of the cloud. Certificate and
SNI are those of the name.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable

from spotkeeper.contract.notification import AddressError, check_address, is_public

SEND_S = 5.0  # real seconds for a whole request, without the resolver's time
MAX_ANSWER = 4096  # bytes that are read of an answer; none is used
_HEADERS = {"Content-Type": "application/json", "User-Agent": "spotkeeper", "Connection": "close"}
_GOOD = range(200, 300)
_MOVED = range(300, 400)

Resolve = Callable[[str, int], list[str]]


class SendError(Exception):
    """The receiver did not accept a message. The text names neither the address nor the answer's content."""


class HttpsSender:
    """Sends messages to https addresses.

    Args:
        loopback: also allow this machine's own addresses: for the one-machine cloud.
        tls: the TLS settings; None: the system's certificates.
        resolve: (host, port) -> IP addresses; None: the system's resolver.
    """

    def __init__(
        self, loopback: bool = False, tls: ssl.SSLContext | None = None, resolve: Resolve | None = None
    ) -> None:
        self._loopback, self._tls, self._resolve = loopback, tls, resolve or _resolved
        self._lock = threading.Lock()

    def post(self, address: str, body: bytes, key: str) -> None:
        """Send a body to an address. ``key``: the event's id, for the header ``Idempotency-Key``.

        Raises:
            AddressError: the address is not a public https address.
            SendError: no connection, or another answer than 2xx.
        """
        host, port, target = check_address(address)
        found = self._checked(host, port)
        ends = time.monotonic() + SEND_S
        try:
            sock = _connected(found, port, ends)
        except OSError as error:
            raise SendError(f"no connection: {_why(error)}") from None
        status = self._exchange(sock, host, port, target, body, key, ends)
        if status in _MOVED:
            raise SendError(f"HTTP {status}: a redirect, which is not followed")
        if status not in _GOOD:
            raise SendError(f"HTTP {status}")

    def _checked(self, host: str, port: int) -> list[str]:
        """Return the host's addresses.

        Raises:
            AddressError: one of them is not public.
            SendError: the host's name does not resolve.
        """
        try:
            found = self._resolve(host, port)
        except (OSError, UnicodeError):
            found = []
        if not found:
            raise SendError("its host name does not resolve")
        if not all(is_public(each) or (self._loopback and _is_loopback(each)) for each in found):
            raise AddressError("leads to an address that is not public")
        return found

    def _exchange(
        self, sock: socket.socket, host: str, port: int, target: str, body: bytes, key: str, ends: float
    ) -> int:
        connection = http.client.HTTPSConnection(host, port)  # it only formats and reads: it never connects
        wrapped = self._context().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        # Socket timeouts restart with every byte; only this timer ends an answer that trickles in.
        watchdog = threading.Timer(max(0.001, ends - time.monotonic()), _cut, (wrapped,))
        watchdog.daemon = True
        watchdog.start()
        try:
            wrapped.do_handshake()
            connection.sock = wrapped
            connection.request("POST", target, body, {**_HEADERS, "Idempotency-Key": key})
            response = connection.getresponse()
            response.read(MAX_ANSWER)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SendError(f"no answer: {_why(error)}") from None
        finally:
            watchdog.cancel()
            wrapped.close()
            connection.close()
        return response.status

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = ssl.create_default_context()
            return self._tls


def _resolved(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _connected(addresses: list[str], port: int, ends: float) -> socket.socket:
    """Connect to the first address that answers. IPv6 addresses cost no time where the function has no IPv6."""
    trouble: OSError = TimeoutError("timed out")
    for address in addresses:
        left = ends - time.monotonic()
        if left <= 0:
            break
        try:
            sock = socket.create_connection((address, port), timeout=left)
        except OSError as error:
            trouble = error
            continue
        sock.settimeout(max(0.001, ends - time.monotonic()))
        return sock
    raise trouble


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def _cut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the connection had already ended


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    if isinstance(error, TimeoutError):
        return f"it took more than {SEND_S:.0f} s"
    return type(error).__name__ if not isinstance(error, OSError) or not error.strerror else error.strerror
