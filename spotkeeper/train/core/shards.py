"""Sharded tensors: this rank's part of a ``DTensor``, and the file format of ``torch.distributed.checkpoint`` (DCP).

A ``DTensor`` (FSDP2's ``fully_shard``, tensor parallelism) consists of this rank's bytes, their place in the whole
tensor, and a mesh of ranks. The bytes are saved as any tensor's; a ``TensorShard`` describes the rest. A mesh
cannot be saved, so a restore looks for a mesh with the same dimensions among those of the attached model and
optimizers.

DCP finds a tensor's chunk by file, offset and length, and expects the output of ``torch.save`` there. So each tensor
gets a *frame*: the bytes that ``torch.save`` writes before and after the tensor's own bytes. The frame depends only on
dtype and shape. After all nodes' folders are copied into one folder, any tool for DCP can open this folder.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from spotkeeper.train.core.errors import AttachError, PartError

MeshKey = tuple[tuple[str, ...] | None, int]  # names and number of a mesh's dimensions
METADATA = ".metadata"
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class TensorShard:
    """One occurrence of a sharded tensor in a rank's state.

    ``number`` counts occurrences in pickling order and is equal on all ranks. ``slot`` is the number of the tensor's
    memory in this rank's saved state, and can differ between ranks: tied tensors share one slot, except on a rank whose
    part of them is empty. An empty part has no memory to share, so each gets a slot of its own.
    """

    number: int
    slot: int
    size: tuple[int, ...]  # of the whole tensor
    stride: tuple[int, ...]
    offset: tuple[int, ...]  # of this rank's part
    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh: MeshKey


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor. Does not import DTensor."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, detached.

    Raises:
        PartError: the tensor is a partial sum.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise PartError(f"cannot save a DTensor of shape {tuple(tensor.shape)} that is a partial sum; reduce it first")
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local().detach()
    return part


def describe(tensor: Any, number: int, slot: int) -> TensorShard:
    """Describe a DTensor without its bytes."""
    shape, offset = _place(tensor.shape, tensor.device_mesh, tensor.placements)
    whole = tuple(tensor.shape), tuple(tensor.stride())
    return TensorShard(number, slot, *whole, offset, shape, tuple(tensor.placements), _key(tensor.device_mesh))


class Meshes:
    """The device meshes of the attached tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._known: dict[MeshKey, Any] = {}
        for tensor in tensors:
            if is_shared(tensor):
                mesh: Any = tensor.device_mesh
                self._known.setdefault(_key(mesh), mesh)

    def __bool__(self) -> bool:
        return bool(self._known)

    def place(self, shard: TensorShard) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (shape, offset) of this rank's part at the current number of ranks."""
        return _place(torch.Size(shard.size), self._find(shard), shard.placements)

    def join(self, shard: TensorShard, part: torch.Tensor) -> torch.Tensor:
        """Rebuild the sharded tensor from this rank's part."""
        from torch.distributed.tensor import DTensor

        whole: torch.Tensor = DTensor.from_local(
            part,
            self._find(shard),
            shard.placements,
            run_check=False,
            shape=torch.Size(shard.size),
            stride=shard.stride,
        )
        return whole

    def _find(self, shard: TensorShard) -> Any:
        if shard.mesh not in self._known:
            names = ", ".join(shard.mesh[0] or ()) or "no names"
            raise AttachError(
                f"the checkpoint has a tensor on a mesh of {shard.mesh[1]} dimensions ({names}), but the model has no "
                "such mesh: shard the model as before, or start in a new folder"
            )
        return self._known[shard.mesh]


def _key(mesh: Any) -> MeshKey:
    names = mesh.mesh_dim_names
    return (None if names is None else tuple(names)), mesh.ndim


@lru_cache(maxsize=8192)
def _place(size: torch.Size, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(size, mesh, placements)
    return tuple(shape), tuple(offset)


def data_name(rank: int) -> str:
    """Return the name of the file with one rank's tensors, as DCP names it."""
    return f"__{rank}_0.distcp"


def skeleton_name(rank: int) -> str:
    return f"skeleton.{rank}.pkl"


def rank_of(name: str) -> int | None:
    """Return the rank whose tensors are in a file; None for other files."""
    head, _, tail = name.removeprefix("__").partition("_")
    return int(head) if name.startswith("__") and tail == "0.distcp" and head.isdecimal() else None


@dataclass(frozen=True)
class TensorFrame:
    """The bytes that ``torch.save`` writes before and after a tensor's bytes."""

    before: bytes
    after: bytes


class _FrameRecorder:
    """A stream that records what ``torch.save`` writes before and after the tensor's own bytes, which are skipped."""

    def __init__(self) -> None:
        self.pieces = [bytearray()]

    def write(self, data: Any) -> int:
        self.pieces[-1] += bytes(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.pieces.append(bytearray())
        return offset

    def flush(self) -> None:
        """Do nothing."""


@lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorFrame:
    """Return the frame of a contiguous tensor.

    Raises:
        RuntimeError: this torch cannot make a frame without the tensor's bytes.
    """
    try:
        from torch.serialization import skip_data
    except ImportError:
        raise RuntimeError(f"sharded checkpoints need torch 2.6 or newer, this is {torch.__version__}") from None
    recorder: Any = _FrameRecorder()
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype), recorder)  # the empty tensor is never written, so it needs no pages
    before, *after = recorder.pieces
    return TensorFrame(bytes(before), b"".join(after))


@dataclass(frozen=True)
class Chunk:
    """A rank's part of a named tensor, and where its bytes, as ``torch.save`` writes them, lie in the rank's file."""

    path: Path
    dtype: torch.dtype
    size: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    length: int


def tensors(tree: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield (path, tensor) for all tensors in nested dicts, lists and tuples. A path is a tuple of keys."""
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
    """Return DCP's ``.metadata`` file for all ranks' chunks: each chunk once, even if several ranks have it."""
    from torch.distributed.checkpoint import metadata as md
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    found: dict[str, md.TensorStorageMetadata] = {}
    where: dict[md.MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path] = {}
    for rank, chunks in enumerate(ranks):
        for chunk in chunks:
            name = ".".join(map(str, chunk.path))
            index = md.MetadataIndex(name, torch.Size(chunk.offset))
            if index in where or 0 in chunk.shape:
                continue
            paths[name] = chunk.path
            whole = found.setdefault(name, _tensor(chunk))
            whole.chunks.append(md.ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape)))
            where[index] = _StorageInfo(data_name(rank), chunk.start, chunk.length)
    return pickle.dumps(md.Metadata(dict(found), planner_data=paths, storage_data=where), pickle.HIGHEST_PROTOCOL)


def _tensor(chunk: Chunk) -> Any:
    from torch.distributed.checkpoint import metadata as md

    return md.TensorStorageMetadata(md.TensorProperties(dtype=chunk.dtype), torch.Size(chunk.size), [])
