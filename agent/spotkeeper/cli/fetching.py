"""A file out of the bucket onto this machine: whole or not there, and not fetched twice.

Sizes and hashes are those its list says; the bytes are compared as they come. Writes nothing to the bucket.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.reconcile.store_api import Store
from spotkeeper.train.store import file_hash

PART = 8 << 20  # bytes of one request

Advance = Callable[[int], object]  # so many bytes more


class OtherBytesError(Exception):
    """The bucket has other bytes than the list says."""


@dataclass(frozen=True)
class Content:
    """What a file must be: its size in bytes, and its hash in hex by an algorithm of :mod:`hashlib`."""

    size: int
    algorithm: str
    digest: str

    def is_at(self, target: Path) -> bool:
        """Whether it is there, to the last byte."""
        if not target.is_file() or target.stat().st_size != self.size:
            return False
        return file_hash(target, self.algorithm) == self.digest


def have(store: Store, objects: Iterable[tuple[str, int]], content: Content, target: Path, advance: Advance) -> bool:
    """Make ``target`` that content, from objects (name, bytes) one after the other. Whether it was there before.

    Raises:
        OtherBytesError: what came is something else; nothing is left of it.
        OSError, StoreError: it cannot be written, or read.
    """
    if content.is_at(target):
        advance(content.size)
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{secrets.token_hex(8)}.part"
    found, size = hashlib.new(content.algorithm, usedforsecurity=False), 0
    try:
        with partial.open("xb") as stream:
            for piece in _pieces(store, objects):
                found.update(piece)
                size += stream.write(piece)
                advance(len(piece))
        if (size, found.hexdigest()) != (content.size, content.digest):
            raise OtherBytesError
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return False


def _pieces(store: Store, objects: Iterable[tuple[str, int]]) -> Iterator[bytes]:
    for name, size in objects:
        for start in range(0, size, PART):
            yield store.part(name, start, min(PART, size - start)) or b""


@contextlib.contextmanager
def bar(total: int, quiet: bool) -> Iterator[Advance]:
    """A progress bar on standard error, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def shown(path: str) -> str:
    """Without what would move a terminal's cursor."""
    return "".join(char if char.isprintable() else "?" for char in path)
