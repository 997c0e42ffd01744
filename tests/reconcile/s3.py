"""moto's S3 as a real server on loopback, for one test or one session. It honours If-Match and If-None-Match.

One write at a time: moto looks whether an object is there and then stores it, and two threads of it may do so at once.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterable, Iterator
from typing import Any


class OneAtATime:
    """A WSGI application behind a lock."""

    def __init__(self, app: Any) -> None:
        self._app, self._lock = app, threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        with self._lock:
            return [b"".join(self._app(environ, start))]


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Its address."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, OneAtATime(DomainDispatcherApplication(create_backend_app)), threaded=True)
    server.RequestHandlerClass.log_request = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def make_bucket(endpoint: str, name: str) -> None:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=10)
    scope = "AWS4-HMAC-SHA256 Credential=x/20261121/us-east-1/s3"  # moto reads which service is meant from it
    connection.request("PUT", f"/{name}", headers={"Authorization": scope})
    assert connection.getresponse().status == 200
    connection.close()
