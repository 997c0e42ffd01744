"""Who holds a gang up: own times without the waiting, the middle one, five windows in a row."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from spotkeeper.train.agent_link.control import NAME, Control
from spotkeeper.train.core.gang import SoloGang
from spotkeeper.train.loop.lag import (
    EVERY_S,
    SLOWER,
    WINDOWS,
    LagMonitor,
    LagVerdict,
    Stopwatch,
    WindowTimes,
    ratio_of,
    remembered,
)


def told(*own: float, samples: int = 4) -> list[WindowTimes]:
    return [WindowTimes(each, each / samples, 1.0) for each in own]


def windows(verdict: LagVerdict, *rows: list[WindowTimes], mine: int = 2) -> list[float]:
    out = []
    for row in rows:
        verdict.window(row, [mine])
        out.append(verdict.lag)
    return out


# -- the verdict


def test_five_slow_windows_make_a_straggler_and_five_normal_ones_end_it() -> None:
    slow, well = told(1.0, 1.1, 1.6, 0.9), told(1.0, 1.1, 1.2, 0.9)
    verdict = LagVerdict()
    assert windows(verdict, *[slow] * 4, well, *[slow] * 4) == [0.0] * 9
    assert windows(verdict, slow) == [1.6]
    assert windows(verdict, *[well] * 5) == [1.6] * 4 + [0.0]


def test_a_machine_is_as_slow_as_its_slowest_rank() -> None:
    verdict = LagVerdict()
    for _ in range(WINDOWS):
        verdict.window(told(1.0, 1.0, 1.0, 2.0), [2, 3])
    assert verdict.lag == 2.0


@pytest.mark.parametrize(
    ("row", "rank", "ratio"),
    [
        (told(1.0, 1.6), 1, 1.6),  # of two, the quicker one is the middle
        (told(1.0, 1.6), 0, 1.0),
        (told(1.0), 0, 0.0),  # alone
        (told(1.0, 0.0, 2.0), 1, 0.0),  # nothing measured of it
        (
            [WindowTimes(1.0, 0.1, 1.0), WindowTimes(1.0, 0.1, 1.0), WindowTimes(1.5, 0.1, 1.0)],
            2,
            1.0,
        ),  # it has more samples
        (
            [WindowTimes(1.0, 0.1, 1.0), WindowTimes(1.0, 0.1, 1.0), WindowTimes(1.0, 0.2, 1.0)],
            2,
            1.0,
        ),  # slow, and was given fewer
    ],
)
def test_more_or_fewer_samples_make_no_straggler(row: list[WindowTimes], rank: int, ratio: float) -> None:
    assert ratio_of(row, rank) == pytest.approx(ratio)


# -- the windows of a gang


class Many(SoloGang):
    """Rank 0 of a gang in which rank 1's own time is ``times`` its own."""

    world = 3

    def __init__(self, times: float) -> None:
        self.times, self.shared = times, 0

    def share(self, values: tuple[float, ...]):  # type: ignore[no-untyped-def]
        self.shared += 1
        own, sample, *rest = values
        return lambda: [values, (own / self.times, sample / self.times, *rest), (own / self.times, sample, *rest)]


def test_a_slow_machine_writes_its_lag_without_disturbing_steps() -> None:
    with Control.private() as control:
        gang = Many(1.5)
        lag = LagMonitor(gang, [0], control)
        for step in range(16 + 4 * 20 + 1):  # a first window of 16 steps, then 10 s of half a second each
            lag.after_step(0.4 if step % 3 else None, 8, 0.5)
        assert (gang.shared, control.lag) == (5, 0.0), "its samples cost no more than another's"
        assert control.sample_s == pytest.approx(0.05)
        gang = Many(1.5)
        gang.share = lambda values: lambda: [values, *[tuple(each / 1.5 for each in values)] * 2]  # type: ignore[method-assign]
        lag = LagMonitor(gang, [0], control)
        for _ in range(16 + 4 * 30 + 1):
            lag.after_step(0.4, 8, 0.5)
        assert control.lag == pytest.approx(1.5) and control.lag > SLOWER
        lag.drain()


def test_a_single_machine_reports_no_lag() -> None:
    class Quiet(SoloGang):
        def share(self, values: tuple[float, ...]):  # type: ignore[no-untyped-def]
            raise AssertionError

    with Control.private() as control:
        lag = LagMonitor(Quiet(), [0], control)
        for _ in range(100):
            lag.after_step(1.0, 8, 1.0)


# -- what a machine remembers


def test_a_machine_reads_its_times_of_the_previous_generation(tmp_path: Path) -> None:
    assert remembered(None) == 0.0
    for gen, needed in ((3, 0.5), (9, 0.02), (10, 0.0), (12, 0.7)):
        (tmp_path / str(gen)).mkdir()
        with Control.create(tmp_path / str(gen) / NAME) as control:
            control.sample_s = needed
    (tmp_path / "10" / NAME).write_bytes(b"torn")
    assert remembered(tmp_path / "11") == 0.02
    assert remembered(tmp_path / "3") == 0.0, "a new machine knows nothing"


# -- the stopwatch


class Waits(nn.Module):
    """DDP's part in this: after backward it waits for the others, in a callback of the engine."""

    def __init__(self, clock: list[float], wait_s: float) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        first = next(self.module.parameters())
        engine = torch.autograd.Variable._execution_engine

        def wait() -> None:
            clock[0] += wait_s

        first.register_post_accumulate_grad_hook(lambda _: engine.queue_callback(wait))  # its gradient comes last


def test_own_time_ends_before_the_all_reduce() -> None:
    clock = [100.0]
    ddp = Waits(clock, wait_s=30.0)
    watch = Stopwatch(ddp, now=lambda: clock[0])  # type: ignore[arg-type]
    taken = []
    for _ in range(4):
        watch.begin()
        for _ in range(2):  # two micro-batches
            clock[0] += 0.2  # the loader
            out = ddp.module(torch.ones(2, 3)).sum()
            clock[0] += 0.3  # forward
            out.backward()
        clock[0] += 5.0  # the optimizer
        taken.append(watch.end())
    # Each micro-batch waits here; of a real one only the last does.
    assert taken == [pytest.approx(31.0)] * 4


def test_steps_without_a_gradient_are_not_measured() -> None:
    clock = [0.0]
    ddp = Waits(clock, wait_s=0.0)
    watch = Stopwatch(ddp, now=lambda: clock[0])  # type: ignore[arg-type]
    taken = []
    for step in range(50):
        watch.begin()
        if step % 2 == 0:
            ddp.module(torch.ones(2, 3)).sum().backward()
        clock[0] += EVERY_S / 10
        taken.append(watch.end())
    assert 2 <= len([each for each in taken if each is not None]) <= 6
    assert Stopwatch(None).end() is None


def test_measuring_costs_at_most_a_thousandth_of_a_step() -> None:
    """By the count of what it does, not by a clock: two looks at the time and one callback for each sample."""
    looks = [0]

    def now() -> float:
        looks[0] += 1
        return looks[0] * 0.001  # a step is three of these: far below EVERY_S

    ddp = Waits([0.0], wait_s=0.0)
    watch = Stopwatch(ddp, now=now)  # type: ignore[arg-type]
    for _ in range(300):
        watch.begin()
        ddp.module(torch.ones(2, 3)).sum().backward()
        watch.end()
    assert looks[0] <= 300 + 3 * (300 * 0.0011 / EVERY_S + 1)


def test_the_model_can_be_copied_and_stored_as_before() -> None:
    """An EMA copies it, a script may store it whole: neither takes the stopwatch along."""
    ddp = Waits([0.0], wait_s=0.0)
    watch = Stopwatch(ddp)  # type: ignore[arg-type]
    stored = pickle.loads(pickle.dumps(ddp.module))  # noqa: S301
    for other in (copy.deepcopy(ddp.module), stored):
        watch.begin()
        other(torch.ones(2, 3)).sum().backward()
        assert watch.end() is None, "a copy's backward is not the model's"
