"""The agent beside SkyPilot's skylet, the process that SkyPilot runs on its machines: memory and processor, in one run.

SkyPilot needs its own environment (conflicting version pins). Without one the figures are skipped:

    python3 -m venv sky && sky/bin/pip install skypilot grpcio protobuf
    SPOTKEEPER_BENCH_SKYPILOT=$PWD/sky/bin/python make bench ARGS=skylet
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SETTING = "SPOTKEEPER_BENCH_SKYPILOT"
SECONDS = 60.0  # three turns of 20 s
START_S = 60.0


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    names = ("agent.rss_vs_skylet", "agent.cpu_vs_skylet")
    python = os.environ.get(SETTING)
    if not python:
        why = f"skipped: no SkyPilot at hand (pip install skypilot grpcio protobuf, and {SETTING}=its python)"
        return [_figure(name, None, "where SkyPilot is installed", why) for name in names]
    from bench.job import agent

    with _skylet(python) as pid:
        before, began = agent.cpu_s(pid), time.monotonic()
        ours_mb, ours_percent = agent.measure(SECONDS)
        mb, percent = agent.resident_mb(pid), 100 * (agent.cpu_s(pid) - before) / (time.monotonic() - began)
    return [
        _figure(names[0], ours_mb / mb, "<= 0.5", f"agent {ours_mb:.0f} MB, skylet {mb:.0f} MB, idle"),
        _figure(
            names[1],
            ours_percent / percent,
            "none; agent.cpu_percent has one",
            f"agent {ours_percent:.3f} % of a core while a job runs, skylet {percent:.3f} % idle, a quarter as often",
        ),
    ]


def _figure(name: str, ratio: float | None, goal: str, against: str) -> dict[str, object]:
    if ratio is None:
        return {"name": name, "value": None, "unit": "x", "goal": goal, "holds": None, "against": against}
    holds = not goal.startswith("<= ") or ratio <= float(goal.removeprefix("<= "))
    return {"name": name, "value": round(ratio, 2), "unit": "x", "goal": goal, "holds": holds, "against": against}


@contextmanager
def _skylet(python: str) -> Iterator[int]:
    """Yield its pid after its first turn. It has its own home folder and no server."""
    with tempfile.TemporaryDirectory() as home, (Path(home) / "log").open("wb") as log:
        env = {"HOME": home, "PATH": os.environ["PATH"], "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        argv = [python, "-m", "sky.skylet.skylet", "--port", "0"]
        process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, cwd=home)
        try:
            time.sleep(START_S / 2)  # imports, and its first turn 20 s later
            if process.poll() is not None:
                raise RuntimeError(f"skylet ended with {process.returncode}: {(Path(home) / 'log').read_text()[-500:]}")
            yield process.pid
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "agent")]
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
