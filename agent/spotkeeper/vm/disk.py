"""The data disk: found by its id, mounted, unmounted for good.

What needs root is done by the root helper (``roothelper.py``), or by its functions where the agent is root itself.
In the local cloud a disk is a folder, and a symbolic link stands for the mount.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from enum import Enum
from pathlib import Path

from spotkeeper.vm import roothelper, roothelper_client
from spotkeeper.vm.log import Log

BUSY_TRIES = 20
BUSY_S = 0.25  # real


class Why(str, Enum):
    """What became of a disk, in one word: the function tells it to the user."""

    PROBE = "probe"  # what it holds cannot be told
    FOREIGN = "foreign"  # it holds something that is not ours to touch
    MKFS = "mkfs"
    MOUNT = "mount"
    WRITE = "write"  # it does not take what is fetched for it
    UNMOUNT = "unmount"
    MISSING = "missing"  # it was attached, the cloud says, but the machine does not have it


class DiskError(Exception):
    """The disk cannot be used; a person has to look, or it is tried again."""

    def __init__(self, message: str, why: Why) -> None:
        super().__init__(message)
        self.why = why


EBS = re.compile(r"nvme-Amazon_Elastic_Block_Store_(vol[0-9a-f]{8,17})(-part[0-9]+)?\Z")


def ebs_volume(by_id: Path) -> Path | None:
    """The one attached EBS volume without partitions, which a boot disk has; None where there is none, or a choice."""
    try:
        links = [found for entry in by_id.iterdir() if (found := EBS.match(entry.name))]
    except OSError:
        return None
    parted = {found[1] for found in links if found[2]}
    whole = [found[0] for found in links if found[1] not in parted]
    return by_id / whole[0] if len(whole) == 1 else None


class Disk:
    """One device and where it goes. Calls block: run them in the helper thread."""

    def __init__(self, device: Path, mount: Path, log: Log) -> None:
        self._named = device
        self.point = mount
        self._log = log

    @property
    def device(self) -> Path:
        """Its link under ``/dev/disk/by-id``. EC2 has no name for it there: it is the volume that is no boot disk."""
        return self._named if self._named.exists() else ebs_volume(self._named.parent) or self._named

    def present(self) -> bool:
        return self.device.exists()

    def mounted(self) -> bool:
        if self.point.is_symlink():
            return self.point.exists()
        return self.point.is_dir() and os.path.ismount(self.point)

    def mount(self) -> None:
        """Make the disk's content appear at ``point``.

        Raises:
            DiskError: it holds something that is not ext4, or a command failed.
        """
        if self.mounted():
            return
        if self.device.is_dir():
            self.point.parent.mkdir(parents=True, exist_ok=True)
            self.point.unlink(missing_ok=True)  # a link to a disk that has been detached
            self.point.symlink_to(self.device.resolve(), target_is_directory=True)
        else:
            self._mount_block()
        self._log("disk.mounted", point=str(self.point), free_mb=self.free_bytes() >> 20)

    def _mount_block(self) -> None:
        try:
            if roothelper_client.needed():
                roothelper_client.ask("mount", disk=self.device.name)
                if not self.mounted():
                    raise DiskError(f"{self.point}: is mounted, but not in the agent's view of the files", Why.MOUNT)
            elif roothelper.mount(self.device, self.point):
                self._log("disk.formatted", device=str(self.device))
        except roothelper.RefusedError as error:
            raise _told(error, Why.MOUNT) from None

    def unmount(self) -> None:
        """Take it away. Afterwards nothing of this machine touches the disk.

        Raises:
            DiskError: something still uses it.
        """
        if self.point.is_symlink():
            self.point.unlink()
            return
        for _ in range(BUSY_TRIES):
            if not self.mounted():
                return
            try:
                # Never lazily: a lazy unmount lets open files write after "freed" has been said.
                if roothelper_client.needed():
                    roothelper_client.ask("unmount")
                else:
                    roothelper.command("unmount", "umount", str(self.point))
            except roothelper.RefusedError as error:
                last = _told(error, Why.UNMOUNT)
                time.sleep(BUSY_S)
        if self.mounted():
            raise last

    def free_bytes(self) -> int:
        """Room left, 0 where the disk is not mounted."""
        try:
            return shutil.disk_usage(self.point).free
        except OSError:
            return 0


def _told(error: roothelper.RefusedError, otherwise: Why) -> DiskError:
    words = {why.value for why in Why}
    return DiskError(str(error), Why(error.why) if error.why in words else otherwise)
