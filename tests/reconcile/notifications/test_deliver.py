"""Sending what waits: claims, retries, giving up, and one message for each channel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.notification import AddressError, ChannelState, Notification, NotifyEvent, Outgoing
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.notifications import deliver
from spotkeeper.reconcile.notifications.deliver import CLAIM_S, GIVE_UP_S, LONGEST_RETRY_S, Delivery
from spotkeeper.reconcile.notifications.https import SEND_S, SendError
from spotkeeper.reconcile.store import store as store_module
from spotkeeper.reconcile.store.objects import Deadline
from spotkeeper.reconcile.store.objects_sqlite import SqliteObjects
from spotkeeper.reconcile.store.store import Store
from tests.reconcile.notifications.samples import AT, JOB, SLACK, STACK, notification, record

OPS = ChannelState("ops", "webhook", (NotifyEvent.HOLD,))
BOTH: StackState = replace(STACK, channels=(SLACK, OPS))


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Site:
    """A bucket, receivers and a clock. ``down``: channels that fail; ``dies``: the process dies at a message."""

    store: Store
    stack: StackState = BOTH
    at: float = AT
    scale: float = 1.0
    got: list[tuple[str, str]] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    dies: str = ""
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.at

    def send(self, channel: ChannelState, what: Notification) -> None:
        if self.dies == "before":
            raise Killed
        if channel.name in self.down:
            raise SendError("HTTP 500")
        self.got.append((channel.name, what.id))
        if self.dies == "after":
            raise Killed

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds * self.scale

    def run(self, waits: bool = False, left_s: float = 50.0) -> int:
        deadline = Deadline(left_s, lambda: 0.0)
        return Delivery(self.store, self.stack, self, self.send, self.sleep, deadline, 1, waits).run()

    def waiting(self) -> list[Outgoing]:
        return [each.value for each in self.store.list_notifications()]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    store = Store(SqliteObjects(str(tmp_path / "bucket.db")))
    store.create_record(replace(record(), nonce="n"))
    store.put_spec(JOB, JobSpec("digits", ("train.py",)))
    return Site(store)


def test_each_channel_gets_it_once(site: Site) -> None:
    site.store.put_notification(Outgoing(notification()))
    assert site.run() == 2
    assert site.got == [("ml-team", f"{JOB}.hold.v1"), ("ops", f"{JOB}.hold.v1")]
    assert site.waiting() == []
    assert site.run() == 0


def test_a_notification_that_no_channel_wants_is_deleted(site: Site) -> None:
    site.store.put_notification(Outgoing(notification(1, NotifyEvent.ON_DEMAND)))
    assert site.run() == 0
    assert site.waiting() == []


def test_the_job_file_in_force_decides(site: Site) -> None:
    spec = JobSpec("digits", ("train.py",), notify={"ops": (NotifyEvent.ON_DEMAND,)})
    site.store.put_spec(JOB, spec, "1" * 64)
    read = site.store.read_record(JOB)
    assert read is not None
    site.store.cas_record(replace(read.value, spec_sha256="1" * 64, spec_replaced=True, nonce="m"), read.token)
    site.store.put_notification(Outgoing(notification(1, NotifyEvent.ON_DEMAND)))
    site.store.put_notification(Outgoing(notification(2)))
    site.run()
    assert site.got == [("ops", f"{JOB}.hold.v1"), ("ml-team", f"{JOB}.hold.v2")]


def test_without_a_readable_job_file_the_channels_decide(site: Site) -> None:
    site.store.put(f"jobs/{JOB}/spec.json", b"{")
    site.store.put_notification(Outgoing(notification()))
    assert site.run() == 2


def test_only_channels_that_failed_are_tried_again_at_growing_intervals(site: Site) -> None:
    site.down = {"ops"}
    site.store.put_notification(Outgoing(notification()))
    site.run()
    pauses, tries = [], 1
    while (left := site.waiting()) and tries < 8:
        (outgoing,) = left
        assert (outgoing.left, outgoing.tries) == (("ops",), tries)
        pauses.append(outgoing.not_before - site.at)
        site.run()
        assert site.waiting() == left, "it is not due yet"
        site.at = outgoing.not_before
        site.run()
        tries += 1
    assert pauses == [60, 120, 240, 480, 960, LONGEST_RETRY_S, LONGEST_RETRY_S]
    site.down = set()
    site.at = site.waiting()[0].not_before
    site.run()
    assert Counter(site.got) == Counter({("ml-team", f"{JOB}.hold.v1"): 1, ("ops", f"{JOB}.hold.v1"): 1})
    assert site.waiting() == []


def test_after_hours_it_is_given_up_and_the_ledger_says_so(site: Site) -> None:
    site.down = {"ops"}
    site.store.put_notification(Outgoing(notification()))
    while site.waiting():
        site.at = max(site.at, site.waiting()[0].not_before)
        site.run()
    assert GIVE_UP_S <= site.at - AT <= GIVE_UP_S + LONGEST_RETRY_S
    (entry,) = site.store.list_ledger(JOB)
    assert (entry.event, entry.cause, entry.detail) == (Event.UNDELIVERED, "channel ops", "hold: HTTP 500")
    assert entry.at == AT + GIVE_UP_S, "a repeated write creates no second entry"


def test_a_function_that_was_down_for_hours_still_tries(site: Site) -> None:
    site.down, site.at = {"ml-team", "ops"}, AT + 2 * GIVE_UP_S
    site.store.put_notification(Outgoing(notification()))
    for _ in range(deliver.LEAST_TRIES - 1):
        site.run()
        site.at = site.waiting()[0].not_before
    assert site.store.list_ledger(JOB) == ()
    site.run()
    assert site.waiting() == []
    assert {entry.cause for entry in site.store.list_ledger(JOB)} == {"channel ml-team", "channel ops"}


def test_a_channel_that_left_the_stack_is_dropped(site: Site) -> None:
    site.down = {"ops"}
    site.store.put_notification(Outgoing(notification()))
    site.run()
    site.stack = replace(BOTH, channels=(SLACK,))
    site.at = site.waiting()[0].not_before
    site.run()
    assert site.waiting() == []
    assert site.store.list_ledger(JOB) == ()


def test_a_channel_that_is_down_takes_time_once(site: Site) -> None:
    tried: list[str] = []

    def send(channel: ChannelState, what: Notification) -> None:
        tried.append(channel.name)
        raise AddressError("leads to an address that is not public")

    for number in range(5):
        site.store.put_notification(Outgoing(notification(number)))
    Delivery(site.store, site.stack, site, send, site.sleep, parallel=1).run()
    assert tried == ["ml-team", "ops"]
    assert len(site.waiting()) == 5


def test_an_unexpected_error_stops_only_its_message(site: Site) -> None:
    def send(channel: ChannelState, what: Notification) -> None:
        if what.id.endswith("v1"):
            raise ZeroDivisionError
        site.send(channel, what)

    for number in (1, 2):
        site.store.put_notification(Outgoing(notification(number)))
    assert Delivery(site.store, site.stack, site, send, site.sleep, parallel=1).run() == 2
    (left,) = site.waiting()
    assert (left.notification.id, left.left) == (f"{JOB}.hold.v1", ("ml-team", "ops"))


def test_of_very_many_each_gets_a_turn(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "NOTIFICATIONS_READ", 5)
    site.stack = replace(BOTH, channels=(OPS,))
    for number in range(12):
        late = Outgoing(notification(number), tries=3, not_before=AT + 3600)
        site.store.put_notification(late if number < 11 else Outgoing(notification(99)))
    for _ in range(200):
        if site.run():
            break
    assert site.got == [("ops", f"{JOB}.hold.v99")]


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_killed_process_leaves_it_to_the_next_tick(site: Site, dies: str) -> None:
    site.store.put_notification(Outgoing(notification()))
    site.dies = dies
    with pytest.raises(Killed):
        site.run()
    site.dies = ""
    before = len(site.got)
    assert site.run() == 0, "the claim of the killed process holds for some seconds"
    assert site.run(waits=True) == 2, "the tick waits for its end"
    assert site.slept == [CLAIM_S]
    assert {number for _, number in site.got} == {f"{JOB}.hold.v1"}
    assert len(site.got) == before + 2
    assert site.waiting() == []


def test_claims_last_real_seconds(site: Site) -> None:
    site.scale = 60.0
    site.store.put_notification(Outgoing(notification()))
    site.dies = "before"
    with pytest.raises(Killed):
        site.run()
    site.dies = ""
    assert site.run(waits=True) == 2
    assert site.slept == [CLAIM_S]


def test_a_tick_does_not_wait_for_a_channel_that_failed(site: Site) -> None:
    site.down = {"ops"}
    site.store.put_notification(Outgoing(notification()))
    site.run()
    site.at = site.waiting()[0].not_before - CLAIM_S / 2
    site.run(waits=True)
    assert site.slept == []


def test_two_processes_send_it_once(site: Site) -> None:
    site.store.put_notification(Outgoing(notification()))
    other = Delivery(site.store, site.stack, site, site.send, site.sleep, parallel=1)
    read = site.store.list_notifications()
    site.run()
    other._send_due(read)
    assert len(site.got) == 2


def test_without_time_nothing_is_claimed(site: Site) -> None:
    site.store.put_notification(Outgoing(notification()))
    assert site.run(left_s=SEND_S - 1) == 0
    assert site.waiting() == [Outgoing(notification())]


def test_the_oldest_is_sent_first(site: Site) -> None:
    site.stack = replace(BOTH, channels=(OPS,))
    for number, at in ((1, AT - 10), (2, AT - 30), (3, AT - 20)):
        site.store.put_notification(Outgoing(notification(number, at=at)))
    site.run()
    assert [number for _, number in site.got] == [f"{JOB}.hold.v2", f"{JOB}.hold.v3", f"{JOB}.hold.v1"]


def test_an_unreadable_notification_goes_to_quarantine(site: Site) -> None:
    site.store.put("notifications/abcd2345.hold.v9", b"{")
    site.store.put_notification(Outgoing(notification()))
    assert site.run() == 2
    assert site.store.list("notifications/") == ()
    assert len(site.store.list("quarantine/")) == 1


def test_several_are_sent_at_the_same_time(site: Site) -> None:
    for number in range(20):
        site.store.put_notification(Outgoing(notification(number)))
    sent = Delivery(site.store, site.stack, site, site.send, site.sleep).run()
    assert sent == len(site.got) == 40
    assert site.waiting() == []
