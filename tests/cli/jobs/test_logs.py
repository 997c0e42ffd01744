"""`logs`: the complete log of one node or of all, once or while it grows."""

from __future__ import annotations

import json
import re
import signal
import time

import msgspec
import pytest

from spotkeeper.cli.jobs import logs
from spotkeeper.cli.jobs.logs import Pattern, follow_until
from spotkeeper.client.errors import CliError
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.contract.uploads import LogIndex, chunk_name, log_index
from spotkeeper.reconcile.store.store import Store
from spotkeeper_agent.launcher.spool import packed
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job, failed


def put(store: Store, node: int, gen: int, at: float, text: str, source: bytes = b"0o") -> None:
    store.put(chunk_name(JOB, node, gen, round(at * 1000)), packed(at, source, text.encode()))


def shown(out: str) -> list[str]:
    """Lines without their times."""
    found = [re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (.*)", line) for line in out.splitlines()]
    assert all(found), out
    return [each[1] for each in found if each]


def test_logs(cli: Cli, store: Store) -> None:
    a_job(store)
    now = float(int(time.time()))
    put(store, 0, 1, now - 7200, "old")
    put(store, 1, 2, now - 60, "an error", b"2e")
    put(store, 0, 2, now - 30, "new\nlines")
    assert shown(cli("logs", "first").out) == ["node 0: old", "node 1.2: an error", "node 0: new", "node 0: lines"]
    assert shown(cli("logs", "first", "--node", "1").out) == ["node 1.2: an error"]
    assert shown(cli("logs", "first", "--generation", "1").out) == ["node 0: old"]
    assert shown(cli("logs", "first", "--since", "1h", "--grep", "^(new|old)$").out) == ["node 0: new"]
    told = [json.loads(line) for line in cli("logs", "first", "--json").out.splitlines()]
    assert [(one["node"], one["gen"], one["source"], one["local_rank"], one["text"]) for one in told[:2]] == [
        *((0, 1, "stdout", 0, "old"), (1, 2, "stderr", 2, "an error")),
    ]
    assert told[0]["at"] == round((now - 7200) * 1000)
    assert cli("logs", "first", "--node", "5").err == "error: node 5: first has nodes 0 to 1\n"
    assert "generations with a log: 1, 2" in cli("logs", "first", "--generation", "7").err


@pytest.mark.parametrize("word", ["--since=soon", "--since=0", "--grep=(", "--node=all"])
def test_bad_words_are_refused(cli: Cli, store: Store, word: str) -> None:
    a_job(store)
    put(store, 0, 1, 5.0, "line")
    done = cli("logs", "first", word)
    assert (done.code, done.out) == (2, "")


def test_a_job_without_a_log(cli: Cli, store: Store) -> None:
    a_job(store)
    put(store, 0, 1, 5.0, "line")
    missing = cli("logs", "first", "--node", "1")
    assert (missing.code, missing.err.splitlines()[0]) == (3, "error: first: node 1 has no log yet")
    held = store.read_record(JOB)
    assert held is not None
    assert store.cas_record(msgspec.structs.replace(held.value, phase=Phase.DONE), held.token)
    told = cli("logs", "first", "--node", "1").err
    assert "no log: nothing was printed\n  try: all nodes' logs: without --node" in told
    store.delete(chunk_name(JOB, 0, 1, 5000))
    assert cli("logs", "first").err == "error: first: the job has no log: nothing was printed\n"


def test_logs_that_are_deleted_are_said(cli: Cli, store: Store) -> None:
    a_job(store)
    put(store, 1, 2, 5.0, "later")
    store.put(log_index(JOB, 1), msgspec.json.encode(LogIndex((), 812_000_000)))
    done = cli("logs", "first")
    assert shown(done.out) == ["node 1: later"]
    assert done.err.endswith("node 1: the oldest 812.0 MB of its log are deleted (`logs.keep_mb`)\n")


def test_logs_of_a_job_on_hold_end_with_a_note(cli: Cli, store: Store) -> None:
    failed(store)
    put(store, 1, 2, 5.0, "this does not fit", b"0e")
    for more in ((), ("--follow",)):
        done = cli("logs", "first", "--node", "1", *more)
        assert (done.code, shown(done.out)) == (0, ["node 1: this does not fit"])
        assert done.err.splitlines() == [
            "generation 2, which failed:",
            "first is on hold (node 1 exited with 93)",
            "  try: spotkeeper resume first, or spotkeeper cancel first",
        ]
    assert "hold" not in cli("logs", "first", "--node", "1", "--json").err


def test_a_followed_log_goes_on_with_the_next_generation(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after a resume the newest log is still that of the crash."""
    failed(store)
    put(store, 1, 2, 5.0, "this does not fit")
    cli("resume", "first")
    looks = 0

    def goes_on(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            put(store, 1, 3, 6.0, "step 1")
            put(store, 0, 3, 7.0, "step 1")
            return
        held = store.read_record(JOB)
        assert held is not None
        over = msgspec.structs.replace(held.value, phase=Phase.END, outcome=Outcome.SUCCEEDED, nonce="n2")
        assert store.cas_record(over, held.token)

    monkeypatch.setattr(follow_until, "__defaults__", (goes_on,))
    done = cli("logs", "first", "--follow")
    assert shown(done.out) == ["node 1: this does not fit", "node 1: step 1", "node 0: step 1"]
    assert done.err.splitlines() == ["generation 2, which failed:", "generation 3:"]


def test_a_pattern_that_never_ends_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take 2 to the power of 60 steps."""
    monkeypatch.setattr(logs, "GREP_S", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    try:
        pattern = Pattern("(a+)+$")
        assert pattern.found("aaa") and not pattern.found("b")
        with pytest.raises(CliError, match=r"takes more than 0\.05 s for one line"):
            pattern.found("a" * 60 + "b")
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    finally:
        signal.signal(signal.SIGALRM, before)
