"""``check-script`` on scripts that forget something: real processes, stopped and resumed twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def check(folder: Path, *options: str, **parts: str) -> tuple[int, dict[str, Any], str]:
    (folder / "train.py").write_text(SCRIPT.format(**CLEAN | parts))
    argv = [sys.executable, "-m", "spotkeeper.cli.main", "check-script", "--json", "--steps", "6", *options]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    argv += ["train.py", "--", "0.01"]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found, done.stderr


def named(found: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["kind"] for each in found["not_restored"]}


def test_a_script_that_resumes_as_it_was_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code, found, _ = check(
        tmp_path,
        "--ignore",
        "main().seen",
        parts=", noise=noise, counts=counts",
        factor="noise.normal()",
        after='counts["seen"] += len(x); seen += 1',
    )
    assert (code, found["bits"], found["not_restored"]) == (0, [], [])
    assert (found["steps"], found["stops"], found["repeats"]) == (6, [2, 4], True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_a_counter_a_generator_a_tensor_and_a_data_set_are_named(tmp_path: Path) -> None:
    before = "other = Data(); mean = torch.zeros(1)"
    after = "seen += len(x); counts['seen'] += 1; other[0]; last = loss.detach(); mean += last"
    code, found, err = check(tmp_path, before=before, read="self.reads += 1", factor="noise.normal()", after=after)
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


def test_an_iterable_data_set_needs_no_seed_for_generators_that_it_does_not_use(tmp_path: Path) -> None:
    code, found, err = check(tmp_path, before=STREAM, loader="DataLoader(Stream(), 4)", factor="1e-3")
    assert (code, found["repeats"], found["same_bits"]) == (0, True, True), err


def test_several_processes_stop_at_the_same_steps_in_every_run(tmp_path: Path) -> None:
    code, found, _ = check(tmp_path, "--nproc", "2", parts=", noise=noise", factor="noise.normal()")
    assert (code, found["bits"], found["not_restored"]) == (0, [], [])
    assert (found["steps"], found["stops"]) == (7, [2, 4]), "ranks agree on a stop one step later"


def test_a_script_that_never_repeats_itself_is_told_apart(tmp_path: Path) -> None:
    code, found, err = check(tmp_path, factor="float(os.getpid())")
    assert (code, found["repeats"]) == (1, False)
    assert "is not deterministic" in err


def test_a_script_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        check(tmp_path, factor="(1 / 0)")


SCHEDULERS = "from torch.optim.lr_scheduler import SequentialLR, StepLR; "


def test_a_scheduler_that_is_not_attached_is_named(tmp_path: Path) -> None:
    before = SCHEDULERS + "sched = StepLR(optimizer, 1000); ema = [torch.optim.swa_utils.AveragedModel(model)]"
    code, found, _ = check(tmp_path, before=before, after="sched.step(); ema[0].update_parameters(model)")
    assert (code, found["same_bits"]) == (1, True)
    assert named(found) == {"main().sched": "scheduler", "main().ema[0]": "stateful"}
    texts = {each["name"]: (each["alone"], each["resumed"], each["text"]) for each in found["not_restored"]}
    assert texts["main().sched"] == ("last_epoch 6", "2", "attach(scheduler=sched)")
    assert texts["main().ema[0]"][2] == "attach(ema_0=ema[0])"


def test_schedulers_of_an_attached_one_are_not(tmp_path: Path) -> None:
    before = SCHEDULERS + "one = StepLR(optimizer, 3); both = SequentialLR(optimizer, [one, StepLR(optimizer, 2)], [4])"
    code, found, err = check(tmp_path, before=before, parts=", scheduler=both", after="both.step()")
    assert (code, found["not_restored"]) == (0, []), err


def test_what_is_written_of_an_objects_attributes_can_be_pasted(tmp_path: Path) -> None:
    before = (
        "self = type('Trainer', (), dict(__module__='__main__'))(); self.best = 0.0; self.tries = []; self.rng = noise"
    )
    before += "; del noise"
    code, found, _ = check(tmp_path, before=before, after="self.best -= 1; self.tries.append(1); self.rng.normal()")
    texts = {each["name"]: each["text"] for each in found["not_restored"]}
    whole = "attach(trainer=self): give Trainer state_dict() and load_state_dict()"
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


def test_an_object_of_the_scripts_own_is_a_part(tmp_path: Path) -> None:
    factor = "(1 + len(trainer.history))"
    code, found, err = check(tmp_path, before=TRAINER.format(), parts=", trainer=trainer", factor=factor, after=TRAINS)
    assert (code, found["bits"], found["not_restored"]) == (0, [], []), err


def test_what_its_state_leaves_out_is_named(tmp_path: Path) -> None:
    before = TRAINER.format().replace(', "history": list(self.history)', "").replace(', state["history"]', ", []")
    code, found, _ = check(tmp_path, before=before, parts=", trainer=trainer", after=TRAINS)
    texts = {each["name"]: each["text"] for each in found["not_restored"]}
    assert code == 1 and texts == {"trainer.history": "its state_dict() does not include this"}


def test_what_is_made_anew_in_each_step_is_no_part_to_attach(tmp_path: Path) -> None:
    before = "Meter = type('Meter', (), dict(__module__='__main__')); kept = [0]"
    after = "kept[0] += 1; meter = Meter(); meter.value = kept[0]; row = [kept[0]]"
    code, found, _ = check(tmp_path, before=before, after=after)
    texts = {each["name"]: each["text"] for each in found["not_restored"]}
    assert code == 1 and texts.keys() == {"main().kept", "main().meter.value", "main().row"}
    assert texts["main().kept"] == "attach(kept=kept), if it contains only numbers"
    for name in ("main().meter", "main().row"):
        (text,) = {text for each, text in texts.items() if each.startswith(name)}
        assert text.startswith(f"{name} is a new object after every step") and "=" not in text


def test_a_script_that_seeds_nothing_does_not_repeat_itself(tmp_path: Path) -> None:
    code, found, err = check(tmp_path, seed="torch.initial_seed()")
    assert (code, found["repeats"]) == (1, False) and "torch.manual_seed(0)" in err


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (("train.py", "--python", "/nope"), "error: --python /nope: no such file"),
        ((".",), "error: . is a folder: name a script in it"),
    ],
)
def test_what_cannot_be_run_is_told(tmp_path: Path, argv: tuple[str, ...], error: str) -> None:
    (tmp_path / "train.py").write_text("pass")
    command = [sys.executable, "-m", "spotkeeper.cli.main", "check-script", *argv]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and error in done.stderr and "Traceback" not in done.stderr
