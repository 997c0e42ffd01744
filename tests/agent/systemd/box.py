"""A machine with a real systemd, in namespaces of its own over a copy-on-write view of this one's files.

No container tool: ``unshare`` and an overlay. Its network is a loopback that also has the metadata server's address,
so a server of the test's can answer there. Needs root, cgroup v2 somewhere and systemd's files; :func:`why_not` says
what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.agent.fakes import Fake, children_of, wait_until

METADATA = "169.254.169.254"
INIT = "/lib/systemd/systemd"
# What lets a process of any user ask systemd for more, by Debian's packages; most images have it.
LOGINS = {
    "dbus": "usr/bin/dbus-daemon",
    "libpam-systemd": f"lib/{os.uname().machine}-linux-gnu/security/pam_systemd.so",
    "polkitd": "lib/polkit-1/polkitd",
}
# What a machine's boot needs and a test does not, or what would reach for this machine's devices.
MASKED = (
    "systemd-udevd.service systemd-udev-trigger.service systemd-udevd-kernel.socket systemd-udevd-control.socket "
    "systemd-resolved.service systemd-networkd.service systemd-timesyncd.service "
    "systemd-firstboot.service systemd-sysusers.service systemd-tmpfiles-setup-dev.service kmod-static-nodes.service "
    "systemd-modules-load.service sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount "
    "dev-hugepages.mount dev-mqueue.mount systemd-remount-fs.service systemd-sysctl.service "
    "systemd-random-seed.service systemd-machine-id-commit.service systemd-journal-flush.service "
    "proc-sys-fs-binfmt_misc.automount systemd-update-utmp.service sys-fs-fuse-connections.mount ldconfig.service"
)
BEGIN = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs none "$BOX"; mkdir "$BOX/up" "$BOX/work" "$BOX/root"; R="$BOX/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$BOX/up,workdir=$BOX/work" "$R"
mount -t proc proc "$R/proc"; mount -t sysfs -o ro sysfs "$R/sys"; mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup"
mount -t tmpfs tmpfs "$R/run"; mount -t tmpfs -o mode=1777 tmpfs "$R/tmp"; mount -t tmpfs -o mode=755 tmpfs "$R/dev"
for node in null zero full random urandom tty; do touch "$R/dev/$node"; mount --bind "/dev/$node" "$R/dev/$node"; done
mkdir -p "$R/dev/shm" "$R/dev/disk/by-id" "$R/mnt"; mount -t tmpfs -o mode=1777 tmpfs "$R/dev/shm"
ln -s /proc/self/fd "$R/dev/fd"
ip link set lo up; ip addr add 169.254.169.254/32 dev lo
rm -rf "$R/etc/systemd/system"; mkdir "$R/etc/systemd/system"
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=dbus.socket\n' >"$R/etc/systemd/system/box.target"
ln -s box.target "$R/etc/systemd/system/default.target"
for unit in $MASKED; do ln -s /dev/null "$R/etc/systemd/system/$unit"; done
: >"$R/etc/machine-id"; rm -rf "$R/var/lib/spotkeeper"
cd "$R"; mkdir old; pivot_root . old; umount -l old; mount --make-rshared /
exec env -i container=box PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot . /lib/systemd/systemd --system </dev/null
"""


def why_not() -> str:
    """Why no box can be had here, "" where one can."""
    if os.geteuid() != 0:
        return "needs root: a machine of its own has namespaces and mounts"
    for program in ("unshare", "nsenter", "ip", "systemctl", "dbus-daemon", "setpriv", INIT):
        if shutil.which(program) is None:
            return f"needs {program}"
    if _cgroups() is None:
        return "needs cgroup v2"
    tried = subprocess.run(["unshare", "-mpiuCn", "--fork", "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def why_no_logins() -> str:
    """Why nobody can log in to a box made here, "" where its logind, D-Bus and polkit run: they are this machine's."""
    for package, file in LOGINS.items():
        if not any(Path(folder, file).exists() for folder in ("/", "/usr")):
            return f"needs {package} (apt-get install {' '.join(LOGINS)})"
    return ""


def _cgroups() -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        words = line.split()
        if words[2] == "cgroup2":
            return Path(words[1])
    return None


class Box:
    """``pid``: of its systemd, as this machine counts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        root = _cgroups()
        assert root is not None
        self._group = root / f"spotkeeper-box-{os.getpid()}"
        self._group.mkdir()
        self._log = (folder / "log").open("wb")
        (folder / "fs").mkdir()
        enter = f'echo $$ >{self._group}/cgroup.procs; exec unshare -mpiuCn --fork --kill-child bash -c "$0"'
        self._unshare = subprocess.Popen(
            ["sh", "-c", enter, BEGIN],
            env=os.environ | {"BOX": str(folder / "fs"), "MASKED": MASKED}, stdout=self._log, stderr=self._log,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.pid = wait_until(lambda: next(iter(children_of(self._unshare.pid)), 0))
        try:
            wait_until(lambda: self.run("systemctl is-active box.target", check=False).stdout == "active\n", 30)
        except BaseException:
            self.close()
            raise

    def run(
        self, script: str, *, user: str = "", stdin: str = "", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """A shell command inside; as ``user``, with no group but its own."""
        # What is outside of a box's cgroup would be outside of its fences too.
        visitors = self._group / "visitors"
        visitors.mkdir(exist_ok=True)
        joined = ["sh", "-c", f'echo $$ >{visitors}/cgroup.procs; exec "$@"', "sh"]
        inside = ["nsenter", "-t", str(self.pid), "-m", "-p", "-i", "-u", "-C", "-n"]
        groups = "--clear-groups" if user.isdigit() else "--init-groups"
        group = user if user != "nobody" else "nogroup"
        who = ["setpriv", f"--reuid={user}", f"--regid={group}", groups] if user else []
        return subprocess.run(
            [*joined, *inside, *who, "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "bash", "-c", script],
            input=stdin, capture_output=True, text=True, timeout=60, check=check,
        )  # fmt: skip

    def show(self, unit: str, what: str) -> str:
        return self.run(f"systemctl show -P {what} {unit}").stdout.strip()

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.run(f"mkdir -p $(dirname {path}); cat >{path}; chmod {mode:o} {path}", stdin=text)

    def path(self, inside: str) -> Path:
        return Path(f"/proc/{self.pid}/root{inside}")

    def listening(self, make: Callable[[], ThreadingHTTPServer]) -> ThreadingHTTPServer:
        """A server of this process that listens inside: a socket is of the network it was made in."""
        made: list[ThreadingHTTPServer] = []

        def enter() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path(f"/proc/{self.pid}/ns/net").open() as network:
                assert libc.setns(network.fileno(), 0x40000000) == 0
            made.append(make())

        thread = threading.Thread(target=enter)  # and ends there: its network is nobody else's
        thread.start()
        thread.join()
        return made[0]

    def ended(self) -> bool:
        return self._unshare.poll() is not None

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._unshare.wait(10)
        self._log.close()
        until = time.monotonic() + 5
        for path in [*sorted(self._group.rglob("*"), reverse=True), self._group]:
            while path.is_dir() and time.monotonic() < until:
                with contextlib.suppress(OSError):
                    path.rmdir()


class BoxedCloud(Fake):
    """Metadata server, function and bucket at the one address where a machine expects its metadata server."""

    def __init__(self, box: Box, uid: str) -> None:
        self._box = box
        self._uid = uid
        super().__init__()

    def listen(self, uid: str) -> str:
        handler = type("Handler", (self._handler,), {"uid": self._uid})
        server = self._box.listening(lambda: ThreadingHTTPServer((METADATA, 80), handler))
        server.daemon_threads = True
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return METADATA

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        """One attribute by its path too, as the startup script reads it."""
        _, found, name = handler.path.partition("/instance/attributes/")
        if not found:
            super().get(handler)
            return
        body = self.instances[self._uid]["attributes"][name].encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextlib.contextmanager
def block_device(box: Box, image: Path, disk: str) -> Iterator[Path]:
    """A loop device that the box sees under an id, as udev would show it."""
    device = subprocess.run(
        ["losetup", "-f", "--show", image], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        number = Path(device).stat().st_rdev
        # As devtmpfs would, with the loop devices that the box itself may take.
        box.run(
            "[ -e /dev/loop-control ] || mknod /dev/loop-control c 10 237;"
            "for n in $(seq 0 63); do [ -e /dev/loop$n ] || mknod /dev/loop$n b 7 $n; done;"
            f"[ -e {device} ] || mknod {device} b {os.major(number)} {os.minor(number)};"
            f"ln -sfn {device} /dev/disk/by-id/{disk}"
        )
        yield Path(device)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)
