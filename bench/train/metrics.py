"""What ``run.report`` adds to a step, compared with a method that takes the same values and does nothing.

Everything that a report causes is counted: sorting, thinning, and a file every 10 s, which is written here after as
many reports as a job with steps of 1 ms makes in 10 s. CPU time counts, because other processes may use the cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 100_000
NAMES = 4  # of the figure that counts; also measured for one
RUNS = 3
GOAL_US = 5.0
WRITE_EVERY = 10_000
VALUES = 997  # different reports, so that minimum and maximum lie anywhere


class Nothing:
    """The comparison."""

    def report(self, **values: float) -> None:
        """Take the values and do nothing."""


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    one, many = (min(report_us(count) for _ in range(RUNS)) for count in (1, NAMES))
    return [
        {
            "name": "metrics.us_per_step",
            "value": round(many, 2),
            "unit": "us",
            "goal": f"<= {GOAL_US:g}",
            "holds": many <= GOAL_US,
            "against": f"{NAMES} numbers a step, least of {RUNS}, beyond an empty method; {one:.2f} us for one number",
        }
    ]


def report_us(count: int) -> float:
    """Return the CPU microseconds that one report of ``count`` numbers takes, beyond an empty method's."""
    from spotkeeper.train.agent_link.control import Control
    from spotkeeper.train.loop.metrics import MetricHistory

    values = [{f"m{name}": number * 7919 % VALUES / VALUES for name in range(count)} for number in range(VALUES)]
    with tempfile.TemporaryDirectory() as folder:
        history = MetricHistory(Control.private(), Path(folder), 1)

        class Reporting:
            """``Run`` without a training."""

            step = 0

            def report(self, **values: float) -> None:
                self.step += 1
                history.report(self.step, values)
                if self.step % WRITE_EVERY == 0:
                    history.write()

        return cpu_us(Reporting().report, values) - cpu_us(Nothing().report, values)


def cpu_us(report: Callable[..., Any], values: list[dict[str, float]]) -> float:
    began = time.process_time()
    for step in range(STEPS):
        report(**values[step % VALUES])
    return (time.process_time() - began) / STEPS * 1e6
