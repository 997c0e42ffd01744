"""Compute Engine by REST: where calls go and the token they carry. Knows no verb of ours.

Google's SDK costs 1 s of import and 148 MB, which is more than the whole function may.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.reconcile.wire import Answer, NoAnswerError, Wire, is_loopback, split_origin
from spotkeeper.spec import codec

__all__ = ["DEFAULT_ENDPOINT", "Answer", "Api", "MetadataToken", "NoAnswerError"]

DEFAULT_ENDPOINT = "https://compute.googleapis.com/compute/v1"
DEFAULT_METADATA_HOST = "169.254.169.254"
TOKEN_EARLY_S = 60.0  # a token is renewed this long before it ends
_TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105 - an address


class _TokenReply(Struct, frozen=True):
    access_token: str
    expires_in: float


class MetadataToken:
    """The machine identity's access token, from the metadata server, kept until a minute before it ends."""

    def __init__(self, clock: Clock, host: str | None = None) -> None:
        self._clock = clock
        self._host = host or os.environ.get("GCE_METADATA_HOST") or DEFAULT_METADATA_HOST
        self._lock = threading.Lock()
        self._value = ""
        self._until = 0.0

    def __call__(self, deadline_s: float) -> str:
        """The token. One call fetches it; the others wait for it, each for its own time at most.

        Raises:
            NoAnswerError: it does not come in time.
        """
        ends = time.monotonic() + deadline_s
        if not self._lock.acquire(timeout=max(0.0, deadline_s)):
            raise NoAnswerError("no access token in time: the metadata server keeps another call waiting")
        try:
            if not self._value or self._clock.now() > self._until - TOKEN_EARLY_S:
                self._fetch(max(0.001, ends - time.monotonic()))
            return self._value
        finally:
            self._lock.release()

    def drop(self) -> None:
        """The token was refused: ask for another next time."""
        with self._lock:
            self._value = ""

    def _fetch(self, deadline_s: float) -> None:
        wire = Wire(f"http://{self._host}")
        answer = wire.call("GET", _TOKEN_PATH, {"Metadata-Flavor": "Google"}, None, min(deadline_s, 5.0))
        if answer.status != 200:
            raise NoAnswerError(f"metadata server {self._host}: HTTP {answer.status} for an access token")
        try:
            reply = codec.decode(answer.body, _TokenReply)
        except msgspec.DecodeError as error:
            raise NoAnswerError(f"metadata server {self._host}: not a token: {error}") from error
        self._value, self._until = reply.access_token, self._clock.now() + reply.expires_in


class Api:
    """Calls under one endpoint, each with a deadline; thread-safe.

    Raises:
        ValueError: plain http to a host that is not this machine: a token must not cross an open line.
    """

    def __init__(self, endpoint: str, token: MetadataToken | None) -> None:
        parts = split_origin(endpoint, "SPOTKEEPER_COMPUTE_ENDPOINT", "https://host/compute/v1")
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ValueError(f"SPOTKEEPER_COMPUTE_ENDPOINT={endpoint!r}: plain http only to this machine itself")
        self._wire = Wire(f"{parts.scheme}://{parts.netloc}")
        self._root = parts.path.rstrip("/")
        self._token = token

    def call(
        self,
        method: str,
        path: str,
        deadline_s: float,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> Answer:
        """One request. ``path`` is relative to the endpoint (``projects/...``).

        Raises:
            NoAnswerError: see there.
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
