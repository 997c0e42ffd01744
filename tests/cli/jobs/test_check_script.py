"""``check-script`` on scripts that forget something: real processes, stopped and resumed twice."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotkeeper.cli.jobs import check_script
from spotkeeper.cli.jobs.check_script import Interpreter, interpreter
from tests.cli.conftest import Cli
from tests.no_dynamo import NO_DYNAMO

SCRIPT = """
import os, sys
import numpy as np
import spotkeeper, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        {read}
        return torch.full((4,), index / 64)

def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed({seed})
    model = nn.Linear(4, 1)
    if world > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=float(sys.argv[1]))
    noise = np.random.default_rng(1)
    counts = {{"seen": 0}}
    seen = 0
    {before}
    run = spotkeeper.attach(model, optimizer{parts})
    for x in run.steps({loader}, epochs=3):
        loss = (model(x) * {factor}).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        {after}

main()
"""
CLEAN = {
    "seed": "0",
    "before": "pass",
    "read": "pass",
    "parts": "",
    "factor": "1.0",
    "after": "pass",
    "loader": "DataLoader(Data(), 4, shuffle=True)",
}


Check = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture(scope="module")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Interpreter, Interpreter]]:
    """Both interpreters of a check: one pair for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"OMP_NUM_THREADS": "1", **NO_DYNAMO}.items():
            patch.setenv(name, value)
        folder = tmp_path_factory.mktemp("interpreters")
        with interpreter(sys.executable, folder / "one") as one, interpreter(sys.executable, folder / "two") as other:
            yield one, other


@pytest.fixture
def check(
    cli: Cli, interpreters: tuple[Interpreter, Interpreter], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Check:
    pair = itertools.cycle(interpreters)
    monkeypatch.setattr(check_script, "interpreter", lambda *_: contextlib.nullcontext(next(pair)))
    monkeypatch.chdir(tmp_path)

    def checked(*options: str, **parts: str) -> tuple[int, dict[str, Any], str]:
        Path("train.py").write_text(SCRIPT.format(**CLEAN | parts))
        done = cli("check-script", "--json", "--steps", 6, *options, "train.py", "--", "0.01")
        assert done.out, done.err
        return done.code, json.loads(done.out), done.err

    return checked


def named(found: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["kind"] for each in found["not_restored"]}


def test_a_resumable_script_passes_and_leaves_no_files(check: Check) -> None:
    code, found, _ = check(
        "--ignore",
        "main().seen",
        parts=", noise=noise, counts=counts",
        factor="noise.normal()",
        after='counts["seen"] += len(x); seen += 1',
    )
    assert (code, found["bits"], found["not_restored"]) == (0, [], [])
    assert (found["steps"], found["stops"], found["repeats"]) == (6, [2, 4], True)
    assert sorted(path.name for path in Path().iterdir()) == ["train.py"]


def test_unrestored_counters_generators_tensors_and_data_sets_are_named(check: Check) -> None:
    before = "other = Data(); mean = torch.zeros(1)"
    after = "seen += len(x); counts['seen'] += 1; other[0]; last = loss.detach(); mean += last"
    code, found, err = check(before=before, read="self.reads += 1", factor="noise.normal()", after=after)
    assert (code, found["repeats"], found["same_bits"]) == (1, True, False)
    of = named(found)
    assert of["main().noise"] == "generator"
    assert of["main().seen"] == "count"
    assert of["main().counts"] == "values"
    assert of["the data set.reads"] == of["main().other.reads"] == "data set"
    assert of["main().mean"] == "tensor" and "main().last" not in of, "a step's own differ because the bits do"
    (seen,) = (each for each in found["not_restored"] if each["name"] == "main().seen")
    assert (seen["alone"], seen["resumed"]) == ("24", "8")
    kinds = [each["kind"] for each in found["bits"]]
    assert "batches" not in kinds and "losses" in kinds and "state" in kinds
    assert [each["name"] for each in found["bits"] if each["kind"] == "losses"] == ["step 3"]
    assert "does not resume bit for bit" in err


STREAM = """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return map(torch.full, [(4,)] * 64, map(float, range(64)))"""


def test_an_iterable_data_set_needs_no_seed_for_generators_that_it_does_not_use(check: Check) -> None:
    code, found, err = check(before=STREAM, loader="DataLoader(Stream(), 4)", factor="1e-3")
    assert (code, found["repeats"], found["same_bits"]) == (0, True, True), err


def test_several_processes_stop_at_the_same_steps_in_every_run(check: Check) -> None:
    never = "from spotkeeper.train.loop import lag; assert lag._FIRST > 1e9, 'work could be divided anew'"
    code, found, _ = check("--nproc", "2", parts=", noise=noise", factor="noise.normal()", before=never)
    assert (code, found["bits"], found["not_restored"]) == (0, [], [])
    assert (found["steps"], found["stops"]) == (7, [2, 4]), "ranks agree on a stop one step later"


def test_a_failing_scripts_error_is_shown(check: Check) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        check(factor="(1 / 0)")


SCHEDULERS = "from torch.optim.lr_scheduler import SequentialLR, StepLR; "


def test_a_scheduler_that_is_not_attached_is_named(check: Check) -> None:
    before = SCHEDULERS + "sched = StepLR(optimizer, 1000); ema = [torch.optim.swa_utils.AveragedModel(model)]"
    code, found, err = check(before=before, after="sched.step(); ema[0].update_parameters(model)")
    assert (code, found["same_bits"]) == (1, True)
    assert "resumes equal here, but does not restore all values" in err, "it says above: bitwise equal"
    assert named(found) == {"main().sched": "scheduler", "main().ema[0]": "stateful"}
    texts = {each["name"]: (each["alone"], each["resumed"], each["text"]) for each in found["not_restored"]}
    assert texts["main().sched"] == ("last_epoch 6", "2", "attach(scheduler=sched)")
    assert texts["main().ema[0]"][2] == "attach(ema_0=ema[0])"


def test_schedulers_inside_an_attached_scheduler_are_not_named(check: Check) -> None:
    before = SCHEDULERS + "one = StepLR(optimizer, 3); both = SequentialLR(optimizer, [one, StepLR(optimizer, 2)], [4])"
    code, found, err = check(before=before, parts=", scheduler=both", after="both.step()")
    assert (code, found["not_restored"]) == (0, []), err


def test_the_advice_for_an_attribute_can_be_pasted(check: Check) -> None:
    before = (
        "self = type('Trainer', (), dict(__module__='__main__'))(); self.best = 0.0; self.tries = []; self.rng = noise"
    )
    before += "; del noise"
    code, found, _ = check(before=before, after="self.best -= 1; self.tries.append(1); self.rng.normal()")
    texts = {each["name"]: each["text"] for each in found["not_restored"]}
    whole = "attach(trainer=self), and give Trainer the methods state_dict() and load_state_dict()"
    assert code == 1 and texts == {
        "main().self.rng": "a generator: attach(rng=self.rng)",
        "main().self.best": whole,
        "main().self.tries": whole,
    }


TRAINER = """
    class Trainer:
        def __init__(self):
            self.best, self.history = 1e9, []

        def state_dict(self):
            return {{"best": self.best, "history": list(self.history)}}

        def load_state_dict(self, state):
            self.best, self.history = state["best"], state["history"]

    trainer = Trainer()"""
TRAINS = "trainer.best = min(trainer.best, loss.item()); trainer.history.append(trainer.best)"


def test_a_scripts_own_object_can_be_attached(check: Check) -> None:
    factor = "(1 + len(trainer.history))"
    code, found, err = check(before=TRAINER.format(), parts=", trainer=trainer", factor=factor, after=TRAINS)
    assert (code, found["bits"], found["not_restored"]) == (0, [], []), err


def test_attributes_missing_from_a_state_dict_are_named(check: Check) -> None:
    before = TRAINER.format().replace(', "history": list(self.history)', "").replace(', state["history"]', ", []")
    code, found, _ = check(before=before, parts=", trainer=trainer", after=TRAINS)
    texts = {each["name"]: each["text"] for each in found["not_restored"]}
    assert code == 1 and texts == {
        "trainer.history": "add trainer.history to the attached object's state_dict() and load_state_dict()"
    }


def test_objects_made_anew_in_each_step_are_reported(check: Check) -> None:
    before = "Meter = type('Meter', (), dict(__module__='__main__')); kept = [0]"
    after = "kept[0] += 1; meter = Meter(); meter.value = kept[0]; row = [kept[0]]"
    code, found, _ = check(before=before, after=after)
    texts = {each["name"]: each["text"] for each in found["not_restored"]}
    assert code == 1 and texts.keys() == {"main().kept", "main().meter.value", "main().row"}
    assert texts["main().kept"] == "attach(kept=kept), if kept contains only numbers"
    for name in ("main().meter", "main().row"):
        (text,) = {text for each, text in texts.items() if each.startswith(name)}
        assert text.startswith(f"{name} is a new object after every step") and "=" not in text


def test_a_script_without_seeds_is_nondeterministic(check: Check) -> None:
    code, found, err = check(seed="torch.initial_seed()")
    assert (code, found["repeats"]) == (1, False)
    assert "is not deterministic" in err and "torch.manual_seed(0)" in err


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (("train.py", "--python", "/nope"), "error: --python /nope: no such file"),
        ((".",), "error: . is a folder: name a script in it"),
    ],
)
def test_a_script_that_cannot_run_is_an_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("pass")
    done = cli("check-script", *argv)
    assert done.code == 2 and error in done.err


def test_a_script_that_does_not_stop_is_killed_and_named(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_script, "LONGEST_S", 0.5)
    with pytest.raises(AssertionError, match=r"the script did not stop within 0 s:\n.*waits"):
        check(before="import signal; print('it waits', flush=True); signal.pause()")


def test_an_interpreter_without_torch_is_an_error(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("pass")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || { echo "No module named \'torch\'" >&2; exit 1; }\n')
    python.chmod(0o755)
    done = cli("check-script", "train.py", "--python", python)
    assert done.code == 1 and "the script failed (exit code 1):" in done.err and "No module named 'torch'" in done.err


@pytest.mark.parametrize(
    ("nproc", "launcher"), [(1, []), (3, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"])]
)
def test_a_process_that_must_not_fork_starts_a_new_interpreter(
    nproc: int, launcher: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = pytest.importorskip("spotkeeper.train.probe")
    calls: list[tuple[list[str], dict[str, Any]]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **how: calls.append((argv, how)) or SimpleNamespace(pid=7))
    call = {"argv": ["out", "train.py"], "environment": {"ONE": "1"}, "log": str(tmp_path / "log"), "nproc": nproc}
    assert probe._spawn(call) == 7
    ((argv, how),) = calls
    assert argv == [sys.executable, *launcher, "-m", "spotkeeper.train.probe", "out", "train.py"]
    assert how["env"]["ONE"] == "1" and how["start_new_session"]
