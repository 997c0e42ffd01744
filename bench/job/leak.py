"""Growth of the one-machine cloud's processes in half an hour of many unfinished jobs: descriptors, threads, memory.

Twenty jobs are unfinished at every moment, more than their two machines can take: two train for two minutes each, the
others wait, and another follows each that ends. In real time, because leaks grow with rounds, not with the clock.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from spotkeeper.client.pack import Source, pack
from spotkeeper.client.submit import submit
from spotkeeper.client.target import STACK, STACK_FILE, local_target
from spotkeeper.contract.job import JobSpec
from spotkeeper.local import deploy
from spotkeeper.local.core import procs
from spotkeeper.local.lifecycle.cloud import LocalCloud
from spotkeeper.local.lifecycle.keeper import PID_FILE

MINUTES = float(os.environ.get("SPOTKEEPER_LEAK_MINUTES", "30"))
WARM_MINUTES = 3.0  # after the first jobs: imports, caches and kept connections
MACHINES, UNFINISHED = 2, 20
TRAIN_S = 120
SAMPLE_S = 5.0
GOALS = {"descriptors": 1.1, "threads": 1.1, "memory": 1.1}
GOAL_MOST = 256  # a quarter of the default limit


@dataclass(frozen=True)
class Sample:
    """``memory``: the processes' private bytes."""

    descriptors: int
    threads: int
    memory: int


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    with tempfile.TemporaryDirectory(prefix="sk-leak-") as folder:
        found = measured(Path(folder))
    return [*(figure(kind, found) for kind in GOALS), most(found)]


def measured(folder: Path) -> dict[str, list[Sample]]:
    """Samples by process until the end of :data:`MINUTES`.

    Raises:
        RuntimeError: the function or the control plane restarted, or no job ended.
    """
    cloud = LocalCloud.up(folder / "cloud", scale=20.0, seed=1, per_zone=MACHINES)
    try:
        for zone in cloud.config.zones:
            cloud.set_capacity(zone, MACHINES)
        deploy.up(STACK, stack_file(folder), cloud, cloud.folder / "deploy", engine="in-process")
        crowd = Crowd(cloud, folder)
        watched(cloud, crowd.fill, WARM_MINUTES)
        began, submitted = restarts(cloud), crowd.submitted
        found = watched(cloud, crowd.fill, MINUTES)
        if restarts(cloud) != began:
            raise RuntimeError(f"processes were started anew: {began} -> {restarts(cloud)}")
        if crowd.submitted == submitted:
            raise RuntimeError("no job came to its end")
    finally:
        cloud.down(purge=True)
    return found


def stack_file(folder: Path, machines: int = MACHINES) -> Path:
    """The stack of the one-machine cloud with so many spot machines and no static one."""
    given = msgspec.yaml.decode(STACK_FILE.read_bytes())
    pools = given["config"]["spotkeeper:pools"]
    burst = next(pool for pool in pools if pool["kind"] == "spot")
    given["config"]["spotkeeper:pools"] = [{**burst, "size": machines, "max_on_demand": 0}]
    path = folder / "Pulumi.local.yaml"
    path.write_bytes(msgspec.yaml.encode(given))
    return path


class Crowd:
    """The jobs: submits another whenever one is over."""

    def __init__(self, cloud: LocalCloud, folder: Path) -> None:
        self._cloud = cloud
        self._store = local_target(cloud.folder).store()
        self._numbers = count(1)
        self._source = script(folder)
        self.submitted = 0

    def fill(self) -> None:
        for _ in range(UNFINISHED - len(self._store.active_jobs())):
            spec = JobSpec(name=f"leak-{next(self._numbers)}", command=("main.py",), source=".")
            submit(self._store, spec, self._source, self._cloud.clock.now())
            self.submitted += 1


def script(folder: Path) -> Source:
    home = folder / "job"
    home.mkdir()
    (home / "main.py").write_text(f"import time\ntime.sleep({TRAIN_S})\n")
    return pack(home)


def watched(cloud: LocalCloud, meanwhile: Callable[[], None], minutes: float) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {"cloud": [], "function": []}
    end = time.monotonic() + 60.0 * minutes
    while time.monotonic() < end:
        meanwhile()
        for process, pids in processes(cloud).items():
            found[process].append(sample(pids))
        time.sleep(SAMPLE_S)
    return found


def processes(cloud: LocalCloud) -> dict[str, set[int]]:
    """The control plane, and the function with its workers."""
    (function,) = cloud.status().functions
    mark = procs.mark(procs.FUNCTION, f"{cloud.config.uid}-{function.name}")
    return {"cloud": {int((cloud.folder / PID_FILE).read_text().split()[0])}, "function": procs.marked(mark)}


def restarts(cloud: LocalCloud) -> tuple[set[int], int]:
    return processes(cloud)["cloud"], sum(each.restarts for each in cloud.status().functions)


def sample(pids: set[int]) -> Sample:
    seen = [Path("/proc") / str(pid) for pid in pids]
    return Sample(
        sum(len(list((path / "fd").iterdir())) for path in seen),
        sum(len(list((path / "task").iterdir())) for path in seen),
        sum(own_memory(path) for path in seen),
    )


def own_memory(path: Path) -> int:
    lines = (path / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def growth(samples: list[int]) -> float:
    """Median of the last fifth less that of the first: coming and going is not a leak."""
    part = max(1, len(samples) // 5)
    return statistics.median(samples[-part:]) / statistics.median(samples[:part])


def figure(kind: str, found: Mapping[str, list[Sample]]) -> dict[str, Any]:
    """Figure of the process that grew most."""
    series = {process: [getattr(each, kind) for each in samples] for process, samples in found.items()}
    worst = max(growth(samples) for samples in series.values())
    part = {process: max(1, len(samples) // 5) for process, samples in series.items()}
    told = ", ".join(
        f"{process} {statistics.median(samples[: part[process]]) / unit(kind):.0f} to "
        f"{statistics.median(samples[-part[process] :]) / unit(kind):.0f}{' MB' if kind == 'memory' else ''}"
        for process, samples in series.items()
    )
    return {
        "name": f"leak.{kind}_growth",
        "value": round(worst, 3),
        "unit": "x",
        "goal": f"<= {GOALS[kind]:g}",
        "holds": worst <= GOALS[kind],
        "against": f"{MINUTES:g} minutes, {UNFINISHED} unfinished jobs on {MACHINES} machines: {told}",
    }


def most(found: Mapping[str, list[Sample]]) -> dict[str, Any]:
    """Figure of the process with the most open descriptors at once, also of those that a collector closes later."""
    worst = {process: max(each.descriptors for each in samples) for process, samples in found.items()}
    return {
        "name": "leak.descriptors_most",
        "value": max(worst.values()),
        "unit": "",
        "goal": f"<= {GOAL_MOST}",
        "holds": max(worst.values()) <= GOAL_MOST,
        "against": ", ".join(f"{process} {count}" for process, count in worst.items()),
    }


def unit(kind: str) -> float:
    return 1e6 if kind == "memory" else 1.0


if __name__ == "__main__":
    for each in figures():
        print(f"{each['name']} {each['value']}  ({each['against']})", file=sys.stdout)
