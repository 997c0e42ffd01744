"""The function's door on AWS: a function URL (``AuthType`` AWS_IAM), a schedule, and EventBridge. Decides nothing.

Handler: ``spotkeeper.reconcile.lambda_.handler``. A request of the URL carries IAM's word for the caller. Whoever
may call ``lambda:InvokeFunction`` otherwise than through the URL could write that word himself, so the nodes'
right to it must be bound to ``lambda:InvokedViaFunctionUrl``; what is invoked directly comes from the schedule and
from EventBridge, by resource policy, and is a hint: it brings a round at the most.
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

from spotkeeper.reconcile import auth_aws
from spotkeeper.reconcile.auth import Caller, Who
from spotkeeper.reconcile.body import MAX_BODY, BodyError
from spotkeeper.reconcile.http import HEADERS, Answer, Door, Request, Ticked, Visit
from spotkeeper.reconcile.pace import Paced
from spotkeeper.reconcile.runtime import Runtime, settings_from_env, spare_the_collector
from spotkeeper.spec import codec, names

if TYPE_CHECKING:
    from spotkeeper.reconcile.document import Speaker
    from spotkeeper.spec.cloud import Vm
    from spotkeeper.spec.generation import Sync
    from spotkeeper.spec.record import Record
    from spotkeeper.spec.stack import StackState

FIND_S = 5.0  # real; to ask for one machine
LOOK_AGAIN_S = 2.0  # real: a node nobody knows asks twice a second, and a listing costs
KNOWN = 10_000  # nodes whose names are remembered: an id never gets another
TICK = "spotkeeper.tick"  # source of the schedule's event, as Pulumi declares it
SOURCES = ("aws.ec2", TICK)

log = logging.getLogger("spotkeeper.lambda")


@runtime_checkable
class Finds(Protocol):
    """A cloud that can be asked for one machine."""

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
    """Payload format 2.0, as far as it is read."""

    request_context: _Context
    headers: dict[str, str] = {}
    body: str = ""
    is_base64_encoded: bool = False


class _Detail(Struct, frozen=True):
    instance: str = msgspec.field(default="", name="instance-id")


class BridgeEvent(Struct, frozen=True):
    """An event of EventBridge. Source, account and instance are read, and only to say where to look; its kind is
    written down."""

    source: str
    account: str = ""
    kind: str = msgspec.field(default="", name="detail-type")
    detail: _Detail = _Detail()


@dataclass
class UrlHeaders:
    """Lambda gives lower-case names, and joins what was sent twice with commas."""

    sent: dict[str, str]

    def get(self, key: str) -> str | None:
        return self.sent.get(key.lower())


@dataclass
class UrlRequest:
    """A request of the function URL, as :class:`Door` reads one."""

    method: str
    path: str
    headers: UrlHeaders
    content_length: int | None
    stream: io.BytesIO
    iam: auth_aws.Iam | None = field(default=None, repr=False)


def handler(event: dict[str, Any], _context: object = None) -> dict[str, Any]:
    """The entry point: a request of the URL gets an answer, an event gets what came of it."""
    return _door().event(event)


@cache
def _door() -> LambdaDoor:
    from spotkeeper.reconcile.logs import setup

    setup()
    spare_the_collector()
    return LambdaDoor(Runtime(settings_from_env()))


class LambdaDoor(Door):
    """The same paths and bodies; IAM says who speaks, and the record or a listing what the node is called."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, auth_aws.Listed] = OrderedDict()
        self._looked = float("-inf")

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        if "requestContext" not in event:
            return msgspec.to_builtins(self._hinted_by(event))  # type: ignore[no-any-return]
        try:
            body, status, headers = self.handle(request_of(codec.convert(event, UrlEvent)))
        except (msgspec.ValidationError, BodyError) as error:
            log.warning("an event of another form: %s", type(error).__name__)
            body, status, headers = refused()
        return {"statusCode": status, "headers": headers, "body": body.decode()}

    def _hinted_by(self, event: dict[str, Any]) -> Ticked:
        """What fails here is Lambda's to tell: the schedule comes again, and what it was about is set aside."""
        from spotkeeper.reconcile import alarm
        from spotkeeper.reconcile.store_api import CorruptError

        visit = self._visit()
        try:
            return self._follow(event, visit)
        except CorruptError as error:  # the stack itself: no job can be looked after
            alarm.unreadable(self._store(visit), error)
            raise

    def _follow(self, event: dict[str, Any], visit: Visit) -> Ticked:
        """A round of the job whose node it names, a tick for the schedule; anything else is set aside."""
        stack = self._stack(visit)
        try:
            hint = codec.convert(event, BridgeEvent)
        except msgspec.ValidationError:
            hint = BridgeEvent("")
        if hint.source not in SOURCES or (hint.source != TICK and hint.account != stack.project):
            self._store(visit).quarantine(repr(sorted(event))[:1000])
            return Ticked(0)
        if hint.source == TICK:
            return self._run_tick(visit)
        node = self._meant(hint.detail.instance, stack) if auth_aws.is_instance(hint.detail.instance) else None
        owned = names.parse_vm_name(node.name) if node is not None else None
        if owned is None:
            return Ticked(0)
        # A request of the URL shows in its caller's log; that an event arrived shows nowhere else.
        log.info("event of %s: %s", hint.detail.instance, hint.kind, extra={"job": owned.job})
        return Ticked(1, busy=self._run_round(stack, owned.job, visit) is None)

    # -- who speaks

    def _agent(self, request: Request, stack: StackState) -> Who:
        uid = auth_aws.instance(_iam(request), stack.project, stack.node_identity)
        return Who(uid, "", "", stack.project, stack.node_identity)

    def _speaker(self, who: Who, sync: Sync, stack: StackState, visit: Visit) -> Speaker:
        """Its name by its id. The body's job says which record to read first, and is believed nothing else."""
        from spotkeeper.reconcile.document import Speaker

        held = self._store(visit).read_record(sync.job) if sync.job is not None else None
        node = named(held.value, stack.stack, who.uid) if held is not None else None
        node = node or self._listed(who.uid, stack)
        return Speaker(who.uid, node.name, node.zone) if node else Speaker(who.uid, "", "")

    def _invoker(self, request: Request) -> Caller:
        return auth_aws.invoker(_iam(request), self.runtime.settings.invokers)

    def _hint(self, request: Request) -> Caller:
        return self._invoker(request)

    def _listed(self, uid: str, stack: StackState) -> auth_aws.Listed | None:
        """The node of this id; a look that is made for it makes all others known as well, which a gang begins with."""
        with self._lock:
            found = self._known.get(uid)
            if found is not None or time.monotonic() - self._looked < LOOK_AGAIN_S:
                return found
            self._looked = time.monotonic()
        nodes = auth_aws.nodes_of(self.runtime.cloud(stack).list(stack.stack), stack.stack)
        self._learn(nodes)
        return nodes.get(uid)

    def _meant(self, uid: str, stack: StackState) -> auth_aws.Listed | None:
        """The node that an event names: known, or asked for by its id. It may have ended, and be listed no more.

        Events of strangers come too, so none of them costs a whole listing where the cloud can be asked for one.
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
        found = auth_aws.Listed(vm.uid, vm.name, vm.zone)
        self._learn({uid: found})
        return found

    def _learn(self, nodes: Mapping[str, auth_aws.Listed]) -> None:
        with self._lock:
            self._known.update(nodes)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)


def request_of(event: UrlEvent) -> UrlRequest:
    """The request in an event. Lambda has read the body (6 MB at the most); ours ends at 16 KB.

    Raises:
        BodyError: the body is not the base64 that it says it is.
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


def named(record: Record, stack: str, uid: str) -> auth_aws.Listed | None:
    """The node of this id in a record: it was listed when it was admitted."""
    for index, rank in enumerate(record.ranks):
        for slot in (rank.cur, rank.next):
            if slot is not None and slot.uid == uid:
                name = slot.node or names.vm_name(stack, record.job, index, slot.attempt)
                return auth_aws.Listed(uid, name, slot.zone)
    return None


def refused() -> Answer:
    return b'{"error":"invalid"}', 400, dict(HEADERS)


def _iam(request: Request) -> auth_aws.Iam | None:
    return request.iam if isinstance(request, UrlRequest) else None
