"""What the adapters of all clouds share: performing actions, listing all zones, and checking machines' addresses.

Each cloud's own lists and actions are in its ``listing.py`` and ``actions.py``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import (
    Action,
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    Result,
    ResultKind,
)
from spotkeeper.reconcile.clouds.http_client import NoAnswerError, is_loopback

LIST_S = 10.0  # time limit of one answer
ZONES_AT_ONCE = 16

T = TypeVar("T")
Meaning = tuple[ResultKind, str]  # the meaning of an answer, and the cloud's text
log = logging.getLogger(__name__)
ENV = "SPOTKEEPER_ADDRESSES"
# RFC 1918 and unique local IPv6. `is_private` also includes loopback, link-local (metadata) and documentation.
PRIVATE = "10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,fc00::/7"
LOOPBACK = "127.0.0.0/8"  # addresses in the one-machine cloud


# -- listings


class ListError(Exception):
    """A list is incomplete: what it lacks can still exist. ``throttled``: the cloud received too many requests."""

    def __init__(self, why: str, throttled: bool = False) -> None:
        super().__init__(why)
        self.throttled = throttled


class Looked(Struct, Generic[T], frozen=True):
    """The items of a list of all zones, and the zones that answered without a warning."""

    items: tuple[T, ...]
    answered: frozenset[str]


def look(
    what: str, whole: Callable[[], Looked[T]], of_zone: Callable[[str], list[T]], zones: Sequence[str]
) -> Looked[T]:
    """List all zones by one request. If it fails, list each of ``zones`` by itself, unless the cloud throttles.

    Zones are asked at the same time, so that one without an answer takes no time from the others.
    """
    try:
        return whole()
    except ListError as error:
        log.warning("listing the %s of all zones at once failed: %s", what, error)
        if error.throttled:
            return Looked((), frozenset())
    items: list[T] = []
    answered: set[str] = set()
    with ThreadPoolExecutor(ZONES_AT_ONCE) as pool:
        asked = {zone: pool.submit(of_zone, zone) for zone in zones}
    for zone, found in asked.items():
        try:
            items += found.result()
        except ListError as error:
            log.warning("zone %s: listing its %s failed: %s", zone, what, error)
            continue
        answered.add(zone)
    return Looked(tuple(items), frozenset(answered))


def known(found: Iterable[T | None]) -> tuple[T, ...]:
    """Return the items without None, which stands for a resource that does not belong to the stack."""
    return tuple(one for one in found if one is not None)


def label_number(labels: Mapping[str, str], name: str) -> int:
    """Return the number in a label; -1 if the label is missing or not a number."""
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


# -- addresses: a gang's master address is the listed address of that machine, and must be in these networks


class Addresses:
    """The networks in which machines' addresses must be; ``text`` lists them, separated by commas.

    Raises:
        ValueError: a part is not a network; the message names the setting.
    """

    def __init__(self, text: str = PRIVATE) -> None:
        try:
            self._networks: tuple[IPv4Network | IPv6Network, ...] = tuple(
                ip_network(part.strip()) for part in text.split(",") if part.strip()
            )
        except ValueError as error:
            raise ValueError(f"{ENV}={text!r}: {error}; want networks such as {PRIVATE}") from None
        self.holds = lru_cache(20_000)(self._holds)  # cached: all machines are listed every minute

    def _holds(self, text: str) -> bool:
        """Return whether the text is a plain address (no name, port or zone id) within the networks."""
        try:
            address: IPv4Address | IPv6Address = ip_address(text)
        except ValueError:
            return False
        return (
            str(address) == text
            and "%" not in text
            and any(address in network for network in self._networks if network.version == address.version)
        )


def addresses_around(endpoint: str) -> Addresses:
    """Return the networks in ``SPOTKEEPER_ADDRESSES``; by default private ones, and loopback if the API is local."""
    here = is_loopback(urlsplit(endpoint).hostname or "")
    return Addresses(os.environ.get(ENV) or (f"{PRIVATE},{LOOPBACK}" if here else PRIVATE))


# -- actions


class Verbs(Protocol):
    """A cloud's implementation of each action. The result ``ACCEPTED`` means that the action is under way, not done.

    ``ends`` is the deadline on ``time.monotonic``. Creating a resource that exists already, or deleting a resource that
    is gone, gives ``ACCEPTED`` too.

    Raises (all):
        NoAnswerError, ListError, msgspec.DecodeError, UnicodeDecodeError: the call may or may not have happened.
    """

    def insert_vm(self, action: InsertVm, ends: float) -> Meaning: ...

    def delete_vm(self, action: DeleteVm, ends: float) -> Meaning:
        """Delete the machine with this unique id, never another machine of the same name."""

    def create_disk(self, action: CreateDisk, ends: float) -> Meaning: ...

    def attach_disk(self, action: AttachDisk, ends: float) -> Meaning:
        """Attach to the machine with this unique id; another machine can have the same name by now."""

    def detach_disk(self, action: DetachDisk, ends: float) -> Meaning:
        """Detach without force: a machine could write to a disk detached by force while another machine mounts it."""

    def delete_disk(self, action: DeleteDisk, ends: float) -> Meaning: ...

    def create_snapshot(self, action: CreateSnapshot, ends: float) -> Meaning: ...

    def delete_snapshot(self, action: DeleteSnapshot, ends: float) -> Meaning: ...


def perform(verbs: Verbs, action: Action, deadline_s: float, clock: Clock) -> Result:
    """Perform one action. The result is ``AMBIGUOUS`` if the cloud gives no usable answer."""
    try:
        kind, detail = _call(verbs, action, time.monotonic() + deadline_s)
    except (NoAnswerError, ListError) as error:
        kind, detail = ResultKind.AMBIGUOUS, str(error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        kind, detail = ResultKind.AMBIGUOUS, f"the cloud's answer has an unexpected form: {error}"
    return Result(action, kind, detail, clock.now())


def _call(verbs: Verbs, action: Action, ends: float) -> Meaning:  # noqa: PLR0911 - one for each action
    match action:
        case InsertVm():
            return verbs.insert_vm(action, ends)
        case DeleteVm():
            return verbs.delete_vm(action, ends)
        case CreateDisk():
            return verbs.create_disk(action, ends)
        case AttachDisk():
            return verbs.attach_disk(action, ends)
        case DetachDisk():
            return verbs.detach_disk(action, ends)
        case DeleteDisk():
            return verbs.delete_disk(action, ends)
        case CreateSnapshot():
            return verbs.create_snapshot(action, ends)
        case DeleteSnapshot():
            return verbs.delete_snapshot(action, ends)
