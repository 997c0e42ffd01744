"""The function over HTTP: authentication, bodies, answers; and the real ``functions-framework`` behind a socket."""

from __future__ import annotations

import base64
import gc
import http.client
import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import flask
import msgspec
import pytest
from werkzeug.test import EnvironBuilder

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import Action, DeleteDisk, Listing, Result, ResultKind
from spotkeeper.contract.generation import Role, Sync, SyncReply
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.record import Node, Phase, Record
from spotkeeper.contract.redact import redact
from spotkeeper.reconcile.clouds import rate_limit
from spotkeeper.reconcile.clouds.rate_limit import Paced
from spotkeeper.reconcile.controller.alarm import read_note
from spotkeeper.reconcile.service import rounds as rounds_module
from spotkeeper.reconcile.service import runtime as runtime_module
from spotkeeper.reconcile.service.http import HttpApp
from spotkeeper.reconcile.service.logging_json import JsonLines
from spotkeeper.reconcile.service.request_body import STATUS, BodyError, Refusal, job_of_event, parse
from spotkeeper.reconcile.service.rounds import Flights
from spotkeeper.reconcile.service.runtime import Deadlined, FunctionSettings, Runtime, SettingsError, settings_from_env
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.objects import LISTING_S, Deadline, StoreError, UnavailableError
from tests.reconcile.clouds.gce import compute
from tests.reconcile.clouds.gce.compute import JOB, STACK, UID, Google, SmallCloud
from tests.reconcile.service import identities as ids

CLOCK = Clock()


def now_claims(**changes: Any) -> dict[str, Any]:
    """Claims that hold at this moment: a real function reads a real clock."""
    now = int(time.time())
    return ids.claims(iat=now - 5, exp=now + 3000, **changes)


def vm_token(name: str = ids.VM, uid: str = "5000", zone: str = compute.A) -> str:
    return ids.bearer(now_claims(**ids.machine(instance_name=name, instance_id=uid, zone=zone)))


def clock_token() -> str:
    return ids.bearer(now_claims(email=ids.CLOCK_MAIL, google=None))


@dataclass
class Site:
    """A stack with one job of one node, on a small cloud."""

    settings: FunctionSettings
    google: Google
    cloud: SmallCloud
    runtime: Runtime

    def __post_init__(self) -> None:
        store = self.runtime.store
        state = msgspec.structs.replace(STACK, node_identity=ids.NODES)
        store.put(paths.STACK, msgspec.json.encode(state))
        store.put_spec(JOB, JobSpec("train", ("train.py",), pools=("gpu",)))
        store.put_name("train", JOB)
        store.set_active(JOB)
        store.create_record(Record(JOB, UID, "train", "0" * 64, CLOCK.now(), nonce="n", nodes=(Node(),)))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ids.issuer() as issuer, compute.serve() as google:
        cloud = SmallCloud()
        cloud.run_on(google)
        settings = FunctionSettings(
            stack="demo",
            bucket=f"sqlite://{tmp_path}/bucket.db",
            audience=ids.AUDIENCE,
            invokers=frozenset({ids.CLOCK_MAIL}),
            jwks=issuer.url,
            compute_endpoint=google.endpoint,
        )
        yield Site(settings, google, cloud, Runtime(settings))


@pytest.fixture
def app(site: Site) -> HttpApp:
    return HttpApp(site.runtime)


def ask(
    app: HttpApp, method: str, path: str, body: bytes = b"", token: str | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    """One request as Flask would hand it over."""
    sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        sent["Authorization"] = token
    environ = EnvironBuilder(path=path, method=method, headers=sent, input_stream=io.BytesIO(body)).get_environ()
    environ["CONTENT_LENGTH"] = str(len(body))
    answer, status, answered = app.handle(flask.Request(environ))
    assert answered["Content-Type"] == "application/json" and answered["Cache-Control"] == "no-store"
    return status, json.loads(answer)


def sync(app: HttpApp, body: Sync | bytes, token: str | None = None) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return ask(app, "POST", "/v1/sync", data, vm_token() if token is None else token)


HELLO = b'{"boot":"b-1","facts":[{"kind":"hello"}]}'


class TestStory:
    def test_a_job_starts_over_http(self, site: Site, app: HttpApp) -> None:
        """Tick: a machine. Hello: admitted, its disk attached, a generation. Then only reads."""
        status, ticked = ask(app, "POST", "/v1/tick", b"{}", clock_token())
        assert (status, ticked) == (200, {"jobs": 1, "failed": 0, "busy": False})
        (name,) = site.cloud.vms
        zone = site.cloud.vms[name]["zone"].rpartition("/")[2]
        token = vm_token(name, site.cloud.vms[name]["id"], zone)
        status, reply = sync(app, HELLO, token)
        assert status == 200
        for _ in range(5):
            if reply["role"] == "member":
                break
            status, reply = sync(app, b'{"boot":"b-1"}', token)
            ask(app, "POST", f"/v1/notify/{JOB}", b"{}", clock_token())
        told = msgspec.convert(reply, SyncReply)
        assert told.role is Role.MEMBER and told.job == JOB and told.node == 0
        assert told.doc is not None and told.doc.gen == 1 and told.run is not None
        assert told.run.command == ("train.py",)
        before = len(site.google.asked)
        status, again = sync(app, Sync("b-1", ver=told.doc.ver), token)
        assert (status, again["role"]) == (200, "member") and "doc" not in again
        assert len(site.google.asked) == before, "a sync without news only reads"

    def test_an_unknown_machines_role_is_unknown(self, app: HttpApp) -> None:
        assert sync(app, HELLO, vm_token("sk-demo-zzzz9999-n0000-a1"))[1]["role"] == "unknown"
        assert sync(app, HELLO, vm_token("some-vm"))[1]["role"] == "unknown"

    def test_a_static_machine_without_a_job_is_idle(self, site: Site, app: HttpApp) -> None:
        site.runtime.store.clear_active(JOB)
        assert sync(app, HELLO, vm_token("sk-demo-floor-s0", "77"))[1]["role"] == "idle"
        (hello,) = site.runtime.store.list_static_hellos()
        assert (hello.machine, hello.uid, hello.boot) == ("sk-demo-floor-s0", "77", "b-1")

    def test_a_static_machine_learns_which_old_jobs_are_over(
        self, site: Site, app: HttpApp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, token = site.runtime.store, vm_token("sk-demo-floor-s0", "77")
        assert "ended" not in sync(app, Sync("b-1", old_jobs=(JOB, "zzzz9999")), token)[1], "it runs"
        held = store.read_record(JOB)
        assert held is not None
        assert store.cas_record(msgspec.structs.replace(held.value, phase=Phase.DONE), held.token)
        assert sync(app, Sync("b-1", old_jobs=(JOB, "zzzz9999")), token)[1]["ended"] == [JOB]
        with monkeypatch.context() as patch:
            patch.setattr(type(site.runtime.store), "read_record", None)
            assert sync(app, Sync("b-1"), token)[0] == 200, "who asks nothing costs nothing"

    def test_the_body_cannot_name_the_machine(self, site: Site, app: HttpApp) -> None:
        """A VM of another job names ours: it is told of its own job only."""
        status, reply = sync(app, Sync("b-1", job=JOB), vm_token("sk-demo-zzzz9999-n0000-a1"))
        assert (status, reply["role"]) == (200, "unknown") and "job" not in reply

    def test_notify(self, site: Site, app: HttpApp) -> None:
        status, notified = ask(app, "POST", f"/v1/notify/{JOB}", b"{}", clock_token())
        assert status == 200 and notified["rounds"] == 1 and len(site.cloud.vms) == 1
        read = site.runtime.store.read_record(JOB)
        assert read is not None and read.value.owner == ids.CLOCK_MAIL, "as the token says"
        assert ask(app, "POST", "/v1/notify/zzzz9999", b"{}", clock_token()) == (404, {"error": "not_found"})


def push(entry: Any) -> bytes:
    raw = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    data = base64.b64encode(raw).decode()
    return json.dumps({"message": {"data": data, "messageId": "1"}, "subscription": "s"}).encode()


def preempted(name: str) -> bytes:
    resource = f"projects/p/zones/us-x1-a/instances/{name}"
    return push({"protoPayload": {"methodName": "compute.instances.preempted", "resourceName": resource}, "x": [1]})


class TestEvents:
    def test_a_preemption_event_starts_a_round(self, site: Site, app: HttpApp) -> None:
        status, answer = ask(app, "POST", "/v1/event", preempted(f"sk-demo-{JOB}-n0000-a1"), clock_token())
        assert (status, answer["jobs"]) == (200, 1)
        assert len(site.cloud.vms) == 1, "a round was made"

    @pytest.mark.parametrize("name", ["other-vm", f"sk-prod-{JOB}-n0000-a1", "", "../../x"])
    def test_events_of_other_machines_are_ignored(self, site: Site, app: HttpApp, name: str) -> None:
        assert ask(app, "POST", "/v1/event", preempted(name), clock_token())[1]["jobs"] == 0
        assert site.google.asked == []

    @pytest.mark.parametrize(
        "body",
        [b"{}", b"[]", b"x", b"\xff", push(b"\xff\xfe"), push(b"[]"), b'{"message":{"data":"!!"}}', push(b"[" * 9000)],
    )
    def test_invalid_pushes_are_acknowledged(self, site: Site, app: HttpApp, body: bytes) -> None:
        assert ask(app, "POST", "/v1/event", body, clock_token())[0] == 200
        assert len(site.runtime.store.list("quarantine/")) == 1

    def test_only_the_machines_name_is_read_from_an_event(self) -> None:
        assert job_of_event(preempted(f"sk-demo-{JOB}-n0000-a1"), "demo", "p") == JOB
        assert job_of_event(preempted(f"sk-demo-{JOB}-n0000-a1"), "demo", "q") is None
        with pytest.raises(BodyError):
            job_of_event(b"{}", "demo", "p")


class TestIdentity:
    @pytest.mark.parametrize("path", ["/v1/sync", "/v1/tick", f"/v1/notify/{JOB}", "/v1/event"])
    @pytest.mark.parametrize(
        "token", [None, "", "Bearer x", "Bearer a.b.c", lambda: ids.bearer(now_claims(aud="https://other.example"))]
    )
    def test_without_a_token_nothing_happens(self, site: Site, app: HttpApp, path: str, token: Any) -> None:
        sent = token() if callable(token) else token
        before = site.runtime.store.list("")
        assert ask(app, "POST", path, HELLO, sent) == (401, {"error": "unauthorized"})
        assert site.runtime.store.list("") == before and site.google.asked == []

    def test_agents_and_invokers_may_only_call_their_own_paths(self, app: HttpApp) -> None:
        assert ask(app, "POST", "/v1/tick", b"{}", vm_token())[0] == 401
        assert ask(app, "POST", f"/v1/notify/{JOB}", b"{}", vm_token())[0] == 401
        assert sync(app, HELLO, clock_token())[0] == 401

    def test_bodies_are_read_only_after_authentication(self, app: HttpApp) -> None:
        assert ask(app, "POST", "/v1/sync", b"{" * 5000, "Bearer a.b.c")[0] == 401

    def test_without_node_identity_no_agent_is_accepted(self, site: Site, app: HttpApp) -> None:
        site.runtime.store.put(paths.STACK, msgspec.json.encode(STACK))
        assert sync(app, HELLO, ids.bearer(now_claims(email=""))) == (503, {"error": "unavailable"})

    def test_missing_keys_are_an_outage_and_no_refusal(self, site: Site, tmp_path: Path) -> None:
        app = HttpApp(Runtime(replace(site.settings, jwks="http://127.0.0.1:1/x")))
        assert sync(app, HELLO) == (503, {"error": "unavailable"})


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "no json": b"hello",
    "cut": b'{"boot":"b-1"',
    "trailing": b'{"boot":"b-1"}}',
    "not utf-8": b'{"boot":"\xff"}',
    "utf-16": '{"boot":"b-1"}'.encode("utf-16"),
    "a list": b"[]",
    "null": b"null",
    "a string": b'"x"',
    "no boot": b"{}",
    "boot a number": b'{"boot":1}',
    "boot empty": b'{"boot":""}',
    "boot a path": b'{"boot":"../../x"}',
    "boot upper": b'{"boot":"B"}',
    "boot long": b'{"boot":"' + b"b" * 65 + b'"}',
    "boot with a line": b'{"boot":"b\\n"}',
    "another key": b'{"boot":"b-1","node":3}',
    "key twice": b'{"boot":"b-1","boot":"b-2"}',
    "homoglyph key": '{"b\u043e\u043et":"b-1"}'.encode(),
    "ver a string": b'{"boot":"b-1","ver":"1"}',
    "ver true": b'{"boot":"b-1","ver":true}',
    "ver 2^63": b'{"boot":"b-1","ver":9223372036854775808}',
    "ver 2^53+1": b'{"boot":"b-1","ver":9007199254740993}',
    "ver a thousand digits": b'{"boot":"b-1","ver":' + b"9" * 1000 + b"}",
    "ver 1e400": b'{"boot":"b-1","ver":1e400}',
    "ver NaN": b'{"boot":"b-1","ver":NaN}',
    "job a path": b'{"boot":"b-1","job":"../x"}',
    "job upper": b'{"boot":"b-1","job":"ABCD2345"}',
    "kept no job": b'{"boot":"b-1","old_jobs":["../../xx"]}',
    "kept with a line": b'{"boot":"b-1","old_jobs":["abcd234\\n"]}',
    "kept too many": b'{"boot":"b-1","old_jobs":[' + b",".join([b'"abcd2345"'] * 33) + b"]}",
    "facts no list": b'{"boot":"b-1","facts":{}}',
    "fact unknown": b'{"boot":"b-1","facts":[{"kind":"explode"}]}',
    "fact with a uid": b'{"boot":"b-1","facts":[{"kind":"hello","uid":"1"}]}',
    "fact attempt a float": b'{"boot":"b-1","facts":[{"kind":"hello","attempt":1.5}]}',
    "progress without a step": b'{"boot":"b-1","progress":{"gen":1,"at":1}}',
    "progress inf": b'{"boot":"b-1","progress":{"gen":1,"step":1,"at":Infinity}}',
    "deep": b'{"boot":' * 7 + b"1" + b"}" * 7,
    "very deep": b"[" * 8000 + b"]" * 8000,
    "many keys": b"{" + b",".join(b'"k%d":1' % n for n in range(1000)) + b"}",
    "comment": b'{"boot":"b-1" /* x */}',
    "single quotes": b"{'boot':'b-1'}",
    "nul": b'{"boot":"b-1"}\0',
}


class TestEnvelope:
    @pytest.mark.parametrize("case", BAD_BODIES)
    def test_bad_bodies_are_refused_in_one_shape(self, site: Site, app: HttpApp, case: str) -> None:
        before = site.runtime.store.list("")
        assert sync(app, BAD_BODIES[case]) == (400, {"error": "invalid"})
        assert site.runtime.store.list("") == before

    @pytest.mark.parametrize("path", ["/v1/tick", f"/v1/notify/{JOB}"])
    def test_ticks_and_notifications_take_no_body(self, app: HttpApp, path: str) -> None:
        assert ask(app, "POST", path, b'{"a":1}', clock_token())[0] == 400
        assert ask(app, "POST", path, b"", clock_token())[0] == 200

    def test_too_large_bodies_are_refused(self, app: HttpApp) -> None:
        assert sync(app, b"{" + b" " * 16_384 + b"}") == (413, {"error": "too_large"})
        assert ask(app, "POST", "/v1/sync", b" " * 10_000_000, "Bearer a.b.c")[0] == 413

    def test_too_large_chunked_bodies_are_refused(self, app: HttpApp) -> None:
        body = io.BytesIO(b'{"boot":"b-1"}' + b" " * 20_000)
        headers = {"Content-Type": "application/json", "BucketCopy-Encoding": "chunked", "Authorization": vm_token()}
        environ = EnvironBuilder("/v1/sync", method="POST", headers=headers, input_stream=body).get_environ()
        environ.pop("CONTENT_LENGTH", None)
        environ["wsgi.input_terminated"] = True
        assert app.handle(flask.Request(environ))[1] == 413
        assert body.tell() < 20_000

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
    def test_only_json_is_accepted(self, app: HttpApp, kind: str) -> None:
        assert ask(app, "POST", "/v1/sync", HELLO, vm_token(), Content_Type=kind)[0] == 415

    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip"])
    def test_compressed_bodies_are_refused(self, app: HttpApp, encoding: str) -> None:
        assert ask(app, "POST", "/v1/sync", HELLO, vm_token(), Content_Encoding=encoding)[0] == 415

    @pytest.mark.parametrize(
        "path",
        [
            "/",
            "/v1",
            "/v1/",
            "/v1/sync/",
            "/v2/sync",
            "/v1/notify/",
            "/v1/notify/ABCD2345",
            "/v1/notify/a/../b",
            "/v1/x",
        ],
    )
    def test_unknown_paths_get_404(self, app: HttpApp, path: str) -> None:
        assert ask(app, "POST", path, b"{}", clock_token()) == (404, {"error": "not_found"})

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH"])
    def test_other_methods_get_405(self, app: HttpApp, method: str) -> None:
        assert ask(app, method, "/v1/sync", b"", vm_token())[0] == 405

    def test_health_answers_only_ok(self, app: HttpApp) -> None:
        assert ask(app, "GET", "/v1/health") == (200, {"ok": True})
        assert ask(app, "POST", "/v1/health", b"{}")[0] == 405

    def test_every_refusal_has_a_status(self) -> None:
        assert set(STATUS) == set(Refusal)

    def test_a_valid_body_passes(self) -> None:
        assert parse(HELLO, Sync).boot == "b-1"


class TestTrouble:
    def test_a_silent_bucket_gets_503(self, app: HttpApp, monkeypatch: pytest.MonkeyPatch) -> None:
        def down(*_: object) -> None:
            raise StoreError("jobs/secret-name: down")

        monkeypatch.setattr(app.runtime.store, "read_record", down)
        assert sync(app, HELLO) == (503, {"error": "unavailable"})

    def test_a_corrupt_record_is_an_outage_of_that_job(self, site: Site, app: HttpApp) -> None:
        site.runtime.store.put(paths.record(JOB), b"{")
        assert sync(app, HELLO) == (503, {"error": "unavailable"})
        status, ticked = ask(app, "POST", "/v1/tick", b"{}", clock_token())
        assert status in (200, 503), ticked

    def test_a_bugs_message_is_only_in_the_log(
        self, app: HttpApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def bug(*_: object) -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(app.runtime.store, "read_record", bug)
        with caplog.at_level(logging.INFO):
            assert sync(app, HELLO) == (500, {"error": "internal"})
        assert "secret detail" in caplog.text

    def test_without_a_stack_requests_get_503(self, site: Site, app: HttpApp) -> None:
        site.runtime.store.delete(paths.STACK)
        assert sync(app, HELLO) == (503, {"error": "unavailable"})
        assert ask(app, "POST", "/v1/tick", b"{}", clock_token()) == (503, {"error": "unavailable"})
        note = read_note(site.runtime.store)
        assert note is not None and note.reason == "no stack/pools.json in the bucket"

    def test_another_stacks_bucket_is_refused(self, site: Site, app: HttpApp) -> None:
        other = msgspec.structs.replace(STACK, stack="prod", node_identity=ids.NODES)
        site.runtime.store.put(paths.STACK, msgspec.json.encode(other))
        assert sync(app, HELLO)[0] == 500
        assert ask(app, "POST", "/v1/tick", b"{}", clock_token())[0] == 500
        note = read_note(site.runtime.store)
        assert note is not None
        assert note.reason == "the bucket belongs to stack 'prod', not to the stack in SPOTKEEPER_STACK"
        assert site.google.asked == []

    def test_a_cloud_that_hangs_is_left_to_the_next_round(self, caplog: pytest.LogCaptureFixture) -> None:
        class Slow:
            def list(self, stack: str) -> Listing:
                raise AssertionError("not asked")

            def price_history(self, pool: str, deadline_s: float) -> None:
                return None

            def perform(self, action: Action, deadline_s: float) -> Result:
                raise AssertionError("not asked")

        cloud = Deadlined(Slow(), CLOCK, Deadline(LISTING_S - 0.1))
        assert cloud.list("demo").answered == frozenset(), "proves nothing"
        assert "no time left to list the cloud" in caplog.text
        over = Deadlined(Slow(), CLOCK, Deadline(0.0))
        assert over.perform(DeleteDisk("d", "z"), 20).kind is ResultKind.THROTTLED

    @pytest.mark.parametrize("path", ["/v1/tick", f"/v1/notify/{JOB}"])
    def test_an_expired_request_makes_no_cloud_call(
        self, site: Site, app: HttpApp, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rounds_module, "REQUEST_S", 0.0)
        assert ask(app, "POST", path, b"{}", clock_token())[0] == (503 if path == "/v1/tick" else 200)
        assert site.google.asked == []

    def test_all_changes_of_a_process_share_one_rate_limit(
        self, site: Site, app: HttpApp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gates: set[int] = set()

        def shut(self: rate_limit.TokenBucket, patience_s: float) -> None:
            gates.add(id(self))

        monkeypatch.setattr(rate_limit.TokenBucket, "take", shut)
        site.runtime.store.put(paths.lease(JOB), b"{}")  # a round ran: the first one looks for itself
        for count in (1, 2):  # and Pulumi changes the stack in between
            assert ask(app, "POST", "/v1/tick", b"{}", clock_token())[0] == 200
            assert len(site.google.of("instances.aggregatedList")) == count, "looks are not paced"
            state = msgspec.structs.replace(STACK, node_identity=ids.NODES, boot_deadline_s=STACK.boot_deadline_s + 1)
            site.runtime.store.put(paths.STACK, msgspec.json.encode(state))
            monkeypatch.setattr(site.runtime, "_stack", None)
        assert site.cloud.vms == {}
        assert len(gates) == 1

    def test_calls_get_the_requests_remaining_time(self) -> None:
        class Noting:
            given = 0.0

            def list(self, stack: str) -> Listing:
                return Listing((), ())

            def price_history(self, pool: str, deadline_s: float) -> None:
                return None

            def perform(self, action: Action, deadline_s: float) -> Result:
                self.given = deadline_s
                return Result(action, ResultKind.ACCEPTED)

        noting = Noting()
        Deadlined(noting, CLOCK, Deadline(5.0)).perform(DeleteDisk("d", "z"), 20)
        assert 4.0 < noting.given <= 5.0


class TestFlights:
    def test_one_round_at_a_time_handles_every_request(self) -> None:
        flights = Flights()
        entered, leave = threading.Event(), threading.Event()
        done: list[int] = []

        def work() -> int:
            entered.set()
            assert leave.wait(10)
            done.append(1)
            return len(done)

        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(flights.run, "a", work, lambda _: False)
            assert entered.wait(10)
            assert [flights.run("a", work, lambda _: False) for _ in range(50)] == [None] * 50
            assert flights.run("b", lambda: 7, lambda _: True) == 7, "other jobs do not wait"
            leave.set()
            assert first.result(10) == 2, "once more for all fifty who came meanwhile"
        assert flights.run("a", work, lambda _: True) == 3

    def test_a_covered_request_causes_no_round(self) -> None:
        flights = Flights()
        runs: list[None] = []

        def work() -> int:
            runs.append(None)
            if len(runs) == 1:
                assert flights.run("a", work, lambda _: True) is None
            return len(runs)

        assert flights.run("a", work, lambda _: True) == 1
        assert len(runs) == 1

    def test_an_error_lets_the_next_round_run(self) -> None:
        flights = Flights()

        def fail() -> int:
            raise StoreError("x")

        for _ in range(2):
            with pytest.raises(StoreError):
                flights.run("a", fail, lambda _: True)

    def test_a_leaving_request_blocks_no_other(self) -> None:
        """Another round begins between the last look of the one before and its return."""

        class Slow(Flights):
            def _called_again(self, key: str) -> bool:
                again = super()._called_again(key)
                if not again and not rest:
                    rest.append(pool.submit(self.run, "a", work, lambda _: True))
                    assert entered.wait(10)
                return again

        entered, leave = threading.Event(), threading.Event()
        rest: list[Future[int | None]] = []
        flights = Slow()

        def work() -> int:
            entered.set()
            assert leave.wait(10)
            return 2

        with ThreadPoolExecutor(1) as pool:
            assert flights.run("a", lambda: 1, lambda _: True) == 1
            assert flights.run("a", lambda: 3, lambda _: True) is None, "that one is at it"
            leave.set()
            assert rest[0].result(10) == 2

    def test_many_agents_at_once_make_few_rounds(self, site: Site, app: HttpApp) -> None:
        ask(app, "POST", "/v1/tick", b"{}", clock_token())
        (name,) = site.cloud.vms
        token = vm_token(name, site.cloud.vms[name]["id"], site.cloud.vms[name]["zone"].rpartition("/")[2])
        before = len(site.google.of("instances.aggregatedList"))
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: sync(app, HELLO, token)[0], range(32)))
        assert answers == [200] * 32
        assert len(site.google.of("instances.aggregatedList")) - before <= 6


SECRETS = [
    "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJ4In0.c2lnbmF0dXJl",
    "eyJhbGciOiJSUzI1NiJ9",
    "ya29.a0AfH6SMBx-abc_def",
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "hf_abcdefghijklmnop",
    "ghp_abcdefghijklmnop",
    "sk-abcdefghijklmnopqrstuvwxyz",
    "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----",
    "Bearer opaque-token-123",
    "X-Goog-Signature=deadbeefcafe",
]


class TestLogs:
    @pytest.mark.parametrize("secret", SECRETS)
    def test_secrets_are_removed(self, secret: str) -> None:
        line = self.line(f"before {secret} after", reason=f"x {secret}")
        for piece in secret.removeprefix("Bearer ").removeprefix("X-Goog-Signature=").split("\n"):
            assert piece not in line
        assert "before" in line

    def test_passwords_in_urls_are_removed(self) -> None:
        assert "hunter2" not in redact("http://bob:hunter2@host/x")

    def test_keys_in_addresses_of_webhooks_are_removed(self) -> None:
        assert redact("https://hooks.slack.com/services/T0/B0/key") == "https://hooks.slack.com/[removed]"
        assert redact("https://discord.com/api/webhooks/1/key") == "https://discord.com/api/webhooks/[removed]"
        assert redact("https://a.logic.azure.com/w?sp=1&sig=key") == "https://a.logic.azure.com/w?sp=1&sig=[removed]"

    @pytest.mark.parametrize("text", ["a\nb", "a\r\n{}", "\x1b[31mred", "a\u2028b", "a\0b"])
    def test_a_log_line_is_one_ascii_line(self, text: str) -> None:
        line = self.line(text)
        assert line.isascii() and line.isprintable()
        assert json.loads(line)["message"] == text

    def test_log_fields_are_listed_and_bounded(self) -> None:
        line = json.loads(self.line("m" * 10_000, job=JOB, url="x", status=200))
        assert set(line) == {"severity", "message", "job", "status"} and len(line["message"]) == 500

    def line(self, message: str, **extra: Any) -> str:
        record = logging.makeLogRecord({"msg": message, "levelname": "INFO", **extra})
        return JsonLines().format(record)

    def test_nothing_of_a_request_is_logged(self, app: HttpApp, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            for body in (b'{"boot":"canary-1x","password":"canary"}', b"canary"):
                sync(app, body)
                ask(app, "POST", "/v1/canary", body, "Bearer canary.canary.canary")
                ask(app, "POST", "/v1/sync", body, "Bearer canary.canary.canary")
        assert "canary" not in caplog.text


class TestSettings:
    FULL: ClassVar[dict[str, str]] = {
        "SPOTKEEPER_STACK": "demo",
        "SPOTKEEPER_BUCKET": "gs://b",
        "SPOTKEEPER_AUDIENCE": "https://f",
        "SPOTKEEPER_INVOKERS": " a@x , b@x,",
        "SPOTKEEPER_COMPUTE_ENDPOINT": "http://127.0.0.1:1",
        "K_SERVICE": "f",
    }

    def test_settings_are_read(self) -> None:
        settings = settings_from_env(self.FULL)
        lambda_ = {"AWS_LAMBDA_FUNCTION_NAME": "sk-prod", "AWS_REGION": "us-west-2"}
        assert [settings_from_env(self.FULL | more).region for more in ({"AWS_REGION": "x"}, lambda_)] == [
            "",
            "us-west-2",
        ]
        assert (settings.stack, settings.bucket, settings.audience) == ("demo", "gs://b", "https://f")
        assert settings.invokers == {"a@x", "b@x"} and settings.behind_iam
        assert settings.jwks == "https://www.googleapis.com/oauth2/v3/certs"
        assert settings.issuer == "https://accounts.google.com"

    @pytest.mark.parametrize("name", ["SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET"])
    def test_missing_settings_are_named(self, name: str) -> None:
        with pytest.raises(SettingsError, match=name):
            settings_from_env({key: value for key, value in self.FULL.items() if key != name})

    def test_a_wrong_clock_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPOTKEEPER_CLOCK", "1:2")
        with pytest.raises(SettingsError, match="SPOTKEEPER_CLOCK"):
            settings_from_env(self.FULL)

    def test_each_cloud_has_its_adapter(self, site: Site) -> None:
        for cloud, adapter in (("gcp", "Gce"), ("aws", "Ec2")):
            found = site.runtime.cloud(msgspec.structs.replace(STACK, cloud=cloud))
            assert isinstance(found, Paced) and type(found.cloud).__name__ == adapter


# -- the real thing


@pytest.fixture
def served(site: Site, tmp_path: Path) -> Iterator[Callable[..., tuple[int, dict[str, Any]]]]:
    """``functions-framework`` in a process of its own, as it runs in the cloud and on one machine."""
    (tmp_path / "main.py").write_text("from spotkeeper.reconcile.service.http import main\n\n__all__ = ['main']\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPOTKEEPER_")} | {
        "SPOTKEEPER_STACK": "demo",
        "SPOTKEEPER_BUCKET": site.settings.bucket,
        "SPOTKEEPER_AUDIENCE": ids.AUDIENCE,
        "SPOTKEEPER_INVOKERS": ids.CLOCK_MAIL,
        "SPOTKEEPER_JWKS": site.settings.jwks,
        "SPOTKEEPER_COMPUTE_ENDPOINT": site.google.endpoint,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "functions_framework", "--target", "main", "--host", "127.0.0.1"]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [*command, "--port", str(port), "--source", str(tmp_path / "main.py")],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )

    def call(method: str, path: str, body: bytes = b"", token: str | None = None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        status, data = answer.status, answer.read()
        connection.close()
        return status, json.loads(data) if data.startswith(b"{") else {}

    try:
        give_up = time.monotonic() + 60
        while True:
            try:
                assert call("GET", "/v1/health") == (200, {"ok": True})
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < give_up, (tmp_path / "log").read_text()
                time.sleep(0.05)
        call.process, call.log = process, tmp_path / "log"  # type: ignore[attr-defined]
        yield call
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def test_functions_framework_serves_the_app(site: Site, served: Any) -> None:
    assert served("POST", "/v1/tick", b"{}")[0] == 401
    assert served("POST", "/v1/tick", b"{}", clock_token()) == (200, {"jobs": 1, "failed": 0, "busy": False})
    (name,) = site.cloud.vms
    zone = site.cloud.vms[name]["zone"].rpartition("/")[2]
    token = vm_token(name, site.cloud.vms[name]["id"], zone)
    status, reply = served("POST", "/v1/sync", HELLO, token)
    for _ in range(5):
        if reply["role"] == "member":
            break
        served("POST", f"/v1/notify/{JOB}", b"{}", clock_token())
        status, reply = served("POST", "/v1/sync", b'{"boot":"b-1"}', token)
    assert (status, reply["role"]) == (200, "member")
    assert served("POST", "/v1/sync", b" " * 20_000, token)[0] == 413
    assert served("POST", "/v1/sync", b"{", token) == (400, {"error": "invalid"})
    assert served("GET", "/favicon.ico")[0] == 404
    assert [served(method, "/v1/sync", b"", token)[0] for method in ("GET", "PUT", "DELETE")] == [405] * 3
    text = served.log.read_text()
    assert "eyJ" not in text, "no token in the log"
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert any(line.get("event") == "tick" and line["jobs"] == 1 for line in lines)


class Cycle:
    """What a library may leave behind: it refers to itself, and would keep what it holds open."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_between_requests(app: HttpApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function's own thresholds put a whole search off for hours."""
    gc.disable()
    try:
        left = weakref.ref(Cycle())
        assert ask(app, "GET", "/v1/health")[0] == 200
        assert left() is not None, "once a minute is enough"
        monkeypatch.setattr(runtime_module, "COLLECT_EVERY_S", 0.0)
        assert ask(app, "GET", "/v1/health")[0] == 200
        assert left() is None
    finally:
        gc.enable()


class TestTickNote:
    """What of a tick the bucket and the log are told: the command reads the one, the clouds' alerts the other."""

    def test_failing_ticks_are_noted_with_the_reason(
        self, site: Site, app: HttpApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        store = site.runtime.store
        assert ask(app, "POST", "/v1/tick", b"{}", clock_token())[0] == 200
        well = read_note(store)
        assert well is not None and well.succeeded > 0 and well.failing is None
        monkeypatch.setattr(Deadlined, "list", lambda _self, _stack: Listing((), ()))
        assert ask(app, "POST", "/v1/tick", b"{}", clock_token())[0] == 503, "the schedule is to know of it"
        failed = read_note(store)
        assert failed is not None and failed.failing is not None
        assert (failed.succeeded, failed.reason) == (well.succeeded, "no zone of the cloud answered in time")
        monkeypatch.undo()
        assert ask(app, "POST", "/v1/tick", b"{}", clock_token())[0] == 200
        again = read_note(store)
        assert again is not None and again.failing is None
        told = [(r.event, r.reason) for r in caplog.records if getattr(r, "event", "").startswith("tick")]
        assert told == [("tick", None), ("tick_failed", "no zone of the cloud answered in time"), ("tick", None)]

    @pytest.mark.parametrize(
        "error", [UnavailableError("stack/allocation: locked"), OSError(24, "Too many open files")]
    )
    def test_a_raised_error_of_a_tick_is_noted(
        self, site: Site, app: HttpApp, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        def dies(_deadline: object) -> None:
            raise error

        monkeypatch.setattr(site.runtime, "tick", dies)
        assert ask(app, "POST", "/v1/tick", b"{}", clock_token())[0] >= 500
        note = read_note(site.runtime.store)
        assert note is not None and str(error) == note.reason

    def test_an_unwritable_note_changes_nothing(
        self, site: Site, app: HttpApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(*_: object) -> None:
            raise UnavailableError("full")

        monkeypatch.setattr("spotkeeper.reconcile.store.store.Store.put", full)
        assert ask(app, "POST", "/v1/tick", b"{}", clock_token())[0] == 200
        assert "the tick's result was not written to the bucket: full" in caplog.messages

    def test_rounds_that_all_fail_are_a_failed_tick(
        self, site: Site, app: HttpApp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def dies(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr("spotkeeper.reconcile.controller.tick.run_round", dies)
        assert ask(app, "POST", "/v1/tick", b"{}", clock_token())[0] == 503
        note = read_note(site.runtime.store)
        assert note is not None and "Too many open files" in note.reason
