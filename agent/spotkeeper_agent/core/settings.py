"""The agent's settings, from the metadata server and the environment.

They do not include job, node and attempt, which only the function assigns.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import spotkeeper
import spotkeeper_agent
from spotkeeper.clock import Clock
from spotkeeper.contract.names import parse_vm_name
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.notice import Instance
from spotkeeper_agent.job import jobhost

NOTICE_S = 120.0  # notice that the templates request (scheduling.preemptionNoticeDuration)
SHORT_NOTICE_S = 30.0  # notice that a cloud gives if the requested duration is refused or not set


class SettingsError(Exception):
    """The machine's setup is wrong. A restart does not fix that."""


@dataclass(frozen=True)
class Settings:
    function: str  # the function's URL, which is also the audience of the identity token
    bucket: str
    storage: str  # root URL of the bucket's API; "": the cloud's default
    uid: str
    name: str
    zone: str
    notice_s: float  # virtual seconds from a preemption notice to the end
    static: bool  # a machine that Pulumi owns, which is never powered off
    root: Path
    boot: str
    fabric: str = ""  # network of the GPUs: rdma, tcpx, tcpxo (Google Cloud), efa (AWS); "": plain TCP
    job_identity: str = ""  # the jobs' identity: a service account's email or a role's ARN; "": none

    @property
    def run(self) -> Path:
        return self.root / "run/spotkeeper"

    @property
    def node(self) -> Path:
        """The folder for the sockets and logs of launcher and saver. The jobs' user may write to it."""
        return self.run / "node"

    @property
    def state(self) -> Path:
        return self.root / "var/lib/spotkeeper"

    @property
    def device(self) -> Path:
        return self.root / "dev/disk/by-id/google-sk-data"

    @property
    def mount(self) -> Path:
        return self.root / "mnt/sk-data"

    @property
    def scratch(self) -> Path:
        """The scratch folder of the job that this machine serves, if the job asks for one (``scratch_gb``)."""
        return self.root / "mnt/sk-scratch"


def read(instance: Instance, root: Path) -> Settings:
    """Return this machine's settings, from its instance's metadata.

    Raises:
        SettingsError: an attribute is missing; the message names it.
    """
    missing = [name for name in ("sk-stack", "sk-function", "sk-bucket") if not instance.attributes.get(name)]
    if missing:
        raise SettingsError(
            f"instance {instance.name}: the metadata lacks {', '.join(missing)}; "
            "was the instance made from this stack's template?"
        )
    run = root / "run/spotkeeper"
    (run / "node").mkdir(parents=True, exist_ok=True)
    jobhost.share(run / "node")
    return Settings(
        function=instance.attributes["sk-function"].rstrip("/"),
        bucket=instance.attributes["sk-bucket"],
        storage=instance.attributes.get("sk-storage", "").rstrip("/"),
        uid=instance.uid,
        name=instance.name,
        zone=instance.zone,
        notice_s=notice_s(instance.attributes.get("sk-notice-s")),
        static=parse_vm_name(instance.name) is None,
        root=root,
        boot=boot_id(run),
        fabric=instance.attributes.get("sk-fabric", ""),
        job_identity=instance.attributes.get("sk-job-identity", ""),
    )


def root_from_env() -> Path:
    return Path(os.environ.get("SPOTKEEPER_ROOT", "/"))


def notice_s(text: str | None) -> float:
    """Return the virtual seconds from a preemption notice to the machine's end, from the attribute ``sk-notice-s``."""
    if text is None:
        return NOTICE_S
    try:
        value = float(text)
    except ValueError:
        return SHORT_NOTICE_S
    return value if 0 < value <= 3600 else SHORT_NOTICE_S


def boot_id(run: Path) -> str:
    """Return this boot's id, which the boot's first agent makes and stores in a file for agents that follow.

    The file is in ``/run``. A VM's reboot empties that folder, but in the one-machine cloud a simulated reboot does
    not. So the file also contains the kernel's boot id and the pid of the process that stands for the VM's init; if one
    differs, a new id is made.
    """
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    this = f"{kernel}/{os.environ.get('SPOTKEEPER_INIT_PID', '1')}"
    path = run / "boot"
    try:
        boot, _, of = path.read_text(errors="replace").strip().partition(" ")
        if of == this and boot:
            return boot
    except OSError:
        pass  # this is the boot's first agent
    boot = uuid.uuid4().hex
    beneath.replace(run, "boot", f"{boot} {this}\n".encode())
    return boot


@dataclass(frozen=True)
class JobPath:
    """The two folders from which a job's Python imports Spotkeeper. In a bundle they are one and the same."""

    agent: Path  # contains spotkeeper_agent (jobs use its launcher)
    library: Path  # contains spotkeeper

    @property
    def launcher(self) -> Path:
        return self.agent / "spotkeeper_agent/launcher"

    @property
    def saver(self) -> Path:
        return self.library / "spotkeeper/train/checkpoint/saver.py"

    def __str__(self) -> str:
        """Return the folders as a ``PYTHONPATH``."""
        return os.pathsep.join(dict.fromkeys((str(self.agent), str(self.library))))


def job_path() -> JobPath:
    """Return the path for jobs: a bundle's folder ``job/``, or the source folders of a checkout."""
    agent, library = (
        Path(spotkeeper_agent.__file__).resolve().parents[1],
        Path(spotkeeper.__file__).resolve().parents[1],
    )
    job = library.parent / "job"
    return JobPath(job, job) if (job / "spotkeeper").is_dir() else JobPath(agent, library)


def templates_path() -> Path:
    """Return ``templates/job`` of the bundle or of this checkout."""
    return Path(spotkeeper_agent.__file__).resolve().parents[2] / "templates/job"


def clock() -> Clock:
    """Return the clock of this process.

    Raises:
        SettingsError: ``SPOTKEEPER_CLOCK`` is invalid.
    """
    try:
        return Clock.from_env()
    except ValueError as error:
        raise SettingsError(str(error)) from None
