"""Cloud Scheduler: a declared job posts to its target at every match of its schedule, in virtual time."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from msgspec import Struct

from spotkeeper.local.access.auth import Tokens
from spotkeeper.local.compute.resources import JOB, Effect, Resource, Resources, section
from spotkeeper.local.core import errors, rest
from spotkeeper.local.core.schema import JsonObject
from spotkeeper.local.core.world import World

log = logging.getLogger("spotkeeper.local")
ANSWER_S = 60.0  # real seconds; the function's own time limit
PATIENCE = 3  # failed attempts in a row before the function's process is restarted; doubled by each restart


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
    """Return the minutes between two matches of a schedule, of the forms that stacks declare.

    Raises:
        ApiError: 501 for any other cron expression.
    """
    if schedule == "0 * * * *":
        return 60
    found = re.fullmatch(r"\*(?:/(\d+))? \* \* \* \*", schedule)
    if not found or not 1 <= int(found[1] or 1) <= 59:
        raise errors.not_built(f"schedule '{schedule}' (built: '* * * * *', '*/N * * * *', '0 * * * *')")
    return int(found[1] or 1)


class Schedule(Effect):
    """The effect of ``cloudscheduler:job``. A job's attempts never overlap.

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
        body, now = base64.b64decode(target.body), self._world.now()
        try:
            status = await post(target.uri, body, target.headers, target.oidc_token, self._tokens, now)
        except OSError as error:
            log.warning("job %s: %s", name, error)
            status = 0
        else:
            if not 200 <= status < 300:
                log.warning("job %s: %s answered %d", name, target.uri, status)
        self._record(name, target.uri, succeeded=200 <= status < 300)

    def _record(self, name: str, uri: str, *, succeeded: bool) -> None:
        """Count failures in a row, and restart the process after too many: a new process has no leaks yet."""
        if succeeded:
            self._failures.pop(name, None)
            self._patience.pop(name, None)
            return
        self._failures[name] += 1
        patience = self._patience.get(name, PATIENCE)
        if self._failures[name] >= patience:
            log.warning("job %s: %d attempts in a row failed, restarting its target", name, self._failures[name])
            self._failures[name] = 0
            self._patience[name] = 2 * patience
            self._restart(uri)
