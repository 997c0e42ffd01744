"""How a run saves and restores: the interface of a strategy, and the strategy for replicated state.

With ``Replicated``, every node writes a full copy of the state that all ranks share, and each rank's own state.
``sharded.py`` has the strategy for sharded models.

**Restore of replicated state.** Each rank announces the newest checkpoint in its folder. The ranks that have the newest
of all read it and check its hashes. A rank whose copy is damaged drops that copy, and the search repeats until a copy
is intact or no copy is left. Ranks with an intact copy then send its bytes to the others over the training network.
Copies are compared by (generation, step), not by hash, because nodes may have different saves of the same step.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from spotkeeper.train.agent_link.control import Commit, Control
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.client import Client, new_manifest
from spotkeeper.train.checkpoint.image import Image, RunState, extent, lay_out_of, pack, thaw, unpack
from spotkeeper.train.checkpoint.protocol import SaverError, SaverState, Stretch
from spotkeeper.train.checkpoint.snapshot import BackgroundCopier
from spotkeeper.train.checkpoint.store import IMAGE, SKELETON, STATE, Manifest, RankPlace, SkippedCheckpoint
from spotkeeper.train.checkpoint.writer import CheckpointWriter
from spotkeeper.train.core.errors import AttachError, say
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.settings import ARGV, own_argv
from spotkeeper.version import __version__

SAVE = "save"  # key in a manifest's versions; its value is a name that all parts of one sharded save share


@dataclass(frozen=True)
class ResumePoint:
    """The state from which a run continues."""

    model: object
    rest: Any
    local: dict[str, Any]  # this rank's own state, or rank 0's if the number of ranks has changed
    manifest: Manifest
    source: str  # "memory", "disk", or the ranks that sent it
    same_world: bool
    durable: bool = True  # False: it was an image in the savers' memories, and no disk has it


class StateSource(Protocol):
    """A provider of the state to save."""

    def take_common(self) -> tuple[object, dict[str, object]]:
        """Return (model parameters, other shared state).

        With replicated state both are equal on all ranks; with sharded state they are this rank's parts.
        """

    def take_local(self) -> dict[str, object]:
        """Return the state that each rank has for itself, such as its random generators."""

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that only an optimizer's step changes, with their names."""


class SaveStrategy(Protocol):
    """How one run saves and restores.

    All methods except ``warm``, ``images``, ``next_image``, ``copied`` and ``ready`` are collective; ``settle`` is with
    sharded state.
    """

    def begin(
        self, folder: Path | None, hello: SaverState | None
    ) -> tuple[ResumePoint | None, list[SkippedCheckpoint]]:
        """Restore the newest intact checkpoint of any rank; also return the checkpoints that were passed over."""

    def warm(self, subject: StateSource) -> None:
        """Reserve the saver's memory. Every rank calls this method, but ranks do not wait for each other."""

    def save(self, subject: StateSource, commit: Commit) -> None:
        """Stage a save.

        After it returns, optimizers' tensors may change in a step of these optimizers, but otherwise only after
        ``copied``. All other state may change at once.
        """

    @property
    def images(self) -> bool:
        """Whether this rank keeps images of the state, and saves them."""

    def next_image(self) -> int | None:
        """Return the number of the memory that the next image fills; None if this rank can make no image now."""

    def image(self, subject: StateSource, commit: Commit) -> None:
        """Keep an image of the state in the saver's memory. Tensors of optimizers may not change, as after ``save``."""

    def advance(self) -> None:
        """Take an image that several machines make together one step on. Called at each boundary."""

    def copied(self) -> None:
        """Wait until the last save no longer needs the state. Not collective."""

    def ready(self) -> bool:
        """Whether this rank has written a part that needs ``publish``."""

    def publish(self) -> None:
        """Request COMMIT for a sharded checkpoint that all savers have written, if any. Does not wait for COMMIT."""

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until no save runs, then until COMMIT is written: at most ``timeout_s`` seconds for both together."""


class Replicated:
    """The strategy in which every node writes a full copy."""

    def __init__(
        self,
        gang: Gang,
        writer: CheckpointWriter,
        control: Control,
        places: tuple[RankPlace, ...],
        late: Path | None,
        copier: BackgroundCopier | None = None,
    ) -> None:
        """Make the strategy of one rank.

        ``late``: the checkpoint folder to use once this node's disk is mounted (``Control.disk_ready``). ``copier``:
        copies parameters and optimizer state while training continues; None: a save copies all before it returns.
        """
        self._gang = gang
        self._writer = writer
        self._control = control
        self._places = places
        self._late = late
        self._copier = copier

    def begin(
        self, folder: Path | None, hello: SaverState | None
    ) -> tuple[ResumePoint | None, list[SkippedCheckpoint]]:
        restored, skipped = restore(self._gang, folder, self._writer.client, hello)
        if restored is None:
            return None, skipped
        state, manifest, writer = restored.state, restored.manifest, self._writer
        same_world = manifest.world == self._gang.world
        local = unpack(state.local[self._gang.rank if same_world else 0])
        received = restored.source.startswith("rank")
        if restored.lost is not None:
            writer.lose(restored.lost)
        elif received:
            writer.copy(manifest, restored.stretches)
        if writer.writes and not received:
            writer.has(manifest)
        return ResumePoint(state.model, state.rest, local, manifest, restored.source, same_world), skipped

    def warm(self, subject: StateSource) -> None:
        if self._writer.writes:
            model, rest = subject.take_common()
            local = pack(subject.take_local())
            size = Image(RunState(model, rest, (local,) * self._gang.world)).size
            self._writer.warm(size, images=self._copier is not None)

    def save(self, subject: StateSource, commit: Commit) -> None:
        self.copied()
        local = self._gang.gather(pack(subject.take_local()))
        self._adopt_late_disk(commit)
        if self._writer.writes:
            model, rest = subject.take_common()
            state, manifest = RunState(model, rest, tuple(local)), new_manifest(commit, self._places, versions())
            self._writer.save(state, manifest, self._copier, subject.optimizer_tensors())

    @property
    def images(self) -> bool:
        return self._copier is not None and self._writer.images

    def next_image(self) -> int | None:
        return None if self._copier is None else self._writer.next_image()

    def image(self, subject: StateSource, commit: Commit) -> None:
        self.copied()
        local = self._gang.gather(pack(subject.take_local()))
        if self._copier is not None and self.next_image() is not None:
            model, rest = subject.take_common()
            manifest = new_manifest(commit, self._places, versions() | {IMAGE: "yes"})
            state = RunState(model, rest, tuple(local))
            self._writer.image(state, manifest, self._copier, subject.optimizer_tensors())

    def advance(self) -> None:
        """Do nothing: each machine's image is complete by itself."""

    def copied(self) -> None:
        if self._copier is not None:
            self._copier.wait()

    def ready(self) -> bool:
        return False

    def publish(self) -> None:
        """Do nothing: each copy is complete by itself."""

    def settle(self, timeout_s: float | None = None) -> None:
        self.copied()
        self._writer.settle(timeout_s)

    def _adopt_late_disk(self, commit: Commit) -> None:
        """Write to this node's disk from this save on, if the disk was mounted after the start."""
        late = self._late
        if late is not None and not self._writer.writes and not self._gang.local_rank and self._control.disk_ready:
            self._writer.adopt(late)
            say(f"generation {commit.gen}: the disk is mounted and gets all checkpoints from step {commit.step} on")


def versions() -> dict[str, str]:
    found = {"spotkeeper": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return found | ({ARGV: argv} if (argv := own_argv()) else {})


@dataclass(frozen=True)
class RestoredImage:
    """The state restored on this rank. ``source``: "memory", "disk", or "rank N".

    ``lost``: the error if the saver ended during the restore; the state is then only in this process's memory.
    """

    state: RunState
    manifest: Manifest
    stretches: tuple[Stretch, ...]
    source: str
    lost: SaverError | None = None


class _LocalCopies:
    """This rank's copies of checkpoints (``candidates``, newest first), and memory for a loaded or received copy."""

    def __init__(self, folder: Path | None, client: Client | None, hello: SaverState | None) -> None:
        self._folder = folder
        self._client = client
        self._staged = hello.staged if hello else None
        self.candidates: list[Commit] = []
        self.skipped: list[SkippedCheckpoint] = []
        self.source = "disk"
        self.lost: SaverError | None = None
        for commit in store.scan(folder) if folder else ():
            try:
                manifest = store.read(folder or "", commit)
            except ValueError as error:
                self.skipped.append(SkippedCheckpoint(str(commit), str(error)))
                continue
            if all(file.name != STATE for file in manifest.files):
                raise AttachError(
                    f"checkpoint {commit} in {folder} has sharded state, but this model is not sharded: use another "
                    "folder (attach(checkpoint_dir=)) or another job. torch.distributed.checkpoint can read such files"
                )
            self.candidates.append(commit)

    def memory(self, size: int) -> memoryview:
        """Return the saver's allocated memory, or new memory if the saver is gone."""
        if self._client is not None:
            try:
                return memoryview(self._client.stage(size))
            except SaverError as error:
                self._lose(error)
        return memoryview(mmap.mmap(-1, size))

    def _lose(self, error: SaverError) -> None:
        """Continue without the saver: this rank can train, but cannot save for now."""
        self._client, self.lost = None, error

    def load(self, commit: Commit) -> tuple[Manifest, memoryview] | None:
        """Read and verify a candidate; None (with a reason in ``skipped``) if it is invalid."""
        if self._staged is not None and self._staged.commit == commit and self._client is not None:
            try:
                memory = memoryview(self._client.memory(extent(lay_out_of(self._staged))))
            except SaverError as error:
                self._lose(error)
            else:
                self.source = "memory"
                return self._staged, memory
        assert self._folder is not None
        try:
            manifest = store.read(self._folder, commit)
            stretches = lay_out_of(manifest)
            memory = self.memory(extent(stretches))
            for part in stretches:
                store.read_into(self._folder, manifest, part.name, memory[part.offset : part.offset + part.bytes])
        except (ValueError, KeyError) as error:
            self.skipped.append(SkippedCheckpoint(str(commit), str(error)))
            if isinstance(error, store.ChecksumError):
                self._put_aside(commit)
            return None
        return manifest, memory

    def _put_aside(self, commit: Commit) -> None:
        """Quarantine a copy with wrong hashes; because its sizes are right, it would otherwise count as complete."""
        if self._client is not None and self._folder is not None:  # only one rank of a node; no saver writes now
            with contextlib.suppress(OSError):
                store.quarantine(self._folder, commit)


def restore(
    gang: Gang, folder: Path | None, client: Client | None, hello: SaverState | None
) -> tuple[RestoredImage | None, list[SkippedCheckpoint]]:
    """Restore the newest intact checkpoint of all ranks; also return the checkpoints that this rank passed over.

    Returns None for the state if no rank has a checkpoint.

    Raises:
        RuntimeError: another rank's copy arrived damaged.
    """
    local = _LocalCopies(folder, client, hello)
    while True:
        claims = gang.gather(str(local.candidates[0]).encode() if local.candidates else b"")
        best = max((commit for claim in claims if (commit := Commit.parse(claim.decode()))), default=None)
        if best is None:
            return None, local.skipped
        mine = local.load(best) if local.candidates and local.candidates[0] == best else None
        proofs = gang.gather(mine[0].to_bytes() if mine else b"")
        if any(proofs):
            break
        local.candidates = [commit for commit in local.candidates if commit != best]
    holders = [rank for rank, proof in enumerate(proofs) if proof]
    manifest = Manifest.from_bytes(proofs[holders[0]])
    pairs = [
        (holders[at % len(holders)], rank)
        for at, rank in enumerate(rank for rank, proof in enumerate(proofs) if not proof)
    ]
    if mine is None:
        source = next(holder for holder, rank in pairs if rank == gang.rank)
        stretches = lay_out_of(Manifest.from_bytes(proofs[source]))
        memory = _receive(gang, source, Manifest.from_bytes(proofs[source]), local.memory(extent(stretches)))
        state = thaw(memory, stretches, f"checkpoint {manifest.commit}, from rank {source}")
        return RestoredImage(state, manifest, stretches, f"rank {source}", local.lost), local.skipped
    manifest, memory = mine
    stretches = lay_out_of(manifest)
    for holder, rank in pairs:
        if holder == gang.rank:
            _send(gang, rank, memory, stretches)
    state = thaw(memory, stretches, f"{folder or '.'}/{manifest.commit}/{SKELETON}")
    return RestoredImage(state, manifest, stretches, local.source, local.lost), local.skipped


def _send(gang: Gang, to: int, memory: memoryview, stretches: tuple[Stretch, ...]) -> None:
    for part in stretches:
        gang.send(memory[part.offset : part.offset + part.bytes], to)


def _receive(gang: Gang, source: int, manifest: Manifest, memory: memoryview) -> memoryview:
    """Receive into ``memory`` and check hashes in parallel.

    TCP's checksum is weak, and an undetected error would be saved in all later checkpoints.
    """
    with ThreadPoolExecutor(1) as hasher:
        for part in lay_out_of(manifest):
            digest = hashlib.sha256()

            def landed(piece: memoryview, digest: hashlib._Hash = digest) -> None:
                hasher.submit(digest.update, piece)

            gang.receive(memory[part.offset : part.offset + part.bytes], source, landed)
            hasher.submit(lambda: None).result()  # one thread works in order, so all earlier digests are done now
            if digest.hexdigest() != next(file.sha256 for file in manifest.files if file.name == part.name):
                raise RuntimeError(f"{part.name} of {manifest.commit} arrived damaged from rank {source}: start again")
    return memory
