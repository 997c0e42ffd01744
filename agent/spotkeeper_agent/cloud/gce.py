"""Compute Engine's metadata server: one recursive long poll carries preemption, maintenance and attributes.

Google's paths and JSON appear only here. Tokens are kept until shortly before they expire.
"""

from __future__ import annotations

import base64
import os
import re
import threading
from typing import TYPE_CHECKING

import msgspec
import requests
from msgspec import Struct

from spotkeeper.clock import Clock, from_rfc3339
from spotkeeper.contract import codec
from spotkeeper_agent.cloud.metadata import ANSWER_S, CONNECT_S, EXPIRY_MARGIN_S, GCE_HOST, HANG_S, HOST, MetadataError
from spotkeeper_agent.cloud.notice import Cause, CloudWarning, Instance, scheduled

if TYPE_CHECKING:
    from spotkeeper_agent.cloud.gcs import Gcs

STORAGE = "https://storage.googleapis.com"
HOUR_S = 3600.0  # from the event to the end of a machine with accelerators
NEXT_S = 2 * HOUR_S  # a window that begins later than this belongs to another maintenance
ACCELERATED = re.compile(r"(a[2-9]x?|g[2-9])-")


class _Upcoming(Struct, frozen=True):
    """The value of ``upcoming-maintenance``. A recursive answer has its keys in camel case, others with underscores."""

    in_tree: str = msgspec.field(default="", name="windowStartTime")
    by_itself: str = msgspec.field(default="", name="window_start_time")
    status: str = msgspec.field(default="", name="maintenanceStatus")  # PENDING, ONGOING, COMPLETE
    status_by_itself: str = msgspec.field(default="", name="maintenance_status")


class _Scheduling(Struct, frozen=True):
    preemptible: str = "FALSE"


class _Tree(Struct, frozen=True, rename="camel"):
    """The fields of ``instance/?recursive=true`` that the agent uses."""

    id: int | str
    name: str
    zone: str
    attributes: dict[str, str] = {}
    preempted: str = "FALSE"
    maintenance_event: str = "NONE"
    upcoming_maintenance: msgspec.Raw = msgspec.Raw(b"null")  # without one: "NONE", {}, {"error": ...}
    machine_type: str = ""
    scheduling: _Scheduling = _Scheduling()


class Gce:
    """One machine. ``host``: host and port of the metadata server, by default from the environment."""

    def __init__(self, clock: Clock, host: str | None = None) -> None:
        self._clock = clock
        self.url = f"http://{host or os.environ.get(GCE_HOST, HOST)}/"
        self._root = f"{self.url}computeMetadata/v1/"
        self._identity: dict[str, tuple[str, float]] = {}
        self._access: tuple[str, float] = ("", 0.0)
        self._calm = False  # whether an earlier read showed no maintenance
        self._turned: float | None = None  # when a read after that first showed maintenance
        self._lock = threading.Lock()

    def instance(self) -> Instance:
        return self._read(self._get("instance/", {"recursive": "true", "alt": "json"})[0])

    def wait(self, mark: str) -> tuple[Instance, str]:
        query = {
            "recursive": "true",
            "alt": "json",
            "wait_for_change": "true",
            "last_etag": mark,
            "timeout_sec": f"{HANG_S:.0f}",
        }
        text, etag = self._get("instance/", query, HANG_S + 10.0)
        return self._read(text), etag or mark

    def prove(self, function: str, path: str, body: bytes) -> dict[str, str]:
        """Return headers with two tokens: one that the function checks, and one that Cloud Run checks.

        Cloud Run removes its token's signature, so the function cannot check that token. The function's token is valid
        for this path only and arrives unchanged.
        """
        return {
            "Authorization": f"Bearer {self.identity_token(function + path)}",
            "X-Serverless-Authorization": f"Bearer {self.identity_token(function)}",
            "Content-Type": "application/json",
        }

    def identity_token(self, audience: str) -> str:
        """Return a JWT that names this instance and is signed by the cloud.

        Raises:
            MetadataError: the server gives no token.
        """
        with self._lock:
            token, expires = self._identity.get(audience, ("", 0.0))
        if token and expires - self._clock.now() > EXPIRY_MARGIN_S:
            return token
        query = {"audience": audience, "format": "full"}
        token = self._get("instance/service-accounts/default/identity", query)[0].decode().strip()
        with self._lock:
            self._identity[audience] = (token, _expiry(token))
        return token

    def forget_identity(self) -> None:
        with self._lock:
            self._identity.clear()

    def loose(self) -> str:
        return ""  # the server answers only with its header, and never through a proxy

    def storage(self, root: str, bucket: str) -> Gcs:
        from spotkeeper_agent.cloud.gcs import Gcs

        return Gcs(root or STORAGE, bucket, self.access_token)

    def access_token(self) -> str:
        """Return an OAuth token of the machine's service account, for requests to the bucket.

        Raises:
            MetadataError: the server gives no token.
        """
        with self._lock:
            token, expires = self._access
        if token and expires - self._clock.steady() > EXPIRY_MARGIN_S:
            return token
        text = self._get("instance/service-accounts/default/token", {})[0]
        try:
            answer = codec.decode(text, _MachineToken)
        except msgspec.DecodeError as error:
            raise MetadataError(f"access token: {error}") from None
        with self._lock:
            self._access = (answer.access_token, self._clock.steady() + answer.expires_in)
        return answer.access_token

    def _read(self, text: bytes) -> Instance:
        try:
            tree = codec.decode(text, _Tree, strict=False)
        except msgspec.DecodeError as error:
            raise MetadataError(f"instance/: {error}") from None
        now = self._clock.now()
        ends = self._ends(tree, now)
        return Instance(
            uid=str(tree.id),
            name=tree.name,
            zone=tree.zone.rpartition("/")[2],
            attributes=tree.attributes,
            warning=warning_of(tree.preempted, tree.maintenance_event, bytes(tree.upcoming_maintenance), now, ends),
        )

    def _ends(self, tree: _Tree, now: float) -> float | None:
        """Return when maintenance ends this machine: an hour after its warning appeared.

        None: no warning, or no known end. The end is not known if the first read already had the warning, so that its
        age is unknown, or if Google warns this machine only a minute ahead.
        """
        with self._lock:
            if not _ending(tree.maintenance_event):
                self._calm, self._turned = True, None
            elif self._calm and self._turned is None:
                self._turned = now
            turned = self._turned
        return turned + HOUR_S if turned is not None and _has_an_hour(tree) else None

    def _get(self, path: str, query: dict[str, str], answer_s: float = ANSWER_S) -> tuple[bytes, str]:
        """Return body and etag.

        Raises:
            MetadataError: the status is not 200, or no answer came.
        """
        try:
            with requests.Session() as session:
                session.trust_env = False
                answer = session.get(
                    self._root + path,
                    params=query,
                    headers={"Metadata-Flavor": "Google"},
                    timeout=(CONNECT_S, answer_s),
                )
        except requests.RequestException as error:
            raise MetadataError(f"{path}: {type(error).__name__}") from None
        if answer.status_code != 200:
            raise MetadataError(f"{path}: HTTP {answer.status_code}")
        return answer.content, answer.headers.get("ETag", "")


class _MachineToken(Struct, frozen=True):
    access_token: str
    expires_in: float


class _Claims(Struct, frozen=True):
    exp: float = 0.0


def warning_of(
    preempted: str, event: str, upcoming: bytes, now: float, ends: float | None = None
) -> CloudWarning | None:
    """Return the warning in these metadata values, if any. A live migration is no warning: the machine continues.

    Args:
        upcoming: JSON of any shape; JSON that cannot be decoded counts as no maintenance.
        ends: the time at which maintenance ends the machine, if no window is announced.
    """
    if preempted.upper() == "TRUE":
        return CloudWarning(Cause.PREEMPTED)
    start = _window(upcoming)
    if not _ending(event):
        return None if start is None else scheduled(start, now)
    # A window that has begun does not show when the machine ends; one next week belongs to another maintenance.
    announced = start is not None and now < start <= now + NEXT_S
    return CloudWarning(Cause.MAINTENANCE, start if announced else ends)


def _window(upcoming: bytes) -> float | None:
    """Return when the announced maintenance window begins; None if none is announced or the maintenance is over."""
    try:
        told = codec.decode(upcoming, _Upcoming)
        over = (told.status or told.status_by_itself).upper() == "COMPLETE"
        return None if over else from_rfc3339(told.in_tree or told.by_itself)
    except ValueError:  # DecodeError is one
        return None


def _ending(event: str) -> bool:
    return event.upper().startswith("TERMINATE")


def _has_an_hour(tree: _Tree) -> bool:
    """Whether Google announces this machine's maintenance an hour ahead, and not only a minute.

    An hour is given to machines with accelerators that are not spot machines. The metadata does not show accelerators
    of N1 machines, so these count as machines without accelerators.

    Source: https://cloud.google.com/compute/docs/gpus/gpu-host-maintenance
    """
    accelerated = ACCELERATED.match(tree.machine_type.rpartition("/")[2]) is not None
    return accelerated and tree.scheduling.preemptible.upper() != "TRUE"


def _expiry(token: str) -> float:
    """Return ``exp`` of a JWT, unverified; 0 if it cannot be read."""
    try:
        claims = token.split(".")[1]
        return codec.decode(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)), _Claims).exp
    except (IndexError, ValueError):
        return 0.0
