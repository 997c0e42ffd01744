"""Authentication: identity tokens, access tokens, and the guard that checks every request.

Identity tokens are signed by one local key (RS256) whose public half anyone may read. They carry Google's issuer,
because production code verifies them; only a verifier that is given this cloud's key set (``SPOTKEEPER_JWKS``)
accepts them. Times in tokens are virtual.

The ports are open to every process of this machine and to every page in a browser on it, and a call can run a program
as the operator. So the server refuses every connection of another user of this machine (``server.OwnersOnly``), also at
the metadata servers, which hand out tokens. A call of the API must carry a bearer token. A browser's call is refused
even with a token. A call whose ``Host`` is not this machine is refused too, because a web page could make its own host
name resolve to this machine (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from starlette.requests import Request

from spotkeeper.local.core.errors import ApiError, forbidden
from spotkeeper.local.core.schema import JsonObject
from spotkeeper.reconcile.clouds.http_client import is_loopback

ISSUER = "https://accounts.google.com"
LIFE_S = 3600.0  # virtual; as long as Google's access tokens live
OPERATOR_FILE = "token"  # in the cloud's folder: the operator's bearer token
OPEN = frozenset({"/local/v1/health", "/local/v1/jwks", "/oauth2/v3/certs"})  # read-only and not secret
METADATA_HOSTS = frozenset({"metadata.google.internal", "metadata"})
_PREFIX = "ya29.local."
_BINARY = ("/upload/", "/batch")  # paths whose bodies are not JSON


@dataclass(frozen=True)
class Principal:
    """The holder of an access token. ``vm``: the VM's path; empty for a function or an operator."""

    email: str
    vm: str = ""


OPERATOR = Principal("operator@localhost")


class Tokens:
    """Makes and reads tokens. The key pair and the secret for this are files of the cloud's folder, with mode 0600."""

    def __init__(self, folder: Path) -> None:
        self._key = _load_key(folder / "key.pem")
        self._secret = _load_secret(folder / "secret")
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key()))
        self._kid = hashlib.sha256(public["n"].encode()).hexdigest()[:16]
        self._jwk: JsonObject = {**public, "kid": self._kid, "alg": "RS256", "use": "sig"}

    def jwks(self) -> JsonObject:
        return {"keys": [self._jwk]}

    def identity(self, email: str, audience: str, now: float, compute_engine: JsonObject | None = None) -> str:
        """Return an identity token. ``compute_engine``: the claims that ``format=full`` adds to a VM's token."""
        subject = str(int.from_bytes(hashlib.sha256(email.encode()).digest()[:8], "big"))
        claims: JsonObject = {
            "iss": ISSUER,
            "aud": audience,
            "azp": subject,
            "sub": subject,
            "email": email,
            "email_verified": True,
            "iat": int(now),
            "exp": int(now + LIFE_S),
        }
        if compute_engine is not None:
            claims["google"] = {"compute_engine": compute_engine}
        return jwt.encode(claims, self._key, algorithm="RS256", headers={"kid": self._kid})

    def access(self, principal: Principal, now: float) -> tuple[str, int]:
        """Return an opaque access token and its lifetime in virtual seconds."""
        claims = {"email": principal.email, "vm": principal.vm, "exp": int(now + LIFE_S)}
        return _PREFIX + jwt.encode(claims, self._secret, algorithm="HS256"), int(LIFE_S)

    def read(self, token: str, now: float) -> Principal | None:
        """Return the holder of an access token; None if the token is forged, expired, or of another cloud."""
        if not token.startswith(_PREFIX):
            return None
        signed = token.removeprefix(_PREFIX)
        try:  # PyJWT would compare the expiry with the real clock
            claims = jwt.decode(signed, self._secret, algorithms=["HS256"], options={"verify_exp": False})
        except jwt.InvalidTokenError:
            return None
        return Principal(claims["email"], claims["vm"]) if now < claims["exp"] else None


def _load_key(path: Path) -> rsa.RSAPrivateKey:
    if path.exists():
        # Written below, by this cloud: to check it as a stranger's takes a tenth of a second of each start.
        key = serialization.load_pem_private_key(path.read_bytes(), None, unsafe_skip_rsa_key_validation=True)
        assert isinstance(key, rsa.RSAPrivateKey)
        return key
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_private(path, text)
    return key


def _load_secret(path: Path) -> bytes:
    if not path.exists():
        _write_private(path, secrets.token_bytes(32))
    return path.read_bytes()


def _write_private(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.rename(path)


def operator_token(folder: Path) -> str:
    """Return the operator's token of the cloud in ``folder``; the first call makes it, readable by its owner only."""
    path = folder / OPERATOR_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text()
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    return path.read_text()


class RequestGuard:
    """Checks each request before any other code reads it. ``now`` returns the virtual time, by which tokens expire."""

    def __init__(self, folder: Path, tokens: Tokens, now: Callable[[], float]) -> None:
        self._operator = operator_token(folder).encode()
        self._tokens = tokens
        self._now = now

    def principal(self, request: Request) -> Principal | None:
        """Return the holder of the request's bearer token; None without a valid token."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        if hmac.compare_digest(token.strip().encode(), self._operator):
            return OPERATOR
        return self._tokens.read(token.strip(), self._now())

    def refusal(self, request: Request) -> ApiError | None:
        """Return why a request of the API is refused; None if it is allowed."""
        foreign = foreign_refusal(request, frozenset())
        if foreign is not None or request.url.path in OPEN:
            return foreign
        principal = self.principal(request)
        if principal is None:
            return ApiError(401, "authError", "Request had invalid authentication credentials.")
        if principal.vm and request.url.path.startswith("/local/"):
            return forbidden(f"Required permission for '{request.url.path}' is not held by {principal.email}")
        return _content_refusal(request)


def foreign_refusal(request: Request, names: frozenset[str]) -> ApiError | None:
    """Return the 403 for a request that a web page may have sent; None for any other request.

    ``names``: the names that the ``Host`` header may contain; ``localhost`` and 127.x.x.x are always accepted.
    """
    if "origin" in request.headers:
        return forbidden("Requests with an Origin header are refused: no web page may call this cloud.")
    host = _host(request.headers.get("host", ""))
    if not is_loopback(host) and host not in names:
        return forbidden("The Host header must name an address of this machine.")
    return None


def _host(header: str) -> str:
    host, _, port = header.rpartition(":")
    return (host if host and port.isdecimal() else header).strip("[]").lower()


def _content_refusal(request: Request) -> ApiError | None:
    """Return the 415 for a body that is neither JSON nor an upload or batch; None if the body is allowed."""
    # A browser lets a web page send some other types to any server; it asks the server first (preflight) about JSON.
    empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if empty or kind == "application/json" or request.url.path.startswith(_BINARY):
        return None
    return ApiError(415, "unsupportedMediaType", f"Content-Type {kind!r}: must be application/json.")
