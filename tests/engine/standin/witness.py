"""Between Google's own provider and the one-machine cloud: passes every call on, and holds each answer against Google's
discovery documents. What it saw that is not as Google has it, it tells at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import requests

from tests import discovery

UPLOAD = "/upload"
_HOPS = {"connection", "transfer-encoding", "content-length", "content-encoding", "date", "server", "host"}


@dataclass
class Witness:
    """``calls``: method and path, in order. ``wrong``: what Google would not have answered."""

    cloud: str
    endpoint: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def saw(self, method: str, path: str, answer: requests.Response) -> None:
        self.calls.append((method, path))
        try:
            judge(method, path, answer)
        except AssertionError as found:
            self.wrong.append(f"{method} {path}: {answer.status_code} {found}")

    def changes(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] != "GET"]


def judge(method: str, url: str, answer: requests.Response) -> None:
    """
    Raises:
        AssertionError: no such method, or an answer that is none of its.
    """
    path = urlsplit(url).path.removeprefix(UPLOAD).rstrip("/")  # the provider ends one of its paths with a slash
    query = dict(parse_qsl(urlsplit(url).query))
    api = discovery.BETA if path.startswith("/compute/") else discovery.STORAGE
    known = discovery.match(method, path, api)
    assert known is not None, "Google has no such method"
    assert answer.status_code != 501, answer.text
    if answer.status_code >= 400:
        discovery.validate_error(answer.json())
    elif query.get("alt") != "media":
        discovery.validate_response(known.method_id, answer.json() if answer.content else None, api)


@contextmanager
def watch(cloud: str) -> Iterator[Witness]:
    """``cloud``: the root of what is called through it."""
    witness = Witness(cloud)
    lock, session = threading.Lock(), requests.Session()
    session.trust_env = False

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
            body = self._chunks() if chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOPS}
            answer = session.request(self.command, cloud + self.path, data=body, headers=headers, timeout=60)
            with lock:
                witness.saw(self.command, self.path, answer)
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name.lower() not in _HOPS:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def _chunks(self) -> bytes:
            """A body of unknown length: sizes in hexadecimal, each on a line, with as many bytes."""
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on

        def log_message(self, *_: object) -> None:
            """The witness tells by itself."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    witness.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield witness
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
