"""Sends ended recoveries to an OpenTelemetry backend: one trace per job, with a root span for the job.

Span ids are hashes of what a span describes, so a recovery that is sent again, for example after a restart of the
exporter, has the same ids. A job's root span is sent once the job has ended, because a span needs an end. A separate
thread sends, so a backend that hangs does not delay metrics. Spans that the backend does not accept are sent again with
the next reading.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from spotkeeper.exporter.reading import JobReading, StackReading
from spotkeeper.report.job.trace import JobTrace, PartSpan, RecoveryPart, RecoveryTrace, job_trace
from spotkeeper.version import __version__

TIMEOUT_S = 5.0  # real; for one request with its retries
SETTLED_S = 600.0  # virtual; a recovery whose first step is not reported by then is sent without it
BATCH = 500  # spans in a request
PATH = "/v1/traces"

Attributes = Mapping[str, str | int | float | Sequence[int]]
Sent = tuple[str, int]  # job and recovery; 0: the job itself

log = logging.getLogger("spotkeeper.exporter")


class TraceMaker:
    """Makes spans of one stack. Pure."""

    def __init__(self, stack: str) -> None:
        self._stack = stack
        self._resource = Resource({"service.name": "spotkeeper", "spotkeeper.stack": stack})
        self._scope = InstrumentationScope("spotkeeper", __version__)

    def spans(self, one: JobReading, now: float, scale: float) -> Iterator[tuple[Sent, list[ReadableSpan]]]:
        """Yield the spans of each ended recovery of a job and, once the job has ended, its root span."""
        job = one.record.job
        trace = job_trace(job, one.record.name, one.ledger, now, self._stack, scale)
        for recovery in trace.recoveries:
            if recovery.end is not None and _settled(recovery, trace, now):
                yield (job, recovery.number), list(self._recovery(trace, recovery))
        if trace.ended is not None:
            about: Attributes = {
                "spotkeeper.outcome": one.record.outcome.value if one.record.outcome else "",
                "spotkeeper.user": one.view.user,
                "spotkeeper.spent_usd": one.view.money.spent,
                "spotkeeper.preemptions": one.view.preemptions.total,
            }
            yield (job, 0), [self._span(trace, f"job {trace.name}", (), trace.began, trace.ended, about)]

    def _recovery(self, trace: JobTrace, one: RecoveryTrace) -> Iterator[ReadableSpan]:
        assert one.end is not None
        key = (str(one.number),)
        about: Attributes = {
            "spotkeeper.cause": one.cause,
            "spotkeeper.generation": one.gen,
            "spotkeeper.nodes": list(one.nodes),
            "spotkeeper.seconds_without_training": one.idle_s,
            **({} if one.steps_again is None else {"spotkeeper.repeated_steps": one.steps_again}),
            **({} if one.slowest is None else {"spotkeeper.slowest_part": one.slowest.part.value}),
        }
        ends = [one.end, *(span.end for span in one.spans if span.end is not None)]
        yield self._span(trace, f"recovery: {one.cause}", key, one.began, max(ends), about)
        for number, span in enumerate(one.spans):
            part = (*key, span.part.value, span.machine or str(number))
            yield self._span(trace, span.part.value, part, span.start, span.end or one.end, _about(span))

    def _span(
        self,
        trace: JobTrace,
        name: str,
        key: tuple[str, ...],
        start: float,
        end: float,
        about: Attributes,
    ) -> ReadableSpan:
        """Return a span.

        ``key``: () for the job, (recovery,) for a recovery, and (recovery, part, machine) for a part of a recovery. A
        part without a machine has its position among the recovery's parts in place of the machine's name.
        """
        named = {"spotkeeper.job_id": trace.job, "spotkeeper.job_name": trace.name}
        return ReadableSpan(
            name=name,
            context=self._context(trace.job, key),
            parent=self._context(trace.job, key[:1] if len(key) > 1 else ()) if key else None,
            resource=self._resource,
            instrumentation_scope=self._scope,
            attributes={**named, **about},
            start_time=round(start * 1e9),
            end_time=round(max(start, end) * 1e9),
        )

    def _context(self, job: str, key: tuple[str, ...]) -> SpanContext:
        trace_id = int.from_bytes(_hash(self._stack, job)[:16], "big") or 1
        span_id = int.from_bytes(_hash(self._stack, job, *key, "span")[:8], "big") or 1
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _hash(*words: str) -> bytes:
    return hashlib.sha256("/".join(words).encode()).digest()


def _settled(one: RecoveryTrace, trace: JobTrace, now: float) -> bool:
    """Whether an ended recovery can be sent: the first step after it is reported, or no longer expected."""
    first = any(span.part is RecoveryPart.FIRST for span in one.spans)
    followed = one.number < len(trace.recoveries) or trace.ended is not None
    return first or followed or now - (one.end or now) > SETTLED_S


def _about(span: PartSpan) -> Attributes:
    found = {
        "spotkeeper.node": span.node,
        "host.name": span.machine or None,
        "cloud.availability_zone": span.zone or None,
        "spotkeeper.model": span.model.value if span.model else None,
        "spotkeeper.price_usd_per_hour": span.price,
        "spotkeeper.checkpoint_bytes": span.bytes,
        "spotkeeper.ended_by": span.detail or None,
    }
    return {name: value for name, value in found.items() if value is not None}


class TraceSender:
    """Sends, in a separate thread, those spans of each reading that it has not sent before."""

    def __init__(self, url: str, stack: str, scale: float = 1.0, timeout_s: float = TIMEOUT_S) -> None:
        self._maker, self._scale = TraceMaker(stack), scale
        self._exporter = OTLPSpanExporter(endpoint=endpoint(url), timeout=timeout_s)
        self._sent: set[Sent] = set()
        self._readings: queue.Queue[StackReading | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def offer(self, reading: StackReading) -> None:
        """Queue a reading for sending. Skip it if another is queued: a later reading contains the same recoveries."""
        try:
            self._readings.put_nowait(reading)
        except queue.Full:
            log.info("traces are sent more slowly than the bucket is read")

    def close(self) -> None:
        """Send what was last read from the bucket and is not sent yet, for at most a few seconds."""
        try:
            self._readings.put(None, timeout=TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while (reading := self._readings.get()) is not None:
            try:
                self._send(reading)
            except Exception:  # a fault in one reading must not end the thread
                log.exception("traces could not be sent")

    def _send(self, reading: StackReading) -> None:
        self._sent = {key for key in self._sent if key[0] in {one.record.job for one in reading.jobs}}
        new = (
            (key, spans)
            for one in reading.jobs
            for key, spans in self._maker.spans(one, reading.now, self._scale)
            if key not in self._sent
        )
        for batch in _batches(new):
            if self._exporter.export([span for _, spans in batch for span in spans]) is not SpanExportResult.SUCCESS:
                log.warning("%d traces were not accepted; they are sent again with the next reading", len(batch))
                return
            self._sent |= {key for key, _ in batch}


def _batches(found: Iterable[tuple[Sent, list[ReadableSpan]]]) -> Iterator[list[tuple[Sent, list[ReadableSpan]]]]:
    """Yield recoveries in lists of about ``BATCH`` spans; a recovery of a large gang has hundreds."""
    every = iter(found)
    while batch := list(islice(every, 1)):
        size = len(batch[0][1])
        for one in every:
            batch.append(one)
            size += len(one[1])
            if size >= BATCH:
                break
        yield batch


def endpoint(url: str) -> str:
    """Return the address for traces. Raises ValueError if ``url`` is not an http(s) address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url}: want http(s)://HOST:PORT, for example http://127.0.0.1:4318")
    return urlunsplit(parts._replace(path=PATH)) if parts.path in ("", "/") else url
