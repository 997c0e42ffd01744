"""The dashboard's command as a process of its own."""

from __future__ import annotations

import contextlib
import html
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Served:
    """A running dashboard; ``pid``: its process."""

    url: str
    port: int
    file: Path
    pid: int

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def next_url(self) -> str:
        """The one-time address that the file has now."""
        return html.unescape(self.file.read_text().partition("url=")[2].partition('"')[0])


@contextlib.contextmanager
def serving(
    environment: dict[str, str], home: Path, *options: str, ended_by: signal.Signals = signal.SIGINT, first: str = ""
) -> Iterator[Served]:
    """Run ``spotkeeper dashboard`` with these variables until the block ends. ``first``: Python to run before it."""
    start = ["-c", f"{first}; from spotkeeper.cli.main import main; main()"] if first else ["-m", "spotkeeper.cli.main"]
    command = [sys.executable, *start, "dashboard", "--no-browser", "--json", *options]
    given = {**os.environ, "XDG_STATE_HOME": str(home), **environment}
    with (home / "dashboard.log").open("w") as log:
        process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (home / "dashboard.log").read_text()
            told = json.loads(line)
            yield Served(told["url"], told["port"], Path(told["file"]), process.pid)
        finally:
            process.send_signal(ended_by)
            process.wait(30)
