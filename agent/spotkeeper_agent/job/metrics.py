"""Uploads a generation's metrics to ``jobs/<job>/logs/metrics/<gen>``: once a minute, and when the generation ends.

Only the agent of the generation's lowest member uploads, because the metrics are those of rank 0, which runs there. The
library numbers each ``metrics.json`` that it writes (``spotkeeper/train/loop/metrics.py``). Once a file is in the
bucket, the agent writes the file's number into the control file, so that later checkpoints leave its points out.

Only the loop's thread may call ``Metrics``; a helper thread reads and sends the file.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.clock import Clock
from spotkeeper.contract import metrics
from spotkeeper.train.agent_link.control import METRICS
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.storage import Bucket, FilePart
from spotkeeper_agent.core.events import HelperThread, MetricsThere
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job.supervisor import Child

EVERY_S = 60.0  # virtual; shortest time between two uploads of a generation, except for the last one
FLOOR_S = 1.0  # real; lower limit of ``EVERY_S``
WORK = "metrics"


@dataclass(frozen=True)
class _Last:
    """The last upload of a generation that has ended."""

    job: str
    gen: int
    folder: Path


class Metrics:
    """One machine's uploads of metrics, one at a time."""

    def __init__(self, bucket: Bucket, helper: HelperThread, clock: Clock, log: Log) -> None:
        self._bucket, self._helper, self._clock, self._log = bucket, helper, clock, log
        self._due: tuple[int, float] = (-1, 0.0)  # generation, steady time of its next upload
        self._last: _Last | None = None
        self._idle = threading.Event()
        self._idle.set()

    def advance(self, child: Child | None) -> None:
        """Start the next upload if it is due. ``child``: the generation if this machine uploads its metrics."""
        if self._helper.busy(WORK):
            return
        if self._last is not None:
            self._send(self._last.job, self._last.gen, self._last.folder, 0)
            return
        if child is None:
            return
        now, control = self._clock.steady(), child.control
        if self._due[0] != child.gen:
            self._due = child.gen, now + self._every_s
        written = control.metrics_file
        if written != control.metrics_stored and now >= self._due[1]:
            self._due = child.gen, now + self._every_s
            self._send(child.folder.parent.name, child.gen, child.folder, written)

    def ended(self, child: Child) -> None:
        """Upload the last file of a generation that has ended."""
        self._idle.clear()
        self._last = _Last(child.folder.parent.name, child.gen, child.folder)

    def stored(self, event: MetricsThere, child: Child | None) -> None:
        """Handle the end of an upload."""
        if not event.number:
            if self._last is not None and event.gen == self._last.gen:
                self._last = None
        elif child is not None and child.gen == event.gen:
            child.control.metrics_stored = event.number

    def flush(self, timeout_s: float) -> None:
        """Wait until the last upload has ended, at most ``timeout_s`` real seconds."""
        self._idle.wait(timeout_s)

    def forget_job(self) -> None:
        self._last = None
        self._idle.set()

    @property
    def _every_s(self) -> float:
        return max(EVERY_S, FLOOR_S / self._clock.real_s(1.0))

    def _send(self, job: str, gen: int, folder: Path, number: int) -> None:
        def send() -> MetricsThere:
            self._read_and_send(metrics.object_name(job, gen), folder)
            if not number:
                self._idle.set()  # here too: after the loop has ended, no event is handled
            return MetricsThere(gen, number)

        self._helper.do(WORK, send)

    def _read_and_send(self, name: str, folder: Path) -> None:
        """Send the file as it is now. The job may delete or replace it at any time."""
        try:
            fd = beneath.open_file(folder, METRICS)
        except OSError:  # the script reports no metrics, or has deleted them
            return
        with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
            size = os.fstat(fd).st_size
            if not 0 < size <= metrics.BYTES:
                self._log.once("metrics.size", "metrics.size", bytes=size)
                return
            self._bucket.send(name, FilePart(file, 0, size, lambda _: None))
