"""What the cloud and the bucket answer: refusals, halves, lies, and nothing at all."""

from __future__ import annotations

import builtins
import itertools
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any

import msgspec
from msgspec.structs import replace
from spotkeeper.clock import Clock
from spotkeeper.reconcile import paths
from spotkeeper.reconcile.gce import Gce
from spotkeeper.reconcile.gce_api import Api
from spotkeeper.reconcile.objects import Blob, ConflictError, UnavailableError
from spotkeeper.reconcile.round import Options
from spotkeeper.reconcile.store import ObjectStore, encode_versioned
from spotkeeper.reconcile.store_api import StoreError
from spotkeeper.reconcile.wire import Answer
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
    VmStatus,
)
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Phase

from tests.reconcile import compute
from tests.reconcile.compute import DISK, JOB, STACK, UID, VM, A, B, failed, instance, operation, refusal, scopes
from tests.security.cases_identity import Cases
from tests.security.cases_text import Scripted
from tests.security.site import JOB as OURS
from tests.security.site import Shot, Site, sync

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
DONE_TO_US = (Class.ACCEPTED, Class.IN_USE, Class.AMBIGUOUS, Class.PERMANENT, Class.DEAD_KEY)


def answer(scripted: dict[str, Any] | bytes, status: int = 200) -> Answer:
    if isinstance(scripted, bytes):
        return Answer(status, scripted)
    plain = dict(scripted)
    return Answer(plain.pop("_status", status), json.dumps(plain).encode())


def gce(script: Callable[[str, str], Answer]) -> Gce:
    return Gce(STACK, Scripted(script), Clock())


def means(action: Action, reply: Answer, *kinds: Class) -> None:
    result = gce(lambda *_: reply).perform(action, 5)
    assert result.action == action and result.kind in kinds, result
    assert len(result.detail) <= 300 and "\n" not in result.detail


def told(actions: Sequence[Action], replies: Sequence[Answer], *kinds: Class) -> Cases:
    for action, (number, reply) in itertools.product(actions, enumerate(replies)):
        label = f"{type(action).__name__} {number}"
        yield label, lambda action=action, reply=reply: means(action, reply, *kinds)


# -- replies


def exists(_: Site) -> Cases:
    """409 for our own name is what was wanted; whose it is, the listing's labels say."""
    words = ("alreadyExists", "ALREADY_EXISTS", "duplicate", "conflict", "")
    replies = [*(answer(refusal(409, word)) for word in words), answer(b"<html>", 409), answer(b"", 409)]
    yield from told(CREATIONS, replies, Class.ACCEPTED)
    yield from told(OTHERS, replies[:2], *DONE_TO_US)

    def foreign(labels: dict[str, str], name: str) -> None:
        def script(_: str, path: str) -> Answer:
            page = scopes("instances", us_x1_a=[instance(name=name, labels=labels)], us_x1_b=[])
            return answer(page if path.endswith("aggregated/instances") else {})

        assert gce(script).list("demo").vms == (), "another's machine was taken for ours"

    ours = compute.names.labels("demo", "gpu", JOB, 7, 3)
    for key in ("sk-job", "sk-rank", "sk-attempt"):
        for value in ("x", "99", "-1", "0"):
            yield f"{key}={value}", lambda key=key, value=value: foreign(ours | {key: value}, VM)


def failed_operation(_: Site) -> Cases:
    for code, kind in (
        ("ZONE_RESOURCE_POOL_EXHAUSTED", Class.CAPACITY),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", Class.CAPACITY),
        ("QUOTA_EXCEEDED", Class.QUOTA),
        ("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", Class.IN_USE),
        ("RATE_LIMIT_EXCEEDED", Class.THROTTLED),
        ("INTERNAL_ERROR", Class.AMBIGUOUS),
        ("INVALID_USAGE", Class.PERMANENT),
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
            live = {slot.uid for rank in record.ranks for slot in (rank.cur, rank.next) if slot is not None}
            site.cloud.asked.clear()
            shot = Shot(b"{}", site.clock_token(), f"/v1/poke/{OURS}")
            assert site.ask(shot)[0] == 200
            after = site.store.records[OURS][0]
            assert after.phase is Phase.RUN and [r.disk for r in after.ranks] == [r.disk for r in record.ranks]
            assert all(new.top - old.top <= 1 for old, new in zip(record.ranks, after.ranks, strict=True))
            kept = live & {slot.uid for rank in after.ranks for slot in (rank.cur, rank.next) if slot is not None}
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
            vms = tuple(replace(vm, status=status) if drop & 1 << vm.rank and vm.job else vm for vm in whole.vms)
            yield f"ranks {drop:03b} {status.value}", lambda vms=vms: survives(site, replace(whole, vms=vms))
        disks = tuple(replace(one, users=()) if drop & 1 << one.rank else one for one in whole.disks)
        yield f"disks {drop:03b} free", lambda disks=disks: survives(site, replace(whole, disks=disks))


def dead_token(_: Site) -> Cases:
    """The key's operation is over and its thing is gone, or another has its name: the attempt is dead."""

    def check(action: Action, there: Answer, done: dict[str, Any], *kinds: Class) -> None:
        def script(method: str, _: str) -> Answer:
            return answer(done) if method == "POST" else there

        assert gce(script).perform(action, 5).kind in kinds

    done = operation(status="DONE", targetId="4242", progress=100)
    gone = [answer(refusal(404, word)) for word in ("notFound", "NOT_FOUND", "")]
    other = [answer(instance(id=uid)) for uid in ("1", "42420", "9999999999999999999", "")]
    for action, reply in itertools.product((INSERT, CREATE), [*gone, *other]):
        yield f"{type(action).__name__} {reply.status}", lambda a=action, r=reply: check(a, r, done, Class.DEAD_KEY)
    unknown = [answer(refusal(503, "backendError")), answer(b"<html>", 502), answer(refusal(403, "forbidden"))]
    unknown += [answer(instance(id="4242")), answer(refusal(429, "rateLimitExceeded")), answer(b"", 500)]
    for action, reply in itertools.product((INSERT, CREATE), unknown):
        yield (
            f"{type(action).__name__} {reply.status} not known",
            lambda a=action, r=reply: check(a, r, done, Class.ACCEPTED),
        )
    for action, status in itertools.product((INSERT, CREATE), ("RUNNING", "PENDING")):
        running = operation(status=status, targetId="4242")
        yield f"{type(action).__name__} {status}", lambda a=action, o=running: check(a, gone[0], o, Class.ACCEPTED)


def mismatch(_: Site) -> Cases:
    words = ("invalid", "badRequest", "required", "IDEMPOTENT_PARAMETER_MISMATCH", "INVALID_ARGUMENT")
    replies = [answer(refusal(400, word, "requestId was used with another body")) for word in words]
    yield from told(CREATIONS, [*replies, *(answer(failed(word, 400)) for word in words)], Class.PERMANENT)


def forbidden(_: Site) -> Cases:
    """The same status for three different days."""
    for word, kind in (
        ("quotaExceeded", Class.QUOTA),
        ("QUOTA_EXCEEDED", Class.QUOTA),
        ("limitExceeded", Class.QUOTA),
        ("rateLimitExceeded", Class.THROTTLED),
        ("userRateLimitExceeded", Class.THROTTLED),
        ("forbidden", Class.PERMANENT),
        ("insufficientPermissions", Class.PERMANENT),
        ("accessNotConfigured", Class.PERMANENT),
        ("PERMISSION_DENIED", Class.PERMANENT),
        ("", Class.PERMANENT),
    ):
        yield from told(CREATIONS, [answer(refusal(403, word))], kind)


def proxy_page(_: Site) -> Cases:
    pages = [b"<html><h1>502 Bad Gateway</h1>", b"", b"\xff\xfe", b"{", b'{"error":"x"}', b"null"]
    replies = [answer(page, status) for page, status in zip(pages, (502, 500, 503, 504, 502, 599), strict=True)]
    yield from told((INSERT, CREATE, DeleteVm(VM, "4242", A), DeleteDisk(DISK, A)), replies, Class.AMBIGUOUS)
    yield from told((INSERT, CREATE), [answer(page) for page in pages], Class.AMBIGUOUS)

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
        assert result.kind is Class.AMBIGUOUS

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
        key = compute.names.idempotency_key(UID, verb, 7, 3, A)
        entry = failed(code) | {"insertTime": at.isoformat(), "targetLink": link, "clientOperationId": key}

        def script(_: str, path: str) -> Answer:
            return answer({"items": [entry]} if path.endswith(f"{A}/operations") else {})

        (result,) = Gce(STACK, Scripted(script), Fixed()).list("demo").results
        assert result.at <= 1_800_000_000.0 and result.kind is not Class.ACCEPTED

    for hours, code in itertools.product(
        (-24, -2, -1, 0, 1, 2, 24, 9000), ("QUOTA_EXCEEDED", "STOCKOUT", "INTERNAL_ERROR", "X")
    ):
        yield f"{hours:+d} h {code}", lambda hours=hours, code=code: check(hours, code, "insert")


# -- the store


@dataclass
class Shelf:
    """An object store in memory; ``before`` may raise, or change what is about to be read."""

    things: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    before: Callable[[str, str], None] = lambda _verb, _key: None
    after: Callable[[str, str], None] = lambda _verb, _key: None
    serial: int = 0

    def get(self, key: str) -> Blob | None:
        self.before("get", key)
        found = self.things.get(key)
        return Blob(found[0], str(found[1])) if found else None

    def refresh(self, key: str, known: Blob) -> Blob | None:
        return self.get(key)

    def create(self, key: str, data: bytes) -> str:
        self.before("create", key)
        if key in self.things:
            raise ConflictError(key)
        return self._set(key, data, "create")

    def replace(self, key: str, data: bytes, tag: str) -> str:
        self.before("replace", key)
        if key not in self.things or str(self.things[key][1]) != tag:
            raise ConflictError(key)
        return self._set(key, data, "replace")

    def get_many(self, keys: Sequence[str]) -> builtins.list[Blob | None]:
        return [self.get(key) for key in keys]

    def put(self, key: str, data: bytes) -> str:
        self.before("put", key)
        return self._set(key, data, "put")

    def list(self, prefix: str) -> builtins.list[str]:
        self.before("list", prefix)
        return sorted(key for key in self.things if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self.before("delete", key)
        self.things.pop(key, None)

    def _set(self, key: str, data: bytes, verb: str) -> str:
        self.serial += 1
        self.things[key] = (data, self.serial)
        self.after(verb, key)
        return str(self.serial)


@contextmanager
def shelved(site: Site) -> Iterator[Shelf]:
    """The site on a real object store's layer, with all of its documents."""
    shelf = Shelf()
    store = ObjectStore(shelf)
    memory = site.store
    store.put(paths.STACK, msgspec.json.encode(site.stack))
    for job, (record, _) in memory.records.items():
        assert store.create_record(record)
        store.put_spec(job, memory.specs[job])
        store.set_active(job)
        store.put_name(record.name, job)
        for fact in memory.facts.get(job, {}).values():
            store.put_fact(job, fact)
        if job in memory.progresses:
            store.put_progress(job, memory.progresses[job])
    if memory.alloc[0].nonce:
        store.cas_alloc(memory.alloc[0], "")
    runtime = site.runtime
    runtime._store, runtime._stack = store, None
    runtime._options = Options(settle_s=0.0, sleep=lambda _: None, parallel=1)
    try:
        yield shelf
    finally:
        runtime._store, runtime._stack = memory, None
        site.put_back()


def news(site: Site, number: int = 0) -> Shot:
    """A notice of the first member: a fact, a round, a new record."""
    me = site.members[0]
    fact = {"kind": "notice", "gen": 1, "value": str(int(site.now) + 600 + number)}
    return Shot(sync(me.boot, facts=[fact]), site.token(me))


def heals(site: Site, shelf: Shelf) -> None:
    """Once the store is well again, the next tick takes the report in, when the lost round's lease is over."""
    shelf.before = shelf.after = lambda _verb, _key: None
    again, tick = news(site), Shot(b"{}", site.clock_token(), "/v1/tick")
    site.world.t += 100.0
    try:
        assert site.ask(again)[0] == 200 and site.ask(tick)[0] == 200
    finally:
        site.world.t = site.now
    held = ObjectStore(shelf).read_record(OURS)
    assert held is not None and held.value.ranks[0].cur is not None
    assert held.value.ranks[0].cur.notice == float(int(site.now) + 600)


def own_write(site: Site) -> Cases:
    """412 for a write that was ours: its answer was lost, and it counts as the win that it was."""

    def check(nth: int, lost: type[StoreError]) -> None:
        with shelved(site) as shelf:
            writes = itertools.count()

            def after(verb: str, key: str) -> None:
                if verb in ("replace", "create") and next(writes) == nth:
                    raise lost(key)

            shelf.after = after
            assert site.ask(news(site))[0] in (200, 503)
            heals(site, shelf)

    for nth, lost in itertools.product(range(10), (ConflictError, UnavailableError)):
        yield f"write {nth} {lost.__name__}", lambda nth=nth, lost=lost: check(nth, lost)


def raced(site: Site) -> Cases:
    def check(key: str, nth: int) -> None:
        with shelved(site) as shelf:
            seen = itertools.count()

            def before(verb: str, at: str) -> None:
                if verb == "replace" and at == key and next(seen) <= nth and key in shelf.things:
                    shelf.serial += 1
                    shelf.things[key] = (shelf.things[key][0], shelf.serial)

            shelf.before = before
            assert site.ask(news(site))[0] in (200, 503)
            heals(site, shelf)

    for key, nth in itertools.product((paths.record(OURS), paths.ALLOC, paths.lease(OURS)), range(7)):
        yield f"{key} {nth}", lambda key=key, nth=nth: check(key, nth)


def throttled(site: Site) -> Cases:
    def check(start: int, length: int) -> None:
        with shelved(site) as shelf:
            calls = itertools.count()

            def before(_verb: str, key: str) -> None:
                if start <= next(calls) < start + length:
                    raise UnavailableError(f"{key}: 429")

            shelf.before = before
            assert site.ask(news(site))[0] in (200, 503)
            heals(site, shelf)

    for start, length in itertools.product(range(0, 40, 4), (1, 5, 1000)):
        yield f"from call {start}, {length} calls", lambda s=start, n=length: check(s, n)


def damaged(site: Site, key: str, data: bytes, *, kept: bool = True) -> None:
    """Whatever lies there: one word for an answer, no other job touched, and it is not written over."""
    with shelved(site) as shelf:
        others = {name: thing for name, thing in shelf.things.items() if "bcde3456" in name}
        shelf.things[key] = (data, 999_999)
        for shot in (
            news(site),
            Shot(b"{}", site.clock_token(), f"/v1/poke/{OURS}"),
            Shot(b"{}", site.clock_token(), "/v1/tick"),
        ):
            status, _, _ = site.ask(shot)
            assert status in (200, 503), f"HTTP {status}"
        assert not kept or shelf.things[key][0] == data
        assert {name: shelf.things.get(name) for name in others if not name.endswith("/lease")} == {
            name: thing for name, thing in others.items() if not name.endswith("/lease")
        }
    assert not any(isinstance(action, DeleteDisk | DeleteVm) for action in site.cloud.asked)


def torn(site: Site) -> Cases:
    whole = encode_versioned(site.store.records[OURS][0])
    for part in range(1, 22):
        cut = whole[: len(whole) * part // 22]
        yield f"{len(cut)} of {len(whole)} bytes", lambda cut=cut: damaged(site, paths.record(OURS), cut)


def future(site: Site) -> Cases:
    for key, document in (
        (paths.record(OURS), site.store.records[OURS][0]),
        (paths.ALLOC, site.store.alloc[0]),
    ):
        for version in ("2", "3", "99", "0", "-1", "1.5", '"1"', "null", "[]", "true", str(2**63)):
            data = encode_versioned(document).replace(b'"v":1', b'"v":' + version.encode(), 1)
            yield f"{key} v {version}", lambda key=key, data=data: damaged(site, key, data)


def corrupt(site: Site) -> Cases:
    for key in (paths.record(OURS), paths.ALLOC, paths.spec(OURS), paths.progress(OURS)):
        for data in (b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"v":1}', b"x" * 100_000, b'{"v":1,"job":1}'):
            yield f"{key} {data[:9]!r}", lambda key=key, data=data: damaged(site, key, data, kept=False)


def deleted(site: Site) -> Cases:
    def check(gone: tuple[str, ...], job: str) -> None:
        with shelved(site) as shelf:
            for key in gone:
                shelf.things.pop(key, None)
            for shot in (news(site), Shot(b"{}", site.clock_token(), "/v1/tick")):
                assert site.ask(shot)[0] in (200, 503)
            other = ObjectStore(shelf).read_record("bcde3456")
            assert other is None or job == "bcde3456" or other.value.phase is Phase.RUN

    for job in (OURS, "bcde3456"):
        keys = (
            paths.record(job),
            paths.spec(job),
            paths.active(job),
            paths.name(f"job-{job}"),
            paths.ALLOC,
            paths.progress(job),
        )
        for size in (1, 2):
            for gone in itertools.combinations(keys, size):
                yield f"{gone}", lambda gone=gone, job=job: check(gone, job)
    yield "the stack", lambda: check((paths.STACK,), OURS)
