"""A service account as the job's identity: its tokens by impersonation, in the words of a metadata server.

The machine's own account may do one thing with it: ask IAM Credentials for its tokens (``infra/gcp/identity.py``).
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec
import requests
from msgspec import Struct

from spotkeeper.clock import Clock, from_rfc3339
from spotkeeper.spec import codec
from spotkeeper.vm.identity import Address, Answer, Endpoints, IdentityError

SCOPE = "https://www.googleapis.com/auth/cloud-platform"  # narrowed by the account's roles
LIFETIME_S = 3600
MARGIN_S = 300.0  # virtual; a token is renewed when less than this is left
CONNECT_S, ANSWER_S = 3.0, 10.0
SECRET = "gcp-secret://"  # noqa: S105 - how a reference begins
T = TypeVar("T", bound=Struct)
_ROOT = "/computeMetadata/v1/"


class _Access(Struct, frozen=True, rename="camel"):
    access_token: str
    expire_time: str


class _Identity(Struct, frozen=True):
    token: str


class _Payload(Struct, frozen=True):
    data: str


class _Secret(Struct, frozen=True):
    payload: _Payload


class GcpIdentity:
    """``account``: e-mail address; ``machine``: gives an access token of the machine's own account."""

    def __init__(self, account: str, machine: Callable[[], str], clock: Clock, endpoints: Endpoints) -> None:
        self._account = account
        self._machine = machine
        self._clock = clock
        self._endpoints = endpoints
        self._lock = threading.Lock()
        self._token: tuple[str, float] = ("", 0.0)

    def environment(self, at: Address) -> dict[str, str]:
        return {"GCE_METADATA_HOST": at.host, "GCE_METADATA_IP": at.host}

    def answer(self, path: str, query: dict[str, list[str]], headers: dict[str, str], at: Address) -> Answer:
        """As a metadata server: only to who sends its header, and never to what came through a proxy."""
        if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
            return Answer(403)
        if path in ("", "/", "/computeMetadata", "/computeMetadata/", _ROOT):
            return _text("computeMetadata/")
        service = path.removeprefix(f"{_ROOT}instance/service-accounts/")
        if service != path:
            return self._service(service.rstrip("/"), query)
        values = {"universe/universe-domain": "googleapis.com", "project/project-id": self._project()}
        found = values.get(path.removeprefix(_ROOT), "")
        return _text(found) if found else Answer(404, flavor=True)

    def _service(self, path: str, query: dict[str, list[str]]) -> Answer:
        who, _, what = path.partition("/")
        if not who:
            return _text(f"default/\n{self._account}/\n")
        if who not in ("default", self._account):
            return Answer(404, flavor=True)
        if not what and query.get("recursive", [""])[0].lower() == "true":
            return _json({"aliases": ["default"], "email": self._account, "scopes": [SCOPE]})
        if what == "token":
            token, expires = self._access()
            left = int(expires - self._clock.now())
            return _json({"access_token": token, "expires_in": left, "token_type": "Bearer"})
        if what == "identity":
            audience = query.get("audience", [""])[0]
            return _text(self._identity(audience)) if audience else Answer(400, b"no audience", flavor=True)
        values = {"": "aliases\nemail\nidentity\nscopes\ntoken\n", "email": self._account, "scopes": f"{SCOPE}\n"}
        return _text(values[what]) if what in values else Answer(404, flavor=True)

    def _project(self) -> str:
        """Where the account lives: what its libraries take for the job's project."""
        _, _, domain = self._account.partition("@")
        project, found, _ = domain.partition(".iam.gserviceaccount.com")
        return project if found else ""

    def secret(self, reference: str) -> str:
        name = reference.removeprefix(SECRET)
        if name == reference:
            raise IdentityError(f"{reference.partition(':')[0]}: is no {SECRET} reference", final=True)
        url = f"{self._endpoints.secrets}/v1/{name}:access"
        body = _send("GET", url, self._access()[0], None, name)
        try:
            return base64.b64decode(codec.decode(body, _Secret).payload.data, validate=True).decode()
        except (msgspec.DecodeError, binascii.Error, UnicodeDecodeError):
            raise IdentityError(f"{name}: its content is no text", final=True) from None

    def _access(self) -> tuple[str, float]:
        """An access token, and when it ends (virtual unix seconds)."""
        with self._lock:  # held while it is asked for: ranks that begin together ask once
            token, expires = self._token
            if not token or expires - self._clock.now() < MARGIN_S:
                body: dict[str, object] = {"scope": [SCOPE], "lifetime": f"{LIFETIME_S}s"}
                found = _decode(self._impersonate("generateAccessToken", body), _Access)
                self._token = found.access_token, _time(found.expire_time)
            return self._token

    def _identity(self, audience: str) -> str:
        body: dict[str, object] = {"audience": audience, "includeEmail": True}
        return _decode(self._impersonate("generateIdToken", body), _Identity).token

    def _impersonate(self, verb: str, body: dict[str, object]) -> bytes:
        url = f"{self._endpoints.iam}/v1/projects/-/serviceAccounts/{self._account}:{verb}"
        return _send("POST", url, self._machine(), msgspec.json.encode(body), f"{verb} of {self._account}")


def _send(method: str, url: str, token: str, body: bytes | None, what: str) -> bytes:
    """
    Raises:
        IdentityError: it was refused, or nobody answered. ``what`` is not secret.
    """
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        answer = requests.request(method, url, data=body, headers=headers, timeout=(CONNECT_S, ANSWER_S))
    except requests.RequestException as error:
        raise IdentityError(f"{what}: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise IdentityError(f"{what}: HTTP {answer.status_code}", final=answer.status_code in (403, 404))
    return answer.content


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return codec.decode(body, kind)
    except msgspec.DecodeError:
        raise IdentityError("IAM Credentials: an answer that is none") from None


def _time(text: str) -> float:
    try:
        return from_rfc3339(text)
    except ValueError:
        raise IdentityError("generateAccessToken: an answer that is none") from None


def _text(text: str) -> Answer:
    return Answer(200, text.encode(), "application/text", flavor=True)


def _json(value: dict[str, object]) -> Answer:
    return Answer(200, msgspec.json.encode(value), "application/json", flavor=True)
