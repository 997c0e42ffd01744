"""The metadata server: who this machine is, what happens to it, and tokens that prove it.

One recursive long poll carries preemption, maintenance and attributes. A failing or
silent server means "ask again" and never "not preempted". Proxies are never used: the
address is link-local, and a proxy would answer for another machine.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import requests
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.spec import codec
from spotkeeper.vm.log import Log

HOST = "169.254.169.254"  # by address: names may not resolve while the machine goes down
HANG_S = 60  # of the long poll, as Google's own guest agent
CONNECT_S = 2.0
ANSWER_S = 5.0
RETRY_S = 1.0  # virtual
RETRY_FLOOR_S = 0.2  # real
EXPIRY_MARGIN_S = 300.0  # virtual; a token is renewed when less than this is left


class Interface(Struct, frozen=True):
    ip: str = ""


class Instance(Struct, frozen=True, rename="camel"):
    """What the agent reads of ``instance/?recursive=true``; anything else is ignored."""

    id: int | str
    name: str
    zone: str
    attributes: dict[str, str] = {}
    network_interfaces: Annotated[tuple[Interface, ...], msgspec.Meta(min_length=1)] = (Interface(),)
    preempted: str = "FALSE"
    maintenance_event: str = "NONE"

    @property
    def uid(self) -> str:
        return str(self.id)

    @property
    def address(self) -> str:
        return self.network_interfaces[0].ip


class MetadataError(Exception):
    """No usable answer; ask again."""


class Metadata:
    """A client of one metadata server. Safe to use from several threads: each call has its own session state."""

    def __init__(self, clock: Clock, host: str | None = None) -> None:
        self._clock = clock
        self._root = f"http://{host or os.environ.get('GCE_METADATA_HOST', HOST)}/computeMetadata/v1/"
        self._identity: dict[str, tuple[str, float]] = {}
        self._access: tuple[str, float] = ("", 0.0)
        self._lock = threading.Lock()

    def instance(self) -> Instance:
        return _decode(self._get("instance/", {"recursive": "true", "alt": "json"})[0])

    def wait(self, etag: str) -> tuple[Instance, str]:
        """The instance when its etag is no longer ``etag`` (``NONE``: at once), or after a minute."""
        query = {
            "recursive": "true",
            "alt": "json",
            "wait_for_change": "true",
            "last_etag": etag,
            "timeout_sec": str(HANG_S),
        }
        text, new = self._get("instance/", query, HANG_S + 10.0)
        return _decode(text), new or etag

    def identity_token(self, audience: str) -> str:
        """A JWT signed by the cloud that says which instance this is; kept until shortly before it expires.

        Raises:
            MetadataError: no token could be had.
        """
        with self._lock:
            token, expires = self._identity.get(audience, ("", 0.0))
        if token and expires - self._clock.now() > EXPIRY_MARGIN_S:
            return token
        query = {"audience": audience, "format": "full"}
        token = self._get("instance/service-accounts/default/identity", query)[0].decode().strip()
        with self._lock:
            self._identity[audience] = (token, _expiry(token))
        return token

    def forget_identity(self) -> None:
        """After a refusal: the next token is a fresh one."""
        with self._lock:
            self._identity.clear()

    def access_token(self) -> str:
        """An OAuth token of the machine's service account, for its bucket paths.

        Raises:
            MetadataError: no token could be had.
        """
        token, expires = self._access
        if token and expires - self._clock.steady() > EXPIRY_MARGIN_S:
            return token
        text = self._get("instance/service-accounts/default/token", {})[0]
        try:
            answer = codec.decode(text, _Access)
        except msgspec.DecodeError as error:
            raise MetadataError(f"access token: {error}") from None
        self._access = (answer.access_token, self._clock.steady() + answer.expires_in)
        return answer.access_token

    def _get(self, path: str, query: dict[str, str], answer_s: float = ANSWER_S) -> tuple[bytes, str]:
        """Body and etag.

        Raises:
            MetadataError: any other answer than 200, or none.
        """
        try:
            with requests.Session() as session:
                session.trust_env = False
                answer = session.get(
                    self._root + path,
                    params=query,
                    headers={"Metadata-Flavor": "Google"},
                    timeout=(CONNECT_S, answer_s),
                )
        except requests.RequestException as error:
            raise MetadataError(f"{path}: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise MetadataError(f"{path}: HTTP {answer.status_code}")
        return answer.content, answer.headers.get("ETag", "")


class _Access(Struct, frozen=True):
    access_token: str
    expires_in: float


class _Claims(Struct, frozen=True):
    exp: float = 0.0


def _decode(text: bytes) -> Instance:
    try:
        return codec.decode(text, Instance, strict=False)
    except msgspec.DecodeError as error:
        raise MetadataError(f"instance/: {error}") from None


def _expiry(token: str) -> float:
    """``exp`` of a JWT, unverified: only its audience has to believe it. 0 where it cannot be read."""
    try:
        claims = token.split(".")[1]
        return codec.decode(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)), _Claims).exp
    except (IndexError, ValueError):
        return 0.0


class Watcher(threading.Thread):
    """The long poll. Calls ``changed`` with every new state of the instance, the first one included."""

    def __init__(self, metadata: Metadata, changed: Callable[[Instance], None], clock: Clock, log: Log) -> None:
        super().__init__(name="metadata", daemon=True)
        self._metadata = metadata
        self._changed = changed
        self._clock = clock
        self._log = log

    def run(self) -> None:
        etag = "NONE"  # answers at once, and closes the race of a change between two polls
        last: Instance | None = None
        while True:
            try:
                instance, etag = self._metadata.wait(etag)
            except MetadataError as error:
                self._log.once(str(error), "metadata.trouble", error=str(error))
                time.sleep(max(RETRY_FLOOR_S, self._clock.real_s(RETRY_S)))
                continue
            if instance != last:
                last = instance
                self._changed(instance)
