"""A stack in a SQLite bucket, a job's folder, and a way to run commands in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from spotkeeper.cli.main import run
from spotkeeper.reconcile.store.store import Store, open_store
from tests.contract.samples import STACK


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    url = f"sqlite://{tmp_path}/bucket.sqlite"
    monkeypatch.setenv("SPOTKEEPER_STACK", "prod")
    monkeypatch.setenv("SPOTKEEPER_BUCKET", url)
    monkeypatch.setenv("SPOTKEEPER_CLOCK", "0:0:1")
    monkeypatch.delenv("SPOTKEEPER_TOKEN", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")  # no gcloud: nothing here may leave the machine
    bucket = open_store(url)
    bucket.put("stack/pools.json", msgspec.json.encode(STACK))
    return bucket


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    (work / "code").mkdir(parents=True)
    (work / "code" / "train.py").write_text("print(1)\n")
    (work / "job.yaml").write_text("name: first\ncommand: [train.py]\nsource: code\nnodes: 2\n")
    return work


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*argv: object) -> Done:
        code = run([str(word) for word in argv])
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return call
