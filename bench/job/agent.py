"""An agent's memory and processor time on its machine, polling in real time while a job trains.

The real agent as a process, with a metadata server and a function on loopback, as a member of a generation whose job
only reports steps.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from spotkeeper.contract.generation import JobRun
from tests.agent.fakes import Machine, document, fake_cloud, source, wait_until
from tests.agent.jobs import OBEDIENT

SECONDS = 20.0
GOAL_MB, GOAL_PERCENT = 35.0, 0.2


def measure(seconds: float = SECONDS) -> tuple[float, float]:
    """Return (resident megabytes, percent of one core)."""
    with tempfile.TemporaryDirectory() as name, fake_cloud() as fake:
        vm = Machine(fake, Path(name) / "vm")
        try:
            vm.start()
            fake.wait_sync(vm.uid)
            sha256 = source(fake, {"train.py": OBEDIENT})
            run = JobRun("bench", ("train.py",), sha256, python=vm.light_python())
            vm.serve(document(1, 1, (vm.member(),)), run)
            wait_until(lambda: '"running"' in vm.log() and '"preflight.done"' in vm.log(), 60)
            time.sleep(2)  # the rest of the start
            assert vm.agent is not None
            before, began = cpu_s(vm.agent.pid), time.monotonic()
            time.sleep(seconds)
            used = cpu_s(vm.agent.pid) - before
            return resident_mb(vm.agent.pid), 100 * used / (time.monotonic() - began)
        finally:
            vm.end()


def cpu_s(pid: int) -> float:
    """Processor time of all threads; ``schedstat`` counts nanoseconds, ``stat`` hundredths."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / 1024


def figures() -> list[dict[str, object]]:
    """For ``bench/run.py``."""
    mb, percent = measure()
    return [
        {
            "name": "agent.rss_mb",
            "value": round(mb, 1),
            "unit": "MB",
            "goal": f"<= {GOAL_MB:.0f}",
            "holds": mb <= GOAL_MB,
            "against": "a member of a running job; torchrun itself takes some 226 MB",
        },
        {
            "name": "agent.cpu_percent",
            "value": round(percent, 3),
            "unit": "% of a core",
            "goal": f"<= {GOAL_PERCENT}",
            "holds": percent <= GOAL_PERCENT,
            "against": f"polls in real time, over {SECONDS:.0f} s",
        },
    ]


if __name__ == "__main__":
    for figure in figures():
        print(f"{figure['name']}: {figure['value']} {figure['unit']} (goal {figure['goal']}); {figure['against']}")
