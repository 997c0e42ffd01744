"""The function's HTTP interface: paths, authentication, sizes, and the form of answers.

``functions-framework --target main`` runs a ``main.py`` that imports :func:`main`. It cannot run this file directly,
whose name would then hide the standard library's ``http``. The package's docstring lists the paths.

Every request is checked in this order: path and method, size, identity, body; then the work. A refusal has one shape,
``{"error": <word>}``, and repeats nothing of the request.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
from msgspec import Struct
from msgspec.structs import replace as replace_struct

from spotkeeper.contract.names import JOB_ID
from spotkeeper.contract.notification import CHANNEL_NAME
from spotkeeper.reconcile.service.request_body import (
    STATUS,
    BodyError,
    Refusal,
    Request,
    RequestRefusedError,
    job_of_event,
    parse,
    read_body,
)
from spotkeeper.reconcile.service.rounds import Rounds, Ticked, Visit
from spotkeeper.reconcile.service.runtime import Runtime, settings_from_env, spare_the_collector

if TYPE_CHECKING:
    from spotkeeper.contract.generation import Sync, SyncReply
    from spotkeeper.contract.stack import StackState
    from spotkeeper.reconcile.controller.document import Speaker
    from spotkeeper.reconcile.controller.intake import Accepted
    from spotkeeper.reconcile.service.auth import Caller
    from spotkeeper.reconcile.store.store import Store

_OURS = re.compile(r"/v1/(?:sync|tick|event|health|notify/[a-z0-9]{8}|channels/[-a-z0-9]{1,32}/test)\Z")
_TEST = re.compile(r"/v1/channels/([-a-z0-9]{1,32})/test\Z")
BOOT = re.compile(r"[-a-z0-9]{1,64}\Z")

log = logging.getLogger("spotkeeper.http")

Answer = tuple[bytes, int, dict[str, str]]
HEADERS = {"Content-Type": "application/json", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Empty(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``/v1/tick``, ``/v1/notify/<job>`` and ``/v1/channels/<c>/test``: nothing or an empty object."""


class Notified(Struct, frozen=True):
    """The answer to ``/v1/notify/<job>``, which requests a round of this job.

    ``ended``: how the round ended; ``busy`` if another round of the job was running already.
    """

    ended: str
    rounds: int = 0


class ChannelTested(Struct, frozen=True):
    """The answer to a channel's test. ``why``: why the message was not sent; "" if it was."""

    sent: bool
    why: str = ""


def main(request: Request) -> Answer:
    """Answer a request: the entry point of ``functions-framework``."""
    return _app().handle(request)


@cache
def _app() -> HttpApp:
    from spotkeeper.reconcile.service.logging_json import setup

    setup()
    spare_the_collector()
    return HttpApp(Runtime(settings_from_env()))


class HttpApp(Rounds):
    """The app that answers all requests of one process."""

    def handle(self, request: Request) -> Answer:
        """Answer one request; never raises."""
        started = time.monotonic()
        visit = self.visit()
        headers = dict(HEADERS)
        try:
            body, status = self._route(request, visit), 200
        except RequestRefusedError as error:
            body, status = {"error": error.refusal.value}, STATUS[error.refusal]
            visit.note["reason"] = str(error)
            if error.allow:
                headers["Allow"] = error.allow
        except Exception as error:
            # The outermost handler: the caller gets one word, and the log gets the details.
            refusal = _refusal_of(error)
            body, status = {"error": refusal.value}, STATUS[refusal]
            visit.note["reason"] = f"{type(error).__name__}: {error}"
            if refusal is Refusal.INTERNAL:
                log.exception("a request failed", extra={"path": _shape(request.path)})
        self.announce(visit)
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
        self.runtime.collect()
        return msgspec.json.encode(body), status, headers

    def _route(self, request: Request, visit: Visit) -> Mapping[str, object] | Struct:
        handler, method = self._handler(request.path, visit)
        if request.method != method:
            raise RequestRefusedError(Refusal.METHOD, allow=method)
        if method == "GET":
            return {"ok": True}
        return handler(request, visit)

    def _handler(
        self, path: str, visit: Visit
    ) -> tuple[Callable[[Request, Visit], Mapping[str, object] | Struct], str]:
        routes = {"/v1/sync": self._sync, "/v1/tick": self._tick, "/v1/event": self._event}
        if path in routes:
            return routes[path], "POST"
        if path == "/v1/health":
            return self._sync, "GET"
        job = path.removeprefix("/v1/notify/")
        if job != path and JOB_ID.match(job):
            visit.note["job"] = job
            return self._notify, "POST"
        if (test := _TEST.match(path)) and CHANNEL_NAME.match(test[1]):
            visit.note["channel"] = test[1]
            return self._test_channel, "POST"
        raise RequestRefusedError(Refusal.NOT_FOUND)

    # -- agents

    def _sync(self, request: Request, visit: Visit) -> SyncReply:
        from spotkeeper.contract.generation import Sync

        data = read_body(request)
        stack = self.stack(visit)
        if not stack.node_identity:
            raise RequestRefusedError(
                Refusal.UNAVAILABLE, "stack/pools.json has no `node_identity`, so no agent can be authenticated"
            )
        who = self._agent(request, stack)
        visit.note["caller"] = who.name or who.uid
        visit.urgent = True
        sync = parse(data, Sync)
        jobs = sync.old_jobs if sync.job is None else (sync.job, *sync.old_jobs)
        if not BOOT.match(sync.boot) or not all(map(JOB_ID.match, jobs)):
            raise RequestRefusedError(Refusal.INVALID, "the fields `boot`, `job` or `old_jobs` have an unexpected form")
        return self._answer(stack, self._speaker(who, sync, stack, visit), sync, visit)

    def _answer(self, stack: StackState, who: Speaker, sync: Sync, visit: Visit) -> SyncReply:
        """Store the report, run a round if the report is new or a round is due, then answer."""
        from spotkeeper.contract.generation import Sync
        from spotkeeper.reconcile.controller.document import reply
        from spotkeeper.reconcile.controller.intake import accept, ended

        store, clock = self.store(visit), self.runtime.clock
        said = self._poll(store, stack, who, sync) or accept(store, stack, who, sync, clock.now())
        if said.announced:
            self.runtime.options().writer.announced = True
        # The first request of a static machine after its grant counts as its hello, which is a new fact.
        for _ in range(2):
            if not said.new and not self._overdue(store, said, sync.pending):
                break
            if said.job is None:
                self.run_tick(visit)
            else:
                self.run_round(stack, said.job, visit)
            said = accept(store, stack, who, Sync(sync.boot, sync.ver, sync.job), clock.now())
            if not said.new:
                break
        record = said.record
        spec = self.runtime.spec(record, store) if record is not None else None
        answer = reply(record, spec, stack, who, sync, said.grant)
        return replace_struct(answer, ended=ended(store, stack, who, sync.old_jobs)) if sync.old_jobs else answer

    def _poll(self, store: Store, stack: StackState, who: Speaker, sync: Sync) -> Accepted | None:
        """Return the record to answer with, from the cache if possible; None if the sync has a report to store."""
        from spotkeeper.reconcile.controller.intake import Accepted, silent

        job = silent(stack, who, sync)
        if job is None:
            return None
        read = self.records.get(
            job, lambda: store.read_record(job), lambda read: read is not None and read.value.ver >= sync.ver
        )
        return Accepted() if read is None else Accepted(job, read.value)

    def _overdue(self, store: Store, said: Accepted, pending: bool) -> bool:
        """Return whether a round is due: its time has come, or an earlier round did not finish and its lease expired.

        If all nodes of the job are members and no change is pending, or the job is DONE (``at_rest``), its rounds are
        left to ticks, unless ``pending``: the agent waits for the result of a report.
        """
        from spotkeeper.reconcile.controller.document import at_rest

        if said.job is None or said.record is None or (at_rest(said.record) and not pending):
            return False
        job, now = said.job, self.runtime.clock.now()
        due = self.dues.get(job, lambda: store.read_due(job), lambda due: due is None or due > now)
        return due is not None and due <= now

    # -- schedule, command, events

    def _tick(self, request: Request, visit: Visit) -> Ticked:
        from spotkeeper.reconcile.controller import alarm
        from spotkeeper.reconcile.store.documents import CorruptError

        _nothing(self._hinted(request, visit))
        try:
            return self.run_tick(visit, strict=True)
        except CorruptError as error:  # the stack's document is unreadable: no job can have a round
            alarm.unreadable(self.store(visit), error)
            raise

    def _notify(self, request: Request, visit: Visit) -> Notified:
        data = read_body(request)
        caller = self._invoker(request)
        visit.note["caller"] = caller.email
        _nothing(data)
        done = self.run_round(self.stack(visit), str(visit.note["job"]), visit, caller.user)
        if done is None:
            return Notified("busy")
        if done.record is None and done.ended.value == "absent":
            raise RequestRefusedError(Refusal.NOT_FOUND, "no such job")
        return Notified(done.ended.value, done.rounds)

    def _test_channel(self, request: Request, visit: Visit) -> ChannelTested:
        """Send a test message, in the same way as a job's notifications, and say how that went."""
        from spotkeeper.contract.notification import AddressError
        from spotkeeper.reconcile.notifications.https import SendError
        from spotkeeper.reconcile.notifications.message import test_message

        data = read_body(request)
        visit.note["caller"] = self._invoker(request).email
        _nothing(data)
        stack = self.stack(visit)
        channel = next((each for each in stack.channels if each.name == visit.note["channel"]), None)
        if channel is None:
            raise RequestRefusedError(Refusal.NOT_FOUND, "no such channel")
        try:
            self.runtime.send(channel, test_message(channel, stack, self.runtime.clock.now(), uuid4().hex[:12]))
        except (AddressError, SendError) as error:
            visit.note["reason"] = str(error)
            return ChannelTested(False, str(error))
        return ChannelTested(True)

    def _event(self, request: Request, visit: Visit) -> Ticked:
        """Handle a push, which is a hint. An unreadable push is accepted: Pub/Sub repeats a refused push for days."""
        data = self._hinted(request, visit)
        stack = self.stack(visit)
        try:
            job = job_of_event(data, stack.stack, stack.project)
        except BodyError as error:
            visit.note["reason"] = str(error)
            self.store(visit).quarantine(data.decode("utf-8", "backslashreplace"))
            return Ticked(0)
        if job is None:
            return Ticked(0)
        visit.note["job"] = job
        done = self.run_round(stack, job, visit)
        return Ticked(1, busy=done is None)

    def _hinted(self, request: Request, visit: Visit) -> bytes:
        """Return the body of a tick or an event after checking that the caller may request rounds."""
        data = read_body(request)
        visit.note["caller"] = self._hint(request).email
        return data

    # -- authentication by tokens; ``aws_lambda.py`` overrides it

    def _agent(self, request: Request, stack: StackState) -> Speaker:
        """Return the machine that sent the request.

        Raises:
            AuthError, KeysUnavailableError: see ``auth.py``; ``_invoker`` and ``_hint`` raise them too.
        """
        return self.runtime.verifier.agent(_authorization(request), stack.node_identity, stack.project)

    def _speaker(self, who: Speaker, sync: Sync, stack: StackState, visit: Visit) -> Speaker:
        """Return the machine that the request's token names. The body cannot name another machine."""
        return who

    def _invoker(self, request: Request) -> Caller:
        return self.runtime.verifier.invoker(_authorization(request), self.runtime.settings.invokers)

    def _hint(self, request: Request) -> Caller:
        platform = request.headers.get("X-Serverless-Authorization")
        return self.runtime.verifier.hint(_authorization(request), self.runtime.settings.invokers, platform)


def _authorization(request: Request) -> str | None:
    """Return the ``Authorization`` header. If a request has it twice, the joined value is not a valid token."""
    return request.headers.get("Authorization")


def _nothing(data: bytes) -> None:
    if data:
        parse(data, Empty)


def _refusal_of(error: Exception) -> Refusal:
    from spotkeeper.reconcile.service.auth import AuthError, KeysUnavailableError
    from spotkeeper.reconcile.store.objects import BadKeyError, StoreError

    if isinstance(error, AuthError):
        return Refusal.UNAUTHORIZED
    if isinstance(error, BodyError | BadKeyError):
        return Refusal.INVALID
    if isinstance(error, StoreError | KeysUnavailableError):
        return Refusal.UNAVAILABLE
    return Refusal.INTERNAL


def _shape(path: str) -> str:
    return path if _OURS.match(path) else "?"
