"""``download``: fetches a job's output (``SPOTKEEPER_OUTPUT``) from the bucket into a folder.

Each file arrives whole or not at all, and a file that is already here is not fetched again. A list in the bucket states
sizes and hashes. Machines choose the paths of files, so each path is checked not to lead out of the target folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct

from spotkeeper.cli.output import console, emit, note
from spotkeeper.cli.stack import open_stack
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.logs import check_node
from spotkeeper.contract import codec
from spotkeeper.contract.record import Outcome, Phase, Record
from spotkeeper.contract.uploads import LIST_BYTES, Output, OutputFile
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.view import OutputView
from spotkeeper.train.checkpoint.store import file_hash

READS = 8  # lists that are read at once
SHOWN = 20  # most files that are named one by one
PART = 8 << 20  # bytes of one request

Advance = Callable[[int], object]  # called with the number of bytes that arrived


class Got(Struct, frozen=True):
    """A downloaded file. ``file``: its path here; ``was_there``: whether it was here already."""

    node: int
    path: str
    file: str
    size: int
    was_there: bool


class Downloaded(Struct, frozen=True):
    """The result of a download. ``left_out``: files that the machines could not upload, and why."""

    job: str
    name: str
    folder: str
    files: tuple[Got, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """One file to fetch to ``target``, a path that was checked to be below the folder."""

    node: int
    file: OutputFile
    target: Path


def run(job: str, folder: Path | None, node: int | None, stack: str | None, *, as_json: bool) -> None:
    _, store = open_stack(stack)
    record = lookup.find_job(store, job)
    done = download(store, record, folder, node, quiet=as_json)
    emit(done, as_json, text(done))
    for line in done.left_out:
        note(f"missing from the output: {printable(line)}")
    if record.outcome is None:
        note(f"{record.name} is still running: its machines may write more output")


def outputs(store: Store, record: Record) -> dict[int, Output]:
    """Return each node's list of output files, by node. Only the lists of the newest generation count.

    If the job's end was interrupted and a later generation ended the job, the bucket can still have lists of the
    earlier generation; they are left out.

    Raises:
        CliError: a list is damaged.
    """
    nodes = range(len(record.nodes))
    with ThreadPoolExecutor(READS) as pool:
        found = list(pool.map(lambda node: store.part(paths.output_list(record.job, node), 0, LIST_BYTES), nodes))
    lists = {node: _decode(record.job, node, data) for node, data in zip(nodes, found, strict=True) if data is not None}
    newest = max((each.gen for each in lists.values()), default=0)
    return {node: each for node, each in lists.items() if each.gen == newest}


def _decode(job: str, node: int, data: bytes) -> Output:
    try:
        return codec.decode(data, Output)
    except msgspec.DecodeError as error:
        raise CliError(f"{paths.output_list(job, node)} is damaged: {error}") from None


def summary(store: Store, record: Record) -> OutputView | None:
    """Return the size of a succeeded job's output, for ``status``; None without output."""
    if record.outcome is not Outcome.SUCCEEDED:
        return None
    lists = outputs(store, record).values()
    files = sum(len(each.files) for each in lists)
    return OutputView(files, sum(each.size() for each in lists)) if files else None


def download(store: Store, record: Record, folder: Path | None, node: int | None, *, quiet: bool) -> Downloaded:
    """Fetch a job's output to ``folder/<node>/<path>``.

    Args:
        folder: None for ``./<name>-output``.
        node: only this node's output; None for all nodes.
        quiet: show no progress bar.

    Raises:
        CliError: the job has no output, a path leads out of the folder, or a file cannot be written.
        StoreError: the bucket does not answer.
    """
    if node is not None:
        check_node(record, node)
    lists = outputs(store, record)
    chosen = {each: lists[each] for each in sorted(lists) if node in (None, each)}
    if not any(each.files for each in chosen.values()):
        raise _nothing(record, node, lists)
    own, folder = folder is None, folder or Path(f"{record.name}-output")
    wanted = [
        Wanted(each, file, _target(folder, each, file.path)) for each, said in chosen.items() for file in said.files
    ]
    try:
        if own and not folder.is_dir():
            folder.mkdir()
            (folder / ".gitignore").write_text("*\n")  # also keeps the output out of the next job's source
        with bar(sum(one.file.size for one in wanted), quiet) as advance:
            got = tuple(_fetch(store, record.job, one, advance) for one in wanted)
    except OSError as error:
        raise CliError(f"{error.filename or folder}: {error.strerror}") from None
    left_out = tuple(f"node {each}: {line}" for each, said in chosen.items() for line in said.left_out)
    return Downloaded(record.job, record.name, str(folder), got, left_out)


def _nothing(record: Record, node: int | None, lists: dict[int, Output]) -> CliError:
    """The error that says why the job has no output, and what to do."""
    who, where = f"{record.name} ({record.job})", "SPOTKEEPER_OUTPUT (run.output)"
    others = [str(each) for each, said in lists.items() if said.files]
    if node is not None and others:
        return CliError(f"{who}: node {node} has no output", Exit.MISSING, f"nodes with output: {', '.join(others)}")
    if record.phase is Phase.HOLD:
        words, remedy = f"is on hold ({record.reason}) and has no output yet", f"spotkeeper resume {record.name}"
    elif record.outcome is None:
        words = f"is still running: the files in {where} can be downloaded after it succeeds"
        remedy = f"spotkeeper watch {record.name}, then run this again"
    elif record.outcome is Outcome.SUCCEEDED:
        words = f"has no output: its script wrote no file to {where}"
        remedy = 'torch.save(model.state_dict(), run.output / "model.pt") in the script (docs/train.md)'
    else:
        words, remedy = f"has no output, since it did not succeed ({record.reason or record.outcome.value})", ""
    return CliError(f"{who} {words}", Exit.MISSING, remedy)


def _target(folder: Path, node: int, path: str) -> Path:
    """Return where to write a node's file; CliError if its path, or an existing link, leads out of ``folder``."""
    parts = PurePosixPath(path).parts
    home = folder / str(node)
    target = home.joinpath(*parts)
    plain = parts and not path.startswith("/") and ".." not in parts and "\0" not in path
    if not plain or not target.parent.resolve().is_relative_to(folder.resolve() / str(node)):
        raise CliError(f"node {node}: {printable(path)!r} would be outside {home}; nothing was fetched", Exit.REFUSED)
    return target


def _fetch(store: Store, job: str, one: Wanted, advance: Advance) -> Got:
    """Fetch one file, unless it is here already; CliError if the bytes differ from those in the bucket's list."""
    file, name = one.file, paths.output_file(job, one.node, one.file.name)
    try:
        was_there = fetch_file(store, [(name, file.size)], Content(file.size, "md5", file.md5), one.target, advance)
    except DifferentBytesError:
        again = "run this again, since a machine may have replaced the file meanwhile"
        listed = paths.output_list(job, one.node)
        raise CliError(f"{name} is not the file of {file.size} bytes that {listed} lists", Exit.FAILED, again) from None
    return Got(one.node, file.path, str(one.target), file.size, was_there)


def text(done: Downloaded) -> str:
    from rich.filesize import decimal

    files: Sequence[Got] = done.files if len(done.files) <= SHOWN else ()
    old = sum(got.was_there for got in done.files)
    lines = [
        f"{printable(got.file)}  {decimal(got.size)}{'  (already here)' if got.was_there else ''}" for got in files
    ]
    if not files:
        counted = (
            f"{len(done.files)} files, {decimal(sum(got.size for got in done.files))}, in {printable(done.folder)}"
        )
        lines.append(counted + (f"; {old} were already here" if old else ""))
    return "\n".join(lines)


# -- files of the bucket


class DifferentBytesError(Exception):
    """The bucket's bytes differ from the expected :class:`Content`."""


@dataclass(frozen=True)
class Content:
    """The expected content of a file: size in bytes, and hash in hex by an algorithm of :mod:`hashlib`."""

    size: int
    algorithm: str
    digest: str

    def is_at(self, target: Path) -> bool:
        """Whether the file has exactly this content."""
        if not target.is_file() or target.stat().st_size != self.size:
            return False
        return file_hash(target, self.algorithm) == self.digest


def fetch_file(
    store: Store, objects: Iterable[tuple[str, int]], content: Content, target: Path, advance: Advance
) -> bool:
    """Write the concatenated objects (name, bytes) to ``target``; return True if ``target`` had this content already.

    Raises:
        DifferentBytesError: the objects have other content; ``target`` is left as it was.
        OSError, StoreError: the file cannot be written, or the bucket not read.
    """
    if content.is_at(target):
        advance(content.size)
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{secrets.token_hex(8)}.part"
    found, size = hashlib.new(content.algorithm, usedforsecurity=False), 0
    try:
        with partial.open("xb") as stream:
            for name, length in objects:
                for start in range(0, length, PART):
                    piece = store.part(name, start, min(PART, length - start)) or b""
                    found.update(piece)
                    size += stream.write(piece)
                    advance(len(piece))
        if (size, found.hexdigest()) != (content.size, content.digest):
            raise DifferentBytesError
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return False


@contextlib.contextmanager
def bar(total: int, quiet: bool) -> Iterator[Advance]:
    """Show a progress bar in bytes on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda count: bars.advance(task, count)


def printable(path: str) -> str:
    """Return a path with ``?`` in place of characters that would move a terminal's cursor."""
    return "".join(char if char.isprintable() else "?" for char in path)
