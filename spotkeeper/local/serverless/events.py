"""Delivers preemptions to the function: audit log -> sink -> topic -> push subscription, each as declared.

As in the cloud, an event is delivered only if a sink matches and its topic has a subscription. A push without a 2xx
answer is repeated with backoff until the message's retention ends.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper.local.access.auth import Tokens
from spotkeeper.local.compute.query import look_up
from spotkeeper.local.compute.resources import SINK, SUBSCRIPTION, TOPIC, Effect, Resources, section
from spotkeeper.local.core import errors
from spotkeeper.local.core.rest import last, timestamp
from spotkeeper.local.core.schema import JsonObject
from spotkeeper.local.core.vm import LocalVm
from spotkeeper.local.core.world import World
from spotkeeper.local.serverless.schedule import Oidc, post

log = logging.getLogger("spotkeeper.local")
FIRST_S, LONGEST_S = 5.0, 60.0  # virtual: default backoff
KEEP_S = 600.0  # virtual: default retention


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
    """An undelivered message. It is the argument of a timer, so that a restart loses no message."""

    subscription: str
    message: str
    message_id: str
    published: float
    attempt: int = 0


class LogFilter:
    """The part of the logging query language that stacks use: ``path="text"``, ``=~"regex"``, ``:"part"``, AND."""

    _TERM = re.compile(r'\s*(?P<path>[A-Za-z_.]+)\s*(?P<op>=~|=|:)\s*"(?P<value>(?:[^"\\]|\\.)*)"\s*')

    def __init__(self, text: str) -> None:
        """Parse a filter.

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
        found = look_up(entry, path)
        text = "" if found is None else str(found)
        if op == "=":
            return text == value
        return value in text if op == ":" else re.search(value, text) is not None


class Events(Effect):
    """The effects of ``logging:projectSink`` and ``pubsub:subscription``.

    The removal of a subscription drops its undelivered messages.
    """

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
            if self._resources.get(TOPIC, last(subscription.topic)) is None:
                raise errors.not_found(subscription.topic)

    def preempted(self, vm: LocalVm) -> None:
        """Pass the audit log's entry of a preemption to every sink whose filter matches."""
        entry: JsonObject = {
            "insertId": f"{vm.id:x}",
            "logName": f"projects/{vm.project}/logs/cloudaudit.googleapis.com%2Fsystem_event",
            "protoPayload": {
                "@type": "type.googleapis.com/google.cloud.audit.AuditLog",
                "methodName": "compute.instances.preempted",
                "resourceName": vm.path,
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
                self._publish(last(route.destination), entry)

    def _publish(self, topic: str, entry: JsonObject) -> None:
        for resource in self._resources.list(SUBSCRIPTION):
            if last(section(_Subscription, resource.properties, resource.name).topic) == topic:
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
        # The next attempt is stored before this one begins; a 2xx answer deletes it.
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
        headers, now = {"Content-Type": "application/json"}, self._world.now()
        try:
            status = await post(
                push.push_endpoint, json.dumps(body).encode(), headers, push.oidc_token, self._tokens, now
            )
        except OSError as error:
            log.warning("subscription %s: %s", delivery.subscription, error)
            return
        if 200 <= status < 300:
            with self._world.state.transaction():
                self._world.state.drop_timers("event.push", msgspec.json.encode(again).decode())
        else:
            log.warning("subscription %s: the endpoint answered %d", delivery.subscription, status)


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))
