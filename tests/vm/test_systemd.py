"""The units on a real systemd: the rendered startup script, the real agent, a disk, a job, an upgrade, a power-off.

One machine for the whole file: its boot takes seconds. Skipped where no such machine can be had.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace
from spotkeeper.local.deploy.config import read_config
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.generation import JobRun, Member, Role, SyncReply

from infra import boot, bundle
from infra.settings import Agent, from_config
from tests.infra.conftest import STACKS
from tests.vm import box as boxes
from tests.vm.fakes import JOB, REPO, document, source, wait_until
from tests.vm.jobs import OBEDIENT

pytestmark = pytest.mark.skipif(bool(boxes.why_not()), reason=boxes.why_not() or "")

UID = "1001"
PYTHON = "/usr/bin/python3"
REACH = "import socket, sys; s = socket.socket(); s.settimeout(3); print(s.connect_ex((sys.argv[1], int(sys.argv[2]))))"


@dataclass
class Stage:
    box: boxes.Box
    cloud: boxes.BoxedCloud
    run: JobRun
    bundle: str

    def member(self, *, disk: bool) -> Member:
        boot_id = self.box.run("cut -d' ' -f1 /run/spotkeeper/boot").stdout.strip()
        return Member(0, 1, UID, boot_id, "127.0.0.1", 1, disk)

    def train(self, ver: int, gen: int, *, disk: bool) -> None:
        doc = document(ver, gen, (self.member(disk=disk),), port=29500)
        disk_number = 0 if disk else None
        reply = SyncReply(Role.MEMBER, JOB, 0, 1, doc=doc, run=self.run, disk=disk_number, bundle=self.bundle)
        self.cloud.reply(UID, reply)

    def log(self) -> str:
        return self.box.run("journalctl --no-pager -o cat -u 'spotkeeper*'").stdout

    def worker(self, gen: int) -> int:
        """The job's process, by the pid that the machine itself knows; 0: none runs."""
        group = f"/sys/fs/cgroup{self.box.show('spotkeeper-job', 'ControlGroup')}"
        found = self.box.run(f"cat {group}/launcher-*/gen-{gen}/cgroup.procs", check=False).stdout.split()
        return int(found[-1]) if found else 0


def another(bundle_: bytes) -> bytes:
    """The same agent with another hash."""
    buffer = io.BytesIO(bundle_)
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        tar.addfile(tarfile.TarInfo("site/another"), io.BytesIO())
    return buffer.getvalue()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("systemd")
    box = boxes.Box(folder / "box")
    try:
        cloud = boxes.BoxedCloud(box, UID)
        settings = from_config(read_config(STACKS / "Pulumi.local.yaml", "http://127.0.0.1:9"), "local")
        settings = replace(settings, agent=Agent(interpreter=PYTHON))
        made = bundle.bundle(folder, "3.11")
        cloud.objects[f"bundles/{made.sha256}.tar"] = made.path.read_bytes()
        cloud.instance(UID, f"sk-local-{JOB}-r0000-a1")
        attributes = cloud.instances[UID]["attributes"] | {"sk-bundle": made.sha256}
        cloud.instance(UID, "", attributes=attributes)
        light = (REPO / "tests/vm/light_launcher.py").read_text()
        box.write("/opt/light.py", light)
        box.write("/opt/light-python", f'#!/bin/sh\nexec {PYTHON} -S /opt/light.py "$3"\n', 0o755)
        run = JobRun("a-job", ("train.py",), source(cloud, {"train.py": OBEDIENT}), python="/opt/light-python")
        script = boot.render(settings).startup
        box.write("/opt/startup.sh", script, 0o755)
        done = box.run("/opt/startup.sh", check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield Stage(box, cloud, run, made.sha256)
    finally:
        box.close()


def test_the_agent_is_up_without_rights_and_the_job_is_another_user(stage: Stage) -> None:
    stage.cloud.wait_sync(UID)
    for unit in ("spotkeeper", "spotkeeper-root", "spotkeeper-job"):
        assert stage.box.show(unit, "ActiveState") == "active", stage.log()
    agent = stage.box.show("spotkeeper", "MainPID")
    status = stage.box.run(f"cat /proc/{agent}/status").stdout
    assert "CapEff:\t0000000400000000" in status, "reading the kernel's log, and nothing else"
    assert "NoNewPrivs:\t1" in status
    owner = stage.box.run(f"stat -c %U /proc/{stage.box.show('spotkeeper-job', 'MainPID')}").stdout.strip()
    assert owner == "spotkeeper-job"


def test_the_jobs_user_cannot_reach_the_machines_credentials_but_for_dns(stage: Stage) -> None:
    stage.box.write("/opt/reach.py", REACH)

    def reach(host: str, port: int, *, in_unit: bool) -> str:
        command = f"{PYTHON} /opt/reach.py {host} {port}"
        if in_unit:
            group = f"/sys/fs/cgroup{stage.box.show('spotkeeper-job', 'ControlGroup')}/try"
            command = f"mkdir -p {group}; echo $$ >{group}/cgroup.procs; {command}"
        return stage.box.run(command).stdout.strip()

    refused, nobody = "1", "111"  # EPERM; ECONNREFUSED: it was asked
    for host, port, inside in (
        ("169.254.169.254", 80, refused), ("169.254.169.254", 443, refused), ("169.254.169.254", 53, nobody),
        ("127.0.0.1", 9, nobody),
    ):  # fmt: skip
        assert reach(host, port, in_unit=True) == inside, (host, port)
    assert reach("169.254.169.254", 80, in_unit=False) == "0", "the agent needs it"
    mapped = "import socket; s = socket.socket(socket.AF_INET6); print(s.connect_ex(('::ffff:169.254.169.254', 80)))"
    stage.box.write("/opt/reach.py", mapped)
    assert reach("", 0, in_unit=True) == refused
    asks = "import socket; s = socket.socket(type=2); print(s.connect_ex(('169.254.169.254', 53)))"
    stage.box.write("/opt/reach.py", asks)
    assert reach("", 0, in_unit=True) == "0"


def test_the_root_helper_serves_the_agent_alone(stage: Stage, tmp_path: Path) -> None:
    ask = (
        "import json, socket, sys\ns = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect('/run/spotkeeper-root/socket')\ns.send(sys.argv[1].encode())\nprint(s.recv(4096).decode())\n"
    )
    stage.box.write("/opt/ask.py", ask)
    refused = stage.box.run(f"{PYTHON} /opt/ask.py '{{}}'", user="spotkeeper-job", check=False)
    assert "PermissionError" in refused.stderr
    wrong = json.loads(stage.box.run(f'{PYTHON} /opt/ask.py \'{{"op": "shell"}}\'', user="spotkeeper").stdout)
    assert wrong == {"ok": False, "why": "request", "error": "op is none of mount, unmount, power-off"}


def test_a_job_trains_on_the_disk_and_outlives_its_agent(stage: Stage, tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(192 << 20)
    with boxes.block_device(stage.box, image, "google-sk-data"):
        stage.cloud.reply(UID, SyncReply(Role.STANDBY, JOB, 0, 1, run=stage.run, disk=0))
        stage.cloud.wait_fact(UID, Kind.ATTACHED, timeout_s=20)
        assert stage.box.run("stat -c '%U %G %a' /mnt/sk-data").stdout == "spotkeeper spotkeeper-job 775\n"
        stage.cloud.wait_fact(UID, Kind.HELLO, timeout_s=20)
        stage.train(1, 1, disk=True)
        worker = wait_until(lambda: stage.worker(1))
        assert stage.box.run(f"stat -c %U /proc/{worker}").stdout == "spotkeeper-job\n"
        agent = stage.box.show("spotkeeper", "MainPID")
        stage.box.run("systemctl restart spotkeeper")
        assert stage.box.show("spotkeeper", "MainPID") != agent
        wait_until(lambda: "job.adopt" in stage.log())
        assert stage.worker(1) == worker, "an agent's restart is no affair of the job's"
        # The stack's agents are another bundle from now on.
        other = another(stage.cloud.objects[f"bundles/{stage.bundle}.tar"])
        stage.bundle = hashlib.sha256(other).hexdigest()
        stage.cloud.objects[f"bundles/{stage.bundle}.tar"] = other
        agent = stage.box.show("spotkeeper", "MainPID")
        stage.train(1, 1, disk=True)
        current = "readlink /var/lib/spotkeeper/bundle/current"
        wait_until(lambda: stage.bundle in stage.box.run(current).stdout)
        assert stage.bundle in stage.box.run(f"tr '\\0' '\\n' </proc/{agent}/environ").stdout, "the same process"
        assert stage.worker(1) == worker, "nor is an upgrade"
        # Another generation: the group of the first one ends, and nothing else.
        host = stage.box.show("spotkeeper-job", "MainPID")
        stage.train(2, 2, disk=True)
        wait_until(lambda: stage.worker(2))
        assert not stage.worker(1)
        assert stage.box.show("spotkeeper-job", "MainPID") == host
        # The machine goes down while it trains: the agent goes first, has the job save, and lets go of the disk.
        stage.box.run(f'{PYTHON} /opt/ask.py \'{{"op": "power-off"}}\'', user="spotkeeper")
        released = stage.cloud.wait_fact(UID, Kind.RELEASED, 2, timeout_s=25)
        assert int(released.value) > 0, "the step of the save that the shutdown asked for"
        stage.cloud.wait_fact(UID, Kind.FREED, timeout_s=25)
        wait_until(stage.box.ended, 30)
