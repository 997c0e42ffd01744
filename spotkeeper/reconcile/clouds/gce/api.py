"""A REST client for Compute Engine: requests with deadlines and access tokens.

Google's SDK is not used: it takes 1 s to import and has 148 MB, more than the whole function may have.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper.reconcile.clouds.http_client import Answer, NoAnswerError, Wire, split_origin

__all__ = ["DEFAULT_ENDPOINT", "Answer", "Api", "GivenToken", "MetadataToken", "NoAnswerError", "Token"]

DEFAULT_ENDPOINT = "https://compute.googleapis.com/compute/v1"
DEFAULT_METADATA_HOST = "169.254.169.254"
VERSIONS = ("v1", "beta")
TOKEN_EARLY_S = 60.0  # a token is renewed this long before it ends
_TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105 - an address


class _TokenReply(Struct, frozen=True):
    access_token: str
    expires_in: float


class Token(Protocol):
    """A source of bearer tokens. A call returns a token by a deadline; ``drop`` reports that the token was refused."""

    def __call__(self, deadline_s: float, /) -> str: ...

    def drop(self) -> None: ...


@dataclass(frozen=True)
class GivenToken:
    """A fixed token: the operator's, for a one-machine cloud."""

    value: str = field(repr=False)

    def __call__(self, _deadline_s: float) -> str:
        return self.value

    def drop(self) -> None:
        """Do nothing: no other token exists."""


class MetadataToken:
    """The access token of the machine's identity, from the metadata server, renewed a minute before it expires."""

    def __init__(self, clock: Clock, host: str | None = None) -> None:
        self._clock = clock
        self._host = host or os.environ.get("GCE_METADATA_HOST") or DEFAULT_METADATA_HOST
        self._wire = Wire(f"http://{self._host}")
        self._lock = threading.Lock()
        self._value = ""
        self._until = 0.0

    def __call__(self, deadline_s: float) -> str:
        """Return the token. One caller fetches it; other callers wait, each until its own deadline.

        Raises:
            NoAnswerError: no token arrives in time.
        """
        ends = time.monotonic() + deadline_s
        if not self._lock.acquire(timeout=max(0.0, deadline_s)):
            raise NoAnswerError("no access token in time: another call still waits for the metadata server")
        try:
            if not self._value or self._clock.now() > self._until - TOKEN_EARLY_S:
                self._fetch(max(0.001, ends - time.monotonic()))
            return self._value
        finally:
            self._lock.release()

    def drop(self) -> None:
        """Discard the refused token, so that the next call fetches another."""
        with self._lock:
            self._value = ""

    def _fetch(self, deadline_s: float) -> None:
        answer = self._wire.call("GET", _TOKEN_PATH, {"Metadata-Flavor": "Google"}, None, min(deadline_s, 5.0))
        if answer.status != 200:
            raise NoAnswerError(f"metadata server {self._host}: HTTP {answer.status} for an access token")
        try:
            reply = codec.decode(answer.body, _TokenReply)
        except msgspec.DecodeError as error:
            raise NoAnswerError(f"metadata server {self._host}: the answer is not a token: {error}") from error
        self._value, self._until = reply.access_token, self._clock.now() + reply.expires_in


class Api:
    """A client for one endpoint; each call has a deadline. Thread-safe.

    Raises:
        ValueError: the endpoint is plain http to another machine: the token could be read on the way.
    """

    def __init__(self, endpoint: str, token: Token | None) -> None:
        parts = split_origin(endpoint, "SPOTKEEPER_COMPUTE_ENDPOINT", "https://host/compute/v1")
        self._wire = Wire(f"{parts.scheme}://{parts.netloc}")
        self._root = parts.path.rstrip("/")
        self._token = token

    def version(self, name: str) -> Api:
        """Return the API in another version (``beta``), on the same connections; self if its path has no version."""
        root, version = self._root.rpartition("/")[::2]
        if version not in VERSIONS:
            return self
        other = copy(self)
        other._root = f"{root}/{name}"
        return other

    def call(
        self,
        method: str,
        path: str,
        deadline_s: float,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> Answer:
        """Make one request; ``path`` is relative to the endpoint (``projects/...``).

        Raises:
            NoAnswerError: no complete answer in time; the call may or may not have been carried out.
        """
        started = time.monotonic()
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = "Bearer " + self._token(deadline_s)
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        target = f"{self._root}/{quote(path)}" + (f"?{urlencode(query)}" if query else "")
        left = deadline_s - (time.monotonic() - started)
        answer = self._wire.call(method, target, headers, data, left)
        if answer.status == 401 and self._token is not None:
            self._token.drop()
        return answer
