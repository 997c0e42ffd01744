"""What the agent is told from outside: the metadata server's constants and three environment variables.

It reads; it decides nothing. Job, rank and attempt are never read here: only the
function, from the record, says what a machine is.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import spotkeeper
from spotkeeper.clock import Clock
from spotkeeper.spec.names import parse_vm_name
from spotkeeper.vm.metadata import Instance

NOTICE_S = 120.0  # what the templates ask for (scheduling.preemptionNoticeDuration)
SHORT_NOTICE_S = 30.0  # what a cloud gives where that is refused or not set


class SettingsError(Exception):
    """The machine was set up wrongly; a restart cannot help."""


@dataclass(frozen=True)
class Settings:
    stack: str
    function: str  # its URL: where to ask, and the audience of our identity token
    bucket: str
    storage: str  # root of the bucket's API; "": the cloud's own
    uid: str
    name: str
    zone: str
    address: str
    notice_s: float  # virtual seconds from a preemption notice to the end
    static: bool  # a node that Pulumi owns: it is never powered off
    root: Path
    boot: str
    job_identity: str = ""  # whom jobs are: a service account's address or a role's ARN; "": nobody

    @property
    def run(self) -> Path:
        return self.root / "run/spotkeeper"

    @property
    def state(self) -> Path:
        return self.root / "var/lib/spotkeeper"

    @property
    def device(self) -> Path:
        return self.root / "dev/disk/by-id/google-sk-data"

    @property
    def mount(self) -> Path:
        return self.root / "mnt/sk-data"


def read(instance: Instance, root: Path) -> Settings:
    """Settings of this machine.

    Raises:
        SettingsError: an attribute is missing, with its name.
    """
    missing = [name for name in ("sk-stack", "sk-function", "sk-bucket") if not instance.attributes.get(name)]
    if missing:
        raise SettingsError(
            f"instance {instance.name}: metadata attribute {', '.join(missing)} not set; "
            "was it made from this stack's template?"
        )
    run = root / "run/spotkeeper"
    run.mkdir(parents=True, exist_ok=True)
    return Settings(
        stack=instance.attributes["sk-stack"],
        function=instance.attributes["sk-function"].rstrip("/"),
        bucket=instance.attributes["sk-bucket"],
        storage=instance.attributes.get("sk-storage", "").rstrip("/"),
        uid=instance.uid,
        name=instance.name,
        zone=instance.zone,
        address=instance.address,
        notice_s=notice_s(instance.attributes.get("sk-notice-s")),
        static=parse_vm_name(instance.name) is None,
        root=root,
        boot=boot_id(run),
        job_identity=instance.attributes.get("sk-job-identity", ""),
    )


def root_from_env() -> Path:
    return Path(os.environ.get("SPOTKEEPER_ROOT", "/"))


def notice_s(text: str | None) -> float:
    """Virtual seconds that a preemption's notice gives, by the attribute ``sk-notice-s``."""
    if text is None:
        return NOTICE_S
    try:
        value = float(text)
    except ValueError:
        return SHORT_NOTICE_S
    return value if 0 < value <= 3600 else SHORT_NOTICE_S


def boot_id(run: Path) -> str:
    """An id of this boot that a restarted agent finds again: ``/run`` does not survive a reboot.

    The kernel's id and the pid of the VM's init stand beside it, for a local cloud whose
    ``run`` is an ordinary folder.
    """
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    this = f"{kernel}/{os.environ.get('SPOTKEEPER_INIT_PID', '1')}"
    path = run / "boot"
    try:
        boot, _, of = path.read_text(errors="replace").strip().partition(" ")
        if of == this and boot:
            return boot
    except OSError:
        pass  # the first agent of this boot
    boot = uuid.uuid4().hex
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{boot} {this}\n")
    temporary.replace(path)
    return boot


def job_path() -> Path:
    """The folder to put on the job's path: the bundle's ``job/``, or this checkout."""
    site = Path(spotkeeper.__file__).resolve().parent.parent
    return site.parent / "job" if (site.parent / "job/spotkeeper").is_dir() else site


def templates_path() -> Path:
    """``templates/job`` of the bundle, or of this checkout."""
    return Path(spotkeeper.__file__).resolve().parents[2] / "templates/job"


def clock() -> Clock:
    """The clock of this process.

    Raises:
        SettingsError: the variable makes no sense.
    """
    try:
        return Clock.from_env()
    except ValueError as error:
        raise SettingsError(str(error)) from None
