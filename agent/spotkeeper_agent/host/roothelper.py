"""Spotkeeper's only root process on a machine: serves the data disk, a job's scratch volume on it, power-off, restarts.

The agent has no root rights. It sends requests through a unix socket on which only the agent and root are answered.
A request is one packet with one of these five JSON objects:

    -> {"op": "mount", "disk": "google-sk-data"}      formatted first if blank; always at /mnt/sk-data
    -> {"op": "scratch", "job": "abcd2345", "gb": "100"}   at /mnt/sk-scratch; "made" if it is new and empty
    -> {"op": "unmount"}                              the scratch volume first
    -> {"op": "power-off"}
    -> {"op": "restart-jobs"}                         when the jobs' unit does not answer
    <- {"ok": true, "made": false}     or {"ok": false, "why": "foreign", "error": "/dev/sdb: contains xfs, ..."}

Standard library only, and one file: the startup script carries it as text (``infra/boot.py``), so code that runs as
root comes from the machine's template and never from a folder that the agent may write. It formats a disk only if
``blkid`` finds nothing on it and the regions in which file systems, partition tables and volumes keep their
signatures are all zero.

A scratch volume is an ext4 file system in a file of root's on the data disk, whose blocks are reserved when it is made.
So what the job writes there takes no space from checkpoints, whatever it does. A project quota would be no such bound:
a file's owner can take the file out of its project, and kernels without quotas do not mount such a disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import stat
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOCKET = Path("/run/spotkeeper-root/socket")
POINT = Path("/mnt/sk-data")
SCRATCH = Path("/mnt/sk-scratch")
BY_ID = Path("/dev/disk/by-id")
DISK = re.compile(r"(google-[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?|nvme-Amazon_Elastic_Block_Store_vol[0-9a-f]{8,17})\Z")
JOB = re.compile(r"[a-z0-9]{8}\Z")
GB = re.compile(r"[1-9][0-9]{0,4}\Z")
REQUEST_BYTES = 512
PATIENCE_S = 5.0  # longest wait for a request, once a client has connected

BLANK = 2  # blkid's exit code for "nothing found"
COMMAND_S = 300.0  # mkfs of a large disk
MARKS_BYTES = 1 << 20  # at the start and the end of a disk
BACKUP_AT = 128 << 20  # where ext4 keeps its first spare superblock
BACKUP_BYTES = 64 << 10

VOLUME = "scratch.ext4"  # in the job's folder on the data disk
_LOOP_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A  # loop(4)
_LOOP_CONFIG = "2I5Q4I160x2Q64x"  # struct loop_config
_LOOP_FLAGS = 4 | 16  # the last unmount frees the device; direct I/O, so pages are not cached twice
LOOP_TRIES = 20  # another process may take the device first


class RefusedError(Exception):
    """The request was not carried out. ``why``: a value of ``spotkeeper_agent.host.disk.Why``, or ``request``."""

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why


# --- disks ------------------------------------------------------------------------------


def mount(device: Path, point: Path) -> bool:
    """Mount the device, after formatting it if it is blank; return whether it was formatted.

    Raises:
        RefusedError: the device has content other than ext4, or a command failed.
    """
    found = kind(device)
    if found is None:
        check_blank(device)
        command("mkfs", "mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=1,discard", str(device))
    elif found != "ext4":
        raise RefusedError("foreign", f"{device}: contains {found}, not ext4; the disk is left unchanged")
    point.mkdir(parents=True, exist_ok=True)
    command("mount", "mount", "-t", "ext4", "-o", "noatime,discard,nodev,nosuid", str(device), str(point))
    return found is None


def kind(device: Path) -> str | None:
    """Return the type of the device's content; None if the device is blank.

    Raises:
        RefusedError: blkid cannot determine the type, so the device may not be blank.
    """
    argv = ["blkid", "-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "value", str(device)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError("probe", f"blkid: {error}") from None
    if done.returncode == BLANK and not done.stdout.strip():
        return None
    if done.returncode != 0:
        raise RefusedError("probe", f"{device}: blkid ends with {done.returncode}: {done.stderr.strip()[:200]}")
    return done.stdout.strip() or "something without a type"


def check_blank(device: Path) -> None:
    """Check that all bytes in which signatures lie are zero, because blkid also finds nothing if it cannot read them.

    Raises:
        RefusedError: a byte is not zero, or cannot be read.
    """
    try:
        with device.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            spots = ((0, MARKS_BYTES), (BACKUP_AT, BACKUP_BYTES), (max(0, size - MARKS_BYTES), MARKS_BYTES))
            for at, count in spots:
                file.seek(min(at, size))
                if any(file.read(count)):
                    message = f"{device}: contains unknown data near byte {at}; the disk is left unchanged"
                    raise RefusedError("foreign", message)
    except OSError as error:
        raise RefusedError("probe", f"{device}: {error}") from None


def command(why: str, *argv: str, file: int | None = None) -> None:
    """Run a program to its end. ``file``: a descriptor that it inherits.

    Raises:
        RefusedError: the program is missing, takes too long, or fails.
    """
    kept = () if file is None else (file,)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S, check=False, pass_fds=kept)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(why, f"{argv[0]}: {error}") from None
    if done.returncode != 0:
        raise RefusedError(why, f"{' '.join(argv)}: ends with {done.returncode}: {done.stderr.strip()[:200]}")


# --- the scratch volume -------------------------------------------------------------------


def mount_scratch(disk: Path, job: str, gb: int, point: Path, group: int) -> bool:
    """Mount the job's scratch volume of ``gb`` GiB; return whether it was made now, so that it is empty.

    ``disk``: mount point of the data disk, with the job's folder. The agent owns both and can replace what is in them
    at any time, so each step opens below a descriptor and follows no link. ``group`` may write to the volume.

    Raises:
        RefusedError: no data disk is mounted, it has no room, or a command failed.
    """
    if os.path.ismount(point):
        if _volume_of(point) == str(disk / job / VOLUME):
            return False
        command("scratch", "umount", str(point))
    if not os.path.ismount(disk):
        raise RefusedError("scratch", f"{disk}: no data disk is mounted")
    with contextlib.ExitStack() as opened:
        try:
            folder = _folder(opened, job, _folder(opened, disk))
            point.mkdir(parents=True, exist_ok=True)
            file = _volume(folder, gb << 30)
            made = file is None or not _mounted(file, point)  # a damaged volume is made anew
            if made:
                file = _new_volume(folder, gb << 30)
                if not _mounted(file, point):
                    raise RefusedError("scratch", f"{point}: a new file system cannot be mounted")
                top = _folder(opened, point)
                os.rmdir("lost+found", dir_fd=top)
                os.fchown(top, 0, group)
                os.fchmod(top, 0o775)
        except OSError as error:
            raise RefusedError("scratch", f"{VOLUME} of {gb} GB on {disk}: {error.strerror}") from None
    return made


def _folder(opened: contextlib.ExitStack, name: str | Path, below: int | None = None) -> int:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=below)
    opened.callback(os.close, fd)
    return fd


def _volume(folder: int, size: int) -> int | None:
    """Open the volume's file below a descriptor of its folder; None if there is none of this size that root made."""
    with contextlib.suppress(OSError):
        file = os.open(VOLUME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        about = os.fstat(file)
        if stat.S_ISREG(about.st_mode) and (about.st_uid, about.st_nlink, about.st_size) == (0, 1, size):
            return file
        os.close(file)
    return None


def _new_volume(folder: int, size: int) -> int:
    """Make and format the volume's file, with all its blocks. One that is left incomplete cannot be mounted later."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(VOLUME, dir_fd=folder)
    file = os.open(VOLUME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        os.posix_fallocate(file, 0, size)
        # No discard, here or when mounted: it would give the blocks back.
        options = ("-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=1")
        command("scratch", "mkfs.ext4", *options, f"/proc/self/fd/{file}", file=file)
    except BaseException:
        os.close(file)
        os.unlink(VOLUME, dir_fd=folder)
        raise
    return file


def _mounted(file: int, point: Path) -> bool:
    """Mount the file system in a file, and close the file; return False if it has no intact file system."""
    try:
        loop, name = _loop(file)
    finally:
        os.close(file)
    try:
        command("scratch", "mount", "-t", "ext4", "-o", "noatime,nodev,nosuid", name, str(point))
    except RefusedError:
        return False
    finally:
        os.close(loop)
    return True


def _loop(file: int) -> tuple[int, str]:
    """Bind a file to a free loop device, by its descriptor; return the device's descriptor and name."""
    with open("/dev/loop-control", "rb", buffering=0) as control:  # noqa: PTH123 - a device
        for _ in range(LOOP_TRIES):
            name = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            loop = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            with contextlib.suppress(OSError):
                fcntl.ioctl(loop, _LOOP_CONFIGURE, struct.pack(_LOOP_CONFIG, file, *(0,) * 9, _LOOP_FLAGS, 0, 0))
                with contextlib.suppress(OSError):  # else ``fstrim`` gives the blocks back
                    Path("/sys/block", name[5:], "queue/discard_max_bytes").write_text("0")
                return loop, name
            os.close(loop)
    raise RefusedError("scratch", "no loop device is free")


def _volume_of(point: Path) -> str:
    """Return the path of the file whose file system is mounted at ``point``, as the kernel knows it."""
    device = point.stat().st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/loop/backing_file")
    return name.read_text().rstrip("\n") if name.exists() else ""


# --- requests ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RootHelper:
    """Serves root and the user ``uid``. ``uid`` and ``gid`` become the owners of a mounted disk's root folder."""

    uid: int
    gid: int
    by_id: Path = BY_ID
    point: Path = POINT
    scratch: Path = SCRATCH

    def answer(self, peer: int, packet: bytes) -> dict[str, object]:
        """Carry out one of the requests that the module's docstring lists, and return the reply."""
        try:
            if peer not in (0, self.uid):
                raise RefusedError("request", f"user {peer} is not served")
            made = self._do(packet)
        except RefusedError as error:
            return {"ok": False, "why": error.why, "error": str(error)}
        return {"ok": True, "made": True} if made else {"ok": True}

    def _do(self, packet: bytes) -> bool:
        request = _parse(packet)
        op = request["op"]
        if op == "mount":
            self._mount(request["disk"])
        elif op == "scratch":
            return mount_scratch(self.point, request["job"], int(request["gb"]), self.scratch, self.gid)
        elif op == "unmount":
            for point in (self.scratch, self.point):
                if os.path.ismount(point):
                    # Never lazily: after a lazy unmount, open files could still write once FREED is reported.
                    command("unmount", "umount", str(point))
        elif op == "restart-jobs":
            command("request", "systemctl", "restart", "--no-block", "spotkeeper-job.service")
        else:
            command("request", "systemctl", "poweroff", "--no-block")
        return False

    def _mount(self, disk: str) -> None:
        device = self._device(disk)
        number = device.stat().st_rdev
        at = _mounted_at(number)
        if at == [str(self.point)]:
            return
        if at:
            raise RefusedError("foreign", f"{disk}: the disk is mounted at {at[0]}")
        if self.point.is_symlink() or os.path.ismount(self.point):
            raise RefusedError("mount", f"{self.point}: is a link, or another disk is mounted there")
        mount(device, self.point)
        folder = os.open(self.point, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(folder, self.uid, self.gid)
            os.fchmod(folder, 0o755)
        finally:
            os.close(folder)

    def _device(self, disk: str) -> Path:
        """Return the block device behind a data disk's id."""
        device = Path(os.path.realpath(self.by_id / disk))
        try:
            block = stat.S_ISBLK(device.stat().st_mode)
        except OSError as error:
            raise RefusedError("missing", f"{disk}: {error.strerror}") from None
        if not block:
            raise RefusedError("missing", f"{disk} is not a block device")
        return device


def _parse(packet: bytes) -> dict[str, str]:
    """Parse a request.

    Raises:
        RefusedError: the packet is not exactly one of the requests that the module's docstring lists.
    """
    try:
        pairs = json.loads(packet.decode("ascii"), object_pairs_hook=list)
    except (ValueError, RecursionError):
        raise RefusedError("request", "the request is not JSON") from None
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise RefusedError("request", "the request is not a JSON object")
    request = dict(pairs)
    wanted = {op: {"op"} for op in ("unmount", "power-off", "restart-jobs")}
    wanted |= {"mount": {"op", "disk"}, "scratch": {"op", "job", "gb"}}
    op = request.get("op")
    if not isinstance(op, str) or op not in wanted:
        raise RefusedError("request", "`op` must be mount, scratch, unmount, power-off or restart-jobs")
    if set(request) != wanted[op] or len(pairs) != len(request):
        raise RefusedError("request", f"a request `{op}` must have exactly the keys {', '.join(sorted(wanted[op]))}")
    for key, form, what in (("disk", DISK, "the id of a data disk"), ("job", JOB, "a job"), ("gb", GB, "a size")):
        if key in wanted[op] and not (isinstance(request[key], str) and form.match(request[key])):
            raise RefusedError("request", f"`{key}` is not {what}")
    return request


def _mounted_at(number: int) -> list[str]:
    """Return the mount points of the block device with this number."""
    name = f"{os.major(number)}:{os.minor(number)}"
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [line[4] for line in lines if line[2] == name]


# --- the socket ---------------------------------------------------------------------------


def listen(path: Path, uid: int) -> socket.socket:
    """Make a socket that only root and the user ``uid`` may open."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    os.chown(path, uid, -1)
    listener.listen(4)
    return listener


def serve_one(helper: RootHelper, listener: socket.socket) -> None:
    """Serve one connection with one request; a client that sends no request is disconnected."""
    client, _ = listener.accept()
    with client, contextlib.suppress(OSError):
        client.settimeout(PATIENCE_S)
        peer = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]
        packet = client.recv(REQUEST_BYTES + 1)
        if packet:
            shown = helper.answer(peer, packet) if len(packet) <= REQUEST_BYTES else {"ok": False, "why": "request"}
            print(json.dumps({"peer": peer, "request": packet[:80].decode("ascii", "replace"), **shown}), flush=True)
            client.send(json.dumps(shown).encode())


def main(argv: list[str]) -> int:
    """Run the root helper. Arguments: the agent's user and the jobs' group, to own the data disk's root folder."""
    import grp
    import pwd

    user, group = argv
    helper = RootHelper(pwd.getpwnam(user).pw_uid, grp.getgrnam(group).gr_gid)
    listener = listen(SOCKET, helper.uid)
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"READY=1", "\0" + address[1:] if address[0] == "@" else address)
    while True:
        serve_one(helper, listener)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
