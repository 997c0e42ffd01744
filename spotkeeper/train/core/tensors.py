"""Places of tensors in saved bytes, and the copies of tensors to their places."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorSlot:
    """Place of one tensor in ``state.bin``."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


TensorKey = tuple[object, ...]


def tensor_key(tensor: torch.Tensor) -> TensorKey:
    """Return what identifies a tensor's bytes: its memory, shape and dtype."""
    return (tensor.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


@dataclass(frozen=True)
class TensorCopy:
    """One tensor and its place in staging memory, to which ``run`` copies it. ``name``: its name, for messages."""

    name: str
    base: torch.Tensor  # the memory that becomes ``state.bin``
    slot: TensorSlot
    tensor: torch.Tensor

    def run(self) -> None:
        if self.tensor.device.type == "cpu" and self.tensor.is_contiguous():
            ctypes.memmove(self.base.data_ptr() + self.slot.offset, self.tensor.data_ptr(), self.slot.bytes)
        else:
            view(self.base, self.slot).copy_(self.tensor)

    def equal(self) -> bool:
        """Whether the copy has the tensor's current bits. (``torch.equal`` of the values would fail for NaN.)"""
        there = self.base[self.slot.offset : self.slot.offset + self.slot.bytes]
        return bool(torch.equal(there, self.tensor.reshape(-1).view(torch.uint8).cpu()))


def view(base: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """Return one saved tensor as a view of ``base``, the bytes of ``state.bin``."""
    dtype: Any = getattr(torch, slot.dtype)
    if not slot.bytes:
        return torch.empty(slot.shape, dtype=dtype)  # the offset of an empty tensor may be misaligned for the dtype
    return base[slot.offset : slot.offset + slot.bytes].view(dtype).view(slot.shape)
