"""Sharded checkpoints that ``torch.distributed.checkpoint`` reads: its frames around tensors, its ``.metadata``.

That library finds a tensor's chunk by file, offset and length, and expects there what
``torch.save`` makes of it. So each tensor lies in such a frame, made by torch itself from
the shape alone; our own reader goes to the bytes inside it. Put the folders of all nodes
into one, and any tool for that format opens it.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

METADATA = ".metadata"

Path = tuple[str | int, ...]


def data_name(rank: int) -> str:
    """The file of one rank's tensors, as that library calls it."""
    return f"__{rank}_0.distcp"


def skeleton_name(rank: int) -> str:
    return f"skeleton.{rank}.pkl"


def rank_of(name: str) -> int | None:
    """Whose tensors are in this file; None: it holds none."""
    head, _, tail = name.removeprefix("__").partition("_")
    return int(head) if name.startswith("__") and tail == "0.distcp" and head.isdigit() else None


@dataclass(frozen=True)
class Frame:
    """What stands before and after a tensor's bytes."""

    before: bytes
    after: bytes


class _Recorder:
    """A stream that takes what is written, and remembers where nothing was: there the bytes go."""

    def __init__(self) -> None:
        self.pieces = [bytearray()]

    def write(self, data: Any) -> int:
        self.pieces[-1] += bytes(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.pieces.append(bytearray())
        return offset

    def flush(self) -> None:
        """Nothing waits."""


@lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """The frame of a contiguous tensor.

    Raises:
        RuntimeError: this torch is too old to make one without the bytes.
    """
    try:
        from torch.serialization import skip_data
    except ImportError:
        raise RuntimeError(f"sharded checkpoints need torch 2.6 or newer, this is {torch.__version__}") from None
    recorder: Any = _Recorder()
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), recorder)  # never written to, so never in memory
    before, *after = recorder.pieces
    return Frame(bytes(before), b"".join(after))


@dataclass(frozen=True)
class Chunk:
    """A rank's part of a named tensor, and where its frame lies in the rank's file."""

    path: Path
    dtype: torch.dtype
    size: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    length: int


def tensors(tree: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensors in nested dicts, lists and tuples, with the keys that lead to them."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors(value, (*path, key if isinstance(key, (str, int)) else str(key)))
    elif isinstance(tree, (list, tuple)):
        for at, value in enumerate(tree):
            yield from tensors(value, (*path, at))


def digest(chunks: list[Chunk]) -> bytes:
    return hashlib.sha256(repr(chunks).encode()).digest()


def metadata(ranks: list[list[Chunk]]) -> bytes:
    """``.metadata`` of a checkpoint, of all ranks' chunks. A part that several ranks have is the first one's."""
    from torch.distributed.checkpoint import metadata as md
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    found: dict[str, md.TensorStorageMetadata] = {}
    where: dict[md.MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path] = {}
    for rank, chunks in enumerate(ranks):
        for chunk in chunks:
            name = ".".join(map(str, chunk.path))
            index = md.MetadataIndex(name, torch.Size(chunk.offset))
            if index in where or 0 in chunk.shape:  # of an empty part there is nothing to find
                continue
            paths[name] = chunk.path
            whole = found.setdefault(name, _tensor(chunk))
            whole.chunks.append(md.ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)))
            where[index] = _StorageInfo(data_name(rank), chunk.start, chunk.length)
    return pickle.dumps(md.Metadata(dict(found), planner_data=paths, storage_data=where), pickle.HIGHEST_PROTOCOL)


def _tensor(chunk: Chunk) -> Any:
    from torch.distributed.checkpoint import metadata as md

    return md.TensorStorageMetadata(md.TensorProperties(dtype=chunk.dtype), torch.Size(chunk.size), [])
