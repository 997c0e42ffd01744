"""Images of tensors on devices: a stand-in copies as late as a device may; CUDA's own part runs where there is one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import spotkeeper
from spotkeeper.train.checkpoint import device_copy, snapshot, store
from spotkeeper.train.checkpoint.device_copy import DeviceCopier, DeviceCopies, PinnedMemories, sums
from spotkeeper.train.checkpoint.snapshot import BackgroundCopier
from spotkeeper.train.core.tensors import TensorCopy, TensorSlot
from spotkeeper.train.loop.run import Run
from tests.train.checkpoint.test_snapshot import (
    SAFE,
    STEPS,
    Clamped,
    Sharpness,
    SharpnessUnseen,
    Training,
    check,
    laptop,
    train,
)

__all__ = ["laptop"]  # a fixture of all tests here
HERE = torch.device("cpu")


class LateCopies:
    """Copies only once the stream of a step waits for it. A wait that is left out then copies a later state."""

    def __init__(self, copies: Sequence[TensorCopy], device: LateDevice) -> None:
        self.copies, self.device, self.done = copies, device, False

    def _run(self) -> None:
        if not self.done:
            self.done = True
            self.device.copied += 1
            for copy in self.copies:
                copy.run()
            if self.device.flips:
                self.copies[0].base[self.copies[0].slot.offset] ^= 1

    def hold(self) -> None:
        self.device.held += 1
        self._run()

    def ready(self) -> bool:
        self.device.asked += 1
        return self.done and self.device.idle

    def wait(self) -> RuntimeError | None:
        self._run()
        return RuntimeError("CUDA error: unspecified launch failure") if self.device.broken else None


class LateDevice:
    """In place of ``DeviceCopier``."""

    pins = idle = True
    refuses = flips = broken = False
    copied = held = asked = 0
    last: LateCopies | None = None

    def can(self, copies: Sequence[TensorCopy]) -> bool:
        return self.pins

    def begin(self, copies: Sequence[TensorCopy]) -> LateCopies:
        if self.refuses:
            raise RuntimeError("CUDA error: out of memory")
        self.last = LateCopies(copies, self)
        return self.last


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """All tensors are on a device that copies as late as is allowed."""
    found = LateDevice()
    monkeypatch.setattr(snapshot, "DeviceCopier", lambda: found)
    monkeypatch.setattr(snapshot, "on_device", lambda tensor: True)
    return found


@pytest.mark.parametrize("make", SAFE)
def test_every_checkpoint_is_the_state_of_its_step(
    make: Callable[[], Training], tmp_path: Path, device: LateDevice, capsys: Any
) -> None:
    check(train(make(), tmp_path / "ckpt"), tmp_path / "ckpt")
    assert device.copied >= STEPS - 1, "those that are checked, too"
    assert "snapshots are off" not in capsys.readouterr().err


@pytest.mark.parametrize("make", [Clamped, Sharpness, SharpnessUnseen])
def test_a_script_that_changes_weights_elsewhere_is_found_by_the_first_check(
    make: Callable[[], Training], tmp_path: Path, device: LateDevice, capsys: Any
) -> None:
    check(train(make(), tmp_path / "ckpt"), tmp_path / "ckpt", STEPS - 1)
    assert " changed before an optimizer's step" in capsys.readouterr().err


def test_a_write_that_the_device_has_copied_and_nothing_else_shows_is_found(
    tmp_path: Path, device: LateDevice, capsys: Any
) -> None:
    """Before the forward pass, through ``.data``: each copy equals its tensor when gradients come, and at the step."""

    class ClampedUnseen(Training):
        def step(self, x: torch.Tensor, number: int) -> None:
            for param in self.model.parameters():
                param.data.clamp_(-0.05, 0.05)
            if device.last is not None:
                device.last.hold()
            super().step(x, number)

    check(train(ClampedUnseen(), tmp_path / "ckpt"), tmp_path / "ckpt", STEPS - 1)
    assert " changed before an optimizer's step" in capsys.readouterr().err and device.copied == 1


def test_a_device_that_copies_other_bits_is_found_by_the_first_check(
    tmp_path: Path, device: LateDevice, capsys: Any
) -> None:
    device.flips = True
    check(train(Training(), tmp_path / "ckpt"), tmp_path / "ckpt", STEPS - 1)
    assert device.copied == 1 and "snapshots are off" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["pins", "refuses"])
@pytest.mark.parametrize("checked", [3, 0])
def test_a_device_that_refuses_has_its_tensors_copied_at_the_boundary(
    tmp_path: Path, device: LateDevice, monkeypatch: pytest.MonkeyPatch, capsys: Any, what: str, checked: int
) -> None:
    monkeypatch.setattr(snapshot, "CHECKED", checked)
    monkeypatch.setattr(snapshot, "EVERY", 10**9)
    setattr(device, what, not getattr(device, what))
    check(train(Training(), tmp_path / "ckpt"), tmp_path / "ckpt")
    told = "CUDA cannot register the saver's memory" if what == "pins" else "out of memory"
    assert device.copied == 0 and capsys.readouterr().err.count(told) == 1


def test_a_device_that_fails_while_it_copies_loses_that_save_alone(
    tmp_path: Path, device: LateDevice, capsys: Any
) -> None:
    def breaks(run: Run, number: int) -> None:
        device.broken = number == 4

    check(train(Training(), tmp_path / "ckpt", breaks), tmp_path / "ckpt", STEPS - 1)
    assert [commit.step for commit in store.complete(tmp_path / "ckpt")] == [8, 7, 6, 4, 3, 2, 1]
    assert "the copy failed: RuntimeError: CUDA error: unspecified launch failure" in capsys.readouterr().err


def test_the_save_is_requested_at_the_boundary_at_which_the_bytes_are_there(
    tmp_path: Path, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "CHECKED", 0)
    monkeypatch.setattr(snapshot, "EVERY", 10**9)
    training, running = Training(), list[bool]()
    run = spotkeeper.attach(training.model, training.optimizers, checkpoint_dir=tmp_path / "ckpt")
    copier = run._boundary._strategy._copier  # type: ignore[attr-defined]
    copier._begun = 1  # the first copy is one of ``EVERY``
    for number, x in enumerate(run.steps([torch.randn(4, 4)] * STEPS)):
        run._boundary._pace.since = -math.inf if number == 2 else math.inf
        run._boundary._pace.image_since = math.inf
        device.idle = number >= 5
        training.step(x, number)
        running.append(copier.running)
    assert running == [False, False, False, True, True, True, False, False]
    assert [commit.step for commit in store.complete(tmp_path / "ckpt")] == [8, 3]


class Held:
    """A copier with a copy that a device makes; it saves ``param``, which ``optimizers`` own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(snapshot, "CHECKED", 0)
        self.param = nn.Parameter(torch.zeros(3))
        self.param.grad = torch.ones(3)
        self.optimizers = [torch.optim.SGD([self.param], lr=1.0) for _ in range(2)]
        self.asked: list[str] = []
        self.copier = BackgroundCopier(self.optimizers)
        self.base = torch.zeros(12, dtype=torch.uint8)
        copy = TensorCopy("p", self.base, TensorSlot("float32", (3,), 0, 12), self.param.detach())
        self.copier._begun = 1  # the first copy is one of ``EVERY``
        self.copier.begin([copy], lambda: self.asked.append("request"), self.asked.append)


def test_a_step_does_not_wait_for_the_bytes_and_each_optimizers_stream_does(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    device.idle = False
    for number, optimizer in enumerate(held.optimizers):
        optimizer.step()
        held.copier.poll()
        assert (device.held, held.asked) == (number + 1, [])
    device.idle = True
    held.copier.poll()
    assert held.asked == ["request"] and held.base.view(torch.float32).tolist() == [0.0] * 3
    held.optimizers[0].step()
    assert device.held == 2, "nothing runs any more"


def test_a_copy_without_a_step_is_waited_for(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    held.copier.poll()
    assert held.asked == [], "no optimizer has stepped: the bytes may not be there"
    held.copier.wait()
    assert held.asked == ["request"]


class Runtime:
    """CUDA's calls for memory. It refuses what is registered already, as CUDA does."""

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.full = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if self.full or address in self.registered:
            return 712
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered.remove(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    cuda = SimpleNamespace(cudart=lambda: found, device=lambda _: contextlib.nullcontext())
    monkeypatch.setattr(device_copy.torch, "cuda", cuda)
    return found


def test_memories_are_registered_once_and_the_replaced_ones_no_more(runtime: Runtime) -> None:
    pinned = PinnedMemories()
    bases = [torch.zeros(size, dtype=torch.uint8) for size in range(64, 64 + device_copy._KEPT + 2)]
    for base in (*bases[:3], *bases[:3], bases[0], *bases[3:]):
        assert pinned.pin(base, HERE)
    assert runtime.registered == {base.data_ptr() for base in (bases[0], *bases[3:])}


def test_a_refused_memory_is_not_registered(runtime: Runtime) -> None:
    runtime.full = True
    base = torch.zeros(64, dtype=torch.uint8)
    assert not PinnedMemories().pin(base, HERE)
    copy = TensorCopy("p", base, TensorSlot("float32", (3,), 0, 12), torch.zeros(3))
    assert not DeviceCopier().can([copy]) and DeviceCopier().can([])


def test_each_device_copies_on_one_stream_whatever_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []

    def stream(device: torch.device) -> Any:
        streams.append(SimpleNamespace(device=device, wait_stream=lambda other: None))
        return streams[-1]

    cuda = SimpleNamespace(
        Stream=stream,
        current_stream=lambda device: None,
        stream=lambda _: contextlib.nullcontext(),
        Event=lambda: SimpleNamespace(record=lambda stream: None),
    )
    monkeypatch.setattr(device_copy.torch, "cuda", cuda)
    monkeypatch.setattr(device_copy, "view", lambda base, slot: SimpleNamespace(copy_=lambda *_, **__: None))
    copies: Any = [SimpleNamespace(tensor=SimpleNamespace(device=torch.device("cuda", at)), base=0, slot=0)
                   for at in (1, 0, 1)]  # fmt: skip
    made = DeviceCopies(copies, {})
    assert [device.index for device, _ in made._ends] == [each.device.index for each in streams] == [0, 1]


def test_sums_see_a_flipped_bit() -> None:
    copy = TensorCopy("p", torch.zeros(64, dtype=torch.uint8), TensorSlot("float32", (3,), 8, 12), torch.zeros(3))
    before = sums([copy])
    copy.base[20] = 1  # beside the slot
    assert sums([copy]) == before
    copy.base[19] = 1
    assert sums([copy]) != before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here (make gpu)")
@pytest.mark.parametrize("make", SAFE)
def test_on_cuda_every_checkpoint_is_the_state_of_its_step(
    make: Callable[[], Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    begun: list[int] = []
    begin = DeviceCopier.begin
    monkeypatch.setattr(DeviceCopier, "begin", lambda self, copies: begun.append(len(copies)) or begin(self, copies))
    with torch.device("cuda"):
        check(train(make(), tmp_path / "ckpt"), tmp_path / "ckpt")
    assert begun and "snapshots are off" not in capsys.readouterr().err
