"""The process that carries a worker's output: somebody kills it, and the job goes on and its log with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spotkeeper.vm import settings

from tests.vm.fakes import wait_until

ROOT = Path(__file__).parents[2]

WORKER = """
import os, signal, sys
from pathlib import Path
from spotkeeper.vm.launcher import output
from spotkeeper.vm.launcher.process import become_subreaper
from tests.vm.fakes import alive, children_of, wait_until

def carrier():
    parents = [child for child in children_of(os.getpid()) if output.is_carrier(child)]
    return next((child for parent in parents for child in children_of(parent)), None)

become_subreaper()  # as the launcher: the carrier falls to it
output.bound()
log = Path(sys.argv[1])
for number in range(3):
    victim = wait_until(carrier)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not alive(victim))
    print("line", number, "x" * 100_000, flush=True)  # more than a pipe holds
    wait_until(lambda: log.read_text().count("x\\n") == number + 1)  # what a carrier holds when it is killed is lost
print("the last line", flush=True)
"""


def test_a_carrier_that_is_killed_is_replaced_and_nobody_who_prints_notices(tmp_path: Path) -> None:
    """Each print raised BrokenPipeError, and the job had crashed."""
    log = tmp_path / "log"
    env = os.environ | {"PYTHONPATH": f"{settings.job_path()}:{ROOT}"}
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", WORKER, str(log)],
            stdout=out,
            stderr=subprocess.PIPE,
            env=env,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()
    wait_until(lambda: log.read_text().endswith("the last line\n"))
    lines = log.read_text().splitlines()
    assert [line[:6] for line in lines] == ["line 0", "line 1", "line 2", "the la"]
    assert all(len(line) == len("line 0 ") + 100_000 for line in lines[:3])
