"""``logs``: what machines printed, once or as it grows, of one rank or of all."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from spotkeeper.cli import jobs
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.logtext import News
from spotkeeper.cli.output import emit, emit_line, note
from spotkeeper.cli.target import Target
from spotkeeper.reconcile.store_api import Store
from spotkeeper.report.held import resume
from spotkeeper.spec.joblog import Part
from spotkeeper.spec.names import vm_name
from spotkeeper.spec.record import Phase, Record

EVERY_S = 1.0  # real
ALL = "all"
_NODE = re.compile(r"rank (\d+) \(([^)]+)\)")


class LogText(Struct, frozen=True):
    job: str
    rank: int
    gen: int
    text: str


def logs(
    target: Target, store: Store, record: Record, rank: int | None, gen: int | None, *, follow: bool, as_json: bool
) -> None:
    """Of one rank; None: of all.

    Raises:
        CliError: no such rank; no log of it, or of any, unless it is followed.
    """
    ranks = _ranks(record, rank)
    news = News()
    if follow:
        _follow(store, record, ranks, gen, news, as_json)
        record = jobs.find_job(store, record.job)
    else:
        _once(store, record, ranks, gen, news, as_json, every=rank is None)
    if not as_json:
        for title, part in news.gaps.items():
            _note_where(target, record, title, part)
    if follow or not as_json:
        _note_hold(record)


def wanted(word: str) -> int | None:
    """What ``--rank`` says; None: all of them.

    Raises:
        CliError: it is neither a number nor ``all``.
    """
    if word == ALL:
        return None
    if not (word.isascii() and word.isdecimal() and len(word) < 10):
        raise CliError(f"--rank {word}: want a rank's number, or {ALL}", Exit.USAGE)
    return int(word)


def _ranks(record: Record, rank: int | None) -> list[int]:
    if rank is None:
        return list(range(max(1, len(record.ranks))))
    jobs.check_rank(record, rank)
    return [rank]


def _once(
    store: Store, record: Record, ranks: list[int], gen: int | None, news: News, as_json: bool, *, every: bool
) -> None:
    if every:  # of one generation: a rank that is no member any more has an older log
        gens = {rank: jobs.log_gens(store, record, rank) for rank in ranks}
        if not any(gens.values()):
            raise jobs.no_log(record, "no rank has a log")
        newest = max((of[-1] for of in gens.values() if of), default=None) if gen is None else gen
        ranks = [rank for rank in ranks if newest in gens[rank]] or ranks[:1]
        gen = newest
    texts = []
    for rank in ranks:
        found, data = jobs.log_data(store, record, rank, gen)
        texts.append(LogText(record.job, rank, found, news.of((rank, found), data)))
    emit(texts if every else texts[0], as_json, "\n".join(one.text.rstrip("\n") for one in texts))


def _follow(store: Store, record: Record, ranks: list[int], gen: int | None, news: News, as_json: bool) -> None:
    """A rank may have no log yet, but must be one that can have."""
    told: set[int] = set()
    ended = True  # the line printed last

    def look() -> None:
        nonlocal ended
        for rank in ranks:
            if not jobs.log_gens(store, record, rank):
                continue
            found, data = jobs.log_data(store, record, rank, gen)
            text = news.of((rank, found), data)
            if as_json and text:
                emit_line(LogText(record.job, rank, found, text))
            if as_json or not text:
                continue
            if found not in told:
                told.add(found)
                note(jobs.whose_log(store, record, found))
            print("\n" + text if text.startswith("--- ") and not ended else text, end="", flush=True)
            ended = text.endswith("\n")

    follow(look, lambda: _stands(store, record.job))


def follow(look: Callable[[], None], over: Callable[[], bool], wait: Callable[[float], None] = time.sleep) -> None:
    """Look again and again, a last time after the job's end."""
    while True:
        last = over()
        look()
        if last:
            return
        wait(EVERY_S)


def _stands(store: Store, job: str) -> bool:
    """Whether its log grows no more: it is over, or holds because it failed and nobody has resumed it."""
    record = jobs.find_job(store, job)
    waits = record.hold_ends is not None and not jobs.resume_waits(store, record)
    return record.outcome is not None or waits


def _note_where(target: Target, record: Record, title: str, part: Part) -> None:
    """How to read a file of which only the end is stored. On the one-machine cloud its path is one of this machine."""
    found = _NODE.match(title)
    if found is None or (target.local is not None and Path(part.path).exists()):
        return
    rank, node = int(found[1]), found[2]
    slot = record.ranks[rank].cur if rank < len(record.ranks) else None
    gone = slot is None or node != (slot.node or vm_name(target.stack, record.job, rank, slot.attempt))
    if slot is None or gone or target.local is not None:
        note(f"{node} is no machine of the job any more: what was left out went with it")
        return
    command = f"gcloud compute ssh {node} --zone {slot.zone} --tunnel-through-iap --command "
    note(f"all of it: {command}{shlex.quote('sudo cat ' + shlex.quote(part.path))}")


def _note_hold(record: Record) -> None:
    if record.phase is Phase.HOLD:
        cancel = f"spotkeeper cancel {record.name}"
        note(f"{record.name} holds ({record.reason})\n  try: {resume(record)}, or {cancel}")
