"""A box on which the rendered startup script has run, with a cloud and a job's source: for the tests of the units.

One machine for a whole file of tests: its boot takes seconds.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from infra import boot, bundle
from infra.settings.model import Agent
from infra.settings.read import from_config
from spotkeeper.contract.generation import JobRun, Member, Role, SyncReply
from spotkeeper.local.deploy.config import read_config
from tests.agent.fakes import JOB, REPO, document, source, wait_until
from tests.agent.jobs import OBEDIENT
from tests.agent.systemd import box as boxes
from tests.infra.conftest import STACKS

UID = "1001"
PYTHON = "/usr/bin/python3"


@dataclass
class Stage:
    box: boxes.Box
    cloud: boxes.BoxedCloud
    run: JobRun
    bundle: str

    def member(self, *, disk: bool) -> Member:
        boot_id = self.box.run("cut -d' ' -f1 /run/spotkeeper/boot").stdout.strip()
        return Member(0, 1, UID, boot_id, "127.0.0.1", 1, disk)

    def train(self, ver: int, gen: int, *, disk: bool, job: str = JOB, run: JobRun | None = None) -> None:
        """Have it run this generation: of ``run``, where that is another than the stage's own job."""
        doc = replace(document(ver, gen, (self.member(disk=disk),), port=29500), job=job)
        disk_number = 0 if disk else None
        reply = SyncReply(Role.MEMBER, job, 0, 1, doc=doc, run=run or self.run, disk=disk_number, bundle=self.bundle)
        self.cloud.reply(UID, reply)

    def log(self) -> str:
        return self.box.run("journalctl --no-pager -o cat -u 'spotkeeper*'").stdout

    def worker(self, gen: int) -> int:
        """The job's process, by the pid that the machine itself knows; 0: none runs."""
        group = f"/sys/fs/cgroup{self.box.show('spotkeeper-job', 'ControlGroup')}"
        found = self.box.run(f"cat {group}/launcher-*/gen-{gen}/cgroup.procs", check=False).stdout.split()
        return int(found[-1]) if found else 0

    def running(self, gen: int) -> int:
        """The same, once one runs."""
        try:
            return int(wait_until(lambda: self.worker(gen)))
        except AssertionError as error:
            raise AssertionError(f"generation {gen} does not run: {error}: {self.log()}") from None

    def job(self, files: dict[str, str], *command: str, job: str = JOB) -> JobRun:
        """A job of these files, run by the machine's own Python without torch."""
        sha256 = source(self.cloud, files)
        self.cloud.objects[f"jobs/{job}/source/{sha256}"] = self.cloud.objects[f"jobs/{JOB}/source/{sha256}"]
        return JobRun("a-job", command, sha256, python="/opt/light-python")


def another(bundle_: bytes) -> bytes:
    """The same agent with another hash."""
    buffer = io.BytesIO(bundle_)
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        tar.addfile(tarfile.TarInfo("site/another"), io.BytesIO())
    return buffer.getvalue()


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    box = boxes.Box(folder / "box")
    try:
        cloud = boxes.BoxedCloud(box, UID)
        settings = from_config(read_config(STACKS / "Pulumi.local.yaml", "http://127.0.0.1:9"), "local")
        settings = replace(settings, agent=Agent(interpreter=PYTHON))
        made = bundle.bundle(folder, "3.11")
        cloud.objects[f"bundles/{made.sha256}.tar"] = made.path.read_bytes()
        cloud.instance(UID, f"sk-local-{JOB}-n0000-a1")
        attributes = cloud.instances[UID]["attributes"] | {"sk-bundle": made.sha256}
        cloud.instance(UID, "", attributes=attributes)
        light = (REPO / "tests/agent/light_launcher.py").read_text()
        box.write("/opt/light.py", light)
        box.write("/opt/light-python", f'#!/bin/sh\nexec {PYTHON} -S /opt/light.py "$4"\n', 0o755)
        run = JobRun("a-job", ("train.py",), source(cloud, {"train.py": OBEDIENT}), python="/opt/light-python")
        script = boot.render(settings).startup
        box.write("/opt/startup.sh", script, 0o755)
        done = box.run("/opt/startup.sh", check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield Stage(box, cloud, run, made.sha256)
    finally:
        box.close()
