"""Serves the newest reading to Prometheus, as OpenMetrics or as classic text, whichever the request accepts.

A thread reads the bucket every ``every_s`` seconds, however often Prometheus scrapes; a scrape never reads. The thread
also renders each reading in advance, so that a scrape only sends bytes. It renders the two formats that Prometheus
requests by default, and other formats (another version, or no gzip) once a scrape has requested them. If a read fails,
the last reading stays; two metrics tell its age and the number of failed reads.
"""

from __future__ import annotations

import gzip
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from spotkeeper.client.errors import CliError
from spotkeeper.exporter.families import families
from spotkeeper.exporter.reading import StackReading
from spotkeeper.reconcile.store.objects import StoreError

MOST_FORMATS = 8  # a request names the version and the escaping that it accepts
USUAL = ("application/openmetrics-text; version=1.0.0", "text/plain; version=0.0.4")  # Prometheus accepts both by gzip
IDLE_S = 10.0  # real; a connection that sends nothing for this long is closed
FAILURES = "Reads of the bucket that failed since the exporter's start."

log = logging.getLogger("spotkeeper.exporter")


Format = tuple[Callable[[CollectorRegistry], bytes], bool]  # an encoder, and whether gzip packs its text


class Pages:
    """The newest reading, rendered in the default formats and in those that scrapes have requested. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading: StackReading | None = None
        self._failures = 0
        self._formats: dict[tuple[str, bool], Format] = {}
        for accept in USUAL:
            encoder, content = choose_encoder(accept)
            self._formats[content, True] = encoder, True
        self._rendered: dict[tuple[str, bool], bytes] = {}

    def show(self, reading: StackReading) -> None:
        """Render a reading, then serve it in place of the former one."""
        self._replace(reading, self._failures)

    def failed(self) -> None:
        """Count a read that failed."""
        self._replace(self._reading, self._failures + 1)

    def _replace(self, reading: StackReading | None, failures: int) -> None:
        with self._lock:
            formats = dict(self._formats)
        rendered = {key: _render(wanted, reading, failures) for key, wanted in formats.items()}
        with self._lock:
            self._reading, self._failures, self._rendered = reading, failures, rendered

    def page(self, accept: str, *, packed: bool) -> tuple[bytes, str]:
        """Return the body for a request's ``Accept`` header, and its content type. ``packed``: gzip the body."""
        encoder, content = choose_encoder(accept)
        key = content, packed
        with self._lock:  # one thread renders; others wait for its bytes
            body = self._rendered.get(key)
            if body is None:
                body = _render((encoder, packed), self._reading, self._failures)
                if key in self._formats or len(self._formats) < MOST_FORMATS:
                    self._formats[key], self._rendered[key] = (encoder, packed), body
            return body, content


def _render(wanted: Format, reading: StackReading | None, failures: int) -> bytes:
    encoder, packed = wanted
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(reading, failures))
    text = encoder(registry)
    return gzip.compress(text, compresslevel=1) if packed else text


class _Families(Collector):
    def __init__(self, reading: StackReading | None, failures: int) -> None:
        self._reading, self._failures = reading, failures

    def collect(self) -> Iterator[Metric]:
        if self._reading is not None:
            yield from families(self._reading)
        yield CounterMetricFamily("spotkeeper_exporter_read_failures", FAILURES, value=self._failures)


def read_forever(
    read: Callable[[], StackReading],
    pages: Pages,
    every_s: float,
    stop: threading.Event,
    then: Callable[[StackReading], None] = lambda _: None,
) -> None:
    """Read every ``every_s`` seconds until ``stop``; pass each reading to ``then``. The caller makes the first read."""
    while not stop.wait(every_s):
        read_once(read, pages, then)


def read_once(
    read: Callable[[], StackReading], pages: Pages, then: Callable[[StackReading], None] = lambda _: None
) -> None:
    try:
        reading = read()
        pages.show(reading)
    except (CliError, StoreError) as error:
        log.warning("the bucket could not be read: %s", error)
        pages.failed()
        return
    except Exception:  # one absurd document must not end the thread: the next reading may succeed
        log.exception("a reading of the bucket failed")
        pages.failed()
        return
    then(reading)


def serve(host: str, port: int, pages: Pages) -> ThreadingHTTPServer:
    """Return a server that listens; the caller runs ``serve_forever``. Raises OSError if the address is in use.

    On loopback it answers only requests whose ``Host`` is an address or ``localhost``. Otherwise a web page whose name
    resolves to 127.0.0.1 (DNS rebinding) could read the metrics through the user's browser.
    """
    local = _loopback(host)

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "spotkeeper", ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if local and not _names_an_address(self.headers.get("Host", "")):
                self._answer(403, b"use an IP address or localhost in the URL\n", "text/plain; charset=utf-8")
            elif path == "/-/healthy":
                self._answer(200, b"ok\n", "text/plain; charset=utf-8")
            elif path == "/metrics":
                packed = "gzip" in self.headers.get("Accept-Encoding", "")
                body, content = pages.page(self.headers.get("Accept", ""), packed=packed)
                self._answer(200, body, content, packed=packed)
            else:
                self._answer(404, b"metrics are at /metrics\n", "text/plain; charset=utf-8")

        def _answer(self, status: int, body: bytes, content: str, *, packed: bool = False) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content)
            self.send_header("Content-Length", str(len(body)))
            if packed:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return Server((host, port), Handler)


def _loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _names_an_address(host: str) -> bool:
    """Whether a Host header names an address or ``localhost``. "" counts: HTTP/1.0 clients can leave the header out."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name in (None, "localhost") or _is_address(name)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
