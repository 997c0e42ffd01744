"""The function's HTTP interface in process, on a stack that trains: what a request may change is compared, bit by bit.

Two jobs of three nodes, all members, and an idle static machine. Nothing here opens a socket or reads the real
clock. :meth:`Site.fire` sends one request and holds the answer, the log and the bucket against what is allowed.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import flask
import msgspec
from msgspec.structs import replace

from spotkeeper.contract.cloud import Action, Listing, Result, ResultKind
from spotkeeper.contract.facts import Fact
from spotkeeper.contract.record import Record
from spotkeeper.contract.stack import TICK_PATH
from spotkeeper.reconcile.clouds.http_client import Answer
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions
from spotkeeper.reconcile.service.auth import KeySet, Verifier
from spotkeeper.reconcile.service.http import HttpApp
from spotkeeper.reconcile.service.logging_json import JsonLines
from spotkeeper.reconcile.service.request_body import STATUS, Refusal
from spotkeeper.reconcile.service.runtime import FunctionSettings, Runtime
from tests.reconcile.memory import MemoryStore
from tests.reconcile.service import identities as ids
from tests.reconcile.world import STACK, World, stack

JOB, OTHER = "abcd2345", "bcde3456"
NODE = "sk-t-fix-s0"
REFUSALS = {json.dumps({"error": word.value}, separators=(",", ":")).encode(): STATUS[word] for word in Refusal}
JOBS = {"records", "facts", "allocation", "progresses", "ledgers", "active", "requests"}  # with the checks of `allowed`
OF_A_JOB = JOBS | {"quarantined", "market", "observations"}
CANARY = "kanarie7"  # planted in what is sent; never comes out
_TOKEN = re.compile(rb"eyJ|Bearer|SIGNATURE")


class Keys(KeySet):
    """A key set that is there without a socket. ``fetched`` counts."""

    def __init__(self) -> None:
        super().__init__("https://keys.example/certs")
        self.listed = [ids.public_jwk("one")]
        self.fetched = 0
        self._wire = self  # type: ignore[assignment]

    def call(self, *_: object) -> Answer:
        self.fetched += 1
        return Answer(200, json.dumps({"keys": self.listed}).encode())


class StillCloud:
    """Shows one picture, takes every call and does nothing."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.asked: list[Action] = []

    def list(self, stack: str) -> Listing:
        return self.listing

    def perform(self, action: Action, deadline_s: float) -> Result:
        self.asked.append(action)
        return Result(action, ResultKind.ACCEPTED)

    def price_history(self, pool: str, deadline_s: float) -> None:
        return None


class DecimalWorld(World):
    """Compute Engine's ids are digits."""

    def _id(self) -> str:
        return f"{self.random.getrandbits(48):015d}"


@dataclass(frozen=True)
class Machine:
    """A VM that may speak: what its token says, and the node that the record gives it."""

    uid: str
    name: str
    zone: str
    boot: str
    job: str = ""
    node: int = -1
    attempt: int = 0

    def token(self, **changes: Any) -> str:
        said = ids.machine(instance_id=self.uid, instance_name=self.name, zone=self.zone)
        return ids.bearer(ids.claims(**said, **changes))


@dataclass(frozen=True)
class Shot:
    """One request. ``want``: the statuses that are right; ``by``: whose node it may touch (None: nobody's)."""

    body: bytes = b""
    token: str | None = None
    path: str = "/v1/sync"
    method: str = "POST"
    want: tuple[int, ...] = (400,)
    by: Machine | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None  # what Content-Length says; None: the truth
    quarantine: bool = False  # it may be set aside


class Lines(logging.Handler):
    """Every line of the function's log, as it would be written."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonLines())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@dataclass
class Bucket:
    """A copy of everything stored."""

    fields: dict[str, Any]

    @classmethod
    def of(cls, store: MemoryStore) -> Bucket:
        return cls({name: _copied(value) for name, value in vars(store).items() if name != "on_write"})

    def put_back(self, store: MemoryStore) -> None:
        for name, value in self.fields.items():
            setattr(store, name, _copied(value))


def _copied(value: Any) -> Any:
    """Documents are frozen: only the containers are new."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return copy.copy(value) if isinstance(value, list | set) else value


class Site:
    """``site.fire(Shot(...))``; afterwards the bucket is what it was before, unless ``keep``."""

    def __init__(self) -> None:
        world = DecimalWorld(nodes=3, the_stack=stack(static=1), static="never")
        world.options.user = ids.CLOCK_MAIL  # the jobs have an owner, so no later call makes its caller one
        for job in (JOB, OTHER):
            world.submit(job)
        world.until(lambda: world.training(JOB) and world.training(OTHER))
        world.run(130.0)
        self.world, self.store = world, world.memory
        self.stack = replace(world.stack, node_identity=ids.NODES)
        self.store.stack = self.stack
        self.cloud = StillCloud(world.list(STACK))
        settings = FunctionSettings(
            stack=STACK, bucket="", clock=world, audience=ids.AUDIENCE, invokers=frozenset({ids.CLOCK_MAIL})
        )
        self.keys = Keys()
        self.runtime = Runtime(settings, self.store, self.cloud)
        self.runtime._verifier = Verifier(self.keys, world, ids.AUDIENCE)
        self.runtime._options = RoundOptions(settle_s=0.0, sleep=lambda _: None, parallel=1)
        self.app = HttpApp(self.runtime)
        self.log = Lines()
        logger = logging.getLogger("spotkeeper")
        logger.addHandler(self.log)
        logger.setLevel(logging.DEBUG)
        self._numbers = count()
        self.now = world.t
        self.members = [self._member(JOB, node) for node in range(3)]
        self.others = [self._member(OTHER, node) for node in range(3)]
        static = next(m for m in world.machines.values() if m.vm.name == NODE)
        self.node = Machine(static.vm.uid, NODE, static.vm.zone, static.boot)
        self.rest = Bucket.of(self.store)

    def close(self) -> None:
        logging.getLogger("spotkeeper").removeHandler(self.log)

    def _member(self, job: str, node: int) -> Machine:
        slot = self.world.record(job).nodes[node].cur
        assert slot is not None and slot.uid and slot.boot
        vm = self.world.machines[slot.uid].vm
        return Machine(slot.uid, vm.name, slot.zone, slot.boot, job, node, slot.attempt)

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Of the first member, at the site's time."""
        one = self.members[0]
        said = ids.machine(instance_id=one.uid, instance_name=one.name, zone=one.zone)
        return ids.claims(**(said | {"iat": int(self.now) - 5, "exp": int(self.now) + 3000} | changes))

    def token(self, machine: Machine | None = None, **changes: Any) -> str:
        return (machine or self.members[0]).token(**({"iat": int(self.now) - 5, "exp": int(self.now) + 3000} | changes))

    def clock_token(self, **changes: Any) -> str:
        return ids.bearer(self.claims(**({"email": ids.CLOCK_MAIL, "google": None} | changes)))

    # -- one request

    def ask(self, shot: Shot) -> tuple[int, bytes, dict[str, str]]:
        headers = {"Content-Type": "application/json", **shot.headers}
        if shot.token is not None:
            headers["Authorization"] = shot.token
        environ: dict[str, Any] = {
            "REQUEST_METHOD": shot.method,
            "PATH_INFO": shot.path.encode().decode("latin-1"),  # as WSGI has it
            "QUERY_STRING": "",
            "SERVER_NAME": "function.example",
            "SERVER_PORT": "443",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.url_scheme": "https",
            "wsgi.input": io.BytesIO(shot.body),
        }
        for name, value in headers.items():
            key = name.upper().replace("-", "_")
            environ[key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"] = value
        environ["CONTENT_LENGTH"] = str(len(shot.body) if shot.length is None else shot.length)
        answer, status, answered = self.app.handle(flask.Request(environ))
        return status, answer, answered

    def fire(self, shot: Shot, keep: bool = False) -> bytes:
        """Send it, and check all that every request must keep to. The answer's body."""
        self.log.lines.clear()
        before = Bucket.of(self.store) if keep else self.rest
        status, answer, headers = self.ask(shot)
        assert status in shot.want, f"HTTP {status}, want one of {shot.want}"
        assert status != 500
        shaped(status, answer, headers)
        told_nothing(shot, answer, self.log.lines)
        touched = differences(before.fields, vars(self.store))
        changes = touched - {"quarantined"} if shot.quarantine else touched
        if status == 200 and "things" in touched:  # a tick is noted, also one that a static machine's hello begins
            assert self.store.things.keys() ^ before.fields["things"].keys() <= {TICK_PATH}
            changes = changes - {"things"}
        if status != 200:
            assert not changes, f"a refused request left {sorted(changes)}"
        elif changes:
            allowed(changes, shot, before.fields, self.store)
        if touched and not keep:
            self.put_back()
        return answer

    def put_back(self) -> None:
        self.rest.put_back(self.store)
        self.cloud.asked.clear()
        self.runtime._options = RoundOptions(settle_s=0.0, sleep=lambda _: None, parallel=1)


def shaped(status: int, answer: bytes, headers: Mapping[str, str]) -> None:
    """A refusal is one word of a list, whatever was wrong; nothing is kept by caches or guessed by browsers."""
    if status != 200:
        assert REFUSALS.get(answer) == status
    assert headers["Content-Type"] == "application/json" and headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert ("Allow" in headers) == (status == 405) and ("WWW-Authenticate" in headers) == (status == 401)


def told_nothing(shot: Shot, answer: bytes, lines: list[str]) -> None:
    """No piece of a token, and nothing that was planted, in the answer or in the log; every line is one line."""
    signature = (shot.token or "").rpartition(".")[2]
    for text in (answer, *(line.encode() for line in lines)):
        assert not _TOKEN.search(text) and CANARY.encode() not in text
        assert len(signature) < 12 or signature.encode("utf-8", "replace") not in text
    for line in lines:
        assert line.isascii() and line.isprintable() and isinstance(json.loads(line), dict)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Return the changed parts of the bucket. A lease that was taken and released is no change."""
    parts = set(before) - {"leases", "lists", "record_writes", "stack"}
    return {name for name in parts if before[name] != after[name]}


def allowed(changes: set[str], shot: Shot, before: Mapping[str, Any], store: MemoryStore) -> None:
    """S9: what a machine says never changes a node other than its own."""
    by = shot.by
    assert by is not None, f"nobody may change {sorted(changes)}"
    if not by.job:
        assert changes <= {"hellos"} and set(store.hellos) <= {*before["hellos"], by.name}
        return
    assert changes <= OF_A_JOB, f"{by.name} changed {sorted(changes - OF_A_JOB)}"
    for job, kept in before["facts"].items():
        for key in store.facts.get(job, {}).keys() ^ kept.keys():
            fact = Fact.parse(key)
            assert fact is not None and job == by.job
            assert (fact.node, fact.attempt) == (by.node, by.attempt), f"{by.name} said {key}"
            assert fact.uid == by.uid
    for job, (record, _) in before["records"].items():
        assert others_kept(record, store.records[job][0], by), f"{by.name} changed {job}"
    other = [grant for grant in store.allocation[0].grants if (grant.job, grant.node) != (by.job, by.node)]
    assert other == [grant for grant in before["allocation"][0].grants if (grant.job, grant.node) != (by.job, by.node)]
    for name in ("progresses", "ledgers"):
        whole = getattr(store, name)
        assert {job: one for job, one in whole.items() if job != by.job} == {
            job: one for job, one in before[name].items() if job != by.job
        }


def others_kept(old: Record, new: Record, by: Machine) -> bool:
    """Every node but the caller's keeps its machines; another job keeps everything; no end, no disk given up."""
    if old.job != by.job:
        return old == new
    same = (old.phase, old.outcome, old.job, old.uid, old.keep_disks) == (
        new.phase,
        new.outcome,
        new.job,
        new.uid,
        new.keep_disks,
    )
    for index, (one, two) in enumerate(zip(old.nodes, new.nodes, strict=True)):
        if index != by.node:
            same = same and _who(one) == _who(two)
    return same


def _who(node: Any) -> tuple[object, ...]:
    slots = [(s.attempt, s.uid, s.boot, s.zone, s.address) if s else None for s in (node.cur, node.next)]
    return (*slots, node.disk, node.disk_top, node.top)


def sync(boot: str = "b-1", **fields: Any) -> bytes:
    return msgspec.json.encode({"boot": boot, **fields})
