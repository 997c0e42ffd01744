"""Compute Engine behind ``spec.cloud.Cloud``: one look, and one call per action. Decides nothing.

What is ours is known by label *and* name. A body says name, labels and placement; everything else comes
from the template Pulumi declared, and metadata never from here. No call waits for an operation: its
failure is found by the next listing, through the idempotency key.

Sources: https://cloud.google.com/compute/docs/reference/rest/v1 (bodies are checked against the discovery
document in the tests); error classes: ``gce_errors.py``.
"""

from __future__ import annotations

import builtins
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.clock import Clock
from spotkeeper.reconcile.addresses import ENV, LOOPBACK, PRIVATE, Addresses
from spotkeeper.reconcile.gce_advice import price_runs, question, supported
from spotkeeper.reconcile.gce_api import DEFAULT_ENDPOINT, Answer, Api, MetadataToken, NoAnswerError
from spotkeeper.reconcile.gce_errors import classify, detail_of, parse_error
from spotkeeper.reconcile.gce_fields import of_a_page, of_all_zones
from spotkeeper.reconcile.gce_wire import (
    ENDINGS,
    Aggregated,
    DiskIn,
    Id,
    InstanceIn,
    OperationIn,
    Page,
    SnapshotIn,
    by_label,
    disk_body,
    instance_body,
    is_partial,
    last_part,
    partial_url,
    to_disk,
    to_ran,
    to_result,
    to_snapshot,
    to_vm,
)
from spotkeeper.reconcile.wire import is_loopback
from spotkeeper.spec import codec, names
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
    Listing,
    Result,
    Snapshot,
)
from spotkeeper.spec.market import PriceRun
from spotkeeper.spec.stack import StackState

DEVICE = "sk-data"  # the agent mounts /dev/disk/by-id/google-sk-data
LOOK_S = 24.0  # a whole look; a round has 50 s
LIST_S = 10.0  # one answer
PARALLEL_LISTS = 8
PAGE = 500
MAX_PAGES = 200  # 100,000 things; a server that always names a next page must not hold a round for ever
REMEMBERED = 10_000
OPERATIONS = " OR ".join(f'operationType = "{kind}"' for kind in ("insert", *ENDINGS))
OPERATION_PAGES = 4  # newest first; older failures were seen by earlier rounds

T = TypeVar("T")
log = logging.getLogger(__name__)


class ListError(Exception):
    """A list did not come whole; what it would have shown is unknown."""


class Looked(Struct, Generic[T], frozen=True):
    """What a list over zones gave, and the zones that answered without a warning."""

    items: tuple[T, ...]
    answered: frozenset[str]


class Gce:
    """The cloud of one stack.

    Args:
        stack: what Pulumi declared; names pools, templates, zones and the project.
        api: where the calls go.
        clock: for the time in results.
        addresses: what its machines may have; by default, private ones.
    """

    def __init__(self, stack: StackState, api: Api, clock: Clock, addresses: Addresses | None = None) -> None:
        self._stack = stack
        self._api = api
        self._clock = clock
        self._addresses = addresses or Addresses()
        self._project = f"projects/{stack.project}"
        self._whole = False  # whether lists are asked for without naming fields
        self._asked: OrderedDict[str, InsertVm | CreateDisk] = OrderedDict()  # by idempotency key; to name failures

    # -- looking

    def list(self, stack: str) -> Listing:
        """One look over all zones, by label. A zone with an error or a warning is not in ``answered``.

        Machines and disks come from lists over *all* zones, so that one in a zone that has left the
        stack is still seen. Where such a list fails, each of the stack's zones is asked for itself.
        """
        zones = self._stack.zones()
        ends = time.monotonic() + LOOK_S
        with ThreadPoolExecutor(PARALLEL_LISTS) as pool:
            vms = pool.submit(self._look, "instances", InstanceIn, stack, zones, ends)
            disks = pool.submit(self._look, "disks", DiskIn, stack, zones, ends)
            snapshots = pool.submit(self._snapshots, stack, ends)
            past = [pool.submit(self._operations, zone, ends) for zone in zones]
            seen_vms, seen_disks = vms.result(), disks.result()
            answered = seen_vms.answered & seen_disks.answered
            found = snapshots.result()
            operations = {zone: future.result() for zone, future in zip(zones, past, strict=True)}
        return Listing(
            vms=tuple(vm for item in seen_vms.items if (vm := to_vm(item, stack, self._addresses)) is not None),
            disks=tuple(disk for item in seen_disks.items if (disk := to_disk(item, stack)) is not None),
            snapshots=found or (),
            # A snapshot that cannot be seen could be taken for one that must be made again.
            answered=answered if found is not None else frozenset(),
            results=tuple(result for zone, of in operations.items() for result in self._failed(stack, zone, of)),
            ran=tuple(ran for zone, of in operations.items() for ran in to_ran(of, stack, zone)),
        )

    def _look(self, what: str, kind: type[T], stack: str, zones: tuple[str, ...], ends: float) -> Looked[T]:
        try:
            return self._aggregated(what, kind, stack, zones, ends)
        except ListError as error:
            log.warning("aggregated list of %s: %s; asking each zone", what, error)
        items: builtins.list[T] = []
        answered: set[str] = set()
        for zone in zones:
            try:
                page = self._pages(f"zones/{zone}/{what}", kind, {"filter": by_label(stack)}, ends)
            except ListError as error:
                log.warning("zone %s did not answer for %s: %s", zone, what, error)
                continue
            items += page
            answered.add(zone)
        return Looked(tuple(items), frozenset(answered))

    def _aggregated(self, what: str, kind: type[T], stack: str, zones: tuple[str, ...], ends: float) -> Looked[T]:
        items: builtins.list[T] = []
        silent: set[str] = set()
        seen: set[str] = set(zones)
        query = {"filter": by_label(stack), "maxResults": str(PAGE), "fields": of_all_zones(what, kind)}
        for _ in range(MAX_PAGES):
            page = self._get(f"aggregated/{what}", query, Aggregated[kind], ends)  # type: ignore[valid-type]
            if page.error is not None:
                raise ListError("an error for a list")
            if is_partial(page.warning) and not page.unreachables:
                raise ListError(f"warning {page.warning.code if page.warning else ''}")
            silent |= {last_part(scope) for scope in page.unreachables}
            for scope, part in page.items.items():
                seen.add(last_part(scope))
                if is_partial(part.warning):
                    silent.add(last_part(scope))
                items += getattr(part, what)
            if not page.next_page_token:
                return Looked(tuple(items), frozenset(seen - silent))
            query["pageToken"] = page.next_page_token
        raise ListError(f"more than {MAX_PAGES} pages")

    def _snapshots(self, stack: str, ends: float) -> tuple[Snapshot, ...] | None:
        """None: not known."""
        try:
            found = self._pages("global/snapshots", SnapshotIn, {"filter": by_label(stack)}, ends)
        except ListError as error:
            log.warning("snapshots did not answer: %s", error)
            return None
        return tuple(snapshot for item in found if (snapshot := to_snapshot(item, stack)) is not None)

    def _operations(self, zone: str, ends: float) -> builtins.list[OperationIn]:
        """What was made and what ended lately. Advisory: where this list fails, a later one tells."""
        query = {"filter": OPERATIONS, "orderBy": "creationTimestamp desc"}
        try:
            return self._pages(f"zones/{zone}/operations", OperationIn, query, ends, OPERATION_PAGES)
        except ListError as error:
            log.warning("operations of zone %s did not answer: %s", zone, error)
            return []

    def _failed(self, stack: str, zone: str, operations: builtins.list[OperationIn]) -> Iterable[Result]:
        """Inserts that were accepted and failed since."""
        now = self._clock.now()  # a time of the cloud's future would keep its offer cold until then
        found = (to_result(item, stack, zone, self._asked) for item in operations)
        return (replace(result, at=min(result.at, now)) for result in found if result is not None)

    def _pages(
        self, path: str, kind: type[T], query: dict[str, str], ends: float, newest_pages: int | None = None
    ) -> builtins.list[T]:
        """The whole list, or its first pages where only the newest matter."""
        query = {**query, "maxResults": str(PAGE), "fields": of_a_page(kind)}
        items: builtins.list[T] = []
        for _ in range(newest_pages or MAX_PAGES):
            page = self._get(path, query, Page[kind], ends)  # type: ignore[valid-type]
            if page.error is not None:
                raise ListError("an error for a list")
            if page.warning is not None and is_partial(page.warning):
                raise ListError(f"warning {page.warning.code}")
            items += page.items
            if not page.next_page_token:
                return items
            query["pageToken"] = page.next_page_token
        if newest_pages is None:
            raise ListError(f"more than {MAX_PAGES} pages")
        return items

    def _get(self, path: str, query: dict[str, str], kind: type[T], ends: float) -> T:
        asked = {name: value for name, value in query.items() if name != "fields"} if self._whole else query
        left = min(LIST_S, ends - time.monotonic())
        if left <= 0:
            raise ListError(f"{path}: no time left in this look")
        try:
            answer = self._api.call("GET", f"{self._project}/{path}", left, asked)
        except NoAnswerError as error:
            raise ListError(str(error)) from error
        if answer.status == 400 and "fields" in asked:  # never a reason to see nothing
            log.warning("%s: %s; asking for whole answers", path, parse_error(answer.status, answer.body)[1])
            self._whole = True
            return self._get(path, query, kind, ends)
        if answer.status != 200:
            raise ListError(parse_error(answer.status, answer.body)[1])
        try:
            return codec.decode(answer.body, kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ListError(f"{path}: an answer that is no list: {error}") from error

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        """Spot prices of the pool's machine type in the stack's region; None where the cloud does not tell them."""
        found = self._stack.pool(pool)
        if found is None or not supported(found.machine_type):
            return None
        path = f"regions/{self._stack.region}/advice/capacityHistory"
        try:
            answer = self._post(path, {}, question(found.machine_type), deadline_s)
        except NoAnswerError as error:
            log.warning("prices of pool %s: %s", pool, error)
            return None
        if answer.status != 200:
            log.info("prices of pool %s: %s", pool, parse_error(answer.status, answer.body)[1])
            return None
        return price_runs(answer.body)

    # -- doing

    def perform(self, action: Action, deadline_s: float) -> Result:
        """Make one call. Never raises for what a cloud can answer; ACCEPTED means on its way, not done."""
        make: Callable[[float], tuple[Class, str]]
        match action:
            case InsertVm():
                make = partial(self._insert_vm, action)
            case DeleteVm():
                make = partial(self._delete, f"zones/{action.zone}/instances/{action.uid}")
            case CreateDisk():
                make = partial(self._create_disk, action)
            case AttachDisk():
                make = partial(self._attach, action)
            case DetachDisk():
                make = partial(self._detach, action)
            case DeleteDisk():
                make = partial(self._delete, f"zones/{action.zone}/disks/{action.disk}")
            case CreateSnapshot():
                make = partial(self._create_snapshot, action)
            case DeleteSnapshot():
                make = partial(self._delete, f"global/snapshots/{action.name}")
        try:
            kind, detail = make(deadline_s)
        except NoAnswerError as error:
            kind, detail = Class.AMBIGUOUS, str(error)
        return Result(action, kind, detail, self._clock.now())

    def _insert_vm(self, action: InsertVm, deadline_s: float) -> tuple[Class, str]:
        pool = self._stack.pool(action.pool)
        template = pool.templates.get(action.model.value) if pool else None
        if pool is None or not template:
            return Class.PERMANENT, f"pool {action.pool!r} has no {action.model.value} template"
        query = {
            "sourceInstanceTemplate": partial_url(template),
            "requestId": names.idempotency_key(action.uid, "insert", action.rank, action.attempt, action.zone),
        }
        self._remember(query["requestId"], action)
        path = f"zones/{action.zone}/instances"
        return self._create(path, query, instance_body(self._stack.stack, pool, action), deadline_s)

    def _create_disk(self, action: CreateDisk, deadline_s: float) -> tuple[Class, str]:
        pool = self._stack.pool(action.pool)
        if pool is None:
            return Class.PERMANENT, f"no pool {action.pool!r} in the stack"
        query = {"requestId": names.idempotency_key(action.uid, "disk", action.rank, action.number, action.zone)}
        self._remember(query["requestId"], action)
        body = disk_body(self._stack, pool, action)
        return self._create(f"zones/{action.zone}/disks", query, body, deadline_s)

    def _remember(self, key: str, action: InsertVm | CreateDisk) -> None:
        """An operation that fails later does not say which pool and model it was for; this process may know."""
        self._asked[key] = action
        while len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)

    def _create(
        self, path: str, query: dict[str, str], body: dict[str, object], deadline_s: float
    ) -> tuple[Class, str]:
        """A creation with an idempotency key. The name being there already is what was wanted."""
        ends = time.monotonic() + deadline_s
        answer = self._post(path, query, body, deadline_s)
        if answer.status == 409:
            return Class.ACCEPTED, "is there already"
        kind, detail = outcome(answer)
        if kind is Class.ACCEPTED and (dead := self._replayed(path, str(body["name"]), answer, ends)):
            return Class.DEAD_KEY, dead
        return kind, detail

    def _replayed(self, path: str, name: str, answer: Answer, ends: float) -> str:
        """Why the key is used up, or "". A key seen before gives the old operation, ended, though its thing is gone."""
        operation = _operation(answer)
        if operation is None or operation.status != "DONE":
            return ""
        found = self._api.call("GET", f"{self._project}/{path}/{name}", ends - time.monotonic())
        if found.status == 404:
            return f"the key's {name} was made and is gone"
        if found.status != 200:
            return ""
        there = codec.decode(found.body, Id)
        return "" if there.id == operation.target_id else f"the key's {name} is gone, another has its name"

    def _attach(self, action: AttachDisk, deadline_s: float) -> tuple[Class, str]:
        """By the machine's unique id: a healthy machine may have taken over the name."""
        source = f"{self._project}/zones/{action.zone}/disks/{action.disk}"
        body: dict[str, object] = {
            "source": source,
            "deviceName": DEVICE,
            "mode": "READ_WRITE",
            "type": "PERSISTENT",
            "autoDelete": False,
        }
        return outcome(self._post(f"zones/{action.zone}/instances/{action.vm_uid}/attachDisk", {}, body, deadline_s))

    def _detach(self, action: DetachDisk, deadline_s: float) -> tuple[Class, str]:
        path = f"zones/{action.zone}/instances/{action.vm_uid}/detachDisk"
        answer = self._post(path, {"deviceName": DEVICE}, None, deadline_s)
        if answer.status == 404 or (answer.status == 400 and b"No attached disk" in answer.body):
            return Class.ACCEPTED, "was not attached"
        return outcome(answer)

    def _create_snapshot(self, action: CreateSnapshot, deadline_s: float) -> tuple[Class, str]:
        stack = self._stack.stack
        disk = names.disk_name(stack, action.job, action.rank, action.number)
        copy = names.disk_name(stack, action.job, action.rank, action.copy)
        labels = {
            names.LABEL_STACK: stack,
            names.LABEL_JOB: action.job,
            names.LABEL_RANK: str(action.rank),
        }
        path = f"zones/{action.zone}/disks/{disk}/createSnapshot"
        answer = self._post(path, {}, {"name": copy, "labels": labels}, deadline_s)
        return (Class.ACCEPTED, "is there already") if answer.status == 409 else outcome(answer)

    def _delete(self, path: str, deadline_s: float) -> tuple[Class, str]:
        answer = self._api.call("DELETE", f"{self._project}/{path}", deadline_s)
        return (Class.ACCEPTED, "was gone") if answer.status == 404 else outcome(answer)

    def _post(self, path: str, query: dict[str, str], body: dict[str, object] | None, deadline_s: float) -> Answer:
        return self._api.call("POST", f"{self._project}/{path}", deadline_s, query, body)


def open_gce(stack: StackState, clock: Clock, endpoint: str | None = None) -> Gce:
    """The stack's cloud with this machine's identity.

    Args:
        endpoint: root of the Compute API; None means Google's. Plain http is taken for loopback only,
            and gets a token only where ``GCE_METADATA_HOST`` names who gives it.
    """
    root = endpoint or DEFAULT_ENDPOINT
    wants_token = root.startswith("https://") or "GCE_METADATA_HOST" in os.environ
    api = Api(root, MetadataToken(clock) if wants_token else None)
    here = is_loopback(urlsplit(root).hostname or "")  # then its machines are on this one
    return Gce(stack, api, clock, Addresses(os.environ.get(ENV) or (f"{PRIVATE},{LOOPBACK}" if here else PRIVATE)))


def outcome(answer: Answer) -> tuple[Class, str]:
    """What the answer to a mutation means: 200 with a failed operation is a failure."""
    if not 200 <= answer.status < 300:
        return parse_error(answer.status, answer.body)
    operation = _operation(answer)
    if operation is None:
        return Class.AMBIGUOUS, f"HTTP {answer.status} without an operation"
    if operation.error is not None and operation.error.errors:
        status, errors = operation.http_error_status_code, operation.error.errors
        return classify(status, errors), detail_of(status, errors)
    return Class.ACCEPTED, ""


def _operation(answer: Answer) -> OperationIn | None:
    try:
        return codec.decode(answer.body, OperationIn)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
