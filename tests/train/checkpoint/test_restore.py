"""What a peer sends is believed only if its hash holds: a flipped bit would live on in every later checkpoint."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint import client, store
from spotkeeper.train.checkpoint import restore as restores
from spotkeeper.train.checkpoint.image import Image, RunState, extent
from spotkeeper.train.checkpoint.manifest import FileSum, Manifest
from spotkeeper.train.checkpoint.restore import EarlyRead, _send, restore, senders
from spotkeeper.train.checkpoint.store import COMMIT, SKELETON, STATE, SkippedCheckpoint
from spotkeeper.train.core import pickling
from spotkeeper.train.core.gang import SoloGang
from spotkeeper.train.core.pickling import StateTypeError
from spotkeeper.train.core.settings import RunSettings
from tests.train.savers import start_saver

SENT = RunState({"weight": torch.arange(5000.0)}, {"lr": 0.1}, (b"one", b"two"), [torch.arange(40_000.0)])


class Peer:
    """Rank 0 of two, blank; rank 1 holds a checkpoint and sends it in pieces, as ``flip`` leaves it."""

    rank, world, local_rank, node = 0, 2, 0, 0

    def __init__(self, flip: Callable[[int, bytearray], None] = lambda *_: None, *, hashed: bool = True) -> None:
        """``hashed``: whether the copy is a checkpoint; else it is an image, and a hash follows each file."""
        image = Image(SENT)
        self.stretches = image.stretches
        memory = bytearray(image.size)
        image.copy_to(memoryview(memory))
        parts = [(part.name, bytes(memory[part.offset : part.offset + part.bytes])) for part in image.stretches]
        sums = tuple(FileSum(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in parts)
        self.manifest = Manifest(Commit(1, 5), 2, (), sums, {}, 0.0)
        self.parts = [bytearray(data) for _, data in parts]
        for number, data in enumerate(self.parts):
            flip(number, data)
        if not hashed:
            self.manifest = replace(self.manifest, files=tuple(replace(each, sha256="") for each in sums))
            hashes = [bytearray.fromhex(each.sha256) for each in sums]
            self.parts = [each for pair in zip(self.parts, hashes, strict=True) for each in pair]
        self.answers = [[b"", str(self.manifest.commit).encode()], [b"", self.manifest.to_bytes()]]

    def gather(self, blob: bytes) -> list[bytes]:
        assert blob == b""
        return self.answers.pop(0)

    def highest(self, value: int) -> Callable[[], int]:
        raise AssertionError("not asked here")

    def send(self, view: memoryview, to: int) -> None:
        raise AssertionError("a blank rank has nothing to send")

    def receive(self, view: memoryview, source: int, landed: Callable[[memoryview], None]) -> None:
        assert source == 1
        data = self.parts.pop(0)
        for at in range(0, len(data), 4096):
            view[at : at + 4096] = data[at : at + 4096]
            landed(view[at : at + 4096])


@pytest.mark.parametrize("hashed", [True, False], ids=["checkpoint", "image"])
def test_an_intact_copy_is_restored(hashed: bool) -> None:
    peer = Peer(hashed=hashed)
    restored, skipped = restore(peer, None, None, None)
    assert restored is not None and not skipped
    assert (restored.source, restored.manifest, restored.stretches) == ("rank 1", peer.manifest, peer.stretches)
    assert torch.equal(restored.state.model["weight"], SENT.model["weight"])  # type: ignore[index]
    assert (restored.state.rest, restored.state.local) == (SENT.rest, SENT.local)


@pytest.mark.parametrize(
    ("has", "nodes", "sources"),
    [
        ("x..", "000", {1: 0, 2: 0}),
        ("x.x.", "0011", {1: 0, 3: 2}),
        (".xx.", "1001", {0: 1, 3: 2}),
        ("x.x...", "001122", {1: 0, 3: 2, 4: 0, 5: 2}),
        ("..x.x...", "00112233", {0: 2, 1: 4, 3: 2, 5: 4, 6: 2, 7: 4}),
        ("x...x.", "000012", {1: 0, 2: 0, 3: 0, 5: 4}),
    ],
)
def test_a_copy_comes_from_the_same_machine_or_from_the_one_that_sends_least(
    has: str, nodes: str, sources: dict[int, int]
) -> None:
    assert senders([each == "x" for each in has], list(map(int, nodes))) == sources


def test_a_rank_receives_from_its_own_machine() -> None:
    class Three(Peer):
        """Rank 0 of three. Ranks 1 and 2 have a copy; rank 2 is on this machine."""

        def __init__(self) -> None:
            super().__init__()
            self.answers = [[*answer, answer[-1]] for answer in self.answers]
            self.world = 3

        def receive(self, view: memoryview, source: int, landed: Callable[[memoryview], None]) -> None:
            assert source == 2
            super().receive(view, 1, landed)

    restored, _ = restore(Three(), None, None, None, nodes=[4, 2, 4])
    assert restored is not None and restored.source == "rank 2"


def test_a_copy_that_cannot_be_loaded_is_named_with_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "dumps", lambda *_: pickle.dumps(os.getcwd))
    peer = Peer()
    monkeypatch.undo()
    with pytest.raises(StateTypeError, match=r"^checkpoint 1-5, from rank 1: cannot load \w+\.getcwd"):
        restore(peer, None, None, None)


def test_a_damaged_copy_is_passed_over_even_if_it_cannot_be_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of one, with a checkpoint whose tensors do not match their hash."""
    peer = Peer(lambda number, data: data.reverse() if number == 0 else None)
    folder = tmp_path / "1-5"
    folder.mkdir()
    for file, data in zip(peer.manifest.files, peer.parts, strict=True):
        (folder / file.name).write_bytes(data)
    (folder / COMMIT).write_bytes(peer.manifest.to_bytes())
    monkeypatch.setattr(store, "quarantine", refused)
    alone: Any = SimpleNamespace(rank=0, world=1, gather=lambda blob: [blob])
    saver: Any = SimpleNamespace(stage=bytearray)
    restored, skipped = restore(alone, tmp_path, saver, None)
    assert restored is None
    assert skipped == [SkippedCheckpoint("1-5", f"{STATE} does not match its hash in {COMMIT}")]


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("1-5", "2-6"):
        (tmp_path / name).mkdir()
        (tmp_path / name / COMMIT).write_text("{")
    alone: Any = SimpleNamespace(rank=0, world=1, gather=lambda blob: [blob])
    restored, skipped = restore(alone, tmp_path, None, None)
    assert restored is None and [each.name for each in skipped] == ["2-6", "1-5"]
    for each in skipped:
        with pytest.raises(ValueError) as why:
            store.read(tmp_path, Commit.parse(each.name))  # type: ignore[arg-type]
        assert each.why == str(why.value)


def test_an_optimizer_keeps_none_of_the_savers_memory(begun: tuple[Path, RunSettings]) -> None:
    """The next save is staged there."""
    folder, settings = begun
    assert settings.saver is not None
    trainer = client.Client.connect(settings.saver)
    restored, _ = restore(Peer(), folder / "other", trainer, trainer.hello(folder / "other", 2, 2))
    assert restored is not None and (restored.source, restored.lost) == ("rank 1", None)
    staging = trainer.stage(extent(restored.stretches))
    assert bytes(staging[4:8]) == torch.ones(1).numpy().tobytes(), "the second weight arrived there"
    staging[:] = bytes(len(staging))
    assert torch.equal(restored.state.optimizers[0], SENT.optimizers[0])  # type: ignore[index]
    trainer.close()


def refused(*_: object) -> None:
    raise PermissionError("the disk is mounted read-only")


@pytest.mark.parametrize(("part", "name"), [(0, STATE), (1, SKELETON)])
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("hashed", [True, False], ids=["checkpoint", "image"])
def test_a_copy_with_one_flipped_bit_is_refused(part: int, name: str, at: int, hashed: bool) -> None:
    def flip(number: int, data: bytearray) -> None:
        if number == part:
            data[at] ^= 1

    with pytest.raises(RuntimeError, match=rf"{name} of 1-5 arrived damaged from rank 1: start again"):
        restore(Peer(flip, hashed=hashed), None, None, None)


@pytest.mark.parametrize("hashed", [True, False], ids=["checkpoint", "image"])
def test_each_receiver_gets_the_files_and_of_an_image_their_hashes(hashed: bool) -> None:
    peer, sent = Peer(hashed=hashed), []
    memory = bytearray(extent(peer.stretches))
    for part, data in zip(peer.stretches, peer.parts[:: 1 if hashed else 2], strict=True):
        memory[part.offset : part.offset + part.bytes] = data
    gang: Any = SimpleNamespace(send=lambda view, to: sent.append((to, bytes(view))))
    _send(gang, [1, 3], peer.manifest, memoryview(memory))
    assert sent == [(to, bytes(each)) for to in (1, 3) for each in peer.parts]


def test_a_copy_is_received_without_a_saver(tmp_path: Path) -> None:
    saver = start_saver(tmp_path / "saver")
    trainer = client.Client.connect(tmp_path / "saver")
    hello = trainer.hello(tmp_path / "ckpt", 2, 2)
    saver.kill()
    saver.wait()
    restored, _ = restore(Peer(), tmp_path / "ckpt", trainer, hello)
    assert restored is not None and restored.lost is not None
    assert restored.lost.fault is Fault.SAVER_LOST and restored.source == "rank 1"
    assert torch.equal(restored.state.model["weight"], SENT.model["weight"])  # type: ignore[index]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[tuple[Path, RunSettings]]:
    """A new saver, on whose disk generation 1 left two checkpoints and began a third."""
    path, folder = tmp_path / "saver", tmp_path / "ckpt"
    process = start_saver(path)
    for gen, step in ((1, 4), (1, 5)):
        peer = Peer()
        home = folder / f"{gen}-{step}"
        home.mkdir(parents=True)
        for file, data in zip(peer.manifest.files, peer.parts, strict=True):
            (home / file.name).write_bytes(data)
        (home / COMMIT).write_bytes(replace(peer.manifest, commit=Commit(gen, step)).to_bytes())
    (folder / "1-6").mkdir()
    run = {"SPOTKEEPER_RUN": str(tmp_path), "SPOTKEEPER_CKPT": str(folder), "SPOTKEEPER_SAVER": str(path)}
    yield folder, RunSettings.from_env(run | {"SPOTKEEPER_GEN": "2"})
    process.kill()
    process.wait()


def test_the_disk_is_read_while_the_process_group_is_built(
    begun: tuple[Path, RunSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    folder, settings = begun
    early = EarlyRead.begin(settings)
    assert early is not None and early.commit == Commit(1, 5)
    assert "quarantined 1-6" in capsys.readouterr().err, "the next hello does not tell it again"
    early.read.result()
    monkeypatch.setattr(restores, "read_checkpoint", None)
    assert settings.saver is not None
    trainer = client.Client.connect(settings.saver)
    restored, skipped = restore(SoloGang(), folder, trainer, trainer.hello(folder, 2, 2), early)
    assert restored is not None and (restored.source, restored.manifest.commit) == ("disk", Commit(1, 5))
    assert torch.equal(restored.state.model["weight"], SENT.model["weight"]) and not skipped  # type: ignore[index]
    memory, moment = early.read.result()[1], restored.state.optimizers[0]  # type: ignore[index]
    assert 0 < moment.data_ptr() - torch.frombuffer(memory, dtype=torch.uint8).data_ptr() < len(memory), "not copied"
    trainer.close()


def test_a_damaged_checkpoint_that_was_read_early_is_passed_over(begun: tuple[Path, RunSettings]) -> None:
    folder, settings = begun
    (folder / "1-5" / STATE).write_bytes(bytes((folder / "1-5" / STATE).stat().st_size))
    early = EarlyRead.begin(settings)
    assert early is not None and early.commit == Commit(1, 5)
    restored, skipped = restore(SoloGang(), folder, None, None, early)
    assert restored is not None and restored.manifest.commit == Commit(1, 4)
    assert skipped == [SkippedCheckpoint("1-5", f"{STATE} does not match its hash in {COMMIT}")]


@pytest.mark.parametrize("why", ["another rank", "no saver", "fenced", "no disk"])
def test_nothing_is_read_early_without_need(
    begun: tuple[Path, RunSettings], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    folder, settings = begun
    monkeypatch.setenv("LOCAL_RANK", "1" if why == "another rank" else "0")
    if why == "no saver":
        settings = replace(settings, saver=folder / "none")
    elif why == "no disk":
        settings = replace(settings, folder=None)
    elif why == "fenced":
        EarlyRead.begin(replace(settings, gen=3, folder=folder.parent / "other"))
    assert EarlyRead.begin(settings) is None
