"""Find the best state that any rank holds, and give it to all. Collective.

Each rank names the newest checkpoint in its folder; those with the best read it, hashing
on the way; whoever cannot confirm it drops it, until one can or nothing is left. Then the
holders share out the others among themselves and send them the image over the training
network. Holders are compared by (generation, step), not by hash: ranks' local parts are
gathered, but a node may hold a copy of another save of the same step.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.train import store
from spotkeeper.train.checkpoint import State, extent, lay_out_of, thaw
from spotkeeper.train.client import Client, Hello, SaverError
from spotkeeper.train.control import Commit
from spotkeeper.train.errors import AttachError
from spotkeeper.train.gang import Gang
from spotkeeper.train.messages import Stretch
from spotkeeper.train.store import STATE, Manifest, Skipped


@dataclass(frozen=True)
class Restored:
    """What this rank starts from. ``source``: "memory", "disk", or "rank N".

    ``lost``: the saver went meanwhile, so the image lies in memory of this process alone.
    """

    state: State
    manifest: Manifest
    stretches: tuple[Stretch, ...]
    source: str
    lost: SaverError | None = None


class _Local:
    """What this rank can offer, newest first, and where it puts an image."""

    def __init__(self, folder: Path | None, client: Client | None, hello: Hello | None) -> None:
        self._folder = folder
        self._client = client
        self._held = hello.held if hello else None
        self.candidates: list[Commit] = []
        self.skipped: list[Skipped] = []
        self.source = "disk"
        self.lost: SaverError | None = None
        for commit in store.scan(folder) if folder else ():
            try:
                manifest = store.read(folder or "", commit)
            except ValueError as error:
                self.skipped.append(Skipped(str(commit), str(error)))
                continue
            if all(file.name != STATE for file in manifest.files):
                raise AttachError(
                    f"checkpoint {commit} in {folder} is of sharded state, and this model is not sharded: use another "
                    "folder (attach(checkpoint_dir=)), or another job. torch.distributed.checkpoint reads it"
                )
            self.candidates.append(commit)

    def memory(self, size: int) -> memoryview:
        """The saver's warm memory where there is one."""
        if self._client is not None:
            try:
                return memoryview(self._client.stage(size))
            except SaverError as error:
                self._lose(error)
        return memoryview(mmap.mmap(-1, size))

    def _lose(self, error: SaverError) -> None:
        """Without it this rank can save nothing for now, but it can start: only the warm memory is gone."""
        self._client, self.lost = None, error

    def load(self, commit: Commit) -> tuple[Manifest, memoryview] | None:
        """Read and check one of the candidates; None (and a reason in ``skipped``) where it does not hold."""
        if self._held is not None and self._held.commit == commit and self._client is not None:
            try:
                memory = memoryview(self._client.memory(extent(lay_out_of(self._held))))
            except SaverError as error:
                self._lose(error)
            else:
                self.source = "memory"
                return self._held, memory
        assert self._folder is not None
        try:
            manifest = store.read(self._folder, commit)
            stretches = lay_out_of(manifest)
            memory = self.memory(extent(stretches))
            for part in stretches:
                store.read_into(self._folder, manifest, part.name, memory[part.offset : part.offset + part.bytes])
        except (ValueError, KeyError) as error:
            self.skipped.append(Skipped(str(commit), str(error)))
            if isinstance(error, store.RottenError):
                self._put_aside(commit)
            return None
        return manifest, memory

    def _put_aside(self, commit: Commit) -> None:
        """Its sizes hold: left there, it would count as one of those that are kept, and a peer's copy had no place."""
        if self._client is not None and self._folder is not None:  # one rank of a node; nobody writes now
            with contextlib.suppress(OSError):
                store.quarantine(self._folder, commit)


def restore(
    gang: Gang, folder: Path | None, client: Client | None, hello: Hello | None
) -> tuple[Restored | None, list[Skipped]]:
    """The best state of all ranks, and what this rank passed over. None: nobody holds anything.

    Raises:
        RuntimeError: a peer's copy arrived damaged.
    """
    local = _Local(folder, client, hello)
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
        return Restored(thaw(memory, stretches), manifest, stretches, f"rank {source}", local.lost), local.skipped
    manifest, memory = mine
    stretches = lay_out_of(manifest)
    for holder, rank in pairs:
        if holder == gang.rank:
            _send(gang, rank, memory, stretches)
    return Restored(thaw(memory, stretches), manifest, stretches, local.source, local.lost), local.skipped


def _send(gang: Gang, to: int, memory: memoryview, stretches: tuple[Stretch, ...]) -> None:
    for part in stretches:
        gang.send(memory[part.offset : part.offset + part.bytes], to)


def _receive(gang: Gang, source: int, manifest: Manifest, memory: memoryview) -> memoryview:
    """Into ``memory``, hashing beside the network: TCP's checksum is weak, and this state lives on."""
    with ThreadPoolExecutor(1) as hasher:
        for part in lay_out_of(manifest):
            digest = hashlib.sha256()

            def landed(piece: memoryview, digest: hashlib._Hash = digest) -> None:
                hasher.submit(digest.update, piece)

            gang.receive(memory[part.offset : part.offset + part.bytes], source, landed)
            hasher.submit(lambda: None).result()  # one thread, in order: all before it is done
            if digest.hexdigest() != next(file.sha256 for file in manifest.files if file.name == part.name):
                raise RuntimeError(f"{part.name} of {manifest.commit} arrived damaged from rank {source}; start again")
    return memory
