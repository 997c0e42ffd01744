"""Nodes' logs in the bucket: find them, read them as text, and extract why a generation failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract.ledger import Entry
from spotkeeper.contract.record import Record
from spotkeeper.contract.uploads import LOG_BYTES, LogPart, split_log
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.view import last_crash
from spotkeeper_agent.launcher.stacks import TEXT

MOST_NODES = 8  # most nodes whose logs are read for a hang
MOST_LINES = 16
LONGEST = 400  # characters of a line: some exceptions hold a tensor
LAST_LINES = 12  # lines shown of a log without a traceback
TRACEBACK_LINES = 40  # lines shown of a traceback; the middle of a longer one is left out
_BEGINS = re.compile(r"(?: *\+ Exception Group )?Traceback \(most recent call last\):$")
_RANK = re.compile(r"\[rank\d+\]: ?")  # torch's prefix of each line
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_PLACE = re.compile(r"local rank \d+ \(pid \d+\): .*")
_DUMP = "--- "  # begins each dump of stack traces


# -- find


def log_data(store: Store, record: Record, node: int, gen: int | None = None) -> tuple[int, bytes]:
    """Return the generation and the bytes of a node's stored log; without ``gen``, of its newest log.

    Raises:
        CliError: no such log, or no such node.
    """
    check_node(record, node)
    gens = log_gens(store, record, node)
    if not gens:
        what = f"node {node} has no log" + (f" of generation {gen}" if gen is not None else "")
        raise no_log(record, what)
    if gen is not None and gen not in gens:
        remedy = f"generations with a log: {', '.join(map(str, gens))}"
        raise CliError(f"{record.name}: node {node} has no log of generation {gen}", Exit.MISSING, remedy)
    chosen = gens[-1] if gen is None else gen
    return chosen, stored(store, record.job, node, chosen)


def stored(store: Store, job: str, node: int, gen: int) -> bytes:
    """Return a node's stored log of a generation: the tails of its log files, each below a heading.

    Returns b"" if no log is stored.

    At most ``LOG_BYTES`` are read, since a job can store anything there, of any size.
    """
    return store.part(paths.log(job, node, gen), 0, LOG_BYTES) or b""


def no_log(record: Record, what: str, otherwise: str = "") -> CliError:
    """Return the error for a missing log.

    ``what``: the error's message, such as "node 1 has no log". ``otherwise``: the error's remedy if the job has ended.
    While the job is unfinished, the remedy is to wait.
    """
    if not record.over:
        return CliError(f"{record.name}: {what} yet", Exit.MISSING, "a log appears once the node prints something")
    return CliError(f"{record.name}: {what}: nothing was printed", Exit.MISSING, otherwise)


def check_node(record: Record, node: int) -> None:
    last = max(1, len(record.nodes)) - 1
    if not 0 <= node <= last:
        nodes = f"nodes 0 to {last}" if last else "only node 0"
        raise CliError(f"node {node}: {record.name} has {nodes}", Exit.MISSING)


def log_gens(store: Store, record: Record, node: int) -> list[int]:
    prefix = paths.log(record.job, node, 0).rpartition("/")[0] + "/"
    stems = (path[len(prefix) :].removesuffix(".log") for path in store.list(prefix))
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal() and len(stem) < 9)


def heading(store: Store, record: Record, gen: int) -> str:
    """Return the line to print above a generation's log. It says if the job's last failure was in this generation."""
    crash = last_crash((*store.list_ledger(record.job), *record.outbox))
    return f"generation {gen}, which failed:" if crash is not None and crash.gen == gen else f"generation {gen}:"


def whole(data: bytes) -> str:
    """Return a node's log as text: the tail of each file below a heading. ``data``: the result of :func:`stored`."""
    out = ""
    for part in split_log(data):
        head = f"--- {part.title}\n" if part.path else ""
        out += ("\n" if out and not out.endswith("\n") else "") + head + part.text.decode("utf-8", "replace")
    return out


# -- why a generation failed


def cause_of_failure(store: Store, record: Record, crash: Entry, *, hung: bool) -> tuple[str, ...]:
    """Return a line such as ``generation 3 failed, node 1: KeyError: 0``; for a hang, where each worker's code was."""
    gen = crash.gen or record.gen
    if hung:
        lines = tuple(_innermost_calls(store, record, crash.node, gen))[:MOST_LINES]
        return (f"generation {gen} hung; its workers' innermost calls:", *lines) if lines else ()
    data = b"" if crash.node is None else stored(store, record.job, crash.node, gen)
    words = _exception(split_log(data)) if data else ""
    return (f"generation {gen} failed, node {crash.node}: {words}",) if words else ()


def _innermost_calls(store: Store, record: Record, first: int | None, gen: int) -> Iterator[str]:
    """Yield a line for each worker; those of node ``first``, which hung first, come first."""
    nodes = sorted(range(len(record.nodes)), key=lambda node: (node != first, node))
    for node in nodes[:MOST_NODES]:
        for part in split_log(stored(store, record.job, node, gen)):
            if part.path.endswith("/" + TEXT):
                dump = part.text.decode("utf-8", "replace").rpartition("\n" + _DUMP)[2]
                yield from (f"  node {node}, {line[:LONGEST]}" for line in dump.splitlines() if _PLACE.match(line))


def end_of_log(data: bytes) -> tuple[str, ...]:
    """Return the last traceback in a failed node's log, below a line that names its file.

    If the log has no traceback, its last lines are returned. A stored log ends with the errors of the process that
    failed first; torchrun's own lines are before these errors.
    """
    parts = split_log(data)
    lines = parts[-1].text.decode("utf-8", "replace").rstrip().split("\n") if parts else []
    if (begins := _traceback(lines)) is None:
        return tuple(whole(data).rstrip().splitlines()[-LAST_LINES:])
    shown = lines[begins:]
    if (more := len(shown) - TRACEBACK_LINES) > 0:
        head = TRACEBACK_LINES // 4
        shown = [*shown[:head], f"  ... {more} lines left out", *shown[head + more :]]
    return (f"--- {parts[-1].title}", *shown) if parts[-1].title else tuple(shown)


def _traceback(lines: Sequence[str]) -> int | None:
    """Return the index of the line where the last traceback begins. Chained exceptions count as one traceback."""
    bare = [_RANK.sub("", line, count=1).rstrip() for line in lines]
    begins = [number for number, line in enumerate(bare) if _BEGINS.match(line)]
    while len(begins) > 1 and any(line.startswith(_CHAINED) for line in bare[begins[-2] : begins[-1]]):
        del begins[-1]
    return begins[-1] if begins else None


def _exception(parts: tuple[LogPart, ...]) -> str:
    """Return the exception of the process that failed first; if its log has no traceback, the log's last line."""
    lines = parts[-1].text.decode("utf-8", "replace").split("\n") if parts else []
    bare = [_RANK.sub("", line, count=1).rstrip()[:LONGEST] for line in lines]
    last = next((number for number in reversed(range(len(bare))) if _BEGINS.match(bare[number])), None)
    if last is not None and (raised := next((line for line in bare[last + 1 :] if line and not line[0].isspace()), "")):
        return raised
    return next((line.strip() for line in reversed(bare) if line.strip()), "")
