"""Our client of Compute Engine's metadata server, against the local cloud's, which google-auth takes for the real one
(``tests/local/machines/test_metadata.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import Role, SyncReply
from spotkeeper.local.access.auth import Principal, Tokens
from spotkeeper.local.machines.metadata import GuestView as View
from spotkeeper.local.machines.metadata import MetadataServer
from spotkeeper_agent.cloud import gce
from spotkeeper_agent.cloud.gce import Gce, warning_of
from spotkeeper_agent.cloud.metadata import FIRST, MetadataError, Watcher
from spotkeeper_agent.cloud.notice import Cause, CloudWarning, Instance
from spotkeeper_agent.core.log import Log
from tests.agent.fakes import JOB, Fake, Machine, wait_until

TREE: dict[str, Any] = {
    "id": 17,
    "name": "sk-test-abcdefgh-n0000-a1",
    "zone": "projects/1/zones/us-x1-a",
    "attributes": {"sk-stack": "test"},
    "network-interfaces": [{"ip": "10.0.0.7"}],
    "preempted": "FALSE",
    "maintenance-event": "NONE",
    "virtual-clock": {"drift-token": "0"},
}


class Server:
    """The local cloud's metadata server with a tree that a test sets."""

    def __init__(self, keys: Path) -> None:
        self.tree = dict(TREE)
        self.status = 200
        self.asked = 0
        self._server = MetadataServer(self._look, Tokens(keys), Clock())
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET"])])
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._uvicorn.run, args=([listener],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._uvicorn.started)
        self._loop: asyncio.AbstractEventLoop | None = None

    def set(self, **changes: Any) -> None:
        self.tree |= {name.replace("_", "-"): value for name, value in changes.items()}
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._server.changed)

    def close(self) -> None:
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join(10)

    def _look(self) -> View:
        return View({"instance": dict(self.tree), "project": {}}, Principal("node@p"), {"instance_id": "17"})

    async def _answer(self, request: Request) -> Response:
        self._loop = asyncio.get_running_loop()
        self.asked += 1
        return Response(status_code=self.status) if self.status != 200 else await self._server.answer(request)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


@pytest.fixture
def one(server: Server) -> Gce:
    return Gce(Clock(), server.host)


def test_the_instance_is_described(one: Gce) -> None:
    assert one.instance() == Instance("17", str(TREE["name"]), "us-x1-a", {"sk-stack": "test"})


def test_the_first_wait_returns_the_present_state_at_once(server: Server, one: Gce) -> None:
    server.set(preempted="TRUE")
    instance, _ = one.wait(FIRST)
    assert instance.warning == CloudWarning(Cause.PREEMPTED), "TRUE before the agent began"


def test_a_wait_ends_at_a_relevant_change(server: Server, one: Gce) -> None:
    """Also of an attribute, and of one that came between two polls."""
    seen, etag = one.wait(FIRST)
    server.set(attributes={"sk-stack": "test", "sk-new": "1"})
    seen, etag = one.wait(etag)
    assert seen.attributes["sk-new"] == "1"
    found: list[Instance] = []
    waiter = threading.Thread(target=lambda: found.append(one.wait(etag)[0]))
    asked = server.asked
    waiter.start()
    wait_until(lambda: server.asked > asked)
    server.set(maintenance_event="TERMINATE_ON_HOST_MAINTENANCE")
    waiter.join(10)
    assert [instance.warning for instance in found] == [CloudWarning(Cause.MAINTENANCE)]


@pytest.mark.parametrize(
    ("told", "deadline"),
    [
        ({"windowStartTime": "2027-01-15T08:30:00Z", "canReschedule": True}, 1_800_001_800.0),
        ({"window_start_time": "2027-01-15T08:30:00Z", "can_reschedule": "true"}, 1_800_001_800.0),
        ({"windowStartTime": "2027-01-16T08:30:00Z"}, None),  # tomorrow
        ({"windowStartTime": "0001-01-01T00:00:00Z"}, None),
        *((other, None) for other in ("NONE", {}, {"error": "try again later"}, None, [], {"windowStartTime": 7})),
    ],
)
def test_other_values_hide_no_preemption(server: Server, told: object, deadline: float | None) -> None:
    """Machines without it have ``"NONE"``: all that the server said of them could not be read."""
    one = Gce(Clock(time.time(), NOW, 1.0), server.host)
    server.set(upcoming_maintenance=told)
    assert one.instance().warning == (None if deadline is None else CloudWarning(Cause.MAINTENANCE, deadline))
    server.set(preempted="TRUE")
    assert one.instance().warning == CloudWarning(Cause.PREEMPTED)


def test_a_wait_without_a_change_ends_after_a_while(one: Gce, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gce, "HANG_S", 0.0)
    seen, etag = one.wait(FIRST)
    assert one.wait(etag) == (seen, etag)


@pytest.mark.parametrize("trouble", ["503", "silence"])
def test_metadata_errors_are_logged_once_and_cause_no_notice(
    server: Server, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    said: list[str] = []
    seen: list[CloudWarning | None] = []
    clock = Clock(scale=5.0)
    with contextlib.ExitStack() as stack:
        host = server.host
        if trouble == "silence":  # it takes the connection, and never answers
            monkeypatch.setattr(gce, "HANG_S", -9.8)
            deaf = stack.enter_context(socket.socket())
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(64)
            host = f"127.0.0.1:{deaf.getsockname()[1]}"
        server.status = 503
        one = Gce(clock, host)
        tries: list[str] = []
        wait = one.wait

        def counted(mark: str) -> tuple[Instance, str]:
            tries.append(mark)
            return wait(mark)

        monkeypatch.setattr(one, "wait", counted)
        Watcher(one, lambda instance: seen.append(instance.warning), clock, Log(write=said.append)).start()
        wait_until(lambda: len(tries) > 3)
        assert len(said) == 1 and seen == []
        assert ("HTTP 503" if trouble == "503" else "ReadTimeout") in said[0]
        one._root = f"http://{server.host}/computeMetadata/v1/"
        monkeypatch.setattr(gce, "HANG_S", 60.0)
        server.status = 200
        wait_until(lambda: seen == [None])
        server.set(preempted="TRUE")
        wait_until(lambda: seen == [None, CloudWarning(Cause.PREEMPTED)])
        server.set(preempted="FALSE")
        wait_until(lambda: seen == [None, CloudWarning(Cause.PREEMPTED), None])


NOW = 1_800_000_000.0  # 2027-01-15T08:00:00Z


@pytest.mark.parametrize(
    ("preempted", "event", "window", "warning"),
    [
        ("FALSE", "NONE", "", None),
        ("true", "TERMINATE_ON_HOST_MAINTENANCE", "", CloudWarning(Cause.PREEMPTED)),
        ("FALSE", "MIGRATE_ON_HOST_MAINTENANCE", "", None),
        ("FALSE", "NONE", "2027-01-15T08:30:00+00:00", CloudWarning(Cause.MAINTENANCE, NOW + 1800)),
        ("FALSE", "NONE", "2027-01-15T00:30:00-08:00", CloudWarning(Cause.MAINTENANCE, NOW + 1800)),
        ("FALSE", "NONE", "2027-01-15T08:30:00Z", CloudWarning(Cause.MAINTENANCE, NOW + 1800)),
        ("FALSE", "NONE", "2027-01-25T08:30:00Z", None),
        ("FALSE", "NONE", "soon", None),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", "", CloudWarning(Cause.MAINTENANCE)),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", "2027-01-15T08:30:00Z", CloudWarning(Cause.MAINTENANCE, NOW + 1800)),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", "2027-01-15T09:00:07Z", CloudWarning(Cause.MAINTENANCE, NOW + 3607)),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", "2027-01-15T07:30:00Z", CloudWarning(Cause.MAINTENANCE)),
        ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE", "2027-01-25T08:30:00Z", CloudWarning(Cause.MAINTENANCE)),
    ],
)
def test_announced_maintenance_becomes_a_warning(
    preempted: str, event: str, window: str, warning: CloudWarning | None
) -> None:
    assert warning_of(preempted, event, json.dumps({"windowStartTime": window}).encode(), NOW) == warning


@pytest.mark.parametrize("key", ["maintenanceStatus", "maintenance_status"])
def test_maintenance_that_is_over_is_not_ahead(key: str) -> None:
    for status, warning in (("PENDING", CloudWarning(Cause.MAINTENANCE, NOW - 600)), ("COMPLETE", None)):
        told = {"windowStartTime": "2027-01-15T07:50:00Z", key: status}
        assert warning_of("FALSE", "NONE", json.dumps(told).encode(), NOW) == warning


ENDING, CALM = "TERMINATE_ON_HOST_MAINTENANCE", "NONE"


def of_type(server: Server, machine: str, *, spot: bool = False) -> Gce:
    preemptible = "TRUE" if spot else "FALSE"
    server.set(machine_type=f"projects/1/machineTypes/{machine}", scheduling={"preemptible": preemptible})
    return Gce(Clock(0.0, NOW, 0.0), server.host)  # its clock stands


def test_a_machine_with_accelerators_is_told_an_hour_before(server: Server) -> None:
    one = of_type(server, "a3-highgpu-8g")
    assert one.instance().warning is None
    server.set(maintenance_event=ENDING)
    hour = CloudWarning(Cause.MAINTENANCE, NOW + 3600)
    assert [one.instance().warning, one.instance().warning] == [hour, hour], (
        "from when it turned, however often it is read"
    )
    server.set(upcoming_maintenance={"windowStartTime": "2027-01-15T08:30:00Z"})
    assert one.instance().warning == CloudWarning(Cause.MAINTENANCE, NOW + 1800), "what is announced is surer"
    server.set(maintenance_event=CALM, upcoming_maintenance={})
    assert one.instance().warning is None
    server.set(preempted="TRUE", maintenance_event=ENDING)
    assert one.instance().warning == CloudWarning(Cause.PREEMPTED)


def test_an_unseen_change_of_maintenance_leaves_a_minute(server: Server) -> None:
    one = of_type(server, "g2-standard-4")
    server.set(maintenance_event=ENDING)
    assert one.instance().warning == CloudWarning(Cause.MAINTENANCE), (
        "an agent that starts anew, an hour or a second before"
    )


@pytest.mark.parametrize(
    ("machine", "spot"), [("n2-standard-4", False), ("n1-standard-8", False), ("g2-standard-4", True)]
)
def test_machines_without_accelerators_and_spot_get_a_minute(server: Server, machine: str, spot: bool) -> None:
    one = of_type(server, machine, spot=spot)
    assert one.instance().warning is None
    server.set(maintenance_event=ENDING)
    assert one.instance().warning == CloudWarning(Cause.MAINTENANCE)


def test_two_tokens_prove_the_machines_identity(server: Server, one: Gce) -> None:
    import jwt

    headers = one.prove("https://f.run.app", "/v1/sync", b"{}")
    for name, audience in {
        "Authorization": "https://f.run.app/v1/sync",
        "X-Serverless-Authorization": "https://f.run.app",
    }.items():
        claims = jwt.decode(headers[name].removeprefix("Bearer "), options={"verify_signature": False})
        assert (claims["aud"], claims["google"]["compute_engine"]["instance_id"]) == (audience, "17")
    server.status = 503
    assert one.prove("https://f.run.app", "/v1/sync", b"{}") == headers, "kept"
    one.forget_identity()
    with pytest.raises(MetadataError, match="HTTP 503"):
        one.prove("https://f.run.app", "/v1/sync", b"{}")


def test_an_agent_that_starts_under_a_notice_reports_it_once(fake: Fake, machine: Callable[..., Machine]) -> None:
    vm = machine()
    fake.instance(vm.uid, vm.name, preempted="TRUE")
    vm.start()
    fake.wait_sync(vm.uid)
    fake.reply(vm.uid, SyncReply(Role.STANDBY, JOB, 0, 1))
    value = int(fake.wait_fact(vm.uid, Kind.NOTICE).value)
    assert 60 < value - time.time() <= 120
    fake.instance(vm.uid, vm.name, preempted="FALSE")
    assert int(fake.wait_fact(vm.uid, Kind.REPRIEVE).value) == value


def test_tokens_are_kept_until_shortly_before_they_expire(fake: Fake) -> None:
    fake.instance("7", "n")
    now = time.time()
    hours = Clock(now, now, 1.0)
    one = Gce(hours, fake.listen("7"))
    token = one.identity_token("https://f")
    fake.metadata_status = 503
    assert one.identity_token("https://f") == token
    with pytest.raises(MetadataError, match="HTTP 503"):
        one.identity_token("https://another")
    later = Gce(Clock(now, now + 3400, 1.0), fake.listen("7"))
    fake.metadata_status = 200
    later.identity_token("https://f")
    fake.metadata_status = 503
    with pytest.raises(MetadataError):  # 200 s are left, less than the margin
        later.identity_token("https://f")


def test_an_invalid_instance_answer_is_an_error(fake: Fake) -> None:
    fake.instances["7"] = {"id": 1}
    with pytest.raises(MetadataError, match="instance/"):
        Gce(Clock(), fake.listen("7")).instance()
