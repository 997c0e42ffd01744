"""Recoveries as traces, received by a real OTLP/HTTP receiver: its own decoder reads what the SDK sends."""

from __future__ import annotations

import gzip
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from spotkeeper.cli.stacks import exporter
from spotkeeper.client.errors import CliError
from spotkeeper.client.target import Target
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.exporter.reading import StackReader, StackReading
from spotkeeper.exporter.spans import PATH, TraceSender, endpoint
from spotkeeper.reconcile.store.store import Store
from tests.cli.records import JOB
from tests.exporter.conftest import ENDED, StillClock
from tests.report.ledgers import SILENT

LIMIT_S = 30.0


class Receiver:
    """An OTLP/HTTP receiver. ``status``: what it answers."""

    def __init__(self) -> None:
        self.requests: queue.Queue[ExportTraceServiceRequest] = queue.Queue()
        self.paths: list[str] = []
        self.status = 200
        self.answers = threading.Event()
        self.answers.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
                outer.paths.append(self.path)
                outer.requests.put(ExportTraceServiceRequest.FromString(body))
                outer.answers.wait(LIMIT_S)
                self.send_response(outer.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def spans(self) -> dict[str, Any]:
        """The spans of the next request by name."""
        request = self.requests.get(timeout=LIMIT_S)
        return {one.name: one for r in request.resource_spans for scope in r.scope_spans for one in scope.spans}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def about(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_recovery_is_a_trace_below_its_job(receiver: Receiver, target: Target, store: Store) -> None:
    sender = TraceSender(receiver.url, "prod")
    sender.offer(StackReader(target).read())
    spans = receiver.spans()
    sender.close()
    recovery, boot, restore = spans["recovery: notice"], spans["boot"], spans["restore"]
    assert set(spans) >= {"notice", "order", "boot", "save", "stop", "mount", "rendezvous", "restore", "first step"}
    assert {one.trace_id for name, one in spans.items() if name != "job ended"} == {recovery.trace_id}
    assert boot.parent_span_id == restore.parent_span_id == recovery.span_id
    assert (boot.start_time_unix_nano, boot.end_time_unix_nano) == (510 * 10**9, 568 * 10**9)
    assert about(boot)["host.name"] == f"sk-prod-{JOB}-n0000-a2"
    assert about(boot)["cloud.availability_zone"] == "us-central1-a"
    assert about(boot)["spotkeeper.price_usd_per_hour"] == 0.5
    assert about(restore)["spotkeeper.checkpoint_bytes"] == 10**9
    assert about(recovery)["spotkeeper.slowest_part"] == "mount"
    assert about(spans["job ended"])["spotkeeper.job_id"] == ENDED and not spans["job ended"].parent_span_id
    assert receiver.paths == [PATH]


def test_a_machine_that_never_joined_is_a_span(
    receiver: Receiver, target: Target, store: Store, clock: StillClock
) -> None:
    clock.at = 4000.0
    for each in SILENT:
        store.append_ledger(JOB, replace(each, at=each.at + 1000.0, gen=each.gen + 2, id=f"{each.id}.later"))
    sender = TraceSender(receiver.url, "prod")
    sender.offer(StackReader(target).read())
    spans = receiver.spans()
    sender.close()
    never = about(spans["never joined"])
    assert (never["spotkeeper.ended_by"], never["host.name"]) == ("no hello in time", f"sk-prod-{JOB}-n0001-a2")
    assert about(spans["recovery: loss"])["spotkeeper.slowest_part"] == "never joined"


def test_a_jobs_root_is_sent_when_it_ends_and_is_the_parent(
    receiver: Receiver, target: Target, store: Store, clock: StillClock
) -> None:
    reader, sender = StackReader(target), TraceSender(receiver.url, "prod")
    sender.offer(reader.read())
    recovery = receiver.spans()["recovery: notice"]
    store.append_ledger(JOB, Entry(at=1100.0, id="end.job", event=Event.END, cause="succeeded"))
    clock.at = 1200.0
    sender.offer(StackReader(target).read())
    later = receiver.spans()
    sender.close()
    assert set(later) == {"job first"}, "what was sent is not sent again"
    assert recovery.parent_span_id == later["job first"].span_id
    assert recovery.trace_id == later["job first"].trace_id
    assert later["job first"].end_time_unix_nano == 1100 * 10**9


def test_ids_stay_the_same_in_another_process(receiver: Receiver, target: Target, store: Store) -> None:
    found = []
    for _ in range(2):
        sender = TraceSender(receiver.url, "prod")
        sender.offer(StackReader(target).read())
        found.append({name: (span.trace_id, span.span_id) for name, span in receiver.spans().items()})
        sender.close()
    assert found[0] == found[1]
    assert len(set(found[0].values())) == len(found[0])
    other = TraceSender(receiver.url, "another")
    other.offer(StackReader(target).read())
    assert not set(found[0].values()) & {(one.trace_id, one.span_id) for one in receiver.spans().values()}
    other.close()


def test_what_a_receiver_refuses_is_sent_again(receiver: Receiver, target: Target, store: Store) -> None:
    reader, sender = StackReader(target), TraceSender(receiver.url, "prod", timeout_s=2.0)
    receiver.status = 400
    sender.offer(reader.read())
    refused = receiver.spans()
    receiver.status = 200
    sender.offer(reader.read())
    assert set(receiver.spans()) == set(refused)
    sender.close()


def test_a_receiver_that_hangs_delays_no_reading(receiver: Receiver, target: Target, store: Store) -> None:
    reading, sender = StackReader(target).read(), TraceSender(receiver.url, "prod", timeout_s=LIMIT_S)
    receiver.answers.clear()
    sender.offer(reading)
    receiver.spans()
    began = time.monotonic()
    for _ in range(3):
        sender.offer(reading)
    assert time.monotonic() - began < 1.0
    receiver.answers.set()
    sender.close()


def test_a_recovery_waits_for_its_first_step(
    receiver: Receiver, target: Target, store: Store, clock: StillClock
) -> None:
    """Or for so long that nothing more will come."""
    for path in store.list(f"jobs/{JOB}/ledger/"):
        if "first" in path:
            store.delete(path)
    sender = TraceSender(receiver.url, "prod")
    sender.offer(StackReader(target).read())
    assert set(receiver.spans()) == {"job ended"}
    clock.at = 592.0 + 601.0
    sender.offer(StackReader(target).read())
    spans = receiver.spans()
    sender.close()
    assert "recovery: notice" in spans and "first step" not in spans
    clock.at = 1000.0
    store.append_ledger(JOB, Entry(at=1000.0, id="end.job", event=Event.END, cause="cancelled"))
    over = TraceSender(receiver.url, "prod")
    over.offer(StackReader(target).read())
    assert "recovery: notice" in receiver.spans(), "a job that has ended does no step"
    over.close()


def test_a_reading_that_cannot_be_sent_ends_no_sender(receiver: Receiver, target: Target, store: Store) -> None:
    sender = TraceSender(receiver.url, "prod")
    for reading in (cast(StackReading, object()), StackReader(target).read()):
        sender._readings.put(reading, timeout=LIMIT_S)
    assert "recovery: notice" in receiver.spans()
    sender.close()


def test_addresses() -> None:
    assert endpoint("http://127.0.0.1:4318") == endpoint("http://127.0.0.1:4318/") == "http://127.0.0.1:4318/v1/traces"
    assert endpoint("https://tempo.example/otlp/v1/traces") == "https://tempo.example/otlp/v1/traces"


def test_a_wrong_address_is_refused(target: Target, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTKEEPER_STACK", "prod")
    monkeypatch.setenv("SPOTKEEPER_BUCKET", target.bucket)
    with pytest.raises(CliError, match="--otlp tcp:4318"):
        exporter.run("127.0.0.1:0", 30.0, "tcp:4318", None, as_json=True)
