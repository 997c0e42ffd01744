"""Serves the jobs' identity on loopback, in the form in which each cloud's libraries look for credentials.

A job cannot reach the machine's metadata server (``roothelper_fence.py``), so it cannot act as its machine. Environment
variables point the job's libraries to this server instead. It answers Google's libraries as a metadata server does, and
AWS's as a container's credential endpoint does. It issues only tokens of the jobs' identity, which the machine's
identity may impersonate. AWS's libraries prove that they belong to the job with a token from a file that only the jobs'
group can read. Google's libraries send no such proof; none is needed, because a machine runs one job at a time.

The port stays the same while the machine is up, so a running job also reaches the server of a restarted agent.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

import requests

from spotkeeper.clock import from_rfc3339
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.metadata import MetadataError
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job import jobhost

LOOPBACK = "127.0.0.1"
CONNECT_S, ANSWER_S = 3.0, 10.0


class IdentityError(Exception):
    """A token or secret is not available. ``final``: another try would fail as well."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True)
class IdentityAnswer:
    """An HTTP answer of the server. ``kind``: the content type."""

    status: int
    body: bytes = b""
    kind: str = "application/text"
    flavor: bool = False  # whether to send the header that Google's libraries expect


@dataclass(frozen=True)
class ServerAddress:
    """The server's address and token, for a job."""

    host: str
    token: str = ""  # the token that AWS's libraries send
    token_file: Path = Path("/dev/null")


@dataclass(frozen=True)
class Endpoints:
    """Addresses of the clouds' APIs, which tests replace. ``{region}`` stands for the machine's region."""

    iam: str = "https://iamcredentials.googleapis.com"
    secrets: str = "https://secretmanager.googleapis.com"
    sts: str = "https://sts.{region}.api.aws"  # has IPv6, the only way out for a machine without NAT
    secrets_aws: str = "https://secretsmanager.{region}.amazonaws.com"


class JobIdentity(Protocol):
    """The jobs' identity in one cloud. Thread-safe, because the server's threads and the helper thread call it."""

    def answer(
        self, path: str, query: dict[str, list[str]], headers: dict[str, str], at: ServerAddress
    ) -> IdentityAnswer:
        """Answer a job's GET request. ``headers`` has names in lower case.

        Raises:
            IdentityError: no token is available now.
        """

    def environment(self, at: ServerAddress) -> dict[str, str]:
        """Return the environment variables by which the cloud's libraries find the server."""

    def secret(self, reference: str) -> str:
        """Read a secret with the jobs' identity.

        Raises:
            IdentityError: the secret cannot be read.
        """


class IdentityServer:
    """The HTTP server that gives jobs credentials. The folder ``run`` keeps its port and token across restarts."""

    def __init__(self, identity: JobIdentity, run: Path, log: Log) -> None:
        self.identity = identity
        self._log = log
        token = _load_or_make(run / "identity.token", lambda: secrets.token_urlsafe(32))
        server = self._listen(run / "identity.port")
        self.at = ServerAddress(f"{LOOPBACK}:{server.server_port}", token, run / "identity.token")
        self._server = server

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="identity", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        return self.identity.environment(self.at)

    def _listen(self, path: Path) -> ThreadingHTTPServer:
        identity_server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                identity_server._respond(self)

            def log_message(self, format: str, *args: object) -> None:
                pass  # requests are many and name accounts

        port = int(_load_or_make(path, lambda: "0"))
        try:
            server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        except OSError as error:  # the port is taken: a running job loses its identity
            self._log("identity.port", port=port, error=str(error))
            server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        beneath.replace(path.parent, path.name, f"{server.server_port}\n".encode())
        return server

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        split = urlsplit(handler.path)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        try:
            found = self.identity.answer(split.path, parse_qs(split.query), headers, self.at)
            self._log.over("identity", "identity.well")
        except (IdentityError, MetadataError) as error:
            self._log.once("identity", "identity.trouble", error=str(error))
            found = IdentityAnswer(
                403 if isinstance(error, IdentityError) and error.final else 503, str(error).encode()
            )
        handler.send_response(found.status)
        if found.flavor:
            handler.send_header("Metadata-Flavor", "Google")
        handler.send_header("Content-Type", found.kind)
        handler.send_header("Content-Length", str(len(found.body)))
        handler.end_headers()
        handler.wfile.write(found.body)


def _load_or_make(path: Path, make: Callable[[], str]) -> str:
    """Return a file's text; make the file first if it does not exist. Only agent and jobs' group may read it."""
    try:
        return path.read_text().strip()
    except OSError:
        made = make()
        beneath.replace(path.parent, path.name, made.encode(), 0o640)
        jobhost.give(path)
        return made


def call(method: str, url: str, headers: dict[str, str], body: bytes | None, what: str) -> bytes:
    """Call a cloud's API and return the answer's body. ``what`` names the call in errors and must not be secret.

    Raises:
        IdentityError: the call was refused, or no answer came.
    """
    try:
        answer = requests.request(method, url, data=body, headers=headers, timeout=(CONNECT_S, ANSWER_S))
    except requests.RequestException as error:
        raise IdentityError(f"{what}: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise IdentityError(f"{what}: HTTP {answer.status_code}", final=answer.status_code in (403, 404))
    return answer.content


def expiry(text: str, what: str) -> float:
    """Convert an RFC 3339 time to unix seconds. Raises IdentityError."""
    try:
        return from_rfc3339(text)
    except ValueError:
        raise IdentityError(f"{what}: the answer is invalid") from None
