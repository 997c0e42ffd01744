"""Messages go to public https addresses only, by the name's certificate, within bounded time, without redirects."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from spotkeeper.contract.notification import AddressError, check_address, is_public
from spotkeeper.reconcile.notifications import https
from spotkeeper.reconcile.notifications.https import HttpsSender, SendError
from tests.reconcile.notifications.receiver import HOST, Receiver, receiver

HERE = ["127.0.0.1"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Receiver]:
    with receiver(tmp_path) as made:
        yield made


def local(server: Receiver) -> HttpsSender:
    return HttpsSender(loopback=True, tls=server.trusted(), resolve=lambda host, port: HERE)


class TestSending:
    def test_a_message_arrives_with_its_key_and_the_names_sni(self, server: Receiver) -> None:
        local(server).post(server.url("/hook?sig=1"), b'{"a":1}', "job.hold.v1")
        (got,) = server.got
        assert (got.path, got.body) == ("/hook?sig=1", {"a": 1})
        assert got.headers["Idempotency-Key"] == "job.hold.v1"
        assert got.headers["Host"] == f"{HOST}:{server.port}"
        assert server.names == [HOST]

    def test_the_connection_goes_to_the_address_that_was_checked(self, server: Receiver) -> None:
        """A name that changes its address between two look-ups (DNS rebinding) is looked up only once."""
        answers = iter([HERE, ["169.254.169.254"]])
        HttpsSender(True, server.trusted(), lambda host, port: next(answers)).post(server.url(), b"{}", "k")
        assert len(server.got) == 1
        assert next(answers) == ["169.254.169.254"]

    def test_the_next_address_is_tried_if_one_does_not_answer(self, server: Receiver) -> None:
        sender = HttpsSender(True, server.trusted(), lambda host, port: ["::1", *HERE])
        sender.post(server.url(), b"{}", "k")
        assert len(server.got) == 1

    @pytest.mark.parametrize("status", [301, 302, 307, 308])
    def test_a_redirect_is_not_followed(self, server: Receiver, status: int) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            handler.send_header("Location", server.url("/other"))
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        server.answer = answer
        with pytest.raises(SendError, match=f"HTTP {status}: a redirect, which is not followed"):
            local(server).post(server.url(), b"{}", "k")
        assert [got.path for got in server.got] == ["/hook"]

    @pytest.mark.parametrize("status", [400, 404, 410, 429, 500])
    def test_another_answer_is_a_failure(self, server: Receiver, status: int) -> None:
        server.answer = lambda handler: handler.send_error(status)
        with pytest.raises(SendError, match=f"^HTTP {status}$"):
            local(server).post(server.url(), b"{}", "k")

    @pytest.mark.parametrize("status", [202, 204])
    def test_any_2xx_is_a_success(self, server: Receiver, status: int) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(status)
            handler.end_headers()

        server.answer = answer
        local(server).post(server.url(), b"{}", "k")

    def test_an_unknown_certificate_is_refused(self, server: Receiver) -> None:
        with pytest.raises(SendError, match="its certificate is not valid"):
            HttpsSender(True, None, lambda host, port: HERE).post(server.url(), b"{}", "k")
        assert server.got == []

    def test_another_names_certificate_is_refused(self, server: Receiver) -> None:
        with pytest.raises(SendError, match="its certificate is not valid"):
            local(server).post(server.url(host="other.example.test"), b"{}", "k")
        assert server.got == []

    def test_an_answer_that_trickles_in_is_cut_off(self, server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(https, "SEND_S", 0.5)
        ended = threading.Event()

        def answer(handler: BaseHTTPRequestHandler) -> None:
            try:
                while not ended.wait(0.05):
                    handler.wfile.write(b"H")
                    handler.wfile.flush()
            except OSError:
                ended.set()

        server.answer = answer
        began = time.monotonic()
        with pytest.raises(SendError, match="no answer"):
            local(server).post(server.url(), b"{}", "k")
        assert time.monotonic() - began < 3
        assert ended.wait(5), "the connection is closed"

    def test_little_of_a_long_answer_is_read(self, server: Receiver) -> None:
        cut = threading.Event()

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            try:
                for _ in range(10_000):
                    handler.wfile.write(b"x" * 65_536)
            except OSError:
                cut.set()

        server.answer = answer
        local(server).post(server.url(), b"{}", "k")
        assert cut.wait(10), "the connection is closed before the answer ends"

    def test_a_closed_port_is_a_failure(self, server: Receiver) -> None:
        with pytest.raises(SendError, match="no connection: Connection refused"):
            local(server).post(f"https://{HOST}:1/", b"{}", "k")

    def test_a_message_never_names_the_address(self, server: Receiver) -> None:
        server.answer = lambda handler: handler.send_error(404)
        with pytest.raises(SendError) as found:
            local(server).post(server.url("/secret-path"), b"{}", "k")
        assert "secret-path" not in str(found.value)


PRIVATE = (
    *("10.0.0.1", "172.16.0.1", "192.168.1.1", "127.0.0.1", "127.9.9.9", "0.0.0.1", "169.254.169.254", "100.64.0.1"),
    *("192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1"),
    *("255.255.255.255", "192.88.99.1"),
    *("::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "2002:7f00:1::", "64:ff9b::7f00:1"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:8.8.8.8", "::127.0.0.1", "2001::1", "fe80::1%eth0"),
    *("64:ff9b:1::1", "100::1", "3fff::1", "no address", ""),
)


class TestAddresses:
    @pytest.mark.parametrize("address", PRIVATE)
    def test_no_other_than_a_public_address_is_allowed(self, address: str) -> None:
        assert not is_public(address)
        sender = HttpsSender(resolve=lambda host, port: [address])
        with pytest.raises(AddressError, match="not public"):
            sender.post("https://hooks.example.test/", b"{}", "k")

    @pytest.mark.parametrize("address", ["8.8.8.8", "34.117.59.81", "2606:4700::1111", "2a00:1450:4001:81b::200e"])
    def test_public_addresses_are_allowed(self, address: str) -> None:
        assert is_public(address)

    def test_one_private_address_among_public_ones_is_refused(self) -> None:
        sender = HttpsSender(resolve=lambda host, port: ["8.8.8.8", "10.0.0.1"])
        with pytest.raises(AddressError):
            sender.post("https://hooks.example.test/", b"{}", "k")

    def test_loopback_is_all_that_the_one_machine_cloud_adds(self, server: Receiver) -> None:
        for address in ("10.0.0.1", "169.254.169.254", "::ffff:10.0.0.1"):
            sender = HttpsSender(True, server.trusted(), lambda host, port, address=address: [address])
            with pytest.raises(AddressError):
                sender.post(server.url(), b"{}", "k")

    def test_literal_private_addresses_are_refused_too(self) -> None:
        for host in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"):
            with pytest.raises(AddressError, match="not public"):
                HttpsSender().post(f"https://{host}/", b"{}", "k")

    def test_a_name_without_an_address_is_a_failure(self) -> None:
        def missing(host: str, port: int) -> list[str]:
            raise OSError("no such name")

        with pytest.raises(SendError, match="its host name does not resolve"):
            HttpsSender(resolve=missing).post("https://hooks.example.test/", b"{}", "k")

    @pytest.mark.parametrize(
        "address",
        [
            *("http://hooks.example.test/", "ftp://hooks.example.test/", "hooks.example.test", "", "https://"),
            *("https://user@hooks.example.test/", "https://a:b@hooks.example.test/", "https://hooks.example.test:x/"),
            *("https://hooks.example.test/\r\nHost: other", "https://hooks.example.test/ x", "https://hooks_.test/"),
            *("https://h\u00f6\u00f6ks.test/", "https://hooks.example.test/" + "x" * 2000, "https://a..b/"),
            *("https://[fe80::1%eth0]/", "https://hooks.example.test:99999/"),
        ],
    )
    def test_other_forms_of_address_are_refused(self, address: str) -> None:
        with pytest.raises(AddressError) as found:
            check_address(address)
        assert "hooks" not in str(found.value)

    def test_an_address_has_host_port_and_target(self) -> None:
        assert check_address("https://Hooks.Example.test/a?b=c#d") == ("hooks.example.test", 443, "/a?b=c")
        assert check_address("https://1.2.3.4:8443") == ("1.2.3.4", 8443, "/")
