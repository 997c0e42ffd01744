"""The price of complete logs: what output costs the training that prints it, and what a killed machine loses."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from spotkeeper.clock import Clock
from spotkeeper_agent.cloud.storage import Readable, Stored
from spotkeeper_agent.core import settings
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.job import logs
from spotkeeper_agent.job.chunks import NodeRun, make_spool
from spotkeeper_agent.launcher import spool
from tests.agent.chunks import complete_log

PAIRS = 12
STEPS = 100
STEP_S, STEP_BYTES = 0.02, 2_000_000  # 100 MB/s
KILLS = 8
RUN = NodeRun("abcdefgh", 0, 1)

# A step computes for STEP_S of processor time and prints; its wall time shows what the printing costs.
TRAIN = f"""
import os, statistics, sys, time
from spotkeeper_agent.launcher import output
if sys.argv[1] == "spooled":
    output.bound()
line = b"step 000000 loss 1.2345 throughput 67890 samples/s, and what else a loop prints" + b"\\n"
text = line * ({STEP_BYTES} // len(line))
times = []
for step in range({STEPS}):
    began = time.perf_counter()
    until = time.thread_time() + {STEP_S}
    while time.thread_time() < until:
        sum(range(2000))
    for at in range(0, len(text), 65536):
        os.write(1, text[at : at + 65536])
    times.append(time.perf_counter() - began)
print(statistics.median(times), file=sys.__stderr__)
"""
TALK = """
import time
from spotkeeper_agent.launcher import output
output.bound()
while True:
    print(f"now {time.time():.3f}", flush=True)
    time.sleep(0.05)
"""


def figures() -> list[dict[str, object]]:
    slow, lost = slowdown_percent(), lost_s()
    return [
        {
            "name": "logs.slowdown_percent",
            "value": round(statistics.median(slow), 2),
            "unit": "%",
            "goal": "<= 2",
            "holds": statistics.median(slow) <= 2.0,
            "against": "the same steps printing 100 MB/s into a plain file, as under torchrun alone; median of pairs",
            "spread": [round(value, 2) for value in sorted(slow)],
        },
        {
            "name": "logs.lost_s",
            "value": round(max(lost), 1),
            "unit": "s",
            "goal": "<= 10",
            "holds": max(lost) <= 10.0,
            "against": f"the longest of {KILLS} killed machines; a bucket on disk",
            "spread": [round(value, 1) for value in sorted(lost)],
        },
    ]


def slowdown_percent() -> list[float]:
    """Return by how much a step is slower when all output goes to the spool, for each pair of runs."""
    found = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as disk:
        for pair in range(PAIRS):
            took = {}
            for how in ("plain", "spooled")[:: 1 if pair % 2 else -1]:
                took[how] = step_s(how, Path(memory), Path(disk) / f"{pair}")
            found.append(100.0 * (took["spooled"] / took["plain"] - 1.0))
    return found


def step_s(how: str, memory: Path, disk: Path) -> float:
    """Return the median wall time of a step, seconds."""
    out = memory / "stdout.log"
    disk.mkdir(exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(settings.job_path()), spool.FOLDER: str(disk)}
    with out.open("wb") as stdout, (memory / "stderr.log").open("w+b") as stderr:
        subprocess.run([sys.executable, "-c", TRAIN, how], env=env, stdout=stdout, stderr=stderr, check=True)
    said = ""
    while not said.strip():  # the output worker writes it
        said = (memory / "stderr.log").read_text()
        time.sleep(0.05)
    out.unlink()
    return float(said)


# -- a killed machine


class DiskBucket:
    """The part of a bucket that logs use, as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, content: bytes) -> None:
        path = self._folder / name.replace("/", "%")
        beside = path.with_suffix(".tmp")
        beside.write_bytes(content)
        beside.rename(path)

    def create(self, name: str, content: bytes) -> bool:
        self.write(name, content)
        return True

    def send(self, name: str, content: Readable) -> Stored:
        self.write(name, content.read())
        return Stored(len(content), "")

    def read(self, name: str) -> Iterator[bytes]:
        yield (self._folder / name.replace("/", "%")).read_bytes()

    def find(self, name: str) -> Stored | None:
        return None

    def delete(self, name: str) -> None:
        (self._folder / name.replace("/", "%")).unlink(missing_ok=True)


def machine(folder: Path) -> None:
    """A machine: a process that prints, and the agent's thread."""
    there = make_spool(folder / "logs", RUN)
    (folder / "bucket").mkdir()
    one = logs.Uploader(DiskBucket(folder / "bucket"), folder / "logs", Clock(), Log(write=lambda _: None))
    one.start()
    one.follow(logs.Task(RUN, folder))
    env = os.environ | {"PYTHONPATH": str(settings.job_path()), spool.FOLDER: str(there)}
    with (folder / "stdout.log").open("wb") as out:
        subprocess.run([sys.executable, "-c", TALK], env=env, stdout=out, stderr=out, check=True)


def lost_s() -> list[float]:
    """Return how many seconds of output each killed machine took with it."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number in range(KILLS)]
        machines = []
        for folder in folders:
            folder.mkdir()
            code = f"from pathlib import Path; from bench.job import logs; logs.machine(Path({str(folder)!r}))"
            machines.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
        time.sleep(3 * logs.EVERY_S)
        found = []
        for folder, one in zip(folders, machines, strict=True):
            os.killpg(one.pid, signal.SIGKILL)
            killed = time.time()
            one.wait()
            stored = {path.name.replace("%", "/"): path.read_bytes() for path in (folder / "bucket").iterdir()}
            lines = complete_log(stored, RUN.job, RUN.node, RUN.gen).split()
            found.append(killed - float(lines[-1]))
            time.sleep(logs.EVERY_S / KILLS + 0.1)
    return found


if __name__ == "__main__":
    for each in figures():
        print(each)
