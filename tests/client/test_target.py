"""Which stack a command means, and the message where none is named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spotkeeper.client import find_target
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli


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


def test_the_suggested_bucket_address_is_accepted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_bucket_without_a_stack_or_with_a_wrong_address_is_an_error(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.delete("stack/pools.json")
    assert cli("status").code == 3
    monkeypatch.setenv("SPOTKEEPER_BUCKET", "http://somewhere")
    done = cli("status")
    assert done.code == 2
    assert "want gs://<bucket>, s3://<bucket> or sqlite:///" in done.err
