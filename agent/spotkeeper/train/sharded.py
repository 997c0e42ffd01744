"""Sharded state: each node writes its own ranks' parts, and the checkpoint is complete when all have.

A save, on all ranks: say how much there is (1), copy it into the memory of the node's
saver (2), have it written (3); training goes on meanwhile. A node whose saver has written
says so in the agreement of the ranks; when none is busy any more, all exchange the names
and hashes of their files and have COMMIT written, which names them all (4). Killed between
(3) and (4), the next generation finds a part on each node, and completes it.
"""

from __future__ import annotations

import importlib
import pickle
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from spotkeeper.train import dcp
from spotkeeper.train.checkpoint import Image, State, pack
from spotkeeper.train.client import Hello, new_manifest
from spotkeeper.train.control import Commit
from spotkeeper.train.durable import PAGE, round_up
from spotkeeper.train.gang import Gang
from spotkeeper.train.keep import SAVE, Found, Subject, versions
from spotkeeper.train.messages import Stretch
from spotkeeper.train.node import Neighbour, Offer
from spotkeeper.train.parts import Parts
from spotkeeper.train.reshard import Restorer
from spotkeeper.train.store import FileSum, Manifest, Place, Skipped
from spotkeeper.train.writer import Writer


@dataclass(frozen=True)
class _Due:
    """What a rank says before a save."""

    layout: bytes  # a hash of its chunks
    state: int  # bytes
    skeleton: int
    can: bool  # its node can write it; true of ranks that do not write
    need: bool  # it is not durable there already
    save: str  # rank 0's name for it


class Sharded:
    """The keeper of a model whose parameters are shared among the ranks."""

    def __init__(self, gang: Gang, writer: Writer, places: tuple[Place, ...], parts: Parts, *, managed: bool) -> None:
        self._gang = gang
        self._writer = writer
        self._places = places
        self._parts = parts
        self._managed = managed
        mine = places[gang.rank].node
        self._mates = [place.rank for place in places if place.node == mine]
        self._neighbour = Neighbour()
        self._layouts: tuple[bytes, ...] = ()
        self._metadata = b""  # of the layouts above
        if writer.writes:
            importlib.import_module("torch.distributed.checkpoint")  # 0.1 s, here and not in the first save
        self._open: Commit | None = None  # the save that is not complete yet; the same on all ranks

    def begin(self, folder: Path | None, hello: Hello | None) -> tuple[Found | None, list[Skipped]]:
        keeps = self._writer.client is not None
        restorer = Restorer(self._gang, folder, self._parts.meshes, keeps=keeps, managed=self._managed)
        found = restorer.restore()
        if found is None:
            return None, restorer.skipped
        self._open = found.manifest.commit
        self._writer.written = restorer.own(self._open) if self._writer.writes else None
        self.settle()  # where it lacks its COMMIT, it gets one
        return found, restorer.skipped

    def warm(self, subject: Subject) -> None:
        """All ranks of a node have about as much."""
        if self._writer.writes:
            self._writer.warm(len(self._mates) * self._image(subject)[0].size + round_up(len(self._metadata)))

    def ready(self) -> bool:
        return self._writer.written is not None

    # ------------------------------------------------------------ saving

    def save(self, subject: Subject, commit: Commit) -> None:
        image, chunks = self._image(subject)
        if (dues := self._announce(image, chunks, commit)) is None:
            return
        sizes = [dues[rank].state for rank in self._mates], [dues[rank].skeleton for rank in self._mates]
        stretches, starts = _lay_out(self._mates, *sizes, len(self._metadata))
        staged = self._writer.stage(_after(stretches[-1])) if self._writer.writes else None
        offers = self._gang.gather(staged[0].to_bytes() if staged else b"")
        leaders = [place.rank for place in self._places if place.writes and self._leads(place)]
        why = self._fill(image, staged, offers, starts, stretches[-1]) if all(offers[r] for r in leaders) else ""
        whys = [blob.decode() for blob in self._gang.gather(why.encode())]
        lacking = [r for r in leaders if not offers[r]]
        if lacking or any(whys):
            told = f"rank {lacking[0]}'s machine has no saver" if lacking else next(filter(None, whys))
            if self._writer.writes and self._gang.rank not in lacking:
                self._writer.fail(commit, told)
            return
        self._open = commit
        if self._writer.writes:
            manifest = new_manifest(commit, self._places, versions() | {SAVE: dues[0].save})
            self._writer.request(manifest, stretches, part=True)

    def _image(self, subject: Subject) -> tuple[Image, list[dcp.Chunk]]:
        model, rest = subject.take_common()
        image = Image(State(model, rest, (pack(subject.take_local()),)), rank=self._gang.rank)
        return image, image.chunks(self._parts.named(model, rest))

    def _announce(self, image: Image, chunks: list[dcp.Chunk], commit: Commit) -> list[_Due] | None:
        """Step 1. None: it cannot be saved, or need not."""
        writes, known = self._writer.writes, self._writer.commit == commit
        can = self._writer.begin(commit) or not writes or known
        state, skeleton = (stretch.bytes for stretch in image.stretches)
        mine = _Due(dcp.digest(chunks), state, skeleton, can, writes and not known, secrets.token_hex(8))
        dues: list[_Due] = [pickle.loads(blob) for blob in self._gang.gather(pickle.dumps(mine))]  # noqa: S301 - ranks
        if not all(due.can for due in dues):
            rank = next(rank for rank, due in enumerate(dues) if not due.can)
            if writes and can:
                self._writer.fail(commit, f"rank {rank}'s machine has no saver")
            return None
        if not any(due.need for due in dues):
            return None
        if (layouts := tuple(due.layout for due in dues)) != self._layouts:
            blobs = self._gang.gather(pickle.dumps(chunks))
            if writes:
                self._metadata = dcp.metadata([pickle.loads(blob) for blob in blobs])  # noqa: S301 - ranks
            self._layouts = layouts
        return dues

    def _fill(
        self,
        image: Image,
        staged: tuple[Offer, memoryview] | None,
        offers: list[bytes],
        starts: list[tuple[int, int]],
        metadata: Stretch,
    ) -> str:
        """Step 2: this rank's bytes, into its node's memory. Why not, else ""."""
        leader = next((rank for rank in self._mates if offers[rank]), None)
        if leader is None:
            return f"rank {self._gang.rank} has nobody on its machine who writes"
        try:
            memory = staged[1] if staged else self._neighbour.open(Offer.from_bytes(offers[leader]))
        except OSError as error:
            return f"rank {self._gang.rank} cannot reach the memory of rank {leader}, on its machine: {error}"
        image.copy_to(memory, starts[self._mates.index(self._gang.rank)])
        if staged:
            memory[metadata.offset : metadata.offset + metadata.bytes] = self._metadata
        return ""

    def _leads(self, place: Place) -> bool:
        return place.rank == min(other.rank for other in self._places if other.node == place.node)

    # ------------------------------------------------------------ the end of a save

    def settle(self, timeout_s: float | None = None) -> None:
        self._writer.settle(timeout_s)
        self.publish()
        self._writer.settle(timeout_s)

    def publish(self) -> None:
        """Step 4."""
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
            self._writer.has(mine)  # of a checkpoint that the run began from
        elif mine is not None:
            self._writer.publish(replace(mine, others=_others(mine, list(parts.values()))))


def _lay_out(
    mates: list[int], states: list[int], skeletons: list[int], metadata: int
) -> tuple[tuple[Stretch, ...], list[tuple[int, int]]]:
    """Where a node's files lie in its memory, ``.metadata`` last; and of each of its ranks, where its two begin."""
    stretches: list[Stretch] = []
    starts = []
    end = 0
    for rank, state, skeleton in zip(mates, states, skeletons, strict=True):
        first = Stretch(dcp.data_name(rank), end, state)
        second = Stretch(dcp.skeleton_name(rank), _after(first), skeleton)
        stretches += first, second
        starts.append((first.offset, second.offset))
        end = _after(second)
    return (*stretches, Stretch(dcp.METADATA, end, metadata)), starts


def _after(stretch: Stretch) -> int:
    return stretch.offset + max(PAGE, round_up(stretch.bytes))


def _others(mine: Manifest, parts: list[Manifest]) -> tuple[FileSum, ...]:
    """The files that other nodes have, each once. (``.metadata`` is the same on all.)"""
    own = {file.name for file in mine.files}
    files = {file.name: file for part in parts for file in part.files if file.name not in own}
    return tuple(files[name] for name in sorted(files))


def _whole(parts: list[Manifest]) -> bool:
    """Whether these are all parts of one save."""
    there = {rank for part in parts for file in part.files if (rank := dcp.rank_of(file.name)) is not None}
    same = {(part.commit, part.versions.get(SAVE)) for part in parts}
    return len(same) == 1 and there == set(range(parts[0].world))
