"""What a script gives to ``attach()`` and ``run.steps()``: errors name it, and silent traps are told."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotkeeper
from spotkeeper.train.core.division import Speeds
from spotkeeper.train.core.errors import AttachError, CallError
from spotkeeper.train.core.settings import lock
from spotkeeper.train.loop import run as library
from tests.train.forks import Ended, run_script

SCRIPT = """
import sys
import spotkeeper, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
run = spotkeeper.attach(model, optimizer)
for batch in run.steps([torch.ones(2)] * 4):
    model(batch).sum().backward()
    optimizer.step()
open("model.pt", "w").write(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SPOTKEEPER_")]:
        monkeypatch.delenv(name)
    handlers = {number: signal.getsignal(number) for number in (2, 15)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def attach(width: int = 3, **more: Any) -> spotkeeper.Run:
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
    return spotkeeper.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **more)


@pytest.mark.parametrize(
    ("positional", "named", "said"),
    [
        ((), {"epochs": 0}, "run.steps(epochs=0): want the number of passes over the data, a whole number from 1"),
        ((), {"epochs": -1}, "run.steps(epochs=-1): want the number of passes over the data"),
        (
            (),
            {"epochs": 1.5},
            "run.steps(epochs=1.5): want the number of passes over the data, a whole number from 1, such as",
        ),
        ((), {"epochs": True}, "run.steps(epochs=True): want"),
        (
            (),
            {"steps": "10"},
            "run.steps(steps='10'): want the number of optimizer steps in all, a whole number from 1",
        ),
        ((), {"steps": 0}, "run.steps(steps=0): want"),
        ((), {"steps": float("inf")}, "run.steps(steps=inf): want"),
        ((3,), {}, "run.steps(loader, 3) does not say what 3 counts: write run.steps(loader, epochs=3) or"),
    ],
)
def test_an_invalid_length_is_named(positional: tuple[Any, ...], named: dict[str, Any], said: str) -> None:
    run = attach()
    with pytest.raises(CallError) as error:
        next(run.steps([torch.ones(2)], *positional, **named))
    assert said in str(error.value)
    next(run.steps([torch.ones(2)], steps=torch.tensor(2)))  # type: ignore[arg-type] # any whole number


def test_nothing_to_save_is_refused() -> None:
    with pytest.raises(AttachError, match=r"attach\(\) was given nothing to save: write attach\(model=model"):
        spotkeeper.attach()


def test_a_second_run_before_the_first_has_a_loop_is_refused() -> None:
    """As for two models of which each has its optimizer: both runs would save into one folder."""
    first = attach()
    with pytest.raises(CallError, match="once with all models and optimizers"):
        attach()
    for _ in first.steps([torch.ones(2)]):
        pass
    attach(checkpoint_dir="elsewhere")


def test_another_models_checkpoint_is_refused_with_tensor_and_shapes() -> None:
    for _ in attach(width=3, checkpoint_dir="here").steps([torch.ones(2)]):
        pass
    with pytest.raises(AttachError) as error:
        attach(width=5, checkpoint_dir="here")
    text = str(error.value)
    assert text.startswith(
        "checkpoint 0-0 in here belongs to another model: 0.bias is [3] in the checkpoint and [5] in the"
    )
    assert "and 0 more" not in text and "To train this model: move here away" in text


def test_other_parts_names_are_refused() -> None:
    for _ in attach(checkpoint_dir="here").steps([torch.ones(2)]):
        pass
    model = nn.Linear(2, 3)
    with pytest.raises(AttachError, match=r"0.bias \[3\] is in the checkpoint and not in the model; .*; and 3 more"):
        spotkeeper.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint_dir="here")


def script(text: str, *argv: str, **env: str) -> Ended:
    Path("train.py").write_text(text)
    return run_script(Path.cwd(), "train.py", *argv, **env)


def test_a_finished_run_with_other_arguments_is_refused() -> None:
    assert script(SCRIPT, "0.1").returncode == 0
    other = script(SCRIPT, "0.5")
    assert other.returncode == 1
    assert "an earlier run in .spotkeeper/ckpt/train did all 4 steps, with other arguments" in other.stderr
    assert "then: train.py 0.1" in other.stderr and "now:  train.py 0.5" in other.stderr
    assert Path("model.pt").read_text() == "0.1"
    assert script(SCRIPT, "0.1").returncode == 0, "what follows the loop may be done again"
    assert script(SCRIPT, "0.5", SPOTKEEPER_AGAIN="1").returncode == 0
    assert Path("model.pt").read_text() == "0.5"


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "1 / 0"])
def test_a_run_without_a_loop_is_warned_about_at_its_end(ending: str) -> None:
    text = SCRIPT[: SCRIPT.index("for batch")].replace("run = ", "") + ending
    done = script(text, "0.1")
    assert ("never looped over run.steps()" in done.stderr) == (ending != "1 / 0")


def test_an_uncreatable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AttachError, match=r"attach\(checkpoint_dir=\): .*/file/x cannot be created or written"):
        lock(tmp_path / "file" / "x")


LARGE = """
import resource, spotkeeper, torch
model = torch.nn.Linear(1000, 1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
run = spotkeeper.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x in run.steps([torch.ones(1000)] * 2, epochs=1):
    pass
"""


def test_a_file_limit_is_not_reported_as_memory(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    done = run_script(tmp_path, "large.py")
    assert done.returncode == 0, done.stderr
    assert "write failed: staging memory:" in done.stderr and "no memory" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "no checkpoint exists in .spotkeeper/ckpt/large; the run ends without this save" in last


def test_a_loop_begins_with_the_speeds_that_an_earlier_one_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would keep the old division: the speeds are known, so nothing looks changed."""
    plans: list[tuple[float, ...]] = []
    real = library.open_feed

    def opened(*args: Any) -> Any:
        plans.append(args[-1].costs)
        return real(*args)

    monkeypatch.setattr(library, "open_feed", opened)
    run = attach(global_batch=2)
    run._speeds = Speeds((0.25,))  # a run of one rank has none
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    for cost in (0.25, 0.5):
        run._speeds.costs = (cost,)
        loop = run.steps(loader, steps=9)
        next(loop)
        loop.close()  # type: ignore[attr-defined]
    assert plans == [(0.25,), (0.5,)]
