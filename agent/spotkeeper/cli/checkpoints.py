"""``checkpoints``: which checkpoints of a job there are, and where; and one of the bucket's copies onto this machine.

What is on disks only machines know: their last word is shown. What is in the bucket is looked up there. Names come from
machines, so none is believed to stay in its folder. Writes nothing to the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.fetching import Advance, Content, OtherBytesError, bar, have, shown
from spotkeeper.reconcile import paths
from spotkeeper.reconcile.decide.seen import Commit, parse_commit
from spotkeeper.reconcile.store_api import CorruptError, Store
from spotkeeper.spec import codec
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.mirror import MirrorList, list_name, part_names, part_size
from spotkeeper.spec.record import Phase, Record

PROOF = "COMMIT"  # the file by which the library knows that a checkpoint is complete
BUCKET = "the bucket"


class CheckpointView(Struct, frozen=True, omit_defaults=True):
    """One checkpoint in one place. ``size``: bytes; ``age_s``: real seconds since it was saved; None: not known."""

    commit: str
    where: str
    complete: bool = True
    size: int | None = None
    age_s: float | None = None
    note: str = ""


class Fetched(Struct, frozen=True):
    """``folder``: the checkpoint folder, for ``attach(checkpoint_dir=...)``; of sharded state it has one a rank."""

    job: str
    name: str
    commit: str
    folder: str
    files: tuple[str, ...]


def known(store: Store, record: Record, now: float) -> tuple[CheckpointView, ...]:
    """All that is known of, newest first; a place that is nearer to a machine before the bucket.

    Args:
        now: real unix seconds.
    """
    rows = [*_on_disks(store, record), *_in_bucket(store, record, now)]
    return tuple(sorted(rows, key=lambda row: parse_commit(row.commit) or (0, 0), reverse=True))


def _on_disks(store: Store, record: Record) -> Iterator[CheckpointView]:
    """By the words of machines: of those that go on, what they commit; of others, what they had at last.

    The disks of a job that is over went with it.
    """
    if _gone(record):
        return
    held: dict[int, Commit] = {}
    for fact in store.list_facts(record.job):
        commit = parse_commit(fact.value) if fact.kind is Kind.HOLDS else None
        if commit is not None:
            held[fact.rank] = max(commit, held.get(fact.rank, (0, 0)))
    last = _committed(store, record)
    for index, rank in enumerate(record.ranks):
        wrote = last is not None and rank.wrote == last[0]
        commit = max([c for c in (held.get(index), last if wrote else None) if c is not None], default=None)
        if commit is not None:
            where = f"static node {rank.node}" if rank.node is not None else f"disk of rank {index}"
            yield CheckpointView("{}-{}".format(*commit), where)


def _gone(record: Record) -> bool:
    return record.phase in (Phase.END, Phase.DONE) and not record.keep_disks


def _committed(store: Store, record: Record) -> Commit | None:
    try:
        progress = store.read_progress(record.job)
    except CorruptError:  # the next report writes it again
        return None
    if progress is None or progress.commit_gen is None or progress.commit_step is None:
        return None
    return progress.commit_gen, progress.commit_step


def _in_bucket(store: Store, record: Record, now: float) -> Iterator[CheckpointView]:
    names = store.list(paths.copies(record.job))
    kept = {one.commit for one in record.mirror}
    for commit in sorted({paths.copy_of(name) for name in names}):
        lists = _lists(store, record.job, commit, names)
        if not lists:
            yield CheckpointView(commit, BUCKET, False, note="no list: it is on its way, or was never finished")
            continue
        whole, there = set(lists[0].whole), {each.rank for each in lists}
        missing = ", ".join(str(rank) for rank in sorted(whole - there))
        note = f"the parts of ranks {missing} are missing" if missing else "" if commit in kept else "not counted on"
        age, size = max(0.0, now - lists[0].saved_at), sum(each.size() for each in lists)
        yield CheckpointView(commit, BUCKET, not missing, size, age, note)


def _lists(store: Store, job: str, commit: str, names: Iterable[str]) -> list[MirrorList]:
    """Of those ranks whose part is whole; one that makes no sense is none."""
    found = []
    for name in names:
        rest = name.removeprefix(f"{paths.copies(job)}{commit}/")
        if rest != name and "/" not in rest and (data := store.get(name)) is not None:
            try:
                found.append(codec.decode(data, MirrorList))
            except msgspec.DecodeError:
                continue
    return found


def fetch(store: Store, record: Record, folder: Path, commit: str | None, *, quiet: bool) -> Fetched:
    """Bring a copy to ``folder/<gen>-<step>``, every byte compared; the newest complete one if none is named.

    Args:
        quiet: no bar, on a terminal either.

    Raises:
        CliError: there is none, and why; it is damaged; a file cannot be written.
        StoreError: the bucket does not answer.
    """
    rows = [row for row in _in_bucket(store, record, 0.0) if row.complete and commit in (None, row.commit)]
    if not rows:
        raise _nothing(store, record, commit)
    chosen = max(rows, key=lambda row: parse_commit(row.commit) or (0, 0))
    lists = sorted(_lists(store, record.job, chosen.commit, store.list(paths.copies(record.job))), key=lambda x: x.rank)
    files: list[str] = []
    try:
        with bar(chosen.size or 0, quiet) as advance:
            for each in lists:
                home = folder / str(each.rank) if len(each.whole) > 1 else folder
                files += _fetch(store, record.job, each, home / chosen.commit, advance)
    except OSError as error:
        raise CliError(f"{error.filename or folder}: {error.strerror}") from None
    return Fetched(record.job, record.name, chosen.commit, str(folder), tuple(files))


def _nothing(store: Store, record: Record, commit: str | None) -> CliError:
    who = f"{record.name} ({record.job})"
    there = [row.commit for row in _in_bucket(store, record, 0.0) if row.complete]
    if there:
        return CliError(f"{who}: the bucket has no copy of {commit}", Exit.MISSING, f"there are {', '.join(there)}")
    remedy = "checkpoint: {mirror: {every_min: 60}} in the job file has copies made; docs/train.md"
    return CliError(f"{who}: the bucket has no complete copy of a checkpoint", Exit.MISSING, remedy)


def _fetch(store: Store, job: str, listed: MirrorList, home: Path, advance: Advance) -> Iterator[str]:
    """One rank's part; COMMIT last."""
    for file in listed.files:
        if not file.name or "/" in file.name or "\0" in file.name or file.name in (".", "..", PROOF):
            text = f"{shown(file.name)!r} of {listed.gen}-{listed.step} would lead out of {home}"
            raise CliError(f"{text}; nothing was fetched", Exit.REFUSED)
    home.mkdir(parents=True, exist_ok=True)
    commit = f"{listed.gen}-{listed.step}"
    for file in listed.files:
        names = part_names(job, commit, listed.rank, file, listed.part_bytes)
        parts = [(name, part_size(file, number, listed.part_bytes)) for number, name in enumerate(names)]
        try:
            have(store, parts, Content(file.size, "sha256", file.sha256), home / file.name, advance)
        except OtherBytesError:
            text = (
                f"{list_name(job, commit, listed.rank)}: {file.name} is damaged in the bucket, or was deleted meanwhile"
            )
            raise CliError(text, Exit.FAILED, "spotkeeper checkpoints lists others") from None
        yield str(home / file.name)
    (home / PROOF).write_text(listed.commit)
    yield str(home / PROOF)


def text(rows: tuple[CheckpointView, ...], record: Record) -> str:
    """What ``spotkeeper checkpoints`` prints: a line each."""
    from rich.filesize import decimal

    from spotkeeper.report.words import duration

    who = f"{record.name} ({record.job})"
    if not rows and _gone(record):
        return f"{who}: none; it is over, and its disks went with it (what it left: spotkeeper download {record.name})"
    if not rows:
        return f"{who}: no machine has told of a checkpoint, and the bucket has none"
    lines = []
    for row in rows:
        parts = [f"{row.commit:<12}", f"{shown(row.where):<16}"]
        parts.append(f"{decimal(row.size) if row.size is not None else '':>9}")
        parts.append(f"{duration(row.age_s) + ' old' if row.age_s is not None else '':<12}")
        state = "" if row.complete else "incomplete"
        parts.append(": ".join(filter(None, (state, row.note))))
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)
