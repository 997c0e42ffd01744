"""Exit codes: what `--help` says of them holds for every command that takes ``--stack``."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from spotkeeper.cli.for_sweeps import app as sweep_app
from spotkeeper.cli.main import app
from spotkeeper.reconcile.store.objects import UnavailableError
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.cli.records import a_job

# What each needs beside its name; {job} is a well job file.
ARGUMENTS = {
    "submit": ("{job}",),
    "status": (),
    "watch": ("first",),
    "events": ("first",),
    "queue": (),
    "logs": ("first",),
    "checkpoints": ("first",),
    "download": ("first",),
    "report": ("first",),
    "trace": ("first",),
    "metrics": ("first",),
    "market": (),
    "exporter": (),
    "dashboard": ("--no-browser",),
    "drill": ("first", "--yes"),
    "cancel": ("first", "--yes"),
    "pause": ("first",),
    "resize": ("first", "2"),
    "resume": ("first",),
    "move": ("first", "us-central1-b"),
    "swap": ("first",),
    "ssh": ("first",),
    "reconcile": ("--once",),
    "render": (),
    "plan": (),
    "repair": ("allocation",),
}


OF_FILES = {
    "check",
    "compare",
    "forecast",
    "live_check",
    "review",
}  # they want a stack's file, and ask no bucket: own tests


OF_SWEEPS = {  # of `sweep`
    "start": ("{sweep}",),
    "extend": ("lr", "--trials", "+1"),
    "status": ("lr",),
    "stop": ("lr", "--yes"),
    "rerun": ("lr", "--seed", "1"),
}
SWEEP = "name: lr\njob: job.yaml\nspace: {a: {int: [1, 9]}}\ntrials: 2\nmetric: loss\ngoal: min\n"


ALL = [(name, *words) for name, words in ARGUMENTS.items()]
ALL += [("sweep", name, *words) for name, words in OF_SWEEPS.items()]


ALL += [
    ("notify", "test", "ml-team"),
    ("status", "first"),
    ("resume", "first", "{job}"),
    ("submit", "{job}", "--check"),
    ("logs", "first", "-f"),
]


OF_BUCKETS = [argv for argv in ALL if argv not in (("render",), ("plan",))]  # those two read a stack's file


OF_JOBS = [argv for argv in ALL if "first" in argv]


def words(argv: tuple[str, ...], folder: Path) -> list[str]:
    (folder / "sweep.yaml").write_text(SWEEP)
    return [word.format(job=folder / "job.yaml", sweep=folder / "sweep.yaml") for word in argv]


@pytest.fixture
def nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where nothing names a stack."""
    monkeypatch.chdir(folder)
    for name in ("SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_every_command_with_a_stack_is_tested() -> None:
    callbacks = [command.callback for command in app.registered_commands]
    with_stack = {each.__name__ for each in callbacks if each and "stack" in inspect.signature(each).parameters}
    assert with_stack == set(ARGUMENTS) | OF_FILES
    assert {command.callback.__name__ for command in sweep_app.registered_commands if command.callback} == set(
        OF_SWEEPS
    )


@pytest.mark.parametrize("more", ["", "--json"])
@pytest.mark.parametrize("argv", ALL, ids=" ".join)
def test_an_unknown_stack_exits_with_missing(cli: Cli, nowhere: Path, argv: tuple[str, ...], more: str) -> None:
    done = cli(*words(argv, nowhere), *more.split(), "--stack", "nosuch")
    assert (done.code, done.out) == (3, "")
    assert "no stack nosuch" in done.err and "  try: " in done.err


@pytest.mark.parametrize("argv", OF_BUCKETS, ids=" ".join)
def test_no_stack_exits_with_missing(cli: Cli, nowhere: Path, argv: tuple[str, ...]) -> None:
    done = cli(*words(argv, nowhere))
    assert (done.code, done.out) == (3, "")
    assert "spotkeeper local up" in done.err


@pytest.mark.parametrize("argv", OF_BUCKETS, ids=" ".join)
def test_another_stacks_bucket_is_refused(cli: Cli, store: Store, folder: Path, argv: tuple[str, ...]) -> None:
    assert cli("submit", folder / "job.yaml").code == 0
    before = store.list("")
    done = cli(*words(argv, folder), "--stack", "other")
    assert (done.code, done.out) == (3, "")
    assert "belongs to the stack prod, not to other" in done.err
    assert store.list("") == before


@pytest.mark.parametrize("argv", OF_BUCKETS, ids=" ".join)
def test_a_bucket_without_a_stack_exits_with_missing(
    cli: Cli, store: Store, folder: Path, argv: tuple[str, ...]
) -> None:
    store.delete("stack/pools.json")
    done = cli(*words(argv, folder))
    assert (done.code, done.out) == (3, "")
    assert "contains no stack" in done.err


@pytest.mark.parametrize("more", ["", "--json"])
@pytest.mark.parametrize("argv", OF_JOBS, ids=" ".join)
def test_an_unknown_job_exits_with_missing(
    cli: Cli, store: Store, folder: Path, argv: tuple[str, ...], more: str
) -> None:
    done = cli(*words(argv, folder), *more.split())
    assert (done.code, done.out) == (3, "")
    assert "first: no such job" in done.err


@pytest.mark.parametrize("name", sorted(set(OF_SWEEPS) - {"start"}))
def test_an_unknown_search_exits_with_missing(cli: Cli, store: Store, name: str) -> None:
    done = cli("sweep", name, *OF_SWEEPS[name])
    assert (done.code, done.out) == (3, "")
    assert "lr: no such search" in done.err


@pytest.mark.parametrize("argv", ALL, ids=" ".join)
def test_a_wrong_option_exits_with_usage(cli: Cli, store: Store, folder: Path, argv: tuple[str, ...]) -> None:
    assert cli(*words(argv, folder), "--nosuch").code == 2


@pytest.mark.parametrize("argv", [("submit",), ("resume", "first"), ("render",)], ids=" ".join)
def test_a_missing_or_wrong_job_file_exits_with_usage(
    cli: Cli, store: Store, folder: Path, argv: tuple[str, ...]
) -> None:
    assert cli("submit", folder / "job.yaml").code == 0
    for name, text in (("absent.yaml", None), ("wrong.yaml", "name: 3\n"), ("binary.yaml", "\0\1")):
        if text is not None:
            (folder / name).write_text(text)
        done = cli(*argv, folder / name)
        assert (done.code, done.out) == (2, ""), name
        assert done.err.startswith("error: ") and name in done.err


@pytest.mark.parametrize(
    ("words_", "says"),
    [
        (
            "stack/pools.json: Generic GCS error: Error performing GET http://169.254.169.254/computeMetadata/...: 403",
            ("not logged in to GCS", "gcloud auth application-default login"),
        ),
        (
            "k: Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token",
            ("not logged in to S3", "aws"),
        ),
        ("k: Generic GCS error: connection refused", ("k: Generic GCS error: connection refused",)),
    ],
)
def test_a_shell_without_a_login_is_reported(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch, words_: str, says: tuple[str, ...]
) -> None:
    def unreachable(*_: object) -> None:
        raise UnavailableError(words_)

    monkeypatch.setattr(Store, "read_stack", unreachable)
    done = cli("status")
    assert (done.code, done.out) == (1, "")
    assert all(part in done.err for part in says), done.err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["status", "nobody"], 3, "error: nobody: no such job"),
        (["status", "frist"], 3, "error: frist: no such job (did you mean first?)"),
        (["logs", "first", "--node", "9", "--follow"], 3, "error: node 9: first has nodes 0 to 1"),
        (["schema", "jbo"], 2, "error: jbo: must be job, sweep, stack or state (did you mean job?)"),
        (["reconcile"], 2, "error: reconcile needs --once"),
        (["submit", "none.yaml"], 2, "error: none.yaml: no such file"),
        (["status", "--stack", "other"], 3, "error: {bucket} belongs to the stack prod, not to other"),
    ],
)
def test_errors_have_a_message_and_a_code(
    cli: Cli,
    store: Store,
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
    assert cli("logs", "x", "--node", "first").code == 2


@pytest.mark.parametrize(
    "argv", [("check", "x" * 5000), ("local", "status", "--folder", "x" * 5000)], ids=["check", "local"]
)
def test_a_name_that_is_too_long_is_an_error_and_no_traceback(cli: Cli, nowhere: Path, argv: tuple[str, ...]) -> None:
    told = cli(*argv)
    assert told.code == 1 and "...: File name too long\n  try: name another file" in told.err
    assert len(told.err) < 400
