"""A poke reaches the function with the caller's token, and never stands in the way of a command."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest
from spotkeeper.reconcile.store import ObjectStore

from tests.cli.conftest import Cli
from tests.spec.samples import STACK


class Function(HTTPServer):
    """Answers what it is told to and remembers who asked for what."""

    status = 200

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Function

    def do_POST(self) -> None:
        self.server.calls.append((self.path, self.headers.get("Authorization", "")))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def function(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Function]:
    with Function() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        store.put("stack/pools.json", msgspec.json.encode(msgspec.structs.replace(STACK, function_url=server.url)))
        monkeypatch.setenv("SPOTKEEPER_TOKEN", "token-of-mine")
        yield server
        server.shutdown()
        thread.join()


def test_a_submission_is_poked_with_the_token(cli: Cli, function: Function, store: ObjectStore, folder: Path) -> None:
    done = cli("submit", folder / "job.yaml")
    assert (done.code, done.err) == (0, "")
    (job,) = store.active_jobs()
    assert function.calls == [(f"/v1/poke/{job}", "Bearer token-of-mine")]
    assert "token-of-mine" not in done.out
    cli("submit", folder / "job.yaml")
    assert len(function.calls) == 1  # nothing is new


def test_a_function_that_refuses_is_only_mentioned(cli: Cli, function: Function, folder: Path) -> None:
    function.status = 403
    done = cli("submit", folder / "job.yaml")
    assert done.code == 0
    assert "the next tick starts the job" in done.err


def test_a_function_that_is_gone_is_only_mentioned(
    cli: Cli, store: ObjectStore, folder: Path, function: Function
) -> None:
    gone = msgspec.structs.replace(STACK, function_url="http://127.0.0.1:9")
    store.put("stack/pools.json", msgspec.json.encode(gone))
    done = cli("submit", folder / "job.yaml")
    assert done.code == 0
    assert "the next tick starts the job" in done.err
