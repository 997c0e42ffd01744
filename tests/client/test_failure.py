"""Why the last generation failed, in a line or a few, from the logs that its machines left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spotkeeper.client import logs, lookup
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Node, Outcome, Record
from spotkeeper.contract.uploads import LOG_BYTES, LogPart, join_log
from spotkeeper.reconcile.store import paths
from spotkeeper_agent.launcher.stacks import TEXT

JOB = "abcd2345"
STACKS = """
--- 2026-11-21 16:00:00: stack traces, each thread's innermost call first
local rank 0 (pid 7): works, in old.py:1 in first (sleeping)

--- 2026-11-21 16:10:00: stack traces, each thread's innermost call first
local rank 0 (pid 7): {where} (sleeping)
Current thread 0x1 (most recent call first):
  File "train.py", line 41 in load
"""


def store(**logs: bytes) -> Any:
    kept = {paths.log(JOB, int(name[1:]), 3): data for name, data in logs.items()}
    return SimpleNamespace(part=lambda path, start, size: kept.get(path, b"")[start : start + size])


def stacks(where: str) -> bytes:
    said = LogPart("node 0 stdout", b"loss 3\n", 0, "/run/x/3/logs/stdout.log")
    return join_log([said, LogPart("node 0 stacks", STACKS.format(where=where).encode(), 0, f"/run/x/3/{TEXT}")])


def record(**more: Any) -> Record:
    return Record(JOB, "u", "first", "", 0.0, gen=more.pop("gen", 4), nodes=(Node(), Node()), **more)


def crash(cause: str, **more: Any) -> Entry:
    return Entry(1.0, "crash.g3", Event.CRASH, gen=3, node=1, cause=cause, **more)


def test_a_hung_jobs_workers_are_listed_with_the_blocking_ones_first() -> None:
    blocks = "does not wait for its peers, in train.py:41 in load"
    logs = store(r0=stacks("waits for its peers, in c10d.py:9"), r1=stacks(blocks))
    log, failed = lookup._crash_log(logs, record(), (crash("hang"),))
    assert log == ()
    assert failed == (
        "generation 3 hung; its workers' innermost calls:",
        f"  node 1, local rank 0 (pid 7): {blocks} (sleeping)",
        "  node 0, local rank 0 (pid 7): waits for its peers, in c10d.py:9 (sleeping)",
    )
    held = Entry(2.0, "hold.3", Event.HOLD, gen=3, node=1, cause="failure")
    assert lookup._crash_log(logs, record(gen=3), (crash("hang"), held)) == (log, failed), "and where it holds for that"


def test_a_job_that_trains_again_still_shows_its_failure() -> None:
    said = join_log(
        [LogPart("node 1 stderr", b"Traceback\n  x\nValueError: no label\n\n", 0, "/run/x/3/logs/stderr.log")]
    )
    log, failed = lookup._crash_log(store(r1=said), record(), (crash("crash"),))
    assert (log, failed) == ((), ("generation 3 failed, node 1: ValueError: no label",))
    log, failed = lookup._crash_log(store(r1=said), record(gen=3), (crash("crash"),))
    assert (log[-1], failed) == ("ValueError: no label", ()), "where it stands, its log's end does"


@pytest.mark.parametrize("cause", ["hang", "crash"])
def test_without_a_log_or_after_success_no_failure_is_shown(cause: str) -> None:
    assert lookup._crash_log(store(), record(), (crash(cause),)) == ((), ())
    over = record(outcome=Outcome.SUCCEEDED)
    assert lookup._crash_log(store(r1=stacks("x")), over, (crash(cause),)) == ((), ())


CHAIN = """a warning of a library, before
[rank0]: Traceback (most recent call last):
[rank0]:   File "/src/train.py", line 9, in load
[rank0]: KeyError: 'label'

[rank0]: During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "/src/train.py", line 41, in main
[rank0]: ValueError: no label
[rank0]: in shard 7
[rank0]:[W1121 16:00:00] Warning: destroy_process_group() was not called
"""


def log_of(errors: str) -> bytes:
    torchrun = LogPart("node 1 (vm) torchrun", b"failed (exitcode: 1) local_rank: 0\n" * 9, 0, "/run/x/3/torchrun.log")
    said = LogPart("node 1 (vm) stdout", b"loss 3\n" * 9, 0, "/run/x/3/logs/stdout.log")
    return join_log([torchrun, said, LogPart("node 1 (vm) stderr", errors.encode(), 0, "/run/x/3/logs/stderr.log")])


def test_a_traceback_is_shown_whole_with_its_causes() -> None:
    """Neither torchrun's own words before it, nor what the job printed, nor a warning of before."""
    log, _ = lookup._crash_log(store(r1=log_of(CHAIN)), record(gen=3), (crash("crash"),))
    assert log == ("--- node 1 (vm) stderr", *CHAIN.splitlines()[1:])
    _, (line,) = lookup._crash_log(store(r1=log_of(CHAIN)), record(), (crash("crash"),))
    assert line == "generation 3 failed, node 1: ValueError: no label", "and not the warning that came last"


def test_of_two_unrelated_tracebacks_the_last_is_shown() -> None:
    caught = "Traceback (most recent call last):\n  x\nOSError: gone on without it\n"
    log, _ = lookup._crash_log(store(r1=log_of(caught + CHAIN)), record(gen=3), (crash("crash"),))
    assert log == ("--- node 1 (vm) stderr", *CHAIN.splitlines()[1:])


def test_a_long_traceback_is_shortened_in_the_middle() -> None:
    deep = ["Traceback (most recent call last):", *(f"  frame {n}" for n in range(98)), "RecursionError: too deep"]
    log, _ = lookup._crash_log(store(r1=log_of("\n".join(deep))), record(gen=3), (crash("crash"),))
    assert (log[1], log[-1]) == (deep[0], deep[-1]) and "  ... 60 lines left out" in log and len(log) == 42


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    log, _ = lookup._crash_log(store(r1=log_of("Killed\n")), record(gen=3), (crash("crash"),))
    assert log[-2:] == ("--- node 1 (vm) stderr", "Killed") and "loss 3" in log and len(log) == 12


def test_a_log_that_somebody_else_wrote_is_no_error() -> None:
    absurd = b"--- x: bytes " + b"1" * 5000 + b" to 9 of y\nOSError: no space\n"  # int() refuses so many digits
    log, _ = lookup._crash_log(store(r1=absurd), record(gen=3), (crash("crash"),))
    assert log[-1] == "OSError: no space"
    kept = store(r1=b"x\n" * (8 << 20))
    assert len(logs.stored(kept, JOB, 1, 3)) == LOG_BYTES
