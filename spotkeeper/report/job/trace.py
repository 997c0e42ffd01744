"""A recovery as a trace: its parts as spans of time, from the ledger alone. Pure.

=========== ============================================ =====================================================
part        from                                         to
=========== ============================================ =====================================================
NOTICE      the first preemption notice                  the order to stop; the job trains meanwhile
SAVE        the order to stop, if the job could save     estimated from the last measured duration of a save
STOP        the end of SAVE, or the order to stop        the processes on the lowest-numbered node have ended
ORDER       the first request for a machine              the cloud has created one, if need be after refusals
BOOT        the machine's creation                       its agent's hello
NEVER       the machine's creation                       its end, or the function gave it up, before it could train
MOUNT       the hello; not before the end of STOP        the node's disk is mounted on the replacement
RENDEZVOUS  the decision to start a generation           all its ranks have met (imports, process groups)
RESTORE     the ranks have met                           the checkpoint is loaded
FIRST       the checkpoint is loaded                     the first step is reported
=========== ============================================ =====================================================

Machines boot side by side and while the job still trains, so parts overlap. The *slowest* part is the one that covers
most of the time without training. A part whose times the ledger lacks is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from msgspec import Struct

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.names import vm_name
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.recovery import Recovery, recoveries
from spotkeeper.report.money.money import Attempt, attempts, first_of_each


class RecoveryPart(str, Enum):
    """A part of a recovery. The table in the module's docstring tells when each part begins and ends."""

    NOTICE = "notice"
    SAVE = "save"
    STOP = "stop"
    ORDER = "order"
    BOOT = "boot"
    NEVER = "never joined"
    MOUNT = "mount"
    RENDEZVOUS = "rendezvous"
    RESTORE = "restore"
    FIRST = "first step"


_ORDER = tuple(RecoveryPart)


class PartSpan(Struct, frozen=True):
    """One part of a recovery. Times: virtual unix seconds; ``end`` is None while the part lasts."""

    part: RecoveryPart
    start: float
    end: float | None
    node: int | None = None
    machine: str = ""
    zone: str = ""
    model: Model | None = None
    price: float | None = None  # USD per hour
    bytes: int | None = None  # size of the checkpoint
    detail: str = ""  # of NEVER: how the machine ended


class RecoveryTrace(Struct, frozen=True):
    """One recovery. ``idle_s``: time without training, to the first step; ``end`` is None while the job recovers."""

    number: int  # from 1
    gen: int
    cause: str
    nodes: tuple[int, ...]
    began: float
    end: float | None
    idle_s: float
    steps_again: int | None
    spans: tuple[PartSpan, ...]
    slowest: PartSpan | None = None
    slowest_s: float = 0.0  # how much of the time without training the slowest part covers


class JobTrace(Struct, frozen=True):
    """A job with all its recoveries, as ``spotkeeper trace JOB --json`` prints it."""

    job: str
    name: str
    began: float
    ended: float | None
    recoveries: tuple[RecoveryTrace, ...]


def job_trace(
    job: str, name: str, ledger: Iterable[Entry], now: float, stack: str = "", scale: float = 1.0
) -> JobTrace:
    """Return the trace of a job. ``stack``: the stack's name; ``scale``: the clock's speed, real time is 1."""
    entries = first_of_each(ledger)
    story = _Story(job, stack, scale, now, entries)
    found = enumerate(recoveries(entries, now), 1)
    return JobTrace(
        job=job,
        name=name,
        began=min((entry.at for entry in entries), default=now),
        ended=next((entry.at for entry in entries if entry.event is Event.END), None),
        recoveries=tuple(story.recovery(number, one) for number, one in found),
    )


class _Story:
    """The ledger of one job, from which spans are made."""

    def __init__(self, job: str, stack: str, scale: float, now: float, entries: Sequence[Entry]) -> None:
        self._job, self._stack, self._scale, self._now, self._entries = job, stack, scale, now, entries
        self._machines = {(machine.node, machine.attempt): machine for machine in attempts(entries)}

    def recovery(self, number: int, one: Recovery) -> RecoveryTrace:
        again = None if one.seconds is None else one.began + one.seconds  # when the next generation was decided
        first = None if again is None else self._first(one.gen)
        until = self._now if again is None else again
        stop = until - one.stopped_s if one.stopped_s else None
        spans = sorted(self._spans(one, stop, again, first), key=lambda span: (span.start, _ORDER.index(span.part)))
        end = None if again is None else again if first is None else first.at
        idle = (stop, self._now if end is None else end) if stop is not None else None
        slowest, slowest_s = self._slowest(spans, idle)
        return RecoveryTrace(
            number=number,
            gen=one.gen,
            cause=one.cause,
            nodes=one.nodes,
            began=one.began,
            end=end,
            idle_s=0.0 if idle is None else idle[1] - idle[0],
            steps_again=one.steps_again,
            spans=tuple(spans),
            slowest=slowest,
            slowest_s=slowest_s,
        )

    def _first(self, gen: int) -> Entry | None:
        return next((entry for entry in self._entries if entry.event is Event.FIRST and entry.gen == gen), None)

    def _slowest(self, spans: Iterable[PartSpan], idle: tuple[float, float] | None) -> tuple[PartSpan | None, float]:
        if idle is None:
            return None, 0.0
        ends = ((self._now if span.end is None else span.end, span) for span in spans)
        covered = [(min(idle[1], end) - max(idle[0], span.start), span) for end, span in ends]
        seconds, span = max(covered, key=lambda each: each[0], default=(0.0, None))
        return (span, seconds) if seconds > 0 else (None, 0.0)

    def _spans(self, one: Recovery, stop: float | None, again: float | None, first: Entry | None) -> Iterator[PartSpan]:
        until = self._now if again is None else again
        inside = [entry for entry in self._entries if one.began <= entry.at <= until]
        yield from self._notices(inside, stop)
        stopped = next((e.at for e in inside if e.event is Event.STOPPED and stop is not None and e.at >= stop), None)
        if stop is not None:
            size = None if first is None else first.restored_bytes
            yield from self._stop(one, stop, stopped, size)
        for lost in one.never_joined:
            machine = self._machines[lost.node, lost.attempt]
            start, order = self._order(machine, one.began)
            yield from order
            yield self._span(RecoveryPart.NEVER, start, lost.at, machine, lost.why)
        for key in one.machines:
            yield from self._machine(self._machines[key], one.began, stopped if stopped is not None else stop)
        if again is not None and first is not None:
            yield from self._start(again, first)

    def _notices(self, inside: Sequence[Entry], stop: float | None) -> Iterator[PartSpan]:
        noticed = {entry.node: entry for entry in reversed(inside) if entry.event is Event.NOTICE}
        for entry in inside:
            if entry.event is Event.REPRIEVE:
                noticed.pop(entry.node, None)
        for entry in noticed.values():
            machine = next((m for key, m in self._machines.items() if key == (entry.node, entry.attempt)), None)
            if stop is None or entry.at < stop:
                yield self._span(RecoveryPart.NOTICE, entry.at, stop, machine)

    def _stop(self, one: Recovery, stop: float, stopped: float | None, size: int | None) -> Iterator[PartSpan]:
        saved = stop
        if one.announced and one.save_s:
            saved = min(stop + one.save_s, stop + one.stopped_s if stopped is None else stopped)
            yield PartSpan(RecoveryPart.SAVE, stop, saved, bytes=size)
        if stopped is not None:
            yield PartSpan(RecoveryPart.STOP, saved, stopped)

    def _order(self, machine: Attempt, began: float) -> tuple[float, list[PartSpan]]:
        """Return when a machine was created, and the span of its order: from the requests refused just before it."""
        asked = machine.asked
        for attempt in range(machine.attempt - 1, 0, -1):
            other = self._machines.get((machine.node, attempt))
            if other is None or not other.refused or other.asked < began:
                break
            asked = other.asked
        created = max(machine.asked, machine.start)
        return created, [self._span(RecoveryPart.ORDER, asked, created, machine)] if created > asked else []

    def _machine(self, machine: Attempt, began: float, ready: float | None) -> Iterator[PartSpan]:
        """Yield the parts of a replacement. ``ready``: when the old processes no longer use the node's disk."""
        created, order = self._order(machine, began)
        yield from order
        yield self._span(RecoveryPart.BOOT, created, machine.admitted, machine)
        mounted = next((entry.at for entry in self._entries if self._mounts(entry, machine)), None)
        if mounted is not None and machine.admitted is not None:
            yield self._span(RecoveryPart.MOUNT, min(mounted, max(machine.admitted, ready or 0.0)), mounted, machine)

    def _mounts(self, entry: Entry, machine: Attempt) -> bool:
        return entry.event is Event.MOUNTED and (entry.node, entry.attempt) == (machine.node, machine.attempt)

    def _start(self, again: float, first: Entry) -> Iterator[PartSpan]:
        """Yield the parts of a generation's start. Without measured times, all of it counts as FIRST."""
        whole = max(0.0, first.at - again)
        first_s = whole if first.first_s is None else min(whole, first.first_s * self._scale)
        restore_s = min(whole - first_s, (first.restore_s or 0.0) * self._scale)
        loaded = first.at - first_s
        met = loaded - restore_s
        if met > again:
            yield PartSpan(RecoveryPart.RENDEZVOUS, again, met)
        if loaded > met:
            yield PartSpan(RecoveryPart.RESTORE, met, loaded, bytes=first.restored_bytes)
        yield PartSpan(RecoveryPart.FIRST, loaded, max(loaded, first.at))

    def _span(
        self, part: RecoveryPart, start: float, end: float | None, machine: Attempt | None, detail: str = ""
    ) -> PartSpan:
        if machine is None:
            return PartSpan(part, start, end)
        dynamic = self._stack and machine.model is not Model.STATIC
        name = vm_name(self._stack, self._job, machine.node, machine.attempt) if dynamic else ""
        ends = None if end is None else max(start, end)
        about = (machine.node, name, machine.zone, machine.model, machine.price)
        return PartSpan(part, start, ends, *about, detail=detail)
