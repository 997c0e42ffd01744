"""Turns a run's state into its *image*, the bytes to save, and back.

The saver writes images to disk, and ranks send them to each other::

    state.bin      the bytes of every tensor, one after another
    skeleton.pkl   everything else: the structure of the state, the place of each tensor, and pickles of other values,
                   which may refer to tensors

Each save has its own skeleton, so tensors may be added (an optimizer's moments) or change their size between saves. The
image of replicated state consists of the common state, equal on all ranks, and each rank's local state. With sharded
state each rank has an image (``core/shards.py`` names the files): its parts of sharded tensors, and its local state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from spotkeeper.train.checkpoint.durable import PAGE, freed_after, round_up
from spotkeeper.train.checkpoint.manifest import Manifest
from spotkeeper.train.checkpoint.protocol import Stretch
from spotkeeper.train.checkpoint.store import SKELETON, STATE
from spotkeeper.train.core import pickling, shards
from spotkeeper.train.core.shards import Meshes, TensorShard, describe, is_shared, local_part
from spotkeeper.train.core.small_parts import PendingParts
from spotkeeper.train.core.tensors import TensorCopy, TensorKey, TensorSlot, tensor_key, view
from spotkeeper.train.core.tree import Flat, Layout, LayoutCache, Structure, flatten, places, unflatten

_NONE: Mapping[Any, str] = {}
_ALIGN = 64  # bytes: a cache line, and more than any dtype needs
_FRAME = 64  # bytes, and more than a pickle adds to each rank's own state
_LARGE = 1 << 16  # bytes: tensors from this size on have whole pages, which can be freed


@dataclass(frozen=True)
class RunState:
    """The state of a run, as it is saved: model, other common state, and the local state of each rank."""

    model: object  # parameters; a load copies them into the module's existing tensors
    rest: object  # other common state; after a load, parts may keep its tensors
    local: tuple[bytes, ...]  # one packed state per rank; empty while they are ``pending``
    optimizers: object = None  # state of replicated optimizers; after a load they keep its tensors
    pending: PendingParts | None = None  # local states that are still exchanged; ``Image.finish`` waits for them


class Image:
    """A state before its copy into staging memory: the layout is known, the bytes are still in the tensors."""

    def __init__(self, state: RunState, *, rank: int | None = None, cache: LayoutCache | None = None) -> None:
        """Lay out the state.

        Args:
            state: the state; it may not change before ``copy_to``.
            rank: this rank if the state is sharded; None for replicated state.
            cache: layouts of earlier images.
        """
        self._tensors: list[torch.Tensor] = []
        self._slots: list[TensorSlot] = []
        self._keys: list[TensorKey] = []
        self._frames: list[shards.TensorFrame] = []  # one for each tensor of sharded state
        self._known: dict[TensorKey, int] = {}
        self._shards: list[TensorShard] = []
        self._plain: set[int] = set()  # slots of tensors that are not sharded
        self._named: dict[int, tuple[int, TensorShard | None]] = {}  # slot and shard by the tensor's id
        self._sharded = rank is not None
        self._state = state  # keeps its tensors alive, so that ids stay valid
        self._end = 0
        parts = [flatten(each) for each in (state.model, state.rest, state.optimizers)]
        if cache is not None and (layout := cache.find(parts)) is not None:
            self._adopt(layout, parts)
            fixed = layout.table
        else:
            fixed = self._lay_out(parts, cache)
        count, shared, plain = len(self._slots), len(self._shards), set(self._plain)
        values = [pickling.dumps(part.values, self._meet) for part in parts]
        self._table: dict[str, object] = {"fixed": fixed, "values": values, "slots": _tuples(self._slots[count:])}
        if self._sharded:
            self._table |= {"shards": self._shards[shared:], "plain": sorted(self._plain - plain)}
        self._names = (STATE, SKELETON) if rank is None else (shards.data_name(rank), shards.skeleton_name(rank))
        pending = state.pending
        self._whole(state.local, pending.bound + _FRAME * (pending.world + 1) if pending else 0)

    def _lay_out(self, parts: Sequence[Flat], cache: LayoutCache | None) -> bytes:
        """Give each tensor its place; return the pickled table of all places."""
        sources: list[tuple[int, int]] = []
        met: list[list[int | tuple[int]]] = []
        for number, part in enumerate(parts):
            met.append([])
            for at, tensor in enumerate(part.tensors):
                met[-1].append(self._meet(tensor))
                if len(sources) < len(self._slots):
                    sources.append((number, at))
        structures = tuple(part.structure for part in parts)
        fixed: dict[str, object] = {"slots": _tuples(self._slots), "parts": list(zip(structures, met, strict=True))}
        if self._sharded:
            fixed |= {"shards": self._shards, "plain": sorted(self._plain)}
        table = pickling.dumps(fixed)
        if cache is not None:
            tables = list(self._slots), list(self._keys), dict(self._known), list(self._frames), list(self._shards)
            end = self._end
            cache.keep(parts, lambda: Layout(structures, places(parts), *tables, met, sources, end, table))
        return table

    def _adopt(self, layout: Layout, parts: Sequence[Flat]) -> None:
        """Take the places of an earlier layout, and this state's tensors."""
        self._slots, self._keys, self._known = list(layout.slots), list(layout.keys), dict(layout.known)
        self._frames, self._shards, self._end = list(layout.frames), list(layout.shards), layout.end
        found = (parts[number].parts[at] for number, at in layout.sources)
        self._tensors = [each.detach() if each.requires_grad else each for each in found]
        for part, met in zip(parts, layout.met, strict=True) if self._sharded else ():
            for tensor, pid in zip(part.tensors, met, strict=True):
                self._note(tensor, pid)

    def _whole(self, local: tuple[bytes, ...], room: int = 0) -> None:
        """Complete the skeleton with the ranks' own states. ``room``: bytes that it may still grow by."""
        self._skeleton = pickling.dumps(self._table | {"local": local})
        self.stretches = lay_out(self._end, len(self._skeleton) + room, self._names)

    @property
    def size(self) -> int:
        """Size in memory, bytes; at most this if the ranks' own states are pending."""
        return extent(self.stretches)

    def finish(self, memory: memoryview) -> str:
        """Write what was pending when ``copy_to`` filled ``memory``. Return why the image cannot be complete, or ""."""
        pending = self._state.pending
        if pending is None:
            return ""
        try:
            parts = pending.parts()
        except RuntimeError as error:
            return f"the exchange of the ranks' own states failed: {error}"
        if parts is None:
            return "a rank's own state has grown by more than an eighth since the last save or image"
        self._whole(parts)
        at = self.stretches[1].offset
        memory[at : at + len(self._skeleton)] = self._skeleton
        return ""

    def copy_to(
        self, memory: memoryview, places: tuple[int, int] | None = None, later: Mapping[TensorKey, str] = _NONE
    ) -> list[TensorCopy]:
        """Copy all bytes into ``memory``, except the tensors in ``later``; return the copies that are still to be made.

        One thread copies: on a machine whose cores were busy training, one thread took 0.04 s and two took 0.8 s.

        Args:
            memory: the memory to fill.
            places: offsets of the two files in ``memory``; default: ``lay_out``'s.
            later: names, by ``tensor_key``, of the tensors that the caller copies later.
        """
        begin, at = places or (0, self.stretches[1].offset)
        memory[at : at + len(self._skeleton)] = self._skeleton
        if not self._end:
            return []
        memory = memory[begin : begin + self._end]
        base = torch.frombuffer(memory, dtype=torch.uint8, count=self._end)
        for slot, frame in zip(self._slots, self._frames, strict=self._sharded):
            memory[slot.offset - len(frame.before) : slot.offset] = frame.before
            memory[slot.offset + slot.bytes : slot.offset + slot.bytes + len(frame.after)] = frame.after
        left = []
        for slot, tensor, key in zip(self._slots, self._tensors, self._keys, strict=True):
            if not slot.bytes:
                continue
            name = later.get(key) if later else None
            copy = TensorCopy(name or "", base, slot, tensor)
            if name is None:
                copy.run()
            else:
                left.append(copy)
        return left

    def chunks(self, named: object) -> list[shards.Chunk]:
        """Describe the tensors in ``named`` for the ``.metadata`` file of ``torch.distributed.checkpoint``."""
        found = []
        for path, tensor in shards.tensors(named):
            number, shard = self._named[id(tensor)]
            slot, around = self._slots[number], self._frames[number]
            size, offset = (shard.size, shard.offset) if shard else (slot.shape, (0,) * len(slot.shape))
            start = slot.offset - len(around.before)
            length = len(around.before) + slot.bytes + len(around.after)
            found.append(shards.Chunk(path, tensor.dtype, size, offset, slot.shape, start, length))
        return found

    def _meet(self, tensor: torch.Tensor) -> int | tuple[int]:
        """Return the placeholder for a tensor: its slot number, or ``(shard number,)`` if it is sharded."""
        if self._sharded and is_shared(tensor):
            shard = describe(tensor, len(self._shards), self._add(local_part(tensor)))
            self._shards.append(shard)
            return self._note(tensor, (shard.number,))
        return self._note(tensor, self._add(tensor))

    def _note(self, tensor: torch.Tensor, pid: int | tuple[int]) -> int | tuple[int]:
        if isinstance(pid, int):
            self._plain.add(pid)
            self._named[id(tensor)] = pid, None
        else:
            shard = self._shards[pid[0]]
            self._named[id(tensor)] = shard.slot, shard
        return pid

    def _add(self, tensor: torch.Tensor) -> int:
        """Return a tensor's slot number; tied tensors share a slot."""
        _refuse(tensor)
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():  # a view that differs only by a flag
            tensor = tensor.resolve_conj().resolve_neg()
        key = tensor_key(tensor)
        number = self._known.get(key) if tensor.numel() else None
        if number is None:
            size = tensor.numel() * tensor.element_size()
            number = len(self._slots)
            before = after = 0
            if self._sharded:
                self._frames.append(shards.frame(tensor.dtype, tuple(tensor.shape)))
                before, after = len(self._frames[-1].before), len(self._frames[-1].after)
            name = str(tensor.dtype).removeprefix("torch.")
            self._slots.append(TensorSlot(name, tuple(tensor.shape), self._end + before, size))
            self._tensors.append(tensor)  # also keeps its address in use
            self._keys.append(key)
            self._known[key] = number
            self._end += -(-(before + size + after) // _ALIGN) * _ALIGN
        return number


@dataclass(frozen=True)
class Skeleton:
    """A saved state without the bytes of its tensors. ``plain``: slots of tensors that are not sharded."""

    slots: list[TensorSlot]
    shards: list[TensorShard]
    plain: list[int]
    parts: list[tuple[Structure, list[Any]]]  # model, other state, optimizers: their structure and tensors
    values: list[bytes]  # of the same parts
    local: tuple[bytes, ...]
    where: str = SKELETON

    @classmethod
    def read(cls, data: bytes | memoryview, where: str) -> Skeleton:
        """Read a skeleton after its hash was checked. ``where``: its origin, for messages."""
        content = pickling.loads(data, where)
        fixed = pickling.loads(content["fixed"], where)
        slots = [TensorSlot(*each) for each in fixed["slots"] + content["slots"]]
        shared, plain = (fixed.get(name, []) + content.get(name, []) for name in ("shards", "plain"))
        return cls(slots, shared, plain, fixed["parts"], content["values"], content["local"], where)

    def join(
        self,
        plain: Callable[[int], torch.Tensor],
        meshes: Meshes | None = None,
        part: Callable[[TensorShard], torch.Tensor] | None = None,
        keep: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> RunState:
        """Rebuild the state. ``plain`` returns a slot's tensor, ``part`` returns this rank's part of a sharded tensor.

        The model gets these tensors. All other state gets copies, because parts keep the tensors that they load, and
        set_rng_state fails on views. ``keep`` returns what optimizers get: they write into it, and never resize it. It
        is called for a slot that nothing else has; a slot's further uses are copies.
        """
        seen: set[int] = set()

        def load(pid: Any, last: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            if isinstance(pid, int):
                seen.add(pid)
                return last(plain(pid))
            assert meshes is not None and part is not None
            shard = self.shards[pid[0]]
            return meshes.join(shard, last(part(shard)))

        def part_of(number: int, get: Callable[[Any], torch.Tensor]) -> Any:
            structure, tensors = self.parts[number]
            values = pickling.loads(self.values[number], self.where, get)
            return unflatten(structure, map(get, tensors), iter(values))

        model = part_of(0, lambda pid: load(pid, lambda tensor: tensor))
        rest = part_of(1, lambda pid: load(pid, torch.clone))
        kept = part_of(2, lambda pid: load(pid, torch.clone if pid in seen else keep))
        return RunState(model, rest, self.local, kept)


def thaw(memory: memoryview, stretches: tuple[Stretch, ...], where: str = "", *, ours: bool = False) -> RunState:
    """Rebuild the state from saved bytes whose hashes were checked. ``where``: the bytes' origin, for messages.

    Tensors of ``model`` are views of ``memory``, so ``memory`` must not change until the model has copied them. Other
    tensors are copies.

    Args:
        memory: the saved bytes.
        stretches: the files in them.
        where: the bytes' origin, for messages.
        ours: whether ``memory`` is a ``private_memory`` or a ``CopyOnWrite`` that the caller uses no more. Then
            optimizers' large tensors are views of it too, and each large tensor's pages are freed with the tensor.
    """
    data, part = stretches
    skeleton = Skeleton.read(memory[part.offset : part.offset + part.bytes], where or part.name)
    base = flat(memory, data.bytes)

    @functools.cache  # the pages must stay for another use of the slot
    def plain(number: int) -> torch.Tensor:
        slot = skeleton.slots[number]
        if not ours or slot.bytes < _LARGE:
            return view(base, slot)
        piece = freed_after(memory, data.offset + slot.offset, slot.bytes)  # a storage of its own, as of any tensor
        return view(flat(piece, slot.bytes), replace(slot, offset=0))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if ours and tensor.numel() * tensor.element_size() >= _LARGE else tensor.clone()

    return skeleton.join(plain, keep=keep)


def flat(memory: memoryview, count: int) -> torch.Tensor:
    """View the first ``count`` bytes as a tensor."""
    return torch.frombuffer(memory, dtype=torch.uint8, count=count) if count else torch.empty(0, dtype=torch.uint8)


def pack(part: object) -> bytes:
    """Serialize a small piece of the state, to send it between ranks."""
    image = Image(RunState(None, part, ()))
    memory = bytearray(image.size)
    image.copy_to(memoryview(memory))
    state, skeleton = image.stretches
    return b"".join((state.bytes.to_bytes(8, "little"), skeleton.bytes.to_bytes(8, "little"), memory))


def unpack(data: bytes) -> Any:
    """Undo ``pack``."""
    state, skeleton = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8))
    return thaw(memoryview(bytearray(data[16:])), lay_out(state, skeleton), "a rank's own state").rest


def lay_out(state: int, skeleton: int, names: tuple[str, str] = (STATE, SKELETON)) -> tuple[Stretch, ...]:
    """Lay out ``state.bin`` and ``skeleton.pkl`` in memory, given their sizes. Each begins on a page, for O_DIRECT."""
    return (Stretch(names[0], 0, state), Stretch(names[1], -(-state // PAGE) * PAGE, skeleton))


def lay_out_node(
    ranks: Sequence[int], states: Sequence[int], skeletons: Sequence[int]
) -> tuple[tuple[Stretch, ...], list[tuple[int, int]]]:
    """Lay out the files of sharded state of one node in memory, two for each rank, given their sizes in bytes.

    Also return the offsets of each rank's two files.
    """
    stretches: list[Stretch] = []
    starts = []
    end = 0
    for rank, state, skeleton in zip(ranks, states, skeletons, strict=True):
        first = Stretch(shards.data_name(rank), end, state)
        second = Stretch(shards.skeleton_name(rank), after(first), skeleton)
        stretches += first, second
        starts.append((first.offset, second.offset))
        end = after(second)
    return tuple(stretches), starts


def after(stretch: Stretch) -> int:
    """Return where the next file begins."""
    return stretch.offset + max(PAGE, round_up(stretch.bytes))


def lay_out_of(manifest: Manifest) -> tuple[Stretch, ...]:
    """Return the layout of an existing checkpoint."""
    sizes = {file.name: file.bytes for file in manifest.files}
    return lay_out(sizes[STATE], sizes[SKELETON])


def extent(stretches: tuple[Stretch, ...]) -> int:
    """Return the bytes that a layout takes in memory, rounded up to whole pages."""
    last = stretches[-1]
    return last.offset + -(-last.bytes // PAGE) * PAGE


def _tuples(slots: Sequence[TensorSlot]) -> list[tuple[object, ...]]:
    return [(each.dtype, each.shape, each.offset, each.bytes) for each in slots]


def _refuse(tensor: torch.Tensor) -> None:
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
        hint = " as replicated state; give attach(model=) the sharded module" if kind == "sharded" else ""
        raise TypeError(f"cannot save a {kind} tensor of shape {tuple(tensor.shape)}{hint}")
