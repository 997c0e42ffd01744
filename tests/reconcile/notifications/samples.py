"""A stack with channels, a job's record, and ledger entries."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.notification import ChannelState, Notification, NotifyEvent
from spotkeeper.contract.record import Limits, Node, Record, Slot, SlotState
from spotkeeper.contract.stack import Model, StackState
from tests.reconcile.clouds.gce.compute import STACK as PLAIN

JOB = "abcd2345"
AT = 1_795_511_645.0  # 2026-11-24 09:14:05 UTC
SLACK = ChannelState("ml-team", "slack")
QUIET = ChannelState("quiet", "webhook", ())
STACK: StackState = replace(PLAIN, channels=(SLACK, QUIET))


def slot(attempt: int, model: Model = Model.SPOT, zone: str = "us-central1-a") -> Slot:
    return Slot(attempt, SlotState.MEMBER, "gpu", zone, model, AT)


def record(**changes: Any) -> Record:
    nodes = (Node(cur=slot(1)), Node(cur=slot(2)), Node(cur=slot(1, Model.ON_DEMAND)))
    plain = Record(JOB, "u", "digits", "0" * 64, AT - 3600, gen=1, nodes=nodes, members=(0, 1, 2))
    return replace(plain, limits=Limits(spent=12.3456, usd_hour=3.21), **changes)


def entry(event: Event, key: str = "v3", **more: Any) -> Entry:
    return Entry(at=AT, id=f"{event.value}.{key}", event=event, **more)


def notification(number: int = 1, *events: NotifyEvent, **changes: Any) -> Notification:
    plain = Notification(
        id=f"{JOB}.hold.v{number}",
        events=events or (NotifyEvent.HOLD,),
        at=AT,
        stack="demo",
        job=JOB,
        name="digits",
        text="is on hold.",
        todo="To continue: spotkeeper resume digits",
        spent_usd=12.3456,
        usd_per_hour=3.21,
    )
    return replace(plain, **changes)
