"""``download``: what a job left in ``SPOTKEEPER_OUTPUT``, from the bucket into a folder.

Each file is whole or not there, and what is there already is not fetched again. Paths come from machines, so none
is believed to stay in its folder. Writes nothing to the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.fetching import Advance, Content, OtherBytesError, bar, have, shown
from spotkeeper.cli.jobs import check_rank
from spotkeeper.reconcile import paths
from spotkeeper.reconcile.store_api import Store
from spotkeeper.report.view import OutputView
from spotkeeper.spec import codec
from spotkeeper.spec.output import Output, OutputFile
from spotkeeper.spec.record import Outcome, Phase, Record

READS = 8  # lists at once
SHOWN = 20  # files that are named one by one


class Got(Struct, frozen=True):
    """One file. ``file``: where it is now; ``was_there``: it had been fetched before."""

    rank: int
    path: str
    file: str
    size: int
    was_there: bool


class Downloaded(Struct, frozen=True):
    """``left_out``: what the machines could not keep of the job's files, and why."""

    job: str
    name: str
    folder: str
    files: tuple[Got, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """One file to have. ``target``: below the folder, whatever its path says."""

    rank: int
    file: OutputFile
    target: Path


def outputs(store: Store, record: Record) -> dict[int, Output]:
    """The lists of all ranks that left something, by rank: those of the newest generation that has any.

    What an older one left is of an end that was cut short, and was done again since.

    Raises:
        CliError: a list makes no sense.
    """
    ranks = range(len(record.ranks))
    with ThreadPoolExecutor(READS) as pool:
        found = list(pool.map(lambda rank: store.get(paths.output_list(record.job, rank)), ranks))
    lists = {rank: _decode(record.job, rank, data) for rank, data in zip(ranks, found, strict=True) if data is not None}
    newest = max((each.gen for each in lists.values()), default=0)
    return {rank: each for rank, each in lists.items() if each.gen == newest}


def _decode(job: str, rank: int, data: bytes) -> Output:
    try:
        return codec.decode(data, Output)
    except msgspec.DecodeError as error:
        raise CliError(f"{paths.output_list(job, rank)} makes no sense: {error}") from None


def summary(store: Store, record: Record) -> OutputView | None:
    """For ``status``: how much there is to download of a job that ended well; None: nothing."""
    if record.outcome is not Outcome.SUCCEEDED:
        return None
    lists = outputs(store, record).values()
    files = sum(len(each.files) for each in lists)
    return OutputView(files, sum(each.size() for each in lists)) if files else None


def download(store: Store, record: Record, folder: Path | None, rank: int | None, *, quiet: bool) -> Downloaded:
    """Fetch everything (of one rank) to ``folder/<rank>/<path>``, ``./<name>-output`` if none is named.

    Args:
        quiet: no bar, on a terminal either.

    Raises:
        CliError: there is nothing, and why; a path that leads out of the folder; a file that cannot be written.
        StoreError: the bucket does not answer.
    """
    if rank is not None:
        check_rank(record, rank)
    lists = outputs(store, record)
    chosen = {each: lists[each] for each in sorted(lists) if rank in (None, each)}
    if not any(each.files for each in chosen.values()):
        raise _nothing(record, rank, lists)
    own, folder = folder is None, folder or Path(f"{record.name}-output")
    wanted = [
        Wanted(each, file, _target(folder, each, file.path)) for each, said in chosen.items() for file in said.files
    ]
    try:
        if own and not folder.is_dir():
            folder.mkdir()
            (folder / ".gitignore").write_text("*\n")  # nor is it sent along with the next job's source
        with bar(sum(one.file.size for one in wanted), quiet) as advance:
            got = tuple(_fetch(store, record.job, one, advance) for one in wanted)
    except OSError as error:
        raise CliError(f"{error.filename or folder}: {error.strerror}") from None
    left_out = tuple(f"rank {each}: {line}" for each, said in chosen.items() for line in said.left_out)
    return Downloaded(record.job, record.name, str(folder), got, left_out)


def _nothing(record: Record, rank: int | None, lists: dict[int, Output]) -> CliError:
    """Why there is nothing to fetch, and what to do."""
    who, where = f"{record.name} ({record.job})", "SPOTKEEPER_OUTPUT (run.output)"
    others = [str(each) for each, said in lists.items() if said.files]
    if rank is not None and others:
        return CliError(f"{who}: rank {rank} left nothing", Exit.MISSING, f"ranks that did: {', '.join(others)}")
    if record.phase is Phase.HOLD:
        words, remedy = f"holds ({record.reason}), and has left nothing yet", f"spotkeeper resume {record.name}"
    elif record.outcome is None:
        words = f"still runs: what it leaves in {where} is there once it has ended well"
        remedy = f"spotkeeper watch {record.name}, and then again"
    elif record.outcome is Outcome.SUCCEEDED:
        words = f"left nothing: its script wrote no file to {where}"
        remedy = 'in the script: torch.save(model.state_dict(), run.output / "model.pt"); docs/train.md'
    else:
        words, remedy = f"left nothing: it did not end well ({record.reason or record.outcome.value})", ""
    return CliError(f"{who} {words}", Exit.MISSING, remedy)


def _target(folder: Path, rank: int, path: str) -> Path:
    """Where a file goes.

    Raises:
        CliError: its path, or a link that is there, would lead out of the folder.
    """
    parts = PurePosixPath(path).parts
    home = folder / str(rank)
    target = home.joinpath(*parts)
    plain = parts and not path.startswith("/") and ".." not in parts and "\0" not in path
    if not plain or not target.parent.resolve().is_relative_to(folder.resolve() / str(rank)):
        raise CliError(f"rank {rank}: {shown(path)!r} would lead out of {home}; nothing was fetched", Exit.REFUSED)
    return target


def _fetch(store: Store, job: str, one: Wanted, advance: Advance) -> Got:
    """
    Raises:
        CliError: the bucket has other bytes than its list says.
    """
    file, name = one.file, paths.output_file(job, one.rank, one.file.name)
    try:
        was_there = have(store, [(name, file.size)], Content(file.size, "md5", file.md5), one.target, advance)
    except OtherBytesError:
        again = "run it again: a machine may have written it anew meanwhile"
        raise CliError(f"{name}: not the {file.size} bytes that its list says", Exit.FAILED, again) from None
    return Got(one.rank, file.path, str(one.target), file.size, was_there)


def text(done: Downloaded) -> str:
    """What ``spotkeeper download`` prints."""
    from rich.filesize import decimal

    files: Sequence[Got] = done.files if len(done.files) <= SHOWN else ()
    old = sum(got.was_there for got in done.files)
    lines = [f"{shown(got.file)}  {decimal(got.size)}{'  (was there)' if got.was_there else ''}" for got in files]
    if not files:
        counted = f"{len(done.files)} files, {decimal(sum(got.size for got in done.files))}, in {shown(done.folder)}"
        lines.append(counted + (f"; {old} were there" if old else ""))
    return "\n".join(lines)
