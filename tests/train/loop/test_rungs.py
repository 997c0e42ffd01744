"""A trial of a search saves and stops exactly at its rung's step, reports its metric there, and goes on bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import spotkeeper
from spotkeeper.contract.metrics import read_metrics
from spotkeeper.train.agent_link.control import METRICS, Commit, Control, RunPhase, RunResult, read_result, write_result
from spotkeeper.train.checkpoint import store
from spotkeeper.train.core.errors import CallError
from tests.train.gangs import Event, Gang, finals, run_to_end
from tests.train.jobs import Job
from tests.train.loop.test_run import Things, agent, laptop

__all__ = ["agent", "laptop"]

UNTIL, METRIC = "SPOTKEEPER_UNTIL", "SPOTKEEPER_METRIC"


def losses(gang: Gang, gen: int) -> dict[int, float]:
    points = read_metrics((gang.root / "node0" / f"run{gen}" / METRICS).read_bytes(), gen).metrics["loss"]
    return dict(zip(points.steps, points.values, strict=True))


@pytest.mark.parametrize("world", [1, 3])
def test_a_trial_stops_at_each_rung_and_ends_with_the_same_bits(tmp_path: Path, world: int) -> None:
    job = Job(tmp_path / "out", accumulate=2 if world == 1 else 1)
    alone = run_to_end(tmp_path / "alone", job, nodes=world)
    with Gang(tmp_path, job, nodes=world, env={METRIC: "loss"}) as gang:
        for gen, until in ((1, 4), (2, 5)):
            gang.env[UNTIL] = str(until)
            ended = gang.run(gen)
            assert [one.code for one in ended] == [0] * world
            assert [one.result and (one.result.outcome, one.result.step) for one in ended] == [
                ("reached", until)
            ] * world
            first, *others = [one.result.value for one in ended if one.result]
            assert first == losses(gang, gen)[until], "rank 0's loss after that very step"
            assert others == [None] * (world - 1)
            assert {store.newest(gang.disk(node)).commit for node in range(world)} == {Commit(gen, until)}
            assert not job.out.exists(), "the code after the loop did not run"
        del gang.env[UNTIL]
        done = [one.result for one in gang.run(3)]
        assert [one and one.outcome for one in done] == ["done"] * world
        assert done[0] is not None and done[0].value == losses(gang, 3)[job.steps]
    assert finals(job) == alone


def test_a_trial_lost_after_its_rung_reports_the_same_again_and_trains_no_more(tmp_path: Path) -> None:
    job = Job(tmp_path / "out")
    with Gang(tmp_path, job, env={METRIC: "loss", UNTIL: "4"}) as gang:
        first, again = gang.run(1)[0].result, gang.run(2)[0].result
        assert first is not None and again == RunResult("reached", 2, 4, Commit(1, 4), first.value)
        assert store.newest(gang.disk(0)).commit == Commit(1, 4), "nothing had to be saved again"


def test_a_stop_at_the_same_step_comes_first(tmp_path: Path) -> None:
    job = Job(tmp_path / "out", events=(Event(4, 0, "stop"),))
    with Gang(tmp_path, job, env={METRIC: "loss", UNTIL: "4"}) as gang:
        assert gang.run(1)[0].result == RunResult("stopped", 1, 4, Commit(1, 4), losses(gang, 1)[4])
        again = gang.run(2)[0].result
        assert again is not None and (again.outcome, again.step, again.value) == ("reached", 4, losses(gang, 1)[4])


def epochs(things: Things, count: int = 3) -> list[str]:
    """A script that validates after each epoch of eight steps."""
    done: list[str] = []
    run = things.attach()
    for epoch in run.epochs(count):
        for batch in run.steps(things.loader):
            run.report(loss=things.train(batch))
        run.report(accuracy=epoch / 10)
        done.append(f"validated {epoch}")
    return done


@pytest.mark.parametrize(("until", "value"), [(16, 0.1), (11, 0.0)])
def test_a_rung_has_the_last_value_and_at_an_epochs_end_what_follows_its_loop(
    agent: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: int, value: float
) -> None:
    monkeypatch.setenv(UNTIL, str(until))
    monkeypatch.setenv(METRIC, "accuracy")
    with pytest.raises(SystemExit):
        epochs(Things())
    assert read_result(tmp_path / "run") == RunResult("reached", 5, until, Commit(5, until), value)
    assert agent.state is RunPhase.REACHED


def test_a_run_that_is_shorter_than_its_rung_just_ends(
    agent: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNTIL, "1000")
    monkeypatch.setenv(METRIC, "accuracy")
    assert epochs(Things(), 1) == ["validated 0"]
    result = read_result(tmp_path / "run")
    assert result is not None and (result.outcome, result.step) == ("done", 8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_value(
    agent: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setenv(UNTIL, "3")
    monkeypatch.setenv(METRIC, "odd")
    things = Things()
    run = things.attach()
    with pytest.raises(SystemExit):
        for batch in run.steps(things.loader):
            things.train(batch)
            run.report(odd=1.0 if run.steps_done < 2 else value)
    result = read_result(tmp_path / "run")
    assert result is not None and (result.outcome, result.value) == ("reached", None)


@pytest.mark.parametrize("value", ['"1"', "true", "[1]", "NaN", "1e999", "{}"])
def test_the_agent_takes_no_value_from_a_job_that_is_none(tmp_path: Path, value: str) -> None:
    write_result(tmp_path, RunResult("reached", 1, 2, None, 0.5))
    file = tmp_path / "result.json"
    file.write_text(file.read_text().replace('"value": 0.5', f'"value": {value}'))
    assert read_result(tmp_path) == RunResult("reached", 1, 2, None, None)


def test_params_reach_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spotkeeper.params() == {}
    monkeypatch.setenv("SPOTKEEPER_PARAMS", '{"lr": 0.1, "layers": 3, "name": "x", "wide": true}')
    found: dict[str, Any] = {"lr": 0.1, "layers": 3, "name": "x", "wide": True}
    assert spotkeeper.params() == found
    assert Things().attach(checkpoint_dir="here").params == found


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": null}', '{"a": [1]}'])
def test_damaged_params_are_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SPOTKEEPER_PARAMS", text)
    with pytest.raises(ValueError, match=r"SPOTKEEPER_PARAMS=.*want a JSON object"):
        spotkeeper.params()


def test_a_step_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNTIL, "soon")
    with pytest.raises((ValueError, CallError), match="SPOTKEEPER_UNTIL='soon': want a whole number"):
        Things().attach(checkpoint_dir="here")
