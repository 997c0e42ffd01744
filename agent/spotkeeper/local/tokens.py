"""Who is speaking: identity tokens (RS256, one local key, a key set anyone may read) and access tokens.

Identity tokens carry Google's issuer, because the code that verifies them is the cloud's own; only whoever
is told this cloud's key set (``SPOTKEEPER_JWKS``) believes them. Times in them are virtual.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from spotkeeper.local.wire import JsonObject

ISSUER = "https://accounts.google.com"
LIFE_S = 3600.0  # virtual, as Google's
_PREFIX = "ya29.local."


@dataclass(frozen=True)
class Principal:
    """Whoever holds an access token: ``vm`` is the VM's path, or empty for a function or an operator."""

    email: str
    vm: str = ""


class Tokens:
    """One key pair and one secret per cloud, in its folder, readable by its owner only."""

    def __init__(self, folder: Path) -> None:
        self._key = _load_key(folder / "key.pem")
        self._secret = _load_secret(folder / "secret")
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self._key.public_key()))
        self._kid = hashlib.sha256(public["n"].encode()).hexdigest()[:16]
        self._jwk: JsonObject = {**public, "kid": self._kid, "alg": "RS256", "use": "sig"}

    def jwks(self) -> JsonObject:
        return {"keys": [self._jwk]}

    def identity(self, email: str, audience: str, now: float, compute_engine: JsonObject | None = None) -> str:
        """An identity token; ``compute_engine`` holds the claims that ``format=full`` adds for a VM."""
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
        """An opaque access token, and how long it holds (virtual seconds)."""
        body = json.dumps([principal.email, principal.vm, int(now + LIFE_S)]).encode()
        return f"{_PREFIX}{_b64(body)}.{_b64(self._sign(body))}", int(LIFE_S)

    def read(self, token: str, now: float) -> Principal | None:
        """Who an access token speaks for; None where it is not ours, forged or expired."""
        if not token.startswith(_PREFIX):
            return None
        text, _, signature = token.removeprefix(_PREFIX).partition(".")
        try:
            body = _unb64(text)
            if not hmac.compare_digest(self._sign(body), _unb64(signature)):
                return None
        except ValueError:
            return None
        email, vm, expires = json.loads(body)
        return Principal(email, vm) if now < expires else None

    def _sign(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, body, "sha256")


def _load_key(path: Path) -> rsa.RSAPrivateKey:
    if path.exists():
        key = serialization.load_pem_private_key(path.read_bytes(), None)
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


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
