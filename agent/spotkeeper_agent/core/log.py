"""The agent's log: one JSON object per line on stdout, with secrets removed.

The log goes to systemd's journal, or in the one-machine cloud to a console file. No other module prints.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable

from spotkeeper.contract.redact import redact

MAX_TEXT = 4000  # characters per field: enough for a traceback


class Log:
    """Writes ``log("event", key=value)``; ``log.once`` writes a kind of trouble only once, until :meth:`over`."""

    def __init__(self, now: Callable[[], float] = time.time, write: Callable[[str], object] | None = None) -> None:
        self._now = now
        self._write = write or _to_stdout
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, event: str, **fields: object) -> None:
        short = {key: value[:MAX_TEXT] if isinstance(value, str) else value for key, value in fields.items()}
        line = json.dumps({"at": round(self._now(), 3), "event": event} | short, default=str)
        with self._lock:
            self._write(redact(line))

    def once(self, kind: str, event: str, **fields: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self(event, **fields)

    def over(self, kind: str, event: str, **fields: object) -> None:
        """Log that trouble of this kind has ended, if the trouble was logged."""
        if kind in self._said:
            self._said.discard(kind)
            self(event, **fields)


def _to_stdout(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
