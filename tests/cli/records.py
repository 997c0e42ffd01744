"""Jobs in a bucket, as tests of commands need them."""

from __future__ import annotations

import msgspec

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Node, Phase, Record, Slot, SlotState
from spotkeeper.contract.stack import Model
from spotkeeper.contract.uploads import LogPart
from spotkeeper.reconcile.store.store import Store

JOB = "abcdefgh"


def slot(**over: object) -> Slot:
    base = Slot(1, SlotState.MEMBER, "workers", "us-central1-a", Model.SPOT, since=100.0, uid="u", boot="b")
    return msgspec.structs.replace(base, **over)


def a_job(store: Store, **over: object) -> Record:
    record = Record(
        job=JOB,
        uid="6f0f9a52-4a0d-4c5e-8d1b-0d8f4d1f1a11",
        name="first",
        spec_sha256="0" * 64,
        created=0.0,
        nonce="n",
        gen=2,
        nodes=(Node(cur=slot()), Node(cur=slot(attempt=2, model=Model.ON_DEMAND))),
        members=(0, 1),
    )
    record = msgspec.structs.replace(record, **over)
    store.put_name(record.name, record.job)
    store.set_active(record.job)
    assert store.create_record(record)
    return record


def stdout(start: int, text: bytes, node: int = 0) -> LogPart:
    return LogPart(f"node {node} (sk-prod-{JOB}-n000{node}-a1) stdout", text, start, "/run/0/stdout.log")


HEAD = f"--- node 0 (sk-prod-{JOB}-n0000-a1) stdout\n"


def failed(store: Store) -> Record:
    """A job that holds because its own code failed, with the log of the node that did."""
    record = a_job(store, phase=Phase.HOLD, hold=Hold.FAILURE, reason="node 1 exited with 93", hold_ends=9e9)
    store.append_ledger(JOB, Entry(at=9.0, id="hold.v3", event=Event.HOLD, gen=2, node=1, cause="failure"))
    store.put(f"jobs/{JOB}/logs/1/2.log", b"this does not fit\n")
    return record
