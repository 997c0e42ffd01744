"""The function's door: paths, identities, sizes, and one answer shape. Decides nothing about jobs.

``functions-framework --target main`` with a ``main.py`` that imports :func:`main` (a source file of this
one's name would hide the standard library's ``http``). Paths: ``docs/design.md``.

Order, for every request: path and method, size, identity, body, work. A refusal has one shape,
``{"error": <word>}``, and repeats nothing of the request.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, BinaryIO, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace as replace_struct

from spotkeeper.reconcile.body import MAX_BODY, BodyError, parse
from spotkeeper.reconcile.deadline import AGAIN_S, REQUEST_S, Deadline
from spotkeeper.reconcile.hints import job_of_event
from spotkeeper.reconcile.runtime import (
    Deadlined,
    Flights,
    Runtime,
    SettingsError,
    settings_from_env,
    spare_the_collector,
)
from spotkeeper.spec.names import JOB_ID

if TYPE_CHECKING:
    from spotkeeper.reconcile.auth import Caller, Who
    from spotkeeper.reconcile.document import Speaker
    from spotkeeper.reconcile.intake import Accepted
    from spotkeeper.reconcile.round import RoundResult
    from spotkeeper.reconcile.store_api import Store
    from spotkeeper.spec.generation import Sync, SyncReply
    from spotkeeper.spec.stack import StackState

TICK = ""  # the flight of a tick; no job has this id
_OURS = re.compile(r"/v1/(?:sync|tick|event|health|poke/[a-z0-9]{8})\Z")
BOOT = re.compile(r"[-a-z0-9]{1,64}\Z")

log = logging.getLogger("spotkeeper.http")

Answer = tuple[bytes, int, dict[str, str]]


class Headers(Protocol):
    def get(self, key: str) -> str | None: ...


class Request(Protocol):
    """What we use of a Flask request."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Headers: ...
    @property
    def content_length(self) -> int | None: ...
    @property
    def stream(self) -> BinaryIO: ...


class Refusal(str, Enum):
    """The words of a refusal, and their HTTP status (:data:`STATUS`)."""

    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    METHOD = "method_not_allowed"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"


STATUS = {
    Refusal.INVALID: 400,
    Refusal.UNAUTHORIZED: 401,
    Refusal.NOT_FOUND: 404,
    Refusal.METHOD: 405,
    Refusal.TOO_LARGE: 413,
    Refusal.UNSUPPORTED: 415,
    Refusal.INTERNAL: 500,
    Refusal.UNAVAILABLE: 503,
}


HEADERS = {"Content-Type": "application/json", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class RefusedError(Exception):
    """Ends a request. ``reason`` is for the log, ``allow`` the method that the path would have taken."""

    def __init__(self, refusal: Refusal, reason: str = "", allow: str = "") -> None:
        super().__init__(reason or refusal.value)
        self.refusal, self.allow = refusal, allow


class Empty(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a tick or a poke."""


class Ticked(Struct, frozen=True):
    jobs: int
    failed: int = 0
    busy: bool = False  # one was under way in this process


class Poked(Struct, frozen=True):
    """``ended``: see ``round.Ended``; ``busy`` also where this process was at it."""

    ended: str
    rounds: int = 0


def main(request: Request) -> Answer:
    """The entry point of ``functions-framework``."""
    return _door().handle(request)


@cache
def _door() -> Door:
    from spotkeeper.reconcile.logs import setup

    setup()
    spare_the_collector()
    return Door(Runtime(settings_from_env()))


@dataclass(frozen=True)
class Visit:
    """What goes through the layers with a request: how long it may work, and what the log is to say of it."""

    deadline: Deadline
    note: dict[str, object] = field(default_factory=dict)


class Door:
    """All requests of one process."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.flights = Flights()

    def handle(self, request: Request) -> Answer:
        """One request; never raises."""
        started = time.monotonic()
        visit = self._visit()
        headers = dict(HEADERS)
        try:
            body, status = self._route(request, visit), 200
        except RefusedError as error:
            body, status = {"error": error.refusal.value}, STATUS[error.refusal]
            visit.note["reason"] = str(error)
            if error.allow:
                headers["Allow"] = error.allow
        except Exception as error:
            # The outermost frame: whatever it was, the caller hears one word and the log the rest.
            refusal = _refusal_of(error)
            body, status = {"error": refusal.value}, STATUS[refusal]
            visit.note["reason"] = f"{type(error).__name__}: {error}"
            if refusal is Refusal.INTERNAL:
                log.exception("a request failed", extra={"path": _shape(request.path)})
        quiet = status == 200 and "ended" not in visit.note
        log.log(
            logging.DEBUG if quiet else logging.INFO if status < 500 else logging.WARNING,
            "%s %s",
            request.method if request.method.isalpha() and len(request.method) < 10 else "?",
            _shape(request.path),
            extra={"status": status, "ms": round((time.monotonic() - started) * 1000), **visit.note},
        )
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return msgspec.json.encode(body), status, headers

    def _visit(self) -> Visit:
        return Visit(Deadline(REQUEST_S, self.runtime.monotonic))

    def _store(self, visit: Visit) -> Store:
        return self.runtime.store.until(visit.deadline)

    def _route(self, request: Request, visit: Visit) -> Mapping[str, object] | Struct:
        handler, method = self._handler(request.path, visit)
        if request.method != method:
            raise RefusedError(Refusal.METHOD, allow=method)
        if method == "GET":
            return {"ok": True}
        return handler(request, visit)

    def _handler(
        self, path: str, visit: Visit
    ) -> tuple[Callable[[Request, Visit], Mapping[str, object] | Struct], str]:
        if path == "/v1/sync":
            return self._sync, "POST"
        if path == "/v1/tick":
            return self._tick, "POST"
        if path == "/v1/event":
            return self._event, "POST"
        if path == "/v1/health":
            return self._sync, "GET"
        job = path.removeprefix("/v1/poke/")
        if job != path and JOB_ID.match(job):
            visit.note["job"] = job
            return self._poke, "POST"
        raise RefusedError(Refusal.NOT_FOUND)

    # -- agents

    def _sync(self, request: Request, visit: Visit) -> SyncReply:
        from spotkeeper.spec.generation import Sync

        data = _body(request)
        stack = self._stack(visit)
        if not stack.node_identity:
            raise RefusedError(Refusal.UNAVAILABLE, "stack/pools.json names no node_identity: nobody can be believed")
        who = self._agent(request, stack)
        visit.note["caller"] = who.name or who.uid
        sync = parse(data, Sync)
        jobs = sync.kept if sync.job is None else (sync.job, *sync.kept)
        if not BOOT.match(sync.boot) or not all(map(JOB_ID.match, jobs)):
            raise RefusedError(Refusal.INVALID, "boot or job of another form")
        return self._answer(stack, self._speaker(who, sync, stack, visit), sync, visit)

    def _answer(self, stack: StackState, who: Speaker, sync: Sync, visit: Visit) -> SyncReply:
        """Store what is said; a round where it is news (or its time has come); then the answer."""
        from spotkeeper.reconcile.document import reply
        from spotkeeper.reconcile.intake import accept, ended
        from spotkeeper.spec.generation import Sync

        store, clock = self._store(visit), self.runtime.clock
        said = accept(store, stack, who, sync, clock.now())
        # A static node that has just been granted says hello by speaking, which is news once more.
        for _ in range(2):
            if not said.new and not self._overdue(store, said, sync.pending):
                break
            if said.job is None:
                self._run_tick(visit)
            else:
                self._run_round(stack, said.job, visit)
            said = accept(store, stack, who, Sync(sync.boot, sync.ver, sync.job), clock.now())
            if not said.new:
                break
        record = said.record
        spec = self.runtime.spec(record, store) if record is not None else None
        answer = reply(record, spec, stack, who, sync, said.grant)
        return replace_struct(answer, ended=ended(store, stack, who, sync.kept)) if sync.kept else answer

    def _overdue(self, store: Store, said: Accepted, pending: bool) -> bool:
        """Whether something only waits for the clock, or for a holder of the lease who is silent by now.

        Not asked for a job at rest that nobody waits for: its ticks are enough.
        """
        from spotkeeper.reconcile.document import at_rest

        if said.job is None or said.record is None or (at_rest(said.record) and not pending):
            return False
        due = store.read_due(said.job)
        return due is not None and due <= self.runtime.clock.now()

    # -- those who ask for rounds

    def _tick(self, request: Request, visit: Visit) -> Ticked:
        from spotkeeper.reconcile import alarm
        from spotkeeper.reconcile.store_api import CorruptError

        _nothing(self._hinted(request, visit))
        try:
            return self._run_tick(visit)
        except CorruptError as error:  # the stack itself: no job can be looked after
            alarm.unreadable(self._store(visit), error)
            raise

    def _poke(self, request: Request, visit: Visit) -> Poked:
        data = _body(request)
        visit.note["caller"] = self._invoker(request).email
        _nothing(data)
        done = self._run_round(self._stack(visit), str(visit.note["job"]), visit)
        if done is None:
            return Poked("busy")
        if done.record is None and done.ended.value == "absent":
            raise RefusedError(Refusal.NOT_FOUND, "no such job")
        return Poked(done.ended.value, done.rounds)

    def _event(self, request: Request, visit: Visit) -> Ticked:
        """A hint. What cannot be read is set aside and answered well: a push that fails comes back for days."""
        data = self._hinted(request, visit)
        stack = self._stack(visit)
        try:
            job = job_of_event(data, stack.stack, stack.project)
        except BodyError as error:
            visit.note["reason"] = str(error)
            self._store(visit).quarantine(data.decode("utf-8", "backslashreplace"))
            return Ticked(0)
        if job is None:
            return Ticked(0)
        visit.note["job"] = job
        done = self._run_round(stack, job, visit)
        return Ticked(1, busy=done is None)

    def _hinted(self, request: Request, visit: Visit) -> bytes:
        """The body of a tick or an event, from somebody who may ask for rounds."""
        data = _body(request)
        visit.note["caller"] = self._hint(request).email
        return data

    # -- who speaks: by tokens. ``lambda_.py`` has another way

    def _agent(self, request: Request, stack: StackState) -> Who:
        """The node that speaks.

        Raises:
            AuthError, KeysUnavailableError: see ``auth.py``; of the two below too.
        """
        return self.runtime.verifier.agent(_authorization(request), stack.node_identity, stack.project)

    def _speaker(self, who: Who, sync: Sync, stack: StackState, visit: Visit) -> Speaker:
        """What the node is called: Google's word. Nothing of the body."""
        from spotkeeper.reconcile.document import Speaker

        return Speaker(who.uid, who.name, who.zone)

    def _invoker(self, request: Request) -> Caller:
        return self.runtime.verifier.invoker(_authorization(request), self.runtime.settings.invokers)

    def _hint(self, request: Request) -> Caller:
        platform = request.headers.get("X-Serverless-Authorization")
        return self.runtime.verifier.hint(_authorization(request), self.runtime.settings.invokers, platform)

    # -- rounds

    def _run_round(self, stack: StackState, job: str, visit: Visit) -> RoundResult | None:
        """A round, or None where this process is at it; whoever comes meanwhile is covered by it."""
        from spotkeeper.reconcile.round import Ended, hand_on, run_round

        runtime, store, deadline = self.runtime, self._store(visit), visit.deadline
        cloud = Deadlined(runtime.cloud(stack), runtime.clock, deadline)
        options = replace(runtime.options(), deadline=deadline)
        tired = False

        def work() -> RoundResult:
            return run_round(store, cloud, job, runtime.clock, options)

        def covered(done: RoundResult) -> bool:
            # Another process holds the lease: to look whether it still does is cheaper than to list what it lists.
            return done.ended is not Ended.BUSY and set(store.list_facts(job)) <= done.facts

        def out_of_time() -> bool:
            nonlocal tired
            tired = deadline.left() < AGAIN_S
            return tired

        done = self.flights.run(job, work, covered, out_of_time)
        if tired and done is not None:
            hand_on(store, job, runtime.clock, options, done.facts)
        visit.note["job"] = job
        visit.note["ended"] = done.ended.value if done is not None else "busy"
        if done is not None:
            visit.note.update(rounds=done.rounds, passes=done.passes, writes=done.writes, calls=done.calls)
        return done

    def _run_tick(self, visit: Visit) -> Ticked:
        self._stack(visit)
        done = self.flights.run(TICK, lambda: self.runtime.tick(visit.deadline), lambda _: True)
        if done is None:
            return Ticked(0, busy=True)
        visit.note.update(ended="tick", jobs=done.jobs)
        return Ticked(done.jobs, len(done.failed))

    def _stack(self, visit: Visit) -> StackState:
        stack = self.runtime.stack(self._store(visit))
        if stack is None:
            raise RefusedError(Refusal.UNAVAILABLE, "no stack/pools.json in the bucket")
        if stack.stack != self.runtime.settings.stack:
            raise SettingsError(f"the bucket holds the stack {stack.stack!r}, not SPOTKEEPER_STACK")
        return stack


def _authorization(request: Request) -> str | None:
    """The header that the platform leaves as it is: two of them arrive joined, and are no token then."""
    return request.headers.get("Authorization")


def _nothing(data: bytes) -> None:
    """The body of a tick or a poke says nothing."""
    if data:
        parse(data, Empty)


def _body(request: Request) -> bytes:
    """The bytes of a POST, at most ``MAX_BODY``; not looked into yet."""
    encoding = request.headers.get("Content-Encoding")
    if encoding not in (None, "", "identity"):
        raise RefusedError(Refusal.UNSUPPORTED, "a packed body")
    if (request.content_length or 0) > MAX_BODY:
        raise RefusedError(Refusal.TOO_LARGE)
    data = request.stream.read(MAX_BODY + 1)
    if len(data) > MAX_BODY:
        raise RefusedError(Refusal.TOO_LARGE)
    kind = (request.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    if data and kind != "application/json":
        raise RefusedError(Refusal.UNSUPPORTED, "not application/json")
    return data


def _refusal_of(error: Exception) -> Refusal:
    """The word for an error of the layers below."""
    from spotkeeper.reconcile.auth import AuthError, KeysUnavailableError
    from spotkeeper.reconcile.objects import BadKeyError
    from spotkeeper.reconcile.store_api import StoreError

    if isinstance(error, AuthError):
        return Refusal.UNAUTHORIZED
    if isinstance(error, BodyError | BadKeyError):
        return Refusal.INVALID
    if isinstance(error, StoreError | KeysUnavailableError):
        return Refusal.UNAVAILABLE
    return Refusal.INTERNAL


def _shape(path: str) -> str:
    """A path for the log: one of ours, or nothing of it."""
    return path if _OURS.match(path) else "?"
