"""AWS Signature Version 4 for request headers. Pure: standard library only, no clock, no network.

The agent signs by itself because importing botocore takes 28 MB and 90 ms. The tests compare this module's results
with botocore's byte for byte. Presigned URLs and signed chunks are not supported.

Source: AWS, "Create a signed AWS API request" (IAM User Guide), and S3's exceptions to it.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, urlsplit

ALGORITHM = "AWS4-HMAC-SHA256"
CONTENT_SHA256 = "X-Amz-Content-SHA256"
SECURITY_TOKEN = "X-Amz-Security-Token"  # noqa: S105 - a header's name
# Headers that a proxy or the HTTP library may change on the way.
UNSIGNED = {
    *("baggage", "connection", "expect", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
    *("traceparent", "tracestate", "trailer", "transfer-encoding", "upgrade", "user-agent", "x-amzn-trace-id"),
}
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Credentials:
    """Access keys. ``token``: the session token of temporary keys; "" for a user's own keys."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Scope:
    """The region and service that a signature is valid for."""

    region: str
    service: str  # "lambda" for a function's URL, "s3"


def sign(
    credentials: Credentials,
    scope: Scope,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body_sha256: str,
    at: float,
) -> dict[str, str]:
    """Sign a request; return ``headers`` with the signature's headers added.

    Args:
        url: the address as it is sent, with path and query percent-encoded.
        headers: all headers that must arrive unchanged; Host may be missing, since the HTTP library adds it.
        body_sha256: the body's SHA-256 in hex.
        at: the time in unix seconds; AWS refuses a signature whose time is more than five minutes off.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    ours = {"authorization", "x-amz-date", SECURITY_TOKEN.lower(), CONTENT_SHA256.lower()}
    sent = {name: value for name, value in headers.items() if name.lower() not in ours}
    sent["X-Amz-Date"] = stamp
    if credentials.token:
        sent[SECURITY_TOKEN] = credentials.token
    if scope.service == "s3":
        sent[CONTENT_SHA256] = body_sha256
    split = urlsplit(url)
    signed = {name.lower(): " ".join(value.split()) for name, value in sent.items() if name.lower() not in UNSIGNED}
    signed.setdefault("host", host_of(split))
    names = ";".join(sorted(signed))
    lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    canonical = "\n".join((method.upper(), _path(split, scope), _query(split), lines, names, body_sha256))
    where = f"{stamp[:8]}/{scope.region}/{scope.service}/aws4_request"
    text = "\n".join((ALGORITHM, stamp, where, hashlib.sha256(canonical.encode()).hexdigest()))
    signature = _hmac(_key(credentials, scope, stamp[:8]), text).hex()
    credential = f"{credentials.access_key}/{where}"
    sent["Authorization"] = f"{ALGORITHM} Credential={credential}, SignedHeaders={names}, Signature={signature}"
    return sent


def host_of(split: SplitResult) -> str:
    """Return the Host header that an HTTP library sends for this address."""
    host = split.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if split.port in (None, _PORTS.get(split.scheme)) else f"{host}:{split.port}"


def _path(split: SplitResult, scope: Scope) -> str:
    """Return the canonical path: unchanged for S3; for other services with ``..`` resolved, and encoded once more."""
    if scope.service == "s3":
        return split.path
    parts: list[str] = []
    for part in split.path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    resolved = "/" + "/".join(parts)
    return quote(resolved + "/" if parts and split.path.endswith("/") else resolved, safe="/~")


def _query(split: SplitResult) -> str:
    pairs = sorted(pair.partition("=")[::2] for pair in split.query.split("&")) if split.query else ()
    return "&".join(f"{name}={value}" for name, value in pairs)


def _key(credentials: Credentials, scope: Scope, day: str) -> bytes:
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (day, scope.region, scope.service, "aws4_request"):
        key = _hmac(key, part)
    return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
