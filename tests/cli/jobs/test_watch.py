"""`watch`: each event once, the last view in the scrollback, and an exit code for the outcome."""

from __future__ import annotations

import json
import re
import sys

import msgspec
import pytest

from spotkeeper.cli.jobs import status
from spotkeeper.cli.jobs.status import watch
from spotkeeper.client.errors import Exit
from spotkeeper.client.lookup import resume_waits
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Outcome, Phase
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.view import JobView
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job, failed
from tests.module_time import replace_time


def test_watch_prints_each_event_once_and_ends_with_the_job(
    cli: Cli, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    from spotkeeper.client.lookup import view_of

    record = a_job(store)
    store.append_ledger(JOB, Entry(at=1.0, id="a", event=Event.GENERATION, gen=1))
    looks = 0

    def look() -> JobView:
        nonlocal looks
        looks += 1
        if looks < 3:
            return view_of(store, record, None, 10.0)
        over = msgspec.structs.replace(record, phase=Phase.END, outcome=Outcome.SUCCEEDED)
        return view_of(store, over, None, 10.0)

    assert watch(look, as_json=False, wait=lambda _: None) == 0
    out = capsys.readouterr().out
    assert out.count("generation 1 trains") == 1
    assert "succeeded" in out
    assert looks == 3


ALT_SCREEN = re.compile("\x1b\\[\\?1049h(.*?)\x1b\\[\\?1049l", re.DOTALL)


@pytest.mark.parametrize("end", ["over", "ctrl-c"])
@pytest.mark.parametrize("height", [12, 24])
def test_watch_leaves_only_its_last_view_in_the_scrollback(
    store: Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    height: int,
    end: str,
) -> None:
    """A Ctrl-C that the terminal echoes, a resize, a view that is higher than the screen: each left a border there."""
    from spotkeeper.client.lookup import view_of

    record = a_job(store)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", str(height))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    looks = 0

    def look() -> JobView:
        nonlocal looks
        looks += 1
        store.append_ledger(JOB, Entry(at=float(looks), id=f"{looks}", event=Event.GENERATION, gen=looks))
        over = {"phase": Phase.END, "outcome": Outcome.SUCCEEDED} if looks == 12 else {}
        return view_of(store, msgspec.structs.replace(record, **over), None, 10.0)

    def wait(_: float) -> None:
        if looks == 11 and end == "ctrl-c":
            raise KeyboardInterrupt

    if end == "over":
        assert watch(look, as_json=False, wait=wait) is Exit.OK
    else:
        with pytest.raises(KeyboardInterrupt):
            watch(look, as_json=False, wait=wait)
    out = capsys.readouterr().out
    (live,) = ALT_SCREEN.findall(out)
    left = ALT_SCREEN.sub("", out)
    assert (left.count("╭"), left.count("╰")) == (1, 1)
    assert ("succeeded" in left) == (end == "over")
    frames = live.split("╭")[1:]
    assert len(frames) == (12 if end == "over" else 11)
    for number, frame in enumerate(frames, 1):
        assert frame.count("\n") < height and f"generation {number} trains" in frame, "the newest event is in view"


def test_events_are_printed_once_and_followed_until_the_job_ends(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = a_job(store)
    store.append_ledger(JOB, Entry(at=61.0, id="a", event=Event.GENERATION, gen=1))
    assert cli("events", "first").out == "01-01 00:01:01    1m01s  generation 1 trains\n"

    def wait(_: float) -> None:
        store.append_ledger(JOB, Entry(at=90.0, id="b", event=Event.NOTICE, node=0))
        held = store.read_record(JOB)
        assert held is not None
        store.cas_record(msgspec.structs.replace(record, phase=Phase.END, outcome=Outcome.CANCELLED), held.token)

    replace_time(monkeypatch, status, sleep=wait)
    done = cli("events", "first", "--follow")
    assert [line[25:] for line in done.out.splitlines()] == ["generation 1 trains", "node 0: preemption notice"]


def test_watch_fails_if_the_job_is_on_hold_after_a_failure(cli: Cli, store: Store) -> None:
    record = failed(store)
    done = cli("watch", "first")
    assert done.code == 1
    for text in ("on hold (node 1 exited with 93)", "this does not fit", "spotkeeper resume first", "cancel first"):
        assert text in done.out
    assert done.err.splitlines() == [
        f"error: first ({JOB}) failed and is on hold",
        f"  try: spotkeeper logs {JOB}, then spotkeeper resume first [JOB.YAML]",
    ]
    view = json.loads(cli("watch", "first", "--json").out.splitlines()[-1])
    assert (view["phase"], view["hold"]["kind"], view["hold"]["resume"]) == (
        "hold",
        "failure",
        "spotkeeper resume first",
    )
    cli("resume", "first")
    assert "a resume is requested" in cli("status", "first").out, "and watch waits for it"
    assert resume_waits(store, record)
    taken = msgspec.structs.replace(record, requests_done=tuple(request.id for request in store.list_requests(JOB)))
    assert not resume_waits(store, taken)


def test_a_cancelled_job_ends_watch_without_advice(cli: Cli, store: Store) -> None:
    a_job(store, phase=Phase.END, outcome=Outcome.CANCELLED, reason="cancelled by me")
    done = cli("watch", "first")
    assert (done.code, done.err) == (1, f"error: first ({JOB}) was cancelled\n")


def test_watch_fails_if_the_job_failed(cli: Cli, store: Store) -> None:
    a_job(store, phase=Phase.END, outcome=Outcome.FAILED, reason="exit 93")
    done = cli("watch", "first")
    assert done.code == 1
    assert "failed (exit 93)" in done.out
    assert f"try: spotkeeper logs {JOB}" in done.err
    lines = cli("watch", "first", "--json").out.splitlines()
    assert json.loads(lines[-1])["outcome"] == "failed"
