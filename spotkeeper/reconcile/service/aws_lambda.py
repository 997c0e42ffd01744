"""The function's entry point on AWS: a function URL (``AuthType`` AWS_IAM), a schedule, and EventBridge.

Handler: ``spotkeeper.reconcile.service.aws_lambda.handler``. A request to the URL contains what IAM says about the
caller. A caller that invokes the function directly could forge this part. So machines have the permission
``lambda:InvokeFunction`` only with the condition ``lambda:InvokedViaFunctionUrl``. The function's resource policy lets
the schedule and EventBridge invoke it directly; their events are hints, which cause a round at most.
"""

from __future__ import annotations

import base64
import binascii
import io
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec, names
from spotkeeper.reconcile.clouds.rate_limit import Paced
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.service import auth_aws
from spotkeeper.reconcile.service.auth import Caller
from spotkeeper.reconcile.service.http import HEADERS, Answer, HttpApp
from spotkeeper.reconcile.service.request_body import MAX_BODY, BodyError, Request
from spotkeeper.reconcile.service.rounds import Ticked, Visit
from spotkeeper.reconcile.service.runtime import Runtime, settings_from_env, spare_the_collector

if TYPE_CHECKING:
    from spotkeeper.contract.cloud import Vm
    from spotkeeper.contract.generation import Sync
    from spotkeeper.contract.record import Record
    from spotkeeper.contract.stack import StackState

FIND_S = 5.0  # real seconds, to look up one machine
LOOK_AGAIN_S = 2.0  # real seconds between listings for unknown machines, which send twice a second
KNOWN = 10_000  # most machines whose names are remembered; an id never gets another name
TICK = "spotkeeper.tick"  # source of the schedule's event, as Pulumi declares it
SOURCES = ("aws.ec2", TICK)

log = logging.getLogger("spotkeeper.lambda")


@runtime_checkable
class Finds(Protocol):
    """A cloud that looks up one machine by its id."""

    def find(self, uid: str, deadline_s: float) -> Vm | None: ...


class _Authorizer(Struct, frozen=True):
    iam: auth_aws.Iam | None = None


class _Http(Struct, frozen=True):
    method: str
    path: str


class _Context(Struct, frozen=True):
    http: _Http
    authorizer: _Authorizer | None = None


class UrlEvent(Struct, frozen=True, rename="camel"):
    """The fields of a function URL's event (payload format 2.0) that are read."""

    request_context: _Context
    headers: dict[str, str] = {}
    body: str = ""
    is_base64_encoded: bool = False


class _Detail(Struct, frozen=True):
    instance: str = msgspec.field(default="", name="instance-id")


class BridgeEvent(Struct, frozen=True):
    """An event of EventBridge: a hint that a machine of an account has changed. Its ``kind`` is only logged."""

    source: str
    account: str = ""
    kind: str = msgspec.field(default="", name="detail-type")
    detail: _Detail = _Detail()


@dataclass
class UrlHeaders:
    """Headers by lower-case name; Lambda joins the values of a repeated header with commas."""

    sent: dict[str, str]

    def get(self, key: str) -> str | None:
        return self.sent.get(key.lower())


@dataclass
class UrlRequest:
    """A request of the function URL in the form that :class:`HttpApp` reads."""

    method: str
    path: str
    headers: UrlHeaders
    content_length: int | None
    stream: io.BytesIO
    iam: auth_aws.Iam | None = field(default=None, repr=False)


def handler(event: dict[str, Any], _context: object = None) -> dict[str, Any]:
    """Answer a request of the URL, or handle an event: Lambda's entry point."""
    return _app().event(event)


@cache
def _app() -> LambdaApp:
    from spotkeeper.reconcile.service.logging_json import setup

    setup()
    spare_the_collector()
    return LambdaApp(Runtime(settings_from_env()))


class LambdaApp(HttpApp):
    """The app on AWS: IAM gives a machine's id, and the record or a listing gives the machine's name."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Speaker] = OrderedDict()
        self._looked = float("-inf")

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        if "requestContext" not in event:
            return msgspec.to_builtins(self._hinted_by(event))  # type: ignore[no-any-return]
        try:
            body, status, headers = self.handle(request_of(codec.convert(event, UrlEvent)))
        except (msgspec.ValidationError, BodyError) as error:
            log.warning("an event has an unexpected form: %s", type(error).__name__)
            body, status, headers = refused()
        return {"statusCode": status, "headers": headers, "body": body.decode()}

    def _hinted_by(self, event: dict[str, Any]) -> Ticked:
        """Handle an event. After an error Lambda moves it to the dead-letter queue, and the next tick does its work."""
        from spotkeeper.reconcile.controller import alarm
        from spotkeeper.reconcile.store.documents import CorruptError

        visit = self.visit()
        try:
            return self._follow(event, visit)
        except CorruptError as error:  # the stack's document is unreadable: no job can have a round
            alarm.unreadable(self.store(visit), error)
            raise
        finally:
            self.announce(visit)
            self.runtime.collect()

    def _follow(self, event: dict[str, Any], visit: Visit) -> Ticked:
        """Run a tick for the schedule, or a round of the job whose machine the event names; ignore other events."""
        stack = self.stack(visit)
        try:
            hint = codec.convert(event, BridgeEvent)
        except msgspec.ValidationError:
            hint = BridgeEvent("")
        if hint.source not in SOURCES or (hint.source != TICK and hint.account != stack.project):
            self.store(visit).quarantine(repr(sorted(event))[:1000])
            return Ticked(0)
        if hint.source == TICK:
            return self.run_tick(visit, strict=True)
        machine = self._meant(hint.detail.instance, stack) if auth_aws.is_instance(hint.detail.instance) else None
        owned = names.parse_vm_name(machine.name) if machine is not None else None
        if owned is None:
            return Ticked(0)
        # No other log shows that an event arrived.
        log.info("event of %s: %s", hint.detail.instance, hint.kind, extra={"job": owned.job})
        return Ticked(1, busy=self.run_round(stack, owned.job, visit) is None)

    # -- authentication by IAM

    def _agent(self, request: Request, stack: StackState) -> Speaker:
        return Speaker(auth_aws.instance(_iam(request), stack.project, stack.node_identity), "", "")

    def _speaker(self, who: Speaker, sync: Sync, stack: StackState, visit: Visit) -> Speaker:
        """Return ``who`` with the name of the machine that has its id, or unchanged if the id is not found.

        The job in the body only says which record to read first.
        """
        read = self.store(visit).read_record(sync.job) if sync.job is not None else None
        machine = named(read.value, stack.stack, who.uid) if read is not None else None
        return machine or self._listed(who.uid, stack) or who

    def _invoker(self, request: Request) -> Caller:
        settings = self.runtime.settings
        return auth_aws.invoker(_iam(request), settings.invokers, f"sk-{settings.stack}-sb", settings.submitters)

    def _hint(self, request: Request) -> Caller:
        return self._invoker(request)

    def _listed(self, uid: str, stack: StackState) -> Speaker | None:
        """Return the machine with this id from a listing, which is kept for requests of other machines."""
        with self._lock:
            found = self._known.get(uid)
            if found is not None or time.monotonic() - self._looked < LOOK_AGAIN_S:
                return found
            self._looked = time.monotonic()
        nodes = auth_aws.nodes_of(self.runtime.cloud(stack).list(stack.stack), stack.stack)
        self._learn(nodes)
        return nodes.get(uid)

    def _meant(self, uid: str, stack: StackState) -> Speaker | None:
        """Return the machine that an event names; None if it is not the stack's.

        If the cloud can, it looks up only this machine, by its id. A listing can lack this machine by now, and listings
        for all events of machines outside the stack would cost too much.
        """
        with self._lock:
            if uid in self._known:
                return self._known[uid]
        cloud = self.runtime.cloud(stack)
        finder = cloud.cloud if isinstance(cloud, Paced) else cloud
        if not isinstance(finder, Finds):
            return self._listed(uid, stack)
        vm = finder.find(uid, FIND_S)
        if vm is None or not auth_aws.is_ours(vm, stack.stack):
            return None
        found = Speaker(vm.uid, vm.name, vm.zone)
        self._learn({uid: found})
        return found

    def _learn(self, nodes: Mapping[str, Speaker]) -> None:
        with self._lock:
            self._known.update(nodes)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)


def request_of(event: UrlEvent) -> UrlRequest:
    """Return the request in an event. Of a body above ``MAX_BODY``, which is refused later, only the beginning is kept.

    Raises:
        BodyError: the body claims to be base64 and is not.
    """
    try:
        body = base64.b64decode(event.body, validate=True) if event.is_base64_encoded else event.body.encode()
    except (binascii.Error, ValueError):
        raise BodyError("no base64") from None
    context = event.request_context
    headers = UrlHeaders({name.lower(): value for name, value in event.headers.items()})
    iam = context.authorizer.iam if context.authorizer else None
    cut = io.BytesIO(body[: MAX_BODY + 1])
    return UrlRequest(context.http.method, context.http.path, headers, len(body), cut, iam)


def named(record: Record, stack: str, uid: str) -> Speaker | None:
    """Return the machine with this id if the record has it (admission writes it there); else None."""
    for index, node in enumerate(record.nodes):
        for slot in (node.cur, node.next):
            if slot is not None and slot.uid == uid:
                name = slot.machine or names.vm_name(stack, record.job, index, slot.attempt)
                return Speaker(uid, name, slot.zone)
    return None


def refused() -> Answer:
    return b'{"error":"invalid"}', 400, dict(HEADERS)


def _iam(request: Request) -> auth_aws.Iam | None:
    return request.iam if isinstance(request, UrlRequest) else None
