"""What the clouds' adapters share: each action is one verb, no answer is an exception, a look makes do with less."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import get_args

import msgspec
import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.cloud import (
    Action,
    AttachDisk,
    CreateDisk,
    CreateSnapshot,
    DeleteDisk,
    DeleteSnapshot,
    DeleteVm,
    DetachDisk,
    InsertVm,
    Result,
    ResultKind,
)
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.clouds.base import ListError, Looked, Meaning, look, perform
from spotkeeper.reconcile.clouds.http_client import NoAnswerError

VERBS: dict[str, Action] = {
    "insert_vm": InsertVm("j", "u", 0, 1, "gpu", "a", Model.SPOT),
    "delete_vm": DeleteVm("v", "1", "a"),
    "create_disk": CreateDisk("j", "u", 0, 0, "gpu", "a"),
    "attach_disk": AttachDisk("d", "v", "1", "a"),
    "detach_disk": DetachDisk("d", "v", "1", "a"),
    "delete_disk": DeleteDisk("d", "a"),
    "create_snapshot": CreateSnapshot("j", "u", 0, 0, "a"),
    "delete_snapshot": DeleteSnapshot("d"),
}


STOPPED = Clock(virtual_epoch=90.0, scale=0.0)


class Recorder:
    """A cloud whose verbs answer as they are told; ``made``: which were asked for, with what; ``ends``: until when."""

    def __init__(self, answer: Meaning | Exception) -> None:
        self.made: list[tuple[str, Action]] = []
        self.ends: list[float] = []
        self._answer = answer

    def __getattr__(self, verb: str) -> Callable[[Action, float], Meaning]:
        def make(action: Action, ends: float) -> Meaning:
            self.made.append((verb, action))
            self.ends.append(ends)
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer

        return make


@pytest.mark.parametrize(("verb", "action"), VERBS.items(), ids=VERBS)
def test_each_action_is_one_verb(verb: str, action: Action) -> None:
    cloud = Recorder((ResultKind.CAPACITY, "none left"))
    began = time.monotonic()
    result = perform(cloud, action, 5, STOPPED)
    assert cloud.made == [(verb, action)]
    assert began + 5 <= cloud.ends[0] <= time.monotonic() + 5
    assert result == Result(action, ResultKind.CAPACITY, "none left", at=90.0)


def test_every_action_is_tested() -> None:
    assert {type(action) for action in VERBS.values()} == set(get_args(Action))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NoAnswerError("silence"), "silence"),
        (ListError("half a list"), "half a list"),
        (msgspec.DecodeError("no JSON"), "the cloud's answer has an unexpected form: no JSON"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text"), "the cloud's answer has an unexpected form: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unanswered_calls_are_ambiguous(error: Exception, told: str) -> None:
    result = perform(Recorder(error), VERBS["delete_vm"], 5, STOPPED)
    assert result.kind is ResultKind.AMBIGUOUS and result.detail.startswith(told)
    assert (result.action, result.at) == (VERBS["delete_vm"], 90.0)


def refused(throttled: bool = False) -> Looked[int]:
    raise ListError("no", throttled)


def of_zone(zone: str) -> list[int]:
    if zone == "b":
        raise ListError("b is away")
    return [ord(zone)]


def test_one_answer_for_all_zones_is_enough() -> None:
    whole = Looked((1, 2), frozenset("ab"))
    assert look("things", lambda: whole, lambda _: pytest.fail("was asked again"), "ab") == whole


def test_zones_are_listed_separately_and_a_silent_one_proves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert look("things", refused, of_zone, "abc") == Looked((ord("a"), ord("c")), frozenset("ac"))
    assert caplog.messages == [
        "listing the things of all zones at once failed: no",
        "zone b: listing its things failed: b is away",
    ]


def test_a_slow_zone_takes_no_time_from_the_others() -> None:
    """Each zone answers only once all have been asked."""
    together = threading.Barrier(3)

    def slow(zone: str) -> list[int]:
        together.wait(timeout=60)
        return of_zone(zone)

    assert look("things", refused, slow, "abc").answered == frozenset("ac")


def test_a_throttling_cloud_gets_no_further_requests() -> None:
    nothing: Looked[int] = Looked((), frozenset())
    assert look("things", lambda: refused(True), lambda _: pytest.fail("was asked again"), "abc") == nothing
