"""Calls the function: Cloud Scheduler at every match of a schedule, in virtual time, and Pub/Sub at each preemption.

A preemption goes from the audit log to a sink, a topic and a push subscription, each as declared. As at Google, an
event is delivered only if a sink matches and its topic has a subscription. A push without a 2xx answer is repeated with
backoff until the message's retention ends.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper.local.access.auth import Tokens
from spotkeeper.local.compute.query import look_up
from spotkeeper.local.compute.resources import JOB, SINK, SUBSCRIPTION, TOPIC, Effect, Resource, Resources, section
from spotkeeper.local.core import errors, rest
from spotkeeper.local.core.rest import last, timestamp
from spotkeeper.local.core.schema import JsonObject
from spotkeeper.local.core.vm import LocalVm
from spotkeeper.local.core.world import World

log = logging.getLogger("spotkeeper.local")
ANSWER_S = 60.0  # real seconds; the function's own time limit
PATIENCE = 3  # failed attempts in a row before the function's process is restarted; each restart doubles the number


class Oidc(Struct, frozen=True, rename="camel"):
    service_account_email: str
    audience: str = ""


async def post(url: str, body: bytes, headers: Mapping[str, str], oidc: Oidc | None, tokens: Tokens, now: float) -> int:
    """POST to a process on this machine, with an identity token if ``oidc`` declares one; return the status.

    Raises:
        OSError: refused, reset, timed out, or the address is not on this machine.
    """
    if not (urlsplit(url).hostname or "").startswith("127."):
        raise OSError(f"{url}: not an address of this machine")
    if oidc is not None:
        token = tokens.identity(oidc.service_account_email, oidc.audience or url, now)
        headers = {**headers, "Authorization": f"Bearer {token}"}
    return await asyncio.to_thread(_send, url, body, headers)


def _send(url: str, body: bytes, headers: Mapping[str, str]) -> int:
    with rest.session() as session:
        answer = session.post(url, body, headers=headers, timeout=ANSWER_S, allow_redirects=False)
        return answer.status_code


# -- schedules


class _HttpTarget(Struct, frozen=True, rename="camel"):
    uri: str
    http_method: str = "POST"
    body: str = ""  # base64
    headers: dict[str, str] = {}
    oidc_token: Oidc | None = None


class _Job(Struct, frozen=True, rename="camel"):
    schedule: str
    http_target: _HttpTarget
    paused: bool = False


def period_minutes(schedule: str) -> int:
    """Return the minutes between two matches of a schedule; only forms that stacks declare are supported.

    Raises:
        ApiError: 501 for any other cron expression.
    """
    if schedule == "0 * * * *":
        return 60
    found = re.fullmatch(r"\*(?:/(\d+))? \* \* \* \*", schedule)
    if not found or not 1 <= int(found[1] or 1) <= 59:
        raise errors.not_built(f"the schedule must be '* * * * *', '*/N * * * *' or '0 * * * *', not '{schedule}'")
    return int(found[1] or 1)


class Schedule(Effect):
    """Implements ``cloudscheduler:job``: calls the scheduler job's target on schedule, one call at a time.

    ``restart`` restarts the process that serves a URL, as a platform restarts an instance that keeps failing.
    """

    def __init__(self, world: World, resources: Resources, tokens: Tokens, restart: Callable[[str], None]) -> None:
        self._world = world
        self._resources = resources
        self._tokens = tokens
        self._restart = restart
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failures: Counter[str] = Counter()
        self._patience: dict[str, int] = {}
        world.handlers["job.tick"] = self._tick
        resources.register(JOB, self)

    def check(self, name: str, properties: JsonObject) -> None:
        job = section(_Job, properties, name)
        period_minutes(job.schedule)
        if job.http_target.http_method != "POST":
            raise errors.not_built(f"httpMethod {job.http_target.http_method} is not supported")

    def apply(self, resource: Resource) -> dict[str, str]:
        self._world.state.drop_timers("job.tick", resource.name)
        self._arm(resource)
        return {"state": "ENABLED"}

    def remove(self, resource: Resource) -> None:
        self._world.state.drop_timers("job.tick", resource.name)

    def _arm(self, resource: Resource) -> None:
        period_s = 60.0 * period_minutes(section(_Job, resource.properties, resource.name).schedule)
        self._world.at((self._world.now() // period_s + 1) * period_s, "job.tick", resource.name)

    def _tick(self, name: str) -> None:
        resource = self._resources.get(JOB, name)
        if resource is None:
            return
        self._arm(resource)
        job = section(_Job, resource.properties, name)
        running = self._running.get(name)
        if job.paused or (running is not None and not running.done()):
            return
        self._world.state.after(lambda: self._start(name, job))

    def _start(self, name: str, job: _Job) -> None:
        self._running[name] = asyncio.get_running_loop().create_task(self._post(name, job))

    async def _post(self, name: str, job: _Job) -> None:
        target = job.http_target
        body, now = base64.b64decode(target.body), self._world.now()
        try:
            status = await post(target.uri, body, target.headers, target.oidc_token, self._tokens, now)
        except OSError as error:
            log.warning("scheduler job %s: %s", name, error)
            status = 0
        else:
            if not 200 <= status < 300:
                log.warning("scheduler job %s: %s answered %d", name, target.uri, status)
        self._record(name, target.uri, succeeded=200 <= status < 300)

    def _record(self, name: str, uri: str, *, succeeded: bool) -> None:
        """Count failures in a row; after too many, restart the target's process, which may have leaked memory."""
        if succeeded:
            self._failures.pop(name, None)
            self._patience.pop(name, None)
            return
        self._failures[name] += 1
        patience = self._patience.get(name, PATIENCE)
        if self._failures[name] >= patience:
            log.warning("scheduler job %s: %d calls in a row failed, restarting its target", name, self._failures[name])
            self._failures[name] = 0
            self._patience[name] = 2 * patience
            self._restart(uri)


# -- preemption events

FIRST_S, LONGEST_S = 5.0, 60.0  # virtual; default backoff
KEEP_S = 600.0  # virtual; default retention


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
    """A message to deliver. It is stored as the argument of a timer, so that a restart loses no message."""

    subscription: str
    message: str
    message_id: str
    published: float
    attempt: int = 0


class LogFilter:
    """The part of the logging query language that stacks use: ``path="text"``, ``=~"regex"``, ``:"part"``, AND."""

    _TERM = re.compile(r'\s*(?P<path>[A-Za-z_.]+)\s*(?P<op>=~|=|:)\s*"(?P<value>(?:[^"\\]|\\.)*)"\s*')

    def __init__(self, text: str) -> None:
        """Parse a filter; ApiError (501) for an unsupported form."""
        self._terms: list[tuple[str, str, str]] = []
        for part in re.split(r"\s+AND\s+", text.strip()):
            found = self._TERM.fullmatch(part)
            if not found:
                raise errors.not_built(f"the log filter '{part}' is not supported")
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
    """Implements ``logging:projectSink`` and ``pubsub:subscription``: delivers preemption events to the function.

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
