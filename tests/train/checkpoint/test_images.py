"""Images in the saver's memory: which of them becomes a checkpoint once its trainer is gone, and which never does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import mmap
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spotkeeper.train.agent_link.control import NAME, Commit, Control, Fault
from spotkeeper.train.checkpoint import durable, handover, store
from spotkeeper.train.checkpoint.client import Client, new_manifest
from spotkeeper.train.checkpoint.durable import PAGE, Buffer, CopyOnWrite
from spotkeeper.train.checkpoint.image import Image, RunState, thaw
from spotkeeper.train.checkpoint.manifest import IMAGE, Manifest
from spotkeeper.train.checkpoint.memories import ImageMemories
from spotkeeper.train.checkpoint.protocol import (
    IMAGES,
    OfferedImage,
    SaveDurable,
    SaveFailed,
    SaverError,
    Stretch,
)
from spotkeeper.train.checkpoint.restore import restore
from spotkeeper.train.checkpoint.saver import SaverServer
from spotkeeper.train.checkpoint.seal import AREA, break_seal, read_seal, seal, seal_of
from spotkeeper.train.checkpoint.snapshot import BackgroundCopier
from spotkeeper.train.checkpoint.strategy import Replicated
from spotkeeper.train.checkpoint.writer import CheckpointWriter
from spotkeeper.train.core.gang import SoloGang
from spotkeeper.train.core.headroom import IMAGE_SHARE, SAVE_SHARE
from spotkeeper.train.core.pace import IMAGE_S, SavePace
from spotkeeper.train.core.settings import RunSettings
from spotkeeper.train.core.small_parts import PendingParts
from tests.train.checkpoint.test_image import populates
from tests.train.checkpoint.test_saver import GANG, served, stage
from tests.train.checkpoint.test_snapshot import ATTACH
from tests.train.crash.gang import machines
from tests.train.crash.trainer import work_with_images
from tests.train.forks import run_script

STATE = Stretch(store.STATE, 0, PAGE + 5)
SKELETON = Stretch(store.SKELETON, 2 * PAGE, 9)
SIZE = 3 * PAGE


def image(client: Client, number: int, size: int = SIZE) -> memoryview:
    """The image memory, once the saver has allocated it."""
    while (memory := client.image(number, size)) is None:
        client._read_soon()
    return memory


def keep(client: Client, number: int, commit: Commit, *, sealed: bool = True) -> bytes:
    """Fill an image memory with random bytes, as a trainer does; return the state's bytes."""
    return fill(image(client, number), commit, sealed=sealed)


def fill(memory: memoryview, commit: Commit, *, sealed: bool = True) -> bytes:
    state = os.urandom(STATE.bytes)
    break_seal(memory)
    memory[: STATE.bytes], memory[SKELETON.offset : SKELETON.offset + SKELETON.bytes] = state, b"skeleton!"
    if sealed:
        assert seal(memory, new_manifest(commit, GANG, {IMAGE: "yes"}), (STATE, SKELETON))
    return state


def greeted(path: Path, folder: Path) -> Client:
    """A trainer of generation 1, after its hello."""
    trainer = Client.connect(path)
    trainer.hello(folder, 1, 2)
    return trainer


def written(path: Path, folder: Path, gen: int) -> tuple[list[Commit], Commit | None]:
    """The checkpoints on disk after the saver has handled everything, and the one that it offers in memory."""
    with_next = Client.connect(path)
    known = with_next.hello(folder, gen, 2)
    with_next.wait(60)
    with_next.hello(folder, gen, 2)  # after the last pruning
    with_next.close()
    return store.complete(folder), commit_of(known.image) or (known.staged.commit if known.staged else None)


def commit_of(image: OfferedImage | None) -> Commit | None:
    sealed = seal_of(image.memory) if image else None
    return sealed.manifest.commit if sealed else None


def test_the_newest_sealed_image_of_a_dead_trainer_becomes_a_checkpoint(tmp_path: Path) -> None:
    with served(tmp_path) as (path, _):
        trainer = greeted(path, tmp_path / "ckpt")
        keep(trainer, 0, Commit(1, 5))
        state = keep(trainer, 1, Commit(1, 7))
        trainer.close()
        assert written(path, tmp_path / "ckpt", 2) == ([Commit(1, 7)], Commit(1, 7))
    manifest, found = store.read(tmp_path / "ckpt", Commit(1, 7)), bytearray(STATE.bytes)
    store.read_into(tmp_path / "ckpt", manifest, store.STATE, memoryview(found))
    assert bytes(found) == state


def test_a_saver_that_is_told_to_end_writes_the_image_of_a_dead_trainer(tmp_path: Path) -> None:
    with served(tmp_path) as (path, process):
        trainer = greeted(path, tmp_path / "ckpt")
        keep(trainer, 0, Commit(1, 5))
        trainer.close()
        process.terminate()
        assert process.wait(60) == 0
    assert store.complete(tmp_path / "ckpt") == [Commit(1, 5)]


def test_images_displace_each_other_before_any_save(tmp_path: Path) -> None:
    """A script may fail again and again, a few steps after each start: its images may hold the cause of the failure."""
    with served(tmp_path) as (path, _):
        for gen in range(1, 6):
            trainer = Client.connect(path)
            trainer.hello(tmp_path / "ckpt", gen, 2)
            if gen in (1, 4):
                stage(trainer, Commit(gen, 10 * gen))
                trainer.wait(60)
            keep(trainer, 0, Commit(gen, 10 * gen + 1))
            trainer.close()
            save = Commit(1, 10) if gen < 4 else Commit(4, 40)
            assert written(path, tmp_path / "ckpt", gen)[0] == [Commit(gen, 10 * gen + 1), save]


def test_an_image_without_seal_never_counts(tmp_path: Path) -> None:
    with served(tmp_path) as (path, _):
        trainer = greeted(path, tmp_path / "ckpt")
        keep(trainer, 0, Commit(1, 5))
        keep(trainer, 1, Commit(1, 7))
        keep(trainer, 1, Commit(1, 9), sealed=False)
        trainer.close()
        assert written(path, tmp_path / "ckpt", 2) == ([Commit(1, 5)], Commit(1, 5))


def test_an_image_older_than_the_disk_is_not_written(tmp_path: Path) -> None:
    with served(tmp_path) as (path, _):
        trainer = greeted(path, tmp_path / "ckpt")
        keep(trainer, 0, Commit(1, 5))
        stage(trainer, Commit(1, 6))
        trainer.wait(10)
        trainer.close()
        assert written(path, tmp_path / "ckpt", 2) == ([Commit(1, 6)], Commit(1, 6))


def test_the_image_of_an_older_generation_that_still_holds_its_connection_is_offered(tmp_path: Path) -> None:
    """As after a trainer that hangs; it may write into its memory later, so the next trainer gets other memory."""
    with served(tmp_path) as (path, _):
        trainer = greeted(path, tmp_path / "ckpt")
        memory = image(trainer, 0)
        state = fill(memory, Commit(1, 5))
        following = Client.connect(path)
        known = following.hello(tmp_path / "ckpt", 2, 2)
        assert known.image is not None and known.image.shared and commit_of(known.image) == Commit(1, 5)
        assert following.wait(60) is not None and store.complete(tmp_path / "ckpt") == [Commit(1, 5)]
        fill(memory, Commit(1, 8))
        keep(following, 0, Commit(2, 6))
        trainer.close()
        following.close()
        assert written(path, tmp_path / "ckpt", 3)[0] == [Commit(2, 6), Commit(1, 5)]
    found = bytearray(STATE.bytes)
    store.read_into(tmp_path / "ckpt", store.read(tmp_path / "ckpt", Commit(1, 5)), store.STATE, memoryview(found))
    assert bytes(found) == state


def test_an_image_of_an_earlier_generation_is_not_left_for_a_later_one(tmp_path: Path) -> None:
    with served(tmp_path) as (path, _):
        trainer = greeted(path, tmp_path / "ckpt")
        keep(trainer, 0, Commit(1, 5))
        keep(trainer, 1, Commit(1, 4))
        trainer.close()
        following = Client.connect(path)
        following.hello(tmp_path / "other", 2, 2)
        following.close()
        assert written(path, tmp_path / "other", 3) == ([], None)


def test_a_private_saver_does_not_wait_for_the_end_of_the_connection(tmp_path: Path) -> None:
    """The signal of its trainer's death can come first: a dying thread of it still has the connection open."""
    trainer = Client.private()
    trainer.hello(tmp_path, 1, 2)
    keep(trainer, 0, Commit(1, 5))
    os.kill(trainer.pid, signal.SIGUSR1)
    assert trainer._process is not None
    trainer._process.wait(60)
    assert store.complete(tmp_path) == [Commit(1, 5)]
    trainer.close()


def test_an_image_that_changes_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer has lost only its connection, and fills the memory again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = SaverServer(peer=theirs)
    client, shipped = Client(ours), handover.write_checkpoint

    def handle(message: dict[str, Any]) -> None:
        client._request(message)
        server._drain(server._peers[0])

    def refill(*arguments: Any) -> Any:
        break_seal(memory)
        return shipped(*arguments)

    monkeypatch.setattr(handover, "write_checkpoint", refill)
    handle({"op": "hello", "folder": str(tmp_path), "gen": 1, "keep": 2})
    handle({"op": "image", "number": 0, "bytes": SIZE + AREA})
    client._answer("image")
    memory = image(client, 0)
    fill(memory, Commit(1, 5))
    server._drop(server._peers[0])
    server._await_writes()
    assert store.scan(tmp_path) == []
    assert "image 1-5 was not written: the image changed while it was written" in capsys.readouterr().err


class Pair:
    """A saver in this process, and its trainer's end, which has said hello."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server, self.client = SaverServer(peer=theirs), Client(ours)
        self.ask({"op": "hello", "folder": str(folder), "gen": 1, "keep": 2})
        self.client._answer("hello")

    def ask(self, message: dict[str, Any]) -> None:
        self.client._request(message)
        self.serve()

    def serve(self) -> None:
        self.server._drain(self.server._peers[0])

    def drop(self) -> None:
        self.server._drop(self.server._peers[0])
        self.server._await_writes()

    def image(self, number: int) -> memoryview:
        """An image memory; an error if the saver refuses it."""
        if (memory := self.client.image(number, SIZE)) is None:
            self.serve()
            memory = self.client.image(number, SIZE)
        assert memory is not None
        return memory


def test_with_memory_for_one_image_its_save_is_written_and_then_it_becomes_staging_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first image is a save, before which the trainer asks for the other memories."""
    pair = Pair(tmp_path)
    memory = pair.image(0)
    manifest = new_manifest(Commit(1, 5), GANG, {})
    assert seal(memory, manifest, (STATE, SKELETON))

    def refusal(wanted: int, share: int) -> str:
        return "only 3 MB are left" if any(each.size for each in pair.server._memories.images) else ""

    monkeypatch.setattr(durable, "memory_refusal", refusal)
    for number in (1, 2):
        assert pair.client.image(number, SIZE) is None
    pair.client.save(manifest, (STATE, SKELETON), image=0)
    pair.serve()
    assert isinstance(pair.client.wait(60), SaveDurable) and store.complete(tmp_path) == [Commit(1, 5)]
    with pytest.raises(SaverError, match="only 3 MB are left"):
        pair.image(1)
    assert not pair.client.images._maps
    pair.client.reserve(SIZE)
    pair.serve()
    assert len(pair.client.memory(SIZE)) >= SIZE and not any(each.size for each in pair.server._memories.images)


def test_refused_staging_memory_frees_that_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that grows must not lose its saves to the images."""
    pair = Pair(tmp_path)
    pair.image(0)
    pair.image(1)
    monkeypatch.setattr(durable, "memory_refusal", lambda *_: "only 3 MB are left")
    pair.client.reserve(SIZE)
    pair.serve()
    with pytest.raises(SaverError, match="only 3 MB are left"):
        pair.image(0)
    assert [each.size for each in pair.server._memories.images] == [0, 0, 0] and not pair.client.images._maps


def test_a_run_whose_saver_does_not_answer_at_its_start_trains_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise SaverError(Fault.SAVER_LOST, "the saver has done nothing")

    monkeypatch.setattr(Client, "private", refused)
    control = Control.private()
    writer = CheckpointWriter(RunSettings.from_env({}, folder=tmp_path), tmp_path, control, SavePace(60.0))
    assert writer.greet(1) is None and (writer.failed, control.fault) == (True, Fault.SAVER_LOST)
    assert "saver lost: the saver has done nothing; training goes on" in capsys.readouterr().err


def test_a_writer_says_once_that_its_generation_keeps_no_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a newer generation's hello: images come five times a second."""
    pair = Pair(tmp_path)
    pair.server._gen = 2
    writer = CheckpointWriter(RunSettings.from_env({}, folder=tmp_path), tmp_path, Control.private(), SavePace(60.0))
    writer._client = pair.client
    step = 3
    while writer.images:
        manifest = new_manifest(Commit(1, step := step + 1), GANG, {})
        writer.image(RunState({}, {}, (b"",)), manifest, HeldCopier(), ())  # type: ignore[arg-type]
        pair.serve()
        assert step < 9
    assert step == 5 and not writer.failed
    assert capsys.readouterr().err.count("generation 1 is older than generation 2") == 1


def test_a_writer_says_once_that_it_has_memory_for_two_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = CheckpointWriter(RunSettings.from_env({}, folder=tmp_path), tmp_path, Control.private(), SavePace(60.0))
    client: Any = SimpleNamespace(images=SimpleNamespace(limited=None))
    writer._say_limited(client)
    assert capsys.readouterr().err == ""
    client.images.limited = SaverError(Fault.NO_MEMORY, "no third")
    for _ in range(2):
        writer._say_limited(client)
    assert capsys.readouterr().err.count("no third; with memory for two images, none is made while") == 1


def test_a_written_image_stays_if_older_checkpoints_cannot_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise OSError(5, "Input/output error")

    pair = Pair(tmp_path)
    fill(pair.image(0), Commit(1, 5))
    monkeypatch.setattr(store, "prune", refused)
    pair.drop()
    assert store.complete(tmp_path) == [Commit(1, 5)] and capsys.readouterr().err == ""


@pytest.mark.parametrize("message", [{"op": "hello", "folder": "\ud800", "gen": 1, "keep": 2}, None])
def test_a_name_that_no_file_can_have_ends_no_saver(tmp_path: Path, message: dict[str, Any] | None) -> None:
    pair = Pair(tmp_path)
    memory = pair.image(0)
    seal(memory, new_manifest(Commit(1, 5), GANG, {}), (replace(STATE, name="\ud800"),))
    if message:
        pair.ask(message)
    else:
        pair.drop()
    assert pair.server._peers == [] and store.scan(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()], ids=["disk", "memory"])
def test_a_full_disk_loses_the_image_and_no_saver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server, client = SaverServer(peer=theirs), Client(ours)

    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(handover, "write_checkpoint", full)
    for message in (
        {"op": "hello", "folder": str(tmp_path), "gen": 1, "keep": 2},
        {"op": "image", "number": 0, "bytes": SIZE + AREA},
    ):
        client._request(message)
        server._drain(server._peers[0])
    keep(client, 0, Commit(1, 5))
    server._drop(server._peers[0])
    server._await_writes()
    assert server._peers == [] and not server._handover._running


def test_refused_image_memory_is_an_error_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server, client = SaverServer(peer=theirs), Client(ours)
    monkeypatch.setattr(durable, "memory_refusal", lambda *_: "only 3 MB are left")
    client._request({"op": "hello", "folder": str(tmp_path), "gen": 1, "keep": 2})
    assert client.image(0, SIZE) is None
    server._drain(server._peers[0])
    with pytest.raises(SaverError, match="only 3 MB are left"):
        client.image(0, SIZE)


@pytest.mark.parametrize("number", [3, -1, True, "0", None, 0.5])
def test_only_three_image_memories_exist(number: object, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server, client = SaverServer(peer=theirs), Client(ours)
    client._request({"op": "image", "number": number, "bytes": SIZE})
    server._drain(server._peers[0])
    assert server._peers == [], "the connection is closed"


def sealed(size: int = SIZE) -> Buffer:
    buffer = Buffer()
    buffer.reserve(size + AREA)
    return buffer


@pytest.mark.parametrize(
    "stretch",
    [
        Stretch("state.bin", 1, 5),
        Stretch("state.bin", 0, SIZE + 1),
        Stretch("../x", 0, 5),
        Stretch("state.bin", SIZE, 1),
    ],
    ids=["not on a page", "longer than the image", "another folder", "within the seal"],
)
def test_a_seal_with_a_wrong_stretch_is_none(stretch: Stretch) -> None:
    """The saver reads what a job has written."""
    buffer = sealed()
    memory = memoryview(mmap.mmap(buffer.fd, buffer.size))
    assert seal(memory, new_manifest(Commit(1, 1), GANG, {}), (STATE,)) and read_seal(buffer) is not None
    assert seal(memory, new_manifest(Commit(1, 1), GANG, {}), (stretch,)) and read_seal(buffer) is None


@pytest.mark.parametrize("at", [0, 31, 32, 39, 40, 200])
def test_a_changed_byte_breaks_the_seal(at: int) -> None:
    buffer = sealed()
    memory = memoryview(mmap.mmap(buffer.fd, buffer.size))
    assert read_seal(buffer) is None
    assert seal(memory, new_manifest(Commit(1, 1), GANG, {}), (STATE,))
    memory[SIZE + at] ^= 1
    assert read_seal(buffer) is None
    memory[SIZE + at] ^= 1
    assert read_seal(buffer) is not None
    break_seal(memory)
    assert read_seal(buffer) is None


def test_a_seal_of_another_request_is_none() -> None:
    buffer, text = sealed(), b'{"op": "stage"}'
    memory = memoryview(mmap.mmap(buffer.fd, buffer.size))
    header = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
    memory[SIZE : SIZE + 40 + len(text)] = header + text
    assert read_seal(buffer) is None


def test_a_gang_too_large_for_a_seal_keeps_no_image() -> None:
    buffer = sealed()
    memory = memoryview(mmap.mmap(buffer.fd, buffer.size))
    assert not seal(memory, new_manifest(Commit(1, 1), GANG * 20_000, {}), (STATE,))
    assert read_seal(buffer) is None


def test_a_result_that_arrives_before_an_image_is_still_reported(tmp_path: Path) -> None:
    """The request for an image memory reads all messages; the next save must be waited for all the same."""
    with served(tmp_path) as (path, _):
        settings = RunSettings.from_env({"SPOTKEEPER_SAVER": str(path)}, folder=tmp_path / "ckpt")
        writer = CheckpointWriter(settings, tmp_path / "ckpt", Control.private(), SavePace(60.0))
        writer.greet(1)
        client = writer.client
        assert client is not None
        stage(client, Commit(1, 5))
        select.select([client._sock], [], [], 60)
        assert client.image(0, SIZE) is None
        writer.poll()
        assert writer.commit == Commit(1, 5) and not writer.busy
        stage(client, Commit(1, 6))
        writer.settle()
        assert writer.commit == Commit(1, 6) and store.complete(tmp_path / "ckpt")[0] == Commit(1, 6)
        writer.close()


def test_a_save_of_the_step_of_a_written_image_is_done(tmp_path: Path) -> None:
    """The saver writes the image because the connection is lost, before the trainer connects again to save it."""
    with served(tmp_path) as (path, _):
        settings, control = RunSettings.from_env({"SPOTKEEPER_SAVER": str(path)}, folder=tmp_path), Control.private()
        writer = CheckpointWriter(settings, tmp_path / "ckpt", control, SavePace(60.0))
        writer.greet(1)
        assert writer.client is not None
        keep(writer.client, 0, Commit(1, 5))
        writer.lose(SaverError(Fault.SAVER_LOST, "the saver has done nothing"))
        assert not writer.begin(Commit(1, 5))
        writer.settle(60)
        assert writer.commit == control.commit == Commit(1, 5)
        assert writer.begin(Commit(1, 6))
        writer.close()


class HeldClient:
    """Gives image memories, and notes which."""

    def __init__(self) -> None:
        self.buffers = [sealed(1 << 20) for _ in range(IMAGES)]
        self.numbers: list[int] = []
        self.asked: list[int] = []
        self.images = ImageMemories(lambda message: self.asked.append(message["number"]))
        self.saved: list[tuple[Commit, int | None]] = []
        self.pending = None

    def image(self, number: int, size: int, *, wait: bool = False) -> memoryview:
        self.numbers.append(number)
        self.images._maps[number] = found = mmap.mmap(self.buffers[number].fd, self.buffers[number].size)
        return memoryview(found)

    def save(self, manifest: Manifest, stretches: object, *, image: int | None = None) -> None:
        self.saved.append((manifest.commit, image))
        self.images.writing = image


class HeldCopier:
    """Copies nothing and ends no copy; the test does."""

    def select(self, owned: object) -> dict[Any, str]:
        return {}

    def begin(self, copies: object, complete: Callable[[], None], discard: Callable[[str], None], _: object) -> None:
        self.complete, self.discard = complete, discard


def test_an_image_is_sealed_once_its_copy_is_complete(tmp_path: Path) -> None:
    settings = RunSettings.from_env({}, folder=tmp_path)
    writer = CheckpointWriter(settings, tmp_path, Control.private(), SavePace(60.0))
    client, copier = HeldClient(), HeldCopier()
    writer._client = client  # type: ignore[assignment]
    state = RunState({"w": torch.ones(5)}, {}, (b"",))

    def begin(step: int) -> None:
        writer.image(state, new_manifest(Commit(1, step), GANG, {}), copier, ())  # type: ignore[arg-type]

    def steps() -> list[int | None]:
        return [found.manifest.commit.step if (found := read_seal(each)) else None for each in client.buffers]

    begin(3)
    assert steps() == [None, None, None]
    copier.complete()
    assert steps() == [3, None, None]
    begin(4)
    copier.complete()
    begin(5)
    assert steps() == [None, 4, None], "the older image is broken before it changes"
    copier.discard("torn")
    begin(6)
    assert steps() == [None, 4, None], "a torn image is filled again; the complete one stays"
    copier.complete()
    assert steps() == [6, 4, None] and client.numbers == [0, 1, 0, 0]


def test_each_image_finds_its_memory(tmp_path: Path) -> None:
    """An image or a save requests the memory of the next one, with room for what a later image may still lack."""
    late = LateParts()
    late.row = bytes(16)
    state = RunState({"w": torch.ones(5)}, {}, (), None, late)
    with served(tmp_path) as (path, _):
        settings = RunSettings.from_env({"SPOTKEEPER_SAVER": str(path)}, folder=tmp_path / "ckpt")
        writer = CheckpointWriter(settings, tmp_path / "ckpt", Control.private(), SavePace(60.0))
        Client.connect(path, 60).close()
        writer.greet(1)
        writer.warm(Image(state).size, images=True)
        client = writer.client
        assert client is not None
        for step in range(1, 6):
            while writer.next_image() is None:
                client._read_soon()
            begin = writer.save if step == 3 else writer.image
            assert begin(state, new_manifest(Commit(1, step), GANG, {}), BackgroundCopier([]), ()) is not False
            assert client.images.newest is not None
            writer.settle()
            state = replace(state, rest={"grows": bytes(4000 * step)})
        writer.close()
        assert written(path, tmp_path / "ckpt", 2)[0][0] == Commit(1, 5)


def test_an_image_that_is_copied_at_once_is_sealed_at_once(tmp_path: Path) -> None:
    """As on a GPU and with Hugging Face's trainer: a failure before the optimizer's next step must not lose it."""
    writer = CheckpointWriter(RunSettings.from_env({}, folder=tmp_path), tmp_path, Control.private(), SavePace(60.0))
    client, copier = HeldClient(), BackgroundCopier([])
    writer._client = client  # type: ignore[assignment]
    for step in range(1, 7):
        writer.image(RunState({"w": torch.ones(5)}, {}, (b"",)), new_manifest(Commit(1, step), GANG, {}), copier, ())
        found = read_seal(client.buffers[(step - 1) % 2])
        assert found is not None and found.manifest.commit == Commit(1, step)


@pytest.mark.parametrize("fault", [Fault.SAVER_LOST, Fault.FENCED, Fault.NO_MEMORY])
def test_only_a_lost_saver_is_a_fault_of_the_run(tmp_path: Path, fault: Fault) -> None:
    """Without memory for images, training saves as before."""

    class Refusing:
        closed = False

        def __init__(self) -> None:
            self.images = ImageMemories(lambda message: None)

        def image(self, number: int, size: int, *, wait: bool = False) -> None:
            raise SaverError(fault, "why")

        def close(self) -> None:
            self.closed = True

    control, client = Control.private(), Refusing()
    writer = CheckpointWriter(RunSettings.from_env({}, folder=tmp_path), tmp_path, control, SavePace(60.0))
    writer._client = client  # type: ignore[assignment]
    state = RunState({"w": torch.ones(5)}, {}, (b"",))
    writer.image(state, new_manifest(Commit(1, 1), GANG, {}), HeldCopier(), ())  # type: ignore[arg-type]
    lost = fault is Fault.SAVER_LOST
    assert not writer.images and client.closed == lost
    assert control.fault is (fault if lost else Fault.NONE)


def test_images_cost_at_most_their_share_of_the_time() -> None:
    pace = SavePace(60.0)
    for seconds in (0.1, 0.1, 0.1):
        pace.add_step(seconds)
    assert pace.image_interval_s == IMAGE_S
    for _ in range(8):
        pace.add_image(50.0, 50.01, 3)
        pace.add_step(0.13)
    assert pace.step_s == pytest.approx(0.1), "a step after an image is no usual one"
    assert pace.image_interval_s == pytest.approx((0.01 + 0.03) / pace.overhead)
    pace.image_since = 100.0
    assert not pace.image_due(104.1), "a step without an image comes first"
    pace.add_step(0.1)
    assert not pace.image_due(103.9) and pace.image_due(104.1)


def test_a_slow_first_step_does_not_hide_the_cost_of_images() -> None:
    """Steps of 1 s, or 1.5 s after an image, so one image in 50 s; the first step compiles for a minute."""
    pace, now, images = SavePace(60.0), 0.0, []
    for step in range(400):
        now += (seconds := 60.0 if not step else 1.5 if pace.imaged else 1.0)
        pace.add_step(seconds)
        if pace.image_due(now):
            images.append(step)
            pace.add_image(now, now, step)
    assert pace.step_s == 1.0
    assert len(images) < 30 and images[-1] - images[-2] == 50


def test_a_hiccup_at_the_first_image_does_not_end_images_for_long() -> None:
    pace = SavePace(60.0)
    for _ in range(3):
        pace.add_step(0.1)
    pace.add_image(50.0, 52.0, 3)
    pace.add_step(0.1)
    assert pace.image_cost_s == 2.0 and pace.image_interval_s == 5.0
    for step in range(8):
        pace.add_image(60.0, 60.01, step)
        pace.add_step(0.1)
    assert pace.image_interval_s == pytest.approx(0.01 / pace.overhead)


@pytest.mark.parametrize(("world", "dies"), [(2, 7), (2, 12), (4, 9)])
def test_a_lost_machine_costs_its_gang_two_images_at_most(tmp_path: Path, world: int, dies: int) -> None:
    """The last rank is killed, its machine's disk is emptied, and the others are killed as an agent does."""
    with machines(tmp_path / "gang", world) as gang:
        gang.start_savers(-1)
        gang.run(1, (1000,), {world - 1: dies}, work_with_images)
        for node in gang.nodes:
            gang.quiet(node)
        with Control.open(gang._run_folder(0, 1) / NAME) as control:
            assert control.image_steps == 3, "a plain step, the agreement, the image"
            assert control.image_share > 0.0
        shutil.rmtree(gang.disks[-1])
        assert gang.run(2, (dies + 3,), {}, work_with_images) == [0] * world
        for rank in range(world):
            seen = gang.seen(2, rank)
            assert seen["wrong"] == [] and dies - 4 <= seen["step"] <= dies


KILLED = f"""
import os, signal, sys, torch, spotkeeper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from spotkeeper.train.core import pace
pace.SavePace.image_interval_s = 0.0  # an image after every second step
{ATTACH}begun, client = run.steps_done, run._boundary.writer.client
print(client.pid, flush=True)
for number, (x,) in enumerate(run.steps(loader, steps=20)):
    model(x).square().mean().backward()
    if number and run.steps_done == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    for image in (0, 1, 2):
        while number and client.image(image, 1 << 20) is None:
            client._read_soon()
print(begun, [value.tolist() for value in model.state_dict().values()])
"""


@pytest.mark.parametrize("kill", [6, 11, 18])
def test_a_killed_run_resumes_from_its_newest_image(kill: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save is due. The last image may not be complete when the process is killed."""
    for name in [name for name in os.environ if name.startswith("SPOTKEEPER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPOTKEEPER_SNAPSHOTS", "1")
    monkeypatch.setenv("SPOTKEEPER_INTERVAL_S", "1000")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(KILLED)
    whole = run_script(tmp_path, "train.py", "-1", "whole")
    killed = run_script(tmp_path, "train.py", str(kill), "killed")
    assert killed.returncode == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):  # the saver has ended already
        select.select([os.pidfd_open(int(killed.stdout))], [], [], 60)
    image = store.newest(tmp_path / "killed").manifest
    assert image is not None and IMAGE in image.versions
    again = run_script(tmp_path, "train.py", "-1", "killed")
    assert whole.returncode == again.returncode == 0, again.stderr
    (begun, bits), (zero, expected) = (each.stdout.splitlines()[1].split(" ", 1) for each in (again, whole))
    assert bits == expected and zero == "0"
    assert store.complete(tmp_path / "whole") == [Commit(0, 20)], "an image of a run that ends is needless"
    assert kill - 2 <= int(begun) <= kill


# -- saves from images


def writer_of(client: HeldClient, folder: Path, pace: SavePace | None = None) -> CheckpointWriter:
    settings = RunSettings.from_env({}, folder=folder)
    writer = CheckpointWriter(settings, folder, Control.private(), pace or SavePace(60.0))
    writer._client = client  # type: ignore[assignment]
    return writer


WEIGHTS = RunState({"w": torch.ones(5)}, {}, (b"",))


def test_a_save_is_an_image_that_the_saver_then_writes(tmp_path: Path) -> None:
    client, copier = HeldClient(), HeldCopier()
    writer = writer_of(client, tmp_path)
    writer.save(WEIGHTS, new_manifest(Commit(1, 3), GANG, {}), copier, ())  # type: ignore[arg-type]
    assert client.saved == [], "the copy is not complete"
    copier.complete()
    assert client.asked == [1, 2], "the saver answers no request while it writes"
    found = read_seal(client.buffers[0])
    assert found is not None and found.manifest.commit == Commit(1, 3) and client.saved == [(Commit(1, 3), 0)]


def test_a_torn_save_is_not_written_and_due_again(tmp_path: Path) -> None:
    client, copier, pace = HeldClient(), HeldCopier(), SavePace(60.0, fixed_s=10.0, since=5.0)
    writer = writer_of(client, tmp_path, pace)
    writer.save(WEIGHTS, new_manifest(Commit(1, 3), GANG, {}), copier, ())  # type: ignore[arg-type]
    assert not pace.due(6.0)
    copier.discard("torn")
    assert client.saved == [] and read_seal(client.buffers[0]) is None and pace.due(6.0)


@pytest.mark.parametrize("limited", [False, True], ids=["three", "two"])
def test_the_newest_image_and_the_one_being_written_are_not_filled(tmp_path: Path, limited: bool) -> None:
    client, copier = HeldClient(), HeldCopier()
    writer = writer_of(client, tmp_path)
    if limited:
        client.images.limited = SaverError(Fault.NO_MEMORY, "no third")
    writer.save(WEIGHTS, new_manifest(Commit(1, 1), GANG, {}), copier, ())  # type: ignore[arg-type]
    copier.complete()
    kept = []
    for step in range(2, 6):
        if writer.image(WEIGHTS, new_manifest(Commit(1, step), GANG, {}), copier, ()):  # type: ignore[arg-type]
            copier.complete()
            kept.append(step)
    assert kept == ([2] if limited else [2, 3, 4, 5])
    steps = [found.manifest.commit.step for each in client.buffers if (found := read_seal(each))]
    assert steps == ([1, 2] if limited else [1, 4, 5]), "step 1 is being written"
    client.images.writing = None
    assert writer.image(WEIGHTS, new_manifest(Commit(1, 9), GANG, {}), copier, ())  # type: ignore[arg-type]
    assert client.numbers[-1] == 0


def test_a_save_without_memory_for_images_uses_the_staging_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path) as (path, _):
        settings = RunSettings.from_env({"SPOTKEEPER_SAVER": str(path)}, folder=tmp_path / "ckpt")
        writer = CheckpointWriter(settings, tmp_path / "ckpt", Control.private(), SavePace(60.0))
        Client.connect(path, 60).close()
        writer.greet(1)
        assert writer.client is not None
        writer.client.images.refuse(SaverError(Fault.NO_MEMORY, "only 3 MB are left"))
        copier = BackgroundCopier([])
        for step in (1, 2):
            writer.save(WEIGHTS, new_manifest(Commit(1, step), GANG, {}), copier, ())
            writer.settle()
        assert not writer.images and store.complete(tmp_path / "ckpt") == [Commit(1, 2), Commit(1, 1)]
        assert capsys.readouterr().err.count("only 3 MB are left; without images") == 1
        writer.close()


def test_the_third_image_memory_was_the_staging_memory(tmp_path: Path) -> None:
    """So images take the memory of three states, with what a restore has loaded."""
    with served(tmp_path) as (path, process):
        trainer = greeted(path, tmp_path / "ckpt")
        stage(trainer, Commit(1, 1), SIZE)
        trainer.wait(60)
        keep(trainer, 0, Commit(1, 2))
        keep(trainer, 1, Commit(1, 3))
        assert trainer._size >= SIZE and len(memories(process.pid)) == 3
        keep(trainer, 2, Commit(1, 4))
        assert trainer.fd == -1 and len(memories(process.pid)) == 3
        stage(trainer, Commit(1, 5), SIZE)
        trainer.wait(60)
        trainer.close()
        assert written(path, tmp_path / "ckpt", 2)[0][0] == Commit(1, 5), "it is another memory, not that of an image"


def memories(pid: int) -> list[int]:
    """Sizes of a saver's memory files that are not empty."""
    found: dict[int, int] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a file that the saver has closed meanwhile
            if str(link.readlink()).startswith("/memfd:spotkeeper"):
                status = link.stat()
                found[status.st_ino] = status.st_size  # a write opens one twice
    return [size for size in found.values() if size]


def test_with_memory_for_two_images_the_third_is_refused_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    pair.image(0)
    pair.image(1)
    monkeypatch.setattr(durable, "memory_refusal", lambda *_: "only 3 MB are left")
    assert pair.client.image(2, SIZE) is None
    pair.serve()
    assert pair.client.image(2, SIZE) is None and pair.client.images.refused is None
    assert "only 3 MB are left" in str(pair.client.images.limited)
    assert [bool(each.size) for each in pair.server._memories.images] == [True, True, False]
    assert pair.client.image(0, SIZE) is not None


def test_a_node_with_memory_for_two_states_uses_the_staging_memory_as_second_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    pair.client.reserve(SIZE + AREA)
    pair.serve()
    pair.image(0)
    monkeypatch.setattr(durable, "memory_refusal", lambda wanted, _: f"{wanted} are too many" if wanted > AREA else "")
    assert pair.image(1) is not None and pair.server._memories.staging.size == 0


def test_an_image_that_a_save_has_written_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is what the next trainer restores from."""
    pair = Pair(tmp_path)
    memory = pair.image(0)
    manifest = new_manifest(Commit(1, 5), GANG, {})
    assert seal(memory, manifest, (STATE, SKELETON))
    pair.client.save(manifest, (STATE, SKELETON), image=0)
    pair.serve()
    assert pair.client.images.writing == 0 and isinstance(pair.client.poll(), SaveDurable)
    assert pair.client.images.writing is None and store.complete(tmp_path) == [Commit(1, 5)]
    image = pair.server._memories.images[0]
    monkeypatch.setattr(handover, "write_kept", None)
    pair.drop()
    kept = pair.server._handover.offer(tmp_path)
    assert kept is not None and kept.memory is image and kept.durable


def test_an_image_that_is_no_longer_the_one_to_save_is_not_committed(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    fill(pair.image(0), Commit(1, 6))
    pair.client.save(new_manifest(Commit(1, 5), GANG, {}), (STATE, SKELETON), image=0)
    pair.serve()
    failed = pair.client.poll()
    assert isinstance(failed, SaveFailed) and "the image changed" in failed.why and store.scan(tmp_path) == []


def test_images_leave_more_memory_free_than_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on the way to its memory limit shall not meet images there: they are worth less than its next steps."""
    shares: list[int] = []
    monkeypatch.setattr(durable, "memory_refusal", lambda _, share: shares.append(share) or "")
    pair = Pair(tmp_path)
    pair.client.reserve(SIZE)
    pair.serve()
    for number in range(IMAGES):
        pair.image(number)
    assert shares == [SAVE_SHARE, IMAGE_SHARE, IMAGE_SHARE, SAVE_SHARE]
    assert IMAGE_SHARE < SAVE_SHARE, "the last one was the staging memory"


def test_memories_of_an_earlier_trainer_are_used_before_new_ones(tmp_path: Path) -> None:
    with served(tmp_path) as (path, process):
        trainer = greeted(path, tmp_path / "ckpt")
        for number in range(IMAGES):
            keep(trainer, number, Commit(1, number + 1))
        trainer.close()
        following = Client.connect(path)
        assert commit_of(following.hello(tmp_path / "ckpt", 2, 2).image) == Commit(1, IMAGES)
        for number in range(IMAGES):
            keep(following, number, Commit(2, number + 4))
            assert len(memories(process.pid)) == IMAGES
        following.close()


MOMENT = torch.randn(100_000)


@contextlib.contextmanager
def resumed(folder: Path) -> Iterator[tuple[Client, torch.Tensor]]:
    """A trainer that has restored an image from its saver's memory, and the moment that its optimizer keeps."""
    whole = Image(RunState({"a": torch.randn(100_000)}, {}, (b"",), [MOMENT]))
    with served(folder) as (path, _):
        trainer = greeted(path, folder / "ckpt")
        memory = image(trainer, 0, whole.size)
        whole.copy_to(memory)
        assert seal(memory, new_manifest(Commit(1, 5), GANG, {IMAGE: "yes"}), whole.stretches)
        trainer.close()
        following = Client.connect(path)
        found, _ = restore(SoloGang(), folder / "ckpt", following, following.hello(folder / "ckpt", 2, 2))
        following.wait(60)
        assert found is not None and found.source == "memory"
        yield following, found.state.optimizers[0]
        following.close()


@pytest.mark.parametrize("ownable", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_state_that_optimizers_keep_of_an_image_outlives_it(
    begun: bool, ownable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next images fill the same memories. Older kernels cannot copy pages, so tensors are copied."""
    if not ownable:
        monkeypatch.setattr(CopyOnWrite, "_populate", lambda *_: errno.EINVAL)
    with resumed(tmp_path) as (following, kept):
        if begun:
            following.own_offer()
        for number in range(IMAGES):
            filled = image(following, number)
            filled[:] = bytes(len(filled))
            assert torch.equal(kept, MOMENT)


@populates
@pytest.mark.parametrize("fill", [Client.memory, lambda client, size: client.part_image(0, size)])
def test_a_memory_is_filled_once_one_thread_has_copied_what_is_kept_of_it(
    fill: Callable[[Client, int], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, copied, populate = threading.Event(), [], CopyOnWrite._populate

    def populated(self: CopyOnWrite, how: int, at: int, count: int) -> int:
        waits.wait(60)
        copied.append(threading.current_thread().name)
        return populate(self, how, at, count)

    with resumed(tmp_path) as (following, kept):
        monkeypatch.setattr(CopyOnWrite, "_populate", populated)
        following.own_offer()
        thread = following._owning
        assert thread is not None
        join = thread.join
        monkeypatch.setattr(thread, "join", lambda: (waits.set(), join()))
        fill(following, SIZE)
        assert set(copied) == {"spotkeeper-own"} and torch.equal(kept, MOMENT)


@populates
def test_memory_that_cannot_be_copied_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with resumed(tmp_path) as (following, kept):
        monkeypatch.setattr(CopyOnWrite, "_populate", lambda *_: errno.ENOMEM)
        following.own_offer()
        with pytest.raises(SaverError, match=f"an earlier trainer's image: .*{os.strerror(errno.ENOMEM)}") as refused:
            following.image(0, SIZE)
        assert refused.value.fault is Fault.NO_MEMORY and torch.equal(kept, MOMENT)


def test_images_begin_again_with_a_new_saver(tmp_path: Path) -> None:
    with served(tmp_path) as (path, process):
        settings = RunSettings.from_env({"SPOTKEEPER_SAVER": str(path)}, folder=tmp_path / "ckpt")
        writer = CheckpointWriter(settings, tmp_path / "ckpt", Control.private(), SavePace(60.0))
        Client.connect(path, 60).close()
        writer.greet(1)
        assert writer.client is not None
        image(writer.client, 0)
        process.kill()
        process.wait()
        assert writer.next_image() is None and not writer.images
        writer._images_off = True  # the saver that is gone had no memory; the next one may have
    with served(tmp_path) as (path, _):
        Client.connect(path, 60).close()
        writer._tried = time.monotonic()
        assert writer.next_image() is None, "it looks for a saver now and then only"
        writer._tried = -math.inf
        assert writer.next_image() == 0 and writer.images and writer.client is not None
        image(writer.client, 0)
        assert writer.image(WEIGHTS, new_manifest(Commit(1, 7), GANG, {}), BackgroundCopier([]), ())
        writer.close()
        assert written(path, tmp_path / "ckpt", 2)[0] == [Commit(1, 7)]


def test_an_image_of_a_lost_saver_is_not_sealed_in_the_memory_of_the_next(tmp_path: Path) -> None:
    client, copier = HeldClient(), HeldCopier()
    writer = writer_of(client, tmp_path)
    writer.save(WEIGHTS, new_manifest(Commit(1, 3), GANG, {}), copier, ())  # type: ignore[arg-type]
    writer._client = following = HeldClient()  # type: ignore[assignment]
    copier.complete()
    assert read_seal(client.buffers[0]) is None and client.saved == following.saved == []


class Weights:
    """A run's state."""

    def take_common(self) -> tuple[object, dict[str, object]]:
        return WEIGHTS.model, {}

    def take_local(self) -> dict[str, object]:
        return {}

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


def test_no_layout_is_made_while_the_memory_is_being_allocated(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    settings = RunSettings.from_env({}, folder=tmp_path)
    writer = CheckpointWriter(settings, tmp_path, Control.private(), SavePace(60.0))
    writer._client = pair.client
    strategy = Replicated(SoloGang(), writer, Control.private(), GANG, None, BackgroundCopier([]))
    assert writer.next_image() == 0
    assert not strategy.image(Weights(), Commit(1, 7)), "it is no image, so it counts in no spacing"
    assert writer.next_image() is None, "requested, not answered"
    pair.serve()
    assert writer.next_image() == 0


def test_a_trainer_cannot_shrink_the_memory_under_its_saver(tmp_path: Path) -> None:
    """The saver would die of SIGBUS."""
    with served(tmp_path) as (path, process):
        trainer = greeted(path, tmp_path / "ckpt")
        memory = trainer.stage(SIZE)
        with pytest.raises(PermissionError):
            os.ftruncate(trainer.fd, 0)
        for seals in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_GROW):  # the next trainer writes, the saver grows the memory
            with pytest.raises(PermissionError):
                fcntl.fcntl(trainer.fd, fcntl.F_ADD_SEALS, seals)
        assert len(memory) >= SIZE and process.poll() is None


def test_a_due_save_waits_for_the_next_image_unless_images_are_rarer() -> None:
    pace = SavePace(60.0, fixed_s=10.0, since=100.0, image_since=109.95)
    for _ in range(3):
        pace.add_step(0.1)
    assert not pace.due(109.9, images=True)
    assert pace.due(110.0) and not pace.due(110.0, images=True) and pace.due(109.95 + IMAGE_S, images=True)
    pace.image_stalls.append(0.2)
    for _ in range(8):
        pace.image_steps.append(0.1)
    assert pace.image_interval_s > 10.0 and pace.due(110.0, images=True)


def test_spacing_and_cost_of_images_are_reported() -> None:
    pace = SavePace(60.0)
    for _ in range(3):
        pace.add_step(0.1)
    assert (pace.image_spacing, pace.image_share) == (0, 0.0)
    pace.add_image(1.0, 1.01, 10)
    pace.add_step(0.13)
    pace.add_image(2.0, 2.01, 20)
    assert pace.image_spacing == 10 and pace.image_share == pytest.approx(0.04 / 1.04)


class Waiting:
    """A client whose save never ends; ``asked``: what it was asked for."""

    pending = Commit(1, 1)

    def __init__(self) -> None:
        self.asked: list[object] = []

    def publish(self, manifest: Manifest) -> None:
        self.asked.append(manifest)

    def wait(self, timeout_s: float | None) -> None:
        self.asked.append(timeout_s)


def test_a_writer_asks_its_client_and_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    writer = CheckpointWriter(RunSettings.from_env({}, folder=tmp_path), tmp_path, Control.private(), SavePace(60.0))
    manifest, client = new_manifest(Commit(1, 1), GANG, {}), Waiting()
    writer.publish(manifest)
    writer.settle(5.0)  # without a saver, both do nothing
    writer._client = client  # type: ignore[assignment]
    writer.publish(manifest)
    writer.settle()
    writer.settle(5.0)
    assert client.asked == [manifest, None, pytest.approx(5.0, abs=4.9)]


class LateParts(PendingParts):
    """The small parts of two ranks. ``answers``: what arrives; None: not in yet."""

    def __init__(self) -> None:
        super().__init__(self._wait, 8, 2)
        self.row: bytes | None = None

    def _wait(self) -> list[bytes]:
        assert self.row is not None, "waited for at the boundary"
        return [self.row, self.row]


@pytest.mark.parametrize("length", [1, 9], ids=["fits", "outgrown"])
def test_an_image_counts_once_all_ranks_small_parts_are_in(tmp_path: Path, length: int) -> None:
    writer = CheckpointWriter(RunSettings.from_env({}, folder=tmp_path), tmp_path, Control.private(), SavePace(60.0))
    client, copier, late = HeldClient(), HeldCopier(), LateParts()
    writer._client = client  # type: ignore[assignment]
    state = RunState({"w": torch.ones(5)}, {}, (), None, late)
    assert writer.image(state, new_manifest(Commit(1, 3), GANG, {}), copier, ())  # type: ignore[arg-type]
    late.row = length.to_bytes(8, "little") + b"x" * 8
    copier.complete()
    found = read_seal(client.buffers[0])
    if length > 8:
        assert found is None and client.images.newest is None, "a part is cut off"
        return
    assert found is not None
    assert thaw(memoryview(client.images._maps[0]), found.stretches).local == (b"x", b"x")
