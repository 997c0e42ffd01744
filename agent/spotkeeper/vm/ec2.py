"""An EC2 instance: who it is, what is ahead of it, and its role's keys, from the metadata service.

There is no long poll: what cannot wait is asked for once a second, what is announced long before less often. What the
stack tells a machine is in its tags (``InstanceMetadataTags``), under the names that Compute Engine's attributes have.

Source: AWS, "Spot Instance interruption notices", "EC2 instance rebalance recommendations", "View scheduled events".
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from email.utils import mktime_tz, parsedate_tz
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.clock import Clock, from_rfc3339
from spotkeeper.spec import codec
from spotkeeper.vm.imds import Imds
from spotkeeper.vm.metadata import EXPIRY_MARGIN_S, FIRST, HANG_S, Instance, MetadataError
from spotkeeper.vm.notice import Cause, Sign, scheduled
from spotkeeper.vm.sigv4 import Credentials, Scope, sign

if TYPE_CHECKING:
    from spotkeeper.vm.s3 import S3

T = TypeVar("T")

POLL_S = 1.0  # virtual; of the 120 s that a notice gives, half a second is lost on average
POLL_FLOOR_S = 0.2  # real
REBALANCE_EVERY_S = 5.0  # virtual, as AWS advises
MAINTENANCE_EVERY_S = 60.0  # virtual; announced days ahead
TAGS_S = 120.0  # virtual; tags reach the metadata service some time after the machine is up
HIBERNATE_S = 10.0  # hibernation is announced when it begins
ROLE = "meta-data/iam/security-credentials/"
ACTION = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
MAINTENANCE = "meta-data/events/maintenance/scheduled"
_FUNCTION = re.compile(r"\.lambda-url\.([a-z0-9-]+)\.on\.aws\Z")


class _Document(Struct, frozen=True, rename="camel"):
    """The instance identity document, as far as it is read. Nobody is asked to believe it."""

    instance_id: str
    availability_zone: str
    region: str
    private_ip: str | None = None


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
    """``endpoint``: of the metadata service; None: as the environment says."""

    def __init__(self, clock: Clock, endpoint: str | None = None) -> None:
        self._clock = clock
        self._imds = Imds(clock, endpoint)
        self.url = self._imds.url
        self._lock = threading.Lock()
        self._about: tuple[Instance, str] | None = None  # without a sign; region
        self._began: float | None = None  # steady; when its tags were first asked for
        self._keys: tuple[Credentials, float] | None = None  # until when, by the wall clock
        self._asked: dict[str, tuple[float, str | None]] = {}  # by path: when (steady), and what was there

    def instance(self) -> Instance:
        return replace(self._describe()[0], sign=self._sign())

    def wait(self, mark: str) -> tuple[Instance, str]:
        end = self._clock.steady() + HANG_S
        while True:
            instance = self.instance()
            new = hashlib.sha256(msgspec.json.encode(instance)).hexdigest()
            if mark == FIRST or new != mark or self._clock.steady() >= end:
                return instance, new
            time.sleep(max(POLL_FLOOR_S, self._clock.real_s(POLL_S)))

    def prove(self, function: str, path: str, body: bytes) -> dict[str, str]:
        """IAM checks the signature and tells the function whose session signed: its name is the instance's id."""
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
        return "its metadata service answers version 1 as well, and so anybody's redirect" if open_to_all else ""

    def storage(self, root: str, bucket: str) -> S3:
        from spotkeeper.vm.s3 import S3

        return S3(root, bucket, self.region(), self.credentials, self._clock.now)

    def region(self) -> str:
        """
        Raises:
            MetadataError: it cannot be told now.
        """
        return self._describe()[1]

    def credentials(self) -> Credentials:
        """The keys of the instance profile's role; those before them for as long as they are good.

        Raises:
            MetadataError: the instance has no role, or no keys can be had.
        """
        with self._lock:
            held, now = self._keys, self._clock.now()
        if held is not None and held[1] - now > EXPIRY_MARGIN_S:
            return held[0]
        try:
            fresh = self._fresh_keys()
        except MetadataError:
            if held is not None and held[1] > now:
                return held[0]
            raise
        with self._lock:
            self._keys = fresh
        return fresh[0]

    def _fresh_keys(self) -> tuple[Credentials, float]:
        role = (self._imds.get(ROLE) or "").partition("\n")[0].strip()
        if not role:
            raise MetadataError(f"{ROLE}: the instance has no role: is there an instance profile in its template?")
        keys = _decode(ROLE + role, self._imds.get(ROLE + role), _Keys)
        if keys.code != "Success" or not (keys.access_key_id and keys.secret_access_key):
            raise MetadataError(f"{ROLE}{role}: {keys.code[:80] or 'no keys'}")
        made = Credentials(keys.access_key_id, keys.secret_access_key, keys.token)
        return made, _iso(ROLE + role, keys.expiration)

    def _describe(self) -> tuple[Instance, str]:
        """Who this is, which no longer changes once the tags are there.

        Raises:
            MetadataError: not yet.
        """
        if self._about is not None:
            return self._about
        path = "dynamic/instance-identity/document"
        document = _decode(path, self._imds.get(path), _Document)
        tags = self._tags()
        name = tags.get("Name", document.instance_id)
        address = document.private_ip or ""
        self._about = Instance(document.instance_id, name, document.availability_zone, address, tags), document.region
        return self._about

    def _tags(self) -> dict[str, str]:
        """All that the metadata service shows, once those of the stack are among them or are not awaited any more."""
        now = self._clock.steady()
        self._began = now if self._began is None else self._began
        names = (self._imds.get("meta-data/tags/instance") or "").split()
        if "sk-stack" not in names and now - self._began < TAGS_S:
            raise MetadataError("meta-data/tags/instance: no tag sk-stack yet; are InstanceMetadataTags enabled?")
        return {name: self._imds.get(f"meta-data/tags/instance/{name}") or "" for name in names}

    def _sign(self) -> Sign | None:
        now = self._clock.now()
        if text := self._look(ACTION, 0.0):
            return _action(text, now)
        if (text := self._look(MAINTENANCE, MAINTENANCE_EVERY_S)) and (sign := _maintenance(text, now)):
            return sign
        return Sign(Cause.REBALANCE) if self._look(REBALANCE, REBALANCE_EVERY_S) else None

    def _look(self, path: str, every_s: float) -> str | None:
        """What is at this path, not asked again sooner than ``every_s``."""
        now = self._clock.steady()
        asked = self._asked.get(path)
        if asked is not None and now - asked[0] < every_s:
            return asked[1]
        found = self._imds.get(path)
        self._asked[path] = now, found
        return found


def _action(text: str, now: float) -> Sign:
    action = _decode(ACTION, text, _Action)
    at = _iso(ACTION, action.time)
    return Sign(Cause.PREEMPTED, min(at, now + HIBERNATE_S) if action.action == "hibernate" else at)


def _maintenance(text: str, now: float) -> Sign | None:
    """The first event that is neither over nor called off. All kinds end what runs: stop, retirement, reboot."""
    events = _decode(MAINTENANCE, text, tuple[_Event, ...])
    try:
        starts = [_http_date(event.not_before) for event in events if event.state == "active"]
    except (ValueError, OverflowError):
        raise MetadataError(f"{MAINTENANCE}: a time that is none") from None
    return scheduled(min(starts), now) if starts else None


def _decode(path: str, text: str | None, kind: type[T]) -> T:
    """
    Raises:
        MetadataError: nothing is there, or something else.
    """
    if text is None:
        raise MetadataError(f"{path}: HTTP 404")
    try:
        return codec.decode(text.encode(), kind)
    except msgspec.DecodeError as error:
        raise MetadataError(f"{path}: {error}") from None


def _iso(path: str, text: str) -> float:
    """``2026-09-18T08:22:00Z`` as unix seconds.

    Raises:
        MetadataError: it is no such time.
    """
    try:
        return from_rfc3339(text)
    except ValueError:
        raise MetadataError(f"{path}: a time that is none") from None


def _http_date(text: str) -> float:
    """``21 Jan 2026 09:00:43 GMT`` as unix seconds. Raises ValueError."""
    parsed = parsedate_tz(text)
    if parsed is None:
        raise ValueError(text)
    return float(mktime_tz(parsed))
