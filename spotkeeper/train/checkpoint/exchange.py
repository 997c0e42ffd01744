"""Gives each rank its part of a checkpoint of sharded state, from the ranks that have read the parts.

They send one tensor after the other over the training network, so that no rank needs memory for more than a few parts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from spotkeeper.train.checkpoint.image import Skeleton, unpack
from spotkeeper.train.checkpoint.manifest import Manifest
from spotkeeper.train.checkpoint.strategy import ResumePoint
from spotkeeper.train.core import pickling
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.shards import Meshes, TensorShard
from spotkeeper.train.core.tensors import TensorSlot, view

Need = tuple[int, int]  # a tensor to receive: the rank that saved it, and its slot in that rank's saved state


@dataclass(frozen=True)
class RestorePlan:
    """The checkpoint to restore. ``source``: for each rank that saved a part, the current rank that reads the part.

    ``in_memory``: it is an image in the savers' memories (``peers.py``), not a checkpoint on disk.
    """

    manifest: Manifest
    source: tuple[int, ...]
    in_memory: bool


@dataclass(frozen=True)
class RankImage:
    """The bytes that one rank saved, read and verified."""

    raw: bytes  # the skeleton
    skeleton: Skeleton
    base: torch.Tensor  # the bytes of its tensors

    def tensor(self, slot: int) -> torch.Tensor:
        return view(self.base, self.skeleton.slots[slot])


class Exchange:
    def __init__(self, gang: Gang, plan: RestorePlan, parts: dict[int, RankImage], meshes: Meshes) -> None:
        self._gang = gang
        self._plan = plan
        self._parts = parts
        self._meshes = meshes
        self._same = plan.manifest.world == gang.world
        self._which = gang.rank if self._same else 0  # the saved rank whose skeleton this rank uses
        self._tables: dict[int, tuple[list[TensorSlot], list[TensorShard]]] = {}  # tensors by the rank that saved them
        self._got: dict[Need, torch.Tensor] = {}

    def found(self) -> ResumePoint:
        plan, rank = self._plan, self._gang.rank
        here = "memory" if plan.in_memory else "disk"
        if self._same and plan.source == tuple(range(self._gang.world)):
            part = self._parts[rank]
            state = part.skeleton.join(part.tensor, self._meshes, lambda shard: part.tensor(shard.slot))
            local = unpack(state.local[0])
            return ResumePoint(state.model, state.rest, local, plan.manifest, here, True, not plan.in_memory)
        skeleton = self._share()
        self._send(self._needs(skeleton))
        state = skeleton.join(lambda slot: self._got[self._which, slot], self._meshes, self._part)
        senders = sorted({plan.source[saved] for saved, _ in self._got} - {rank})
        source = "rank " + ", ".join(map(str, senders)) if senders else here
        local = unpack(state.local[0])
        return ResumePoint(state.model, state.rest, local, plan.manifest, source, self._same, not plan.in_memory)

    def _share(self) -> Skeleton:
        """Give all ranks the tensor lists of all saved parts, and the skeletons in use; return this rank's skeleton."""
        asked = range(len(self._plan.source)) if self._same else range(1)
        words: Any = (
            {saved: (part.skeleton.slots, part.skeleton.shards) for saved, part in self._parts.items()},
            {saved: part.raw for saved, part in self._parts.items() if saved in asked},
        )
        skeletons: dict[int, bytes] = {}
        for blob in self._gang.gather(pickling.dumps(words)):
            tables, raws = pickling.loads(blob, "another rank")
            self._tables |= tables
            skeletons |= raws
        return Skeleton.read(skeletons[self._which], f"checkpoint {self._plan.manifest.commit}, from another rank")

    def _needs(self, skeleton: Skeleton) -> list[Need]:
        needs = {(self._which, slot) for slot in skeleton.plain}
        for shard in skeleton.shards:
            needs |= {(saved, chunk.slot) for saved, chunk in self._chunks(shard)}
        return sorted(needs)

    def _chunks(self, shard: TensorShard) -> list[tuple[int, TensorShard]]:
        """Return the saved parts that overlap this rank's part, each with the rank that saved it.

        If several ranks have saved the same region of the tensor, only the first of them counts.
        """
        if self._same:
            return [(self._which, self._tables[self._which][1][shard.number])]
        shape, offset = self._meshes.place(shard)
        found: dict[tuple[int, ...], tuple[int, TensorShard]] = {}
        for saved, (_, saved_shards) in self._tables.items():
            chunk = saved_shards[shard.number]
            if 0 in shape or 0 in chunk.shape or chunk.offset in found:
                continue
            if all(_overlap(*pair) for pair in zip(offset, shape, chunk.offset, chunk.shape, strict=True)):
                found[chunk.offset] = (saved, chunk)
        return list(found.values())

    def _part(self, shard: TensorShard) -> torch.Tensor:
        chunks = self._chunks(shard)
        if self._same:
            return self._got[self._which, chunks[0][1].slot]
        shape, offset = self._meshes.place(shard)
        slot = self._tables[0][0][shard.slot]
        part = torch.empty(shape, dtype=getattr(torch, slot.dtype))
        for saved, chunk in chunks:
            into, out_of = part, self._got[saved, chunk.slot]
            for axis, pair in enumerate(zip(offset, shape, chunk.offset, chunk.shape, strict=True)):
                low, high = _overlap(*pair) or (0, 0)
                into = into.narrow(axis, low - offset[axis], high - low)
                out_of = out_of.narrow(axis, low - chunk.offset[axis], high - low)
            into.copy_(out_of)
        return part

    def _send(self, needs: list[Need]) -> None:
        """Receive the tensors in ``needs``, and send the tensors that other ranks need.

        All ranks go through the pairs of receiver and sender in the same order. So a pair only ever waits for earlier
        pairs, and ranks cannot wait for each other in a circle.
        """
        told: list[list[Need]] = [pickling.loads(blob, "a rank") for blob in self._gang.gather(pickling.dumps(needs))]
        for receiver, wanted in enumerate(told):
            for sender in sorted({self._plan.source[saved] for saved, _ in wanted}):
                stream = [need for need in wanted if self._plan.source[need[0]] == sender]
                if sender == receiver == self._gang.rank:
                    self._got |= {(saved, slot): self._parts[saved].tensor(slot) for saved, slot in stream}
                elif sender == self._gang.rank:
                    self._give(receiver, stream)
                elif receiver == self._gang.rank:
                    self._take(sender, stream)

    def _give(self, receiver: int, stream: list[Need]) -> None:
        data = bytearray()
        for saved, slot in stream:
            part = self._parts[saved]
            where = part.skeleton.slots[slot]
            data += part.base[where.offset : where.offset + where.bytes].numpy().tobytes()
        self._gang.send(memoryview(bytearray(hashlib.sha256(data).digest())), receiver)
        if data:
            self._gang.send(memoryview(data), receiver)

    def _take(self, sender: int, stream: list[Need]) -> None:
        slots = [self._tables[saved][0][slot] for saved, slot in stream]
        told, data = bytearray(32), bytearray(sum(slot.bytes for slot in slots))
        self._gang.receive(memoryview(told), sender, lambda _: None)
        if data:
            self._gang.receive(memoryview(data), sender, lambda _: None)
        if hashlib.sha256(data).digest() != told:
            raise RuntimeError(
                f"checkpoint {self._plan.manifest.commit} arrived damaged from rank {sender}: start again"
            )
        at = 0
        for need, slot in zip(stream, slots, strict=True):
            self._got[need] = _own(memoryview(data)[at : at + slot.bytes], slot)
            at += slot.bytes


def _own(data: memoryview, slot: TensorSlot) -> torch.Tensor:
    """Copy received bytes into a new tensor, because in ``data`` they may be misaligned for the dtype."""
    flat_ = torch.empty(slot.bytes, dtype=torch.uint8)
    if slot.bytes:
        flat_.copy_(torch.frombuffer(data, dtype=torch.uint8))
    kind: torch.Tensor = flat_.view(getattr(torch, slot.dtype)).view(slot.shape)
    return kind


def _overlap(offset: int, count: int, other: int, others: int) -> tuple[int, int] | None:
    """Return (first, end) of the overlap of two ranges on one axis; None if they are disjoint."""
    low, high = max(offset, other), min(offset + count, other + others)
    return (low, high) if low < high else None
