"""Channels' addresses: literal ones, and secrets of three stores, over HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract import redact
from spotkeeper.reconcile.clouds.http_client import NoAnswerError
from spotkeeper.reconcile.notifications import addresses
from spotkeeper.reconcile.notifications.addresses import KEPT_S, ChannelAddresses, SecretReader, parse_addresses
from spotkeeper.reconcile.notifications.deliver import sender
from spotkeeper.reconcile.notifications.https import SendError
from tests.reconcile.notifications.samples import QUIET, SLACK, notification

ADDRESS = "https://hooks.example.test/services/T0/B0/secret-part"
GCP = "gcp-secret://projects/acme/secrets/slack/versions/latest"
AWS = "aws-secret://arn:aws:secretsmanager:eu-west-1:123456789012:secret:slack"
SSM = "aws-parameter://arn:aws:ssm:eu-west-1:123456789012:parameter/spotkeeper/slack"


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_known", set())


class Secrets(HTTPServer):
    """Metadata server, Secret Manager, Secrets Manager and Systems Manager at one address."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.status = 200
        self.value = ADDRESS
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Secrets

    def do_GET(self) -> None:
        if self.path.startswith("/computeMetadata"):
            self._say(200, {"access_token": "token", "expires_in": 3600})
            return
        self.server.asked.append((self.path, self.headers["Authorization"], {}))
        self._say(self.server.status, {"payload": {"data": base64.b64encode(self.server.value.encode()).decode()}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        target = self.headers["X-Amz-Target"]
        self.server.asked.append((target, self.headers["Authorization"], body))
        if self.server.status != 200:
            self._say(self.server.status, {"__type": "AccessDeniedException", "Message": "secret detail"})
        elif target.startswith("secretsmanager."):
            self._say(200, {"SecretString": self.server.value})
        else:
            self._say(200, {"Parameter": {"Value": self.server.value}})

    def _say(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Secrets]:
    with Secrets() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setattr(addresses, "SECRETS", server.url)
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
        for name in ("AWS_ENDPOINT_URL_SECRETS_MANAGER", "AWS_ENDPOINT_URL_SSM"):
            monkeypatch.setenv(name, server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAME")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        yield server
        server.shutdown()
        thread.join()


class TestStores:
    def test_secret_manager(self, secrets: Secrets) -> None:
        assert SecretReader(Clock())(GCP) == ADDRESS
        assert secrets.asked == [("/v1/projects/acme/secrets/slack/versions/latest:access", "Bearer token", {})]

    def test_secrets_manager_in_the_arns_region(self, secrets: Secrets) -> None:
        assert SecretReader(Clock())(AWS) == ADDRESS
        ((target, signed, body),) = secrets.asked
        assert (target, body) == ("secretsmanager.GetSecretValue", {"SecretId": AWS.removeprefix("aws-secret://")})
        assert "/eu-west-1/secretsmanager/" in signed

    def test_systems_manager_decrypts(self, secrets: Secrets) -> None:
        assert SecretReader(Clock())(SSM) == ADDRESS
        ((target, signed, body),) = secrets.asked
        assert target == "AmazonSSM.GetParameter"
        assert body == {"Name": SSM.removeprefix("aws-parameter://"), "WithDecryption": True}
        assert "/eu-west-1/ssm/" in signed

    @pytest.mark.parametrize(
        ("reference", "why"),
        [
            (GCP, "Secret Manager answers HTTP 403"),
            (AWS, "AccessDeniedException"),
            (SSM, "AccessDeniedException"),
        ],
    )
    def test_a_refusal_says_why_and_no_more(self, secrets: Secrets, reference: str, why: str) -> None:
        secrets.status = 403 if reference == GCP else 400
        with pytest.raises(NoAnswerError, match=f"^{why}$"):
            SecretReader(Clock())(reference)

    def test_a_reference_of_another_form_is_refused(self) -> None:
        with pytest.raises(NoAnswerError, match="unknown form"):
            SecretReader(Clock())("gcp-secret://slack")


class TestAddresses:
    def test_a_literal_address_is_used_as_it_is(self) -> None:
        assert ChannelAddresses({"ops": ADDRESS}, _never).of("ops") == ADDRESS

    def test_an_unknown_channel_needs_another_up(self) -> None:
        with pytest.raises(SendError, match="run pulumi up"):
            ChannelAddresses({}, _never).of("ops")

    def test_a_secret_is_read_again_after_minutes_and_after_a_failure(self) -> None:
        read: list[str] = []
        now = [0.0]

        def reader(reference: str) -> str:
            read.append(reference)
            return f" {ADDRESS}{len(read)}\n"

        known = ChannelAddresses({"ops": GCP}, reader, lambda: now[0])
        assert known.of("ops") == known.of("ops") == f"{ADDRESS}1"
        now[0] = KEPT_S
        assert known.of("ops") == f"{ADDRESS}2"
        known.forget("ops")
        assert known.of("ops") == f"{ADDRESS}3"
        assert read == [GCP] * 3

    def test_a_secret_that_cannot_be_read_is_a_failure(self) -> None:
        def reader(_: str) -> str:
            raise NoAnswerError("AccessDeniedException")

        why = "the secret with this channel's address cannot be read: AccessDeniedException"
        with pytest.raises(SendError, match=why):
            ChannelAddresses({"ops": AWS}, reader).of("ops")

    def test_addresses_are_hidden_in_every_text(self) -> None:
        ChannelAddresses({"ops": GCP}, lambda _: ADDRESS).of("ops")
        assert redact.redact(f"POST {ADDRESS} failed") == f"POST {redact.REMOVED} failed"
        other = ADDRESS.replace("secret-part", "other-part")
        assert parse_addresses(json.dumps({"ops": other, "ml": GCP})) == {"ops": other, "ml": GCP}
        assert redact.redact(other) == redact.REMOVED
        assert redact.redact(GCP) == GCP

    @pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', "x" * 100])
    def test_another_form_of_the_setting_is_refused_without_showing_it(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"^SPOTKEEPER_CHANNELS: want a JSON object of addresses by channel$"):
            parse_addresses(text)

    def test_no_setting_is_no_address(self) -> None:
        assert parse_addresses("") == {}


def test_a_failure_has_the_secret_read_again() -> None:
    read: list[str] = []

    def reader(reference: str) -> str:
        read.append(reference)
        return ADDRESS

    def post(address: str, body: bytes, key: str) -> None:
        assert (address, key) == (ADDRESS, notification().id)
        if json.loads(body).get("version") is None:  # Slack's form
            raise SendError("HTTP 404")

    send = sender(post, ChannelAddresses({"ml-team": GCP, "quiet": AWS}, reader))
    for _ in range(2):
        with pytest.raises(SendError):
            send(SLACK, notification())
        send(QUIET, notification())
    assert read == [GCP, AWS, GCP]


def _never(reference: str) -> str:
    raise AssertionError(reference)
