"""Turns ledger entries into notifications: what happened, what it has cost, what the reader can do. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.notification import ChannelState, Notification, NotifyEvent
from spotkeeper.contract.record import NO_SPOT_YET, Hold, Outcome, Record
from spotkeeper.contract.redact import redact
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.reconcile.select.offers import time_of_day

LONGEST = 600  # characters of a text
# Controls, and marks that reorder or hide text: https://www.unicode.org/reports/tr36/#Bidirectional_Text_Spoofing
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]+"
)
_PASSES = [hold.value for hold in Hold if hold.passes]
_RETRIES = (Hold.CLOUD.value, Hold.CAPACITY.value)
_TWICE = 2
_AGAIN = {
    Hold.SPEND: " (it may then spend the same amount again)",
    Hold.MAX_WAIT: " (it then waits that long again; a job file with `policy: balanced` lets it buy on-demand)",
}


def notifications(entries: Iterable[Entry], record: Record, stack: StackState) -> tuple[Notification, ...]:
    """Return the notifications for new ledger entries. ``record``: as written together with the entries."""
    return tuple(found for entry in entries if (found := _notification(entry, record, stack)) is not None)


def first_checkpoint(entry: Entry, record: Record, stack: StackState) -> Notification:
    """Return the notification of a job's first durable checkpoint."""
    text = f"has its first durable checkpoint, at step {entry.step}: a preemption now costs only the steps after it."
    return _of(entry, record, stack, (NotifyEvent.FIRST_CHECKPOINT,), text)


def channels_for(notification: Notification, stack: StackState, spec: JobSpec | None) -> tuple[str, ...]:
    """Return the channels that want a notification: the job file's choice for a channel replaces the channel's own."""
    chosen = spec.notify if spec is not None else {}
    return tuple(
        channel.name
        for channel in stack.channels
        if set(chosen.get(channel.name, channel.events)) & set(notification.events)
    )


def test_message(channel: ChannelState, stack: StackState, at: float, number: str) -> Notification:
    """Return the message that `spotkeeper notify test` sends. ``number`` makes its id unique."""
    told = ", ".join(event.value for event in channel.events) or "none; a job file can choose events"
    text = f"can send to the channel {channel.name}. Default events: {told}."
    return Notification(f"test.{number}", (), at, stack.stack, "", "", text)


def subject(notification: Notification) -> str:
    """Return the first words of the message's text: ``Job NAME``, or ``Spotkeeper`` in a test message."""
    return f"Job {notification.name}" if notification.name else "Spotkeeper"


def cost(notification: Notification) -> str:
    """Return the job's cost as a sentence; "" if unknown."""
    if notification.spent_usd is None:
        return ""
    now = f"; its machines cost {_usd(notification.usd_per_hour)}/h now" if notification.usd_per_hour else ""
    return f"Cost so far: about {_usd(notification.spent_usd)}{now}."


def plain(text: str) -> str:
    """Return text from outside as one short line without control characters and without what looks like a secret."""
    found = _UNSEEN.sub(" ", redact(text)).strip()
    return found if len(found) <= LONGEST else found[: LONGEST - 3] + "..."


def _notification(entry: Entry, record: Record, stack: StackState) -> Notification | None:
    match entry.event:
        case Event.GENERATION:
            return _trains(entry, record, stack)
        case Event.FALLBACK if not (entry.cause or "").startswith(NO_SPOT_YET):  # else announced when it began
            why = f" ({entry.cause})" if entry.cause else ""
            text = f"buys on-demand machines for a limited time{why}: {_sentence(entry.detail)}"
            todo = f"No action is needed. To pause the job instead: spotkeeper pause {record.name}"
            return _of(entry, record, stack, (NotifyEvent.ON_DEMAND,), text, todo)
        case Event.HOLD if entry.cause not in _PASSES:
            return _hold(entry, record, stack)
        case Event.END:
            return _end(entry, record, stack)
    return None


def _trains(entry: Entry, record: Record, stack: StackState) -> Notification | None:
    where = _machines(record)
    if entry.gen == 1:
        text = f"trains, on {where}."
        return _of(entry, record, stack, (NotifyEvent.STARTED,), text, f"To follow it: spotkeeper watch {record.name}")
    if not entry.holds:
        return None
    step = f" from step {entry.step}" if entry.step is not None else ""
    return _of(entry, record, stack, (NotifyEvent.RESUMED,), f"trains again{step}, on {where}.")


def _hold(entry: Entry, record: Record, stack: StackState) -> Notification | None:
    if entry.cause in _RETRIES and record.hold_until is not None and record.hold_count >= _TWICE:
        return None  # it retries by itself; the first hold was announced, and so is the generation that ends them
    events = {
        Hold.FAILURE.value: (NotifyEvent.FAILED, NotifyEvent.HOLD),
        Hold.SPEND.value: (NotifyEvent.OVER_BUDGET, NotifyEvent.HOLD),
    }.get(entry.cause or "", (NotifyEvent.HOLD,))
    begin = "failed and is on hold" if NotifyEvent.FAILED in events else "is on hold"
    again = f" It retries by itself at {time_of_day(record.hold_until)}." if record.hold_until is not None else ""
    end = f" Without a resume it ends at {_time(record.hold_ends)}." if record.hold_ends is not None else ""
    kept = " It has no machines; the disks with its checkpoints are billed."
    return _of(entry, record, stack, events, f"{begin}: {_sentence(_reason(entry))}{kept}{again}{end}", _remedy(record))


def _remedy(record: Record) -> str:
    cancel = f"To end it: spotkeeper cancel {record.name}"
    if record.hold is Hold.FAILURE:
        logs = f"See spotkeeper logs {record.name}, correct the code, then: spotkeeper resume {record.name} JOB.YAML"
        return f"{logs}. {cancel}"
    if record.go_back() in record.reason:
        return f"To continue without the newest checkpoint: {record.go_back()}. {cancel}"
    same = _AGAIN.get(record.hold, "") if record.hold is not None else ""
    return f"To continue: spotkeeper resume {record.name}{same}. {cancel}"


def _end(entry: Entry, record: Record, stack: StackState) -> Notification:
    why = _reason(entry)
    if entry.cause == Outcome.FAILED.value:
        text, todo = f"failed: {_sentence(why)}", f"See spotkeeper report {record.name} and its logs."
        return _of(entry, record, stack, (NotifyEvent.FAILED,), text + _disks(record), todo)
    if entry.cause == Outcome.STOPPED.value:
        text, todo = f"was stopped by its search: {_sentence(why)}", ""
    elif entry.cause == Outcome.CANCELLED.value:
        text, todo = _sentence(f"was {why}" if why.startswith("cancelled") else f"was cancelled: {why}"), ""
    else:
        text, todo = "succeeded.", f"To fetch its output: spotkeeper download {record.name}"
    return _of(entry, record, stack, (NotifyEvent.FINISHED,), text + _disks(record), todo)


def _disks(record: Record) -> str:
    return " Its disks are kept and billed until you delete them." if record.keep_disks else ""


def _of(
    entry: Entry, record: Record, stack: StackState, events: Sequence[NotifyEvent], text: str, todo: str = ""
) -> Notification:
    limits = record.limits
    hours = max(0.0, entry.at - limits.spent_at) / 3600.0 if limits.spent_at else 0.0  # since the record was written
    return Notification(
        id=f"{record.job}.{entry.id}",
        events=tuple(events),
        at=entry.at,
        stack=stack.stack,
        job=record.job,
        name=record.name,
        text=plain(text),
        todo=plain(todo),
        spent_usd=round(limits.spent + hours * (limits.usd_hour or 0.0), 4),
        usd_per_hour=None if limits.usd_hour is None else round(limits.usd_hour, 4),
    )


def _reason(entry: Entry) -> str:
    return entry.detail or entry.cause or ""


def _sentence(text: str) -> str:
    text = text.strip() or "no reason is recorded"
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _machines(record: Record) -> str:
    """Return the gang's machines: ``2 spot machines and 1 on-demand machine in us-central1-a``."""
    slots = [slot for index in record.members if (slot := record.nodes[index].cur) is not None]
    counts, zones = Counter(slot.model for slot in slots), sorted({slot.zone for slot in slots})
    parts = [f"{counts[model]} {model.value} machine{'' if counts[model] == 1 else 's'}" for model in _in_order(counts)]
    where = f" in {', '.join(zones)}" if zones else ""
    return (" and ".join(parts) or "no machine") + where


def _in_order(counts: Counter[Model]) -> Iterator[Model]:
    return (model for model in Model if counts[model])


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M} UTC"


def _usd(amount: float | None) -> str:
    return f"${amount or 0.0:,.2f}"
