"""Copies tensors of CUDA devices into the saver's memory beside the work that the devices do.

Each device copies on a stream of its own, once it has done what was queued before the copy, and the stream of the next
optimizer's step waits for it there: neither the loop nor the device stands still. The memory must be registered with
CUDA (page-locked) for that; a copy into other memory would stop the loop until the device has done its work.

Sources: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html (``cudaHostRegister``),
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams.
"""

from __future__ import annotations

import itertools
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from spotkeeper.train.checkpoint.protocol import IMAGES
from spotkeeper.train.core.tensors import TensorCopy, view

_KEPT = IMAGES  # registered memories: older ones have been replaced by larger ones


class PinnedMemories:
    """The memories registered with CUDA. A registered memory stays mapped, so no other one gets its address."""

    def __init__(self) -> None:
        self._pinned: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()

    def pin(self, base: torch.Tensor, device: torch.device) -> bool:
        """Register a memory, unless it is registered; return whether it is."""
        key = (base.data_ptr(), base.numel())
        if key in self._pinned:
            self._pinned.move_to_end(key)
            return True
        while len(self._pinned) >= _KEPT:
            (address, _), _ = self._pinned.popitem(last=False)
            torch.cuda.cudart().cudaHostUnregister(address)
        with torch.cuda.device(device):
            if int(torch.cuda.cudart().cudaHostRegister(*key, 0)):
                _forget_error(device)
                return False
        self._pinned[key] = base
        return True


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the error of a refused call until somebody asks: torch's next kernel would raise it."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return


class DeviceCopies:
    """The copies of one image from CUDA devices. They begin at once; their tensors may not change before ``hold``.

    Args:
        copies: from tensors of any CUDA devices, into registered memory.
        streams: the stream of each device that copies; a device's first copy adds it.

    Raises:
        RuntimeError: a device refuses.
    """

    def __init__(self, copies: Sequence[TensorCopy], streams: dict[torch.device, torch.cuda.Stream]) -> None:
        self._ends: list[tuple[torch.device, torch.cuda.Event]] = []
        for device, each in itertools.groupby(sorted(copies, key=_index), key=lambda copy: copy.tensor.device):
            stream = streams.get(device) or streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for copy in each:
                    view(copy.base, copy.slot).copy_(copy.tensor, non_blocking=True)
                end = torch.cuda.Event()
                end.record(stream)
            self._ends.append((device, end))

    def hold(self) -> None:
        """Let what the current streams get from now on wait for the copies. The caller does not wait."""
        for device, end in self._ends:
            torch.cuda.current_stream(device).wait_event(end)

    def ready(self) -> bool:
        """Whether all bytes are there, or a device has failed."""
        try:
            return all(end.query() for _, end in self._ends)
        except RuntimeError:
            return True

    def wait(self) -> RuntimeError | None:
        """Wait until all bytes are there; return why a device has failed."""
        try:
            for _, end in self._ends:
                end.synchronize()
        except RuntimeError as error:
            return error
        return None


class DeviceCopier:
    """Begins copies from CUDA devices, and keeps what they share: registered memories, and a stream for each device."""

    def __init__(self) -> None:
        self._memories = PinnedMemories()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def can(self, copies: Iterable[TensorCopy]) -> bool:
        """Whether the loop can go on during these copies."""
        return all(self._memories.pin(copy.base, copy.tensor.device) for copy in copies)

    def begin(self, copies: Sequence[TensorCopy]) -> DeviceCopies:
        """See :class:`DeviceCopies`."""
        return DeviceCopies(copies, self._streams)


def sums(copies: Iterable[TensorCopy]) -> list[int]:
    """Return a checksum of the bytes that each copy has in the saver's memory."""
    spans = ((copy.slot.offset, copy.slot.offset + copy.slot.bytes, copy.base) for copy in copies)
    return [zlib.crc32(memoryview(base[begin:end].numpy())) for begin, end, base in spans]


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are on a CUDA device."""
    return bool(tensor.is_cuda)


def _index(copy: TensorCopy) -> int:
    return copy.tensor.device.index or 0
