"""What a script reports is one curve, whatever machines are lost. Reports neither wait for a device nor fail a run."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotkeeper.contract.metrics import GenerationMetrics, read_metrics
from spotkeeper.report.job.metrics import joined
from spotkeeper.train.agent_link.control import METRICS, Commit, Control
from spotkeeper.train.core import pickling
from spotkeeper.train.loop import metrics
from spotkeeper.train.loop.metrics import MetricHistory
from tests.module_time import replace_time


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    with Control.create(tmp_path / "ctl") as made:
        yield made


def written(folder: Path, gen: int = 3) -> GenerationMetrics:
    return read_metrics((folder / METRICS).read_bytes(), gen)


def values(folder: Path, name: str) -> dict[int, float]:
    points = written(folder).metrics[name]
    return dict(zip(points.steps, points.values, strict=True))


# ------------------------------------------------------------ one generation


def test_values_become_the_curves_that_readers_read(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    began = time.time()
    for step in range(1, 1001):
        history.report(step, {"loss": 1.0 / step, "lr": 0.5} | ({"val/acc": step} if step % 100 == 0 else {}))
    history.write()
    found = written(tmp_path)
    assert (found.gen, found.ancestors, control.metrics_file) == (3, (), 1)
    assert sorted(found.metrics) == ["loss", "lr", "val/acc"]
    assert values(tmp_path, "loss") == {step: 1.0 / step for step in range(1, 1001)}
    assert values(tmp_path, "val/acc") == {step: float(step) for step in range(100, 1001, 100)}
    assert all(began - 1 <= at <= time.time() + 1 for at in found.metrics["loss"].times)
    assert control.loss == 1.0 / 1000
    history.write()
    assert control.metrics_file == 1, "nothing new is not written again"


def test_a_file_is_written_every_few_seconds(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    replace_time(monkeypatch, metrics, monotonic=lambda: now)
    history = MetricHistory(control, tmp_path, 3)
    for step in range(100):
        now += 0.25
        history.report(step, {"loss": 0.0})
        history.poll(now)
    assert control.metrics_file == 2, "25 seconds"
    now += metrics.WRITE_S
    history.poll(now)
    assert control.metrics_file == 3, "the step's end writes too, if the script reports no more"


def test_the_last_report_of_a_step_counts(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    for step, value in ((1, 1.0), (1, 2.0), (2, 3.0), (4, 4.0), (3, 5.0)):
        history.report(step, {"a": value})
    history.write()
    history.report(3, {"a": 6.0})
    history.write()
    assert values(tmp_path, "a") == {1: 2.0, 2: 3.0, 3: 6.0}


def test_what_cannot_be_kept_is_named_once_and_fails_nothing(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = MetricHistory(control, tmp_path, 3)
    for step in range(3):
        history.report(step, {"loss": 1, "a b": 1.0, "": 1.0, "ü": 1.0, "x" * 101: 1.0, "none": None, "text": "3 %"})
        history.report(step, {"vector": torch.ones(2), "huge": 10**400, "meta": torch.ones((), device="meta")})
    history.report(3, {f"m{number:02}": 1.0 for number in range(70)})
    history.write()
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in said] == [" run.report"] * 15, said
    for bad in ("''", "'a b'", "'ü'", f"'{'x' * 101}'"):
        assert sum(f" {bad}: a metric's name has at most 100" in line for line in said) == 1, (bad, said)
    for words in ("text: want a number", "tensor of shape (2,)", "huge: want", "meta: want"):
        assert sum(words in line for line in said) == 1, (words, said)
    for number in range(63, 70):
        assert sum(f" m{number}: a run has at most 64 metrics" in line for line in said) == 1
    kept = written(tmp_path).metrics
    assert values(tmp_path, "loss") == {0: 1.0, 1: 1.0, 2: 1.0}
    assert kept.keys() == {"loss", *(f"m{number:02}" for number in range(63))}, "what is not kept takes no name"


def test_the_log_names_no_more_than_a_hundred_names(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = MetricHistory(control, tmp_path, 3)
    for step in range(300):
        history.report(step, {f"bad {step}": torch.tensor(1.0), "complex": torch.tensor(1j)})
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 101 and "more names cannot be kept" in said[-1]


def test_a_value_that_cannot_be_read_fails_nothing(control: Control, tmp_path: Path) -> None:
    class Odd:
        def __float__(self) -> float:
            raise KeyError("odd")

    history = MetricHistory(control, tmp_path, 3)
    history.report(1, {"odd": Odd(), "complex": 1j, "a": 2})
    history.report(2, {"odd": 3.0})
    history.write()
    assert written(tmp_path).metrics.keys() == {"a", "odd"}, "a later value of the name can be kept"


@pytest.mark.parametrize("value", [3, True, torch.tensor(2), torch.ones(1, 1), torch.tensor(0.5, dtype=torch.bfloat16)])
def test_numbers_and_tensors_of_one_element_are_values(control: Control, tmp_path: Path, value: Any) -> None:
    history = MetricHistory(control, tmp_path, 3)
    history.report(1, {"a": value})
    history.write()
    assert values(tmp_path, "a") == {1: float(value)}


def test_a_tensor_is_read_before_it_changes(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    loss = torch.tensor(1.0, requires_grad=True)
    history.report(1, {"loss": loss})
    with torch.no_grad():
        loss.fill_(9.0)
    history.write()
    assert values(tmp_path, "loss") == {1: 1.0}


def test_a_full_run_folder_does_not_fail_the_job(
    control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = MetricHistory(control, tmp_path / "gone", 3)
    history.report(1, {"loss": 1.0})
    history.write()
    history.report(2, {"loss": 2.0})
    history.write()
    assert "No such file" in capsys.readouterr().err and control.metrics_file == 0
    (tmp_path / "gone").mkdir()
    history.report(3, {"loss": 3.0})
    history.write()
    assert control.metrics_file == 3
    assert values(tmp_path / "gone", "loss") == {1: 1.0, 2: 2.0, 3: 3.0}


def test_without_an_agent_only_the_last_loss_is_kept(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, None, 0)
    history.report(1, {"loss": 1.5, "lr": 0.1})
    history.write()
    assert (control.loss, history.take()) == (1.5, {})
    assert not (tmp_path / METRICS).exists()


# ------------------------------------------------------------ values on a device


class Later:
    """A value that a device has not computed yet."""

    computed = False
    waited = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self._value = tensor.item()

    def ready(self) -> bool:
        return Later.computed

    def value(self) -> float:
        Later.waited += not Later.computed
        return self._value


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(metrics, "DeviceRead", Later)
    monkeypatch.setattr(Later, "computed", False)
    monkeypatch.setattr(Later, "waited", 0)


@pytest.mark.usefixtures("device")
def test_a_report_does_not_wait_for_a_device(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    for step in range(1, 301):
        history.report(step, {"loss": torch.tensor(float(step)), "lr": 0.5})
    history.write()
    assert (Later.waited, control.loss, control.metrics_file) == (0, None, 0)
    Later.computed = True
    history.write()
    assert values(tmp_path, "loss") == {step: float(step) for step in range(1, 301)} and control.loss == 300.0


@pytest.mark.usefixtures("device")
def test_a_checkpoint_and_the_end_wait_for_a_device(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    history.report(1, {"loss": torch.tensor(1.0)})
    assert history.take()["points"]["loss"][2] == [1.0] and Later.waited == 1
    history.report(2, {"loss": torch.tensor(2.0)})
    history.write(wait=True)
    assert values(tmp_path, "loss") == {1: 1.0, 2: 2.0}


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="torch finds no CUDA device here")
def test_a_gpus_values_are_those_of_their_step(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    value = torch.zeros((), device="cuda")
    for step in range(1, 501):
        value += 1.0
        history.report(step, {"loss": value, "half": value.half(), "lr": 0.5})
    history.write(wait=True)
    assert values(tmp_path, "loss") == values(tmp_path, "half") == {step: float(step) for step in range(1, 501)}


# ------------------------------------------------------------ generations


@dataclass
class World:
    """Generations that lose machines, their checkpoints, and a bucket."""

    root: Path
    most: int
    bucket: dict[int, bytes] = field(default_factory=dict)
    checkpoints: list[tuple[Commit, bytes, dict[int, float]]] = field(default_factory=list)
    gen: int = -1
    step: int = 0
    truth: dict[int, float] = field(default_factory=dict)  # what the surviving line of generations reported

    def begin(self, age: int) -> None:
        """Lose the machine. The next generation resumes from a checkpoint, not always from the newest one."""
        self.gen += 1
        folder = self.root / f"{self.gen}"
        folder.mkdir()
        self.control = Control.private()
        self.history = MetricHistory(self.control, folder, self.gen)
        self.folder, self.step, self.truth = folder, 0, {}
        if self.checkpoints:
            commit, state, truth = self.checkpoints[-1 - min(age, len(self.checkpoints) - 1)]
            self.history.restore(pickling.loads(state, "a checkpoint"), commit)
            self.step, self.truth = commit.step, dict(truth)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            value = self.gen + self.step / 1e6
            self.truth[self.step] = value
            self.history.report(self.step, {"loss": value, "x": -value})

    def save(self) -> None:
        state = pickling.dumps(self.history.take())
        self.checkpoints.append((Commit(self.gen, self.step), state, dict(self.truth)))

    def upload(self, answered: bool) -> None:
        """The agent reads the number, then the file; it may be lost before it answers."""
        if number := self.control.metrics_file:
            self.bucket[self.gen] = (self.folder / METRICS).read_bytes()
            if answered:
                self.control.metrics_stored = number

    def curve(self) -> dict[int, float]:
        self.history.write()
        self.upload(True)
        found = joined(read_metrics(data, gen) for gen, data in self.bucket.items())
        if not self.truth:
            return {}
        assert found["x"].values == [-value for value in found["loss"].values]
        return dict(zip(found["loss"].steps, found["loss"].values, strict=True))


OPERATIONS = {
    "train": st.integers(1, 40),
    "write": st.just(0),
    "upload": st.integers(0, 1),
    "save": st.just(0),
    "lose": st.sampled_from([0, 0, 0, 1, 3]),
}


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Several generations. In each, any of the operations above may be left out, or come more than once."""
    story = []
    for _ in range(draw(st.integers(1, 6))):
        for what in (*OPERATIONS, *draw(st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=4))):
            if draw(st.integers(0, 3)):
                story.append((what, draw(OPERATIONS[what])))
    return story


def told(story: list[tuple[str, int]], most: int) -> tuple[dict[int, float], World]:
    with tempfile.TemporaryDirectory() as root:
        world = World(Path(root), most)
        world.begin(0)
        for what, number in story:
            match what:
                case "train":
                    world.train(number)
                case "write":
                    world.history.write()
                case "save":
                    world.save()
                case "upload":
                    world.upload(bool(number))
                case _:
                    world.begin(number)
        return world.curve(), world


@settings(deadline=None, max_examples=150)
@given(stories())
def test_lost_machines_leave_one_curve_without_a_hole_and_no_step_twice(story: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "CARRIED", 4000)
        curve, world = told(story, 4000)
    assert curve == world.truth
    assert len(world.history._unstored) <= metrics._UNSTORED


@settings(deadline=None, max_examples=50)
@given(stories())
def test_what_checkpoints_carry_is_bounded_and_true(story: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "CARRIED", 16)
        curve, world = told(story, 16)
        for _, state, _ in world.checkpoints:
            points = pickling.loads(state, "a checkpoint")["points"]
            assert all(len(columns[0]) <= 16 for columns in points.values())
    assert curve.items() <= world.truth.items(), "no point of a line that was lost"
    if world.truth:
        assert max(curve) == max(world.truth) and curve[max(curve)] == world.truth[max(curve)]
        assert min(curve.values()) == min(world.truth.values()), "extremes survive"


def test_a_checkpoint_carries_only_what_is_not_stored(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    for step in range(1, 11):
        history.report(step, {"loss": float(step)})
    history.write()
    history.report(11, {"loss": 11.0})
    assert history.take()["points"]["loss"][0] == list(range(1, 12))
    control.metrics_stored = control.metrics_file
    assert history.take()["points"]["loss"][0] == [11]
    history.report(11, {"val": 1.0})
    assert history.take()["points"]["val"][0] == [11], "reported after the file of the same step"


def test_the_next_generation_of_a_job_takes_no_more_names(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    history.report(1, {f"m{number}": 0.0 for number in range(metrics.NAMES)})
    history.write()
    control.metrics_stored = control.metrics_file
    state = pickling.loads(pickling.dumps(history.take()), "a checkpoint")
    assert state["points"] == {}
    history = MetricHistory(control, tmp_path, 4)
    history.restore(state, Commit(3, 1))
    history.report(2, {"one-more": 0.0, "m1": 1.0})
    history.write()
    assert list(written(tmp_path, 4).metrics) == ["m1"]


def test_a_checkpoint_of_an_older_library_is_restored(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    history.restore({}, Commit(2, 7))
    history.write()
    assert (written(tmp_path).ancestors, written(tmp_path).metrics) == (((2, 7),), {})


def test_points_after_the_checkpoints_step_are_not_restored(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    state = {"ancestors": [(0, 5)], "points": {"loss": ([6, 7, 8], [1.0] * 3, [0.0] * 3), "x": ([8], [1.0], [0.0])}}
    history.restore(state, Commit(2, 7))
    history.write()
    assert values(tmp_path, "loss") == {6: 0.0, 7: 0.0}
    assert (written(tmp_path).ancestors, sorted(written(tmp_path).metrics)) == (((0, 5), (2, 7)), ["loss"])


def test_times_of_a_clock_that_began_at_zero_are_read(
    control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = 1795469516.580958  # as float32, the offset to the time 1.0 leads to before 0
    replace_time(monkeypatch, metrics, time=lambda: began)
    history = MetricHistory(control, tmp_path, 3)
    history.restore({"ancestors": [], "points": {"loss": ([6], [1.0], [0.0])}}, Commit(2, 7))
    history.write()
    assert list(written(tmp_path).metrics["loss"].times) == [0.0]


def test_the_last_points_are_written_when_the_process_ends(control: Control, tmp_path: Path) -> None:
    history = MetricHistory(control, tmp_path, 3)
    history.report(1, {"loss": math.inf})
    history._at_exit(os.getpid() + 1)
    assert not (tmp_path / METRICS).exists(), "a forked worker writes nothing"
    history._at_exit(os.getpid())
    assert values(tmp_path, "loss") == {1: math.inf}
    assert json.loads((tmp_path / METRICS).read_bytes())["gen"] == 3
