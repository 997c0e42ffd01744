"""Ledgers and records written by hand, and what is printed of them."""

from __future__ import annotations

import msgspec
from rich.console import Console, RenderableType

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Node, Phase, Record, Slot, SlotState
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.report.job.view import JobView
from spotkeeper.report.money import account_text
from spotkeeper.report.money.account import account
from tests.contract.samples import STACK, ZONES

HOUR = 3600.0


A = ZONES[0]


def entry(event: Event, at: float, node: int | None = None, attempt: int | None = None, **more: object) -> Entry:
    base = Entry(at=at, id=f"{event.value}.{node}.{attempt}.{at}", event=event, node=node, attempt=attempt)
    return msgspec.structs.replace(base, **more)


def intent(
    at: float, node: int, attempt: int, price: float = 1.0, model: Model = Model.SPOT, cause: str = "start"
) -> Entry:
    return entry(Event.INTENT, at, node, attempt, pool="workers", zone=A, model=model, price=price, cause=cause)


def generation(at: float, gen: int) -> Entry:
    return entry(Event.GENERATION, at, gen=gen)


# A node that trains one hour on spot, is noticed, is replaced at once, trains another hour, ends.
NOTICED = (
    intent(0.0, 0, 1),
    entry(Event.ADMITTED, 60.0, 0, 1),
    generation(100.0, 1),
    entry(Event.NOTICE, HOUR, 0, 1),
    intent(HOUR + 5, 0, 2, cause="notice"),
    entry(Event.ADMITTED, HOUR + 65, 0, 2),
    entry(Event.STOP, HOUR + 66, cause="notice"),
    entry(Event.PROMOTED, HOUR + 70, 0, 2),
    generation(HOUR + 76, 2),
    entry(Event.GONE, HOUR + 120, 0, 1),
    entry(Event.END, 2 * HOUR, cause="succeeded"),
    entry(Event.GONE, 2 * HOUR + 30, 0, 2),
    entry(Event.DONE, 2 * HOUR + 31),
)


def report(view: JobView, ledger: tuple[Entry, ...] = (), now: float = 9 * HOUR) -> RenderableType:
    return account_text.report(view, account(view, ledger, now))


def lost(*nodes: int, cause: str = "loss") -> tuple[Entry, ...]:
    losses = [entry(Event.LOSS, 500.0, node, 1, cause=cause) for node in nodes]
    came = [intent(505.0, node, 2, price=3.0, model=Model.ON_DEMAND, cause="loss") for node in nodes]
    up = [entry(Event.ADMITTED, 545.0, node, 2) for node in nodes]
    return (generation(100.0, 1), *losses, entry(Event.STOP, 500.0, cause="loss"), *came, *up, generation(550.0, 2))


# A node's machine is lost. Its first replacement is silent for 15 minutes; after a refusal the second one joins.
SILENT = (
    *lost(1)[:3],
    intent(501.0, 1, 2, price=0.5, cause="loss"),
    entry(Event.LOSS, 1400.0, 1, 2, cause="never joined", detail="no hello in time"),
    intent(1400.0, 1, 3, cause="loss"),
    entry(Event.REFUSED, 1402.0, 1, 3, cause="capacity"),
    intent(1402.0, 1, 4, cause="loss"),
    entry(Event.GONE, 1430.0, 1, 2),
    entry(Event.ADMITTED, 1470.0, 1, 4, started=1410.0),
    generation(1475.0, 2),
)


def slot(state: SlotState = SlotState.MEMBER, attempt: int = 1, **over: object) -> Slot:
    return msgspec.structs.replace(Slot(attempt, state, "workers", A, Model.SPOT, since=50.0), **over)


def a_record(**over: object) -> Record:
    record = Record(
        job="abcdefgh",
        uid="u",
        name="first",
        spec_sha256="0",
        created=0.0,
        gen=3,
        nodes=(
            Node(cur=slot()),
            Node(cur=slot(notice=700.0), next=slot(SlotState.ADMITTED, attempt=2)),
            Node(cur=slot(SlotState.INTENT, attempt=4)),
            Node(),
        ),
        members=(1, 0),
    )
    return msgspec.structs.replace(record, **over)


def states(view: JobView) -> list[tuple[int, str]]:
    return [(node.node, node.state.value) for node in view.nodes]


def held(kind: Hold = Hold.FAILURE, **over: object) -> Record:
    ends = 99 * HOUR if kind is Hold.FAILURE else None
    idle = {"phase": Phase.HOLD, "reason": "node 0 exited with 93", "members": (), "hold_ends": ends}
    return a_record(hold=kind, nodes=(Node(), Node()), **idle | over)


def priced(usd: float | None) -> StackState:
    pools = tuple(msgspec.structs.replace(pool, disk_gb=100, disk_usd_gb_month=usd) for pool in STACK.pools)
    return msgspec.structs.replace(STACK, pools=pools)


def printed(what: RenderableType) -> str:
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()
