"""Find a checkpoint of sharded state of which this gang has every part, and give each rank its own. Collective.

Where a rank finds its part in its own folder, and their number is that of then, it reads
that and nothing else. Otherwise whoever has a part reads it, and sends the others what
they need of it over the training network: tensor by tensor, so that no rank ever holds
more than a few parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spotkeeper.train import dcp, store
from spotkeeper.train.checkpoint import Skeleton, Slot, flat, unpack, view
from spotkeeper.train.control import Commit
from spotkeeper.train.errors import AttachError
from spotkeeper.train.gang import Gang
from spotkeeper.train.keep import SAVE, Found
from spotkeeper.train.shards import Meshes, Shard
from spotkeeper.train.store import Manifest, Skipped

Need = tuple[int, int]  # a rank of then, and a slot of its image
_WHOLE, _UNREADABLE, _ROTTEN = b"whole", b"unreadable", b"rotten"  # what a rank says of the parts it has read


@dataclass(frozen=True)
class _Plan:
    """Which checkpoint, and which rank of now has the part of each rank of then."""

    commit: Commit
    manifest: Manifest
    source: tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """One rank's image, read and found good."""

    raw: bytes  # the skeleton
    skeleton: Skeleton
    base: torch.Tensor  # the bytes of its tensors

    def tensor(self, slot: int) -> torch.Tensor:
        return view(self.base, self.skeleton.slots[slot])


class Restorer:
    """One search. ``skipped``: what was passed over, and why."""

    def __init__(self, gang: Gang, folder: Path | None, meshes: Meshes, *, keeps: bool, managed: bool) -> None:
        """``keeps``: this rank is the one of its node that answers for the folder.

        ``managed``: an agent started this, so somebody has seen to it that what can be had is here.
        """
        self._gang = gang
        self._folder = folder
        self._meshes = meshes
        self._keeps = keeps
        self._managed = managed
        self._mine: dict[Commit, Manifest] = {}
        self.skipped: list[Skipped] = []
        for commit in store.scan(folder) if folder else ():
            try:
                self._mine[commit] = store.read_part(folder or "", commit)
            except ValueError as error:
                self.skipped.append(Skipped(str(commit), str(error)))

    def own(self, commit: Commit) -> Manifest | None:
        """What this node has of it."""
        return self._mine.get(commit)

    def restore(self) -> Found | None:
        """
        Raises:
            AttachError: what is there is of another kind, or of another mesh.
            RuntimeError: a checkpoint was complete, and parts of it are on none of these machines; or one arrived
                damaged.
        """
        while (plan := self._choose()) is not None:
            parts, verdict = self._read(plan)
            verdicts = self._gang.gather(verdict)
            if set(verdicts) == {_WHOLE}:
                return _Exchange(self._gang, plan, parts, self._meshes).found()
            if _ROTTEN in verdicts:
                self._put_aside(plan.commit)
            self._mine.pop(plan.commit, None)
        return None

    def _put_aside(self, commit: Commit) -> None:
        """On all machines alike, for without one part the others are nothing: left there, it would count as one of
        those that are kept, at the cost of one that holds."""
        if self._keeps and self._folder is not None and commit in self._mine:  # all have read, and nobody writes now
            with contextlib.suppress(OSError):
                store.quarantine(self._folder, commit)

    def _choose(self) -> _Plan | None:
        """The newest of which every part is on one of these machines."""
        words = {str(commit): _Claim.of(manifest) for commit, manifest in self._mine.items()}
        blobs = self._gang.gather(json.dumps({name: claim.words() for name, claim in words.items()}).encode())
        told = [{name: _Claim(*each) for name, each in json.loads(blob).items()} for blob in blobs]
        names = {name for claims in told for name in claims}
        for commit in sorted((commit for name in names if (commit := Commit.parse(name))), reverse=True):
            claims = {rank: claims[str(commit)] for rank, claims in enumerate(told) if str(commit) in claims}
            if not any(claim.ranks for claim in claims.values()):
                raise AttachError(
                    f"checkpoint {commit} in {self._folder} is of replicated state, and this model is sharded: use "
                    "another folder (attach(checkpoint_dir=)), or another job; only the model's weights can be taken "
                    "over, by the script"
                )
            source, lacking = _sources(claims, self._gang.world)
            if not lacking:
                manifest = self._agree_on(commit, min(claims))
                return _Plan(commit, manifest, source)
            self._pass_over(commit, lacking, complete=any(claim.complete for claim in claims.values()))
        return None

    def _agree_on(self, commit: Commit, speaker: int) -> Manifest:
        mine = self._mine[commit].to_bytes() if self._gang.rank == speaker else b""
        return Manifest.from_bytes(self._gang.gather(mine)[speaker])

    def _pass_over(self, commit: Commit, lacking: list[int], *, complete: bool) -> None:
        ranks = ", ".join(map(str, lacking))
        why = f"the part of rank {ranks} is on none of these machines"
        if complete and not self._managed:
            raise RuntimeError(
                f"checkpoint {commit} was complete, and {why}: start again with the machines (or folders) that have "
                f"it; or remove {commit} in {self._folder} on all machines, to go on from an older one"
            )
        if self._gang.rank == 0:
            self.skipped.append(Skipped(str(commit), why))
        self._mine.pop(commit, None)

    def _read(self, plan: _Plan) -> tuple[dict[int, _Part], bytes]:
        """The parts that this rank answers for, and whether they hold; a reason in ``skipped`` where one does not."""
        manifest, parts = self._mine.get(plan.commit), {}
        for rank, source in enumerate(plan.source):
            if source != self._gang.rank:
                continue
            assert manifest is not None and self._folder is not None
            try:
                raw = _load(self._folder, manifest, dcp.skeleton_name(rank))
                data = _load(self._folder, manifest, dcp.data_name(rank))
            except ValueError as error:
                self.skipped.append(Skipped(str(plan.commit), str(error)))
                return {}, _ROTTEN if isinstance(error, store.RottenError) else _UNREADABLE
            parts[rank] = _Part(bytes(raw), Skeleton.read(raw), flat(data, len(data)))
        return parts, _WHOLE


@dataclass(frozen=True)
class _Claim:
    """What a rank's folder has of one checkpoint."""

    world: int
    save: str  # the name of the save: two of one generation and step are not the same
    ranks: list[int]  # whose parts
    complete: bool  # it has COMMIT

    @classmethod
    def of(cls, manifest: Manifest) -> _Claim:
        ranks = [rank for file in manifest.files if (rank := dcp.rank_of(file.name)) is not None]
        whole = len({rank for file in manifest.others if (rank := dcp.rank_of(file.name)) is not None} | {*ranks})
        return cls(manifest.world, manifest.versions.get(SAVE, ""), ranks, whole == manifest.world)

    def words(self) -> list[object]:
        return [self.world, self.save, self.ranks, self.complete]


def _sources(claims: dict[int, _Claim], world: int) -> tuple[tuple[int, ...], list[int]]:
    """(who answers for each rank's part, ranks of whose part there is none).

    Each rank for its own, where their number is the same; else shared out among those who have it.
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


def _load(folder: Path, manifest: Manifest, name: str) -> memoryview:
    size = next((file.bytes for file in manifest.files if file.name == name), None)
    if size is None:
        raise ValueError(f"{name} is not in its manifest")
    memory = memoryview(mmap.mmap(-1, max(1, size)))[:size]
    store.read_into(folder, manifest, name, memory)
    return memory


class _Exchange:
    """From parts as they were written to the state of each rank as it is now."""

    def __init__(self, gang: Gang, plan: _Plan, parts: dict[int, _Part], meshes: Meshes) -> None:
        self._gang = gang
        self._plan = plan
        self._parts = parts
        self._meshes = meshes
        self._same = plan.manifest.world == gang.world
        self._which = gang.rank if self._same else 0  # whose skeleton this rank's state is built on
        self._tables: dict[int, tuple[list[Slot], list[Shard]]] = {}
        self._got: dict[Need, torch.Tensor] = {}

    def found(self) -> Found:
        plan, rank = self._plan, self._gang.rank
        if self._same and plan.source == tuple(range(self._gang.world)):
            part = self._parts[rank]
            state = part.skeleton.join(part.tensor, self._meshes, lambda shard: part.tensor(shard.slot))
            return Found(state.model, state.rest, unpack(state.local[0]), plan.manifest, "disk", True)
        skeleton = self._share()
        self._send(self._needs(skeleton))
        state = skeleton.join(lambda slot: self._got[self._which, slot], self._meshes, self._part)
        senders = sorted({plan.source[saved] for saved, _ in self._got} - {rank})
        source = "rank " + ", ".join(map(str, senders)) if senders else "disk"
        return Found(state.model, state.rest, unpack(state.local[0]), plan.manifest, source, self._same)

    def _share(self) -> Skeleton:
        """Every part's table, and the skeletons that others need."""
        asked = range(len(self._plan.source)) if self._same else range(1)
        words: Any = (
            {saved: (part.skeleton.slots, part.skeleton.shards) for saved, part in self._parts.items()},
            {saved: part.raw for saved, part in self._parts.items() if saved in asked},
        )
        skeletons: dict[int, bytes] = {}
        for blob in self._gang.gather(pickle.dumps(words)):
            tables, raws = pickle.loads(blob)  # noqa: S301 - the job's own ranks
            self._tables |= tables
            skeletons |= raws
        return Skeleton.read(skeletons[self._which])

    def _needs(self, skeleton: Skeleton) -> list[Need]:
        needs = {(self._which, slot) for slot in skeleton.plain}
        for shard in skeleton.shards:
            needs |= {(saved, chunk.slot) for saved, chunk in self._chunks(shard)}
        return sorted(needs)

    def _chunks(self, shard: Shard) -> list[tuple[int, Shard]]:
        """The parts of then that make this rank's part of now, each region once."""
        if self._same:
            return [(self._which, self._tables[self._which][1][shard.number])]
        shape, offset = self._meshes.place(shard)
        found: dict[tuple[int, ...], tuple[int, Shard]] = {}
        for saved, (_, shards) in self._tables.items():
            chunk = shards[shard.number]
            if 0 in shape or 0 in chunk.shape or chunk.offset in found:
                continue
            if all(_overlap(*pair) for pair in zip(offset, shape, chunk.offset, chunk.shape, strict=True)):
                found[chunk.offset] = (saved, chunk)
        return list(found.values())

    def _part(self, shard: Shard) -> torch.Tensor:
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
        """In one order for all: whoever waits, waits for a pair before it, so nobody waits for ever."""
        told: list[list[Need]] = [pickle.loads(blob) for blob in self._gang.gather(pickle.dumps(needs))]  # noqa: S301
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
            raise RuntimeError(f"a part of {self._plan.commit} arrived damaged from rank {sender}; start again")
        at = 0
        for need, slot in zip(stream, slots, strict=True):
            self._got[need] = _own(memoryview(data)[at : at + slot.bytes], slot)
            at += slot.bytes


def _own(data: memoryview, slot: Slot) -> torch.Tensor:
    """A tensor of its own: in a stream bytes lie one after the other, whatever a type wants."""
    flat_ = torch.empty(slot.bytes, dtype=torch.uint8)
    if slot.bytes:
        flat_.copy_(torch.frombuffer(data, dtype=torch.uint8))
    kind: torch.Tensor = flat_.view(getattr(torch, slot.dtype)).view(slot.shape)
    return kind


def _overlap(offset: int, count: int, other: int, others: int) -> tuple[int, int] | None:
    """(first, after the last) of what two stretches of one axis have in common."""
    low, high = max(offset, other), min(offset + count, other + others)
    return (low, high) if low < high else None
