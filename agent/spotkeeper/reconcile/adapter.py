"""What the adapters of all clouds share: which verb an action is, what a failed call means, and how a look over zones
is put together from lists that may not come. Knows no cloud; a cloud's lists and verbs are ``<cloud>_lists.py`` and
``<cloud>_verbs.py``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from spotkeeper.clock import Clock
from spotkeeper.reconcile.addresses import ENV, LOOPBACK, PRIVATE, Addresses
from spotkeeper.reconcile.wire import NoAnswerError, is_loopback
from spotkeeper.spec.cloud import (
    Action,
    AttachDisk,
    Class,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    Result,
)

LOOK_S = 24.0  # a whole look; a round has 50 s
LIST_S = 10.0  # one answer

T = TypeVar("T")
Meaning = tuple[Class, str]  # what an answer means, and how the cloud puts it
log = logging.getLogger(__name__)


# -- looking


class ListError(Exception):
    """A list did not come whole; what it would have shown is unknown. ``throttled``: asking on would make it worse."""

    def __init__(self, why: str, throttled: bool = False) -> None:
        super().__init__(why)
        self.throttled = throttled


class Looked(Struct, Generic[T], frozen=True):
    """What a list over zones gave, and the zones that answered without a warning."""

    items: tuple[T, ...]
    answered: frozenset[str]


def look(
    what: str, whole: Callable[[], Looked[T]], of_zone: Callable[[str], list[T]], zones: Sequence[str]
) -> Looked[T]:
    """One question for all zones; where that fails, one for each of ``zones``, but where the cloud throttles."""
    try:
        return whole()
    except ListError as error:
        log.warning("no list of %s over all zones: %s", what, error)
        if error.throttled:
            return Looked((), frozenset())
    items: list[T] = []
    answered: set[str] = set()
    for zone in zones:
        try:
            items += of_zone(zone)
        except ListError as error:
            log.warning("zone %s did not answer for %s: %s", zone, what, error)
            continue
        answered.add(zone)
    return Looked(tuple(items), frozenset(answered))


def known(found: Iterable[T | None]) -> tuple[T, ...]:
    """Without what is not ours."""
    return tuple(one for one in found if one is not None)


def addresses_around(endpoint: str) -> Addresses:
    """What machines may have: as the environment says; else private ones, and loopback where the cloud is on it."""
    here = is_loopback(urlsplit(endpoint).hostname or "")
    return Addresses(os.environ.get(ENV) or (f"{PRIVATE},{LOOPBACK}" if here else PRIVATE))


# -- doing


class Verbs(Protocol):
    """A call for each kind of action; ACCEPTED means on its way, not done. ``ends``: of ``time.monotonic``.

    What is there already, or gone already, was what was wanted, and is ACCEPTED.

    Raises (all):
        NoAnswerError, ListError, msgspec.DecodeError, UnicodeDecodeError: the call may or may not have happened.
    """

    def insert_vm(self, action: InsertVm, ends: float) -> Meaning: ...

    def delete_vm(self, action: DeleteVm, ends: float) -> Meaning:
        """By its unique id."""

    def create_disk(self, action: CreateDisk, ends: float) -> Meaning: ...

    def attach_disk(self, action: AttachDisk, ends: float) -> Meaning:
        """By the machine's unique id: a healthy machine may have taken over the name."""

    def detach_disk(self, action: DetachDisk, ends: float) -> Meaning:
        """Never by force: that leaves the machine writing to what another one may mount."""

    def delete_disk(self, action: DeleteDisk, ends: float) -> Meaning: ...

    def create_snapshot(self, action: CreateSnapshot, ends: float) -> Meaning: ...

    def delete_snapshot(self, action: DeleteSnapshot, ends: float) -> Meaning: ...


def perform(verbs: Verbs, action: Action, deadline_s: float, clock: Clock) -> Result:
    """Make one call."""
    try:
        kind, detail = _call(verbs, action, time.monotonic() + deadline_s)
    except (NoAnswerError, ListError) as error:
        kind, detail = Class.AMBIGUOUS, str(error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        kind, detail = Class.AMBIGUOUS, f"an answer of another form: {error}"
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
