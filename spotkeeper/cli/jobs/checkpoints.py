"""``checkpoints``: lists the checkpoints of a job, on disks and in the bucket; fetches a copy from the bucket.

For disks, the list shows what their machines last reported. Machines choose the names of the files in a copy, so each
name is checked not to lead out of the target folder. The command writes nothing to the bucket.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.cli.jobs.download import Advance, Content, DifferentBytesError, bar, fetch_file, printable
from spotkeeper.cli.output import emit
from spotkeeper.cli.stack import open_stack
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract import codec
from spotkeeper.contract.facts import Commit, Kind, parse_commit
from spotkeeper.contract.record import Record
from spotkeeper.contract.uploads import LIST_BYTES, MirrorList, list_name, part_names, part_size
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store

PROOF = "COMMIT"  # the file that marks a checkpoint as complete
BUCKET = "the bucket"


class CheckpointView(Struct, frozen=True, omit_defaults=True):
    """A checkpoint on one disk or in the bucket.

    ``size``: bytes. ``age_s``: real seconds since the checkpoint was saved. Both are None if unknown.
    """

    commit: str
    where: str
    complete: bool = True
    size: int | None = None
    age_s: float | None = None
    note: str = ""


class Fetched(Struct, frozen=True):
    """A fetched checkpoint. ``folder``: for ``attach(checkpoint_dir=...)``; sharded state has a subfolder per node."""

    job: str
    name: str
    commit: str
    folder: str
    files: tuple[str, ...]


def run(job: str, folder: Path | None, commit: str | None, stack: str | None, *, as_json: bool) -> None:
    """List a job's checkpoints; with ``folder``, fetch a checkpoint to that folder instead.

    Raises:
        CliError: ``commit`` without ``folder``; no such job; or as :func:`fetch`.
    """
    if commit is not None and folder is None:
        raise CliError("--commit needs --fetch", Exit.USAGE, "spotkeeper checkpoints JOB --fetch DIR --commit GEN-STEP")
    _, store = open_stack(stack)
    record = lookup.find_job(store, job)
    if folder is None:
        rows = known(store, record, time.time())
        emit(rows, as_json, text(rows, record))
        return
    done = fetch(store, record, folder, commit, quiet=as_json)
    use = f'spotkeeper.attach(..., checkpoint_dir="{printable(done.folder)}") resumes from it'
    emit(done, as_json, f"{done.commit} is in {printable(done.folder)}, {len(done.files)} files; {use}")


def known(store: Store, record: Record, now: float) -> tuple[CheckpointView, ...]:
    """Return all known checkpoints, newest first. For each checkpoint, disks come before the bucket.

    Args:
        now: real unix seconds.
    """
    rows = [*_on_disks(store, record), *_in_bucket(store, record, now)]
    return tuple(sorted(rows, key=lambda row: parse_commit(row.commit) or (0, 0), reverse=True))


def _on_disks(store: Store, record: Record) -> Iterator[CheckpointView]:
    """The newest checkpoint of each disk, as its machine last reported it; nothing if the job's disks are deleted."""
    if _gone(record):
        return
    held: dict[int, Commit] = {}
    for fact in store.list_facts(record.job):
        commit = parse_commit(fact.value) if fact.kind is Kind.CHECKPOINT else None
        if commit is not None:
            held[fact.node] = max(commit, held.get(fact.node, (0, 0)))
    last = lookup.committed(store, record.job)
    for index, node in enumerate(record.nodes):
        newest = last if last is not None and node.keeps(last[0]) else None
        commit = max([each for each in (held.get(index), newest) if each is not None], default=None)
        if commit is not None:
            where = f"static machine {node.machine}" if node.machine is not None else f"disk of node {index}"
            yield CheckpointView("{}-{}".format(*commit), where)


def _gone(record: Record) -> bool:
    return record.over and not record.keep_disks


def _in_bucket(store: Store, record: Record, now: float) -> Iterator[CheckpointView]:
    names = store.list(paths.copies(record.job))
    kept = {one.commit for one in record.mirror}
    for commit in sorted({paths.copy_of(name) for name in names}):
        lists = _lists(store, record.job, commit, names)
        if not lists:
            yield CheckpointView(commit, BUCKET, False, note="its upload is running or was never finished")
            continue
        whole, there = set(lists[0].whole), {each.node for each in lists}
        missing = ", ".join(str(node) for node in sorted(whole - there))
        note = f"parts missing: nodes {missing}" if missing else "" if commit in kept else "not usable"
        age, size = max(0.0, now - lists[0].saved_at), sum(each.size() for each in lists)
        yield CheckpointView(commit, BUCKET, not missing, size, age, note)


def _lists(store: Store, job: str, commit: str, names: Iterable[str]) -> list[MirrorList]:
    """The file lists of a checkpoint's copy, one for each node whose part is complete. Unreadable ones are left out."""
    found = []
    for name in names:
        rest = name.removeprefix(f"{paths.copies(job)}{commit}/")
        if rest != name and "/" not in rest and (data := store.part(name, 0, LIST_BYTES)) is not None:
            try:
                found.append(codec.decode(data, MirrorList))
            except msgspec.DecodeError:
                continue
    return found


def fetch(store: Store, record: Record, folder: Path, commit: str | None, *, quiet: bool) -> Fetched:
    """Fetch a checkpoint from the bucket to ``folder/<gen>-<step>``, and verify each byte.

    The parts of a sharded checkpoint go to ``folder/<node>/<gen>-<step>``.

    Args:
        commit: which checkpoint; None for the newest whose copy in the bucket is complete.
        quiet: show no progress bar.

    Raises:
        CliError: the bucket has no complete copy of it, the copy is damaged, or a file cannot be written.
        StoreError: the bucket does not answer.
    """
    rows = [row for row in _in_bucket(store, record, 0.0) if row.complete and commit in (None, row.commit)]
    if not rows:
        raise _nothing(store, record, commit)
    chosen = max(rows, key=lambda row: parse_commit(row.commit) or (0, 0))
    lists = sorted(_lists(store, record.job, chosen.commit, store.list(paths.copies(record.job))), key=lambda x: x.node)
    files: list[str] = []
    try:
        with bar(chosen.size or 0, quiet) as advance:
            for each in lists:
                home = folder / str(each.node) if len(each.whole) > 1 else folder
                files += _fetch(store, record.job, each, home / chosen.commit, advance)
    except OSError as error:
        raise CliError(f"{error.filename or folder}: {error.strerror}") from None
    return Fetched(record.job, record.name, chosen.commit, str(folder), tuple(files))


def _nothing(store: Store, record: Record, commit: str | None) -> CliError:
    who = f"{record.name} ({record.job})"
    there = [row.commit for row in _in_bucket(store, record, 0.0) if row.complete]
    if there:
        return CliError(f"{who}: the bucket has no copy of {commit}", Exit.MISSING, f"one of {', '.join(there)}")
    remedy = "for copies in the bucket, set `checkpoint: {mirror: {every_min: 60}}` in the job file (docs/train.md)"
    return CliError(f"{who}: the bucket has no complete copy of a checkpoint", Exit.MISSING, remedy)


def _fetch(store: Store, job: str, listed: MirrorList, home: Path, advance: Advance) -> Iterator[str]:
    """Fetch one node's part, write the file COMMIT last, and yield the paths of all files."""
    for file in listed.files:
        if not file.name or "/" in file.name or "\0" in file.name or file.name in (".", "..", PROOF):
            text = f"the file {printable(file.name)!r} of {listed.gen}-{listed.step} would be outside {home}"
            raise CliError(f"{text}; nothing of node {listed.node} was fetched", Exit.REFUSED)
    home.mkdir(parents=True, exist_ok=True)
    commit = f"{listed.gen}-{listed.step}"
    for file in listed.files:
        names = part_names(job, commit, listed.node, file, listed.part_bytes)
        parts = [(name, part_size(file, number, listed.part_bytes)) for number, name in enumerate(names)]
        try:
            fetch_file(store, parts, Content(file.size, "sha256", file.sha256), home / file.name, advance)
        except DifferentBytesError:
            name = f"{list_name(job, commit, listed.node)}: {file.name}"
            text = f"{name} is damaged in the bucket or was deleted during the download"
            raise CliError(text, Exit.FAILED, "run spotkeeper checkpoints JOB, and fetch another one") from None
        yield str(home / file.name)
    (home / PROOF).write_text(listed.commit)
    yield str(home / PROOF)


def text(rows: tuple[CheckpointView, ...], record: Record) -> str:
    who = f"{record.name} ({record.job})"
    if not rows and _gone(record):
        output = f"its output: spotkeeper download {record.name}"
        return f"{who} has no checkpoints, since it has ended and its disks are deleted ({output})"
    if not rows:
        return f"{who}: no machine has reported a checkpoint, and the bucket has none"
    lines = []
    for row in rows:
        commit, where, size, age, note = cells(row)
        parts = (f"{commit:<12}", f"{where:<16}", f"{size:>9}", f"{age:<12}", note)
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def cells(row: CheckpointView) -> tuple[str, str, str, str, str]:
    """Return a checkpoint as text: its name, place, size, age and note."""
    from rich.filesize import decimal

    from spotkeeper.report.text.words import duration

    size = "" if row.size is None else decimal(row.size)
    age = "" if row.age_s is None else f"{duration(row.age_s)} old"
    note = ": ".join(filter(None, ("" if row.complete else "incomplete", row.note)))
    return row.commit, printable(row.where), size, age, note
