"""``logs``: prints the log of one node or of all, once or while it grows."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from spotkeeper.cli.output import emit, emit_line, note, say
from spotkeeper.cli.stack import open_stack
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.logs import News, check_node, heading, log_data, log_gens, no_log
from spotkeeper.client.target import Target
from spotkeeper.contract.names import vm_name
from spotkeeper.contract.record import Phase, Record
from spotkeeper.contract.uploads import LogPart
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.hold import resume

EVERY_S = 1.0  # real
ALL = "all"
_NODE = re.compile(r"node (\d+) \(([^)]+)\)")


class LogText(Struct, frozen=True):
    """A piece of a node's log, as ``--json`` prints it."""

    job: str
    node: int
    gen: int
    text: str


def run(job: str, word: str, gen: int | None, stack: str | None, *, follow: bool, as_json: bool) -> None:
    """Print the log of a node or of all nodes. ``word``: the node's number, or ``all``.

    Raises:
        CliError: no such job or node; or no log yet, unless ``follow``.
    """
    node = wanted(word)
    target, store = open_stack(stack)
    record = lookup.find_job(store, job)
    nodes = _nodes(record, node)
    news = News()
    if follow:
        _follow(store, record, nodes, gen, news, as_json)
        record = lookup.find_job(store, record.job)
    else:
        _once(store, record, nodes, gen, news, as_json, every=node is None)
    if not as_json:
        for title, part in news.gaps.items():
            _note_where(target, record, title, part)
    if follow or not as_json:
        _note_hold(record)


def wanted(word: str) -> int | None:
    """Return the node that ``--node`` names; None for ``all``; CliError for any other word."""
    if word == ALL:
        return None
    if not (word.isascii() and word.isdecimal() and len(word) < 10):
        raise CliError(f"--node {word}: must be the number of a node, or {ALL}", Exit.USAGE)
    return int(word)


def _nodes(record: Record, node: int | None) -> list[int]:
    if node is None:
        return list(range(max(1, len(record.nodes))))
    check_node(record, node)
    return [node]


def _once(
    store: Store, record: Record, nodes: list[int], gen: int | None, news: News, as_json: bool, *, every: bool
) -> None:
    if every:  # print one generation only: a node that left the gang has only older logs
        gens = {node: log_gens(store, record, node) for node in nodes}
        if not any(gens.values()):
            raise no_log(record, "no node has a log")
        newest = max((of[-1] for of in gens.values() if of), default=None) if gen is None else gen
        nodes = [node for node in nodes if newest in gens[node]] or nodes[:1]
        gen = newest
    texts = []
    for node in nodes:
        found, data = log_data(store, record, node, gen)
        texts.append(LogText(record.job, node, found, news.of((node, found), data)))
    if as_json:
        emit(texts if every else texts[0], as_json, "")
    else:
        say("\n".join(one.text.rstrip("\n") for one in texts), log=True)


def _follow(store: Store, record: Record, nodes: list[int], gen: int | None, news: News, as_json: bool) -> None:
    """Print new output until the log is complete; a node may have no log yet."""
    headed: set[int] = set()  # generations whose heading is printed
    ended = True  # whether the last printed line is complete

    def read() -> None:
        nonlocal ended
        for node in nodes:
            if not log_gens(store, record, node):
                continue
            found, data = log_data(store, record, node, gen)
            text = news.of((node, found), data)
            if as_json and text:
                emit_line(LogText(record.job, node, found, text))
            if as_json or not text:
                continue
            if found not in headed:
                headed.add(found)
                note(heading(store, record, found))
            say("\n" + text if text.startswith("--- ") and not ended else text, end="", log=True)
            ended = text.endswith("\n")

    follow(read, lambda: _complete(store, record.job))


def follow(read: Callable[[], None], over: Callable[[], bool], wait: Callable[[float], None] = time.sleep) -> None:
    """Call ``read`` every second until ``over`` is true, and once more after that."""
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


def _note_where(target: Target, record: Record, title: str, part: LogPart) -> None:
    """Print where the rest of a log is, or that it is lost; nothing if its file is on this machine (local cloud)."""
    found = _NODE.match(title)
    if found is None or (target.local is not None and Path(part.path).exists()):
        return
    node, machine = int(found[1]), found[2]
    slot = record.nodes[node].cur if node < len(record.nodes) else None
    gone = slot is None or machine != (slot.machine or vm_name(target.stack, record.job, node, slot.attempt))
    if slot is None or gone or target.local is not None:
        note(f"the rest of the log is lost, since {machine} no longer belongs to the job")
        return
    note(f"the whole log: spotkeeper ssh {shlex.quote(record.name)} --node {node} -- cat {shlex.quote(part.path)}")


def _note_hold(record: Record) -> None:
    if record.phase is Phase.HOLD:
        cancel = f"spotkeeper cancel {record.name}"
        note(f"{record.name} is on hold ({record.reason})\n  try: {resume(record)}, or {cancel}")
