"""moto's S3 as a real server on loopback, for one test or one session. It honours If-Match and If-None-Match.

One write at a time: moto looks whether an object is there and then stores it, and two threads of it may do so at once.
Unlike moto, it answers a conditional write with 409 while a delete of the same key is under way (``Deleting``).
"""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.reconcile.store.objects import Objects
from spotkeeper.reconcile.store.objects_obstore import open_bucket

Deleting = Counter[str]  # key -> how many conditional writes meet the delete that is under way
CONFLICT = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>ConditionalRequestConflict</Code><Message>The conditional request cannot succeed due to a conflicting
operation against this resource.</Message></Error>"""


class OneAtATime:
    """A WSGI application behind a lock."""

    def __init__(self, app: Any, deleting: Deleting) -> None:
        self._app, self._deleting, self._lock = app, deleting, threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        with self._lock:
            key = environ["PATH_INFO"].lstrip("/").partition("/")[2]
            if environ["REQUEST_METHOD"] == "PUT" and "HTTP_IF_NONE_MATCH" in environ and self._deleting[key] > 0:
                self._deleting[key] -= 1
                start("409 Conflict", [("Content-Type", "application/xml"), ("Content-Length", str(len(CONFLICT)))])
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                return [CONFLICT]
            return [b"".join(self._app(environ, start))]


@contextlib.contextmanager
def serve(deleting: Deleting | None = None) -> Iterator[str]:
    """Its address."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = OneAtATime(DomainDispatcherApplication(create_backend_app), Counter() if deleting is None else deleting)
    server = make_server("127.0.0.1", 0, app, threaded=True)
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


def fresh_bucket(endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Objects]:
    """Make the bucket of a test, named after its ``folder``; return what opens it anew, as another process would."""
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{abs(hash(folder)) % 10**9}"
    make_bucket(endpoint, bucket)
    return lambda: open_bucket(f"s3://{bucket}", endpoint)
