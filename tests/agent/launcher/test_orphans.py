"""Nothing of a job outlives its launcher, also where the guard above it is killed with it and nobody has a cgroup."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import JobRun
from spotkeeper_agent.launcher import process
from tests.agent.fakes import Fake, Machine, alive, document, environ_of, source, wait_until

# A daemon as the book has it: two forks, a session of its own, nothing of our marks.
LEAVES = """
import os, subprocess, time
run = os.environ["SPOTKEEPER_RUN"]
stays = f"echo $$ >{run}/daemon.new; mv {run}/daemon.new {run}/daemon; exec sleep 981"
daemon = ["env", "-i", f"PATH={os.environ['PATH']}", "setsid", "sh", "-c", 'setsid sh -c "$0" & exit', stays]
subprocess.run(daemon, check=True)
while True:
    time.sleep(0.1)
"""

ALL = [*itertools.permutations(("guard", "launcher")), *itertools.permutations(("agent", "guard", "launcher"))]
SOME = {("launcher", "guard"), ("guard", "agent", "launcher")}  # of each kind one; all of them: make recovery
ORDERS = [order if order in SOME else pytest.param(order, marks=pytest.mark.matrix) for order in ALL]


@pytest.mark.parametrize("order", ORDERS, ids=map("-".join, ALL))
def test_a_daemon_without_environment_ends_in_any_combination_of_kills(
    fake: Fake, machine: Callable[..., Machine], order: tuple[str, ...]
) -> None:
    """All at once: it fell to init, and went on beside whatever the machine trained next."""
    vm = machine()
    run = JobRun("job", ("train.py",), source(fake, {"train.py": LEAVES}), python=vm.light_python())
    vm.stand_by(run)
    vm.start()
    fake.wait_sync(vm.uid)
    doc = document(1, 1, (vm.member(),))
    vm.serve(doc, run)
    file = vm.run_folder / doc.job / "1/daemon"
    wait_until(file.exists)
    daemon = int(file.read_text())
    [launcher] = [json.loads(line)["pid"] for line in vm.log().splitlines() if '"launcher.up"' in line]
    assert vm.agent is not None
    pids = {"launcher": launcher, "guard": parent_of(launcher), "agent": vm.agent.pid}
    for pid in {pids[victim] for victim in order}:
        os.kill(pid, signal.SIGSTOP)  # so that it does nothing about the others before it is its turn
    for victim in order:
        os.kill(pids[victim], signal.SIGKILL)
    if "agent" in order:
        vm.agent.wait()
        vm.start()
    assert fake.wait_fact(vm.uid, Kind.EXIT, 1).value == "137"
    assert not alive(daemon), "gone before anything else may begin"
    doc = document(2, 2, doc.members)
    vm.serve(doc, run)
    wait_until((vm.run_folder / doc.job / "2/daemon").exists)
    vm.kill()
    assert process.sweep(vm.run_folder / "node", set()), "the end of the machine"


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def test_a_daemon_cannot_drop_its_tag_and_each_folder_has_its_own(tmp_path: Path) -> None:
    mine, other = tmp_path / "run", tmp_path / "other"
    nameless = ["env", "-i", "setsid", "sh", "-c", "setsid sleep 982 >/dev/null & echo $!"]
    pids = []
    for folder in (mine, other):
        shell = subprocess.Popen(["sh", "-c", 'read line; exec "$@"', "sh", *nameless], stdin=-1, stdout=-1, text=True)
        process.tag(shell.pid, folder)
        pids.append(int(shell.communicate("go\n", timeout=20)[0]))
    assert not any(b"SPOTKEEPER" in entry for pid in pids for entry in environ_of(pid))
    assert process.sweep(mine, set(pids)) == 0, "what is to be kept"
    assert process.sweep(mine, set()) == 1
    wait_until(lambda: not alive(pids[0]), 10)
    assert alive(pids[1])
    assert process.sweep(other, set()) == 1
