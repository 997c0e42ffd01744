"""Saves that copy optimizers' tensors while training continues: every checkpoint is one step's state, bit for bit."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optim
from torch.utils.data import DataLoader, TensorDataset

import spotkeeper
from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import snapshot, store
from spotkeeper.train.checkpoint.image import RunState, extent, lay_out_of, thaw, unpack
from spotkeeper.train.checkpoint.snapshot import BackgroundCopier
from spotkeeper.train.core.parts import AllOptimizers, Attached, FrameworkState
from spotkeeper.train.core.tensors import TensorCopy, TensorSlot
from spotkeeper.train.loop.run import Run
from tests.train.forks import run_script

STEPS = 8


class LatestCopier:
    """Copies as late as is allowed: only once something waits. A wait that is left out then copies a later state."""

    def __init__(self) -> None:
        self.copies = 0

    def submit(self, work: Callable[[Any], None], what: Any) -> Future[None]:
        self.copies += 1
        future: Future[None] = Future()
        take = future.exception

        def exception(timeout: float | None = None) -> BaseException | None:
            if not future.done():
                work(what)
                future.set_result(None)
            return take(timeout)

        future.exception = exception  # type: ignore[method-assign]
        return future


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, no agent, snapshots on, a save due at every step."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SPOTKEEPER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPOTKEEPER_SNAPSHOTS", "1")
    monkeypatch.setenv("SPOTKEEPER_INTERVAL_S", "0.000001")
    monkeypatch.setenv("SPOTKEEPER_KEEP", "100")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LatestCopier:
    """All copies are made as late as is allowed."""
    found = LatestCopier()
    monkeypatch.setattr(snapshot, "ThreadPoolExecutor", lambda *_: found)
    return found


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8))
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.dropout(self.norm(self.first(x)), 0.2, self.training))


class Training:
    """A script: what it attaches, and its step on a batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Body()
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(self.model.parameters(), lr=0.01)]
        self.parts: dict[str, Any] = {}

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def step(self, x: torch.Tensor, number: int) -> None:
        self.loss(x).backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class Accumulated(Training):
    """A boundary after every second batch only."""

    def step(self, x: torch.Tensor, number: int) -> None:
        self.loss(x).backward()
        if number % 2:
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()


class Rhythms(Training):
    """Two optimizers: the second one, which the run does not count, steps first and more often."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers = [
            torch.optim.SGD(self.model.last.parameters(), lr=0.01, momentum=0.9),  # type: ignore[union-attr, arg-type]
            torch.optim.Adam(self.model.first.parameters(), lr=0.01),  # type: ignore[union-attr, arg-type]
        ]

    def step(self, x: torch.Tensor, number: int) -> None:
        for _ in range(1 + number % 3):
            self.loss(x).backward()
            self.optimizers[1].step()
        self.loss(x).backward()
        self.optimizers[0].step()
        for each in self.optimizers:
            each.zero_grad()


class Momentum(Training):
    """MoCo's momentum encoder: frozen, in the optimizer's groups, moved in place before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.model[1].requires_grad_(False)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        online, frozen = self.model  # type: ignore[misc]
        for ours, theirs in zip(frozen.parameters(), online.parameters(), strict=True):
            ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        return (online(x) - frozen(x) - 1).square().mean()


class Unfrozen(Momentum):
    """The momentum encoder is not frozen, but gets no gradients, so its optimizer has no state for it."""

    def __init__(self) -> None:
        super().__init__()
        self.model[1].requires_grad_(True)  # type: ignore[index]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        online, average = self.model  # type: ignore[misc]
        for ours, theirs in zip(average.parameters(), online.parameters(), strict=True):
            ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        with torch.no_grad():
            target = average(x)
        return (online(x) - target - 1).square().mean()


class Unattached(Training):
    """A second optimizer that no ``attach`` knows: it comes after three steps and steps first."""

    def step(self, x: torch.Tensor, number: int) -> None:
        self.loss(x).backward()
        if number >= 3:
            torch.optim.SGD(self.model.parameters(), lr=0.01, fused=False, foreach=False).step()
        super().step(x, number)


class Averaged(Training):
    """An average of the weights that moves before the forward pass: no optimizer owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"ema": torch.optim.swa_utils.AveragedModel(self.model)}

    def step(self, x: torch.Tensor, number: int) -> None:
        self.parts["ema"].update_parameters(self.model)
        super().step(x, number)


class Closure(Training):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 3)
        self.optimizers = [torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3)]

    def step(self, x: torch.Tensor, number: int) -> None:
        def closure() -> torch.Tensor:
            self.optimizers[0].zero_grad()
            loss = self.loss(x)
            loss.backward()
            return loss

        self.optimizers[0].step(closure)  # type: ignore[arg-type]


class Clamped(Training):
    """WGAN as its authors wrote it: weights are clamped before the forward pass, and no version counter shows it."""

    def step(self, x: torch.Tensor, number: int) -> None:
        for param in self.model.parameters():
            param.data.clamp_(-0.05, 0.05)
        super().step(x, number)


class Decayed(Training):
    """Weight decay by hand, after the gradients and before the optimizer's step; no version counter shows it."""

    def step(self, x: torch.Tensor, number: int) -> None:
        self.loss(x).backward()
        for param in self.model.parameters():
            param.data.mul_(0.9)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class Sharpness(Training):
    """SAM: weights are moved and moved back between two backward passes of a step."""

    def step(self, x: torch.Tensor, number: int) -> None:
        self.loss(x).backward()
        before = [param.detach().clone() for param in self.model.parameters()]
        with torch.no_grad():
            for param in self.model.parameters():
                param.add_(param.grad, alpha=0.05)  # type: ignore[arg-type]
        self.optimizers[0].zero_grad()
        self.loss(x).backward()
        with torch.no_grad():
            for param, old in zip(self.model.parameters(), before, strict=True):
                param.copy_(old)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()


class SharpnessUnseen(Training):
    """SAM through ``.data``: before the optimizer's step all bits and version counters are as at the boundary."""

    replaced = False

    def step(self, x: torch.Tensor, number: int) -> None:
        self.loss(x).backward()
        before = [param.data.clone() for param in self.model.parameters()]
        for param in self.model.parameters():
            self.move(param, param.data + 0.05 * param.grad)  # type: ignore[operator]
        self.optimizers[0].zero_grad()
        self.loss(x).backward()
        for param, old in zip(self.model.parameters(), before, strict=True):
            self.move(param, old)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()

    def move(self, param: nn.Parameter, to: torch.Tensor) -> None:
        if self.replaced:
            param.data = to
        else:
            param.data.copy_(to)


class SharpnessReplaced(SharpnessUnseen):
    """SAM that exchanges the parameters' memory."""

    replaced = True


class ClampedNowAndThen(Training):
    """The clamp comes after the checks, and shows in version counters."""

    def step(self, x: torch.Tensor, number: int) -> None:
        if number == 5:
            with torch.no_grad():
                for param in self.model.parameters():
                    param.clamp_(-0.05, 0.05)
        super().step(x, number)


def bits(model: Any, optimizers: Any, parts: Any, buffers: Any) -> list[Any]:
    return _plain([dict(model), optimizers, parts, dict(buffers)])


def _plain(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.tolist()
    if isinstance(part, dict):
        return {key: _plain(value) for key, value in part.items()}
    return [_plain(each) for each in part] if isinstance(part, (list, tuple)) else part


def now(training: Training) -> list[Any]:
    """The state that the script itself sees."""
    buffers = dict(training.model.named_buffers())
    model = {name: value for name, value in training.model.state_dict().items() if name not in buffers}
    optimizers = [each.state_dict() for each in training.optimizers]
    return bits(model, optimizers, {name: part.state_dict() for name, part in training.parts.items()}, buffers)


def on_disk(folder: Path, commit: Commit) -> list[Any]:
    """The state in a checkpoint, whose hashes are checked."""
    manifest = store.read(folder, commit)
    stretches = lay_out_of(manifest)
    memory = memoryview(bytearray(extent(stretches)))
    for part in stretches:
        store.read_into(folder, manifest, part.name, memory[part.offset : part.offset + part.bytes])
    state: RunState = thaw(memory, stretches)
    return bits(state.model, state.optimizers, state.rest["parts"], unpack(state.local[0])["buffers"])


def train(training: Training, folder: Path, after: Callable[[Run, int], object] = lambda *_: None) -> dict[int, Any]:
    """Train ``STEPS`` steps; return the state after each."""
    states: dict[int, Any] = {}
    run = spotkeeper.attach(training.model, training.optimizers, checkpoint_dir=folder, **training.parts)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), 4, shuffle=True)
    for number, (x,) in enumerate(run.steps(loader, steps=STEPS)):
        training.step(x, number)
        states.setdefault(run.steps_done, now(training))  # a batch that only accumulates changes buffers
        run.wait()  # no save is skipped because the saver is busy
        after(run, number)
    return states


def check(states: dict[int, Any], folder: Path, least: int = STEPS) -> None:
    commits = store.complete(folder)
    assert len(commits) >= least
    for commit in commits:
        assert on_disk(folder, commit) == states[commit.step], f"{commit} is not the state of its step"


SAFE = [Training, Accumulated, Rhythms, Momentum, Unfrozen, Unattached, Averaged, Closure]


@pytest.mark.parametrize("make", SAFE)
def test_every_checkpoint_is_the_state_of_its_step(
    make: Callable[[], Training], tmp_path: Path, late: LatestCopier, capsys: Any
) -> None:
    check(train(make(), tmp_path / "ckpt"), tmp_path / "ckpt")
    assert late.copies >= STEPS - snapshot.CHECKED - 1, "the last save follows the loop"
    assert "snapshots are off" not in capsys.readouterr().err


@pytest.mark.parametrize("make", [Clamped, Decayed, Sharpness, SharpnessUnseen, SharpnessReplaced])
def test_a_script_that_changes_weights_elsewhere_is_found_by_the_first_check(
    make: Callable[[], Training], tmp_path: Path, late: LatestCopier, capsys: Any
) -> None:
    training = make()
    check(train(training, tmp_path / "ckpt"), tmp_path / "ckpt")
    assert late.copies == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "snapshots are off" in line]
    assert len(told) == 1 and " changed before an optimizer's step" in told[0]
    assert any(f": {name} changed" in told[0] for name, _ in training.model.named_parameters())
    assert not any(param._post_accumulate_grad_hooks for param in training.model.parameters())


def test_a_change_after_the_checks_discards_the_torn_copy(
    tmp_path: Path, late: LatestCopier, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Saves are due after the first five steps, then only after the one that was discarded, and at the end."""
    monkeypatch.setenv("SPOTKEEPER_INTERVAL_S", "1000")

    def make_due(run: Run, number: int) -> None:
        if number < 5:
            run._boundary._pace.since = -math.inf

    check(train(ClampedNowAndThen(), tmp_path / "ckpt", make_due), tmp_path / "ckpt", 1)
    steps = [commit.step for commit in store.complete(tmp_path / "ckpt")]
    assert steps == [8, 6, 4, 3, 2, 1], "step 5's copy is torn, so step 6 is saved"
    assert late.copies == 2
    told = capsys.readouterr().err
    assert "checkpoint 0-5 was not saved" in told and "changed while it was copied" in told


def test_optimizers_own_trained_parameters_and_their_state() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model.register_buffer("noise", torch.ones(2))
    optimizer = torch.optim.Adam([*model.parameters(), stray := nn.Parameter(torch.ones(3))])
    (model(torch.ones(1, 2)).sum() + stray.sum()).backward()
    optimizer.step()
    found = dict(Attached.of(model, optimizer, None, {}).optimizer_tensors())
    moments = optimizer.state[model.weight]
    assert list(found) == [
        "weight",
        "step of weight",
        "exp_avg of weight",
        "exp_avg_sq of weight",
        "a parameter of shape (3,)",
        "step of a parameter of shape (3,)",
        "exp_avg of a parameter of shape (3,)",
        "exp_avg_sq of a parameter of shape (3,)",
    ]
    assert found["weight"] is model.weight and found["exp_avg of weight"] is moments["exp_avg"]
    assert found["a parameter of shape (3,)"] is stray


def test_optimizers_without_state_do_not_own_frozen_parameters() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    attached = Attached.of(model, torch.optim.SGD(model.parameters(), lr=0.1), None, {})
    assert [name for name, _ in attached.optimizer_tensors()] == ["weight"]


def test_one_copy_in_some_is_checked_later_too(
    tmp_path: Path, late: LatestCopier, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A write through ``.data`` after the first checks: only a later check can find it."""
    monkeypatch.setattr(snapshot, "EVERY", 6)

    class Silent(Training):
        def step(self, x: torch.Tensor, number: int) -> None:
            if number == 7:
                self.model.last.weight.data.zero_()  # type: ignore[union-attr, operator]
            super().step(x, number)

    states = train(Silent(), tmp_path / "ckpt")
    check(states, tmp_path / "ckpt")
    assert "snapshots are off for the rest of this run: last.weight changed" in capsys.readouterr().err
    assert late.copies == 3, "the copies of steps 4, 5 and 6; step 7's is checked"


def test_weights_may_change_after_a_requested_save_in_untimed_code_and_after_a_break(
    tmp_path: Path, late: LatestCopier, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(snapshot, "CHECKED", 0)
    training, states = Training(), {}
    run = spotkeeper.attach(training.model, training.optimizers, checkpoint_dir=tmp_path / "ckpt")
    weight: Any = training.model.last.weight  # type: ignore[union-attr]
    for number, (x,) in enumerate(run.steps(DataLoader(TensorDataset(torch.randn(64, 4)), 4), steps=STEPS)):
        if number == 3:  # after the boundary of step 3: the copy has not begun
            with run.untimed():
                weight.data.mul_(2)
                weight.data.mul_(0.5)
                weight.data.add_(1)
        if number == 6:
            break
        training.step(x, number)
        states[run.steps_done] = now(training)
        if number != 4:
            run.wait()
        else:
            run.save(wait=False)
            weight.data.add_(1)
    weight.data.zero_()
    run.wait()
    check(states, tmp_path / "ckpt", 6)
    assert {3, 5, 6} <= {commit.step for commit in store.complete(tmp_path / "ckpt")}


def test_snapshots_are_off_by_default(tmp_path: Path, late: LatestCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTKEEPER_SNAPSHOTS")
    check(train(Training(), tmp_path / "ckpt"), tmp_path / "ckpt")
    assert late.copies == 0


def test_a_machine_without_memory_for_a_save_trains_on(
    tmp_path: Path, late: LatestCopier, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from spotkeeper.train.agent_link.control import Fault
    from spotkeeper.train.checkpoint.client import Client
    from spotkeeper.train.checkpoint.protocol import SaverError

    def refuse(*_: object, **__: object) -> None:
        raise SaverError(Fault.NO_MEMORY, "no memory is left")

    expected = train(Training(), tmp_path / "whole")[STEPS]
    monkeypatch.setattr(Client, "image", refuse)
    monkeypatch.setattr(Client, "stage", refuse)
    late.copies = 0
    assert train(Training(), tmp_path / "ckpt")[STEPS] == expected
    assert store.complete(tmp_path / "ckpt") == [] and late.copies == 0
    assert "no memory is left" in capsys.readouterr().err


def test_a_copy_that_fails_ends_snapshots_and_no_training(
    tmp_path: Path, late: LatestCopier, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The copy of the fourth save fails, so this save is not written."""
    expected = train(Training(), tmp_path / "whole")[STEPS]
    late.copies = 0

    def fail(work: object, what: object) -> Future[None]:
        late.copies += 1
        future: Future[None] = Future()
        future.set_exception(MemoryError("no page is left"))
        return future

    monkeypatch.setattr(late, "submit", fail)
    states = train(Training(), tmp_path / "ckpt")
    check(states, tmp_path / "ckpt", STEPS - 1)
    assert states[STEPS] == expected and late.copies == 1
    assert 4 not in {commit.step for commit in store.complete(tmp_path / "ckpt")}
    told = capsys.readouterr().err
    assert "snapshots are off for the rest of this run: the copy failed: MemoryError: no page is left" in told
    assert "checkpoint 0-4 was not saved: the copy failed" in told


def test_a_process_without_threads_copies_at_the_boundary(
    tmp_path: Path, late: LatestCopier, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(late, "submit", refuse)
    check(train(Training(), tmp_path / "ckpt"), tmp_path / "ckpt")
    assert capsys.readouterr().err.count("snapshots are off for the rest of this run: can't start new thread") == 1


class Bare(torch.optim.Optimizer):
    """An optimizer whose constructor does not call torch's, so its step calls no hooks."""

    def __init__(self) -> None:
        self.param_groups: Any = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_an_optimizer_that_calls_no_hooks_keeps_copies_at_the_boundary() -> None:
    param = nn.Parameter(torch.zeros(3))
    hooked = torch.optim.SGD([param], lr=0.1)
    owned = [("p", param.detach())]
    assert BackgroundCopier([hooked]).select(owned)
    assert not BackgroundCopier([hooked, Bare()]).select(owned)


class Slow:
    """A copier with a running copy that ends when the test says so. It saves ``param``, which ``optimizer`` owns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(snapshot, "CHECKED", 0)
        self.future: Future[None] = Future()
        monkeypatch.setattr(snapshot, "ThreadPoolExecutor", lambda *_: self)
        self.param = nn.Parameter(torch.zeros(3))
        self.param.grad = torch.ones(3)
        self.optimizer = torch.optim.SGD([self.param], lr=1.0)
        self.asked: list[str] = []
        self.copier = BackgroundCopier([self.optimizer])
        slot = TensorSlot("float32", (3,), 0, 12)
        copy = TensorCopy("p", torch.zeros(12, dtype=torch.uint8), slot, self.param.detach())
        self.copier._begun = 1  # the first copy is one of ``EVERY``
        self.copier.begin([copy], lambda: self.asked.append("request"), self.asked.append)

    def submit(self, *_: object) -> Future[None]:
        return self.future


def test_a_fork_does_not_wait_for_its_parents_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits
        slow.optimizer.step()
        os._exit(int(slow.param[0].item() != -1 or bool(slow.asked)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slow.future.set_result(None)
    slow.optimizer.step()
    assert slow.asked == ["request"]


def test_an_interrupted_wait_leaves_the_copy_to_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)

    def interrupt(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slow.future, "exception", interrupt)
    with pytest.raises(KeyboardInterrupt):
        slow.optimizer.step()
    assert slow.asked == [] and slow.param[0] == 0
    monkeypatch.undo()
    slow.future.set_result(None)
    slow.copier.wait()
    assert slow.asked == ["request"]


def test_two_threads_that_step_request_one_save_of_unchanged_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread compares and requests, the other may not step."""
    slow = Slow(monkeypatch)
    slow.future.set_result(None)
    other, began = torch.optim.SGD([slow.param], lr=1.0), threading.Event()
    seen: list[float] = []

    def step() -> None:
        began.set()
        other.step()

    second = threading.Thread(target=step)

    def request() -> None:
        second.start()
        began.wait(20)
        second.join(0.2)  # too short for nothing: a step that does not wait takes microseconds
        seen.append(slow.param[0].item())
        slow.asked.append("request")

    assert slow.copier._running is not None
    slow.copier._running = replace(slow.copier._running, request=request)
    slow.optimizer.step()
    second.join(20)
    assert slow.asked == ["request"] and seen == [0.0] and slow.param[0] == -2


@pytest.mark.parametrize("by_name", [True, False])
def test_a_step_with_a_closure_waits_at_the_closures_end(monkeypatch: pytest.MonkeyPatch, by_name: bool) -> None:
    """Lightning, among others, runs forward and backward there."""
    slow, seen = Slow(monkeypatch), []

    def closure() -> float:
        seen.append((slow.copier.running, slow.param[0].item()))
        slow.future.set_result(None)
        return 7.0

    for _ in range(2):
        loss = slow.optimizer.step(closure=closure) if by_name else slow.optimizer.step(closure)  # type: ignore[arg-type]
        assert loss == 7.0 and slow.asked == ["request"]
        slow.future = Future()
    assert seen == [(True, 0.0), (False, -1.0)] and slow.param[0] == -2


def test_a_closure_that_fails_leaves_no_copy_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)

    def closure() -> float:
        slow.future.set_result(None)
        raise ValueError("a batch without samples")

    with pytest.raises(ValueError, match="a batch without samples"):
        slow.optimizer.step(closure)
    assert slow.asked == ["request"] and not slow.copier.running and slow.param[0] == 0


def test_a_trainers_own_optimizer_counts_once_it_is_made() -> None:
    class State(FrameworkState):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    state, other = State(), nn.Parameter(torch.zeros(1))
    parts = Attached.of(None, torch.optim.SGD([other], lr=0.1), None, {"trainer": state, "other": nn.Linear(2, 1)})
    copier = BackgroundCopier(AllOptimizers(parts))
    assert [tensor.data_ptr() for _, tensor in parts.optimizer_tensors()] == [other.data_ptr()]
    trained = nn.Parameter(torch.zeros(3))
    state.optimizers = [torch.optim.SGD([trained], lr=0.1)]
    assert [tensor.data_ptr() for _, tensor in parts.optimizer_tensors()] == [other.data_ptr(), trained.data_ptr()]
    assert len(copier.select(parts.optimizer_tensors())) == 2
    state.optimizers = [Bare()]
    assert not copier.select(parts.optimizer_tensors())


def test_waits_count_as_stalls(late: LatestCopier) -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer, stalls = torch.optim.SGD([param], lr=0.1), deque([0.0])
    copier = BackgroundCopier([optimizer])
    asked: list[str] = []
    slot = TensorSlot("float32", (3,), 0, 12)
    copy = TensorCopy("p", torch.zeros(12, dtype=torch.uint8), slot, param.detach())
    copier.begin([copy], lambda: asked.append("a"), asked.append, stalls)
    param.grad = torch.ones(3)
    optimizer.step()
    assert stalls[0] > 0 and asked == ["a"]
    first = stalls[0]
    optimizer.step()
    assert list(stalls) == [first], "nothing runs, so nothing waits"


# A small training with the arguments KILL, the step at which it kills itself, and FOLDER.
ATTACH = """
kill, folder = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(96, 4)), 4, shuffle=True)
run = spotkeeper.attach(model, optimizer, checkpoint_dir=folder)
"""

KILLED = f"""
import os, signal, sys, torch, spotkeeper
from torch import nn
from torch.optim import optimizer as optim
from torch.utils.data import DataLoader, TensorDataset
from spotkeeper.train.checkpoint import snapshot
{ATTACH}begun = run.steps_done
for number, (x,) in enumerate(run.steps(loader, steps=20)):
    model(x).square().mean().backward()
    if run.steps_done == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    run.wait()
print(begun, [value.tolist() for value in model.state_dict().values()])
"""


@pytest.mark.parametrize("kill", [2, 5, 11, 17])
def test_a_killed_run_ends_with_the_same_bits(kill: int, tmp_path: Path) -> None:
    """The process is killed between a boundary and the optimizer's step, while a real thread may copy."""
    (tmp_path / "train.py").write_text(KILLED)
    whole = run_script(tmp_path, "train.py", "-1", "whole")
    assert run_script(tmp_path, "train.py", str(kill), "killed").returncode == -signal.SIGKILL
    again = run_script(tmp_path, "train.py", "-1", "killed")
    assert whole.returncode == again.returncode == 0, again.stderr
    (begun, bits), (zero, expected) = again.stdout.split(" ", 1), whole.stdout.split(" ", 1)
    assert bits == expected and zero == "0"
    assert kill - 1 <= int(begun) <= kill, "the newest save counts, or the one before it"


def test_a_copier_leaves_no_hook_behind() -> None:
    gc.collect()  # copiers of other tests
    before = len(optim._global_optimizer_pre_hooks)
    copier = BackgroundCopier([torch.optim.SGD(nn.Linear(2, 1).parameters())])
    assert len(optim._global_optimizer_pre_hooks) == before + 1
    del copier
    gc.collect()
    assert len(optim._global_optimizer_pre_hooks) == before


class Wrapped:
    """As Accelerate wraps an optimizer: its own ``step`` calls no hooks, the wrapped one's does."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer

    def step(self) -> None: ...


def test_only_tensors_with_a_version_are_copied_later_and_only_where_a_step_waits() -> None:
    weight, stepping = torch.ones(2), torch.optim.SGD(nn.Linear(2, 1).parameters())
    with torch.inference_mode():
        unversioned = torch.ones(2)
    owned = (("w", weight), ("no version", unversioned), ("another device", torch.ones(2, device="meta")))
    for optimizers, names in (([Wrapped(stepping)], ["w"]), ([stepping, Wrapped(None)], [])):
        assert list(BackgroundCopier(optimizers).select(owned).values()) == names


def test_a_save_counts_as_an_image(tmp_path: Path) -> None:
    """So it comes in place of an image, and its cost is part of their cost."""
    costs: list[int] = []

    def note(run: Run, number: int) -> None:
        pace = run._boundary._pace
        costs.append(len(pace.image_stalls))
        assert not number or (pace.image_step == number and pace.image_since == pace.since)

    train(Training(), tmp_path / "ckpt", note)
    assert costs == list(range(STEPS))
