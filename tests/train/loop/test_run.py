"""The two lines on a laptop, and what a run does between two batches. One process, no agent but a control file."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spotkeeper
from spotkeeper.contract.metrics import read_metrics
from spotkeeper.report.job.metrics import joined
from spotkeeper.train.agent_link.control import (
    METRICS,
    NAME,
    AgentRequest,
    Commit,
    Control,
    Fault,
    RunPhase,
    RunResult,
    read_result,
)
from spotkeeper.train.checkpoint import client, protocol, store, strategy
from spotkeeper.train.core.errors import CallError
from spotkeeper.train.core.settings import RunSettings, make_output
from spotkeeper.train.loop import reporter
from spotkeeper.train.loop.run import Run
from tests.train.forks import run_script
from tests.train.savers import start_saver


class Things:
    """What a script makes before it attaches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        self.loader = DataLoader(data, 8, shuffle=True)

    def attach(self, **more: Any) -> Run:
        return spotkeeper.attach(self.model, self.optimizer, self.scheduler, ema=self.ema, **more)

    def train(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.optimizer.zero_grad()
        return loss

    def state(self) -> list[Any]:
        parts = [
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.scheduler.state_dict(),
            self.ema.state_dict(),
        ]
        return _plain([parts, torch.get_rng_state()])


def _plain(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.tolist()
    if isinstance(part, dict):
        return {key: _plain(value) for key, value in part.items()}
    return [_plain(each) for each in part] if isinstance(part, (list, tuple)) else part


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, no agent; signal handlers as they were."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SPOTKEEPER_")]:
        monkeypatch.delenv(name)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def alone(epochs: int) -> list[Any]:
    things = Things()
    for batch in things.attach(checkpoint_dir="alone").steps(things.loader, epochs=epochs):
        things.train(batch)
    return things.state()


def generation(check: Callable[[Run, Things], object], epochs: int = 2, **more: Any) -> tuple[Things, Run]:
    """One life of the script; ``check`` is called after each step."""
    things = Things()
    run = things.attach(**more)
    for batch in run.steps(things.loader, epochs=epochs):
        run.report(loss=things.train(batch))
        check(run, things)
    return things, run


def at(step: int, do: Callable[[], object]) -> Callable[[Run, Things], object]:
    return lambda run, _: do() if run.steps_done == step else None


# ------------------------------------------------------------------- on a laptop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [1, 8, 15])
def test_a_signal_saves_and_stops_and_the_next_start_resumes(number: int, step: int) -> None:
    expected = alone(2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as stop:
        generation(at(step, lambda: os.kill(os.getpid(), number)), checkpoint_dir="here")
    assert stop.value.code == 0
    assert store.newest("here").commit == Commit(0, step)
    torch.manual_seed(77)
    things, run = generation(lambda *_: None, checkpoint_dir="here")
    assert (run.steps_done, run.generation) == (16, 1)
    assert things.state() == expected
    assert store.newest("here").commit == Commit(1, 16)


def test_a_finished_run_trains_no_more_but_the_code_after_the_loop_runs_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, _ = generation(lambda *_: None)
    assert "nothing left to do" not in capsys.readouterr().err
    steps: list[int] = []
    again, run = generation(lambda run, _: steps.append(run.steps_done))
    assert steps == [] and run.steps_done == 16
    assert again.state() == first.state()
    told = "nothing left to do: an earlier run did all 16 steps. To start over, remove .spotkeeper/ckpt/"
    assert capsys.readouterr().err.count(told) == 1
    assert [path.name for path in Path(".spotkeeper/ckpt").iterdir()] == [Path(sys.argv[0]).stem]


def test_under_the_agent_too_a_loop_with_nothing_left_says_so(
    tmp_path: Path, agent: Control, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generation(lambda run, step: run.save() if step == 16 else None)
    assert "nothing left to do" not in capsys.readouterr().err, "though its last step was saved already"
    monkeypatch.setenv("SPOTKEEPER_GEN", "9")
    generation(lambda *_: None)
    assert capsys.readouterr().err.count("nothing left to do: all 16 steps are done; this run executes only what") == 1


AFTER = """
import spotkeeper, torch
model = torch.nn.Linear(2, 1)
run = spotkeeper.attach(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
for batch in run.steps(torch.utils.data.DataLoader(torch.ones(8, 2), 4)):
    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
    if {inside}:
        raise RuntimeError("in the loop")
print(1 / {divisor}, float(loss))
"""


@pytest.mark.parametrize(
    ("before", "inside", "divisor", "said"),
    [
        (False, 0, 0, "the loop ended after step 2, and the code after it failed. A restart repeats only that"),
        (True, 0, 1, "failed. The loop yielded nothing here, because its steps were done before. A restart repeats"),
        (False, 1, 1, ""),
    ],
)
def test_a_failure_after_the_loop_is_reported_as_such(before: bool, inside: int, divisor: int, said: str) -> None:
    """A variable of the loop's is not there where a restart had nothing left to do: a NameError, and retries gone."""
    script = Path("train.py")
    if before:
        script.write_text(AFTER.format(inside=0, divisor=1))
        assert run_script(Path.cwd(), "train.py").returncode == 0
    script.write_text(AFTER.format(inside=inside, divisor=divisor))
    done = run_script(Path.cwd(), "train.py")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert (said in lines[-1]) if said else lines[-1] == "RuntimeError: in the loop"
    assert ("After the loop" in lines[-1]) == bool(said)
    assert before == ("NameError" in done.stderr)


def test_a_later_run_may_request_more_epochs() -> None:
    expected = alone(3)
    generation(lambda *_: None, epochs=1, checkpoint_dir="here")
    things, _ = generation(lambda *_: None, epochs=3, checkpoint_dir="here")
    assert things.state() == expected


def test_two_loops_after_each_other() -> None:
    def both(stop: int | None, folder: str) -> tuple[list[Any], list[str]]:
        things, seen = Things(), []
        run = things.attach(checkpoint_dir=folder)
        for name in ("first", "second"):
            for batch in run.steps(things.loader, epochs=1):
                things.train(batch)
                seen.append(name)
                if run.steps_done == stop:
                    run._control.request(AgentRequest.SAVE_STOP)
        return things.state(), seen

    expected, _ = both(None, "alone")
    with pytest.raises(SystemExit):
        both(11, "here")
    state, seen = both(None, "here")
    assert state == expected
    assert seen == ["second"] * 5


# ------------------------------------------------------------------- loops in epochs


def rounds(folder: str, stop: Callable[[Run, str], object], count: int = 4, *, plain: bool = False) -> list[Any]:
    """A script with a scheduler's step and a validation after each epoch's loop, and two loops in each."""
    things, done = Things(), []
    run = things.attach(checkpoint_dir=folder, best=(best := {"patience": 0}))
    scheduler = torch.optim.lr_scheduler.StepLR(things.optimizer, 1, 0.5)
    for epoch in range(count) if plain else run.epochs(count):
        for name in ("first", "second"):
            for batch in run.steps(things.loader):
                things.train(batch)
                assert plain or run.epoch == epoch
                stop(run, f"{epoch} {name} step")
            done.append(f"{epoch} {name}")
        stop(run, f"{epoch} between")
        scheduler.step()
        best["patience"] += 1
        done.append(f"{epoch} {things.optimizer.param_groups[0]['lr']:.3g} {best} {run.steps_done}")
    for batch in run.steps(things.loader):
        things.train(batch)
        stop(run, "last")
    return [things.state(), best, run.steps_done, done]


class Killed(BaseException):
    """As a machine that is gone: nothing is saved."""


def stopping(where: str, at: int = 0, *, kill: bool = False) -> Callable[[Run, str], object]:
    def check(run: Run, place: str) -> None:
        if place == where and (not at or run.steps_done == at):
            if kill:
                run.wait()
                run._boundary.writer.close()
                raise Killed
            run._control.request(AgentRequest.SAVE_STOP)

    return check


@pytest.mark.parametrize(
    ("stops", "told"),
    [
        ([stopping("0 first step", 3), stopping("2 first step", 35)], 0),
        ([stopping("1 first step"), stopping("1 between", kill=True), stopping("last", 67)], 1),
        ([stopping("0 between", kill=True), stopping("3 between", kill=True)], 2),
        ([stopping("2 between")], 0),
        ([stopping("2 second step", 45)], 1),
    ],
)
def test_finished_epochs_are_not_repeated(
    stops: list[Callable[[Run, str], object]], told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    *expected, every = rounds("alone", lambda *_: None)
    for stop in stops:
        with pytest.raises((SystemExit, Killed)):
            rounds("here", stop)
    *found, done = rounds("here", lambda *_: None)
    assert found == expected
    assert done == every[len(every) - len(done) :]
    assert capsys.readouterr().err.count("a loop over run.steps() had ended before the save") == told


def test_an_optimizer_that_never_steps_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a class around an optimizer, whose step() only the inner one has."""
    monkeypatch.setattr(reporter, "UNSTEPPED", 5)
    things = Things()
    for at, _ in enumerate(things.attach().steps(things.loader, epochs=2)):  # 8 batches an epoch
        if at in (3, 7):
            things.optimizer.step()  # after four batches, and again
    told = (
        "no optimizer step in 5 batches, so nothing is saved: pass attach(optimizer=...) the optimizer whose own step()"
    )
    assert capsys.readouterr().err.count(told) == 1


def test_repeated_code_between_loops_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    *expected, _ = rounds("alone", lambda *_: None, plain=True)
    with pytest.raises(SystemExit):
        rounds("here", stopping("2 first step", 35), plain=True)
    *found, _ = rounds("here", lambda *_: None, plain=True)
    assert found != expected, "then there is nothing to tell"
    assert capsys.readouterr().err.count("put the loops into run.epochs(n), which skips that code") == 1


def test_a_later_run_of_epochs_may_request_more_or_just_ends() -> None:
    def some(folder: str, count: int) -> tuple[list[int], Any]:
        things, seen = Things(), []
        run = things.attach(checkpoint_dir=folder)
        for epoch in run.epochs(count):
            seen += [epoch for batch in run.steps(things.loader) if things.train(batch) is not None]
        return sorted(set(seen)), things.state()

    every, expected = some("alone", 3)
    assert every == [0, 1, 2]
    assert some("here", 1)[0] == [0]
    assert some("here", 3) == ([1, 2], expected)
    assert some("here", 3) == ([], expected)
    assert some("here", 1) == ([], expected)


def test_epochs_left_by_break_are_over() -> None:
    def early(folder: str, stop: int) -> Any:
        things, seen = Things(), []
        run = things.attach(checkpoint_dir=folder)
        for epoch in run.epochs(9):
            for batch in run.steps(things.loader):
                things.train(batch)
                seen.append(epoch)
            if epoch == 1:
                break
        for batch in run.steps(things.loader, epochs=2):
            things.train(batch)
            seen.append(run.epoch + 100)
            if run.steps_done == stop:
                run._control.request(AgentRequest.SAVE_STOP)
        return things.state(), seen

    expected, every = early("alone", 0)
    with pytest.raises(SystemExit):
        early("here", 20)
    state, seen = early("here", 0)
    assert state == expected
    assert seen == every[20:]


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    things = Things()
    run = things.attach(checkpoint_dir=tmp_path / "here")  # the folder is locked as long as the run lives
    code = (
        "import sys, torch, spotkeeper; m = torch.nn.Linear(1, 1); "
        "spotkeeper.attach(m, torch.optim.SGD(m.parameters()), checkpoint_dir=sys.argv[1])"
    )
    (tmp_path / "train.py").write_text(code)
    done = run_script(tmp_path, "train.py", str(tmp_path / "here"))
    assert done.returncode == 1
    assert "another run saves into" in done.stderr
    del run


def test_an_accumulating_batch_is_no_boundary() -> None:
    things = Things()
    run = things.attach()
    with pytest.raises(SystemExit):
        for number, (x, y) in enumerate(run.steps(things.loader, epochs=2), start=1):
            (nn.functional.mse_loss(things.model(x), y) / 3).backward()
            if number == 4:
                run._control.request(AgentRequest.SAVE_STOP)
            if number % 3 == 0:
                things.optimizer.step()
                things.optimizer.zero_grad()
    assert number == 6 and run.steps_done == 2
    assert store.newest(run._settings.folder or "").commit == Commit(0, 2)


def test_an_explicit_save() -> None:
    saved: list[Any] = []
    things = Things()
    run = things.attach(checkpoint_dir="there")
    for batch in run.steps(things.loader, steps=5):
        things.train(batch)
        if run.steps_done == 3:
            saved.append(run.save())
    assert saved == [Commit(0, 3)]
    assert run.steps_done == 5


@pytest.mark.parametrize("step", [5, 8])  # in the middle of an epoch, and at its end
def test_an_explicit_save_includes_the_current_step(step: int) -> None:
    """Else the next start trains on it twice."""
    expected = alone(2)
    things = Things()
    run = things.attach(checkpoint_dir="here")
    for batch in run.steps(things.loader, epochs=2):
        things.train(batch)
        if run.steps_done == step:
            run.save()
            break
    run._boundary.writer.close()
    again, _ = generation(lambda *_: None, checkpoint_dir="here")
    assert again.state() == expected


# ------------------------------------------------------------------- under an agent


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Control]:
    """Run folder, control file and saver, as an agent makes them."""
    (tmp_path / "run").mkdir()
    process = start_saver(tmp_path / "saver")
    paths = {name: str(tmp_path / name.lower()) for name in ("RUN", "CKPT", "SAVER")}
    for name, value in {**paths, "GEN": "5", "SLOT": "2"}.items():
        monkeypatch.setenv(f"SPOTKEEPER_{name}", value)
    yield Control.create(tmp_path / "run" / NAME)
    process.kill()
    process.wait()


def test_a_stop_by_the_agent(agent: Control, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        generation(at(6, lambda: agent.request(AgentRequest.SAVE_STOP, time.time() + 30)))
    assert read_result(tmp_path / "run") == RunResult("stopped", 5, 6, Commit(5, 6))
    assert (agent.state, agent.step, agent.commit, agent.fault) == (RunPhase.STOPPED, 6, Commit(5, 6), Fault.NONE)
    assert agent.pid == os.getpid() and agent.total_steps == 16
    assert agent.loss is not None and agent.samples_per_s > 0 and agent.first_step_at <= agent.step_at
    manifest = store.read(tmp_path / "ckpt", Commit(5, 6))
    assert (manifest.gang[0].slot, manifest.world) == (2, 1)
    assert manifest.versions["torch"] == str(torch.__version__)


@pytest.mark.parametrize(("every", "total"), [(1, 16), (4, 4), (3, 5)])
def test_total_steps_account_for_gradient_accumulation(agent: Control, every: int, total: int) -> None:
    things = Things()
    told = []
    for number, (x, y) in enumerate(things.attach().steps(things.loader, epochs=2), start=1):
        nn.functional.mse_loss(things.model(x), y).backward()
        if number % every == 0:
            things.optimizer.step()
        told.append(agent.total_steps)
    assert set(told[every:]) == {total} and agent.total_steps == agent.step == total


def test_epochs_give_the_runs_total_steps(agent: Control) -> None:
    things = Things()
    run, told = things.attach(), []
    for _epoch in run.epochs(5):
        told.append(set[int]())
        for batch in run.steps(things.loader):
            things.train(batch)
            told[-1].add(agent.total_steps)
    assert told == [{40}] * 5 and agent.step == 40
    for batch in run.steps(things.loader):
        assert agent.total_steps == 48
        things.train(batch)


def test_total_steps_of_several_loops_are_known_after_a_whole_epoch(agent: Control) -> None:
    things = Things()
    run, told = things.attach(), []
    for _epoch in run.epochs(3):
        for _ in range(2):
            for batch in run.steps(things.loader, epochs=2):
                things.train(batch)
                told.append(agent.total_steps)
    assert set(told[:16]) == {48}, "as if each epoch had this loop alone"
    assert set(told[32:]) == {96} and agent.step == 96


def test_a_resumed_run_reports_its_total_steps(agent: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    for gen, stop in (("5", 11), ("6", 0)):
        monkeypatch.setenv("SPOTKEEPER_GEN", gen)
        things = Things()
        run = things.attach()
        with contextlib.suppress(SystemExit):
            for _epoch in run.epochs(4):
                for batch in run.steps(things.loader):
                    assert agent.total_steps == 32
                    things.train(batch)
                    if run.steps_done == stop:
                        agent.request(AgentRequest.SAVE_STOP, time.time() + 30)
        if stop:
            assert (agent.state, agent.step) == (RunPhase.STOPPED, stop)
            agent.requested = AgentRequest.NONE
    assert agent.step == 32


def test_code_after_a_left_epoch_is_no_training(agent: Control) -> None:
    things = Things()
    run = things.attach()
    for _epoch in run.epochs(5):
        for batch in run.steps(things.loader):
            things.train(batch)
        break
    assert agent.state is RunPhase.FINISHING, "else an evaluation here counts as a step that hangs"


def test_metrics_belong_to_the_step_of_their_batch_and_outlive_a_preemption(
    agent: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for gen in (5, 6):
        monkeypatch.setenv("SPOTKEEPER_GEN", f"{gen}")
        things = Things()
        run = things.attach()
        with contextlib.suppress(SystemExit):
            for epoch in run.epochs(2):
                for batch in run.steps(things.loader):
                    run.report(before=float(run.steps_done), **{"self": 1.0})
                    loss = things.train(batch)
                    run.report(loss=loss, **{"train/after": float(run.steps_done)})
                    if (gen, run.steps_done) == (5, 11):
                        agent.request(AgentRequest.SAVE_STOP, time.time() + 30)
                run.report(epoch=epoch)
        agent.requested = AgentRequest.NONE
        files.append(read_metrics((tmp_path / "run" / METRICS).read_bytes(), gen))
    assert files[1].ancestors == ((5, 11),)
    for found in (files[1:], files):  # the first file reached no bucket, or did
        curves = joined(found)
        assert curves["train/after"].steps == curves["loss"].steps == list(range(1, 17))
        assert curves["train/after"].values == [float(step) for step in range(1, 17)]
        assert curves["before"].values == [float(step) for step in range(16)]
        assert (curves["epoch"].steps, curves["epoch"].values) == ([8], [0.0]), (
            "a later report of the code after the loop"
        )


def test_an_unwritable_run_folder_does_not_turn_a_stop_into_a_crash(
    agent: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(reporter, "write_result", full)
    with pytest.raises(SystemExit) as stop:
        generation(at(6, lambda: agent.request(AgentRequest.SAVE_STOP, time.time() + 30)))
    assert stop.value.code == 0 and (agent.state, agent.commit) == (RunPhase.STOPPED, Commit(5, 6))
    assert "result.json: [Errno 28] No space left on device" in capsys.readouterr().err


def test_a_second_run_in_one_job_is_refused(agent: Control) -> None:
    """It began with the weights of the first, without a word, and each refused the other's checkpoints."""
    generation(lambda *_: None)
    with pytest.raises(CallError, match="a job has one run"):
        Things().attach()


def test_code_after_a_left_loop_is_no_step(agent: Control) -> None:
    """Early stopping: a long evaluation counted as a step that hangs."""
    things = Things()
    for number, batch in enumerate(things.attach().steps(things.loader, epochs=2)):
        things.train(batch)
        if number == 3:
            break
    assert agent.state is RunPhase.FINISHING


def test_a_save_request_for_a_durable_step_is_answered(agent: Control) -> None:
    def check(run: Run, _: Things) -> None:
        if run.steps_done == 3:
            run.save()
            agent.request(AgentRequest.SAVE)
        if run.steps_done == 5:
            assert agent.answered == 1

    generation(check)


def test_a_save_request_is_answered_during_training(agent: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTKEEPER_INTERVAL_S", "1000")
    answered: list[int] = []

    def check(run: Run, _: Things) -> None:
        if run.steps_done == 2:
            agent.request(AgentRequest.SAVE, time.time() + 30)
        time.sleep(0.01)
        answered.append(agent.answered)

    generation(check, epochs=3)
    assert answered[1] == 0 and answered[-1] == 1
    assert agent.commit == Commit(5, 24) and agent.state is RunPhase.DONE
    assert store.complete(os.environ["SPOTKEEPER_CKPT"]) == [Commit(5, 24), Commit(5, 2)], "one save for one wish"
    assert agent.save_s > 0 and agent.stall_s > 0


@pytest.mark.parametrize(("interval_s", "least", "most"), [("0.01", 4, 32), ("1000", 1, 1)])
def test_saves_by_the_interval(
    agent: Control, monkeypatch: pytest.MonkeyPatch, interval_s: str, least: int, most: int
) -> None:
    monkeypatch.setenv("SPOTKEEPER_INTERVAL_S", interval_s)
    monkeypatch.setenv("SPOTKEEPER_KEEP", "100")
    generation(lambda *_: time.sleep(0.01), epochs=4)
    steps = [commit.step for commit in store.complete(os.environ["SPOTKEEPER_CKPT"])]
    assert least <= len(steps) <= most and steps[0] == 32
    assert agent.interval_s == float(interval_s)


def test_a_node_without_its_disk_writes_nothing(
    agent: Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SPOTKEEPER_CKPT")
    with pytest.raises(SystemExit):
        generation(at(3, lambda: agent.request(AgentRequest.SAVE_STOP)))
    assert read_result(tmp_path / "run") == RunResult("stopped", 5, 3, None)
    assert not (tmp_path / "ckpt").exists() and not (tmp_path / ".spotkeeper").exists()


def test_a_late_disk_is_used_from_the_next_save(
    agent: Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SPOTKEEPER_CKPT")
    monkeypatch.setenv("SPOTKEEPER_CKPT_LATE", str(tmp_path / "ckpt"))

    def check(run: Run, _: Things) -> None:
        if run.steps_done == 3:
            run.save()
            assert not (tmp_path / "ckpt").exists(), "nobody said that the disk is there"
            agent.disk_ready = True
        elif run.steps_done == 5:
            agent.request(AgentRequest.SAVE_STOP)

    with pytest.raises(SystemExit):
        generation(check)
    assert read_result(tmp_path / "run") == RunResult("stopped", 5, 5, Commit(5, 5))
    assert store.complete(tmp_path / "ckpt") == [Commit(5, 5)]


def test_training_continues_when_saves_fail(
    agent: Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """A full disk is the saver's to find (test_saver); here a file stands where the checkpoint must go."""
    monkeypatch.setenv("SPOTKEEPER_INTERVAL_S", "1000")
    faults: list[Fault] = []

    def check(run: Run, _: Things) -> None:
        if run.steps_done == 2:
            assert run.save() == Commit(5, 2)
            (tmp_path / "ckpt" / "5-4").write_text("in the way")
        if run.steps_done == 4:
            assert run.save() == Commit(5, 2), "the older one stays"
            faults.append(agent.fault)

    things, run = generation(check)
    with monkeypatch.context() as elsewhere:  # with the agent's folder it would go on from the end of this one
        for name in ("RUN", "CKPT", "SAVER", "GEN"):
            elsewhere.delenv(f"SPOTKEEPER_{name}")
        assert run.steps_done == 16 and things.state() == alone(2)
    assert faults == [Fault.FENCED]
    assert agent.fault is Fault.NONE and agent.commit == Commit(5, 16)
    assert "checkpoint 5-4 was not saved" in capsys.readouterr().err


def test_a_last_save_that_failed_is_tried_again_at_the_end(agent: Control, tmp_path: Path) -> None:
    def check(run: Run, _: Things) -> None:
        if run.steps_done == 16:
            (tmp_path / "ckpt").mkdir(exist_ok=True)
            (tmp_path / "ckpt" / "5-16").write_text("in the way")
            assert run.save() != Commit(5, 16)
            (tmp_path / "ckpt" / "5-16").unlink()

    generation(check)
    assert agent.commit == Commit(5, 16) and agent.fault is Fault.NONE


@pytest.mark.parametrize("held", ["memory", "disk"])
def test_a_saver_lost_during_a_restore_costs_no_start(
    agent: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, held: str
) -> None:
    """After its greeting, before its memory is used: the whole generation ended as a crash of the script."""
    with pytest.raises(SystemExit):
        generation(at(6, lambda: agent.request(AgentRequest.SAVE_STOP, time.time() + 30)))
    if held == "disk":
        _kill_saver(tmp_path / "saver")
        start_saver(tmp_path / "saver")
    real = strategy.restore

    def bereft(*args: Any) -> Any:
        assert (args[3].staged is not None) == (held == "memory")
        _kill_saver(tmp_path / "saver")
        return real(*args)

    monkeypatch.setattr(strategy, "restore", bereft)
    monkeypatch.setenv("SPOTKEEPER_GEN", "6")
    Control.create(tmp_path / "run" / NAME).close()
    _, run = generation(lambda *_: None)
    assert run.steps_done == 16 and agent.restored == Commit(5, 6)
    assert agent.fault is Fault.SAVER_LOST and "saver lost" in capsys.readouterr().err


def test_a_lost_saver_is_reported_and_replaced(agent: Control, tmp_path: Path, capsys: Any) -> None:
    processes: list[Any] = []

    def check(run: Run, _: Things) -> None:
        if run.steps_done == 3:
            run.save()
            _kill_saver(tmp_path / "saver")
        if run.steps_done == 4:
            agent.request(AgentRequest.SAVE)
        if run.steps_done == 6:
            assert agent.fault is Fault.SAVER_LOST
            processes.append(start_saver(tmp_path / "saver"))

    try:
        _, run = generation(check)
        assert run.steps_done == 16
        assert agent.commit == Commit(5, 16) and agent.fault is Fault.NONE
        assert "saver lost" in capsys.readouterr().err
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_an_older_generation_does_not_start(agent: Control, tmp_path: Path) -> None:
    newer = client.Client.connect(tmp_path / "saver")
    newer.hello(tmp_path / "ckpt", 6, 2)
    with pytest.raises(RuntimeError, match="generation 5 is over: generation 5 is older than generation 6"):
        Things().attach()
    newer.close()


# ------------------------------------------------------------------- what is said about mistakes


def test_other_parts_than_saved_are_refused() -> None:
    generation(lambda *_: None, checkpoint_dir="here")
    things = Things()
    with pytest.raises(ValueError, match=r"the checkpoint has 'ema', but attach\(\) does not"):
        spotkeeper.attach(things.model, things.optimizer, things.scheduler, checkpoint_dir="here")
    with pytest.raises(ValueError, match="the checkpoint has 1 optimizers"):
        spotkeeper.attach(things.model, None, things.scheduler, ema=things.ema, checkpoint_dir="here")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": 3}, r"attach\(model=\): want a torch.nn.Module, got int"),
        ({"optimizer": 3}, r"attach\(optimizer=\): want a torch.optim.Optimizer, got int"),
        ({"tokenizer": 3}, r"attach\(tokenizer=\): int has no state_dict"),
        ({"scaler": 3}, r"attach\(scaler=\): int has no state_dict"),
    ],
)
def test_parts_without_state_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        spotkeeper.attach(**parts)


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) before"):
        spotkeeper.attach(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("name", "value"), [("INTERVAL_S", "soon"), ("INTERVAL_S", "-1"), ("GEN", "x"), ("MEAN_LIFE_S", "0")]
)
def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"SPOTKEEPER_{name}", value)
    with pytest.raises(ValueError, match=f"SPOTKEEPER_{name}='{value}': want"):
        spotkeeper.attach(nn.Linear(1, 1))


def _pid_of(path: Path) -> int:
    """Of the saver that listens at ``path``."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(path).encode() in argv:
                return int(entry.name)
    raise AssertionError(f"no saver at {path}")


def _kill_saver(path: Path) -> None:
    os.kill(_pid_of(path), signal.SIGKILL)
    _gone(path)


def _gone(path: Path) -> None:
    for _ in range(500):
        try:
            client.Client.connect(path, timeout_s=0.0).close()
        except protocol.SaverError:
            return
        time.sleep(0.01)
    raise AssertionError("the saver lives on")


def test_output_goes_to_the_agents_or_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local = RunSettings.from_env({}).output
    assert local == tmp_path / "output" and not local.exists(), "a script that leaves nothing makes no folder"
    assert make_output(local, managed=False) == local and (local / ".gitignore").read_text() == "*\n"
    managed = RunSettings.from_env({"SPOTKEEPER_RUN": "/r", "SPOTKEEPER_OUTPUT": str(tmp_path / "disk/out")}).output
    assert make_output(managed, managed=True) == tmp_path / "disk/out"
    assert list(managed.iterdir()) == []
