"""Why the last generation failed, in a line or a few, from the logs that its machines left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from spotkeeper.cli import jobs
from spotkeeper.reconcile import paths
from spotkeeper.spec.joblog import Part, join
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.record import Outcome, Rank, Record
from spotkeeper.vm.launcher.stacks import TEXT

JOB = "abcd2345"
STACKS = """
--- 2026-11-21 16:00:00: stacks, of each thread the innermost call first
local rank 0 (pid 7): works, in old.py:1 in first (sleeping)

--- 2026-11-21 16:10:00: stacks, of each thread the innermost call first
local rank 0 (pid 7): {where} (sleeping)
Current thread 0x1 (most recent call first):
  File "train.py", line 41 in load
"""


def store(**logs: bytes) -> Any:
    kept = {paths.log(JOB, int(name[1:]), 3): data for name, data in logs.items()}
    return SimpleNamespace(get=kept.get)


def stacks(where: str) -> bytes:
    said = Part("rank 0 stdout", b"loss 3\n", 0, "/run/x/3/logs/stdout.log")
    return join([said, Part("rank 0 stacks", STACKS.format(where=where).encode(), 0, f"/run/x/3/{TEXT}")])


def record(**more: Any) -> Record:
    return Record(JOB, "u", "first", "", 0.0, gen=more.pop("gen", 4), ranks=(Rank(), Rank()), **more)


def crash(cause: str, **more: Any) -> Entry:
    return Entry(1.0, "crash.g3", Event.CRASH, gen=3, rank=1, cause=cause, **more)


def test_of_a_job_that_hung_each_workers_place_is_told_the_guilty_ones_first() -> None:
    logs = store(r0=stacks("waits for its peers, in c10d.py:9"), r1=stacks("waits for no peer, in train.py:41 in load"))
    log, failed = jobs._crash_log(logs, record(), (crash("hang"),))
    assert log == ()
    assert failed == (
        "generation 3 hung; its workers' innermost calls:",
        "  rank 1, local rank 0 (pid 7): waits for no peer, in train.py:41 in load (sleeping)",
        "  rank 0, local rank 0 (pid 7): waits for its peers, in c10d.py:9 (sleeping)",
    )
    held = Entry(2.0, "hold.3", Event.HOLD, gen=3, rank=1, cause="failure")
    assert jobs._crash_log(logs, record(gen=3), (crash("hang"), held)) == (log, failed), "and where it holds for that"


def test_a_job_that_trains_again_still_says_why_it_failed() -> None:
    said = join([Part("rank 1 stderr", b"Traceback\n  x\nValueError: no label\n\n", 0, "/run/x/3/logs/stderr.log")])
    log, failed = jobs._crash_log(store(r1=said), record(), (crash("crash"),))
    assert (log, failed) == ((), ("generation 3 failed, rank 1: ValueError: no label",))
    log, failed = jobs._crash_log(store(r1=said), record(gen=3), (crash("crash"),))
    assert (log[-1], failed) == ("ValueError: no label", ()), "where it stands, its log's end does"


@pytest.mark.parametrize("cause", ["hang", "crash"])
def test_without_a_log_or_after_a_good_end_nothing_is_said(cause: str) -> None:
    assert jobs._crash_log(store(), record(), (crash(cause),)) == ((), ())
    over = record(outcome=Outcome.SUCCEEDED)
    assert jobs._crash_log(store(r1=stacks("x")), over, (crash(cause),)) == ((), ())
