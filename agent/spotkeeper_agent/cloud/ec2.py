"""EC2's metadata service, version 2 only: the instance's identity, interruption notices, its role's keys.

The service has no long poll: interruption notices are polled every second. Other events are announced long before and
polled less often. The stack's settings are in the instance's tags (``InstanceMetadataTags``), under the names of
Compute Engine's attributes. Every request carries a session token. Version 1 needs no token, so it would also answer
an attacker who can make some program on the machine send a request (SSRF).

Source: AWS, "Use the Instance Metadata Service to access instance metadata", "Spot Instance interruption notices",
"EC2 instance rebalance recommendations", "View scheduled events".
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import threading
import time
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.clock import Clock, from_rfc3339
from spotkeeper.contract import codec
from spotkeeper_agent.cloud.metadata import ANSWER_S, EC2_ENDPOINT, EXPIRY_MARGIN_S, FIRST, HANG_S, HOST, MetadataError
from spotkeeper_agent.cloud.notice import Cause, CloudWarning, Instance, scheduled
from spotkeeper_agent.cloud.sigv4 import Credentials, Scope, sign

if TYPE_CHECKING:
    from spotkeeper_agent.cloud.s3 import S3

T = TypeVar("T")

POLL_S = 1.0  # virtual; costs half a second of a 120 s notice on average
POLL_FLOOR_S = 0.2  # real
REBALANCE_EVERY_S = 5.0  # virtual, as AWS advises
MAINTENANCE_EVERY_S = 60.0  # virtual; announced days ahead
TAGS_S = 120.0  # virtual; the metadata service shows tags some time after the boot
HIBERNATE_S = 10.0  # hibernation is announced when it begins
ROLE = "meta-data/iam/security-credentials/"
ACTION = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
MAINTENANCE = "meta-data/events/maintenance/scheduled"
TTL_S = 21_600  # lifetime of a session token, the maximum
RENEW_S = 60.0  # virtual; a session token is renewed when less than this is left
TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name
TTL = "X-aws-ec2-metadata-token-ttl-seconds"
UNAUTHORIZED = 401
_FUNCTION = re.compile(r"\.lambda-url\.([a-z0-9-]+)\.on\.aws\Z")
_STORAGE = re.compile(r"\.([a-z0-9-]+)\.amazonaws\.com\Z")


@dataclass(frozen=True)
class _Response:
    status: int
    text: str
    ttl: str  # name of the header with a token's lifetime


class Imds:
    """A client of EC2's metadata service at ``endpoint``, by default the environment's. Thread-safe."""

    def __init__(self, clock: Clock, endpoint: str | None = None) -> None:
        self._clock = clock
        self.url = (endpoint or os.environ.get(EC2_ENDPOINT) or f"http://{HOST}").rstrip("/") + "/"
        self._token: tuple[str, float] = ("", 0.0)
        self._lock = threading.Lock()
        self._local = threading.local()

    def get(self, path: str) -> str | None:
        """Return the text at ``/latest/<path>``; None on 404.

        Raises:
            MetadataError: any other status, or no answer.
        """
        answer = self._ask("GET", path, {TOKEN: self._session_token()})
        if answer.status == UNAUTHORIZED:  # the service restarted, or a clock is ahead
            self._forget()
            answer = self._ask("GET", path, {TOKEN: self._session_token()})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise MetadataError(f"{path}: HTTP {answer.status}")
        return answer.text

    def answers_without_token(self, path: str) -> bool:
        """Whether version 1 of the service, which needs no token, is enabled.

        Raises:
            MetadataError: no answer.
        """
        return self._ask("GET", path, {}).status == 200

    def _session_token(self) -> str:
        """Return the session token; request a new token if the last one ends soon.

        Raises:
            MetadataError: the service gives no token.
        """
        with self._lock:
            token, ends = self._token
            now = self._clock.steady()
            if token and ends - now > RENEW_S:
                return token
            answer = self._ask("PUT", "api/token", {TTL: str(TTL_S)})
            if answer.status == 403:
                raise MetadataError("api/token: HTTP 403: the metadata service is off; set `HttpEndpoint` to `enabled`")
            if answer.status != 200 or not answer.text:
                raise MetadataError(f"api/token: HTTP {answer.status}")
            self._token = (answer.text, now + _seconds(answer.ttl))
            return answer.text

    def _forget(self) -> None:
        with self._lock:
            self._token = ("", 0.0)

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> _Response:
        """Send one request and return the answer, whatever its status; redirects are not followed.

        Raises:
            MetadataError: no answer.
        """
        connection = self._connection()
        while True:
            kept = connection.sock is not None
            try:
                connection.request(method, f"/latest/{path}", headers=headers)
                with connection.getresponse() as answer:
                    text = answer.read().decode(errors="replace")
                return _Response(answer.status, text, answer.headers.get(TTL, ""))
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                if kept:
                    continue  # the service may have closed the idle connection
                # The service sends its answer to PUT with a small IP TTL.
                hint = "; in a container, set the instance's metadata hop limit to 2" if method == "PUT" else ""
                raise MetadataError(f"{path}: {type(error).__name__}{hint}") from None

    def _connection(self) -> http.client.HTTPConnection:
        """Return this thread's connection. The library ``requests`` would need nine times the processor time."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            host = urlsplit(self.url).netloc
            connection = self._local.connection = http.client.HTTPConnection(host, timeout=ANSWER_S)
        return connection


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else float(TTL_S)


class _Document(Struct, frozen=True, rename="camel"):
    """The fields of the instance identity document that the agent uses. Its signature is not checked."""

    instance_id: str
    availability_zone: str
    region: str


class _Keys(Struct, frozen=True, rename="pascal"):
    code: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""
    token: str = ""
    expiration: str = ""


class _Action(Struct, frozen=True):
    action: str
    time: str


class _Event(Struct, frozen=True, rename="pascal"):
    not_before: str
    code: str = ""
    state: str = "active"


class Ec2:
    """One instance. ``endpoint``: the metadata service's address, by default from the environment."""

    def __init__(self, clock: Clock, endpoint: str | None = None) -> None:
        self._clock = clock
        self._imds = Imds(clock, endpoint)
        self.url = self._imds.url
        self._lock = threading.Lock()
        self._about: tuple[Instance, str] | None = None  # instance without its warning; region
        self._began: float | None = None  # steady; when the tags were first requested
        self._keys: tuple[Credentials, float] | None = None  # keys, and their expiry by the wall clock
        self._asked: dict[str, tuple[float, str | None]] = {}  # by path: when it was requested (steady), and its text

    def instance(self) -> Instance:
        return replace(self._describe()[0], warning=self._warning())

    def wait(self, mark: str) -> tuple[Instance, str]:
        end = self._clock.steady() + HANG_S
        while True:
            instance = self.instance()
            new = hashlib.sha256(msgspec.json.encode(instance)).hexdigest()
            if mark == FIRST or new != mark or self._clock.steady() >= end:
                return instance, new
            time.sleep(max(POLL_FLOOR_S, self._clock.real_s(POLL_S)))

    def prove(self, function: str, path: str, body: bytes) -> dict[str, str]:
        """Sign a request. IAM checks the signature and tells the function which instance has signed."""
        url = function + path
        found = _FUNCTION.search(urlsplit(url).hostname or "")
        scope = Scope(found[1] if found else self.region(), "lambda")
        headers = {"Content-Type": "application/json"}
        digest = hashlib.sha256(body).hexdigest()
        return sign(self.credentials(), scope, "POST", url, headers, digest, self._clock.now())

    def forget_identity(self) -> None:
        with self._lock:
            self._keys = None

    def loose(self) -> str:
        open_to_all = self._imds.answers_without_token("meta-data/instance-id")
        return "the metadata service also answers requests without a token (version 1)" if open_to_all else ""

    def storage(self, root: str, bucket: str) -> S3:
        from spotkeeper_agent.cloud.s3 import S3

        found = _STORAGE.search(urlsplit(root).hostname or "")  # of a machine in another region than the bucket
        return S3(root, bucket, found[1] if found else self.region(), self.credentials, self._clock.now)

    def region(self) -> str:
        """Return the instance's region.

        Raises:
            MetadataError: the service does not answer.
        """
        return self._describe()[1]

    def credentials(self) -> Credentials:
        """Return keys of the instance profile's role: new ones, or else the last ones until they expire.

        Raises:
            MetadataError: the instance has no role, or the service gives no keys.
        """
        with self._lock:
            known, now = self._keys, self._clock.now()
        if known is not None and known[1] - now > EXPIRY_MARGIN_S:
            return known[0]
        try:
            fresh = self._fresh_keys()
        except MetadataError:
            if known is not None and known[1] > now:
                return known[0]
            raise
        with self._lock:
            self._keys = fresh
        return fresh[0]

    def _fresh_keys(self) -> tuple[Credentials, float]:
        role = (self._imds.get(ROLE) or "").partition("\n")[0].strip()
        if not role:
            raise MetadataError(f"{ROLE}: the instance has no role; add an instance profile to its launch template")
        keys = _decode(ROLE + role, self._imds.get(ROLE + role), _Keys)
        if keys.code != "Success" or not (keys.access_key_id and keys.secret_access_key):
            raise MetadataError(f"{ROLE}{role}: {keys.code[:80] or 'no keys'}")
        made = Credentials(keys.access_key_id, keys.secret_access_key, keys.token)
        return made, _iso(ROLE + role, keys.expiration)

    def _describe(self) -> tuple[Instance, str]:
        """Return the instance, without the cloud's warnings, and its region. After one success the answer is cached.

        Raises:
            MetadataError: the service does not show the tags yet, or does not answer.
        """
        if self._about is not None:
            return self._about
        path = "dynamic/instance-identity/document"
        document = _decode(path, self._imds.get(path), _Document)
        tags = self._tags()
        name = tags.get("Name", document.instance_id)
        self._about = Instance(document.instance_id, name, document.availability_zone, tags), document.region
        return self._about

    def _tags(self) -> dict[str, str]:
        """Return the instance's tags. Until :data:`TAGS_S` seconds are over, raise if the stack's tags are missing."""
        now = self._clock.steady()
        self._began = now if self._began is None else self._began
        names = (self._imds.get("meta-data/tags/instance") or "").split()
        if "sk-stack" not in names and now - self._began < TAGS_S:
            raise MetadataError("meta-data/tags/instance: no tag `sk-stack` yet; is `InstanceMetadataTags` enabled?")
        return {name: self._imds.get(f"meta-data/tags/instance/{name}") or "" for name in names}

    def _warning(self) -> CloudWarning | None:
        now = self._clock.now()
        if text := self._poll(ACTION, 0.0):
            return _action(text, now)
        if (text := self._poll(MAINTENANCE, MAINTENANCE_EVERY_S)) and (warning := _maintenance(text, now)):
            return warning
        return CloudWarning(Cause.REBALANCE) if self._poll(REBALANCE, REBALANCE_EVERY_S) else None

    def _poll(self, path: str, every_s: float) -> str | None:
        """Return the text at a path, from a request that is at most ``every_s`` seconds old."""
        now = self._clock.steady()
        asked = self._asked.get(path)
        if asked is not None and now - asked[0] < every_s:
            return asked[1]
        found = self._imds.get(path)
        self._asked[path] = now, found
        return found


def _action(text: str, now: float) -> CloudWarning:
    action = _decode(ACTION, text, _Action)
    at = _iso(ACTION, action.time)
    return CloudWarning(Cause.PREEMPTED, min(at, now + HIBERNATE_S) if action.action == "hibernate" else at)


def _maintenance(text: str, now: float) -> CloudWarning | None:
    """Return the earliest active event as a warning. All kinds count: even a reboot interrupts training."""
    events = _decode(MAINTENANCE, text, tuple[_Event, ...])
    try:
        starts = [_http_date(event.not_before) for event in events if event.state == "active"]
    except (ValueError, OverflowError):
        raise MetadataError(f"{MAINTENANCE}: not a time") from None
    return scheduled(min(starts), now) if starts else None


def _decode(path: str, text: str | None, kind: type[T]) -> T:
    """Decode a path's text.

    Raises:
        MetadataError: the path has no text, or it cannot be decoded.
    """
    if text is None:
        raise MetadataError(f"{path}: HTTP 404")
    try:
        return codec.decode(text.encode(), kind)
    except msgspec.DecodeError as error:
        raise MetadataError(f"{path}: {error}") from None


def _iso(path: str, text: str) -> float:
    """Convert ``2026-09-18T08:22:00Z`` to unix seconds.

    Raises:
        MetadataError: the text is not a time.
    """
    try:
        return from_rfc3339(text)
    except ValueError:
        raise MetadataError(f"{path}: not a time") from None


def _http_date(text: str) -> float:
    """Convert ``21 Jan 2026 09:00:43 GMT`` to unix seconds. Raises ValueError."""
    parsed = parsedate_tz(text)
    if parsed is None:
        raise ValueError(text)
    return float(mktime_tz(parsed))
