"""A stack in a SQLite bucket whose jobs are in every state that metrics tell apart."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.client.target import Target
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Outcome, Phase
from spotkeeper.reconcile.store.store import Store, open_store
from tests.cli.records import JOB, a_job
from tests.contract.samples import STACK
from tests.report.job.test_trace import ANNOUNCED

NOW = 1000.0
HELD, ENDED, STARTING = "held0000", "ended000", "start000"


class StillClock:
    """A clock that a test sets."""

    scale, at = 1.0, NOW

    def now(self) -> float:
        return self.at


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def target(tmp_path: Path, clock: StillClock) -> Target:
    return Target("prod", f"sqlite://{tmp_path}/bucket.sqlite", clock)


@pytest.fixture
def store(target: Target) -> Store:
    found = open_store(target.bucket)
    found.put("stack/pools.json", msgspec.json.encode(replace(STACK, max_usd_hour=50.0)))
    a_job(found)
    found.append_ledger(JOB, Entry(at=0.0, id="submitted.job", event=Event.SUBMITTED, by='a"da\n\x1b[31m'))
    for entry in ANNOUNCED:
        found.append_ledger(JOB, entry)
    images = {"image_steps": 12, "image_share": 0.006}
    told = Progress(2, 40, 990.0, 64.0, 0.5, 2.25, 2, 30, total_steps=100, commit_at=940.0, **images)
    found.put_progress(JOB, told)
    a_job(found, job=HELD, name="held", phase=Phase.HOLD, hold=Hold.CAPACITY, nodes=(), members=())
    a_job(found, job=STARTING, name="starting", gen=0, members=())
    a_job(found, job=ENDED, name="ended", phase=Phase.DONE, outcome=Outcome.SUCCEEDED, nodes=(), members=())
    found.append_ledger(ENDED, Entry(at=900.0, id="end.job", event=Event.END, cause="succeeded"))
    found.append_ledger(ENDED, Entry(at=930.0, id="done.job", event=Event.DONE))
    found.clear_active(ENDED)
    found.put_tomb(ENDED, 930.0)
    return found
