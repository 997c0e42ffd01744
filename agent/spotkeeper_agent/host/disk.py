"""The data disk: finds it by its id, mounts and unmounts it, and with it a job's scratch volume.

The root helper (``roothelper.py``) does the parts that need root; an agent that runs as root calls the functions of
``roothelper.py`` itself. In the one-machine cloud a disk is a folder, and a symbolic link to it stands for the mount.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from enum import Enum
from pathlib import Path

from spotkeeper_agent.core.log import Log
from spotkeeper_agent.host import roothelper
from spotkeeper_agent.host.systemd import has_units, request_root

BUSY_TRIES = 20
BUSY_S = 0.25  # real
LOCAL_VOLUME = "scratch"  # in the job's folder: a scratch folder of the one-machine cloud


class Why(str, Enum):
    """The reason why a disk cannot be used. The function shows the value to the user."""

    PROBE = "probe"  # the disk's content cannot be determined
    FOREIGN = "foreign"  # it holds data that is not Spotkeeper's
    MKFS = "mkfs"
    MOUNT = "mount"
    WRITE = "write"  # a fetched checkpoint cannot be written to it
    UNMOUNT = "unmount"
    SCRATCH = "scratch"  # the job's scratch volume cannot be made or mounted: no room, no loop device
    MISSING = "missing"  # attached according to the cloud, but not visible on the machine


class DiskError(Exception):
    """The disk cannot be used now. The caller tries again, though some causes need a person's help."""

    def __init__(self, message: str, why: Why) -> None:
        super().__init__(message)
        self.why = why


EBS = re.compile(r"nvme-Amazon_Elastic_Block_Store_(vol[0-9a-f]{8,17})(-part[0-9]+)?\Z")


def ebs_volume(by_id: Path) -> Path | None:
    """Return the data disk on EC2: the only EBS volume without partitions; None if there is none or more than one."""
    try:
        links = [found for entry in by_id.iterdir() if (found := EBS.match(entry.name))]
    except OSError:
        return None
    parted = {found[1] for found in links if found[2]}
    whole = [found[0] for found in links if found[1] not in parted]
    return by_id / whole[0] if len(whole) == 1 else None


class Disk:
    """One device and its mount point. Its methods block, so they run in the helper thread.

    ``scratch``: mount point of a job's scratch volume, which lies on the disk.
    """

    def __init__(self, device: Path, mount: Path, log: Log, scratch: Path | None = None) -> None:
        self._named = device
        self.point = mount
        self.scratch = scratch or mount.with_name("sk-scratch")
        self._log = log

    @property
    def device(self) -> Path:
        """The disk's link in ``/dev/disk/by-id``: the configured one if it exists, or else :func:`ebs_volume`."""
        return self._named if self._named.exists() else ebs_volume(self._named.parent) or self._named

    def present(self) -> bool:
        return self.device.exists()

    def mounted(self) -> bool:
        if self.point.is_symlink():
            return self.point.exists()
        return self.point.is_dir() and os.path.ismount(self.point)

    def mount(self) -> None:
        """Mount the disk at ``point``, after formatting it if it is blank.

        Raises:
            DiskError: the disk has content other than ext4, or a command failed.
        """
        if self.mounted():
            return
        if self.device.is_dir():
            self.point.parent.mkdir(parents=True, exist_ok=True)
            self.point.unlink(missing_ok=True)  # may link to a disk that has been detached
            self.point.symlink_to(self.device.resolve(), target_is_directory=True)
        else:
            self._mount_block()
        self._log("disk.mounted", point=str(self.point), free_mb=self.free_bytes() >> 20)

    def _mount_block(self) -> None:
        try:
            if has_units():
                request_root("mount", disk=self.device.name)
                if not self.mounted():
                    raise DiskError(f"{self.point}: mounted, but not in the agent's mount namespace", Why.MOUNT)
            elif roothelper.mount(self.device, self.point):
                self._log("disk.formatted", device=str(self.device))
        except roothelper.RefusedError as error:
            raise _disk_error(error, Why.MOUNT) from None

    def mount_scratch(self, job: str, gb: int) -> bool:
        """Mount the job's scratch volume of ``gb`` GB at ``scratch``; return whether it is new, so that it is empty.

        In the one-machine cloud it is a folder, whose size nothing bounds. Call this only while the disk is mounted.

        Raises:
            DiskError: the disk has no room for it, or a command failed.
        """
        try:
            if self.point.is_symlink():
                made = self._link_scratch(self.point.resolve() / job / LOCAL_VOLUME)
            elif has_units():
                made = request_root("scratch", job=job, gb=str(gb))
            else:
                made = roothelper.mount_scratch(self.point, job, gb, self.scratch, os.getegid())
        except roothelper.RefusedError as error:
            raise _disk_error(error, Why.SCRATCH) from None
        self._log("disk.scratch", point=str(self.scratch), gb=gb, new=made)
        return made

    def _link_scratch(self, folder: Path) -> bool:
        made = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        self.scratch.unlink(missing_ok=True)
        self.scratch.symlink_to(folder, target_is_directory=True)
        return made

    def unmount(self) -> None:
        """Unmount the scratch volume and the disk, so that no process of this machine can write to them.

        Raises:
            DiskError: a process still uses one of them.
        """
        if self.scratch.is_symlink():
            self.scratch.unlink()
        if self.point.is_symlink():
            self.point.unlink()
            return
        for _ in range(BUSY_TRIES):
            if not self.mounted():
                return
            try:
                # Never lazily: after a lazy unmount, open files could still write once FREED is reported.
                if has_units():
                    request_root("unmount")
                else:
                    if os.path.ismount(self.scratch):
                        roothelper.command("unmount", "umount", str(self.scratch))
                    roothelper.command("unmount", "umount", str(self.point))
            except roothelper.RefusedError as error:
                last = _disk_error(error, Why.UNMOUNT)
                time.sleep(BUSY_S)
        if self.mounted():
            raise last

    def free_bytes(self) -> int:
        """Return the free space in bytes, 0 if the disk is not mounted."""
        try:
            return shutil.disk_usage(self.point).free
        except OSError:
            return 0


def _disk_error(error: roothelper.RefusedError, otherwise: Why) -> DiskError:
    words = {why.value for why in Why}
    return DiskError(str(error), Why(error.why) if error.why in words else otherwise)
