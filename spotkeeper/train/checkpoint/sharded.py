"""Saves sharded state: each node writes its own ranks' parts; the checkpoint is complete when all nodes have done so.

A save has four steps on all ranks. They (1) announce sizes, (2) copy the state into the memory of the node's saver, and
(3) request the write; training continues while the savers write. Once the ranks have agreed that no saver is busy
(``loop/boundary.py``), they (4) exchange names and hashes of their files and request COMMIT, which lists all files.
After a kill between (3) and (4), the next generation finds a part on each node and completes the checkpoint.

With snapshots, optimizers' tensors are copied while training continues (``snapshot.py``). At the next boundary all
ranks begin to exchange whether their copies are complete, and at the boundary after that they request the write.
"""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from spotkeeper.train.agent_link.control import Commit, Control
from spotkeeper.train.checkpoint.client import new_manifest
from spotkeeper.train.checkpoint.durable import MemoryHandle, NeighbourMemory, round_up
from spotkeeper.train.checkpoint.image import Image, RunState, after, lay_out_node, pack
from spotkeeper.train.checkpoint.manifest import SAVE, FileSum, Manifest, RankPlace
from spotkeeper.train.checkpoint.peers import PeerImages
from spotkeeper.train.checkpoint.protocol import SaverState, Stretch
from spotkeeper.train.checkpoint.reshard import ShardRestorer
from spotkeeper.train.checkpoint.restore import EarlyRead
from spotkeeper.train.checkpoint.snapshot import BackgroundCopier
from spotkeeper.train.checkpoint.store import SkippedCheckpoint
from spotkeeper.train.checkpoint.strategy import Replicated, ResumePoint, SaveStrategy, StateSource, versions
from spotkeeper.train.checkpoint.writer import CheckpointWriter
from spotkeeper.train.core import pickling, shards
from spotkeeper.train.core.errors import AttachError
from spotkeeper.train.core.gang import DistributedGang, Gang
from spotkeeper.train.core.pace import SavePace
from spotkeeper.train.core.parts import AllOptimizers, Attached
from spotkeeper.train.core.settings import RunSettings
from spotkeeper.train.core.shards import is_shared, local_part
from spotkeeper.train.core.tree import LayoutCache


@dataclass(frozen=True)
class _SaveIntent:
    layout: bytes  # hash of the rank's chunks
    state: int  # bytes
    skeleton: int  # bytes
    can: bool  # whether this rank's node can write; True for ranks that do not write
    need: bool  # whether the checkpoint is not durable on that node yet
    save: str  # name of the save; all ranks use rank 0's


@dataclass
class _CopiedSave:
    """A save whose state is still being copied. ``request``: asks the saver to write it; nothing on other ranks."""

    commit: Commit
    request: Callable[[], None]
    complete: bool = False  # this rank's copy
    torn: Callable[[], int] | None = None  # waits for the answer whether any rank's copy is torn


class Sharded:
    """Strategy for a model whose parameters are sharded over the ranks."""

    def __init__(
        self,
        gang: Gang,
        writer: CheckpointWriter,
        places: tuple[RankPlace, ...],
        parts: Attached,
        *,
        managed: bool,
        copier: BackgroundCopier | None = None,
        peers: PeerImages | None = None,
    ) -> None:
        self._gang = gang
        self._writer = writer
        self._places = places
        self._parts = parts
        self._managed = managed
        self._copier, self._peers = copier, peers
        mine = places[gang.rank].node
        self._mates = [place.rank for place in places if place.node == mine]
        self._neighbour = NeighbourMemory()
        self._layouts: tuple[bytes, ...] = ()
        self._cache = LayoutCache()
        self._metadata = b""  # content of ``.metadata`` for the layouts of the last save
        if writer.writes:
            importlib.import_module("torch.distributed.checkpoint")  # takes 0.1 s: here, so that no save waits for it
        self._copied: _CopiedSave | None = None  # the save that is being copied, if any; the same on all ranks
        self._open: Commit | None = None  # the save that is not complete yet, if any; the same on all ranks

    def begin(
        self, folder: Path | None, hello: SaverState | None, early: EarlyRead | None = None
    ) -> tuple[ResumePoint | None, list[SkippedCheckpoint]]:
        keeps = self._writer.client is not None
        kept = self._peers.kept() if self._peers else []
        meshes = self._parts.meshes
        restorer = ShardRestorer(self._gang, folder, meshes, keeps=keeps, managed=self._managed, kept=kept)
        found = restorer.restore()
        if self._peers is not None:
            self._peers.restored(kept, None if found is None or found.durable else found.manifest.key)
        if found is None or not found.durable:
            return found, restorer.skipped
        self._open = found.manifest.commit
        self._writer.written = restorer.own(found) if self._writer.writes else None
        self.settle()  # publishes the restored checkpoint if it lacks COMMIT
        return found, restorer.skipped

    def warm(self, subject: StateSource) -> None:
        """Reserve the saver's memory. Every rank of the node is assumed to need as much as this rank."""
        if self._writer.writes:
            size = len(self._mates) * self._image(subject)[0].size
            self._writer.warm(size + round_up(len(self._metadata)))
            if self._peers is not None:
                self._peers.warm(size)

    def ready(self) -> bool:
        return self._writer.written is not None

    # ------------------------------------------------------------ saving

    def save(self, subject: StateSource, commit: Commit, *, overlap: bool = False) -> None:
        self._land()
        image, describe = self._image(subject)
        chunks = describe()
        if (dues := self._announce(image, chunks, commit)) is None:
            return
        sizes = [dues[rank].state for rank in self._mates], [dues[rank].skeleton for rank in self._mates]
        files, starts = lay_out_node(self._mates, *sizes)
        stretches = (*files, Stretch(shards.METADATA, after(files[-1]), len(self._metadata)))
        staged = self._writer.stage(after(stretches[-1])) if self._writer.writes else None
        offers = self._gang.gather(staged[0].to_bytes() if staged else b"")
        leaders = [place.rank for place in self._places if place.writes and self._leads(place)]
        why, memory = self._open_stage(staged, offers) if all(offers[r] for r in leaders) else ("", None)
        whys = [blob.decode() for blob in self._gang.gather(why.encode())]
        lacking = [r for r in leaders if not offers[r]]
        if lacking or any(whys):
            told = f"rank {lacking[0]}'s machine has no saver" if lacking else next(filter(None, whys))
            if self._writer.writes and self._gang.rank not in lacking:
                self._writer.fail(commit, told)
            return
        assert memory is not None
        manifest = new_manifest(commit, self._places, versions() | {SAVE: dues[0].save})
        save = self._copied = _CopiedSave(commit, partial(self._request, manifest, stretches))
        copier = self._copier if overlap else None
        later = copier.select(self._owned(subject)) if copier else {}
        left = image.copy_to(memory, starts[self._mates.index(self._gang.rank)], later)
        if staged:
            memory[stretches[-1].offset : stretches[-1].offset + stretches[-1].bytes] = self._metadata
        if copier is None:
            save.complete = True
            self._land()
        else:
            copier.begin(left, partial(setattr, save, "complete", True), lambda why: None, self._writer.stalls)

    def _request(self, manifest: Manifest, stretches: tuple[Stretch, ...]) -> None:
        if self._writer.writes:
            self._writer.request(manifest, stretches, part=True)

    @property
    def copying(self) -> bool:
        return self._copied is not None

    def _land(self) -> None:
        """Wait until the running copies are complete on all ranks, and request their save. Collective."""
        self.copied()
        save = self._copied
        if save is not None:
            self._end_copy(save, save.torn or self._gang.highest(int(not save.complete)))

    def _end_copy(self, save: _CopiedSave, torn: Callable[[], int]) -> None:
        self._copied = None
        if not torn():
            self._open = save.commit
            save.request()
        elif self._writer.writes:
            self._writer.discard(save.commit, "its copy is torn on a machine")

    @property
    def images(self) -> bool:
        return False

    def next_image(self) -> int | None:
        return 0 if self._peers is not None and self._peers.ready else None

    def image(self, subject: StateSource, commit: Commit) -> bool:
        self.copied()
        if self._peers is None:
            return False
        return self._peers.keep(self._image(subject)[0], commit, self._owned(subject))

    def _owned(self, subject: StateSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts of the tensors that only an optimizer's step changes, with their names."""
        for name, each in subject.optimizer_tensors():
            yield name, local_part(each) if is_shared(each) else each

    def advance(self) -> bool:
        save = self._copied
        if save is not None and save.torn is not None:
            self._end_copy(save, save.torn)
        elif save is not None:
            self.copied()
            save.torn = self._gang.highest(int(not save.complete))
        return self._peers is not None and self._peers.advance()

    def copied(self) -> None:
        if self._copier is not None:
            self._copier.wait()

    def _image(self, subject: StateSource) -> tuple[Image, Callable[[], list[shards.Chunk]]]:
        """Return the image, and what describes its chunks."""
        model, rest = subject.take_common()
        state = RunState(model, rest, (pack(subject.take_local()),))
        image = Image(state, rank=self._gang.rank, cache=self._cache)
        return image, lambda: image.chunks(self._parts.named(model, rest))

    def _announce(self, image: Image, chunks: list[shards.Chunk], commit: Commit) -> list[_SaveIntent] | None:
        """Announce this rank's sizes: the first of a save's four steps.

        Returns all ranks' announcements; None if no save is possible or none is needed.
        """
        writes, known = self._writer.writes, self._writer.commit == commit
        can = self._writer.begin(commit) or not writes or known
        state, skeleton = (stretch.bytes for stretch in image.stretches)
        mine = _SaveIntent(shards.digest(chunks), state, skeleton, can, writes and not known, secrets.token_hex(8))
        dues: list[_SaveIntent] = [pickling.loads(blob, "a rank") for blob in self._gang.gather(pickling.dumps(mine))]
        if not all(due.can for due in dues):
            rank = next(rank for rank, due in enumerate(dues) if not due.can)
            if writes and can:
                self._writer.fail(commit, f"rank {rank}'s machine has no saver")
            return None
        if not any(due.need for due in dues):
            return None
        if (layouts := tuple(due.layout for due in dues)) != self._layouts:
            blobs = self._gang.gather(pickling.dumps(chunks))
            if writes:
                self._metadata = shards.metadata([pickling.loads(blob, "a rank") for blob in blobs])
            self._layouts = layouts
        return dues

    def _open_stage(
        self, staged: tuple[MemoryHandle, memoryview] | None, offers: list[bytes]
    ) -> tuple[str, memoryview | None]:
        """Return the node's staging memory, for the second of a save's four steps; before it "", or why this fails."""
        leader = next((rank for rank in self._mates if offers[rank]), None)
        if leader is None:
            return f"no rank on the machine of rank {self._gang.rank} writes the checkpoint", None
        try:
            return "", staged[1] if staged else self._neighbour.open(MemoryHandle.from_bytes(offers[leader]))
        except OSError as error:
            why = f"rank {self._gang.rank} cannot open the staging memory that rank {leader} shares with it: {error}"
            return why, None

    def _leads(self, place: RankPlace) -> bool:
        return place.rank == min(other.rank for other in self._places if other.node == place.node)

    # ------------------------------------------------------------ the end of a save

    def settle(self, timeout_s: float | None = None) -> None:
        began = time.monotonic()
        self._land()
        self._writer.settle(timeout_s)
        self.publish()
        self._writer.settle(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began)))

    def publish(self) -> None:
        """Exchange the parts' manifests and request COMMIT: the last of a save's four steps."""
        if self._open is None:
            return
        commit, self._open = self._open, None
        mine = self._writer.written
        blob = mine.to_bytes() if mine is not None and mine.commit == commit else b""
        parts = {rank: Manifest.from_bytes(each) for rank, each in enumerate(self._gang.gather(blob)) if each}
        if not _whole(list(parts.values())):
            if mine is not None:
                self._writer.fail(commit, "another machine has not written its part")
            return
        if mine is not None and mine.others:
            self._writer.written = None
            self._writer.has(mine)  # the checkpoint that the run started from
        elif mine is not None:
            self._writer.publish(replace(mine, others=_others(mine, list(parts.values()))))


def find_strategy(
    gang: Gang,
    writer: CheckpointWriter,
    control: Control,
    places: tuple[RankPlace, ...],
    parts: Attached,
    settings: RunSettings,
    pace: SavePace,
) -> SaveStrategy:
    """Return the strategy that fits the model.

    Raises:
        AttachError: the model is sharded, but the job file says that the state is replicated.
    """
    if parts.sharded and settings.replicated:
        raise AttachError(
            "attach(model=): this model is sharded, so each machine has a part of the state, but the job file declares "
            "replicated state (the default): write `checkpoint: {replicated: false}` and submit it under another name"
        )
    copier = BackgroundCopier(AllOptimizers(parts)) if settings.snapshots else None
    if not parts.sharded:
        return Replicated(gang, writer, control, places, settings.late, copier)
    peers = None
    if copier is not None and settings.peers_mb_s and len({place.node for place in places}) > 1:
        peers = PeerImages(gang, DistributedGang(), writer, places, copier, pace, settings.peers_mb_s)
    return Sharded(gang, writer, places, parts, managed=settings.managed, copier=copier, peers=peers)


def _others(mine: Manifest, parts: list[Manifest]) -> tuple[FileSum, ...]:
    """Return the files of other nodes, each once. (``.metadata``, which every node has, is not listed again.)"""
    own = {file.name for file in mine.files}
    files = {file.name: file for part in parts for file in part.files if file.name not in own}
    return tuple(files[name] for name in sorted(files))


def _whole(parts: list[Manifest]) -> bool:
    """Whether ``parts`` are all the parts of one save."""
    there = {rank for part in parts for file in part.files if (rank := shards.rank_of(file.name)) is not None}
    same = {part.key for part in parts}
    return len(same) == 1 and there == set(range(parts[0].world))
