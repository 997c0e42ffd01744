"""What the bucket answers: lost answers, races, halves, strangers' documents, and gaps."""

from __future__ import annotations

import builtins
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from spotkeeper.contract.cloud import DeleteDisk, DeleteVm
from spotkeeper.contract.record import Phase
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.documents import encode_versioned
from spotkeeper.reconcile.store.objects import Blob, ConflictError, Deadline, StoreError, UnavailableError
from spotkeeper.reconcile.store.store import Store
from tests.security.cases_identity import Cases
from tests.security.site import JOB as OURS
from tests.security.site import OTHER, Shot, Site, sync


@dataclass
class Shelf:
    """An object store in memory; ``before`` may raise, or change what is about to be read. Thread-safe."""

    things: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    before: Callable[[str, str], None] = lambda _verb, _key: None
    after: Callable[[str, str], None] = lambda _verb, _key: None
    serial: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def until(self, deadline: Deadline) -> Shelf:
        return self

    def get(self, key: str) -> Blob | None:
        self.before("get", key)
        found = self.things.get(key)
        return Blob(found[0], str(found[1])) if found else None

    def refresh(self, key: str, known: Blob) -> Blob | None:
        return self.get(key)

    def create(self, key: str, data: bytes) -> str:
        self.before("create", key)
        with self.lock:
            if key in self.things:
                raise ConflictError(key)
            return self._set(key, data, "create")

    def replace(self, key: str, data: bytes, tag: str) -> str:
        self.before("replace", key)
        with self.lock:
            if key not in self.things or str(self.things[key][1]) != tag:
                raise ConflictError(key)
            return self._set(key, data, "replace")

    def get_many(self, keys: Sequence[str]) -> builtins.list[Blob | None]:
        return [self.get(key) for key in keys]

    def put(self, key: str, data: bytes) -> str:
        self.before("put", key)
        with self.lock:
            return self._set(key, data, "put")

    def list(self, prefix: str, start: str = "") -> builtins.list[str]:
        self.before("list", prefix)
        return sorted(key for key in tuple(self.things) if key.startswith(prefix + start))

    def delete(self, key: str) -> None:
        self.before("delete", key)
        self.things.pop(key, None)

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def _set(self, key: str, data: bytes, verb: str) -> str:
        self.serial += 1
        self.things[key] = (data, self.serial)
        self.after(verb, key)
        return str(self.serial)


@contextmanager
def shelved(site: Site) -> Iterator[Shelf]:
    """The site on a real object store's layer, with all of its documents."""
    shelf = Shelf()
    store = Store(shelf)
    memory = site.store
    store.put(paths.STACK, msgspec.json.encode(site.stack))
    for job, (record, _) in memory.records.items():
        assert store.create_record(record)
        store.put(paths.lease(job), b"{}")  # its rounds have run
        store.put_spec(job, memory.specs[job])
        store.set_active(job)
        store.put_name(record.name, job)
        for fact in memory.facts.get(job, {}).values():
            store.put_fact(job, fact)
        if job in memory.progresses:
            store.put_progress(job, memory.progresses[job])
    if memory.allocation[0].nonce:
        store.cas_allocation(memory.allocation[0], "")
    runtime = site.runtime
    runtime._store, runtime._stack = store, None
    runtime._options = RoundOptions(settle_s=0.0, sleep=lambda _: None, parallel=1)
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
    held = Store(shelf).read_record(OURS)
    assert held is not None and held.value.nodes[0].cur is not None
    assert held.value.nodes[0].cur.notice == float(int(site.now) + 600)


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

    for key, nth in itertools.product((paths.record(OURS), paths.ALLOCATION, paths.lease(OURS)), range(7)):
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
        others = {name: thing for name, thing in shelf.things.items() if OTHER in name}
        shelf.things[key] = (data, 999_999)
        for shot in (
            news(site),
            Shot(b"{}", site.clock_token(), f"/v1/notify/{OURS}"),
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
        (paths.ALLOCATION, site.store.allocation[0]),
    ):
        for version in ("2", "3", "99", "0", "-1", "1.5", '"1"', "null", "[]", "true", str(2**63)):
            data = encode_versioned(document).replace(b'"v":1', b'"v":' + version.encode(), 1)
            yield f"{key} v {version}", lambda key=key, data=data: damaged(site, key, data)


def corrupt(site: Site) -> Cases:
    for key in (paths.record(OURS), paths.ALLOCATION, paths.spec(OURS), paths.progress(OURS)):
        for data in (b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"v":1}', b"x" * 100_000, b'{"v":1,"job":1}'):
            yield f"{key} {data[:9]!r}", lambda key=key, data=data: damaged(site, key, data, kept=False)


def deleted(site: Site) -> Cases:
    def check(gone: tuple[str, ...], job: str) -> None:
        with shelved(site) as shelf:
            for key in gone:
                shelf.things.pop(key, None)
            for shot in (news(site), Shot(b"{}", site.clock_token(), "/v1/tick")):
                assert site.ask(shot)[0] in (200, 503)
            other = Store(shelf).read_record(OTHER)
            assert other is None or job == OTHER or other.value.phase is Phase.RUN

    for job in (OURS, OTHER):
        keys = (
            paths.record(job),
            paths.spec(job),
            paths.active(job),
            paths.name(f"job-{job}"),
            paths.ALLOCATION,
            paths.progress(job),
        )
        for size in (1, 2):
            for gone in itertools.combinations(keys, size):
                yield f"{gone}", lambda gone=gone, job=job: check(gone, job)
    yield "the stack", lambda: check((paths.STACK,), OURS)
