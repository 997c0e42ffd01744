"""How a preemption reaches the function: audit log -> sink -> topic -> push subscription, each as declared.

No sink whose filter matches, or no subscription on its topic, and nothing is told: as in the cloud. A push
that is not answered with 2xx is repeated with backoff until its retention ends.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re

import msgspec
from msgspec import Struct

from spotkeeper.local import errors
from spotkeeper.local.paths import timestamp
from spotkeeper.local.push import post
from spotkeeper.local.resources import SINK, SUBSCRIPTION, TOPIC, Resource, Resources, section
from spotkeeper.local.schedule import ANSWER_S, Oidc
from spotkeeper.local.tokens import Tokens
from spotkeeper.local.vm import Vm
from spotkeeper.local.wire import JsonObject, JsonValue
from spotkeeper.local.world import World
from spotkeeper.spec import codec

log = logging.getLogger("spotkeeper.local")
FIRST_S, LONGEST_S = 5.0, 60.0  # virtual backoff, where the subscription says nothing else
KEEP_S = 600.0  # virtual: retention, where the subscription says nothing else


class _Push(Struct, frozen=True, rename="camel"):
    push_endpoint: str
    oidc_token: Oidc | None = None


class _Retry(Struct, frozen=True, rename="camel"):
    minimum_backoff: str = f"{FIRST_S}s"
    maximum_backoff: str = f"{LONGEST_S}s"


class _Subscription(Struct, frozen=True, rename="camel"):
    topic: str
    push_config: _Push | None = None
    retry_policy: _Retry = _Retry()
    message_retention_duration: str = f"{KEEP_S}s"


class _Sink(Struct, frozen=True, rename="camel"):
    destination: str
    filter: str = ""


class _Delivery(Struct, frozen=True):
    """A message on its way; the body of a timer, so that a restart loses none."""

    subscription: str
    message: str
    message_id: str
    published: float
    attempt: int = 0


class LogFilter:
    """The part of the logging query language our sinks use: ``path="text"``, ``path=~"regex"``, AND."""

    _TERM = re.compile(r'\s*(?P<path>[A-Za-z_.]+)\s*(?P<op>=~|=|:)\s*"(?P<value>(?:[^"\\]|\\.)*)"\s*')

    def __init__(self, text: str) -> None:
        """
        Raises:
            ApiError: 501 for anything else.
        """
        self._terms: list[tuple[str, str, str]] = []
        for part in re.split(r"\s+AND\s+", text.strip()):
            found = self._TERM.fullmatch(part)
            if not found:
                raise errors.not_built(f"log filter '{part}'")
            self._terms.append((found["path"], found["op"], found["value"]))

    def matches(self, entry: JsonObject) -> bool:
        return all(self._holds(entry, *term) for term in self._terms)

    def _holds(self, entry: JsonObject, path: str, op: str, value: str) -> bool:
        at: JsonValue = entry
        for part in path.split("."):
            at = at.get(part) if isinstance(at, dict) else None
        text = "" if at is None else str(at)
        if op == "=":
            return text == value
        return value in text if op == ":" else re.search(value, text) is not None


class Events:
    """The effects of ``logging:projectSink`` and ``pubsub:subscription``."""

    def __init__(self, world: World, resources: Resources, tokens: Tokens) -> None:
        self._world = world
        self._resources = resources
        self._tokens = tokens
        self._tasks: set[asyncio.Task[None]] = set()
        world.handlers["event.push"] = self._push
        resources.register(SINK, self)
        resources.register(SUBSCRIPTION, self)

    def check(self, name: str, properties: JsonObject) -> None:
        if "destination" in properties:
            LogFilter(section(_Sink, properties, name).filter)
        else:
            subscription = section(_Subscription, properties, name)
            if self._resources.get(TOPIC, _name(subscription.topic)) is None:
                raise errors.not_found(subscription.topic)

    def apply(self, resource: Resource) -> dict[str, str]:
        return {}

    def remove(self, resource: Resource) -> None:
        """A message on its way ends at its next attempt."""

    def preempted(self, vm: Vm) -> None:
        """Write the audit log's entry and hand it to every route that wants it."""
        name: JsonValue = vm.path
        entry: JsonObject = {
            "insertId": f"{vm.id:x}",
            "logName": f"projects/{vm.project}/logs/cloudaudit.googleapis.com%2Fsystem_event",
            "protoPayload": {
                "@type": "type.googleapis.com/google.cloud.audit.AuditLog",
                "methodName": "compute.instances.preempted",
                "resourceName": name,
                "serviceName": "compute.googleapis.com",
            },
            "resource": {
                "type": "gce_instance",
                "labels": {"instance_id": str(vm.id), "project_id": vm.project, "zone": vm.zone},
            },
            "severity": "INFO",
            "timestamp": timestamp(self._world.now()),
        }
        for sink in self._resources.list(SINK):
            route = section(_Sink, sink.properties, sink.name)
            if LogFilter(route.filter).matches(entry):
                self._publish(_name(route.destination), entry)

    def _publish(self, topic: str, entry: JsonObject) -> None:
        for resource in self._resources.list(SUBSCRIPTION):
            if _name(section(_Subscription, resource.properties, resource.name).topic) == topic:
                number = str(self._world.state.next_number("message"))
                message = base64.b64encode(json.dumps(entry).encode()).decode()
                self._send(_Delivery(resource.name, message, number, self._world.now()), 0.0)

    def _send(self, delivery: _Delivery, delay_s: float) -> None:
        self._world.soon(delay_s, "event.push", msgspec.json.encode(delivery).decode())

    def _push(self, arg: str) -> None:
        delivery = codec.decode(arg, _Delivery)
        resource = self._resources.get(SUBSCRIPTION, delivery.subscription)
        if resource is None:
            return
        subscription = section(_Subscription, resource.properties, resource.name)
        if subscription.push_config is None:
            return
        # The next attempt is on disk before this one begins; an answer takes it away.
        backoff = min(
            _seconds(subscription.retry_policy.minimum_backoff) * 2**delivery.attempt,
            _seconds(subscription.retry_policy.maximum_backoff),
        )
        again = msgspec.structs.replace(delivery, attempt=delivery.attempt + 1)
        kept_s = _seconds(subscription.message_retention_duration)
        if self._world.now() - delivery.published + backoff < kept_s:
            self._send(again, backoff)
        self._world.state.after(lambda: self._start(subscription, delivery, again))

    def _start(self, subscription: _Subscription, delivery: _Delivery, again: _Delivery) -> None:
        task = asyncio.get_running_loop().create_task(self._post(subscription, delivery, again))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, subscription: _Subscription, delivery: _Delivery, again: _Delivery) -> None:
        push = subscription.push_config
        assert push is not None
        body = {
            "message": {
                "data": delivery.message,
                "messageId": delivery.message_id,
                "publishTime": timestamp(delivery.published),
                "attributes": {"logging.googleapis.com/timestamp": timestamp(delivery.published)},
            },
            "subscription": delivery.subscription,
        }
        headers = {"Content-Type": "application/json"}
        if push.oidc_token is not None:
            audience = push.oidc_token.audience or push.push_endpoint
            token = self._tokens.identity(push.oidc_token.service_account_email, audience, self._world.now())
            headers["Authorization"] = f"Bearer {token}"
        try:
            status = await post(push.push_endpoint, json.dumps(body).encode(), headers, ANSWER_S)
        except OSError as error:
            log.warning("subscription %s: %s", delivery.subscription, error)
            return
        if 200 <= status < 300:
            with self._world.state.transaction():
                self._world.state.drop_timers("event.push", msgspec.json.encode(again).decode())
        else:
            log.warning("subscription %s: the endpoint answered %d", delivery.subscription, status)


def _name(link: str) -> str:
    """``pubsub.googleapis.com/projects/p/topics/t`` -> ``t``."""
    return link.rsplit("/", 1)[-1]


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))
