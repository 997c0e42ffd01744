"""What of a tensor this rank has, where a gang shares it: taken apart for a checkpoint, and put together again.

A ``DTensor`` (FSDP2's ``fully_shard``, tensor parallelism) is bytes of this rank, a place
in the whole tensor, and a mesh of ranks. The bytes go into the image like any tensor's;
a ``Shard`` says the rest. A mesh cannot be written down, so it is found again among those
of what the script attached, by its dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from spotkeeper.train.errors import AttachError, PartError

MeshKey = tuple[tuple[str, ...] | None, int]  # names of its dimensions, and how many they are


@dataclass(frozen=True)
class Shard:
    """One appearance of a shared tensor in a rank's state.

    ``number`` counts appearances, in the order of pickling: the same on all ranks, while
    slots are not (a tied tensor is written once, unless this rank has nothing of it).
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
    """Whether it is a DTensor. Does not import what makes them."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> torch.Tensor:
    """The bytes of this rank.

    Raises:
        PartError: it is a sum that nobody has taken yet.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise PartError(f"cannot save a partial sum of shape {tuple(tensor.shape)}; reduce it first")
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local().detach()
    return part


def describe(tensor: Any, number: int, slot: int) -> Shard:
    """The rest of it."""
    shape, offset = _place(tensor.shape, tensor.device_mesh, tensor.placements)
    whole = tuple(tensor.shape), tuple(tensor.stride())
    return Shard(number, slot, *whole, offset, shape, tuple(tensor.placements), _key(tensor.device_mesh))


class Meshes:
    """Those of the tensors that the script attached."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._known: dict[MeshKey, Any] = {}
        for tensor in tensors:
            if is_shared(tensor):
                mesh: Any = tensor.device_mesh
                self._known.setdefault(_key(mesh), mesh)

    def __bool__(self) -> bool:
        return bool(self._known)

    def place(self, shard: Shard) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape, offset) of this rank's part of it, in the world as it is now."""
        return _place(torch.Size(shard.size), self._find(shard), shard.placements)

    def join(self, shard: Shard, part: torch.Tensor) -> torch.Tensor:
        """The shared tensor again, of this rank's part."""
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

    def _find(self, shard: Shard) -> Any:
        if shard.mesh not in self._known:
            names = ", ".join(shard.mesh[0] or ()) or "no names"
            raise AttachError(
                f"the checkpoint has a tensor on a mesh of {shard.mesh[1]} dimensions ({names}), and the model has "
                "none such: shard it as it was, or start in a new folder"
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
