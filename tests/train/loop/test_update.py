"""run.backward and run.step in one process: weights, clipping, scalers, and scripts that do it by themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotkeeper
from spotkeeper.train.core.errors import AttachError, DataError
from spotkeeper.train.core.microbatch import _check
from spotkeeper.train.loop.run import Run
from tests.train.data.test_sampler import Endless


class Script:
    """A model whose loader's batches are ``micro`` samples long."""

    def __init__(self, micro: int, scaler: Any = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = scaler
        data = TensorDataset(torch.randn(32, 3, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64))
        self.loader = DataLoader(data, micro, shuffle=True)

    def attach(self, **more: Any) -> Run:
        return spotkeeper.attach(self.model, self.optimizer, self.scheduler, scaler=self.scaler, **more)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def weights(self) -> torch.Tensor:
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SPOTKEEPER_")]:
        monkeypatch.delenv(name)


def plain(clip: float | None = None) -> torch.Tensor:
    """Batches of eight, the usual lines."""
    script = Script(8)
    for batch in script.attach(checkpoint_dir="plain").steps(script.loader):
        script.loss(batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(script.model.parameters(), clip)
        script.optimizer.step()
        script.scheduler.step()
        script.optimizer.zero_grad()
    return script.weights()


def cut(micro: int, scaler: Any = None, clip: Any = None, **more: Any) -> tuple[Script, Run, list[bool]]:
    """The same with our lines."""
    script, over = Script(micro, scaler), []
    run = script.attach(checkpoint_dir=f"cut{micro}", **more)
    for batch in run.steps(script.loader):
        run.backward(script.loss(batch))
        over.append(run.step(clip=clip(script) if callable(clip) else clip))
    return script, run, over


@pytest.mark.parametrize("micro", [1, 3, 5, 8, 11])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_any_cut_into_micro_batches_gives_the_same_gradient(micro: int, clip: float | None) -> None:
    script, run, over = cut(micro, clip=clip, global_batch=8)
    each = -(-8 // micro)
    assert over == ([False] * (each - 1) + [True]) * 4
    assert run.steps_done == 4
    torch.testing.assert_close(script.weights(), plain(clip), rtol=0, atol=1e-14)


def test_without_a_global_batch_backward_and_step_equal_plain_ones() -> None:
    assert cut(8)[0].weights().tolist() == plain().tolist()


def test_clip_sees_complete_gradients() -> None:
    norms: list[float] = []

    def clip(script: Script) -> Callable[[], object]:
        return lambda: norms.append(float(torch.cat([p.grad.flatten() for p in script.model.parameters()]).norm()))

    cut(3, clip=clip, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0), global_batch=8)
    scaled, norms = norms, []
    cut(8, clip=clip, global_batch=8)
    assert len(norms) == 4 and scaled == pytest.approx(norms)


def test_a_scaler_scales_and_an_overflow_steps_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.testing.assert_close(cut(3, scaler, global_batch=8)[0].weights(), plain(), rtol=0, atol=1e-12)

    script = Script(4, torch.amp.GradScaler("cpu", init_scale=1024.0))
    run = script.attach(checkpoint_dir="overflow", global_batch=8)
    counts = []
    for number, batch in enumerate(run.steps(script.loader)):
        run.backward(script.loss(batch) * (float("inf") if number == 3 else 1.0))
        if run.step():
            counts.append((run.steps_done, script.scheduler.last_epoch))
    assert counts == [(1, 1), (1, 1), (2, 2), (3, 3)]
    assert torch.isfinite(script.weights()).all()
    assert script.scaler.get_scale() == 512.0


def test_the_loss_is_that_of_the_global_batch() -> None:
    def losses(micro: int) -> list[float]:
        script = Script(micro)
        run = script.attach(checkpoint_dir=f"losses{micro}", global_batch=8)
        with pytest.raises(RuntimeError, match=r"known once run.step\(\) has returned True"):
            run.loss()
        got = []
        for batch in run.steps(script.loader):
            run.backward(script.loss(batch))
            if run.step():
                got.append(run.loss())
        return got

    assert losses(3) == pytest.approx(losses(8), abs=1e-15)


# ------------------------------------------------------------------- who does it by themselves


@pytest.mark.parametrize("job", [False, True])
def test_an_own_optimizer_step_is_refused_before_any_change(job: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the script says that its world may change, or the job file does."""
    if job:
        monkeypatch.setenv("SPOTKEEPER_MAX_WORLD", "3")
    script = Script(4)
    before = script.weights()
    run = script.attach(global_batch=None if job else 8)
    with pytest.raises(RuntimeError, match=r"Write run.backward\(loss\) for loss.backward\(\), and run.step\(\)"):
        for batch in run.steps(script.loader):
            script.loss(batch).backward()
            script.optimizer.step()
    assert script.weights().tolist() == before.tolist()


def test_in_a_fixed_world_own_optimizer_steps_are_allowed() -> None:
    script = Script(4)
    for batch in script.attach().steps(script.loader):
        script.loss(batch).backward()
        script.optimizer.step()


def test_a_skipped_batch_is_an_error_and_no_deadlock() -> None:
    script = Script(4)
    with pytest.raises(RuntimeError, match=r"run.backward\(loss\) was not called for a batch"):
        for _ in script.attach(global_batch=8, checkpoint_dir="a").steps(script.loader):
            pass
    run = (script := Script(8)).attach(global_batch=8, checkpoint_dir="b")
    with pytest.raises(RuntimeError, match=r"run.step\(\) was not called"):
        for batch in run.steps(script.loader):
            run.backward(script.loss(batch))


def test_calls_out_of_order_are_refused() -> None:
    script = Script(4)
    run = script.attach(global_batch=8)
    with pytest.raises(RuntimeError, match="inside the loop"):
        run.backward(script.model(torch.ones(1, 3, dtype=torch.float64)).sum())
    with pytest.raises(RuntimeError, match=r"once after each run.backward"):
        run.step()
    for batch in run.steps(script.loader):
        run.backward(script.loss(batch))
        with pytest.raises(RuntimeError, match="with the sum of all losses"):
            run.backward(script.loss(batch))
        run.step()
        with pytest.raises(RuntimeError, match=r"once after each run.backward"):
            run.step()


def test_objects_unfit_for_a_changing_world_are_refused() -> None:
    script = Script(4)
    with pytest.raises(ValueError, match="want at least 1 sample"):
        script.attach(global_batch=0)
    with pytest.raises(ValueError, match=r"attach\(optimizer=\) is missing"):
        spotkeeper.attach(script.model, global_batch=8)
    run = script.attach(global_batch=8)
    with pytest.raises(DataError, match="no indices to divide among a changing number of ranks"):
        next(iter(run.steps(DataLoader(Endless(), 4))))


SHARDED = (
    "attach(model=): this run's division of work may change, so wrap the model in DistributedDataParallel; a sharded "
    "model needs a fixed number of nodes and no `machines`"
)
STATIC_GRAPH = (
    "attach(model=): DistributedDataParallel(static_graph=True) cannot accumulate gradients, which this run must do "
    "because its division of work may change"
)


@pytest.mark.parametrize(
    ("parts", "world", "why"),
    [
        ({}, 1, ""),
        ({}, 2, SHARDED),
        ({"sharded": True}, 1, SHARDED),
        ({"ddp": SimpleNamespace(static_graph=False)}, 2, ""),
        ({"ddp": SimpleNamespace(static_graph=True)}, 2, STATIC_GRAPH),
        ({"ddp": SimpleNamespace(static_graph=True)}, 1, STATIC_GRAPH),
    ],
)
def test_models_unfit_for_a_changing_world_are_refused(parts: dict[str, Any], world: int, why: str) -> None:
    given: Any = SimpleNamespace(**{"optimizers": ("one",), "sharded": False, "ddp": None} | parts)
    with pytest.raises(AttachError, match=f"^{re.escape(why)}$") if why else nullcontext():
        _check(given, world)


def test_an_elastic_job_uses_its_largest_worlds_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTKEEPER_MAX_WORLD", "3")
    script = Script(4)
    run = script.attach()
    over = []
    for batch in run.steps(script.loader, steps=2):
        run.backward(script.loss(batch))
        over.append(run.step())
    assert over == [False, False, True] * 2, "three ranks would have one micro-batch each"
    with pytest.warns(UserWarning, match=r"began with 12 samples per global batch .*although attach\(\) now gives 8"):
        again = Script(4)
        run = again.attach(global_batch=8)
        assert next(iter(run.steps(again.loader, steps=3)))[0].shape == (4, 3)
