"""When an agent reports how busy its machine is, and what a failure does: nothing."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from spotkeeper.contract.usage import BYTES, DeviceUsage, object_name, read_usage
from spotkeeper_agent.cloud.storage import StorageError
from spotkeeper_agent.host import usage
from spotkeeper_agent.job.usage import UsageReports

DEVICES = (DeviceUsage(0, 0.9, temperature_c=61.0),)


class Machine:
    """The part of the agent's state that a report uses."""

    def __init__(self) -> None:
        self.steady, self.member = 0.0, True
        self.clock = SimpleNamespace(steady=lambda: self.steady, now=lambda: 77.0, real_s=lambda s: s)
        self.saved = SimpleNamespace(assignment=SimpleNamespace(job="abcd2345", node=3, attempt=2))
        self.doc = object()
        self.settings = SimpleNamespace(mount=Path("/mnt"))
        self.said: list[str] = []
        self.log = SimpleNamespace(
            once=lambda kind, event, **_: self.said.append(event), over=lambda kind, event: self.said.append(event)
        )

    def member_of(self, doc: object) -> object:
        return self.member or None


class Bucket:
    def __init__(self) -> None:
        self.written: list[tuple[str, bytes]] = []
        self.fails = False

    def write(self, name: str, data: bytes) -> None:
        if self.fails:
            raise StorageError("away")
        self.written.append((name, data))


def advance(reports: UsageReports) -> None:
    reports.advance()
    if reports._thread is not None:
        reports._thread.join(30.0)


def test_a_member_reports_once_a_minute() -> None:
    machine, bucket = Machine(), Bucket()
    reports = UsageReports(bucket, machine, lambda: msgspec.json.encode(DEVICES))
    for machine.steady in (0.0, 59.0, 60.0):
        advance(reports)
    assert [name for name, _ in bucket.written] == [object_name("abcd2345", 3)] * 2
    first, second = (read_usage(data) for _, data in bucket.written)
    assert first is not None and second is not None
    assert (first.at, first.attempt, first.host.devices) == (77.0, 2, DEVICES)
    assert first.host.cpus > 0 and (first.host.memory_bytes or 0) > (first.host.memory_used_bytes or 0) > 0


def test_cpu_use_is_measured_from_report_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([(100, 200), (150, 300), (240, 400)])  # idle, all
    monkeypatch.setattr(usage, "cpu_ticks", lambda *_: next(ticks))
    machine, bucket = Machine(), Bucket()
    reports = UsageReports(bucket, machine, lambda: b"[]")
    for machine.steady in (0.0, 60.0):
        advance(reports)
    assert [told.host.cpu for _, data in bucket.written if (told := read_usage(data))] == [0.5, pytest.approx(0.1)]


def test_only_a_member_reports() -> None:
    machine, bucket = Machine(), Bucket()
    reports = UsageReports(bucket, machine, lambda: msgspec.json.encode(DEVICES))
    machine.member = False
    advance(reports)
    machine.member, machine.doc = True, None
    advance(reports)
    assert bucket.written == []
    machine.doc = object()
    advance(reports)
    assert len(bucket.written) == 1, "at once, and not a minute later"


def test_a_reader_that_hangs_delays_nothing_and_is_not_started_twice() -> None:
    machine, bucket, ends, begun = Machine(), Bucket(), threading.Event(), []

    def hangs() -> bytes:
        begun.append(1)
        ends.wait(30.0)
        return msgspec.json.encode(DEVICES)

    reports = UsageReports(bucket, machine, hangs)
    for machine.steady in (0.0, 60.0, 120.0):
        reports.advance()
    assert len(begun) <= 1
    ends.set()
    assert reports._thread is not None
    reports._thread.join(30.0)
    assert len(bucket.written) == 1


@pytest.mark.parametrize(
    "printed", [b"", b"{}", b'[{"index":"0"}]', b'[{"index":0,"more":1}]', b'[{"index":0,"busy":7}]']
)
def test_odd_output_is_not_sent(printed: bytes) -> None:
    machine, bucket = Machine(), Bucket()
    advance(UsageReports(bucket, machine, lambda: printed))
    assert (bucket.written, machine.said) == ([], ["usage.trouble"])


def test_failures_are_left_out() -> None:
    machine, bucket = Machine(), Bucket()

    def fails() -> bytes:
        raise subprocess.TimeoutExpired("python", 20.0)

    advance(UsageReports(bucket, machine, fails))
    bucket.fails = True
    advance(UsageReports(bucket, machine, lambda: msgspec.json.encode(DEVICES)))
    assert machine.said == ["usage.trouble", "usage.trouble"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 20,
        b" " * (BYTES + 1),
        b'{"at":1.0,"attempt":1,"host":{"cpus":1,"devices":'
        + str([{"index": 0}] * 65).replace("'", '"').encode()
        + b"}}",
        b'{"at":1.0,"attempt":1,"host":{"cpus":1,"devices":[{"index":0},{"index":0}]}}',  # twice one series
        b'{"at":1.0,"attempt":1,"host":{"cpus":1,"memory_bytes":-1}}',
        b'{"at":NaN,"attempt":1,"host":{"cpus":1}}',
    ],
)
def test_a_reader_refuses_what_a_machine_may_have_made_up(data: bytes) -> None:
    assert read_usage(data) is None
