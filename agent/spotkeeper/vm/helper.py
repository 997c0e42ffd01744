"""Threads for the agent's slow work (mount, fetch, unmount; a job's output), so that the loop never waits.

Each piece has a name; a name that is at work, or failed a moment ago, is not taken again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from spotkeeper.vm.disk import DiskError
from spotkeeper.vm.events import Event, Failed
from spotkeeper.vm.identity import IdentityError
from spotkeeper.vm.log import Log
from spotkeeper.vm.metadata import MetadataError
from spotkeeper.vm.source import SourceError
from spotkeeper.vm.storage import StorageError

RETRY_S = 1.0  # real, after a failure


class Helper(threading.Thread):
    """``do`` and ``done`` are for the loop's thread."""

    def __init__(self, post: Callable[[Event], None], log: Log, name: str = "helper") -> None:
        super().__init__(name=name, daemon=True)
        self._post = post
        self._log = log
        self._work: queue.SimpleQueue[tuple[str, Callable[[], Event]]] = queue.SimpleQueue()
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}

    def do(self, what: str, work: Callable[[], Event]) -> None:
        """Have ``work`` done; its event, or :class:`Failed`, follows."""
        if what in self._busy or time.monotonic() < self._not_before.get(what, 0.0):
            return
        self._busy.add(what)
        self._work.put((what, work))

    def busy(self, what: str) -> bool:
        return what in self._busy

    def done(self, what: str, error: str | None = None) -> None:
        """The loop has taken the outcome in."""
        self._busy.discard(what)
        if error is None:
            self._log.over(what, f"{what}.well")
        else:
            self._not_before[what] = time.monotonic() + RETRY_S
            self._log.once(what, f"{what}.trouble", error=error)

    def run(self) -> None:
        while True:
            what, work = self._work.get()
            try:
                event = work()
            except (DiskError, SourceError, StorageError, IdentityError, MetadataError, OSError) as error:
                event = Failed(what, str(error), error.why if isinstance(error, DiskError) else None)
            self._post(event)
