"""Restores sharded state: finds a checkpoint whose parts are all on these machines and gives each rank its part.

If the number of ranks is unchanged and each rank's part is in its own folder, each rank reads its own part. Otherwise
the ranks that have parts read them and send, over the training network, each rank the tensors that it needs. They send
one tensor after the other, so that no rank needs memory for more than a few parts. All ranks take part in
a restore.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.durable import private_memory
from spotkeeper.train.checkpoint.image import Skeleton, TensorSlot, flat, unpack, view
from spotkeeper.train.checkpoint.peers import KeptImage
from spotkeeper.train.checkpoint.store import Manifest, SkippedCheckpoint
from spotkeeper.train.checkpoint.strategy import SAVE, ResumePoint
from spotkeeper.train.core import pickling, shards
from spotkeeper.train.core.errors import AttachError
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.shards import Meshes, TensorShard

Need = tuple[int, int]  # a tensor to receive: the rank that saved it, and its slot in that rank's saved state
_WHOLE, _UNREADABLE, _CORRUPT = b"whole", b"unreadable", b"corrupt"  # a rank's verdict on the parts it has read


_Key = tuple[Commit, str]  # a checkpoint and the name of its save: an image of the same step has another name


@dataclass(frozen=True)
class _Part:
    """What this rank can read of a checkpoint. ``files``: the files that are in memory, by name; others are on disk."""

    manifest: Manifest
    files: Mapping[str, memoryview]


@dataclass(frozen=True)
class _RestorePlan:
    """The checkpoint to restore. ``source``: for each rank that saved a part, the current rank that reads the part.

    ``in_memory``: it is an image in the savers' memories (``peers.py``), not a checkpoint on disk.
    """

    commit: Commit
    manifest: Manifest
    source: tuple[int, ...]
    in_memory: bool

    @property
    def key(self) -> _Key:
        return self.commit, self.manifest.versions.get(SAVE, "")


@dataclass(frozen=True)
class _RankImage:
    """The bytes that one rank saved, read and verified."""

    raw: bytes  # the skeleton
    skeleton: Skeleton
    base: torch.Tensor  # the bytes of its tensors

    def tensor(self, slot: int) -> torch.Tensor:
        return view(self.base, self.skeleton.slots[slot])


class ShardRestorer:
    """Restores one rank's state. ``skipped``: checkpoints that were passed over, with reasons."""

    def __init__(
        self,
        gang: Gang,
        folder: Path | None,
        meshes: Meshes,
        *,
        keeps: bool,
        managed: bool,
        kept: Iterable[KeptImage] = (),
    ) -> None:
        """Scan this node's folder.

        Args:
            kept: sealed images in the memory of this node's saver.
            keeps: whether this rank moves damaged checkpoints of its node to quarantine; one rank of each node does.
            managed: whether an agent started this process; the agent has then provided all available checkpoints.
        """
        self._gang = gang
        self._folder = folder
        self._meshes = meshes
        self._keeps = keeps
        self._managed = managed
        self._mine: dict[_Key, _Part] = {}
        self.skipped: list[SkippedCheckpoint] = []
        for commit in store.scan(folder) if folder else ():
            try:
                self._add(_Part(store.read_part(folder or "", commit), {}))
            except ValueError as error:
                self.skipped.append(SkippedCheckpoint(str(commit), str(error)))
        for image in kept:
            self._add(_Part(image.manifest, image.files))

    def _add(self, part: _Part) -> None:
        """Add what this rank can read; a machine's own image and a neighbour's of the same step are one part."""
        key = part.manifest.commit, part.manifest.versions.get(SAVE, "")
        if (there := self._mine.get(key)) is not None:
            files = {file.name: file for file in (*part.manifest.files, *there.manifest.files)}
            part = _Part(replace(there.manifest, files=tuple(files.values())), {**part.files, **there.files})
        self._mine[key] = part

    def own(self, found: ResumePoint) -> Manifest | None:
        """Return this node's manifest of the restored checkpoint, if it has one."""
        part = self._mine.get((found.manifest.commit, found.manifest.versions.get(SAVE, "")))
        return None if part is None else part.manifest

    def restore(self) -> ResumePoint | None:
        """Restore the newest complete checkpoint; None if no checkpoint exists.

        Raises:
            AttachError: a checkpoint has replicated state, or was saved with another device mesh.
            RuntimeError: parts of a complete checkpoint are on none of these machines, or a part arrived damaged.
        """
        while (plan := self._choose()) is not None:
            parts, verdict = self._read(plan)
            verdicts = self._gang.gather(verdict)
            if set(verdicts) == {_WHOLE}:
                return _Exchange(self._gang, plan, parts, self._meshes).found()
            if _CORRUPT in verdicts and not plan.in_memory:
                self._put_aside(plan.commit)
            self._mine.pop(plan.key, None)
        return None

    def _put_aside(self, commit: Commit) -> None:
        """Quarantine a damaged checkpoint on all machines.

        If one part is damaged, the other parts are useless, but each machine would count its part as a checkpoint.
        """
        if (
            self._keeps
            and self._folder is not None
            and any(key[0] == commit and not part.files for key, part in self._mine.items())
        ):  # all ranks have read, and no saver writes now
            with contextlib.suppress(OSError):
                store.quarantine(self._folder, commit)

    def _choose(self) -> _RestorePlan | None:
        """Choose the newest checkpoint whose parts are all on these machines."""
        words = {" ".join(map(str, key)): _Claim.of(part).words() for key, part in self._mine.items()}
        told = [
            {_key(name): _Claim(*each) for name, each in json.loads(blob).items()}
            for blob in self._gang.gather(json.dumps(words).encode())
        ]
        every = {key: claim.complete for claims in told for key, claim in claims.items()}
        for key in sorted(every, key=lambda key: (key[0], every[key], key[1]), reverse=True):
            claims = {rank: claims[key] for rank, claims in enumerate(told) if key in claims}
            if not any(claim.ranks for claim in claims.values()):
                raise AttachError(
                    f"checkpoint {key[0]} in {self._folder} has replicated state, but this model is sharded: use "
                    "another folder (attach(checkpoint_dir=)) or another job. Your script can load the model's weights "
                    "from the checkpoint"
                )
            source, lacking = _sources(claims, self._gang.world)
            if not lacking:
                manifest = self._agree_on(key, min(claims))
                return _RestorePlan(key[0], manifest, source, any(claim.in_memory for claim in claims.values()))
            self._pass_over(key, lacking, complete=any(claim.complete for claim in claims.values()))
        return None

    def _agree_on(self, key: _Key, speaker: int) -> Manifest:
        mine = self._mine[key].manifest.to_bytes() if self._gang.rank == speaker else b""
        return Manifest.from_bytes(self._gang.gather(mine)[speaker])

    def _pass_over(self, key: _Key, lacking: list[int], *, complete: bool) -> None:
        ranks = ", ".join(map(str, lacking))
        why = f"the part of rank {ranks} is on none of these machines"
        if complete and not self._managed:
            raise RuntimeError(
                f"checkpoint {key[0]} was complete, but {why}: start again with the machines (or folders) that have "
                f"this part; or, to continue from an older checkpoint, remove {self._folder}/{key[0]} on all machines"
            )
        if self._gang.rank == 0:
            self.skipped.append(SkippedCheckpoint(str(key[0]), why))
        self._mine.pop(key, None)

    def _read(self, plan: _RestorePlan) -> tuple[dict[int, _RankImage], bytes]:
        """Read and verify the parts that the plan gives this rank; return the parts and a verdict.

        The verdict tells the other ranks whether the parts are ``_WHOLE``, ``_CORRUPT`` or ``_UNREADABLE``. If a part
        cannot be used, the reason is added to ``skipped``.
        """
        mine, parts = self._mine.get(plan.key), {}
        for rank, source in enumerate(plan.source):
            if source != self._gang.rank:
                continue
            assert mine is not None
            try:
                raw = _load(self._folder, mine, shards.skeleton_name(rank))
                data = _load(self._folder, mine, shards.data_name(rank))
            except ValueError as error:
                self.skipped.append(SkippedCheckpoint(str(plan.commit), str(error)))
                return {}, _CORRUPT if isinstance(error, store.ChecksumError) else _UNREADABLE
            where = f"{self._folder}/{plan.commit}/{shards.skeleton_name(rank)}"
            parts[rank] = _RankImage(bytes(raw), Skeleton.read(raw, where), flat(data, len(data)))
        return parts, _WHOLE


@dataclass(frozen=True)
class _Claim:
    """One rank's statement of which parts of a checkpoint are in its folder."""

    world: int
    save: str  # name of the save; it distinguishes two saves of one generation and step
    ranks: list[int]  # saved ranks whose parts are in the folder
    complete: bool  # whether the checkpoint has COMMIT there
    in_memory: bool = False

    @classmethod
    def of(cls, part: _Part) -> _Claim:
        manifest = part.manifest
        ranks = [rank for file in manifest.files if (rank := shards.rank_of(file.name)) is not None]
        whole = len({rank for file in manifest.others if (rank := shards.rank_of(file.name)) is not None} | {*ranks})
        return cls(manifest.world, manifest.versions.get(SAVE, ""), ranks, whole == manifest.world, bool(part.files))

    def words(self) -> list[object]:
        return [self.world, self.save, self.ranks, self.complete, self.in_memory]


def _sources(claims: dict[int, _Claim], world: int) -> tuple[tuple[int, ...], list[int]]:
    """Return (rank that reads each part, parts that no rank has).

    If the number of ranks is unchanged, a rank that has its own part reads it. All other parts are divided among the
    ranks that have them.
    """
    first = claims[min(claims)]
    alike = {rank: claim for rank, claim in claims.items() if (claim.world, claim.save) == (first.world, first.save)}
    source, lacking = [], []
    for part in range(first.world):
        holders = [rank for rank, claim in alike.items() if part in claim.ranks]
        if not holders:
            lacking.append(part)
        elif part in holders and first.world == world:
            source.append(part)
        else:
            source.append(holders[part % len(holders)])
    return tuple(source), lacking


def _key(text: str) -> _Key:
    name, _, save = text.partition(" ")
    commit = Commit.parse(name)
    assert commit is not None
    return commit, save


def _load(folder: Path | None, part: _Part, name: str) -> memoryview:
    """Return a file's bytes, from memory or else from disk, and check their hash."""
    file = next((file for file in part.manifest.files if file.name == name), None)
    if file is None:
        raise ValueError(f"the checkpoint's manifest lacks {name}")
    if (memory := part.files.get(name)) is not None:
        if file.sha256 and hashlib.sha256(memory).hexdigest() != file.sha256:
            raise store.ChecksumError(f"{name} in a neighbour's memory does not match its hash")
        return memory
    assert folder is not None
    memory = private_memory(file.bytes)
    store.read_into(folder, part.manifest, name, memory)
    return memory


class _Exchange:
    def __init__(self, gang: Gang, plan: _RestorePlan, parts: dict[int, _RankImage], meshes: Meshes) -> None:
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
        return Skeleton.read(skeletons[self._which], f"checkpoint {self._plan.commit}, from another rank")

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
            raise RuntimeError(f"checkpoint {self._plan.commit} arrived damaged from rank {sender}: start again")
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
