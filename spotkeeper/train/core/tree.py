"""Takes a state apart into its structure, its tensors and its other values, and puts it together again.

Of a run's state hardly anything but values changes from image to image: learning rates, counts, the tensors' bytes. So
the structure is what a cached layout is compared with (``checkpoint/image.py``): two states with equal structures have
the same containers, keys and order, and tensors and values in the same places.

Only plain containers are taken apart: ``dict`` and ``OrderedDict`` with texts and whole numbers as keys, ``list`` and
``tuple``. Everything else is a value, also an instance that contains tensors. A state in which one dict or list occurs
twice is one value, so that it still occurs twice, as the same object, when the state is put together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from spotkeeper.train.core.shards import TensorFrame, TensorShard, is_shared, local_part
from spotkeeper.train.core.tensors import TensorKey, TensorSlot

_CONTAINERS = {dict, OrderedDict, list, tuple}
_KEYS = {str, int}
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_TENSOR, _VALUE = 0, 1
# _TENSOR, _VALUE, ("d", keys, children), ("o", keys, children, attributes), ("l", children) or ("t", children)
Structure = Any


@dataclass(frozen=True)
class Flat:
    """A state that was taken apart. Tensors and values are in the order of the structure."""

    structure: Structure
    tensors: list[torch.Tensor]
    values: list[Any]

    @cached_property
    def parts(self) -> list[torch.Tensor]:
        """The tensors; for a sharded one, this rank's part."""
        return [each if type(each) in _PLAIN or not is_shared(each) else local_part(each) for each in self.tensors]

    def places(self) -> tuple[object, ...]:
        """Return what tells whether the tensors are the same bytes, seen in the same way, as those of another state.

        Raises:
            RuntimeError: a tensor has no bytes of its own, such as a sparse one.
        """
        each, whole = self.parts, self.tensors
        return (
            [type(tensor) for tensor in whole],
            [_sharding(tensor) for tensor, part in zip(whole, each, strict=True) if tensor is not part],
            [tensor.data_ptr() for tensor in each],
            [tensor.shape for tensor in each],
            [tensor.stride() for tensor in each],
            [tensor.dtype for tensor in each],
            [tensor.device for tensor in each],
            [tensor.is_neg() for tensor in each],
            [tensor.is_conj() for tensor in each],
        )

    @property
    def plain(self) -> bool:
        """Whether each tensor is no more than strided bytes, so that ``places`` says all about it."""
        return all(
            type(each) in _PLAIN and each.layout == torch.strided and not (each.is_neg() or each.is_conj())
            for each in self.parts
        )


def _sharding(tensor: Any) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.placements, tensor.device_mesh


class _SharedContainerError(Exception):
    """A container occurs twice."""


def flatten(state: object) -> Flat:
    """Take a state apart. The containers stay as they are."""
    tensors: list[torch.Tensor] = []
    values: list[Any] = []
    seen: set[int] = set()

    def walk(part: Any) -> Structure:
        kind = type(part)
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return _TENSOR
        if kind not in _CONTAINERS or (
            kind is not list and kind is not tuple and not _KEYS.issuperset(map(type, part))
        ):
            values.append(part)
            return _VALUE
        if kind is tuple:  # which nothing changes, so two equal ones are as good as one
            return "t", tuple([walk(each) for each in part])
        if id(part) in seen:
            raise _SharedContainerError
        seen.add(id(part))
        if kind is dict:
            return "d", tuple(part), tuple([walk(each) for each in part.values()])
        if kind is OrderedDict:
            attributes = walk(part.__dict__) if part.__dict__ else None
            return "o", tuple(part), tuple([walk(each) for each in part.values()]), attributes
        return "l", tuple([walk(each) for each in part])

    try:
        return Flat(walk(state), tensors, values)
    except (_SharedContainerError, RecursionError):
        return Flat(_VALUE, [], [state])


def unflatten(structure: Structure, tensors: Iterator[torch.Tensor], values: Iterator[Any]) -> Any:
    """Put a state together, with new containers. Undoes ``flatten``."""
    if structure == _TENSOR:
        return next(tensors)
    if structure == _VALUE:
        return next(values)
    if structure[0] == "d":
        return dict(_pairs(structure, tensors, values))
    if structure[0] == "o":
        attributes = structure[3] and unflatten(structure[3], tensors, values)
        made = OrderedDict(_pairs(structure, tensors, values))
        made.__dict__.update(attributes or {})
        return made
    children = [unflatten(each, tensors, values) for each in structure[1]]
    return children if structure[0] == "l" else tuple(children)


def _pairs(structure: Structure, tensors: Iterator[torch.Tensor], values: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    for key, each in zip(structure[1], structure[2], strict=True):
        yield key, unflatten(each, tensors, values)


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a state lie, all but those that its values contain."""

    structures: tuple[Structure, ...]
    places: tuple[tuple[object, ...], ...]
    slots: list[TensorSlot]
    keys: list[TensorKey]  # by slot
    known: dict[TensorKey, int]
    frames: list[TensorFrame]  # by slot, of sharded state
    shards: list[TensorShard]
    met: list[list[int | tuple[int]]]  # by tensor of each part: its slot, or the number of its shard
    sources: list[tuple[int, int]]  # by slot: a part of the state, and a tensor in it
    end: int
    table: bytes


class LayoutCache:
    """The layout of the last image, for the next one if all its tensors lie where they lay."""

    def __init__(self) -> None:
        self._last: Layout | None = None

    def find(self, parts: Sequence[Flat]) -> Layout | None:
        last = self._last
        if last is None or last.structures != tuple(part.structure for part in parts):
            return None
        try:
            return last if last.places == places(parts) else None
        except RuntimeError:
            return None

    def keep(self, parts: Sequence[Flat], layout: Callable[[], Layout]) -> None:
        """Keep a layout, unless a tensor is of a kind that ``find`` cannot compare."""
        self._last = layout() if all(part.plain for part in parts) else None


def places(parts: Sequence[Flat]) -> tuple[tuple[object, ...], ...]:
    return tuple(part.places() for part in parts)
