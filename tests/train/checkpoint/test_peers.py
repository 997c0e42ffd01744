"""Images of sharded state with copies on a neighbour machine: when one counts, which memory the next one fills.

Each rank is a thread here, and a machine of its own; memories are bytes.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint import peers, store
from spotkeeper.train.checkpoint.durable import PAGE, MemoryHandle
from spotkeeper.train.checkpoint.image import lay_out
from spotkeeper.train.checkpoint.manifest import SAVE, FileSum, RankPlace
from spotkeeper.train.checkpoint.peers import PeerImages
from spotkeeper.train.checkpoint.protocol import SaverError, Stretch
from spotkeeper.train.checkpoint.reshard import KeptImage, _load, _Part
from spotkeeper.train.checkpoint.seal import AREA, seal_of
from spotkeeper.train.core.pace import SavePace

WAIT_S = 20.0
WORLD = 3


class Hub:
    """What connects the ranks."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, int], dict[int, Any]] = {}
        self._changed = threading.Condition()
        self.pipes: dict[tuple[int, int], queue.Queue[bytes]] = {}

    def exchange(self, kind: str, number: int, rank: int, value: Any) -> Callable[[], list[Any]]:
        with self._changed:
            said = self._said.setdefault((kind, number), {})
            said[rank] = value
            self._changed.notify_all()

        def answer() -> list[Any]:
            with self._changed:
                assert self._changed.wait_for(lambda: len(said) == WORLD, WAIT_S), f"{kind} {number} of {said}"
            return [said[each] for each in range(WORLD)]

        return answer

    def pipe(self, source: int, to: int) -> queue.Queue[bytes]:
        return self.pipes.setdefault((source, to), queue.Queue())


class FakeGang:
    """One rank's end of a hub. ``cut``: nothing arrives; ``broken``: nothing can be sent."""

    world = WORLD

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank, self._hub = rank, hub
        self._count = {"gather": 0, "highest": 0}
        self.cut, self.broken = threading.Event(), False

    def _exchange(self, kind: str, value: Any) -> Callable[[], list[Any]]:
        self._count[kind] += 1
        return self._hub.exchange(kind, self._count[kind], self.rank, value)

    def gather(self, blob: bytes) -> list[bytes]:
        return self._exchange("gather", blob)()

    def highest(self, value: int) -> Callable[[], int]:
        answer = self._exchange("highest", value)
        return lambda: max(answer())

    def send(self, view: memoryview, to: int) -> None:
        if self.broken:
            raise RuntimeError("connection reset by peer")
        self._hub.pipe(self.rank, to).put(bytes(view))

    def receive(self, view: memoryview, source: int, landed: Callable[[memoryview], None]) -> None:
        if self.cut.is_set():
            threading.Event().wait(WAIT_S)
        view[:] = self._hub.pipe(source, self.rank).get(timeout=WAIT_S)


class FakeClient:
    """A saver's client with memories of its own. ``lacks``: how often it has none yet; ``refuses``: the reason."""

    def __init__(self) -> None:
        self.memories: dict[int, bytearray] = {}
        self.lacks, self.refuses, self.asked = 0, "", list[int]()
        self.parts = SimpleNamespace(handle=self._handle, drop_left=lambda: None)

    def _handle(self, number: int) -> MemoryHandle | None:
        return MemoryHandle(1, 2, 3) if number in self.memories else None

    def part_image(self, number: int, size: int) -> memoryview | None:
        self.asked.append(number)
        if self.refuses:
            raise SaverError(Fault.NO_MEMORY, self.refuses)
        if self.lacks:
            self.lacks -= 1
            return None
        return memoryview(self.memories.setdefault(number, bytearray(size + AREA)))

    def sealed(self, number: int) -> tuple[int, str] | None:
        """Step and name of the image in a memory."""
        found = seal_of(memoryview(self.memories[number])) if number in self.memories else None
        return (found.manifest.commit.step, found.manifest.versions[SAVE]) if found and found.part else None


class FakeCopier:
    """Completes a copy when it is waited for; ``torn``: or never."""

    torn = False

    def __init__(self) -> None:
        self._complete: Callable[[], None] | None = None

    def select(self, owned: object) -> dict[Any, str]:
        return {}

    def begin(self, left: object, complete: Callable[[], None], discard: object) -> None:
        self._complete = complete

    def wait(self) -> None:
        if self._complete is not None and not self.torn:
            self._complete()


class FakeImage:
    """A rank's part, whose bytes are its step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.stretches = lay_out(PAGE + 5, 9)

    def copy_to(self, memory: memoryview, place: tuple[int, int], later: object) -> list[Any]:
        for at, stretch in zip(place, self.stretches, strict=True):
            memory[at : at + stretch.bytes] = bytes([self._step]) * stretch.bytes
        return []


class Machine:
    """A machine with one rank."""

    def __init__(self, hub: Hub, rank: int, links: Hub) -> None:
        self.client, self.copier, self.link = FakeClient(), FakeCopier(), FakeGang(links, rank)
        self.pace = SavePace(3600.0)
        self.writer = SimpleNamespace(client=self.client, lose=lambda error: None)
        places = tuple(RankPlace(each, each, each, True) for each in range(WORLD))
        gang, link, writer, copier = (
            cast(Any, each) for each in (FakeGang(hub, rank), self.link, self.writer, self.copier)
        )
        self.peers = PeerImages(gang, link, writer, places, copier, self.pace, 1e6)

    def begin(self, step: int) -> bool:
        """An image up to the start of its copies."""
        begun = self.peers.keep(cast(Any, FakeImage(step)), Commit(1, step), ())
        self.peers.advance()
        self.peers.advance()
        return begun

    def end(self) -> None:
        """Wait for the copies."""
        flight = self.peers._flight
        for thread in flight.copies.threads if flight and flight.copies else ():
            thread.join(WAIT_S)

    def image(self, step: int) -> bool:
        begun = self.begin(step)
        self.end()
        return begun

    def sealed(self) -> list[int | None]:
        """Steps of the images in its four memories."""
        return [found and found[0] for found in map(self.client.sealed, range(4))]


class Ring:
    """All machines."""

    def __init__(self) -> None:
        hub, links = Hub(), Hub()
        self.machines = [Machine(hub, rank, links) for rank in range(WORLD)]
        self._pool = ThreadPoolExecutor(WORLD)

    def all(self, what: Callable[[Machine], Any]) -> list[Any]:
        return list(self._pool.map(what, self.machines))

    def image(self, step: int) -> list[bool]:
        return self.all(lambda machine: machine.image(step))

    def sealed(self) -> list[list[int | None]]:
        return [machine.sealed() for machine in self.machines]


@pytest.fixture
def ring() -> Ring:
    return Ring()


def test_each_machine_has_its_part_and_a_copy_of_its_predecessors(ring: Ring) -> None:
    assert ring.image(3) == [True] * WORLD
    assert ring.sealed() == [[3, None, 3, None]] * WORLD
    for rank, machine in enumerate(ring.machines):
        copy = seal_of(memoryview(machine.client.memories[2]))
        assert copy is not None
        before = (rank - 1) % WORLD
        assert [file.name for file in copy.manifest.files] == [f"__{before}_0.distcp", f"skeleton.{before}.pkl"]
        sums = [hashlib.sha256(bytes([3]) * size).hexdigest() for size in (PAGE + 5, 9)]
        assert [file.sha256 for file in copy.manifest.files] == sums
    names = {machine.client.sealed(number) for machine in ring.machines for number in (0, 2)}
    assert len(names) == 1, "parts of one image have one name"


def test_images_fill_two_memories_in_turn(ring: Ring) -> None:
    for step in (3, 5, 7):
        assert ring.image(step) == [True] * WORLD
    assert ring.sealed() == [[7, 5, 7, 5]] * WORLD


def test_memory_is_requested_before_the_image_that_fills_it(ring: Ring) -> None:
    """Otherwise the saver would still allocate it, and the image would be left out."""
    first = ring.machines[0]
    first.client.lacks = 2
    first.peers.warm(5 * PAGE)
    assert first.client.asked == [0, 2, 1, 3]
    first.client.memories.clear()
    for step, asked in ((3, [0, 2, 1, 3]), (5, [1, 3])):  # none that exists: it has the newest image
        first.client.asked.clear()
        ring.image(step)
        assert first.client.asked == asked


def test_a_memory_that_is_filled_again_has_no_seal(ring: Ring) -> None:
    for step in (3, 5):
        ring.image(step)
    ring.all(lambda machine: machine.peers.keep(cast(Any, FakeImage(7)), Commit(1, 7), ()))
    assert ring.sealed() == [[None, 5, None, 5]] * WORLD


def test_no_memory_is_touched_before_the_newest_image_counts(ring: Ring) -> None:
    """One copy is still on its way, so the image before it is the only whole one."""
    ring.image(3)
    late = ring.machines[1]
    gate, receive = threading.Event(), late.link.receive

    def wait(*args: Any) -> None:
        gate.wait(WAIT_S)
        receive(*args)

    late.link.receive = wait  # type: ignore[method-assign]
    assert ring.all(lambda machine: machine.begin(5)) == [True] * WORLD
    assert not late.peers.ready
    assert ring.all(lambda machine: machine.peers.keep(cast(Any, FakeImage(7)), Commit(1, 7), ())) == [False] * WORLD
    assert [each[0] for each in ring.sealed()] == [3] * WORLD and late.sealed() == [3, 5, 3, None]
    gate.set()
    ring.all(Machine.end)
    assert ring.image(7) == [True] * WORLD
    assert ring.sealed() == [[7, 5, 7, 5]] * WORLD


def test_a_torn_copy_of_one_rank_leaves_no_seal_on_any_machine(ring: Ring) -> None:
    ring.image(3)
    ring.machines[2].copier.torn = True
    assert ring.image(5) == [True] * WORLD
    assert ring.sealed() == [[3, None, 3, None]] * WORLD
    ring.machines[2].copier.torn = False
    ring.image(7)
    assert ring.sealed() == [[3, 7, 3, 7]] * WORLD


def test_refused_memory_turns_peers_off_on_all_machines(ring: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    ring.image(3)
    ring.machines[1].client.refuses = "image memory: only 3 MB are left"
    assert ring.image(5) == ring.image(7) == [False] * WORLD
    assert not any(machine.peers.ready for machine in ring.machines)
    assert (
        capsys.readouterr().err.splitlines()
        == [
            "spotkeeper: peers are off for the rest of this run: image memory: only 3 MB are left; a lost machine "
            "costs the steps since the last save"
        ]
        * WORLD
    )


def test_images_wait_for_memory_that_is_being_allocated(ring: Ring) -> None:
    ring.machines[1].client.lacks = 1
    assert ring.image(3) == [False] * WORLD
    assert ring.image(5) == [True] * WORLD
    assert ring.sealed() == [[5, None, 5, None]] * WORLD


def test_a_machine_without_a_saver_makes_no_images_for_now(ring: Ring) -> None:
    client, ring.machines[1].writer.client = ring.machines[1].client, None
    assert ring.image(3) == [False] * WORLD and not ring.machines[1].peers.ready
    ring.machines[1].writer.client = client
    assert ring.image(5) == [True] * WORLD


def test_a_peer_that_hangs_turns_peers_off_and_stops_nobody(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its link is cut: nothing arrives, and no error."""
    monkeypatch.setattr(peers, "LATE_S", 0.0)
    ring.machines[1].link.cut.set()
    ring.all(lambda machine: machine.begin(3))
    ring.machines[0].end()
    assert not ring.machines[1].peers.advance(), "no step counts as slowed down any more"
    assert ring.machines[1].pace.image_due(0.0), "to tell the others"
    assert ring.all(lambda machine: machine.begin(5)) == [False] * WORLD
    assert not any(machine.peers.ready for machine in ring.machines)
    told = "peers are off for the rest of this run: a copy between the machines of ranks 1 and 2 hangs"
    assert capsys.readouterr().err.count(told) == WORLD


def test_a_copy_that_fails_turns_peers_off(ring: Ring, capsys: pytest.CaptureFixture[str]) -> None:
    ring.image(3)
    ring.machines[2].link.broken = True
    ring.all(lambda machine: machine.begin(5))
    ring.machines[2].peers._flight.copies.threads[0].join(WAIT_S)  # type: ignore[union-attr]
    assert ring.all(lambda machine: machine.begin(7)) == [False] * WORLD
    assert capsys.readouterr().err.count("RuntimeError: connection reset by peer") == WORLD
    assert [each[0] for each in ring.sealed()] == [3] * WORLD


def test_without_threads_for_the_copies_peers_are_turned_off(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    ring.image(3)
    monkeypatch.setattr(peers, "threading", SimpleNamespace(**vars(threading) | {"Thread": Refused}))
    ring.all(lambda machine: machine.begin(5))
    assert ring.all(lambda machine: machine.begin(7)) == [False] * WORLD
    assert capsys.readouterr().err.count("peers are off for the rest of this run: can't start new thread") == WORLD
    assert [each[0] for each in ring.sealed()] == [3] * WORLD


def test_the_restored_image_is_spared_until_another_one_counts(ring: Ring) -> None:
    ring.image(3)
    ring.image(5)
    following = Ring()
    for machine, before in zip(following.machines, ring.machines, strict=True):
        machine.client.memories = before.client.memories
        name = before.client.sealed(0)
        assert name is not None
        manifest = seal_of(memoryview(before.client.memories[0])).manifest  # type: ignore[union-attr]
        kept = [KeptImage(number, manifest, {}) for number in (0, 2)]
        machine.peers.restored(kept, (Commit(1, 3), name[1]))
    following.image(7)
    assert following.sealed() == [[3, 7, 3, 7]] * WORLD
    following.image(9)
    assert following.sealed() == [[9, 7, 9, 7]] * WORLD


def test_a_machine_sends_no_faster_than_its_budget() -> None:
    waits: list[float] = []
    end: Any = SimpleNamespace(wait=waits.append)
    link: Any = SimpleNamespace(send=lambda view, to: None)
    size = 2 * peers.PIECE + 1
    peers._send(link, 1, memoryview(bytearray(size)), [Stretch("a", 0, size)], 1e6, end)
    assert len(waits) == 3
    assert waits[0] == pytest.approx(peers.PIECE / 1e6, abs=1.0) and waits[2] == pytest.approx(size / 1e6, abs=1.0)


def test_an_image_costs_what_it_slows_down_until_it_is_copied() -> None:
    pace = SavePace(3600.0)
    for _ in range(5):
        pace.add_step(0.1)
    pace.add_image(1.0, 1.01, 10)
    for _ in range(3):  # steps while the copies run
        pace.add_step(0.13)
        pace.add_copying()
    assert not pace.image_due(1e9)
    pace.add_step(0.13)
    pace.add_step(0.1)
    assert pace.image_cost_s == pytest.approx(0.01 + 4 * 0.03)
    assert pace.image_due(1e9)


def test_a_copy_with_a_wrong_byte_is_not_restored() -> None:
    data = memoryview(bytearray(b"state"))
    file = FileSum("__1_0.distcp", 5, hashlib.sha256(data).hexdigest())
    manifest: Any = SimpleNamespace(files=(file,))
    part = _Part(manifest, {file.name: lambda: data})
    assert _load(None, part, file.name) == b"state"
    data[0] ^= 1
    with pytest.raises(store.ChecksumError, match="in a neighbour's memory does not match its hash"):
        _load(None, part, file.name)
    manifest.files = (replace(file, sha256=""),)
    assert _load(None, part, file.name) == data, "a machine's own memory is trusted"
