"""The agent uploads metrics once a minute and at a generation's end, whatever a job puts in their place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract import metrics
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import JobRun
from spotkeeper.train.agent_link.control import METRICS, NAME, Control
from spotkeeper_agent.cloud.gce import Gce
from spotkeeper_agent.core.events import Event, Failed, HelperThread, MetricsThere, WorkEnded
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job.metrics import EVERY_S, Metrics
from spotkeeper_agent.job.supervisor import Child
from tests.agent.fakes import JOB, Fake, Machine, document, source

OBJECT = f"jobs/{JOB}/logs/metrics/4"
REPORTS = '''
"""Writes a file of metrics, as the library does."""
import os, pathlib
from spotkeeper.train.agent_link.control import Control
run = pathlib.Path(os.environ["SPOTKEEPER_RUN"])
(run / "metrics.json").write_text("the last file of " + os.environ["SPOTKEEPER_GEN"])
Control.open(run / "ctl").metrics_file = 1
'''


class Now(Clock):
    """A clock that stands still until a test sets it."""

    at = 0.0

    def steady(self) -> float:
        return Now.at


class Uploads:
    """``Metrics`` with a helper thread whose work ends when a test asks for it."""

    def __init__(self, fake: Fake, root: Path) -> None:
        self.folder = root / JOB / "4"
        self.folder.mkdir(parents=True)
        self.child = Child(4, self.folder, 1, 10.0, Control.create(self.folder / NAME))
        self.lines: list[str] = []
        self._events: list[Event] = []
        self._log = Log(write=self.lines.append)
        self._helper = HelperThread(self._events.append, self._log)
        self._helper.start()
        fake.instance("7", "m")
        bucket = Gce(Clock(), fake.listen("7")).storage(fake.url, "bucket")
        self.metrics = Metrics(bucket, self._helper, Now(), self._log)

    def write(self, text: str, number: int) -> None:
        (self.folder / METRICS).write_text(text)
        self.child.control.metrics_file = number

    def advance(self, at: float = 0.0, child: bool = True) -> Event | None:
        """What the loop does; the event with which an upload has ended, if one began."""
        Now.at = at
        self.metrics.advance(self.child if child else None)
        if not self._helper.busy("metrics"):
            return None
        until = time.monotonic() + 30.0
        while not self._events:
            assert time.monotonic() < until
            time.sleep(0.002)
        ended = self._events.pop()
        assert isinstance(ended, WorkEnded)
        self._helper.done(ended.what, ended.event)
        self._helper._not_before.clear()
        if isinstance(ended.event, MetricsThere):
            self.metrics.stored(ended.event, self.child if child else None)
        return ended.event


@pytest.fixture
def uploads(fake: Fake, tmp_path: Path) -> Uploads:
    return Uploads(fake, tmp_path)


def test_files_are_uploaded_once_a_minute_and_answered(fake: Fake, uploads: Uploads) -> None:
    control = uploads.child.control
    uploads.write("one", 1)
    assert uploads.advance(0.0) is None, "the previous generation may have written just now"
    assert uploads.advance(EVERY_S - 1) is None
    assert uploads.advance(EVERY_S) == MetricsThere(4, 1)
    assert (fake.objects[OBJECT], control.metrics_stored) == (b"one", 1)
    assert uploads.advance(5 * EVERY_S) is None, "nothing new"
    uploads.write("two", 7)
    assert uploads.advance(5 * EVERY_S) == MetricsThere(4, 7)
    uploads.write("three", 8)
    assert uploads.advance(6 * EVERY_S - 1) is None
    assert (fake.objects[OBJECT], control.metrics_stored, len(fake.sent)) == (b"two", 7, 2)


def test_a_refused_file_is_not_answered(fake: Fake, uploads: Uploads) -> None:
    uploads.write("one", 1)
    uploads.advance(0.0)
    fake.storage_status = lambda name: 503
    assert isinstance(uploads.advance(EVERY_S), Failed) and uploads.child.control.metrics_stored == 0
    fake.storage_status = lambda name: 200
    assert uploads.advance(2 * EVERY_S) == MetricsThere(4, 1) and fake.objects[OBJECT] == b"one"


def test_the_last_file_is_uploaded_until_it_is_there(fake: Fake, uploads: Uploads) -> None:
    uploads.write("one", 1)
    uploads.metrics.ended(uploads.child)
    fake.storage_status = lambda name: 503
    assert isinstance(uploads.advance(child=False), Failed)
    fake.storage_status = lambda name: 200
    assert uploads.advance(child=False) == MetricsThere(4, 0) and fake.objects[OBJECT] == b"one"
    uploads.metrics.flush(0.0)
    assert uploads.advance(child=False) is None


def test_a_script_without_metrics_uploads_nothing(fake: Fake, uploads: Uploads) -> None:
    uploads.metrics.ended(uploads.child)
    assert uploads.advance(child=False) == MetricsThere(4, 0)
    assert uploads.advance(child=False) is None and not fake.sent


def links(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def pipes(path: Path) -> None:
    os.mkfifo(path)


def fills(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(metrics.BYTES + 1)


@pytest.mark.parametrize("does", [links, pipes, fills, Path.mkdir, Path.touch])
def test_nothing_else_is_uploaded_in_place_of_metrics(
    fake: Fake, uploads: Uploads, does: Callable[[Path], Any]
) -> None:
    does(uploads.folder / METRICS)
    uploads.metrics.ended(uploads.child)
    assert uploads.advance(child=False) == MetricsThere(4, 0)
    assert not fake.sent and OBJECT not in fake.objects


def test_the_metrics_of_a_jobs_last_seconds_reach_the_bucket(fake: Fake, machine: Callable[..., Machine]) -> None:
    vm = machine()
    sha256 = source(fake, {"train.py": REPORTS})
    run = JobRun(name="job", command=("train.py",), source_sha256=sha256, python=vm.light_python())
    vm.attach_disk()
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    vm.serve(document(1, 1, (vm.member(disk=True),)), run, disk=0)
    fake.wait_fact(vm.uid, Kind.EXIT, 1)
    assert fake.wait(lambda: fake.objects.get(metrics.object_name(JOB, 1))) == b"the last file of 1"
