"""A service account as the jobs' identity: gets tokens by impersonation and serves them like a metadata server.

The machine's own account is allowed to do only one thing with the service account: request its tokens from IAM
Credentials (``infra/gcp/identity.py``).
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract import codec
from spotkeeper_agent.cloud.identity import Endpoints, IdentityAnswer, IdentityError, ServerAddress, call, expiry

SCOPE = "https://www.googleapis.com/auth/cloud-platform"  # the service account's roles restrict it
LIFETIME_S = 3600
MARGIN_S = 300.0  # virtual; a token is renewed when less than this is left
SECRET = "gcp-secret://"  # noqa: S105 - how a reference begins
T = TypeVar("T", bound=Struct)
_ROOT = "/computeMetadata/v1/"


class _AccessToken(Struct, frozen=True, rename="camel"):
    access_token: str
    expire_time: str


class _Identity(Struct, frozen=True):
    token: str


class _Payload(Struct, frozen=True):
    data: str


class _Secret(Struct, frozen=True):
    payload: _Payload


class GcpIdentity:
    """A service account as the jobs' identity. ``account``: its email; ``machine``: returns the machine's own token."""

    def __init__(self, account: str, machine: Callable[[], str], clock: Clock, endpoints: Endpoints) -> None:
        self._account = account
        self._machine = machine
        self._clock = clock
        self._endpoints = endpoints
        self._lock = threading.Lock()
        self._token: tuple[str, float] = ("", 0.0)

    def environment(self, at: ServerAddress) -> dict[str, str]:
        return {"GCE_METADATA_HOST": at.host, "GCE_METADATA_IP": at.host}

    def answer(
        self, path: str, query: dict[str, list[str]], headers: dict[str, str], at: ServerAddress
    ) -> IdentityAnswer:
        """Answer like a metadata server: refuse requests without the header ``Metadata-Flavor``, or from a proxy."""
        if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
            return IdentityAnswer(403)
        if path in ("", "/", "/computeMetadata", "/computeMetadata/", _ROOT):
            return _text("computeMetadata/")
        service = path.removeprefix(f"{_ROOT}instance/service-accounts/")
        if service != path:
            return self._service(service.rstrip("/"), query)
        values = {"universe/universe-domain": "googleapis.com", "project/project-id": self._project()}
        found = values.get(path.removeprefix(_ROOT), "")
        return _text(found) if found else IdentityAnswer(404, flavor=True)

    def _service(self, path: str, query: dict[str, list[str]]) -> IdentityAnswer:
        who, _, what = path.partition("/")
        if not who:
            return _text(f"default/\n{self._account}/\n")
        if who not in ("default", self._account):
            return IdentityAnswer(404, flavor=True)
        if not what and query.get("recursive", [""])[0].lower() == "true":
            return _json({"aliases": ["default"], "email": self._account, "scopes": [SCOPE]})
        if what == "token":
            token, expires = self._access()
            left = int(expires - self._clock.now())
            return _json({"access_token": token, "expires_in": left, "token_type": "Bearer"})
        if what == "identity":
            audience = query.get("audience", [""])[0]
            return _text(self._identity(audience)) if audience else IdentityAnswer(400, b"no audience", flavor=True)
        values = {"": "aliases\nemail\nidentity\nscopes\ntoken\n", "email": self._account, "scopes": f"{SCOPE}\n"}
        return _text(values[what]) if what in values else IdentityAnswer(404, flavor=True)

    def _project(self) -> str:
        """The service account's project, which libraries use as the job's project."""
        _, _, domain = self._account.partition("@")
        project, found, _ = domain.partition(".iam.gserviceaccount.com")
        return project if found else ""

    def secret(self, reference: str) -> str:
        name = reference.removeprefix(SECRET)
        if name == reference:
            raise IdentityError(f"{reference.partition(':')[0]}: want a reference {SECRET}...", final=True)
        url = f"{self._endpoints.secrets}/v1/{name}:access"
        body = _call("GET", url, self._access()[0], None, name)
        try:
            return base64.b64decode(codec.decode(body, _Secret).payload.data, validate=True).decode()
        except (msgspec.DecodeError, binascii.Error, UnicodeDecodeError):
            raise IdentityError(f"{name}: its content is not text", final=True) from None

    def _access(self) -> tuple[str, float]:
        """Return an access token and the time of its expiry in virtual unix seconds."""
        with self._lock:  # held during the call, so processes that start together make one call
            token, expires = self._token
            if not token or expires - self._clock.now() < MARGIN_S:
                body: dict[str, object] = {"scope": [SCOPE], "lifetime": f"{LIFETIME_S}s"}
                found = _decode(self._impersonate("generateAccessToken", body), _AccessToken)
                self._token = found.access_token, expiry(found.expire_time, "generateAccessToken")
            return self._token

    def _identity(self, audience: str) -> str:
        body: dict[str, object] = {"audience": audience, "includeEmail": True}
        return _decode(self._impersonate("generateIdToken", body), _Identity).token

    def _impersonate(self, verb: str, body: dict[str, object]) -> bytes:
        url = f"{self._endpoints.iam}/v1/projects/-/serviceAccounts/{self._account}:{verb}"
        return _call("POST", url, self._machine(), msgspec.json.encode(body), f"{verb} of {self._account}")


def _call(method: str, url: str, token: str, body: bytes | None, what: str) -> bytes:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return call(method, url, headers, body, what)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return codec.decode(body, kind)
    except msgspec.DecodeError:
        raise IdentityError("IAM Credentials: the answer is invalid") from None


def _text(text: str) -> IdentityAnswer:
    return IdentityAnswer(200, text.encode(), "application/text", flavor=True)


def _json(value: dict[str, object]) -> IdentityAnswer:
    return IdentityAnswer(200, msgspec.json.encode(value), "application/json", flavor=True)
