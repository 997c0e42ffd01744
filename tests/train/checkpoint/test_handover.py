"""The image of a trainer that is gone: the next trainer restores it without waiting for the disk."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spotkeeper.train.agent_link.control import Commit, Control, Fault
from spotkeeper.train.checkpoint import handover, store, strategy
from spotkeeper.train.checkpoint.client import Client, new_manifest
from spotkeeper.train.checkpoint.handover import Handover
from spotkeeper.train.checkpoint.image import Image, RunState, pack
from spotkeeper.train.checkpoint.manifest import IMAGE, Manifest, RankPlace
from spotkeeper.train.checkpoint.protocol import SaveDurable, SaveFailed, SaverState
from spotkeeper.train.checkpoint.restore import EarlyRead, restore
from spotkeeper.train.checkpoint.saver import SaverServer
from spotkeeper.train.checkpoint.seal import AREA, break_seal, seal, seal_of
from spotkeeper.train.checkpoint.strategy import Replicated
from spotkeeper.train.core.gang import SoloGang
from spotkeeper.train.core.settings import RunSettings
from tests.train.checkpoint.test_images import commit_of, greeted, keep, written
from tests.train.checkpoint.test_saver import GANG, served

KEPT = Commit(1, 5)


class Node:
    """A saver in this process, whose writes of images wait for ``disk``, and its trainers, one after the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.server = folder, SaverServer(peer=None)
        self.disk, self.fails = threading.Event(), 0
        shipped = handover.write_kept

        def write(kept: Any) -> Any:
            self.disk.wait()
            if self.fails:
                self.fails -= 1
                raise OSError(28, "No space left on device")
            return shipped(kept)

        monkeypatch.setattr(handover, "write_kept", write)

    def hello(self, gen: int) -> tuple[Client, SaverState]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server._admit(theirs)
        client = Client(ours)
        known: list[SaverState] = []
        asking = threading.Thread(target=lambda: known.append(client.hello(self.folder, gen, 2)))
        asking.start()
        while not known:
            self.server._drain(self.server._peers[-1])
            asking.join(0.001)
        return client, known[0]

    def image(self, client: Client, number: int, value: float, commit: Commit) -> memoryview:
        """Keep an image of one tensor in a memory of this node."""
        image = Image(RunState({"w": torch.full((2000,), value)}, {}, (pack({}),)))
        while (memory := client.image(number, image.size)) is None:
            self.server._drain(self.server._peers[-1])
        break_seal(memory)
        image.copy_to(memory)
        assert seal(memory, new_manifest(commit, GANG, {IMAGE: "yes"}), image.stretches)
        return memory

    def lose(self) -> None:
        """The trainer dies."""
        self.server._drop(self.server._peers[-1])

    def write(self) -> None:
        self.disk.set()
        self.server._await_writes()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    node = Node(tmp_path / "ckpt", monkeypatch)
    yield node
    node.write()


@pytest.fixture
def lost(node: Node) -> Node:
    """After a trainer with an image of ``KEPT`` in its second memory, and an older one."""
    client, _ = node.hello(1)
    node.image(client, 0, 4.0, Commit(1, 4))
    node.image(client, 1, 5.0, KEPT)
    node.lose()
    return node


def loaded(node: Node, client: Client, known: SaverState) -> tuple[Commit, float, str, bool] | None:
    restored, _ = restore(SoloGang(), node.folder, client, known)
    if restored is None:
        return None
    model: Any = restored.state.model
    assert len(set(model["w"].tolist())) == 1
    return restored.manifest.commit, float(model["w"][0]), restored.source, restored.durable


def test_the_next_trainer_restores_the_image_before_the_disk_has_it(lost: Node) -> None:
    client, known = lost.hello(2)
    assert loaded(lost, client, known) == (KEPT, 5.0, "memory", False)
    assert known.quarantined == () and store.complete(lost.folder) == []
    assert client.pending == KEPT and client.poll() is None
    lost.write()
    assert client.poll() == SaveDurable(KEPT, pytest.approx(0.0, abs=60.0), kept=True)
    assert client.pending is None and store.complete(lost.folder) == [KEPT]


def test_an_image_is_no_checkpoint_of_the_run_before_its_commit(lost: Node) -> None:
    """What a trainer tells its agent is on disk."""
    client, known = lost.hello(2)
    told: list[Commit] = []
    writer: Any = SimpleNamespace(client=client, writes=True, has=lambda manifest: told.append(manifest.commit))
    replicated = Replicated(SoloGang(), writer, None, GANG, None)  # type: ignore[arg-type]
    found, _ = replicated.begin(lost.folder, known)
    assert found is not None and (found.manifest.commit, found.source, told) == (KEPT, "memory", [])
    lost.write()
    client, known = lost.hello(3)
    writer.client = client
    replicated.begin(lost.folder, known)
    assert told == [KEPT]


def test_a_write_that_the_saver_is_making_is_not_left_by_a_crash(lost: Node) -> None:
    home = lost.folder / str(KEPT)
    home.mkdir(parents=True)
    _, known = lost.hello(2)
    assert known.quarantined == () and home.is_dir() and commit_of(known.image) == KEPT
    home.rmdir()


def test_a_later_save_is_waited_for_beside_the_image(lost: Node) -> None:
    client, known = lost.hello(2)
    assert commit_of(known.image) == KEPT
    image = Image(RunState({"w": torch.ones(5)}, {}, (pack({}),)))
    client.reserve(image.size)
    lost.server._drain(lost.server._peers[-1])
    image.copy_to(memoryview(client.stage(image.size)))
    client.save(new_manifest(Commit(2, 6), GANG, {}), image.stretches)
    lost.disk.set()
    lost.server._drain(lost.server._peers[-1])
    events = [client.wait(10), client.wait(10)]
    assert [(type(each), each.commit) for each in events if each] == [
        (SaveDurable, KEPT),
        (SaveDurable, Commit(2, 6)),
    ]
    assert client.pending is None and store.complete(lost.folder) == [Commit(2, 6), KEPT]


def test_an_image_whose_write_failed_is_offered_and_written_again(
    lost: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    lost.fails = 2
    first, _ = lost.hello(2)
    lost.write()
    failed = first.poll()
    assert isinstance(failed, SaveFailed) and (failed.commit, failed.fault, failed.kept) == (
        KEPT,
        Fault.DISK_FULL,
        True,
    )
    second, known = lost.hello(3)
    assert commit_of(known.image) == KEPT
    lost.write()
    assert first.pending is None and isinstance(second.poll(), SaveFailed)
    third, known = lost.hello(4)
    assert loaded(lost, third, known) == (KEPT, 5.0, "memory", False)
    lost.write()
    assert isinstance(third.poll(), SaveDurable) and store.complete(lost.folder) == [KEPT]
    assert capsys.readouterr().err.count("image 1-5 was not written: [Errno 28]") == 2


def test_a_written_image_counts_only_while_the_disk_has_it(lost: Node) -> None:
    """It may have been removed, or found to be damaged."""
    lost.write()
    assert commit_of(lost.hello(2)[1].image) == KEPT
    lost.lose()
    (lost.folder / str(KEPT) / store.COMMIT).unlink()
    assert lost.hello(3)[1].image is None


def test_a_generation_that_trains_no_step_leaves_the_image_to_the_next(lost: Node) -> None:
    lost.hello(2)
    lost.lose()
    client, known = lost.hello(3)
    assert loaded(lost, client, known) == (KEPT, 5.0, "memory", False)


def test_a_trainer_that_loses_only_its_connection_leaves_the_same_image(lost: Node) -> None:
    """Kept anew, it would be written a second time beside the first write."""
    kept = lost.server._handover._kept
    lost.hello(1)
    lost.lose()
    assert kept is not None and lost.server._handover._kept is kept
    assert lost.server._handover._running == [kept]


def test_an_image_that_a_trainer_fills_again_is_not_offered(lost: Node) -> None:
    client, _ = lost.hello(2)
    lost.disk.set()
    lost.image(client, 0, 6.0, Commit(2, 6))
    break_seal(lost.image(client, 1, 7.0, Commit(2, 7)))
    lost.lose()
    client, known = lost.hello(3)
    assert loaded(lost, client, known) == (Commit(2, 6), 6.0, "memory", False)


def test_the_memory_of_an_image_is_filled_again_only_after_its_write(
    lost: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, waits = Handover.join, []

    def join(self: Handover) -> None:
        lost.disk.set()
        shipped(self)
        waits.append(store.complete(lost.folder))

    client, _ = lost.hello(2)
    monkeypatch.setattr(Handover, "join", join)
    lost.image(client, 0, 6.0, Commit(2, 6))
    assert waits == [], "the other memory is free"
    lost.image(client, 1, 7.0, Commit(2, 7))
    assert waits == [[KEPT]]


def test_refused_memory_waits_for_the_write_of_an_image(lost: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from spotkeeper.train.checkpoint import durable

    client, _ = lost.hello(2)
    monkeypatch.setattr(durable, "memory_refusal", lambda *_: "only 3 MB are left")
    lost.disk.set()
    client.reserve(1 << 20)
    lost.server._drain(lost.server._peers[-1])
    assert store.complete(lost.folder) == [KEPT]
    assert not any(each.size for each in lost.server._memories.images)
    assert lost.hello(3)[1].image is None


def test_an_image_that_an_older_trainer_changes_is_passed_over(node: Node) -> None:
    """It hangs and is still connected. It may go on while its image is read."""
    older, _ = node.hello(1)
    memory = node.image(older, 0, 5.0, KEPT)
    client, known = node.hello(2)
    assert known.image is not None and known.image.shared
    break_seal(memory)
    memory[:8] = bytes(8)
    assert commit_of(node.hello(2)[1].image) is None, "not offered any more"
    assert loaded(node, client, known) is None
    node.write()
    assert store.complete(node.folder) == []


def test_an_image_that_changes_while_it_is_copied_is_passed_over(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from spotkeeper.train.checkpoint import seal as seals

    older, _ = node.hello(1)
    memory = node.image(older, 0, 5.0, KEPT)
    client, known = node.hello(2)

    def read(image: memoryview) -> Any:
        """Called after the copy."""
        break_seal(memory)
        return seal_of(image)

    monkeypatch.setattr(seals, "seal_of", read)
    restored, skipped = restore(SoloGang(), node.folder, client, known)
    assert restored is None and [str(each) for each in skipped] == [
        "1-5: image in memory: it changed while it was read"
    ]


def test_an_older_trainer_has_no_memory_of_the_next(node: Node) -> None:
    older, _ = node.hello(1)
    memory = node.image(older, 0, 5.0, KEPT)
    client, known = node.hello(2)
    assert loaded(node, client, known) == (KEPT, 5.0, "memory", False)
    node.write()
    mine = node.image(client, 0, 6.0, Commit(2, 6)), node.image(client, 1, 7.0, Commit(2, 7))
    memory[:] = bytes(len(memory))
    assert all(any(each[-AREA:]) for each in mine)
    assert node.server._handover._kept is None, "freed once the next trainer trains"


@pytest.mark.parametrize("fails", [0, 1])
def test_an_image_is_kept_until_the_disk_has_it_though_the_next_trainer_trains(node: Node, fails: int) -> None:
    """An older trainer hangs, and the next one is lost after it has asked for memory, before it has an image."""
    node.fails = fails
    older, _ = node.hello(1)
    node.image(older, 0, 5.0, KEPT)
    client, known = node.hello(2)
    assert loaded(node, client, known) == (KEPT, 5.0, "memory", False)
    node.image(client, 0, 6.0, Commit(2, 6))
    break_seal(memoryview(client.image(0, 1) or b""))
    if fails:
        node.write()
        node.disk.clear()
    node.lose()
    client, known = node.hello(3)
    assert loaded(node, client, known) == (KEPT, 5.0, "memory", False)
    node.write()
    assert store.complete(node.folder) == [KEPT]
    node.image(client, 0, 8.0, Commit(3, 8))
    assert node.server._handover._kept is None, "it is on disk, and the next trainer trains"


def test_an_image_gives_way_to_a_newer_one_that_is_kept(node: Node) -> None:
    older, _ = node.hello(1)
    node.image(older, 0, 5.0, KEPT)
    client, _ = node.hello(2)
    node.image(client, 0, 6.0, Commit(2, 6))
    first = node.server._handover._kept
    node.lose()
    client, known = node.hello(3)
    assert loaded(node, client, known) == (Commit(2, 6), 6.0, "memory", False)
    node.write()
    assert store.complete(node.folder) == [Commit(2, 6), KEPT]
    assert first is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.memory.fd)


def test_an_image_older_than_the_disk_is_not_offered(node: Node) -> None:
    client, _ = node.hello(1)
    node.image(client, 0, 5.0, KEPT)
    home = node.folder / "1-6"
    home.mkdir(parents=True)
    (home / store.COMMIT).write_bytes(new_manifest(Commit(1, 6), GANG, {}).to_bytes())
    node.lose()
    assert node.hello(2)[1].image is None


def test_without_a_thread_the_image_is_written_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client, _ = node.hello(1)
    node.image(client, 0, 5.0, KEPT)
    node.disk.set()
    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: refuse(self) if self.name == "image" else real(self))
    node.lose()
    assert store.complete(node.folder) == [KEPT]


def test_an_image_copies_in_the_background_with_the_strategys_copier(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    writer: Any = SimpleNamespace(next_image=lambda: 0, image=lambda *told: not asked.append(told))
    subject: Any = SimpleNamespace(
        take_local=dict, take_common=lambda: ({"w": 1}, {}), optimizer_tensors=lambda: ("m",)
    )
    copier: Any = SimpleNamespace(wait=lambda: None)
    replicated = Replicated(SoloGang(), writer, Control.private(), GANG, None, copier)
    assert replicated.image(subject, KEPT)
    ((state, manifest, *rest),) = asked
    assert isinstance(state, RunState) and (state.model, state.rest) == ({"w": 1}, {})
    assert isinstance(manifest, Manifest) and manifest.versions[IMAGE] == "yes"
    assert (manifest.commit, rest) == (KEPT, [copier, ("m",)])


def test_the_disk_is_not_read_if_the_saver_offers_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with served(tmp_path) as (path, _):
        trainer = greeted(path, tmp_path / "ckpt")
        keep(trainer, 0, KEPT)
        trainer.close()
        run = {"SPOTKEEPER_RUN": str(tmp_path), "SPOTKEEPER_CKPT": str(tmp_path / "ckpt"), "SPOTKEEPER_GEN": "2"}
        assert EarlyRead.begin(RunSettings.from_env(run | {"SPOTKEEPER_SAVER": str(path)})) is None
        assert written(path, tmp_path / "ckpt", 2) == ([KEPT], KEPT), "and it offers the image again"


@pytest.mark.parametrize(
    ("world", "local", "source", "copies"),
    [(2, "of rank 1", "disk", 0), (3, "of rank 0", "disk", 0), (2, "of rank 1", "rank 0", 1)],
)
def test_what_a_rank_restores_is_its_own_if_the_number_of_ranks_is_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: int, local: str, source: str, copies: int
) -> None:
    """Otherwise it is rank 0's; and what another rank sent is copied into this node's saver."""
    blobs = tuple(pack({"is": f"of rank {rank}"}) for rank in range(2))
    manifest, stretches, asked, copied = SimpleNamespace(world=2), object(), list[object](), list[object]()
    found = SimpleNamespace(
        state=RunState({}, {}, blobs), manifest=manifest, source=source, lost=None, durable=True, stretches=stretches
    )
    monkeypatch.setattr(strategy, "restore", lambda *given: (asked.append(given), (found, []))[1])
    gang: Any = SimpleNamespace(rank=1, world=world)
    writer: Any = SimpleNamespace(client=object(), writes=False, copy=lambda *given: copied.append(given))
    hello, early = object(), object()
    places = tuple(RankPlace(rank, node, node, True) for rank, node in ((1, 4), (0, 3)))
    begun, _ = Replicated(gang, writer, None, places, None).begin(tmp_path, hello, early)  # type: ignore[arg-type]
    assert asked == [(gang, tmp_path, writer.client, hello, early, [3, 4])], "and each rank's machine"
    assert begun is not None and (begun.local, begun.same_world) == ({"is": local}, world == 2)
    assert copied == [(manifest, stretches)] * copies
