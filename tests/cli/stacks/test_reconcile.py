"""``reconcile --once`` is the function's own tick: paced, ended in time, under leases that are renewed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.reconcile.clouds.rate_limit import Paced
from spotkeeper.reconcile.controller import tick as sweep
from spotkeeper.reconcile.controller.lease import in_thread
from spotkeeper.reconcile.controller.reconcile_job import RoundOptions
from spotkeeper.reconcile.controller.tick import TickResult
from spotkeeper.reconcile.service.runtime import Deadlined
from spotkeeper.reconcile.store.objects import REQUEST_S
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli

NOBODY = "http://127.0.0.1:1/compute/v1"


def test_reconcile_runs_the_functions_tick(
    cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTKEEPER_COMPUTE_ENDPOINT", NOBODY)
    assert cli("submit", folder / "job.yaml").code == 0
    made: list[tuple[Any, RoundOptions]] = []
    real = sweep.tick

    def tick(bucket: Any, cloud: Any, clock: Any, options: RoundOptions) -> TickResult:
        made.append((cloud, options))
        return real(bucket, cloud, clock, options)

    monkeypatch.setattr(sweep, "tick", tick)
    done = cli("reconcile", "--once", "--json")
    assert done.code == 0 and json.loads(done.out)["jobs"] == 1
    ((cloud, options),) = made
    assert isinstance(cloud, Deadlined) and isinstance(cloud._cloud, Paced)
    assert options.every is in_thread, "a lease that nobody renews holds others up for 75 s"
    assert options.deadline.left() <= REQUEST_S


def test_jobs_without_time_are_counted(cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTKEEPER_COMPUTE_ENDPOINT", NOBODY)
    monkeypatch.setattr(sweep, "tick", lambda *_: TickResult(3, late=("abcd2345", "wxyz2345")))
    done = cli("reconcile", "--once")
    assert done.out == "3 unfinished jobs reconciled; there was no time for 2 of them, so run this again\n"


def test_repeated_log_lines_are_printed_once(
    cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTKEEPER_COMPUTE_ENDPOINT", NOBODY)
    for name in ("one", "two", "three"):
        (folder / "job.yaml").write_text(f"name: {name}\ncommand: [train.py]\nsource: code\n")
        assert cli("submit", folder / "job.yaml").code == 0
    store.put("stack/allocation", b"{")
    for _ in range(2):  # the second run tells it anew
        done = cli("reconcile", "--once")
        assert done.code == 0
        assert sum("ALARM: stack/allocation" in line for line in done.err.splitlines()) == 1, done.err
    store.put(f"jobs/{store.active_jobs()[0]}/rec", b"{")
    done = cli("reconcile", "--once")
    assert done.err.count("ALARM: jobs/") == 1 and done.code == 1
    assert "try: fix what the ALARM above names" in done.err


@pytest.mark.parametrize("argv", [("reconcile", "--once"), ("repair", "allocation")])
def test_without_a_login_no_tick_runs(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    """Looks without a token come back empty: the tick would have seemed to be made."""
    monkeypatch.delenv("SPOTKEEPER_COMPUTE_ENDPOINT", raising=False)
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    before = store.list("")
    done = cli(*argv)
    assert (done.code, done.out) == (1, "")
    assert "gcloud" in done.err and "try: gcloud auth login" in done.err
    assert store.list("") == before


def test_on_aws_reconcile_uses_the_users_keys(
    cli: Cli, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = json.loads(store.get("stack/pools.json") or b"")
    store.put("stack/pools.json", json.dumps(stack | {"cloud": "aws", "region": "us-east-1"}).encode())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"AWS_CONFIG_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    done = cli("reconcile", "--once")
    assert done.code == 1 and "try: aws sso login" in done.err
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    monkeypatch.setenv("SPOTKEEPER_COMPUTE_ENDPOINT", "http://127.0.0.1:1")
    done = cli("reconcile", "--once")
    assert done.code == 0 and "0 unfinished jobs" in done.out
