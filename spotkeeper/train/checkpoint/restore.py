"""Restores replicated state: the newest checkpoint or image of any rank, from memory, from another rank, or from disk.

Each rank announces the newest checkpoint in its folder, or a newer image that its saver has kept in memory. The ranks
that have the newest of all load it; from disk they read it and check its hashes. A rank whose copy is damaged drops
that copy, and the search repeats until a copy is intact or no copy is left. Ranks with an intact copy then send its
bytes to the others over the training network: to ranks on the same machine first (only one of a machine's ranks has the
saver's memory), and to other machines so that all senders send about as much. Ranks do not know zones; a job's machines
are in one zone unless it has ``spread: true``. Copies are compared by (generation, step), not by hash, because nodes
may have different saves of the same step.

An image in memory is complete (``seal.py``) but maybe not on disk yet, and the restore does not wait for the disk. It
becomes a checkpoint only by its COMMIT, which its saver writes meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.client import Client
from spotkeeper.train.checkpoint.durable import allocate, private_memory
from spotkeeper.train.checkpoint.image import RunState, extent, lay_out_of, thaw
from spotkeeper.train.checkpoint.manifest import FileSum, Manifest
from spotkeeper.train.checkpoint.protocol import OfferedImage, SaverError, SaverState, Stretch
from spotkeeper.train.checkpoint.seal import Seal, read_sealed, seal_of
from spotkeeper.train.checkpoint.store import SKELETON, STATE, SkippedCheckpoint
from spotkeeper.train.core.errors import AttachError, say
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.settings import RunSettings

_SILENT_S = 2.0  # a saver that is silent for longer may hang; the restore itself waits for it


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
    durable: bool = True


class EarlyRead:
    """The newest checkpoint on this node's disk, read and hashed in a thread while the process group is built."""

    def __init__(self, folder: Path, commit: Commit) -> None:
        self.commit = commit
        self.read = ThreadPoolExecutor(1, "spotkeeper-read").submit(read_checkpoint, folder, commit)

    @classmethod
    def begin(cls, settings: RunSettings) -> EarlyRead | None:
        """Begin to read if an agent started this process, it restores for its node, and its saver has no state.

        A saver's hello comes first: it finishes the saves of older generations.
        """
        folder, gen = settings.folder, settings.gen
        if folder is None or gen is None or settings.saver is None or os.environ.get("LOCAL_RANK", "0") != "0":
            return None
        try:
            client = Client.connect(settings.saver, 0.0, lambda: _SILENT_S)
        except SaverError:
            return None
        with contextlib.closing(client):
            try:
                known = client.hello(folder, gen, settings.keep)
            except SaverError:  # the restore itself reports it
                return None
        for skipped in known.quarantined:
            say(f"quarantined {skipped}")
        there = [] if known.image is not None or known.staged is not None else store.complete(folder)
        return cls(folder, there[0]) if there else None


def read_checkpoint(folder: Path, commit: Commit) -> tuple[Manifest, memoryview]:
    """Read a checkpoint from disk and check its hashes.

    Raises:
        ValueError, KeyError: it is invalid.
    """
    manifest = store.read(folder, commit)
    stretches = lay_out_of(manifest)
    memory = private_memory(extent(stretches))
    with ThreadPoolExecutor(1) as allocator:
        allocator.submit(allocate, memory)  # while the disk reads
        for part in stretches:
            store.read_into(folder, manifest, part.name, memory[part.offset : part.offset + part.bytes])
    return manifest, memory


class _OfferedCopy:
    """The image that this node's saver offers. Its manifest has sizes, but no hashes."""

    def __init__(self, offered: OfferedImage, seal: Seal) -> None:
        self._offered, self._seal = offered, seal
        # Shared: ``load`` makes a copy. Else the client owns it before the memory has another image.
        self.writing, self.ours = offered.writing, offered.shared or offered.ownable
        self.manifest = replace(seal.manifest, files=tuple(FileSum(s.name, s.bytes, "") for s in seal.stretches))

    @classmethod
    def of(cls, offered: OfferedImage) -> _OfferedCopy | None:
        """Return the image, or None if it is complete no more."""
        seal = seal_of(offered.memory)
        if seal is None or {stretch.name for stretch in seal.stretches} != {STATE, SKELETON}:
            return None
        return cls(offered, seal)

    def load(self) -> memoryview:
        """Return the image's bytes.

        Raises:
            ValueError: the earlier trainer has changed the image.
        """
        offered = self._offered
        return read_sealed(offered.memory, self._seal, 0, extent(self._seal.stretches), shared=offered.shared)


class _LocalCopies:
    """This rank's copies of checkpoints (``candidates``, newest first), and memory for a loaded or received copy.

    ``ours``: whether the loaded or received copy is in memory that only this process has; otherwise it is the saver's.
    """

    def __init__(
        self, folder: Path | None, client: Client | None, hello: SaverState | None, early: EarlyRead | None
    ) -> None:
        self._folder = folder
        self._early = early
        self._client = client
        self._staged = hello.staged if hello else None
        self._image = _OfferedCopy.of(hello.image) if hello and hello.image else None
        self.candidates: list[Commit] = [self._image.manifest.commit] if self._image else []
        self.skipped: list[SkippedCheckpoint] = []
        self.source, self.ours = "disk", True
        self.durable = True  # whether the loaded copy is a checkpoint on this node's disk
        self.lost: SaverError | None = None
        for commit in store.scan(folder) if folder else ():
            if commit in self.candidates:  # the saver may be writing it
                continue
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
        self.candidates.sort(reverse=True)

    def memory(self, size: int) -> memoryview:
        """Return the saver's allocated memory, or new memory if the saver is gone."""
        if self._client is not None:
            try:
                memory, self.ours = memoryview(self._client.stage(size)), False
                return memory
            except SaverError as error:
                self._lose(error)
        return private_memory(size)

    def _lose(self, error: SaverError) -> None:
        """Continue without the saver: this rank can train, but cannot save for now."""
        self._client, self.lost = None, error

    def load(self, commit: Commit) -> tuple[Manifest, memoryview] | None:
        """Read and verify a candidate; None (with a reason in ``skipped``) if it is invalid."""
        if self._image is not None and self._image.manifest.commit == commit:
            return self._load_image(self._image)
        if self._staged is not None and self._staged.commit == commit and self._client is not None:
            try:
                memory = memoryview(self._client.memory(extent(lay_out_of(self._staged))))
            except SaverError as error:
                self._lose(error)
            else:
                self.source, self.ours = "memory", False
                return self._staged, memory
        assert self._folder is not None
        try:
            if self._early is not None and self._early.commit == commit:
                return self._early.read.result()
            return read_checkpoint(self._folder, commit)
        except (ValueError, KeyError) as error:
            self.skipped.append(SkippedCheckpoint(str(commit), str(error)))
            if isinstance(error, store.ChecksumError):
                self._put_aside(commit)
            return None

    def _load_image(self, image: _OfferedCopy) -> tuple[Manifest, memoryview] | None:
        try:
            memory = image.load()
        except ValueError as error:
            self.skipped.append(SkippedCheckpoint(str(image.manifest.commit), f"image in memory: {error}"))
            return None
        self.source, self.ours, self.durable = "memory", image.ours, not image.writing
        return image.manifest, memory

    def _put_aside(self, commit: Commit) -> None:
        """Quarantine a copy with wrong hashes; because its sizes are right, it would otherwise count as complete."""
        if self._client is not None and self._folder is not None:  # only one rank of a node; no saver writes now
            with contextlib.suppress(OSError):
                store.quarantine(self._folder, commit)


def restore(
    gang: Gang,
    folder: Path | None,
    client: Client | None,
    hello: SaverState | None,
    early: EarlyRead | None = None,
    nodes: Sequence[int] = (),
) -> tuple[RestoredImage | None, list[SkippedCheckpoint]]:
    """Restore the newest intact checkpoint of all ranks; also return the checkpoints that this rank passed over.

    Returns None for the state if no rank has a checkpoint. ``nodes``: the machine of each rank, if several share one.

    Raises:
        RuntimeError: another rank's copy arrived damaged.
    """
    local = _LocalCopies(folder, client, hello, early)
    return _restore(gang, local, str(folder or "."), nodes or range(gang.world)), local.skipped


def senders(has: Sequence[bool], nodes: Sequence[int]) -> dict[int, int]:
    """Return from which rank each rank without a copy receives it.

    Args:
        has: whether each rank has a copy.
        nodes: the machine of each rank.
    """
    holders = [rank for rank, there in enumerate(has) if there]
    sends = dict.fromkeys(holders, 0)
    found = {}
    beside = {nodes[rank] for rank in holders}
    lacking = [rank for rank, there in enumerate(has) if not there]
    for rank in sorted(lacking, key=lambda rank: nodes[rank] not in beside):
        near = [holder for holder in holders if nodes[holder] == nodes[rank]]
        found[rank] = min(near or holders, key=lambda holder: (sends[holder], holder))
        sends[found[rank]] += 1
    return found


def _restore(gang: Gang, local: _LocalCopies, folder: str, nodes: Sequence[int]) -> RestoredImage | None:
    while True:
        claims = gang.gather(str(local.candidates[0]).encode() if local.candidates else b"")
        best = max((commit for claim in claims if (commit := Commit.parse(claim.decode()))), default=None)
        if best is None:
            return None
        mine = local.load(best) if local.candidates and local.candidates[0] == best else None
        proofs = gang.gather(mine[0].to_bytes() if mine else b"")
        if any(proofs):
            break
        local.candidates = [commit for commit in local.candidates if commit != best]
    sources = senders(list(map(bool, proofs)), nodes)
    if mine is None:
        source = sources[gang.rank]
        manifest = Manifest.from_bytes(proofs[source])
        stretches = lay_out_of(manifest)
        memory = _receive(gang, source, manifest, local.memory(extent(stretches)))
        state = thaw(memory, stretches, f"checkpoint {manifest.commit}, from rank {source}", ours=local.ours)
        return RestoredImage(state, manifest, stretches, f"rank {source}", local.lost)
    manifest, memory = mine
    _send(gang, [rank for rank, holder in sources.items() if holder == gang.rank], manifest, memory)
    stretches = lay_out_of(manifest)
    state = thaw(memory, stretches, f"{folder}/{manifest.commit}/{SKELETON}", ours=local.ours)
    return RestoredImage(state, manifest, stretches, local.source, local.lost, local.durable)


def _send(gang: Gang, receivers: list[int], manifest: Manifest, memory: memoryview) -> None:
    """Send a checkpoint's files. If the manifest has no hash of a file, the hash follows the file.

    The hashes are computed while the file is sent.
    """
    with ThreadPoolExecutor(1) as hasher:
        parts = [memory[part.offset : part.offset + part.bytes] for part in lay_out_of(manifest)]
        sums = {file.name: file.sha256 for file in manifest.files}
        hashes = [
            hasher.submit(hashlib.sha256, part) if receivers and not sums[stretch.name] else None
            for stretch, part in zip(lay_out_of(manifest), parts, strict=True)
        ]
        for rank in receivers:
            for part, digest in zip(parts, hashes, strict=True):
                gang.send(part, rank)
                if digest is not None:
                    gang.send(memoryview(bytearray(digest.result().digest())), rank)


def _receive(gang: Gang, source: int, manifest: Manifest, memory: memoryview) -> memoryview:
    """Receive into ``memory`` and check hashes in parallel.

    TCP's checksum is weak, and an undetected error would be saved in all later checkpoints.
    """
    sums = {file.name: file.sha256 for file in manifest.files}
    with ThreadPoolExecutor(1) as hasher:
        for part in lay_out_of(manifest):
            digest = hashlib.sha256()

            def landed(piece: memoryview, digest: hashlib._Hash = digest) -> None:
                hasher.submit(digest.update, piece)

            gang.receive(memory[part.offset : part.offset + part.bytes], source, landed)
            hasher.submit(lambda: None).result()  # one thread works in order, so all earlier digests are done now
            if digest.hexdigest() != (sums[part.name] or _receive_hash(gang, source)):
                raise RuntimeError(f"{part.name} of {manifest.commit} arrived damaged from rank {source}: start again")
    return memory


def _receive_hash(gang: Gang, source: int) -> str:
    told = bytearray(32)
    gang.receive(memoryview(told), source, lambda _: None)
    return told.hex()
