"""The job's own identity: what its stack gives to jobs, served on loopback the way each cloud's libraries look for it.

A job cannot reach its machine's metadata server (``roothelper_fence.py``), and so not be its machine. It finds this
server instead, by two or three variables: Google's libraries take it for a metadata server, AWS's for a container's
credentials. It gives tokens of the job's identity, which this machine's identity may impersonate, and nothing else:
no attribute, no token of the machine's. One job at a time runs on a machine, so its processes need no further proof
on GCP; AWS's libraries bring a token from a file that only the jobs' group can read.

The port stays the same while a machine is up: a job goes on with it when its agent is replaced.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from spotkeeper.clock import Clock
from spotkeeper.vm.log import Log
from spotkeeper.vm.metadata import Metadata, MetadataError

LOOPBACK = "127.0.0.1"


class IdentityError(Exception):
    """No token of the job's identity, or no secret, could be had. ``final``: asking again gives the same."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    kind: str = "application/text"
    flavor: bool = False  # of Google's metadata server: its clients look for it


@dataclass(frozen=True)
class Address:
    """Of the server, as a job reaches it."""

    host: str
    token: str = ""  # what AWS's libraries send
    token_file: Path = Path("/dev/null")


@dataclass(frozen=True)
class Endpoints:
    """Where the clouds' APIs answer; others than their own only in tests. ``{region}`` is filled in."""

    iam: str = "https://iamcredentials.googleapis.com"
    secrets: str = "https://secretmanager.googleapis.com"
    sts: str = "https://sts.{region}.api.aws"  # by IPv6 too: a machine without NAT has no other way out
    secrets_aws: str = "https://secretsmanager.{region}.amazonaws.com"


class JobIdentity(Protocol):
    """One cloud's. Called by the server's threads and by the helper's."""

    def answer(self, path: str, query: dict[str, list[str]], headers: dict[str, str], at: Address) -> Answer:
        """To a GET of the job's. ``headers``: by their names in lower case.

        Raises:
            IdentityError: it cannot be told now.
        """
        ...

    def environment(self, at: Address) -> dict[str, str]:
        """By which the cloud's libraries find the server."""
        ...

    def secret(self, reference: str) -> str:
        """A secret's value, read as the job.

        Raises:
            IdentityError: it could not be read.
        """
        ...


class Door:
    """The server; ``run`` keeps its port and its token for an agent after this one."""

    def __init__(self, identity: JobIdentity, run: Path, log: Log) -> None:
        self.identity = identity
        self._log = log
        token = _kept(run / "identity.token", lambda: secrets.token_urlsafe(32))
        server = self._listen(run / "identity.port")
        self.at = Address(f"{LOOPBACK}:{server.server_port}", token, run / "identity.token")
        self._server = server

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="identity", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        return self.identity.environment(self.at)

    def _listen(self, path: Path) -> ThreadingHTTPServer:
        door = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                door._respond(self)

            def log_message(self, format: str, *args: object) -> None:
                pass  # paths name accounts and audiences, and there are many

        port = int(_kept(path, lambda: "0"))
        try:
            server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        except OSError as error:  # somebody has taken it meanwhile: a job that runs loses its identity
            self._log("identity.port", port=port, error=str(error))
            server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        path.write_text(f"{server.server_port}\n")
        return server

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        split = urlsplit(handler.path)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        try:
            found = self.identity.answer(split.path, parse_qs(split.query), headers, self.at)
            self._log.over("identity", "identity.well")
        except (IdentityError, MetadataError) as error:
            self._log.once("identity", "identity.trouble", error=str(error))
            found = Answer(403 if isinstance(error, IdentityError) and error.final else 503, str(error).encode())
        handler.send_response(found.status)
        if found.flavor:
            handler.send_header("Metadata-Flavor", "Google")
        handler.send_header("Content-Type", found.kind)
        handler.send_header("Content-Length", str(len(found.body)))
        handler.end_headers()
        handler.wfile.write(found.body)


def _kept(path: Path, make: Callable[[], str]) -> str:
    """What an agent before this one wrote down, else something new. The jobs' group may read it, nobody else."""
    try:
        return path.read_text().strip()
    except OSError:
        made = make()
        path.touch(0o640)
        path.write_text(made)
        return made


def of(name: str, metadata: Metadata, clock: Clock, endpoints: Endpoints) -> JobIdentity:
    """``name``: what the stack gives to jobs: a service account's e-mail address, or a role's ARN.

    Raises:
        IdentityError: it is neither, or is another cloud's.
    """
    from spotkeeper.vm.ec2 import Ec2
    from spotkeeper.vm.gce import Gce

    if name.startswith("arn:") and isinstance(metadata, Ec2):
        from spotkeeper.vm.identity_aws import AwsIdentity

        return AwsIdentity(name, metadata, clock, endpoints)
    if "@" in name and isinstance(metadata, Gce):
        from spotkeeper.vm.identity_gcp import GcpIdentity

        return GcpIdentity(name, metadata.access_token, clock, endpoints)
    raise IdentityError(f"{name}: is no service account or role of the cloud that this machine is in", final=True)


def same(given: str, wanted: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode(), wanted.encode())
