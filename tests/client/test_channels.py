"""`spotkeeper notify test`: the function sends a message to a channel, and the command says how that went."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.contract.samples import STACK


class Function(HTTPServer):
    """Answers each request with this status and body."""

    status = 200
    body = b'{"sent":true,"why":""}'

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bytes]] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Function

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.calls.append((self.path, self.headers.get("Authorization", ""), body))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def function(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Function]:
    with Function() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        store.put("stack/pools.json", msgspec.json.encode(msgspec.structs.replace(STACK, function_url=url)))
        monkeypatch.setenv("SPOTKEEPER_TOKEN", "token-of-mine")
        yield server
        server.shutdown()
        thread.join()


def test_a_message_that_was_sent(cli: Cli, function: Function) -> None:
    done = cli("notify", "test", "ml-team")
    assert (done.code, done.err) == (0, "")
    assert done.out == "sent a test message to ml-team (slack): look for it there\n"
    assert function.calls == [("/v1/channels/ml-team/test", "Bearer token-of-mine", b"{}")]


def test_a_message_that_was_not_sent(cli: Cli, function: Function) -> None:
    function.body = b'{"sent":false,"why":"HTTP 410"}'
    done = cli("notify", "test", "ml-team")
    assert (done.code, done.out) == (1, "")
    assert "error: channel ml-team: HTTP 410" in done.err
    as_json = cli("notify", "test", "ml-team", "--json")
    assert as_json.code == 1
    assert json.loads(as_json.out) == {"channel": "ml-team", "kind": "slack", "sent": False, "why": "HTTP 410"}


@pytest.mark.parametrize(("name", "hint"), [("ml-taem", "did you mean ml-team?"), ("ops", "it has ml-team")])
def test_an_unknown_channel_is_refused_without_a_call(cli: Cli, function: Function, name: str, hint: str) -> None:
    done = cli("notify", "test", name)
    assert done.code == 3
    assert f"the stack prod has no channel {name} ({hint})" in done.err
    assert function.calls == []


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (404, b'{"error":"not_found"}', "the function does not know the channel ml-team yet"),
        (401, b'{"error":"unauthorized"}', "the function answers HTTP 401"),
        (200, b"<html>", "the function answers HTTP 200"),
    ],
)
def test_a_function_that_refuses(cli: Cli, function: Function, status: int, body: bytes, why: str) -> None:
    function.status, function.body = status, body
    done = cli("notify", "test", "ml-team")
    assert (done.code, why in done.err) == (1, True)


def test_a_function_that_is_not_there(cli: Cli, function: Function, store: Store) -> None:
    gone = msgspec.structs.replace(STACK, function_url="http://127.0.0.1:1")
    store.put("stack/pools.json", msgspec.json.encode(gone))
    assert "the function was not reached: ConnectionError" in cli("notify", "test", "ml-team").err


def test_without_a_login(cli: Cli, function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTKEEPER_TOKEN")
    done = cli("notify", "test", "ml-team")
    assert (done.code, "its address or your login is missing" in done.err) == (1, True)
    assert function.calls == []
