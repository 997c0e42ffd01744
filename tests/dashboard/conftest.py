"""A stack with jobs in a bucket, and the dashboard's command on it as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from spotkeeper.reconcile.store.store import Store, open_store
from tests.contract.samples import STACK


@dataclass(frozen=True)
class Served:
    """A running dashboard."""

    url: str
    port: int
    file: Path

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def serving(environment: dict[str, str], home: Path, *options: str) -> Iterator[Served]:
    """Run ``spotkeeper dashboard`` with these variables until the block ends."""
    command = [sys.executable, "-m", "spotkeeper.cli.main", "dashboard", "--no-browser", "--json", *options]
    given = {**os.environ, "XDG_STATE_HOME": str(home), **environment}
    with (home / "dashboard.log").open("w") as log:
        process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (home / "dashboard.log").read_text()
            told = json.loads(line)
            yield Served(told["url"], told["port"], Path(told["file"]))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@pytest.fixture
def bucket(tmp_path: Path) -> tuple[Store, dict[str, str]]:
    """A bucket with a stack, and the variables of a shell that names it."""
    url = f"sqlite://{tmp_path}/bucket.sqlite"
    store = open_store(url)
    store.put("stack/pools.json", msgspec.json.encode(STACK))
    return store, {"SPOTKEEPER_STACK": STACK.stack, "SPOTKEEPER_BUCKET": url, "SPOTKEEPER_CLOCK": "0:0:1"}


Serve = Callable[..., contextlib.AbstractContextManager[Served]]
