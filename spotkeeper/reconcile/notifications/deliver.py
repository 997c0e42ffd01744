"""Sends the notifications that wait in the bucket, each at least once to each channel that wants it.

A process first claims a notification: it writes the time until which other processes leave it alone. After a success
it deletes the notification; after a failure it writes which channels are left and when to try again. If the process is
killed in between, the claim expires within seconds, and a tick sends the notification again, with the same id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from msgspec.structs import replace

from spotkeeper.clock import Now
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.notification import AddressError, ChannelState, Notification, Outgoing
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.notifications.addresses import ChannelAddresses
from spotkeeper.reconcile.notifications.formats import body
from spotkeeper.reconcile.notifications.https import SEND_S, SendError
from spotkeeper.reconcile.notifications.message import channels_for
from spotkeeper.reconcile.store.documents import CorruptError, Versioned
from spotkeeper.reconcile.store.objects import NEVER, Deadline, StoreError
from spotkeeper.reconcile.store.store import Store

CLAIM_S = 12.0  # real seconds; after this time another process may send
FIRST_RETRY_S, LONGEST_RETRY_S = 60.0, 1800.0  # virtual; the pause doubles with each failure
GIVE_UP_S = 6 * 3600.0  # virtual, since the event
LEAST_TRIES = 5  # the function itself may have been down for hours
AT_ONCE = 8

Send = Callable[[ChannelState, Notification], None]  # raises AddressError or SendError
log = logging.getLogger("spotkeeper.reconcile")


@dataclass
class Delivery:
    """One run over all notifications that wait.

    ``sleep``: waits real seconds; ``waits``: whether to wait until recent claims expire and then send what is left,
    because the process that made a claim can have been killed.
    """

    store: Store
    stack: StackState
    clock: Now
    send: Send
    sleep: Callable[[float], None]
    deadline: Deadline = NEVER
    parallel: int = AT_ONCE
    waits: bool = False
    down: dict[str, str] = field(default_factory=dict)  # channels that failed in this run -> why
    sent: int = 0

    def run(self) -> int:
        """Send what is due; return the number of messages sent.

        Raises:
            StoreError: the bucket does not answer; a later tick sends what is left.
        """
        waiting = self.store.list_notifications()
        self._send_due(waiting)
        claimed = [each.value.not_before for each in waiting if self._in_first_try(each.value)]
        if claimed and self.waits:
            pause_s = min(CLAIM_S, (max(claimed) - self.clock.now()) / self.clock.scale)
            if self.deadline.left() > pause_s + SEND_S:
                self.sleep(max(0.0, pause_s))
                self._send_due(self.store.list_notifications())
        return self.sent

    def _in_first_try(self, outgoing: Outgoing) -> bool:
        """Whether a process has claimed this notification for its first try: it is sending now, or it was killed.

        Only a first try is waited for; later ones are left to the ticks.
        """
        return outgoing.tries == 1 and outgoing.left is None and outgoing.not_before > self.clock.now()

    def _send_due(self, waiting: Sequence[Versioned[Outgoing]]) -> None:
        now = self.clock.now()
        due = [each for each in waiting if each.value.not_before <= now]
        if self.parallel == 1 or len(due) < 2:
            for each in due:
                self._handle(each)
            return
        with ThreadPoolExecutor(min(AT_ONCE, len(due))) as pool:
            list(pool.map(self._handle, due))

    def _handle(self, read: Versioned[Outgoing]) -> None:
        if self.deadline.left() < SEND_S:
            return
        outgoing, now = read.value, self.clock.now()
        mine = replace(outgoing, tries=outgoing.tries + 1, not_before=now + CLAIM_S * self.clock.scale)
        token = self.store.cas_notification(mine, read.token)
        if token is None:
            return  # another process sends it
        failed = self._try(mine, self._channels(mine))
        if not failed:
            self.store.delete_notification(mine)
        elif mine.tries >= LEAST_TRIES and self.clock.now() - mine.notification.at >= GIVE_UP_S:
            self._give_up(mine, failed)
        else:
            pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(mine.tries - 1, 10))
            later = replace(mine, left=tuple(failed), not_before=self.clock.now() + pause_s)
            self.store.cas_notification(later, token)

    def _channels(self, outgoing: Outgoing) -> tuple[ChannelState, ...]:
        if outgoing.left is not None:
            names: tuple[str, ...] = outgoing.left
        else:
            names = channels_for(outgoing.notification, self.stack, self._spec(outgoing.notification.job))
        return tuple(channel for channel in self.stack.channels if channel.name in names)

    def _spec(self, job: str) -> JobSpec | None:
        """Return the job file in force; None if it is missing or unreadable: the channels' own events then count."""
        try:
            read = self.store.read_record(job)
            return self.store.read_spec(job, read.value.spec_key()) if read is not None else None
        except CorruptError:
            return None

    def _try(self, claimed: Outgoing, channels: Sequence[ChannelState]) -> dict[str, str]:
        """Send to these channels while the claim lasts; return those that failed, with the reason."""
        failed: dict[str, str] = {}
        for channel in channels:
            why = self.down.get(channel.name)
            left_s = min(self.deadline.left(), (claimed.not_before - self.clock.now()) / self.clock.scale)
            if why is None and left_s < SEND_S:
                why = "no time was left"
            elif why is None:
                why = self._sent(channel, claimed.notification)
            if why:
                failed[channel.name] = why
        return failed

    def _sent(self, channel: ChannelState, notification: Notification) -> str:
        """Send to one channel; return "" or why it failed."""
        try:
            self.send(channel, notification)
        except (AddressError, SendError) as error:
            self.down[channel.name] = str(error)  # a channel that is down must not take the time of the others
            log.warning("channel %s: %s", channel.name, error, extra={"job": notification.job or None})
            return str(error)
        except Exception as error:  # one absurd message must not stop all others
            log.exception("channel %s: a notification could not be sent", channel.name)
            return type(error).__name__
        self.sent += 1
        return ""

    def _give_up(self, outgoing: Outgoing, failed: dict[str, str]) -> None:
        """Note in the job's ledger that the notification was not delivered, then delete the notification."""
        notification = outgoing.notification
        at = notification.at + GIVE_UP_S  # not the present time: a repeated write must create the same object
        for channel, why in failed.items():
            log.warning("gave up on notification %s for channel %s: %s", notification.id, channel, why)
            if notification.job:
                detail = f"{notification.events[0].value}: {why}" if notification.events else why
                entry_id = f"{Event.UNDELIVERED.value}.{channel}.{notification.id}"
                event, cause = Event.UNDELIVERED, f"channel {channel}"
                entry = Entry(at=at, id=entry_id, event=event, cause=cause, detail=detail)
                self.store.append_ledger(notification.job, entry)
        self.store.delete_notification(outgoing)


def deliver_quietly(delivery: Delivery) -> None:
    """Run a delivery; log a failure of the bucket, since a later tick sends what is left."""
    try:
        delivery.run()
    except StoreError as error:
        log.warning("notifications wait for the next tick: %s", error)


def sender(post: Callable[[str, bytes, str], None], addresses: ChannelAddresses) -> Send:
    """Return the function that sends a notification to a channel."""

    def send(channel: ChannelState, notification: Notification) -> None:
        try:
            post(addresses.of(channel.name), body(channel.kind, notification), notification.id)
        except (AddressError, SendError):
            addresses.forget(channel.name)
            raise

    return send
