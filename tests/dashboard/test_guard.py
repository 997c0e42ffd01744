"""The guard, attacked without a browser: only the browser that opened the one-time address gets through."""

from __future__ import annotations

from typing import Any

import pytest

from spotkeeper.dashboard.guard import CODE_S, PROXY_HEADER, Guard
from tests.dashboard.conftest import complete

PORT = 4242
HOST = f"127.0.0.1:{PORT}"
SECRET = "s" * 40


class App:
    """Stands behind the guard, and counts what reaches it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["type"])
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-frame-options", b"ALLOW")]})
            await send({"type": "http.response.body", "body": b"the page"})


class Attacker:
    """Sends requests to a guard."""

    def __init__(self, **options: Any) -> None:
        self.app = App()
        self.opened = 0
        self.guard = Guard(self.app, PORT, on_open=self._opened, **options)

    def _opened(self) -> None:
        self.opened += 1

    def request(self, path: str = "/", method: str = "GET", kind: str = "http", **headers: str) -> list[dict[str, Any]]:
        """``host`` is right unless given; an underscore in a header's name becomes a hyphen; "" leaves it out."""
        given = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in given.items() if value]
        route, _, query = path.partition("?")
        scope = {"type": kind, "path": route, "query_string": query.encode(), "method": method, "headers": pairs}
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(dict(message))

        complete(self.guard(scope, receive, send))
        return sent

    def cookie(self) -> str:
        """Open the one-time address as the browser does."""
        answer = self.request(self.guard.opening("/jobs/first"))
        return dict(answer[0]["headers"])[b"set-cookie"].decode().partition(";")[0]


def status(sent: list[dict[str, Any]]) -> int:
    return int(sent[0]["status"])


def test_the_one_time_address_lets_one_browser_in() -> None:
    attacker = Attacker()
    first = attacker.guard.opening("/jobs/first")
    sent = attacker.request(first)
    headers = dict(sent[0]["headers"])
    assert status(sent) == 303 and headers[b"location"] == b"/jobs/first"
    cookie = headers[b"set-cookie"].decode()
    assert cookie.startswith(f"spotkeeper-{PORT}=") and "HttpOnly" in cookie and "SameSite=Lax" in cookie
    assert status(attacker.request(first)) == 403, "the address works once"
    assert attacker.opened == 1
    assert status(attacker.request(cookie=cookie.partition(";")[0])) == 200
    assert status(attacker.request(attacker.guard.opening())) == 303, "the next address is another one"


def test_a_one_time_address_expires_and_the_next_one_works_meanwhile() -> None:
    now = [0.0]
    attacker = Attacker(clock=lambda: now[0])
    first = attacker.guard.opening()
    now[0] = CODE_S / 2
    attacker.guard.renew()
    second = attacker.guard.opening()
    now[0] = CODE_S - 1
    assert status(attacker.request(first)) == 303, "the printed address still works"
    now[0] = CODE_S * 1.5
    sent = attacker.request(second)
    assert status(sent) == 403 and b"older than half an hour" in sent[1]["body"]
    now[0] += CODE_S
    assert status(attacker.request(attacker.guard.opening())) == 403, "all have expired"
    assert status(attacker.request(attacker.guard.opening())) == 303


@pytest.mark.parametrize("other", ['theme={"dark": 1}', "a b=c", 'x="', "[]=1", "no-value", "\xff=\xfe"])
def test_cookies_of_other_servers_on_this_host_lock_nobody_out(other: str) -> None:
    attacker = Attacker()
    cookie = attacker.cookie()
    assert status(attacker.request(cookie=f"{other}; {cookie}")) == 200
    assert status(attacker.request(cookie=other)) == 403


@pytest.mark.parametrize("path", ["/", "/jobs/first", "/_nicegui/x", "/open", "/open?code=", "/open?code=x&to=/"])
def test_without_the_cookie_nothing_is_reached(path: str) -> None:
    attacker = Attacker()
    assert status(attacker.request(path)) == 403
    assert attacker.app.reached == []


@pytest.mark.parametrize(
    "cookie",
    ["spotkeeper-4242=", "spotkeeper-4242=guess", "spotkeeper-4243={}", "a=b; spotkeeper-4242=\u00fc", ";;=\x7f", '"'],
)
def test_a_wrong_cookie_is_refused(cookie: str) -> None:
    attacker = Attacker()
    token = attacker.cookie().partition("=")[2]
    assert status(attacker.request(cookie=cookie.format(token))) == 403
    assert attacker.app.reached == []


@pytest.mark.parametrize(
    "host", ["", "evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:80", f"[::1]:{PORT}"]
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_another_name_of_the_server_is_refused(host: str, kind: str) -> None:
    """A page whose name was rebound to this machine sends its own name."""
    attacker = Attacker()
    cookie = attacker.cookie()
    sent = attacker.request(kind=kind, host=host, cookie=cookie, origin=f"http://{HOST}")
    assert sent[0].get("status") == 403 or sent == [{"type": "websocket.close", "code": 4403}]
    assert attacker.app.reached == []


@pytest.mark.parametrize(
    "origin", ["", "null", "http://evil.example", f"https://{HOST}", f"http://{HOST}.evil.example"]
)
def test_a_websocket_of_another_page_is_refused(origin: str) -> None:
    attacker = Attacker()
    sent = attacker.request(kind="websocket", cookie=attacker.cookie(), origin=origin)
    assert sent == [{"type": "websocket.close", "code": 4403}]
    assert attacker.app.reached == []


def test_a_websocket_without_the_cookie_is_refused() -> None:
    attacker = Attacker()
    sent = attacker.request(kind="websocket", origin=f"http://{HOST}")
    assert sent == [{"type": "websocket.close", "code": 4403}]
    attacker.request(kind="websocket", origin=f"http://{HOST}", cookie=attacker.cookie())
    assert attacker.app.reached == ["websocket"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_what_changes_something_comes_from_a_page_of_this_server(method: str) -> None:
    attacker = Attacker()
    cookie = attacker.cookie()
    assert status(attacker.request(method=method, cookie=cookie)) == 403
    assert status(attacker.request(method=method, cookie=cookie, origin="http://evil.example")) == 403
    assert status(attacker.request(method=method, cookie=cookie, origin=f"http://{HOST}")) == 200


@pytest.mark.parametrize(
    "to", ["//evil.example", "/\\evil.example", "https://evil.example", "/a%0d%0aset-cookie:x=y", ""]
)
def test_the_address_leads_to_a_page_of_this_server(to: str) -> None:
    attacker = Attacker()
    code = attacker.guard.opening().partition("&")[0]
    assert dict(attacker.request(f"{code}&to={to}")[0]["headers"])[b"location"] == b"/"


def test_every_answer_has_the_policy() -> None:
    attacker = Attacker()
    cookie = attacker.cookie()
    for sent in (attacker.request(), attacker.request("/alive"), attacker.request(cookie=cookie)):
        headers = sent[0]["headers"]
        policies = [value for name, value in headers if name == b"content-security-policy"]
        assert len(policies) == 1 and b"default-src 'self'" in policies[0] and b"frame-ancestors 'none'" in policies[0]


def test_liveness_tells_nothing_and_reaches_no_page() -> None:
    attacker = Attacker()
    assert attacker.request("/alive")[1]["body"] == b"alive\n"
    assert status(attacker.request("/alive", host="evil.example")) == 403
    assert attacker.app.reached == []


def test_behind_a_proxy_its_secret_counts_and_no_cookie() -> None:
    attacker = Attacker(proxy="https://dash.example.com/", proxy_secret=SECRET)
    header = PROXY_HEADER.decode()
    public = {"host": "dash.example.com", "origin": "https://dash.example.com"}
    assert status(attacker.request(attacker.guard.opening())) == 403, "nobody gets in by the one-time address"
    assert status(attacker.request(**public)) == 403
    assert status(attacker.request(**public, **{header: "wrong"})) == 403
    assert status(attacker.request(**public, **{header: SECRET})) == 200
    assert status(attacker.request(host="other.example.com", **{header: SECRET})) == 403
    attacker.request(kind="websocket", **public, **{header: SECRET})
    assert attacker.app.reached == ["http", "websocket"]
    foreign = attacker.request(
        kind="websocket", host="dash.example.com", origin="https://evil.example", **{header: SECRET}
    )
    assert foreign == [{"type": "websocket.close", "code": 4403}]
