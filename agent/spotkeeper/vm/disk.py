"""The data disk: found by its id, formatted only where it is blank, mounted, unmounted for good.

In the local cloud a disk is a folder, and a symbolic link stands for the mount. This
file never formats anything in which ``blkid`` sees, or may see, something, nor a disk whose bytes are
not zero where any file system, partition table or volume would have left its mark.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from enum import Enum
from pathlib import Path

from spotkeeper.vm.log import Log

BLANK = 2  # blkid's exit code for "nothing found"
COMMAND_S = 300.0  # mkfs of a large disk
BUSY_TRIES = 20
BUSY_S = 0.25  # real


MARKS_BYTES = 1 << 20  # at the start and the end of a disk
BACKUP_AT = 128 << 20  # where ext4 keeps its first spare superblock
BACKUP_BYTES = 64 << 10


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


class Disk:
    """One device and where it goes. Calls block: run them in the helper thread."""

    def __init__(self, device: Path, mount: Path, log: Log) -> None:
        self.device = device
        self.point = mount
        self._log = log

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
        kind = self._kind()
        if kind is None:
            self._check_blank()
            self._log("disk.format", device=str(self.device))
            _command(Why.MKFS, "mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1,discard", str(self.device))
        elif kind != "ext4":
            raise DiskError(f"{self.device}: holds {kind}, want ext4 or nothing; it is left as it is", Why.FOREIGN)
        self.point.mkdir(parents=True, exist_ok=True)
        _command(Why.MOUNT, "mount", "-t", "ext4", "-o", "noatime,discard", str(self.device), str(self.point))

    def _check_blank(self) -> None:
        """blkid says "nothing found" also of a disk that it cannot read or does not know. A new disk is zeros.

        Raises:
            DiskError: some byte is not, or cannot be read.
        """
        try:
            with self.device.open("rb", buffering=0) as device:
                size = device.seek(0, os.SEEK_END)
                spots = ((0, MARKS_BYTES), (BACKUP_AT, BACKUP_BYTES), (max(0, size - MARKS_BYTES), MARKS_BYTES))
                for at, count in spots:
                    device.seek(min(at, size))
                    if any(device.read(count)):
                        message = f"{self.device}: holds data of no known kind near byte {at}; it is left as it is"
                        raise DiskError(message, Why.FOREIGN)
        except OSError as error:
            raise DiskError(f"{self.device}: {error}", Why.PROBE) from None

    def _kind(self) -> str | None:
        """The type of what is on the device, None if it is blank.

        Raises:
            DiskError: blkid could not tell, which is not the same as blank.
        """
        command = ["blkid", "-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "value", str(self.device)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DiskError(f"blkid: {error}", Why.PROBE) from None
        if done.returncode == BLANK and not done.stdout.strip():
            return None
        if done.returncode != 0:
            words = f"{self.device}: blkid ends with {done.returncode}: {done.stderr.strip()[:200]}"
            raise DiskError(words, Why.PROBE)
        return done.stdout.strip() or "something without a type"

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
                _command(Why.UNMOUNT, "umount", str(self.point))
            except DiskError as error:
                last = error
                time.sleep(BUSY_S)
        if self.mounted():
            raise last

    def free_bytes(self) -> int:
        """Room left, 0 where the disk is not mounted."""
        try:
            return shutil.disk_usage(self.point).free
        except OSError:
            return 0


def _command(why: Why, *argv: str) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DiskError(f"{argv[0]}: {error}", why) from None
    if done.returncode != 0:
        raise DiskError(f"{' '.join(argv)}: ends with {done.returncode}: {done.stderr.strip()[:200]}", why)
