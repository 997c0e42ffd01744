"""The function announces a job's events to a real https server: after the round, in the same request, or by a tick."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace as changed
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.contract.generation import Progress, Role, Sync
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.notification import ChannelState, Notification, NotifyEvent, Outgoing
from spotkeeper.reconcile.service import rounds
from spotkeeper.reconcile.service.aws_lambda import LambdaApp
from spotkeeper.reconcile.service.http import HttpApp
from spotkeeper.reconcile.service.runtime import Runtime
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.objects import UnavailableError
from spotkeeper.reconcile.store.store import Store
from tests.reconcile.clouds.gce.compute import JOB
from tests.reconcile.notifications.receiver import Receiver, receiver
from tests.reconcile.service.test_http import HELLO, Site, app, ask, clock_token, site, sync, vm_token

__all__ = ["app", "site"]  # fixtures
EVERY = ChannelState("every", "webhook", tuple(NotifyEvent))


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiver(tmp_path, "localhost") as made:
        monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
        yield made


@pytest.fixture
def told(site: Site, hooks: Receiver) -> HttpApp:
    """The function of a stack with a channel."""
    return serving(site, hooks)


def serving(site: Site, hooks: Receiver, *channels: ChannelState) -> HttpApp:
    store = site.runtime.store
    stack = store.read_stack()
    assert stack is not None
    store.put(paths.STACK, msgspec.json.encode(replace(stack, channels=channels or (EVERY,))))
    addresses = {each.name: hooks.url(f"/{each.name}", "localhost") for each in channels or (EVERY,)}
    made = Runtime(changed(site.settings, channels=msgspec.json.encode(addresses).decode()), store)
    return HttpApp(made)


def train(site: Site, app: HttpApp) -> str:
    """Tick, hello, generation; returns the machine's token."""
    ask(app, "POST", "/v1/tick", b"{}", clock_token())
    (name,) = site.cloud.vms
    token = vm_token(name, site.cloud.vms[name]["id"], site.cloud.vms[name]["zone"].rpartition("/")[2])
    reply = sync(app, HELLO, token)[1]
    for _ in range(5):
        if reply["role"] == Role.MEMBER.value:
            return token
        reply = sync(app, b'{"boot":"b-1"}', token)[1]
        ask(app, "POST", f"/v1/notify/{JOB}", b"{}", clock_token())
    raise AssertionError("the job does not train")


def events(hooks: Receiver) -> list[str]:
    return [got.body["event"] for got in hooks.got]


def test_a_job_is_announced_from_its_start_on(site: Site, told: HttpApp, hooks: Receiver) -> None:
    token = train(site, told)
    assert events(hooks) == ["started"]
    (got,) = hooks.got
    assert got.path == "/every"
    assert got.body["job"] == {"id": JOB, "name": "train"}
    assert got.body["text"].startswith("Job train trains, on 1 spot machine in ")
    assert got.headers["Idempotency-Key"] == got.body["id"] == f"{JOB}.generation.g1"
    progress = Progress(1, 40, 0.0, commit_gen=1, commit_step=30)
    for _ in range(2):
        sync(told, Sync("b-1", progress=progress), token)
    assert events(hooks) == ["started", "first-checkpoint"]
    assert "at step 30" in hooks.got[-1].body["text"]
    ledger = [entry.event for entry in site.runtime.store.list_ledger(JOB)]
    assert ledger.count(Event.CHECKPOINT) == 1
    assert site.runtime.store.list_notifications() == ()


def test_a_stack_without_channels_stores_nothing(site: Site, app: HttpApp, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Any:
        raise AssertionError("no channel, no notification")

    for verb in ("put_notification", "list_notifications", "appended"):
        monkeypatch.setattr(Store, verb, never)
    train(site, app)


def test_an_agents_answer_waits_for_a_second_at_most(
    site: Site, told: HttpApp, hooks: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go = threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.set()
        go.wait(10)
        handler.send_response(200)
        handler.end_headers()

    token = train(site, told)
    hooks.answer = answer
    monkeypatch.setattr(rounds, "ANSWER_S", 0.2)
    began = time.monotonic()
    status, reply = sync(told, Sync("b-1", progress=Progress(1, 40, 0.0, commit_gen=1, commit_step=30)), token)
    assert (status, reply["role"]) == (200, "member")
    assert time.monotonic() - began < 4
    assert asked.wait(5)
    (left,) = site.runtime.store.list_notifications()
    assert left.value.tries == 1, "it is claimed, and sent beside other requests"
    go.set()
    waits_until_sent(site)


def waits_until_sent(site: Site) -> None:
    ends = time.monotonic() + 10
    while site.runtime.store.list_notifications() and time.monotonic() < ends:
        threading.Event().wait(0.02)
    assert site.runtime.store.list_notifications() == ()


def test_the_round_has_released_its_lease_before_anything_is_sent(site: Site, told: HttpApp, hooks: Receiver) -> None:
    free: list[bool] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        free.append(site.runtime.store.take_lease(JOB, "other", time.time(), 0.001))
        handler.send_response(200)
        handler.end_headers()

    hooks.answer = answer
    train(site, told)
    assert free == [True]


def test_a_tick_sends_what_another_process_left(site: Site, told: HttpApp, hooks: Receiver) -> None:
    train(site, told)
    left = waiting()
    site.runtime.store.put_notification(left)
    status, _ = ask(told, "POST", "/v1/tick", b"{}", clock_token())
    assert status == 200
    assert hooks.got[-1].body["id"] == left.notification.id


def waiting() -> Outgoing:
    return Outgoing(Notification(f"{JOB}.hold.v9", (NotifyEvent.HOLD,), time.time(), "demo", JOB, "train", "waits."))


def test_a_receiver_that_fails_changes_no_answer(site: Site, told: HttpApp, hooks: Receiver) -> None:
    hooks.answer = lambda handler: handler.send_error(500)
    train(site, told)
    (left,) = site.runtime.store.list_notifications()
    assert left.value.left == ("every",)


def test_a_bucket_that_fails_changes_no_answer(
    site: Site, told: HttpApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> Any:
        raise UnavailableError("throttled")

    train(site, told)
    monkeypatch.setattr(Store, "list_notifications", fails)
    with caplog.at_level(logging.WARNING):
        assert ask(told, "POST", "/v1/tick", b"{}", clock_token())[0] == 200
    assert "notifications wait for the next tick: throttled" in caplog.text


def test_a_wrong_setting_changes_no_answer(site: Site, told: HttpApp, caplog: pytest.LogCaptureFixture) -> None:
    object.__setattr__(told.runtime.settings, "channels", "[1]")
    with caplog.at_level(logging.ERROR):
        train(site, told)
    assert "notifications wait for the next tick" in caplog.text
    assert len(site.runtime.store.list_notifications()) == 1


def test_lambda_sends_after_the_schedules_event(site: Site, hooks: Receiver) -> None:
    http = serving(site, hooks)
    site.runtime.store.put_notification(waiting())
    stack = site.runtime.store.read_stack()
    assert stack is not None
    LambdaApp(http.runtime).event({"source": "spotkeeper.tick", "account": stack.project})
    assert events(hooks)[0] == "hold"


class TestChannel:
    """`spotkeeper notify test` has the function send a message."""

    def test_a_test_message_arrives(self, told: HttpApp, hooks: Receiver) -> None:
        assert ask(told, "POST", "/v1/channels/every/test", b"{}", clock_token()) == (200, {"sent": True, "why": ""})
        (got,) = hooks.got
        assert (got.body["event"], got.body["job"]) == ("test", None)

    def test_the_answer_says_why_none_arrives(self, told: HttpApp, hooks: Receiver) -> None:
        hooks.answer = lambda handler: handler.send_error(410)
        assert ask(told, "POST", "/v1/channels/every/test", b"{}", clock_token()) == (
            200,
            {"sent": False, "why": "HTTP 410"},
        )

    def test_an_unknown_channel_is_not_found(self, told: HttpApp) -> None:
        for name in ("other", "EVERY", "a/../b", "-a"):
            assert ask(told, "POST", f"/v1/channels/{name}/test", b"{}", clock_token())[0] == 404

    def test_machines_may_not_test(self, told: HttpApp, hooks: Receiver) -> None:
        assert ask(told, "POST", "/v1/channels/every/test", b"{}", vm_token())[0] == 401
        assert ask(told, "POST", "/v1/channels/every/test", b"{}")[0] == 401
        assert hooks.got == []

    def test_in_a_cloud_this_machine_is_no_public_address(self, site: Site, hooks: Receiver) -> None:
        made = serving(site, hooks)
        there = Runtime(changed(made.runtime.settings, compute_endpoint=None), site.runtime.store)
        there._cloud = made.runtime._cloud
        status, answer = ask(HttpApp(there), "POST", "/v1/channels/every/test", b"{}", clock_token())
        assert (status, answer) == (200, {"sent": False, "why": "leads to an address that is not public"})
        assert hooks.got == []
