"""The metadata server: what a machine may know about itself, at its own address.

Google's protocol: ``Metadata-Flavor: Google`` or 403, nothing through a proxy, folders end with a slash,
``recursive=true`` gives JSON with camel-cased keys, an ETag per subtree, and ``wait_for_change`` wakes only
for a change of the very subtree that was asked for. It reads the cloud's state and changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from spotkeeper.clock import Clock
from spotkeeper.local.tokens import Principal, Tokens
from spotkeeper.local.wire import JsonObject, JsonValue

ROOT = "/computeMetadata/v1/"
MAX_WAIT_S = 3600.0  # virtual, where the client sets no timeout_sec


@dataclass(frozen=True)
class Machine:
    """One look at a machine: its tree (kebab-case keys), identity and token claims."""

    tree: JsonObject
    principal: Principal
    claims: JsonObject | None  # google.compute_engine; None for a function


Look = Callable[[], Machine | None]


class MetadataServer:
    """For one address. ``look`` reads the present state; ``changed`` wakes those who wait."""

    def __init__(self, look: Look, tokens: Tokens, clock: Clock) -> None:
        self._look = look
        self._tokens = tokens
        self._clock = clock
        self._waiters: set[asyncio.Event] = set()

    def changed(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def answer(self, request: Request) -> Response:
        refusal = _refusal(request)
        if refusal is not None:
            return refusal
        if not request.url.path.startswith(ROOT):
            return await self._outside(request)
        path = request.url.path.removeprefix(ROOT)
        machine = self._look()
        if machine is None:
            return _plain("the machine is gone", 503)
        token = self._token(machine, path, request)
        if token is not None:
            return token
        if request.query_params.get("wait_for_change", "").lower() == "true":
            return await self._wait(path, request)
        return self._read(machine, path, request)

    async def _outside(self, request: Request) -> Response:
        """``/`` is how clients find out where they are."""
        if request.url.path in ("/", "/computeMetadata", "/computeMetadata/"):
            return _plain("computeMetadata/\n" if request.url.path == "/" else "v1/\n", 200)
        return _plain("Not Found", 404)

    def _read(self, machine: Machine, path: str, request: Request) -> Response:
        found, value = _lookup(machine.tree, path)
        if not found:
            return _plain(f"Error 404 (Not Found): {quote(path)}", 404)
        if isinstance(value, dict | list) and path and not path.endswith("/"):
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"{ROOT}{path}/{query}", 301, {"Metadata-Flavor": "Google"})
        body, kind = _render(value, request)
        headers = {"ETag": _etag(value), "Metadata-Flavor": "Google", "X-Frame-Options": "0"}
        return Response(body, 200, headers, media_type=kind)

    async def _wait(self, path: str, request: Request) -> Response:
        machine = self._look()
        known = request.query_params.get("last_etag") or (self._etag(machine, path) if machine else "")
        end = self._clock.now() + _timeout(request)
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            while machine is not None and self._etag(machine, path) == known:
                waiter.clear()
                left = self._clock.real_s(end - self._clock.now())
                if left <= 0 or gone.done():
                    break
                woken = asyncio.ensure_future(waiter.wait())
                await asyncio.wait({woken, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                machine = self._look()
        finally:
            gone.cancel()
            self._waiters.discard(waiter)
        return _plain("the machine is gone", 503) if machine is None else self._read(machine, path, request)

    def _etag(self, machine: Machine, path: str) -> str:
        return _etag(_lookup(machine.tree, path)[1])

    def _token(self, machine: Machine, path: str, request: Request) -> Response | None:
        """``token`` and ``identity`` are made on request and are in no listing's value."""
        match = re.fullmatch(r"instance/service-accounts/([^/]+)/(token|identity)", path)
        if not match or match[1] not in ("default", machine.principal.email):
            return None
        now = self._clock.now()
        if match[2] == "token":
            token, life = self._tokens.access(machine.principal, now)
            body = {"access_token": token, "expires_in": life, "token_type": "Bearer"}
            return Response(json.dumps(body), 200, {"Metadata-Flavor": "Google"}, media_type="application/json")
        audience = request.query_params.get("audience")
        if not audience:
            return _plain("non-empty audience parameter required", 400)
        full = request.query_params.get("format", "standard") == "full"
        return _plain(self._tokens.identity(machine.principal.email, audience, now, machine.claims if full else None))


def _refusal(request: Request) -> Response | None:
    if "x-forwarded-for" in request.headers:
        return _plain("Request with X-Forwarded-For header is not allowed", 403)
    if request.headers.get("metadata-flavor") != "Google" and request.url.path != "/":
        return _plain("Missing Metadata-Flavor:Google header.", 403)
    if request.method != "GET":
        return _plain("Method Not Allowed", 405)
    return None


def _plain(text: str, status: int = 200) -> Response:
    return PlainTextResponse(text, status, {"Metadata-Flavor": "Google"})


def _timeout(request: Request) -> float:
    try:
        return max(0.0, float(request.query_params.get("timeout_sec", MAX_WAIT_S)))
    except ValueError:
        return MAX_WAIT_S


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _lookup(tree: JsonValue, path: str) -> tuple[bool, JsonValue]:
    """Whether the path exists, and what is there."""
    at = tree
    for part in path.strip("/").split("/") if path.strip("/") else ():
        if isinstance(at, dict) and part in at:
            at = at[part]
        elif isinstance(at, list) and part.isdigit() and int(part) < len(at):
            at = at[int(part)]
        else:
            return False, None
    return True, at


def _etag(value: JsonValue) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _render(value: JsonValue, request: Request) -> tuple[str, str]:
    recursive = request.query_params.get("recursive", "").lower() == "true"
    alt = request.query_params.get("alt") or ("json" if recursive else "text")
    if isinstance(value, dict | list) and not recursive:
        names = value if isinstance(value, dict) else {str(i): item for i, item in enumerate(value)}
        text = "".join(f"{k}/\n" if isinstance(v, dict | list) else f"{k}\n" for k, v in names.items())
        return text, "application/text"
    if alt == "json":
        return json.dumps(_camel(value)), "application/json"
    return (_flat(value, "") if isinstance(value, dict | list) else str(value)), "application/text"


def _flat(value: JsonValue, prefix: str) -> str:
    if isinstance(value, dict):
        return "".join(_flat(item, f"{prefix}{key}/") for key, item in value.items())
    if isinstance(value, list):
        return "".join(_flat(item, f"{prefix}{i}/") for i, item in enumerate(value))
    return f"{prefix[:-1]} {value}\n"


def _camel(value: JsonValue, key: str = "") -> JsonValue:
    """Keys as the JSON view has them; what users chose (attribute names, e-mails) stays."""
    if isinstance(value, list):
        return [_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    keep = key in ("attributes", "service-accounts")
    return {(name if keep else _to_camel(name)): _camel(item, name) for name, item in value.items()}


def _to_camel(name: str) -> str:
    head, *rest = name.split("-")
    return head + "".join(part.capitalize() for part in rest)
