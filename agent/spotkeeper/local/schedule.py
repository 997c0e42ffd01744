"""Cloud Scheduler's part: a declared job posts to its target at every match of its schedule, in virtual time."""

from __future__ import annotations

import asyncio
import base64
import logging
import re

from msgspec import Struct

from spotkeeper.local import errors
from spotkeeper.local.push import post
from spotkeeper.local.resources import JOB, Resource, Resources, section
from spotkeeper.local.tokens import Tokens
from spotkeeper.local.wire import JsonObject
from spotkeeper.local.world import World

log = logging.getLogger("spotkeeper.local")
ANSWER_S = 60.0  # real: a tick may take as long as the function may


class Oidc(Struct, frozen=True, rename="camel"):
    service_account_email: str
    audience: str = ""


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
    """Minutes between two matches of the schedules our programs write.

    Raises:
        ApiError: 501 for any other cron expression.
    """
    if schedule == "0 * * * *":
        return 60
    found = re.fullmatch(r"\*(?:/(\d+))? \* \* \* \*", schedule)
    if not found or not 1 <= int(found[1] or 1) <= 59:
        raise errors.not_built(f"schedule '{schedule}' (there is: '* * * * *', '*/N * * * *', '0 * * * *')")
    return int(found[1] or 1)


class Schedule:
    """The effect of ``cloudscheduler:job``. A tick that is still running is not run twice at once."""

    def __init__(self, world: World, resources: Resources, tokens: Tokens) -> None:
        self._world = world
        self._resources = resources
        self._tokens = tokens
        self._running: dict[str, asyncio.Task[None]] = {}
        world.handlers["job.tick"] = self._tick
        resources.register(JOB, self)

    def check(self, name: str, properties: JsonObject) -> None:
        job = section(_Job, properties, name)
        period_minutes(job.schedule)
        if job.http_target.http_method != "POST":
            raise errors.not_built(f"httpMethod {job.http_target.http_method}")

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
        headers = dict(target.headers)
        if target.oidc_token is not None:
            audience = target.oidc_token.audience or target.uri
            token = self._tokens.identity(target.oidc_token.service_account_email, audience, self._world.now())
            headers["Authorization"] = f"Bearer {token}"
        try:
            status = await post(target.uri, base64.b64decode(target.body), headers, ANSWER_S)
        except OSError as error:
            log.warning("job %s: %s", name, error)
            return
        if not 200 <= status < 300:
            log.warning("job %s: %s answered %d", name, target.uri, status)
