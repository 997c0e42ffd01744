"""Images of sharded state: each machine's part stays in its saver's memory, and a copy in its neighbour's.

With sharded state a lost machine takes its part of the state along. With ``checkpoint.peers`` the machines form a ring
in the order of their nodes. Each saver has four image memories (``seal.py``): two for its own machine's parts, and two
for copies of its predecessor's. After the loss of one machine, and of its disk, the other machines' memories together
still hold a whole state.

**An image** is one step's state on all machines. All ranks make it together:

1. At a boundary, all ranks exchange the sizes of their parts and how far the image before this one is (``_announce``).
   The first rank of each machine, its *leader*, breaks the seal of the memory to fill, and shares the memory with the
   machine's other ranks. Each rank copies its part; optimizers' tensors are copied in the background (``snapshot.py``).
2. At the next boundary all copies are complete or torn, and all ranks start to exchange this (``advance``). At the
   boundary after that, if no copy is torn, each leader seals its machine's part.
3. A thread of each leader then sends the part to the next machine, within the bandwidth budget, with a hash for each
   file. Another thread receives the predecessor's part and seals this copy with the hashes. They use a process group of
   their own, so that they never wait for the script's collectives and never come between them.

**The rule.** The image counts once all leaders have sealed their part and the copy that they received, and all ranks
know this: from the exchange that begins the next image. Until then, no memory of the image before it is touched. So two
memories suffice for a complete image at any moment, and a loss repeats at most the steps of two spacings.

**A restore** offers all sealed images of all savers beside the checkpoints on disk (``reshard.py``), and takes the
newest state of which every part exists. An own part is trusted as it lies in memory; the hashes of a received copy are
checked. Until the next image counts, memories with the restored image are not touched. A trainer that hangs and is
still connected may change its memories: the next one gets others, and copies an image before it trusts the seal. The
next save makes the state durable; only COMMIT on disk makes a checkpoint, as ever.

**Failures.** A machine that refuses memory, a copy that is late or fails: all ranks agree to turn peers off for the
rest of the run, and the log says why. A hanging peer stops only the threads: training waits for them nowhere, except
for ``_END_S`` at the end of the process. After a lost saver, images begin again with the new saver's memory.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum

import torch

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint.client import new_manifest
from spotkeeper.train.checkpoint.durable import MemoryHandle, NeighbourMemory
from spotkeeper.train.checkpoint.image import Image, after, lay_out_node
from spotkeeper.train.checkpoint.manifest import SAVE, FileSum, Manifest, RankPlace, SaveKey
from spotkeeper.train.checkpoint.protocol import LEFT_PARTS, PART_IMAGES, SaverError, Stretch
from spotkeeper.train.checkpoint.reshard import KeptImage
from spotkeeper.train.checkpoint.seal import break_seal, seal
from spotkeeper.train.checkpoint.snapshot import BackgroundCopier
from spotkeeper.train.checkpoint.strategy import versions
from spotkeeper.train.checkpoint.writer import CheckpointWriter
from spotkeeper.train.core import pickling
from spotkeeper.train.core.errors import say
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.pace import SavePace

PIECE = 4 << 20  # bytes sent at once; after each, the sender waits as long as the budget demands
LATE_S = 30.0  # a copy that takes longer, and four times as long as the budget allows, fails
_END_S = 5.0  # time for running copies at the end of the process
_REFUSED = b"!"


class _Stage(IntEnum):
    """How far this rank's last image is. The ranks act on the highest stage."""

    DONE = 0
    RUNNING = 1
    FAILED = 2


@dataclass(frozen=True)
class _Intent:
    """What a rank says before an image."""

    state: int  # bytes
    skeleton: int  # bytes
    stage: _Stage
    why: str  # why it failed
    save: str  # name of the image; all ranks use rank 0's


@dataclass
class _Copies:
    """The copies that a leader sends and receives. ``late``: monotonic time at which they have failed."""

    threads: Sequence[threading.Thread]
    late: float
    errors: list[str]

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)


@dataclass
class _Flight:
    """An image that does not count yet. ``start``: seals this machine's part and starts its copies."""

    start: Callable[[], _Copies | None]
    complete: bool = False  # this rank's copy
    torn: Callable[[], int] | None = None  # waits for the answer whether any rank's copy is torn
    started: bool = False
    copies: _Copies | None = None  # of a leader


class PeerImages:
    """One rank's images of sharded state.

    Args:
        link: the same ranks with a process group of their own, for the copies.
        copier: copies optimizers' tensors in the background.
        pace: says when an image is due.
        mb_s: the most that a machine sends, megabytes per second.
    """

    def __init__(
        self,
        gang: Gang,
        link: Gang,
        writer: CheckpointWriter,
        places: tuple[RankPlace, ...],
        copier: BackgroundCopier,
        pace: SavePace,
        mb_s: float,
    ) -> None:
        self._gang, self._link, self._writer, self._places, self._copier = gang, link, writer, places, copier
        self._pace = pace
        self._rate = mb_s * 1e6
        nodes = sorted({place.node for place in places})
        self._ranks = [[place.rank for place in places if place.node == node] for node in nodes]
        self._here = nodes.index(places[gang.rank].node)
        self._before = (self._here - 1) % len(nodes)
        self._next = (self._here + 1) % len(nodes)
        self._leads = gang.rank == self._ranks[self._here][0]
        self._own, self._theirs = 0, PART_IMAGES  # the memories to fill
        self._opened = [NeighbourMemory() for _ in range(PART_IMAGES)]
        self._flight: _Flight | None = None
        self._end = threading.Event()
        self._on = True
        self._why = ""  # why this rank wants peers off
        atexit.register(self.close)

    # ------------------------------------------------------------ making images

    def warm(self, size: int) -> None:
        """Request the memories of the first images, for parts of ``size`` bytes each."""
        part = (Stretch("", 0, size),)
        self._memories(part, part)

    @property
    def ready(self) -> bool:
        """Whether this rank can begin an image, or has to say that peers must go off. Only leaders say so."""
        return self._on and self._leads and self._writer.client is not None and self._stage() is not _Stage.RUNNING

    def keep(self, image: Image, commit: Commit, owned: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Begin an image; return False if none can be made now. Collective.

        Tensors ``owned`` may change only in a step of their optimizers.
        """
        intents = self._announce(image) if self._on else None
        if intents is None:
            return False
        layouts = [_lay_out(ranks, intents) for ranks in self._ranks]
        stretches, starts = layouts[self._here]
        own, theirs = self._memories(stretches, layouts[self._before][0])
        offers = self._gang.gather(own if isinstance(own, bytes) else self._share())
        if self._refused(offers) or not all(offers[ranks[0]] for ranks in self._ranks):
            return False
        memory = own if isinstance(own, memoryview) else self._open(offers[self._ranks[self._here][0]])
        named = new_manifest(commit, self._places, versions() | {SAVE: intents[0].save})
        flight = _Flight(lambda: self._start(named, own, stretches, theirs, layouts[self._before][0]))
        self._flight = flight
        if memory is None:
            return True
        place = starts[self._ranks[self._here].index(self._gang.rank)]
        left = image.copy_to(memory, place, later=self._copier.select(owned))

        def complete() -> None:
            flight.complete = True

        self._copier.begin(left, complete, lambda why: None)
        return True

    def advance(self) -> bool:
        """Take an image one step on, at each boundary; return whether its copies run. Collective until they do."""
        flight = self._flight
        if flight is None:
            return False
        if flight.started:
            if (stage := self._stage()) is _Stage.FAILED and self._on:
                self._pace.hurry()  # the other machines must hear of it
            return stage is _Stage.RUNNING
        if flight.torn is None:
            self._copier.wait()
            flight.torn = self._gang.highest(int(not flight.complete))
        elif flight.torn():
            self._flight = None
        else:
            flight.started, flight.copies = True, flight.start()
        return self._flight is not None

    def _announce(self, image: Image) -> list[_Intent] | None:
        """Exchange sizes and how far the last image is; None if no image can be made now."""
        state, skeleton = (stretch.bytes for stretch in image.stretches)
        mine = _Intent(state, skeleton, self._stage(), self._why, secrets.token_hex(8))
        intents = [_Intent(**json.loads(blob)) for blob in self._gang.gather(json.dumps(asdict(mine)).encode())]
        stage = max(each.stage for each in intents)
        if stage == _Stage.FAILED:
            self._turn_off(next(each.why for each in intents if each.stage == _Stage.FAILED))
        if stage != _Stage.DONE:
            return None
        if self._flight is not None:  # it counts now
            self._flight = None
            self._own, self._theirs = _other(self._own), _other(self._theirs)
        return intents

    def _stage(self) -> _Stage:
        flight = self._flight
        if self._why:
            return _Stage.FAILED
        if flight is None:
            return _Stage.DONE
        if flight.copies is None:
            return _Stage.DONE if flight.started else _Stage.RUNNING
        if flight.copies.errors:
            self._why = flight.copies.errors[0]
        elif flight.copies.running and time.monotonic() > flight.copies.late:
            self._why = f"a copy between the machines of ranks {self._gang.rank} and {self._to} hangs"
        elif flight.copies.running:
            return _Stage.RUNNING
        return _Stage.FAILED if self._why else _Stage.DONE

    @property
    def _to(self) -> int:
        return self._ranks[self._next][0]

    def _memories(
        self, own: tuple[Stretch, ...], theirs: tuple[Stretch, ...]
    ) -> tuple[memoryview | bytes, memoryview | None]:
        """Return a leader's two memories to fill, without seals.

        If the saver has not allocated them yet, return b"" instead of the first one, and if it refuses, the reason.
        """
        client = self._writer.client
        if not self._leads or client is None:
            return b"", None
        try:
            mine = client.part_image(self._own, after(own[-1]))
            copy = client.part_image(self._theirs, after(theirs[-1]))
            for number, files in ((_other(self._own), own), (_other(self._theirs), theirs)):
                if client.parts.handle(number) is None:  # the next image finds it; one that exists has the newest image
                    client.part_image(number, after(files[-1]))
        except SaverError as error:
            if error.fault is Fault.SAVER_LOST:
                self._writer.lose(error)
                return b"", None
            return _REFUSED + str(error).encode(), None
        if mine is None or copy is None:
            return b"", None
        break_seal(mine)
        break_seal(copy)
        return mine, copy

    def _share(self) -> bytes:
        handle = self._writer.client and self._writer.client.parts.handle(self._own)
        return handle.to_bytes() if handle else b""

    def _open(self, offer: bytes) -> memoryview | None:
        handle = MemoryHandle.from_bytes(offer)
        try:
            return self._opened[self._own].open(handle)
        except OSError as error:
            self._why = f"rank {self._gang.rank} cannot open its machine's image memory: {error}"
        return None

    def _refused(self, offers: list[bytes]) -> bool:
        why = next((offer[1:].decode() for offer in offers if offer.startswith(_REFUSED)), "")
        if why:
            self._turn_off(why)
        return bool(why)

    def _turn_off(self, why: str) -> None:
        self._on = False
        if self._leads:
            say(f"peers are off for the rest of this run: {why}; a lost machine costs the steps since the last save")

    # ------------------------------------------------------------ copies between machines

    def _start(
        self,
        named: Manifest,
        memory: memoryview | bytes,
        own: tuple[Stretch, ...],
        copy: memoryview | None,
        theirs: tuple[Stretch, ...],
    ) -> _Copies | None:
        """Seal this machine's part and start its copies; None on ranks that do not lead."""
        if copy is None or isinstance(memory, bytes):
            return None
        errors: list[str] = []
        if not seal(memory, named, own, part=True):
            return _Copies((), 0.0, ["an image's seal has no room for so many ranks"])
        to, source = self._to, self._ranks[self._before][0]

        def receive() -> None:
            files = _receive(self._link, source, copy, theirs)
            seal(copy, replace(named, files=files), theirs, part=True)

        works = (lambda: _send(self._link, to, memory, own, self._rate, self._end), receive)
        threads = [threading.Thread(target=_run, args=(work, errors), daemon=True) for work in works]
        size = max(sum(stretch.bytes for stretch in each) for each in (own, theirs))
        copies = _Copies(threads, time.monotonic() + max(LATE_S, 4.0 * size / self._rate), errors)
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:  # no more threads
            errors.append(str(error))
        return copies

    def close(self) -> None:
        """Give running copies a moment to end."""
        end = time.monotonic() + _END_S
        self._end.set()
        for thread in self._flight.copies.threads if self._flight and self._flight.copies else ():
            if thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))

    # ------------------------------------------------------------ restoring

    def kept(self) -> list[KeptImage]:
        """Return the sealed images in this machine's saver, on each of its ranks. Collective."""
        blobs = self._gang.gather(pickling.dumps({number: each.to_bytes() for number, each in self._held().items()}))
        found: dict[int, bytes] = pickling.loads(blobs[self._ranks[self._here][0]], "a rank")
        kept = []
        for number, blob in found.items():
            if (image := KeptImage.open(number, MemoryHandle.from_bytes(blob))) is not None:
                kept.append(image)
        return kept

    def _held(self) -> dict[int, MemoryHandle]:
        """Return a leader's image memories; none on other ranks."""
        client = self._writer.client
        if not self._leads or client is None:
            return {}
        try:
            handles = {number: client.kept_part(number) for number in range(2 * LEFT_PARTS)}
        except SaverError as error:
            self._writer.lose(error)
            return {}
        return {number: handle for number, handle in handles.items() if handle is not None}

    def restored(self, kept: Sequence[KeptImage], key: SaveKey | None) -> None:
        """Spare the memories that hold the restored image, until another image counts. None: it is none of these."""
        if self._writer.client is not None:
            self._writer.client.parts.drop_left()
        holding = {image.number for image in kept if image.manifest.key == key}
        self._own, self._theirs = (
            _other(number) if number in holding else number for number in (self._own, self._theirs)
        )


def _other(number: int) -> int:
    """Return the other one of two memories."""
    first = number - number % PART_IMAGES
    return first + (number + 1) % PART_IMAGES


def _lay_out(ranks: Sequence[int], intents: Sequence[_Intent]) -> tuple[tuple[Stretch, ...], list[tuple[int, int]]]:
    return lay_out_node(ranks, [intents[rank].state for rank in ranks], [intents[rank].skeleton for rank in ranks])


def _run(work: Callable[[], None], errors: list[str]) -> None:
    try:
        work()
    except Exception as error:
        errors.append(f"a copy between machines failed: {type(error).__name__}: {error}")


def _send(
    link: Gang, to: int, memory: memoryview, stretches: Sequence[Stretch], rate: float, end: threading.Event
) -> None:
    """Send a machine's part and the hash of each file, at most ``rate`` bytes per second."""
    began, sent, sums = time.monotonic(), 0, b""
    for stretch in stretches:
        digest = hashlib.sha256()
        for piece in _pieces(memory, stretch):
            link.send(piece, to)
            digest.update(piece)
            sent += len(piece)
            end.wait(max(0.0, began + sent / rate - time.monotonic()))
        sums += digest.digest()
    link.send(memoryview(bytearray(sums)), to)


def _receive(link: Gang, source: int, memory: memoryview, stretches: Sequence[Stretch]) -> tuple[FileSum, ...]:
    for stretch in stretches:
        for piece in _pieces(memory, stretch):
            link.receive(piece, source, lambda _: None)
    sums = bytearray(32 * len(stretches))
    link.receive(memoryview(sums), source, lambda _: None)
    return tuple(
        FileSum(stretch.name, stretch.bytes, sums[32 * at : 32 * at + 32].hex()) for at, stretch in enumerate(stretches)
    )


def _pieces(memory: memoryview, stretch: Stretch) -> Iterable[memoryview]:
    end = stretch.offset + stretch.bytes
    return (memory[at : min(at + PIECE, end)] for at in range(stretch.offset, end, PIECE))
