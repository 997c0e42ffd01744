"""``logs``: prints the complete log of a job, once or while it grows."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from types import FrameType

from spotkeeper.cli.output import emit_line, note, say
from spotkeeper.cli.stack import open_stack
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.log_lines import NodeLines, in_order, shown
from spotkeeper.client.logs import check_node, heading, no_log
from spotkeeper.clock import Clock
from spotkeeper.contract.job import span_s
from spotkeeper.contract.record import Phase, Record
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.hold import resume
from spotkeeper_agent.launcher.spool import size

EVERY_S = 2.0  # real
GREP_S = 2.0  # real; for one line, which is at most 128 KB long


class Pattern:
    """The regular expression of ``--grep``.

    Backtracking can take years, so the command fails if the search of one line takes more than ``GREP_S``.
    """

    def __init__(self, text: str) -> None:
        try:
            self._found = re.compile(text).search
        except re.error as error:
            raise CliError(f"--grep {text}: not a regular expression: {error}", Exit.USAGE) from None
        self._text = text
        signal.signal(signal.SIGALRM, self._too_long)

    def _too_long(self, number: int, frame: FrameType | None) -> None:
        said = f"--grep {self._text}: takes more than {GREP_S:g} s for one line"
        raise CliError(said, Exit.USAGE, "a pattern without nested repetitions such as (a+)+")

    def found(self, line: str) -> bool:
        signal.setitimer(signal.ITIMER_REAL, GREP_S)
        try:
            return self._found(line) is not None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def run(
    job: str,
    stack: str | None,
    *,
    node: int | None = None,
    gen: int | None = None,
    since: str | None = None,
    grep: str | None = None,
    follow: bool = False,
    as_json: bool = False,
) -> None:
    """Print the log of a node, or of all.

    Raises:
        CliError: no such job or node; no log yet, unless ``follow``; a bad ``since`` or ``grep``.
    """
    pattern = Pattern(grep) if grep is not None else None
    target, store = open_stack(stack)
    record = lookup.find_job(store, job)
    if node is not None:
        check_node(record, node)
    nodes = range(max(1, len(record.nodes))) if node is None else [node]
    begins = _ms_before(since, target.clock)
    logs = [NodeLines(store, record.job, each, gen, begins) for each in nodes]
    headed: set[int] = set()  # generations whose heading is printed

    def read() -> None:
        for line in in_order(logs):
            if pattern is not None and not pattern.found(line.text):
                continue
            if as_json:
                emit_line(line)
                continue
            if line.gen not in headed:
                headed.add(line.gen)
                note(heading(store, record, line.gen))
            say(shown(line, target.clock), log=True)

    if follow:
        follow_until(read, lambda: _complete(store, record.job))
        record = lookup.find_job(store, record.job)
    else:
        _check_there(record, logs, node, gen)
        read()
    if not as_json:
        for log in logs:
            if deleted := log.deleted():
                note(f"node {log.node}: the oldest {size(deleted)} of its log are deleted (`logs.keep_mb`)")
        _note_hold(record)


def _ms_before(since: str | None, clock: Clock) -> int:
    """Return the real unix ms of the time ``since`` ago; 0 for None.

    Args:
        since: a span of virtual time, such as ``2h``.

    Raises:
        CliError: ``since`` is not a span.
    """
    if since is None:
        return 0
    try:
        return round((time.time() - clock.real_s(span_s(since))) * 1000)
    except ValueError as error:
        raise CliError(f"--since {since}: {error}", Exit.USAGE) from None


def _check_there(record: Record, logs: list[NodeLines], node: int | None, gen: int | None) -> None:
    gens = sorted({chunk[0] for log in logs for chunk in log.chunks()})
    whose = f"node {node}" if node is not None else "the job"
    if gens and gen is not None and gen not in gens:
        remedy = f"generations with a log: {', '.join(map(str, gens))}"
        raise CliError(f"{record.name}: {whose} has no log of generation {gen}", Exit.MISSING, remedy)
    if not gens:
        several = node is not None and len(record.nodes) > 1
        raise no_log(record, f"{whose} has no log", "all nodes' logs: without --node" if several else "")


def follow_until(
    read: Callable[[], None], over: Callable[[], bool], wait: Callable[[float], None] = time.sleep
) -> None:
    """Call ``read`` again and again until ``over`` is true, and once more after that."""
    while True:
        last = over()
        read()
        if last:
            return
        wait(EVERY_S)


def _complete(store: Store, job: str) -> bool:
    """Whether the log is complete: the job is over, or on hold after a failure and no resume is requested."""
    record = lookup.find_job(store, job)
    waits = record.hold_ends is not None and not lookup.resume_waits(store, record)
    return record.outcome is not None or waits


def _note_hold(record: Record) -> None:
    if record.phase is Phase.HOLD:
        cancel = f"spotkeeper cancel {record.name}"
        note(f"{record.name} is on hold ({record.reason})\n  try: {resume(record)}, or {cancel}")
