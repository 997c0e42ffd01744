"""A key set on loopback and tokens signed by its keys, right and wrong, for tests of the HTTP interface."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from tests import web

ISSUER = "https://accounts.google.com"
AUDIENCE = "https://function.example/sk"
AGENTS = AUDIENCE + "/v1/sync"
NODES = "nodes@p.iam.gserviceaccount.com"
CLOCK_MAIL = "clock@p.iam.gserviceaccount.com"
NOW = 1_800_000_000.0
UID, VM, ZONE = "4242", "sk-demo-abcd2345-n0000-a1", "us-x1-a"


def key(name: str, bits: int = 2048) -> rsa.RSAPrivateKey:
    """One key per name and process: making them is slow."""
    return _key(name, bits)


@cache
def _key(_: str, bits: int) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def public_jwk(name: str, bits: int = 2048, **changes: Any) -> dict[str, Any]:
    jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key(name, bits).public_key()))
    return {**jwk, "kid": name, "alg": "RS256", "use": "sig", **changes}


def claims(**changes: Any) -> dict[str, Any]:
    """Those of a VM; ``google=None`` and the like drop a claim."""
    machine = {
        "instance_id": UID,
        "instance_name": VM,
        "zone": ZONE,
        "project_id": "p",
        "project_number": 12,
        "instance_creation_timestamp": int(NOW),
    }
    base: dict[str, Any] = {
        "iss": ISSUER,
        "aud": AGENTS if changes.get("google", machine) else AUDIENCE,
        "azp": "1",
        "sub": "1",
        "email": NODES,
        "email_verified": True,
        "iat": int(NOW),
        "exp": int(NOW) + 3600,
        "google": {"compute_engine": machine},
    }
    merged = {**base, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def machine(**changes: Any) -> dict[str, Any]:
    return {"google": {"compute_engine": {**claims()["google"]["compute_engine"], **changes}}}


def sign(payload: Mapping[str, Any], kid: str = "one", algorithm: str = "RS256", **header: Any) -> str:
    return jwt.encode(dict(payload), key("one"), algorithm=algorithm, headers={"kid": kid, **header})


def bearer(payload: Mapping[str, Any] | None = None, **how: Any) -> str:
    return "Bearer " + sign(claims() if payload is None else payload, **how)


def part(value: Any) -> str:
    """A segment of a token, from JSON or from raw bytes."""
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@dataclass
class Issuer:
    """The key set's server; ``fetched`` counts."""

    url: str = ""
    keys: list[dict[str, Any]] = field(default_factory=lambda: [public_jwk("one")])
    raw: tuple[int, bytes] | None = None
    fetched: int = 0


@contextmanager
def issuer() -> Iterator[Issuer]:
    state = Issuer()

    class Handler(web.Handler):
        def do_GET(self) -> None:
            state.fetched += 1
            status, data = state.raw or (200, json.dumps({"keys": state.keys}).encode())
            self.answer(status, data, **({"Location": state.url} if status == 302 else {}))

    with web.serving(Handler) as server:
        state.url = f"{server.url}/oauth2/v3/certs"
        yield state
