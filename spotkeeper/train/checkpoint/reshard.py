"""Restores sharded state: finds a checkpoint whose parts are all on these machines and gives each rank its part.

If the number of ranks is unchanged and each rank's part is in its own folder, each rank reads its own part. Otherwise
the ranks that have parts read them and send each rank the tensors that it needs (``exchange.py``). All ranks take part
in a restore.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.durable import MemoryHandle, NeighbourMemory, private_memory
from spotkeeper.train.checkpoint.exchange import Exchange, RankImage, RestorePlan
from spotkeeper.train.checkpoint.image import Skeleton, flat
from spotkeeper.train.checkpoint.manifest import SAVE, FileSum, Manifest, SaveKey
from spotkeeper.train.checkpoint.protocol import LEFT_PARTS
from spotkeeper.train.checkpoint.seal import read_sealed, seal_of
from spotkeeper.train.checkpoint.store import SkippedCheckpoint
from spotkeeper.train.checkpoint.strategy import ResumePoint
from spotkeeper.train.core import shards
from spotkeeper.train.core.errors import AttachError
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.shards import Meshes

_WHOLE, _UNREADABLE, _CORRUPT = b"whole", b"unreadable", b"corrupt"  # a rank's verdict on the parts it has read


@dataclass(frozen=True)
class KeptImage:
    """A sealed image of a machine's part in a saver's memory (``peers.py``).

    ``number``: of the memory. ``manifest``: with files; the hashes of own parts are empty. ``files``: functions that
    return the files' bytes, by name; they raise ValueError if the image has changed.
    """

    number: int
    manifest: Manifest
    files: Mapping[str, Callable[[], memoryview]]

    @classmethod
    def open(cls, number: int, handle: MemoryHandle) -> KeptImage | None:
        """Open an image; None if the memory has no seal or cannot be opened."""
        try:
            memory = NeighbourMemory().open(handle)
        except OSError:
            return None
        sealed = seal_of(memory)
        if sealed is None or not sealed.part:
            return None
        read = partial(read_sealed, memory, sealed, shared=number >= LEFT_PARTS)
        files = {each.name: partial(read, each.offset, each.bytes) for each in sealed.stretches}
        manifest = sealed.manifest
        if not manifest.files:
            manifest = replace(manifest, files=tuple(FileSum(each.name, each.bytes, "") for each in sealed.stretches))
        return cls(number, manifest, files)


@dataclass(frozen=True)
class _Part:
    """What this rank can read of a checkpoint. ``files``: the files that are in memory, by name; others are on disk."""

    manifest: Manifest
    files: Mapping[str, Callable[[], memoryview]]


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
        self._mine: dict[SaveKey, _Part] = {}
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
        key = part.manifest.key
        if (there := self._mine.get(key)) is not None:
            files = {file.name: file for file in (*part.manifest.files, *there.manifest.files)}
            part = _Part(replace(there.manifest, files=tuple(files.values())), {**part.files, **there.files})
        self._mine[key] = part

    def own(self, found: ResumePoint) -> Manifest | None:
        """Return this node's manifest of the restored checkpoint, if it has one."""
        part = self._mine.get(found.manifest.key)
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
                return Exchange(self._gang, plan, parts, self._meshes).found()
            if _CORRUPT in verdicts and not plan.in_memory:
                self._put_aside(plan.manifest.commit)
            self._mine.pop(plan.manifest.key, None)
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

    def _choose(self) -> RestorePlan | None:
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
                return RestorePlan(manifest, source, any(claim.in_memory for claim in claims.values()))
            self._pass_over(key, lacking, complete=any(claim.complete for claim in claims.values()))
        return None

    def _agree_on(self, key: SaveKey, speaker: int) -> Manifest:
        mine = self._mine[key].manifest.to_bytes() if self._gang.rank == speaker else b""
        return Manifest.from_bytes(self._gang.gather(mine)[speaker])

    def _pass_over(self, key: SaveKey, lacking: list[int], *, complete: bool) -> None:
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

    def _read(self, plan: RestorePlan) -> tuple[dict[int, RankImage], bytes]:
        """Read and verify the parts that the plan gives this rank; return the parts and a verdict.

        The verdict tells the other ranks whether the parts are ``_WHOLE``, ``_CORRUPT`` or ``_UNREADABLE``. If a part
        cannot be used, the reason is added to ``skipped``.
        """
        mine, parts = self._mine.get(plan.manifest.key), {}
        for rank, source in enumerate(plan.source):
            if source != self._gang.rank:
                continue
            assert mine is not None
            try:
                raw = _load(self._folder, mine, shards.skeleton_name(rank))
                data = _load(self._folder, mine, shards.data_name(rank))
            except ValueError as error:
                self.skipped.append(SkippedCheckpoint(str(plan.manifest.commit), str(error)))
                return {}, _CORRUPT if isinstance(error, store.ChecksumError) else _UNREADABLE
            where = f"{self._folder}/{plan.manifest.commit}/{shards.skeleton_name(rank)}"
            parts[rank] = RankImage(bytes(raw), Skeleton.read(raw, where), flat(data, len(data)))
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


def _key(text: str) -> SaveKey:
    name, _, save = text.partition(" ")
    commit = Commit.parse(name)
    assert commit is not None
    return commit, save


def _load(folder: Path | None, part: _Part, name: str) -> memoryview:
    """Return a file's bytes, from memory or else from disk, and check their hash."""
    file = next((file for file in part.manifest.files if file.name == name), None)
    if file is None:
        raise ValueError(f"the checkpoint's manifest lacks {name}")
    if (kept := part.files.get(name)) is not None:
        try:
            memory = kept()
        except ValueError as error:
            raise ValueError(f"{name} in memory: {error}") from None
        if file.sha256 and hashlib.sha256(memory).hexdigest() != file.sha256:
            raise store.ChecksumError(f"{name} in a neighbour's memory does not match its hash")
        return memory
    assert folder is not None
    memory = private_memory(file.bytes)
    store.read_into(folder, part.manifest, name, memory)
    return memory
