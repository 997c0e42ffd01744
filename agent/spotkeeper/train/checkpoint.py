"""Turn a run's state into an image of bytes, and back. Knows tensors, not files.

An image is what the saver writes and what peers send each other::

    state.bin      the bytes of every tensor, one after the other
    skeleton.pkl   everything else: where each tensor lies, and pickles that point to them

The skeleton travels with each save, so state that appears late (an optimizer's moments)
or changes its size only means a larger image. Replicated state has a common part, the
same on all ranks, and one local part per rank. Of sharded state each rank has an image of
its own (``dcp`` names its files): its parts of shared tensors, and what is its alone.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from spotkeeper.train import dcp
from spotkeeper.train.durable import PAGE
from spotkeeper.train.messages import Stretch
from spotkeeper.train.shards import Meshes, Shard, describe, is_shared, local_part
from spotkeeper.train.store import SKELETON, STATE, Manifest

_ALIGN = 64  # bytes; a cache line, and more than any dtype wants


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in ``state.bin``."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class State:
    """All that a run is.

    ``model`` and ``rest`` are the common part (``model`` apart, because it is copied into
    the module's own tensors, while the owners of the rest keep what they are given);
    ``local`` is one packed image per rank.
    """

    model: object
    rest: object
    local: tuple[bytes, ...]


class Image:
    """State made ready to be staged: sizes are known, bytes are still where they were."""

    def __init__(self, state: State, *, rank: int | None = None) -> None:
        """``rank``: the state is sharded, and this its rank's part; None: replicated."""
        self._tensors: list[torch.Tensor] = []
        self._slots: list[Slot] = []
        self._frames: list[dcp.Frame] = []  # around each tensor, where sharded
        self._known: dict[tuple[object, ...], int] = {}
        self._shards: list[Shard] = []
        self._plain: set[int] = set()  # slots of tensors that are not shared
        self._named: dict[int, tuple[int, Shard | None]] = {}  # by the object that was met
        self._sharded = rank is not None
        self._state = state  # its tensors keep their identity for as long as they live
        self._end = 0
        parts = {"model": self._pickle(state.model), "rest": self._pickle(state.rest), "local": state.local}
        table: dict[str, object] = {"slots": self._slots}
        if self._sharded:
            table |= {"shards": self._shards, "plain": sorted(self._plain)}
        self._skeleton = pickle.dumps(table | parts, pickle.HIGHEST_PROTOCOL)
        names = (STATE, SKELETON) if rank is None else (dcp.data_name(rank), dcp.skeleton_name(rank))
        self.stretches = lay_out(self._end, len(self._skeleton), names)

    @property
    def size(self) -> int:
        """Bytes of memory it takes."""
        return extent(self.stretches)

    def copy_to(self, memory: memoryview, places: tuple[int, int] | None = None) -> None:
        """Copy all bytes into ``memory``, on one thread; ``places``: of the two files there, else as laid out.

        Two took 0.8 s where one took 0.04 s, on a machine whose cores were busy training.
        """
        begin, at = places or (0, self.stretches[1].offset)
        memory[at : at + len(self._skeleton)] = self._skeleton
        if not self._end:
            return
        memory = memory[begin : begin + self._end]
        base = torch.frombuffer(memory, dtype=torch.uint8, count=self._end)
        for slot, frame in zip(self._slots, self._frames, strict=self._sharded):
            memory[slot.offset - len(frame.before) : slot.offset] = frame.before
            memory[slot.offset + slot.bytes : slot.offset + slot.bytes + len(frame.after)] = frame.after
        for slot, tensor in zip(self._slots, self._tensors, strict=True):
            if slot.bytes and tensor.device.type == "cpu" and tensor.is_contiguous():
                ctypes.memmove(base.data_ptr() + slot.offset, tensor.data_ptr(), slot.bytes)
            elif slot.bytes:
                view(base, slot).copy_(tensor)

    def chunks(self, named: object) -> list[dcp.Chunk]:
        """What other tools may find in this rank's file: the tensors that ``named`` leads to."""
        found = []
        for path, tensor in dcp.tensors(named):
            number, shard = self._named[id(tensor)]
            slot, around = self._slots[number], self._frames[number]
            size, offset = (shard.size, shard.offset) if shard else (slot.shape, (0,) * len(slot.shape))
            start = slot.offset - len(around.before)
            length = len(around.before) + slot.bytes + len(around.after)
            found.append(dcp.Chunk(path, tensor.dtype, size, offset, slot.shape, start, length))
        return found

    def _pickle(self, part: object) -> bytes:
        out = io.BytesIO()
        _Pickler(out, self._meet).dump(part)
        return out.getvalue()

    def _meet(self, tensor: torch.Tensor) -> int | tuple[int]:
        """A tensor's number among the slots; of a shared one its number among the shards, as a tuple."""
        if self._sharded and is_shared(tensor):
            shard = describe(tensor, len(self._shards), self._add(local_part(tensor)))
            self._shards.append(shard)
            self._named[id(tensor)] = shard.slot, shard
            return (shard.number,)
        number = self._add(tensor)
        self._plain.add(number)
        self._named[id(tensor)] = number, None
        return number

    def _add(self, tensor: torch.Tensor) -> int:
        """The number of a tensor; tied ones are written once."""
        _refuse(tensor)
        tensor = tensor.detach().resolve_conj().resolve_neg()  # such views are a bit beside other bytes
        key = (tensor.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        number = self._known.get(key) if tensor.numel() else None
        if number is None:
            size = tensor.numel() * tensor.element_size()
            number = len(self._slots)
            before = after = 0
            if self._sharded:
                self._frames.append(dcp.frame(tensor.dtype, tuple(tensor.shape)))
                before, after = len(self._frames[-1].before), len(self._frames[-1].after)
            name = str(tensor.dtype).removeprefix("torch.")
            self._slots.append(Slot(name, tuple(tensor.shape), self._end + before, size))
            self._tensors.append(tensor)  # also keeps it alive, so that its address stays its own
            self._known[key] = number
            self._end += -(-(before + size + after) // _ALIGN) * _ALIGN
        return number


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, meet: Callable[[torch.Tensor], int | tuple[int]]) -> None:
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self._meet = meet

    def persistent_id(self, obj: Any) -> int | tuple[int] | None:
        return self._meet(obj) if isinstance(obj, torch.Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, load: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._load = load

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._load(pid)


@dataclass(frozen=True)
class Skeleton:
    """All of an image but its tensors' bytes, not yet put together. ``plain``: slots of tensors that are not shared."""

    slots: list[Slot]
    shards: list[Shard]
    plain: list[int]
    model: bytes
    rest: bytes
    local: tuple[bytes, ...]

    @classmethod
    def read(cls, data: bytes | memoryview) -> Skeleton:
        """Of bytes whose hash holds."""
        content = pickle.loads(data)  # noqa: S301 - the job's own
        tables = content.get("shards", []), content.get("plain", [])
        return cls(content["slots"], *tables, content["model"], content["rest"], content["local"])

    def join(
        self,
        plain: Callable[[int], torch.Tensor],
        meshes: Meshes | None = None,
        part: Callable[[Shard], torch.Tensor] | None = None,
    ) -> State:
        """The state, of tensors by their slots (``plain``) and of parts of shared ones.

        Optimizers adopt what they load, and set_rng_state fails on a view: all but the model gets copies.
        """

        def load(pid: Any, last: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            if isinstance(pid, int):
                return last(plain(pid))
            assert meshes is not None and part is not None
            shard = self.shards[pid[0]]
            return meshes.join(shard, last(part(shard)))

        model = _Unpickler(self.model, lambda pid: load(pid, lambda tensor: tensor)).load()
        rest = _Unpickler(self.rest, lambda pid: load(pid, torch.clone)).load()
        return State(model, rest, self.local)


def thaw(memory: memoryview, stretches: tuple[Stretch, ...]) -> State:
    """The state of an image whose hashes hold.

    Tensors of ``model`` look into ``memory``, which must stay as it is until they are
    copied; all others are copies.
    """
    data, part = stretches
    skeleton = Skeleton.read(memory[part.offset : part.offset + part.bytes])
    base = flat(memory, data.bytes)
    return skeleton.join(lambda number: view(base, skeleton.slots[number]))


def flat(memory: memoryview, count: int) -> torch.Tensor:
    """The first bytes of it, as a tensor."""
    return torch.frombuffer(memory, dtype=torch.uint8, count=count) if count else torch.empty(0, dtype=torch.uint8)


def pack(part: object) -> bytes:
    """A small part as bytes of its own, to be sent between ranks."""
    image = Image(State(None, part, ()))
    memory = bytearray(image.size)
    image.copy_to(memoryview(memory))
    state, skeleton = image.stretches
    return b"".join((state.bytes.to_bytes(8, "little"), skeleton.bytes.to_bytes(8, "little"), memory))


def unpack(data: bytes) -> Any:
    """The inverse of ``pack``."""
    state, skeleton = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8))
    return thaw(memoryview(bytearray(data[16:])), lay_out(state, skeleton)).rest


def lay_out(state: int, skeleton: int, names: tuple[str, str] = (STATE, SKELETON)) -> tuple[Stretch, ...]:
    """Where the two files of an image lie in memory; each begins on a page, for O_DIRECT."""
    return (Stretch(names[0], 0, state), Stretch(names[1], -(-state // PAGE) * PAGE, skeleton))


def lay_out_of(manifest: Manifest) -> tuple[Stretch, ...]:
    """The same, of a checkpoint that exists."""
    sizes = {file.name: file.bytes for file in manifest.files}
    return lay_out(sizes[STATE], sizes[SKELETON])


def extent(stretches: tuple[Stretch, ...]) -> int:
    """Bytes of memory that an image takes, whole pages."""
    last = stretches[-1]
    return last.offset + -(-last.bytes // PAGE) * PAGE


def view(base: torch.Tensor, slot: Slot) -> torch.Tensor:
    """One tensor of an image, without a copy."""
    dtype: Any = getattr(torch, slot.dtype)
    if not slot.bytes:
        return torch.empty(slot.shape, dtype=dtype)  # it may begin where no number of this type can
    return base[slot.offset : slot.offset + slot.bytes].view(dtype).view(slot.shape)


def _refuse(tensor: torch.Tensor) -> None:
    """Say what cannot be saved, instead of saving something else."""
    kind: Literal["sparse", "quantized", "sharded", "meta"] | None = None
    if is_shared(tensor):
        kind = "sharded"
    elif tensor.layout != torch.strided:
        kind = "sparse"
    elif tensor.is_quantized:
        kind = "quantized"
    elif tensor.device.type == "meta":
        kind = "meta"
    if kind:
        hint = " as replicated state; attach(model=) the module that is sharded" if kind == "sharded" else ""
        raise TypeError(f"cannot save a {kind} tensor of shape {tuple(tensor.shape)}{hint}")
