"""What commands print and how they fail: no traceback, the right exit code, JSON where asked for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from spotkeeper.cli.errors import Exit
from spotkeeper.cli.jobs import resume_waits
from spotkeeper.cli.logs import follow
from spotkeeper.cli.logtext import News, added
from spotkeeper.cli.target import find_target
from spotkeeper.cli.watch import watch
from spotkeeper.clock import Clock
from spotkeeper.reconcile.store import ObjectStore
from spotkeeper.report.view import JobView
from spotkeeper.spec.generation import Progress
from spotkeeper.spec.job import AskKind, JobSpec, Nodes, span_s
from spotkeeper.spec.joblog import Part, join
from spotkeeper.spec.ledger import Entry, Event
from spotkeeper.spec.model import Model
from spotkeeper.spec.record import Budget, Hold, Outcome, Phase, Rank, Record, Slot, SlotState

from tests.cli.conftest import Cli

ROOT = Path(__file__).resolve().parents[2]
JOB = "abcdefgh"


def slot(**over: object) -> Slot:
    base = Slot(1, SlotState.MEMBER, "workers", "us-central1-a", Model.SPOT, since=100.0, uid="u", boot="b")
    return msgspec.structs.replace(base, **over)


def a_job(store: ObjectStore, **over: object) -> Record:
    record = Record(
        job=JOB,
        uid="6f0f9a52-4a0d-4c5e-8d1b-0d8f4d1f1a11",
        name="first",
        spec_sha256="0" * 64,
        created=0.0,
        nonce="n",
        gen=2,
        ranks=(Rank(cur=slot()), Rank(cur=slot(attempt=2, model=Model.ON_DEMAND))),
        members=(0, 1),
    )
    record = msgspec.structs.replace(record, **over)
    store.put_name(record.name, JOB)
    store.set_active(JOB)
    assert store.create_record(record)
    return record


def test_status_of_a_job(cli: Cli, store: ObjectStore) -> None:
    a_job(store)
    store.put_progress(JOB, Progress(gen=2, step=40, at=1.0, loss=2.5, samples_per_s=100.0, total_steps=300))
    done = cli("status", "first")
    assert done.code == 0
    assert "step 40/300  loss 2.5000  100 samples/s" in done.out
    assert "us-central1-a  on-demand  attempt 2" in done.out
    view = json.loads(cli("status", JOB, "--json").out)
    assert (view["step"], view["nodes"][0]["state"], view["nodes"][0]["master"]) == (40, "training", True)


@pytest.mark.parametrize(
    ("deadline", "over", "line"),
    [
        ("2h", {}, "deadline in 1h23m, some 8m20s of training are left"),
        ("40m", {}, "deadline in 3m20s, some 8m20s of training are left"),
        ("20m", {}, "its deadline was 16m40s ago, some 8m20s of training are left"),
        ("2h", {"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}, "done 1h23m before its deadline"),
        ("20m", {"phase": Phase.DONE, "outcome": Outcome.SUCCEEDED}, "done 16m40s after its deadline"),
        (None, {}, "deadline"),
    ],
)
def test_status_and_report_say_how_it_stands_with_the_deadline(
    cli: Cli, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, deadline: str | None, over: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr(Clock, "now", lambda _: 2200.0)
    record = a_job(store, **over)
    store.put_spec(JOB, JobSpec("first", ("train.py",), deadline=deadline), record.spec_key())
    if over:
        store.append_ledger(JOB, Entry(at=2200.0, id="end", event=Event.END, cause="succeeded"))
    store.put_progress(JOB, Progress(gen=2, step=50, at=2199.0, step_s=10.0, total_steps=100))
    for command in ("status", "report"):
        assert (line in cli(command, "first").out) == (deadline is not None)
        told = json.loads(cli(command, "first", "--json").out)["deadline_in_s"]
        assert told == (None if deadline is None else span_s(deadline) - 2200.0)


def test_status_shows_the_end_of_the_log_of_a_job_that_crashed(cli: Cli, store: ObjectStore) -> None:
    a_job(store, phase=Phase.HOLD, reason="4 crashes", budget=Budget(crashes=4))
    store.append_ledger(JOB, Entry(at=50.0, id="crash.g2", event=Event.CRASH, gen=2, rank=1, cause="crash"))
    store.put(f"jobs/{JOB}/logs/1/2.log", b"\n".join(b"line %d" % n for n in range(30)) + b"\nZeroDivisionError\n")
    out = cli("status", "first").out
    assert "holds (4 crashes)" in out
    assert "ZeroDivisionError" in out
    assert "line 29" in out
    assert "line 5 " not in out
    assert json.loads(cli("status", "first", "--json").out)["crash_log"][-1] == "ZeroDivisionError"


@pytest.mark.parametrize("command", ["status", "watch"])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_logs_lines_are_whole_however_long(
    cli: Cli, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, command: str, terminal: bool
) -> None:
    line = '  File "/srv/' + "a-long-folder/" * 20 + 'train.py", line 7, in <module>'
    a_job(store, phase=Phase.HOLD, hold=Hold.FAILURE, hold_ends=9e9, budget=Budget(crashes=4))
    store.append_ledger(JOB, Entry(at=50.0, id="crash.g2", event=Event.CRASH, gen=2, rank=1, cause="crash"))
    store.put(f"jobs/{JOB}/logs/1/2.log", f"{line}\nboom\n".encode())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    lines = cli(command, "first").out.splitlines()
    assert [lines.count(each) for each in (line, "boom")] == [1, 1]
    assert sum("boom" in each for each in lines) == 1, "it is told once"


def test_a_crash_that_was_got_over_is_not_shown(cli: Cli, store: ObjectStore) -> None:
    """The last generation's is, for it may come again; not one of which others have come and gone since."""
    a_job(store, gen=3)
    store.append_ledger(JOB, Entry(at=50.0, id="crash.g1", event=Event.CRASH, gen=1, rank=0))
    store.put(f"jobs/{JOB}/logs/0/1.log", b"ZeroDivisionError\n")
    assert "ZeroDivisionError" not in cli("status", "first").out
    store.append_ledger(JOB, Entry(at=60.0, id="crash.g2", event=Event.CRASH, gen=2, rank=0))
    store.put(f"jobs/{JOB}/logs/0/2.log", b"RuntimeError: again\n")
    assert "generation 2 failed, rank 0: RuntimeError: again" in cli("status", "first").out


def test_status_lists_unfinished_jobs_and_all_of_them_on_request(cli: Cli, store: ObjectStore) -> None:
    assert "no unfinished job in prod" in cli("status").out
    a_job(store, phase=Phase.DONE, outcome=Outcome.SUCCEEDED)
    store.clear_active(JOB)
    store.delete_name("first", JOB)
    store.put_tomb(JOB, 5.0)  # as the last round leaves it
    assert "no unfinished job" in cli("status").out
    assert "succeeded" in cli("status", "first").out
    assert json.loads(cli("status", "--json").out) == []
    out = cli("status", "--all").out
    assert "first" in out
    assert "succeeded" in out


@pytest.mark.parametrize("kind", ["cancel", "pause", "resume"])
def test_wishes_are_left_for_the_next_round(cli: Cli, store: ObjectStore, kind: str) -> None:
    phase = Phase.HOLD if kind == "resume" else Phase.RUN
    a_job(store, phase=phase)
    done = cli(kind, "first")
    assert (done.code, done.out) == (0, f"first ({JOB}): asked to {kind}\n")
    assert "next tick" in done.err
    (ask,) = store.list_asks(JOB)
    assert ask.kind is AskKind(kind)
    held = store.read_record(JOB)
    assert held is not None and held.value.phase is phase  # only reconcile writes the record


def test_a_resize_names_a_size_that_the_job_file_allows(cli: Cli, store: ObjectStore) -> None:
    a_job(store)
    store.put_spec(JOB, JobSpec("first", ("train.py",), nodes=Nodes(1, 4)))
    done = cli("resize", "first", "3")
    assert (done.code, done.out) == (0, f"first ({JOB}): asked to resize to 3 machines\n")
    (ask,) = store.list_asks(JOB)
    assert (ask.kind, ask.nodes) == (AskKind.RESIZE, 3)
    refused = cli("resize", "first", "5")
    assert refused.code == 4
    assert "5 is not within nodes: {min: 1, max: 4}" in refused.err
    assert len(store.list_asks(JOB)) == 1
    store.put_spec(JOB, JobSpec("first", ("train.py",), nodes=Nodes(2, 4)))
    assert "cannot have 1 machine: 1 is not within" in cli("resize", "first", "1").err


@pytest.mark.parametrize(
    ("phase", "words", "why"),
    [
        (Phase.RUN, ("resume",), "is not on hold: there is nothing to resume"),
        (Phase.HOLD, ("pause",), "holds already: out of luck"),
        (Phase.RUN, ("resize", "2"), "has 2 machines already"),
    ],
)
def test_what_is_so_already_is_refused_at_once(
    cli: Cli, store: ObjectStore, phase: Phase, words: tuple[str, ...], why: str
) -> None:
    """Taken in, it would be refused in the ledger, where nobody looks."""
    a_job(store, phase=phase, reason="out of luck", size=2)
    store.put_spec(JOB, JobSpec("first", ("train.py",), nodes=Nodes(1, 4)))
    done = cli(words[0], "first", *words[1:])
    assert (done.code, done.err) == (4, f"error: first ({JOB}) {why}\n")
    assert store.list_asks(JOB) == ()


def test_a_wish_behind_another_is_left_for_the_round_to_judge(cli: Cli, store: ObjectStore) -> None:
    a_job(store)
    assert cli("pause", "first").code == 0
    assert cli("resume", "first").code == 0  # the pause is not taken in yet
    assert [ask.kind for ask in store.list_asks(JOB)] == [AskKind.PAUSE, AskKind.RESUME]


def test_to_go_back_is_a_word_of_its_own(cli: Cli, store: ObjectStore) -> None:
    a_job(store)
    assert cli("resume", "first", "--go-back").code == 0
    (ask,) = store.list_asks(JOB)
    assert (ask.kind, ask.go_back) == (AskKind.RESUME, True)


def test_a_job_that_is_over_takes_no_wish(cli: Cli, store: ObjectStore) -> None:
    a_job(store, phase=Phase.END, outcome=Outcome.CANCELLED)
    done = cli("pause", "first")
    assert (done.code, done.err) == (4, f"error: first ({JOB}) is over: cancelled\n")
    assert store.list_asks(JOB) == ()


def test_cancel_withdraws_a_submission_that_was_cut_off(cli: Cli, store: ObjectStore) -> None:
    store.put_name("first", JOB)
    store.set_active(JOB)
    assert cli("cancel", "first").out == f"first ({JOB}): its unfinished submission is withdrawn\n"
    assert store.read_name("first") is None
    assert store.active_jobs() == ()


def test_logs(cli: Cli, store: ObjectStore) -> None:
    a_job(store)
    store.put(f"jobs/{JOB}/logs/0/1.log", b"old\n")
    store.put(f"jobs/{JOB}/logs/0/10.log", b"new\n")
    assert cli("logs", "first").out == "new\n"
    assert cli("logs", "first", "--gen", "1").out == "old\n"
    assert json.loads(cli("logs", "first", "--json").out)["gen"] == 10
    assert cli("logs", "first", "--rank", "5").err == "error: rank 5: first has ranks 0 to 1\n"
    missing = cli("logs", "first", "--rank", "1")
    assert (missing.code, missing.err.splitlines()[0]) == (3, "error: first: rank 1 has no log yet")
    held = store.read_record(JOB)
    assert held is not None
    assert store.cas_record(msgspec.structs.replace(held.value, phase=Phase.DONE), held.token)
    assert "no log: nothing was printed\n  try: the others: --rank all" in cli("logs", "first", "--rank", "1").err
    assert "generations with a log: 1, 10" in cli("logs", "first", "--gen", "7").err
    for gen in (1, 10):
        store.delete(f"jobs/{JOB}/logs/0/{gen}.log")
    assert cli("logs", "first", "--rank", "all").err == "error: first: no rank has a log: nothing was printed\n"


def test_a_log_that_grows_and_loses_its_beginning_is_printed_once() -> None:
    assert added("", "abc") == "abc"
    assert added("abc", "abcdef") == "def"
    lines = "".join(f"step {n}\n" for n in range(1000))
    assert added(lines, lines[500:] + "new\n") == "new\n"
    assert added("abc", "xyz") == "... some of it left out\nxyz"


def stdout(start: int, text: bytes, rank: int = 0) -> Part:
    return Part(f"rank {rank} (sk-prod-{JOB}-r000{rank}-a1) stdout", text, start, "/run/0/stdout.log")


HEAD = f"--- rank 0 (sk-prod-{JOB}-r0000-a1) stdout\n"


def test_of_a_log_of_several_files_only_what_is_new_is_printed() -> None:
    warned = Part("rank 0 (x) stderr", b"warning\n", 0, "/run/0/stderr.log")
    news, log = News(), (0, 1)
    first = news.of(log, join([stdout(0, b"step 1\n"), warned]))
    assert first == f"{HEAD}step 1\n--- rank 0 (x) stderr\nwarning\n"
    assert news.of(log, join([stdout(0, b"step 1\nst"), warned])) == f"{HEAD}st", "another file speaks again"
    assert news.of(log, join([stdout(0, b"step 1\nstep 2\n"), warned])) == "ep 2\n"
    assert news.of(log, join([stdout(0, b"step 1\nstep 2\n"), warned])) == ""
    assert news.of((0, 2), join([stdout(0, b"step 1\n")])) == f"{HEAD}step 1\n", "each generation has its own"


def test_what_a_followed_log_never_had_is_said_where_it_is_missing() -> None:
    """3,000 lines between two looks: the store has the last 64 KB of them."""
    news, log = News(), (0, 1)
    assert news.of(log, join([stdout(0, b"--- step 1\n")])) == f"{HEAD}--- step 1\n", "a job may print such lines"
    gap = "... 1.2 MB left out; whole on the machine: /run/0/stdout.log\n"
    assert news.of(log, join([stdout(1_200_011, b"step 9\n")])) == f"{gap}step 9\n", "and its heading only once"
    assert news.of(log, join([stdout(1_200_018, b"step 10\n")])) == "step 10\n"
    later = news.of(log, join([stdout(80_000_000, b"step 99\n")]))
    assert later == "... 78.8 MB left out; its last 64 MiB on the machine: /run/0/stdout.log\nstep 99\n"


def test_logs_of_all_ranks_and_how_to_read_the_whole_of_them(cli: Cli, store: ObjectStore) -> None:
    a_job(store)
    for rank in (0, 1):
        store.put(f"jobs/{JOB}/logs/{rank}/2.log", join([stdout(2048 * rank, b"said\n", rank)]))
    store.put(f"jobs/{JOB}/logs/1/1.log", b"older\n")
    done = cli("logs", "first", "--rank", "all")
    second = "... 2.0 KB left out; whole on the machine: /run/0/stdout.log"
    other = f"--- rank 1 (sk-prod-{JOB}-r0001-a1) stdout\n"
    assert done.out == f"{HEAD}said\n{other}{second}\nsaid\n"
    assert done.err == f"sk-prod-{JOB}-r0001-a1 is no machine of the job any more: what was left out went with it\n"
    assert [one["rank"] for one in json.loads(cli("logs", "first", "--rank", "all", "--json").out)] == [0, 1]
    store.put(f"jobs/{JOB}/logs/0/2.log", join([stdout(2048, b"said\n")]))
    assert cli("logs", "first").err == (
        f"all of it: gcloud compute ssh sk-prod-{JOB}-r0000-a1 --zone us-central1-a --tunnel-through-iap"
        " --command 'sudo cat /run/0/stdout.log'\n"
    )
    assert cli("logs", "first", "--rank", "every").code == 2


def test_watch_prints_each_event_once_and_ends_with_the_job(
    cli: Cli, store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    from spotkeeper.cli.jobs import view_of

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
def test_a_watch_leaves_its_last_view_in_the_scrollback_once_and_nothing_else(
    store: ObjectStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    height: int,
    end: str,
) -> None:
    """A Ctrl-C that the terminal echoes, a resize, a view that is higher than the screen: each left a border there."""
    from spotkeeper.cli.jobs import view_of

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


def failed(store: ObjectStore) -> Record:
    """A job that holds because its own code failed, with the log of the rank that did."""
    record = a_job(store, phase=Phase.HOLD, hold=Hold.FAILURE, reason="rank 1 exited with 93", hold_ends=9e9)
    store.append_ledger(JOB, Entry(at=9.0, id="hold.v3", event=Event.HOLD, gen=2, rank=1, cause="failure"))
    store.put(f"jobs/{JOB}/logs/1/2.log", b"this does not fit\n")
    return record


def test_watch_fails_with_a_job_that_holds_because_it_failed(cli: Cli, store: ObjectStore) -> None:
    record = failed(store)
    done = cli("watch", "first")
    assert done.code == 1
    for text in ("holds (rank 1 exited with 93)", "this does not fit", "spotkeeper resume first", "cancel first"):
        assert text in done.out
    assert done.err.splitlines() == [
        f"error: first ({JOB}) failed and holds",
        f"  try: spotkeeper logs {JOB}, then spotkeeper resume first [JOB.YAML]",
    ]
    view = json.loads(cli("watch", "first", "--json").out.splitlines()[-1])
    assert (view["phase"], view["hold"]["kind"], view["hold"]["resume"]) == (
        "hold",
        "failure",
        "spotkeeper resume first",
    )
    cli("resume", "first")
    assert "asked to resume" in cli("status", "first").out, "and watch waits for it"
    assert resume_waits(store, record)
    taken = msgspec.structs.replace(record, asks_done=tuple(ask.id for ask in store.list_asks(JOB)))
    assert not resume_waits(store, taken)


def test_logs_of_a_job_that_holds_say_so_and_end(cli: Cli, store: ObjectStore) -> None:
    failed(store)
    for more, said in (((), ()), (("--follow",), ("generation 2, which failed:",))):
        done = cli("logs", "first", "--rank", "1", *more)
        assert (done.code, done.out) == (0, "this does not fit\n")
        assert done.err.splitlines() == [
            *said,
            "first holds (rank 1 exited with 93)",
            "  try: spotkeeper resume first, or spotkeeper cancel first",
        ]
    assert "holds" not in cli("logs", "first", "--rank", "1", "--json").err


def test_a_followed_log_says_which_generation_speaks(
    cli: Cli, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after a resume the newest log is still that of the crash."""
    failed(store)
    cli("resume", "first")
    looks = 0

    def goes_on(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            store.put(f"jobs/{JOB}/logs/1/3.log", b"step 1\n")
            return
        held = store.read_record(JOB)
        assert held is not None
        over = msgspec.structs.replace(held.value, phase=Phase.END, outcome=Outcome.SUCCEEDED, nonce="n2")
        assert store.cas_record(over, held.token)

    monkeypatch.setattr(follow, "__defaults__", (goes_on,))
    done = cli("logs", "first", "--rank", "1", "--follow")
    assert done.out == "this does not fit\nstep 1\n"
    assert done.err.splitlines() == ["generation 2, which failed:", "generation 3:"]


def test_a_watched_job_that_somebody_cancelled_needs_no_advice(cli: Cli, store: ObjectStore) -> None:
    a_job(store, phase=Phase.END, outcome=Outcome.CANCELLED, reason="cancelled by me")
    done = cli("watch", "first")
    assert (done.code, done.err) == (1, f"error: first ({JOB}) was cancelled\n")


def test_watch_fails_with_a_job_that_failed(cli: Cli, store: ObjectStore) -> None:
    a_job(store, phase=Phase.END, outcome=Outcome.FAILED, reason="exit 93")
    done = cli("watch", "first")
    assert done.code == 1
    assert "failed (exit 93)" in done.out
    assert f"try: spotkeeper logs {JOB}" in done.err
    lines = cli("watch", "first", "--json").out.splitlines()
    assert json.loads(lines[-1])["outcome"] == "failed"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["status", "nobody"], 3, "error: nobody: no such job"),
        (["status", "frist"], 3, "error: frist: no such job (did you mean first?)"),
        (["logs", "first", "--rank", "9", "--follow"], 3, "error: rank 9: first has ranks 0 to 1"),
        (["schema", "jbo"], 2, "error: jbo: want job, stack or state (did you mean job?)"),
        (["reconcile"], 2, "error: only one tick at a time"),
        (["submit", "none.yaml"], 2, "error: none.yaml: no such file"),
        (["status", "--stack", "other"], 3, "error: {bucket} belongs to the stack prod, not to other"),
    ],
)
def test_errors_have_words_and_a_code(
    cli: Cli,
    store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    code: int,
    message: str,
) -> None:
    a_job(store)
    monkeypatch.chdir(tmp_path)
    done = cli(*argv)
    assert done.code == code
    assert done.err.splitlines()[0] == message.format(bucket=f"sqlite://{tmp_path}/bucket.sqlite")
    assert "Traceback" not in done.err


def test_usage_errors_come_from_the_parser(cli: Cli) -> None:
    assert cli("statu").code == 2
    assert cli("submit").code == 2
    assert cli("logs", "x", "--rank", "first").code == 2


def test_without_a_stack_the_message_names_both_ways(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    done = cli("status")
    assert done.code == 3
    assert "spotkeeper local up" in done.err
    assert "export SPOTKEEPER_STACK" in done.err
    assert "SPOTKEEPER_BUCKET is not set" in cli("status", "--stack", "prod").err
    monkeypatch.setenv("SPOTKEEPER_BUCKET", "gs://somewhere")  # and no stack: never the local one by surprise
    done = cli("status")
    assert (done.code, "no stack is named" in done.err) == (2, True)


def test_the_bucket_that_is_advised_is_accepted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack's output is the bucket's name (``infra/__main__.py``); the address has its scheme before it."""
    monkeypatch.delenv("SPOTKEEPER_BUCKET", raising=False)
    advice = cli("status", "--stack", "pr od").err.splitlines()[-1].removeprefix("  try: ")
    script = f'pulumi() {{ [ "$*" = "stack output bucket --stack pr od" ] && echo sk-acme-prod; }}; {advice}'
    told = subprocess.run(
        ["/bin/sh", "-c", f'{script}\nprintf %s "$SPOTKEEPER_BUCKET"'], capture_output=True, text=True, check=True
    ).stdout
    assert told == "gs://sk-acme-prod"
    monkeypatch.setenv("SPOTKEEPER_BUCKET", told)
    assert find_target("prod").store() is not None


def test_a_bucket_without_a_stack_or_with_a_wrong_address(
    cli: Cli, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.delete("stack/pools.json")
    assert cli("status").code == 3
    monkeypatch.setenv("SPOTKEEPER_BUCKET", "http://somewhere")
    done = cli("status")
    assert done.code == 2
    assert "want gs://<bucket>, s3://<bucket> or sqlite:///" in done.err


@pytest.mark.parametrize("document", ["job", "stack", "state"])
def test_schema_prints_a_schema(cli: Cli, document: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(cli("schema", document).out))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("kind: spot", "kind: spto"),
        ("spotkeeper:zones", "spotkeeper:zone"),
        ("gcp:project", "gcp:projekt"),
        ("{lease_minutes: 120", "{lease_minute: 120"),
    ],
)
def test_the_schema_of_a_stack_is_that_of_what_one_writes(cli: Cli, old: str, new: str) -> None:
    """The stack files that come with it fit, and what `spotkeeper plan` would refuse by its type does not."""
    valid = jsonschema.Draft202012Validator(json.loads(cli("schema", "stack").out))
    for name in ("example-gcp", "local"):
        file = (ROOT / "infra" / "stacks" / f"Pulumi.{name}.yaml").read_text()
        assert old in file
        assert valid.is_valid(yaml.safe_load(file.replace(old, new) if old else file)) == (not old)


def test_render_of_the_stack_of_this_machine_shows_its_scripts(cli: Cli) -> None:
    done = cli("render")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("===== startup-script\n#!")
    assert "\n===== shutdown-script\n" in done.out


def test_render_of_a_wrong_stack_file_names_its_lines(cli: Cli, tmp_path: Path) -> None:
    shipped = (ROOT / "infra" / "stacks" / "Pulumi.example-gcp.yaml").read_text()
    file = tmp_path / "Pulumi.wrong.yaml"
    file.write_text(shipped.replace("kind: spot", "kind: spto"))
    line = file.read_text().splitlines().index("      kind: spto") + 1
    done = cli("render", file)
    assert done.code == 2
    assert f'Pulumi.wrong.yaml:{line}: pools[1].kind: "spto"' in done.err
    file.write_text("config:\n  a: 1\n b\n")
    assert cli("render", file).err.startswith("error: Pulumi.wrong.yaml:3: ")
    file.write_text("confg: {}\n")
    assert "Pulumi.wrong.yaml: config: missing" in cli("render", file).err


def test_render_of_a_job_shows_torchrun_and_its_environment(cli: Cli, folder: Path) -> None:
    done = cli("render", folder / "job.yaml")
    assert done.code == 0, done.err
    assert "--nnodes=2" in done.out
    assert "SPOTKEEPER_RUN=" in done.out
    names = [one["name"] for one in json.loads(cli("render", folder / "job.yaml", "--json").out)]
    assert names == ["command", "environment"]


def test_every_command_has_help_and_an_example_or_a_reason(cli: Cli) -> None:
    out = cli("--help").out
    for command in (
        "submit",
        "status",
        "watch",
        "logs",
        "report",
        "cancel",
        "pause",
        "resume",
        "resize",
        "reconcile",
        "render",
    ):
        assert command in out
        text = cli(command, "--help").out
        assert "Usage: spotkeeper" in text
        assert len(text.splitlines()) > 8


def test_help_loads_nothing_heavy() -> None:
    """The budget is 0.4 s; what would break it is an import, and that can be told without a clock."""
    program = (
        "import sys\n"
        "from spotkeeper.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        "heavy = {'torch', 'obstore', 'requests', 'yaml', 'jwt', 'pulumi', 'pathspec', 'starlette'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
