"""Authentication of VMs, and of callers that may request rounds, by identity tokens.

A VM proves which VM it is by an identity token from its metadata server (``format=full``). The token must have a valid
signature (RS256, by one of the issuer's keys), the right issuer, audience, times (in virtual time) and service account,
and Google's claims about the instance's id, name, zone and project.

Cloud Run itself checks one token of each request and replaces that token's signature by a marker. A token with the
marker proves nothing here: if the service were public, anyone could write such a token. So agents and operators send
two tokens. The one in ``X-Serverless-Authorization`` is for Cloud Run, which may replace its signature. The one in
``Authorization`` is for this function; in an agent's token the audience is a path that nothing else accepts. Requests
of a schedule or a push have only one token, so the function relies on Cloud Run's check of it: :meth:`Verifier.hint`.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from spotkeeper.clock import Now
from spotkeeper.contract import codec
from spotkeeper.reconcile.clouds.http_client import NoAnswerError, Wire, split_origin
from spotkeeper.reconcile.controller.document import Speaker

if TYPE_CHECKING:
    from jwt import PyJWK

GOOGLE_JWKS = "https://www.googleapis.com/oauth2/v3/certs"
GOOGLE_ISSUER = "https://accounts.google.com"
# For a person `gcloud auth print-identity-token` cannot set an audience: the token names gcloud itself.
GCLOUD_AUDIENCE = "32555940559.apps.googleusercontent.com"
STRIPPED = "SIGNATURE_REMOVED_BY_GOOGLE"
AGENT_PATH = "/v1/sync"  # ends the audience of agents' tokens: the platform's token cannot replace one

SKEW_S = 60.0
MAX_LIFE_S = 2 * 3600.0  # Google's tokens are valid for one hour
MAX_TOKEN = 8192
MAX_KEYS = 32
MAX_KEY_SET = 256 * 1024
MIN_KEY_BITS = 2048
KEYS_TTL_S = 3600.0  # real seconds, as all below
KEYS_FRESH_S = 3000.0  # older keys stay in use while one request fetches new ones
REFETCH_S = 60.0  # at most one fetch per minute for unknown key ids
FETCH_DEADLINE_S = 5.0
WAIT_S = 6.0  # to wait for another request's fetch
AGAIN_S = 5.0  # pause after a failed fetch, so that requests do not queue behind its deadline

_BEARER = re.compile(r"[Bb]earer ([-A-Za-z0-9_]+\.[-A-Za-z0-9_]+\.[-A-Za-z0-9_]+)\Z")

log = logging.getLogger(__name__)


class AuthError(Exception):
    """The caller may not make this request. The message is for the log; the answer omits it."""


class KeysUnavailableError(Exception):
    """The key set is temporarily unavailable, so no caller can be authenticated."""


class Caller(Struct, frozen=True):
    """A caller that may request a round. ``verified`` is false if only Cloud Run has checked the caller.

    ``listed``: the role of which the caller is a session, as the stack file lists it; "" if it lists the caller itself.
    """

    email: str
    verified: bool = True
    listed: str = ""

    @property
    def user(self) -> str:
        """The caller as a team's members are written."""
        return self.listed or self.email


class _Header(Struct, frozen=True):
    alg: str
    kid: str
    typ: str = "JWT"
    crit: tuple[str, ...] | None = None


class _ComputeEngine(Struct, frozen=True):
    instance_id: str
    instance_name: str
    zone: str
    project_id: str


class _Google(Struct, frozen=True):
    compute_engine: _ComputeEngine | None = None


class _Claims(Struct, frozen=True):
    iss: str
    aud: str
    exp: float
    iat: float
    email: str
    email_verified: bool = False
    nbf: float | None = None
    google: _Google | None = None


class _Jwk(Struct, frozen=True):
    kty: str = ""
    kid: str = ""
    n: str = ""
    e: str = ""
    alg: str = "RS256"
    use: str = "sig"


class _Jwks(Struct, frozen=True):
    keys: tuple[_Jwk, ...] = ()


class KeySet:
    """The issuer's public keys, cached for at most an hour and fetched again for an unknown key id.

    One request at a time fetches the keys, without holding the lock. Other requests use the known keys meanwhile, or
    wait for the fetch (``WAIT_S`` at most) if their key is unknown or the keys are too old.

    Raises:
        ValueError: the address is neither https nor on this machine.
    """

    def __init__(self, url: str = GOOGLE_JWKS) -> None:
        parts = split_origin(url, "SPOTKEEPER_JWKS", "https://, or http:// on this machine")
        self._wire = Wire(f"{parts.scheme}://{parts.netloc}")
        self._path = parts.path + (f"?{parts.query}" if parts.query else "")
        self._lock = threading.Lock()
        self._keys: dict[str, PyJWK] = {}
        self._fetched: float | None = None
        self._tried: float | None = None
        self._failed: float | None = None
        self._fetching: threading.Event | None = None  # set once the present fetch has ended

    def key(self, kid: str) -> PyJWK:
        """Return the key with this id.

        Raises:
            AuthError: the issuer has no such key.
            KeysUnavailableError: the issuer's keys could not be fetched, and the known keys are too old.
        """
        began = time.monotonic()
        ended, mine = self._joined(kid)
        if ended is not None and mine:
            try:
                self._fetch()
            finally:
                with self._lock:
                    self._fetching = None
                ended.set()
        elif ended is not None:
            ended.wait(WAIT_S)
        with self._lock:
            news = self._fetched is not None and self._fetched >= began
            if not news and self._age() > KEYS_TTL_S:
                raise KeysUnavailableError("the issuer's keys could not be fetched")
            found = self._keys.get(kid)
        if found is None:
            raise AuthError("unknown key id")
        return found

    def _joined(self, kid: str) -> tuple[threading.Event | None, bool]:
        """Return (the fetch of keys that this request needs, or None; whether the request must make the fetch)."""
        with self._lock:
            now, age, known = time.monotonic(), self._age(), kid in self._keys
            useless = age > KEYS_TTL_S or not known
            if self._fetching is not None:
                return (self._fetching, False) if useless else (None, False)
            rested = self._tried is None or now - self._tried > REFETCH_S
            if age > KEYS_TTL_S:
                due = self._failed is None or now - self._failed >= AGAIN_S
            else:
                due = rested and (not known or age > KEYS_FRESH_S)
            if not due:
                return None, False
            self._tried = now
            self._fetching = threading.Event()
            return self._fetching, True

    def _age(self) -> float:
        return math.inf if self._fetched is None else time.monotonic() - self._fetched

    def _fetch(self) -> None:
        """Fetch the keys once, with the time limit ``FETCH_DEADLINE_S``; after a failure the known keys stay."""
        try:
            answer = self._wire.call("GET", self._path, {"Accept": "application/json"}, None, FETCH_DEADLINE_S)
            if answer.status != 200 or len(answer.body) > MAX_KEY_SET:
                raise NoAnswerError(f"HTTP {answer.status}, {len(answer.body)} bytes")
            keys = _usable(codec.decode(answer.body, _Jwks).keys)
        except (NoAnswerError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("key set: %s", error)
            with self._lock:
                self._failed = time.monotonic()
            return
        with self._lock:
            self._keys, self._fetched, self._failed = keys, time.monotonic(), None


def _usable(listed: tuple[_Jwk, ...]) -> dict[str, PyJWK]:
    """Return RSA signing keys of at least 2,048 bits by id; other entries are ignored."""
    from jwt import PyJWK
    from jwt.exceptions import PyJWTError

    out: dict[str, PyJWK] = {}
    for one in listed[:MAX_KEYS]:
        if (one.kty, one.alg, one.use) != ("RSA", "RS256", "sig") or not one.kid:
            continue
        try:
            key = PyJWK.from_dict({"kty": "RSA", "n": one.n, "e": one.e, "alg": "RS256"})
        except (PyJWTError, ValueError, TypeError):
            continue
        if key.key.key_size >= MIN_KEY_BITS:
            out[one.kid] = key
    return out


class Verifier:
    """The verifier of requests' ``Authorization`` headers.

    Args:
        keys: the issuer's keys.
        clock: for the check of tokens' times.
        audience: the function's URL, which tokens must name; agents' tokens must name ``<URL>/v1/sync``.
        issuer: the tokens' issuer; Google's is accepted with and without ``https://``.
        behind_iam: whether Cloud Run checks each request before the function does.
    """

    def __init__(
        self, keys: KeySet, clock: Now, audience: str, issuer: str = GOOGLE_ISSUER, behind_iam: bool = False
    ) -> None:
        self._keys, self._clock, self._audience = keys, clock, audience
        self._issuers = {issuer, issuer.removeprefix("https://")} if issuer == GOOGLE_ISSUER else {issuer}
        self._behind_iam = behind_iam

    def agent(self, authorization: str | None, email: str, project: str) -> Speaker:
        """Return the VM that sent the request.

        Args:
            email: the service account of the stack's nodes.
            project: the stack's project.

        Raises:
            AuthError: the caller does not prove that it is a VM of the stack.
            KeysUnavailableError: no caller can be verified right now.
        """
        claims = self._verified(authorization)
        self._check(claims, {self._audience + AGENT_PATH})
        machine = claims.google.compute_engine if claims.google else None
        if machine is None:
            raise AuthError("no claims about a machine: request the token with format=full")
        if not email or claims.email != email:
            raise AuthError("another service account")
        if machine.project_id != project:
            raise AuthError("another project")
        if not machine.instance_id.isascii() or not machine.instance_id.isdigit() or not machine.instance_name:
            raise AuthError("the machine's id or name in the token is malformed")
        return Speaker(machine.instance_id, machine.instance_name, machine.zone.rpartition("/")[2])

    def invoker(self, authorization: str | None, emails: frozenset[str]) -> Caller:
        """Return the caller, an operator in ``emails`` with a valid token.

        Raises:
            AuthError, KeysUnavailableError: as :meth:`agent`.
        """
        return self._of(self._verified(authorization), emails)

    def hint(self, authorization: str | None, emails: frozenset[str], platform: str | None = None) -> Caller:
        """Return the caller that requests a round: the schedule or a push, in ``emails``. It may do nothing else.

        Cloud Run checks the token and puts a marker in place of its signature; the claims of such a token are
        believed. If the service is opened to all, Cloud Run checks nothing and the signature stays. After the first
        valid token with a signature and without ``platform``, this process therefore accepts no marker any more.

        Args:
            platform: the request's ``X-Serverless-Authorization``. If there is one, Cloud Run checks it instead and
                leaves ``Authorization`` as sent.

        Raises:
            AuthError, KeysUnavailableError: as :meth:`agent`.
        """
        payload, _, signature = _token(authorization).rpartition(".")
        if self._behind_iam and signature == STRIPPED:
            return self._of(_claims_of(_payload(payload)), emails, verified=False)
        caller = self.invoker(authorization, emails)
        if self._behind_iam and not platform:
            log.error("a token arrived with its signature, so Cloud Run checks no caller: is the function open to all?")
            self._behind_iam = False
        return caller

    def _of(self, claims: _Claims, emails: frozenset[str], verified: bool = True) -> Caller:
        self._check(claims, {self._audience, GCLOUD_AUDIENCE})
        if claims.email not in emails:
            raise AuthError("not an invoker")
        return Caller(claims.email, verified)

    def _verified(self, authorization: str | None) -> _Claims:
        """Return the claims of a token after verifying its signature."""
        token = _token(authorization)
        header, (signed, _, signature) = _header(token), token.rpartition(".")
        if signature == STRIPPED:
            raise AuthError("the signature was removed")
        if header.alg != "RS256" or header.crit is not None or header.typ != "JWT":
            raise AuthError("not an RS256 token")
        if not _holds(self._keys.key(header.kid), signed.encode(), signature):
            raise AuthError("the signature is invalid")
        return _claims_of(_payload(token))

    def _check(self, claims: _Claims, audiences: set[str]) -> None:
        now = self._clock.now()
        if claims.iss not in self._issuers:
            raise AuthError("another issuer")
        if not self._audience or claims.aud not in audiences:
            raise AuthError("another audience")
        if not claims.email_verified:
            raise AuthError("an email that is not verified")
        if not claims.iat < claims.exp <= claims.iat + MAX_LIFE_S:
            raise AuthError(f"exp is not within {MAX_LIFE_S:.0f} s after iat")
        if now >= claims.exp + SKEW_S:
            raise AuthError("expired")
        if max(claims.iat, claims.nbf or 0.0) > now + SKEW_S:
            raise AuthError("not valid yet")


def _holds(key: PyJWK, signed: bytes, signature: str) -> bool:
    """Return whether an RS256 signature is valid; the token's header cannot choose another algorithm."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        key.key.verify(_unb64(signature), signed, PKCS1v15(), SHA256())
    except (InvalidSignature, ValueError):
        return False
    return True


def _token(authorization: str | None) -> str:
    if authorization is None:
        raise AuthError("no token")
    found = _BEARER.match(authorization) if len(authorization) <= MAX_TOKEN else None
    if found is None:
        raise AuthError("not a bearer token")
    return found[1]


def _header(token: str) -> _Header:
    try:
        return codec.decode(_unb64(token.split(".", maxsplit=1)[0]), _Header)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise AuthError("not a token's header") from None


def _payload(token: str) -> bytes:
    try:
        return _unb64(token.split(".")[1])
    except ValueError:
        raise AuthError("not a token's body") from None


def _claims_of(payload: bytes) -> _Claims:
    try:
        return codec.decode(payload, _Claims)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise AuthError("claims missing, or of the wrong type") from None


def _unb64(text: str) -> bytes:
    import base64

    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
