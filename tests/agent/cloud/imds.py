"""A strict stand-in for EC2's instance metadata service: version 2 only, every refusal as AWS describes it.

Judged by botocore's own clients (``test_ec2.py``). Time is the test's: tokens and keys expire when it says so.
Source: AWS, "Use the Instance Metadata Service", "Instance metadata categories".
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests import web

TOKEN, TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
ROLE = "spotkeeper-node"
REGION = "eu-west-1"
UID = "i-0123456789abcdef0"


class Imds:
    """One instance's. ``tree``: what is under ``/latest/``, by path; a test puts notices there and takes them away.

    ``hops``: how far the asking process is from the instance (1: on it, 2: in a container of its own network).
    """

    def __init__(self, uid: str = UID, name: str = "sk-test-abcdefgh-n0000-a1", **tags: str) -> None:
        self.hop_limit, self.hops = 1, 1
        self.enabled = True
        self.version_1 = False  # HttpTokens: optional
        self.statuses: dict[str, int] = {}  # of a path, instead of an answer
        self.ahead_s = 0.0  # of this server's clock
        self.asked: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._tokens: dict[str, float] = {}
        self._keys = 0
        document = {
            "instanceId": uid,
            "availabilityZone": f"{REGION}a",
            "region": REGION,
            "privateIp": "127.0.0.1",
            "accountId": "123456789012",
            "version": "2017-09-30",
        }
        self.tree: dict[str, str] = {
            "dynamic/instance-identity/document": json.dumps(document, indent=2),
            "meta-data/instance-id": uid,
            "meta-data/placement/availability-zone": f"{REGION}a",
            "meta-data/placement/availability-zone/": f"{REGION}a",
            "meta-data/placement/region": REGION,
            "meta-data/iam/security-credentials/": ROLE,
        }
        self.tags({"Name": name, **tags})
        self.new_keys()
        stand_in = self

        class Handler(web.Handler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_PUT(self) -> None:
                stand_in.put(self)

            def do_GET(self) -> None:
                stand_in.get(self)

            def date_time_string(self, _: float | None = None) -> str:
                return super().date_time_string(stand_in.now())

        self._server = web.Server(Handler)
        self.url = self._server.url
        self.close = self._server.close

    # ---------------------------------------------------------------- what tests set

    def tags(self, tags: dict[str, str]) -> None:
        with self.lock:
            self.tree["meta-data/tags/instance"] = self.tree["meta-data/tags/instance/"] = "\n".join(tags)
            self.tree |= {f"meta-data/tags/instance/{name}": value for name, value in tags.items()}

    def new_keys(self, life_s: float = 6 * 3600, **changes: Any) -> None:
        """The role's next keys."""
        self._keys += 1
        keys = {
            "Code": "Success",
            "LastUpdated": iso(self.now()),
            "Type": "AWS-HMAC",
            "AccessKeyId": f"ASIAEXAMPLE{self._keys:08d}",
            "SecretAccessKey": f"secret/{self._keys}+",
            "Token": f"IQoJb3JpZ2luX2Vj//{self._keys}==",
            "Expiration": iso(self.now() + life_s),
        }
        with self.lock:
            self.tree[f"meta-data/iam/security-credentials/{ROLE}"] = json.dumps(keys | changes)

    def put_at(self, path: str, value: object) -> None:
        with self.lock:
            self.tree[path] = value if isinstance(value, str) else json.dumps(value)

    def take_away(self, path: str) -> None:
        with self.lock:
            self.tree.pop(path, None)

    def forget_tokens(self) -> None:
        with self.lock:
            self._tokens.clear()

    def now(self) -> float:
        return time.time() + self.ahead_s

    # ---------------------------------------------------------------- the server

    def put(self, handler: BaseHTTPRequestHandler) -> None:
        self._drain(handler)
        with self.lock:
            self.asked["PUT"] += 1
        ttl = handler.headers.get(TTL, "")
        if handler.path != "/latest/api/token":
            answer(handler, 404)
        elif not self.enabled or "X-Forwarded-For" in handler.headers:
            answer(handler, 403)
        elif self.hops > self.hop_limit:
            handler.close_connection = True  # the answer's packets die on the way
            handler.connection.close()
        elif not ttl.isdigit() or not 1 <= int(ttl) <= 21_600:
            answer(handler, 400)
        else:
            with self.lock:
                token = f"AQAEAL{len(self._tokens)}{self.asked['PUT']}=="
                self._tokens[token] = self.now() + int(ttl)
            answer(handler, 200, token, {TTL: ttl})

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        self._drain(handler)
        path = handler.path.removeprefix("/latest/")
        with self.lock:
            self.asked[path] += 1
            good = self._tokens.get(handler.headers.get(TOKEN, ""), 0.0) > self.now()
            found = self.tree.get(path)
            status = self.statuses.get(path)
        if not self.enabled:
            answer(handler, 403)
        elif not good and not (self.version_1 and TOKEN not in handler.headers):
            answer(handler, 401)
        elif status is not None:
            answer(handler, status)
        else:
            answer(handler, 404 if found is None else 200, found or "")

    def _drain(self, handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers.get("Content-Length", "0")))


def answer(handler: BaseHTTPRequestHandler, status: int, text: str = "", headers: dict[str, str] | None = None) -> None:
    with contextlib.suppress(OSError):
        handler.send_response(status)
        for name, value in {"Server": "EC2ws", "Content-Type": "text/plain", **(headers or {})}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(text.encode())))
        handler.end_headers()
        handler.wfile.write(text.encode())


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def http_date(at: float) -> str:
    """As ``events/maintenance/scheduled`` has them."""
    return datetime.fromtimestamp(at, UTC).strftime("%d %b %Y %H:%M:%S GMT")


@contextlib.contextmanager
def instance(**fields: Any) -> Iterator[Imds]:
    made = Imds(**fields)
    try:
        yield made
    finally:
        made.close()
