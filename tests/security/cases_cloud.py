"""What the cloud and the bucket answer: refusals, halves, lies, and nothing at all."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any

from msgspec.structs import replace

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
    Listing,
    ResultKind,
    VmStatus,
)
from spotkeeper.contract.record import Phase
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.clouds.gce.api import Api
from spotkeeper.reconcile.clouds.gce.cloud import Gce
from spotkeeper.reconcile.clouds.http_client import Answer
from tests.reconcile.clouds.gce import compute
from tests.reconcile.clouds.gce.compute import (
    DISK,
    JOB,
    STACK,
    UID,
    VM,
    A,
    B,
    failed,
    instance,
    operation,
    refusal,
    scopes,
)
from tests.security.cases_identity import Cases
from tests.security.cases_text import Scripted
from tests.security.site import JOB as OURS
from tests.security.site import Shot, Site

INSERT = InsertVm(JOB, UID, 7, 3, "gpu", A, Model.SPOT)
CREATE = CreateDisk(JOB, UID, 7, 1, "gpu", A)
COPY = CreateSnapshot(JOB, UID, 7, 1, A, 2)
CREATIONS: tuple[Action, ...] = (INSERT, CREATE, COPY)
OTHERS: tuple[Action, ...] = (
    DeleteVm(VM, "4242", A),
    AttachDisk(DISK, VM, "4242", A),
    DetachDisk(DISK, VM, "4242", A),
    DeleteDisk(DISK, A),
    DeleteSnapshot(DISK),
)
ACTIONS = (*CREATIONS, *OTHERS)
DONE_TO_US = (ResultKind.ACCEPTED, ResultKind.IN_USE, ResultKind.AMBIGUOUS, ResultKind.PERMANENT, ResultKind.DEAD_KEY)


def answer(scripted: dict[str, Any] | bytes, status: int = 200) -> Answer:
    if isinstance(scripted, bytes):
        return Answer(status, scripted)
    plain = dict(scripted)
    return Answer(plain.pop("_status", status), json.dumps(plain).encode())


def gce(script: Callable[[str, str], Answer]) -> Gce:
    return Gce(STACK, Scripted(script), Clock())


def means(action: Action, reply: Answer, *kinds: ResultKind) -> None:
    result = gce(lambda *_: reply).perform(action, 5)
    assert result.action == action and result.kind in kinds, result
    assert len(result.detail) <= 300 and "\n" not in result.detail


def told(actions: Sequence[Action], replies: Sequence[Answer], *kinds: ResultKind) -> Cases:
    for action, (number, reply) in itertools.product(actions, enumerate(replies)):
        label = f"{type(action).__name__} {number}"
        yield label, lambda action=action, reply=reply: means(action, reply, *kinds)


# -- replies


def exists(_: Site) -> Cases:
    """409 for our own name is what was wanted; whose it is, the listing's labels say."""
    words = ("alreadyExists", "ALREADY_EXISTS", "duplicate", "conflict", "")
    replies = [*(answer(refusal(409, word)) for word in words), answer(b"<html>", 409), answer(b"", 409)]
    yield from told(CREATIONS, replies, ResultKind.ACCEPTED)
    yield from told(OTHERS, replies[:2], *DONE_TO_US)

    def foreign(labels: dict[str, str], name: str) -> None:
        def script(_: str, path: str) -> Answer:
            page = scopes("instances", us_x1_a=[instance(name=name, labels=labels)], us_x1_b=[])
            return answer(page if path.endswith("aggregated/instances") else {})

        assert gce(script).list("demo").vms == (), "another's machine was taken for ours"

    ours = compute.names.labels("demo", "gpu", JOB, 7, 3)
    for key in ("sk-job", "sk-node", "sk-attempt"):
        for value in ("x", "99", "-1", "0"):
            yield f"{key}={value}", lambda key=key, value=value: foreign(ours | {key: value}, VM)


def failed_operation(_: Site) -> Cases:
    for code, kind in (
        ("ZONE_RESOURCE_POOL_EXHAUSTED", ResultKind.CAPACITY),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", ResultKind.CAPACITY),
        ("QUOTA_EXCEEDED", ResultKind.QUOTA),
        ("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", ResultKind.IN_USE),
        ("RATE_LIMIT_EXCEEDED", ResultKind.THROTTLED),
        ("INTERNAL_ERROR", ResultKind.AMBIGUOUS),
        ("INVALID_USAGE", ResultKind.PERMANENT),
    ):
        yield from told(CREATIONS, [answer(failed(code)), answer(failed(code, 400))], kind)


def partial(_: Site) -> Cases:
    """What did not come whole proves nothing in its zone: nothing there is lost, moved or an orphan."""

    def check(what: str, page: dict[str, Any], silent: str) -> None:
        def script(_: str, path: str) -> Answer:
            if path.endswith(f"aggregated/{what}"):
                return answer(page)
            if f"zones/{silent}/{what}" in path or (what == "snapshots" and path.endswith("/snapshots")):
                return answer(refusal(503, "backendError"))
            return answer(scopes("instances", us_x1_a=[], us_x1_b=[]) if "aggregated" in path else {})

        assert silent not in gce(script).list("demo").answered

    for what, zone, code in itertools.product(
        ("instances", "disks"),
        (A, B),
        ("UNREACHABLE", "PARTIAL_SUCCESS", "NOT_CRITICAL_ERROR", "FIELD_VALUE_OVERRIDEN", "X"),
    ):
        warned = {"items": {f"zones/{zone}": {"warning": {"code": code, "message": "x"}}}}
        yield f"{what} {zone} {code}", lambda w=what, p=warned, z=zone: check(w, p, z)
        whole = {"items": {}, "warning": {"code": code, "message": "x"}, "unreachables": [f"zones/{zone}"]}
        yield f"{what} {zone} {code} unreachable", lambda w=what, p=whole, z=zone: check(w, p, z)
    for zone in (A, B):
        yield f"snapshots {zone}", lambda z=zone: check("snapshots", {}, z)


@contextmanager
def showing(site: Site, listing: Listing) -> Iterator[None]:
    kept, site.cloud.listing = site.cloud.listing, listing
    site.cloud.asked.clear()
    try:
        yield
    finally:
        site.cloud.listing = kept
        site.put_back()


def survives(site: Site, listing: Listing, times: int = 1) -> None:
    """Rounds over this picture end no job, delete no disk and no machine that the record holds."""
    with showing(site, listing):
        for _ in range(times):
            record = site.store.records[OURS][0]
            live = {slot.uid for node in record.nodes for slot in (node.cur, node.next) if slot is not None}
            site.cloud.asked.clear()
            shot = Shot(b"{}", site.clock_token(), f"/v1/notify/{OURS}")
            assert site.ask(shot)[0] == 200
            after = site.store.records[OURS][0]
            assert after.phase is Phase.RUN and [r.disk for r in after.nodes] == [r.disk for r in record.nodes]
            assert all(new.top - old.top <= 1 for old, new in zip(record.nodes, after.nodes, strict=True))
            kept = live & {slot.uid for node in after.nodes for slot in (node.cur, node.next) if slot is not None}
            for action in site.cloud.asked:
                assert not isinstance(action, DeleteDisk | CreateSnapshot)
                assert not (isinstance(action, DeleteVm) and action.uid in kept)


def empty_list(site: Site) -> Cases:
    whole = site.cloud.listing
    for size in range(1, 4):
        for zones in itertools.combinations(("z-a", "z-b", "z-c"), size):
            for gone in (("vms",), ("disks",), ("vms", "disks"), ("vms", "disks", "snapshots"), ()):
                changes: dict[str, Any] = dict.fromkeys(gone, ())
                seen = replace(whole, answered=frozenset(zones), **changes)
                yield f"{zones} without {gone}", lambda seen=seen: survives(site, seen, 2)


def stale_list(site: Site) -> Cases:
    whole = site.cloud.listing
    for drop in range(1, 8):
        for status in (VmStatus.PENDING, VmStatus.RUNNING, VmStatus.STOPPING, VmStatus.DEAD):
            vms = tuple(replace(vm, status=status) if drop & 1 << vm.node and vm.job else vm for vm in whole.vms)
            yield f"nodes {drop:03b} {status.value}", lambda vms=vms: survives(site, replace(whole, vms=vms))
        disks = tuple(replace(one, users=()) if drop & 1 << one.node else one for one in whole.disks)
        yield f"disks {drop:03b} free", lambda disks=disks: survives(site, replace(whole, disks=disks))


def dead_token(_: Site) -> Cases:
    """The key's operation is over and its thing is gone, or another has its name: the attempt is dead."""

    def check(action: Action, there: Answer, done: dict[str, Any], *kinds: ResultKind) -> None:
        def script(method: str, _: str) -> Answer:
            return answer(done) if method == "POST" else there

        assert gce(script).perform(action, 5).kind in kinds

    done = operation(status="DONE", targetId="4242", progress=100)
    gone = [answer(refusal(404, word)) for word in ("notFound", "NOT_FOUND", "")]
    other = [answer(instance(id=uid)) for uid in ("1", "42420", "9999999999999999999", "")]
    for action, reply in itertools.product((INSERT, CREATE), [*gone, *other]):
        yield (
            f"{type(action).__name__} {reply.status}",
            lambda a=action, r=reply: check(a, r, done, ResultKind.DEAD_KEY),
        )
    unknown = [answer(refusal(503, "backendError")), answer(b"<html>", 502), answer(refusal(403, "forbidden"))]
    unknown += [answer(instance(id="4242")), answer(refusal(429, "rateLimitExceeded")), answer(b"", 500)]
    for action, reply in itertools.product((INSERT, CREATE), unknown):
        yield (
            f"{type(action).__name__} {reply.status} not known",
            lambda a=action, r=reply: check(a, r, done, ResultKind.ACCEPTED),
        )
    for action, status in itertools.product((INSERT, CREATE), ("RUNNING", "PENDING")):
        running = operation(status=status, targetId="4242")
        yield f"{type(action).__name__} {status}", lambda a=action, o=running: check(a, gone[0], o, ResultKind.ACCEPTED)


def mismatch(_: Site) -> Cases:
    words = ("invalid", "badRequest", "required", "IDEMPOTENT_PARAMETER_MISMATCH", "INVALID_ARGUMENT")
    replies = [answer(refusal(400, word, "requestId was used with another body")) for word in words]
    yield from told(CREATIONS, [*replies, *(answer(failed(word, 400)) for word in words)], ResultKind.PERMANENT)


def forbidden(_: Site) -> Cases:
    """The same status for three different days."""
    for word, kind in (
        ("quotaExceeded", ResultKind.QUOTA),
        ("QUOTA_EXCEEDED", ResultKind.QUOTA),
        ("limitExceeded", ResultKind.QUOTA),
        ("rateLimitExceeded", ResultKind.THROTTLED),
        ("userRateLimitExceeded", ResultKind.THROTTLED),
        ("forbidden", ResultKind.PERMANENT),
        ("insufficientPermissions", ResultKind.PERMANENT),
        ("accessNotConfigured", ResultKind.PERMANENT),
        ("PERMISSION_DENIED", ResultKind.PERMANENT),
        ("", ResultKind.PERMANENT),
    ):
        yield from told(CREATIONS, [answer(refusal(403, word))], kind)


def proxy_page(_: Site) -> Cases:
    pages = [b"<html><h1>502 Bad Gateway</h1>", b"", b"\xff\xfe", b"{", b'{"error":"x"}', b"null"]
    replies = [answer(page, status) for page, status in zip(pages, (502, 500, 503, 504, 502, 599), strict=True)]
    yield from told((INSERT, CREATE, DeleteVm(VM, "4242", A), DeleteDisk(DISK, A)), replies, ResultKind.AMBIGUOUS)
    yield from told((INSERT, CREATE), [answer(page) for page in pages], ResultKind.AMBIGUOUS)

    def blind(page: bytes, status: int) -> None:
        assert gce(lambda *_: answer(page, status)).list("demo").answered == frozenset()

    for page, status in itertools.product(pages, (502, 200)):
        yield f"lists of {page[:9]!r} {status}", lambda page=page, status=status: blind(page, status)


@contextmanager
def dripping(first: bytes) -> Iterator[str]:
    """A server that gives a byte now and then, and never ends."""
    server = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            held.append(connection)
            connection.sendall(first)

    Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/compute/v1"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for one in held:
            one.close()


def slow_loris(_: Site) -> Cases:
    starts = (b"", b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")

    def check(first: bytes, action: Action) -> None:
        with dripping(first) as endpoint:
            result = Gce(STACK, Api(endpoint, None), Clock()).perform(action, 0.01)
        assert result.kind is ResultKind.AMBIGUOUS

    for first, action in itertools.product(starts, ACTIONS):
        yield f"{type(action).__name__} {first[-10:]!r}", lambda f=first, a=action: check(f, a)


class Fixed(Clock):
    def now(self) -> float:
        return 1_800_000_000.0


def wrong_clock(_: Site) -> Cases:
    """Times of the cloud are for people; what they say of the future is not believed."""

    def check(hours: int, code: str, verb: str) -> None:
        at = datetime.fromtimestamp(1_800_000_000.0, UTC) + timedelta(hours=hours)
        link = f"{compute.LINK}/zones/{A}/instances/{VM}"
        key = compute.names.idempotency_key(compute.JOB, UID, verb, 7, 3, A)
        entry = failed(code) | {"insertTime": at.isoformat(), "targetLink": link, "clientOperationId": key}

        def script(_: str, path: str) -> Answer:
            return answer({"items": [entry]} if path.endswith(f"{A}/operations") else {})

        (result,) = Gce(STACK, Scripted(script), Fixed()).list("demo").results
        assert result.at <= 1_800_000_000.0 and result.kind is not ResultKind.ACCEPTED

    for hours, code in itertools.product(
        (-24, -2, -1, 0, 1, 2, 24, 9000), ("QUOTA_EXCEEDED", "STOCKOUT", "INTERNAL_ERROR", "X")
    ):
        yield f"{hours:+d} h {code}", lambda hours=hours, code=code: check(hours, code, "insert")
