"""A notification reaches the function with the caller's token, and never stands in the way of a command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from spotkeeper.client import find_target, target
from spotkeeper.contract.stack import TICK_PATH, TeamState, TickNote
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.contract.samples import STACK


class Function(HTTPServer):
    """Answers as told and remembers each request."""

    status = 200
    hangs = False
    round: Callable[[str], None] | None = None  # what it does with a job before it answers

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.given_up = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Function

    def do_POST(self) -> None:
        self.server.calls.append((self.path, self.headers.get("Authorization", "")))
        if self.server.hangs:
            self.server.given_up.wait()
            return
        if self.server.round is not None:
            self.server.round(self.path.rpartition("/")[2])
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def function(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Function]:
    with Function() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        store.put("stack/pools.json", msgspec.json.encode(msgspec.structs.replace(STACK, function_url=server.url)))
        monkeypatch.setenv("SPOTKEEPER_TOKEN", "token-of-mine")
        yield server
        server.given_up.set()
        server.shutdown()
        thread.join()


def test_a_submission_notifies_the_function_with_the_token(
    cli: Cli, function: Function, store: Store, folder: Path
) -> None:
    done = cli("submit", folder / "job.yaml")
    assert (done.code, done.err) == (0, "")
    (job,) = store.active_jobs()
    assert function.calls == [(f"/v1/notify/{job}", "Bearer token-of-mine")]
    assert "token-of-mine" not in done.out
    cli("submit", folder / "job.yaml")
    assert len(function.calls) == 2, "nothing is new, but the function has not heard whose job it is"


def test_a_refused_notification_is_only_noted(cli: Cli, function: Function, folder: Path) -> None:
    function.status = 403
    done = cli("submit", folder / "job.yaml")
    assert done.code == 0
    assert "the next tick starts the job" in done.err


def test_an_unreachable_function_is_only_noted(cli: Cli, store: Store, folder: Path, function: Function) -> None:
    gone = msgspec.structs.replace(STACK, function_url="http://127.0.0.1:9")
    store.put("stack/pools.json", msgspec.json.encode(gone))
    done = cli("submit", folder / "job.yaml")
    assert done.code == 0
    assert "the next tick starts the job" in done.err


@pytest.mark.parametrize("words", [("submit", "job.yaml"), ("pause", "first"), ("status",), ("status", "first")])
def test_no_tick_is_promised_while_ticks_fail(
    cli: Cli,
    store: Store,
    folder: Path,
    function: Function,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(folder)
    now = time.time()
    monkeypatch.setenv("SPOTKEEPER_CLOCK", f"{now}:{now}:1")
    if words[0] != "submit":
        assert cli("submit", "job.yaml").code == 0
    function.status = 503
    note = TickNote(now - 2760.0, failing=now - 2700.0, failed=now - 60.0, reason="[Errno 24] Too many open files")
    store.put(TICK_PATH, msgspec.json.encode(note))
    done = cli(*words)
    told = (done.out + done.err).replace("\n", " ")
    assert "no tick succeeded for 45 minutes: [Errno 24] Too many open files" in told
    assert done.code == 0 and "the next tick" not in told


@pytest.mark.parametrize("silent_s", [0.0, 3000.0])
def test_a_slow_function_counts_as_notified_while_ticks_succeed(
    cli: Cli, store: Store, folder: Path, function: Function, monkeypatch: pytest.MonkeyPatch, silent_s: float
) -> None:
    """A platform takes connections for a function that hangs."""
    monkeypatch.setattr(target, "TIMEOUTS_S", (5.0, 0.05))
    function.hangs = True
    store.put(TICK_PATH, msgspec.json.encode(TickNote(time.time() - silent_s)))
    done = cli("submit", folder / "job.yaml")
    assert done.code == 0
    assert ("no tick succeeded for 50 minutes" in done.err) is (silent_s > 0)


def test_on_aws_the_notification_is_signed_with_the_users_keys(
    cli: Cli, function: Function, store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IAM looks at the signature before the function runs: a token of identity would be refused there."""
    here = msgspec.structs.replace(STACK, cloud="aws", region="eu-west-1", function_url=f"{function.url}/")
    store.put("stack/pools.json", msgspec.json.encode(here))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "SPOTKEEPER_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    done = cli("submit", folder / "job.yaml")
    assert done.code == 0 and "the next tick starts the job" in done.err and function.calls == []
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = AKIAME\naws_secret_access_key = x\n")
    (folder / "other.yaml").write_text((folder / "job.yaml").read_text().replace("name: first", "name: second"))
    before = set(store.active_jobs())
    assert cli("submit", folder / "other.yaml").err == ""
    ((path, signed),) = function.calls
    (job,) = set(store.active_jobs()) - before
    assert path == f"/v1/notify/{job}" and signed.startswith("AWS4-HMAC-SHA256 Credential=AKIAME/")
    assert "/eu-west-1/lambda/aws4_request" in signed


@pytest.mark.parametrize(
    ("user", "named"), [("ann", "ann"), ("di", "di"), ("eve", "sk-prod-ck@my-project.iam.gserviceaccount.com")]
)
def test_on_the_one_machine_cloud_a_token_names_the_user_whom_a_team_lists(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: str, named: str
) -> None:
    stack = msgspec.structs.replace(
        STACK, teams=(TeamState("audio", ("bo",)), TeamState("vision", ("ann",)), TeamState("default", high=("di",)))
    )
    store.put("stack/pools.json", msgspec.json.encode(stack))
    monkeypatch.setenv("LOGNAME", user)
    monkeypatch.setattr(target, "attach", lambda _: SimpleNamespace(identity_token=lambda who, url: f"{who} for {url}"))
    here = find_target(stack.stack)
    assert target.local_token(replace(here, local=tmp_path), "https://f") == f"{named} for https://f"


def test_a_repeated_search_tells_the_function_of_trials_of_which_it_has_not_heard(
    cli: Cli, store: Store, function: Function, folder: Path
) -> None:
    def hears(job: str) -> None:
        read = store.read_record(job)
        assert read is not None
        assert store.cas_record(msgspec.structs.replace(read.value, owner="ann", ver=1, nonce="n"), read.token)

    search = "name: lr\njob: job.yaml\nspace: {lr: {uniform: [0, 1]}}\ntrials: 3\nmetric: loss\ngoal: min\n"
    (folder / "sweep.yaml").write_text(search)
    stack = msgspec.structs.replace(STACK, teams=(TeamState("vision", ("ann",)),), function_url=function.url)
    store.put("stack/pools.json", msgspec.json.encode(stack))
    function.status = 503
    told = "the next tick starts the trials for team default; to tell whose it is, submit it again"
    assert told in cli("sweep", folder / "sweep.yaml").err
    function.status, function.round = 200, hears
    hears(min(store.active_jobs()))
    function.calls.clear()
    assert cli("sweep", folder / "sweep.yaml").err == ""
    told = sorted(path.rpartition("/")[2] for path, _ in function.calls)
    assert told == sorted(store.active_jobs())[1:]
    function.calls.clear()
    cli("sweep", folder / "sweep.yaml")
    assert not function.calls
    function.round = None
    for _ in range(2):
        cli("sweep", "rerun", "lr", "--trial", "1", "--seed", "7")
    assert len(function.calls) == 2


@pytest.mark.parametrize(
    ("user", "asked", "told"),
    [
        ("ann", "team: vision\npriority: high\n", []),
        ("bo", "priority: high\n", ["priority: high: team audio does not allow it to bo, so the job has normal"]),
        (
            "ann",
            "team: audio\npriority: high\n",
            ["team: audio: ann is no member, so the job counts for team vision"],
        ),
        (
            "",
            "team: vision\npriority: high\n",
            ["the function does not know yet whose job it is: it counts for team default, with priority normal"],
        ),
        ("", "priority: low\n", []),
    ],
)
def test_submit_and_status_say_what_the_job_does_not_get(
    cli: Cli, store: Store, function: Function, folder: Path, user: str, asked: str, told: list[str]
) -> None:
    teams = TeamState("audio", ("bo",), high=("di",)), TeamState("vision", ("ann",))
    stack = msgspec.structs.replace(STACK, teams=teams, function_url=function.url)
    store.put("stack/pools.json", msgspec.json.encode(stack))

    def hears(job: str) -> None:
        read = store.read_record(job)
        assert read is not None
        assert store.cas_record(msgspec.structs.replace(read.value, owner=user, ver=1, nonce="n"), read.token)

    function.round = hears
    with (folder / "job.yaml").open("a") as file:
        file.write(asked)
    done = cli("submit", folder / "job.yaml")
    lines = done.out.splitlines()
    assert lines[1 : len(told) + 1] == told
    assert [line for line in lines if "counts for team" in line or "does not allow" in line] == told
    shown = " ".join(cli("status", "first").out.split())
    assert all(line in shown for line in told)
    assert ("does not allow" in shown or "counts for team" in shown) is bool(told)
    heard = len(function.calls)
    cli("submit", folder / "job.yaml")
    assert len(function.calls) == heard + (not user), "a call that failed is repeated"
