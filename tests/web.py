"""An HTTP server on a free port of this machine, for stand-ins of services; each test has its own handler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

POLL_S = 0.02  # longest wait of a close


class Handler(BaseHTTPRequestHandler):
    """Reads whole bodies, sends whole answers, and writes no log."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        """``headers``: with ``_`` for ``-``."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """No log: the stand-in records requests."""


class Listener(ThreadingHTTPServer):
    request_queue_size = 128  # by default 5: where a busy machine accepts late, some of many requests were reset


class Server:
    """Serves from its creation until ``close``. ``address``: host and port; ``url``: with the scheme."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = Listener(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[Server]:
    server = Server(handler)
    try:
        yield server
    finally:
        server.close()
