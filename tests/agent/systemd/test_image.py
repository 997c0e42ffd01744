"""A job in a container image, by the real podman, in the real jobs' unit.

podman is this machine's, or what ``SPOTKEEPER_PODMAN`` names (``docs/testing.md``).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, JobRun, Role, SyncReply
from tests.agent.fakes import JOB, document, wait_until
from tests.agent.jobs import OBEDIENT
from tests.agent.systemd import box as boxes
from tests.agent.systemd.registry import Registry
from tests.agent.systemd.stage import PYTHON, UID, Stage

UNPACKED = os.environ.get("SPOTKEEPER_PODMAN", "")  # a folder with usr/bin/podman and what it needs


def why_not() -> str:
    if why := boxes.why_not():
        return why
    if not Path("/usr/lib/python3.11").is_dir() or os.uname().machine != "x86_64":
        return "the image is made of Debian 12's Python"
    if not UNPACKED and not all(map(shutil.which, ("podman", "crun", "conmon"))):
        return "needs podman (docs/testing.md)"
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

# In the image, in place of torch: starts the worker that torchrun would.
LIGHT = """#!/usr/bin/python3.11
import os, sys
boot = next(index for index, word in enumerate(sys.argv) if word.endswith("/boot.py"))
env = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.execve("/usr/bin/python3.11", ["python3.11", "-S", *sys.argv[boot:]], env)
"""
TELLS = """
import json, os, socket, sys
run, told = os.environ["SPOTKEEPER_RUN"], {}
with socket.socket() as sock:
    sock.settimeout(3)
    told["metadata"] = sock.connect_ex(("169.254.169.254", 80))
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as saver:
    told["saver"] = saver.connect_ex(os.environ["SPOTKEEPER_SAVER"])
told["image"] = os.environ["OF_IMAGE"], os.path.exists("/usr/bin/env"), os.path.exists("/opt/python")
told["uid"] = os.getuid(), open("/proc/self/uid_map").read().split()
told["variables"] = os.environ["PATH"], os.environ["HOME"], os.environ["MINE"]
told["writes"] = []
for folder in (os.environ["HOME"], os.environ["SPOTKEEPER_OUTPUT"], "/tmp", "/dev/shm", "/"):
    with open(folder + "/written", "w") as file:
        told["writes"].append(folder)
told["ppid"] = os.getppid()
with open(run + "/told.json.new", "w") as file:
    json.dump(told, file)
os.rename(run + "/told.json.new", run + "/told.json")
"""
STACKS = """
import socket
with socket.socket(socket.AF_UNIX) as launcher:
    launcher.connect("/run/spotkeeper/node/launcher.sock")
    launcher.send(b'{"op": "stacks", "gen": 3}\\n')
    launcher.recv(99)
"""


@dataclass
class Contained:
    stage: Stage
    run: JobRun

    def train(self, gen: int, *command: str) -> Path:
        """Have this generation run; its run folder."""
        self.stage.train(gen, gen, disk=False, run=replace(self.run, command=("train.py", *command)))
        return self.stage.box.path(f"/run/spotkeeper/{JOB}/{gen}")

    def worker(self, folder: Path) -> int:
        """The pid of the job's process, once it trains."""
        wait_until(lambda: "hello" in "".join(path.read_text() for path in folder.glob("*.log")), 30)
        return int((folder / "pid.0").read_text())

    def log(self, gen: int) -> str:
        logs = f"cat /run/spotkeeper/node/launcher.log /run/spotkeeper/{JOB}/{gen}/*.log"
        return self.stage.log() + self.stage.box.run(logs, check=False).stdout


@pytest.fixture(scope="module")
def contained(stage: Stage) -> Iterator[Contained]:
    box = stage.box
    if UNPACKED:
        copy = 'tar -cC "$0" . | tar -xC "$1" --keep-directory-symlink'
        subprocess.run(["sh", "-c", copy, UNPACKED, box.path("/")], check=True)
        box.run("ldconfig; rm -f /usr/bin/fuse-overlayfs")
    # What the box's own files lie on cannot be under another overlay.
    box.run("mount -t tmpfs jobs /var/lib/spotkeeper-job; chown spotkeeper-job: /var/lib/spotkeeper-job")
    registry = Registry({"opt/python": LIGHT})
    server = box.listening(registry.server)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    host = f"127.0.0.1:{server.server_port}"
    box.write("/etc/containers/registries.conf.d/test.conf", f'[[registry]]\nlocation = "{host}"\ninsecure = true\n')
    script = f"import sys\nif sys.argv[1:2] != ['tell']:{_indented(OBEDIENT)}\nelse:{_indented(TELLS)}"
    job = stage.job({"train.py": script}, "train.py")
    yield Contained(
        stage, replace(job, image=registry.reference(server), python="/opt/python", env={"MINE": "1"}, nproc=1)
    )
    server.shutdown()
    server.server_close()


def _indented(script: str) -> str:
    return "".join(f"\n    {line}" for line in script.strip().splitlines())


def test_a_job_runs_in_its_image_and_stops_and_ends_as_without(contained: Contained) -> None:
    stage = contained.stage
    stage.cloud.wait_sync(UID)
    folder = contained.train(1, "tell")
    try:
        exit_ = stage.cloud.wait_fact(UID, Kind.EXIT, 1, timeout_s=60)
    except AssertionError as error:
        raise AssertionError(f"{error}: {contained.log(1)}") from None
    assert exit_.value == "0", contained.log(1)
    log = stage.log()
    assert log.index('"launcher.up"') < log.index('"kind": "hello"'), "while it pulls, its predecessor may train on"
    told = json.loads((folder / "told.json").read_text())
    uid = int(stage.box.run("id -u spotkeeper-job").stdout)
    assert told["metadata"] == 1, "the fence refuses the machine's credentials: EPERM"
    assert told["saver"] == 0
    assert told["image"] == ["1", False, True]
    assert told["uid"] == [0, ["0", str(uid), "1"]], "one user id, and outside it is the job's user"
    assert told["variables"] == ["/usr/bin:/bin", f"/var/lib/spotkeeper-job/{JOB}", "1"]
    assert len(told["writes"]) == 5
    # Killed for a newer generation: nothing of the older one is left.
    worker = contained.worker(contained.train(2))
    assert stage.box.run(f"ls /proc/{worker}", check=False).returncode == 0
    worker, before = contained.worker(contained.train(3)), worker
    assert stage.box.run(f"ls /proc/{before}", check=False).returncode
    group = stage.box.run(f"cat /proc/{worker}/cgroup").stdout
    assert group.rstrip().endswith("/gen-3") and stage.box.show("spotkeeper-job", "ControlGroup") in group
    stage.box.run(f"{PYTHON} -", stdin=STACKS)
    stacks = stage.box.path(f"/run/spotkeeper/{JOB}/3/stacks.log")
    assert "train.py" in wait_until(lambda: stacks.exists() and stacks.read_text(), 20)
    # It saves, stops and is released.
    stop = document(4, 3, (stage.member(disk=False),), DocState.SAVE_STOP, port=29500)
    stage.cloud.reply(UID, SyncReply(Role.MEMBER, JOB, 0, 1, doc=stop, run=contained.run, bundle=stage.bundle))
    assert int(stage.cloud.wait_fact(UID, Kind.RELEASED, 3, timeout_s=20).value) > 0
