"""The first process of a VM; it replaces a real VM's kernel, systemd and Google's guest agent.

It waits as long as a boot takes, runs the startup script from metadata, and reaps children. On SIGTERM (ACPI off) it
runs the shutdown script, and then ends every process with the VM's mark. It keeps running while the control plane is
down, as a machine does during an outage of the cloud's API. Each VM runs this process, so it imports only the standard
library.

Phases: BOOTING -> UP -> (SIGTERM) -> DOWN. A kill -9 at any point simulates a power cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from spotkeeper.local.core import procs

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
RETRY_S = 0.2  # real; short, since the metadata server is down only while the control plane restarts
TERM_GRACE_S = 2.0  # virtual; time from SIGTERM to SIGKILL, after the shutdown script
SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


class Guest:
    """A VM's guest. Its settings are in ``boot.json``: mark, metadata address, clock scale, boot time, environment."""

    def __init__(self, folder: Path) -> None:
        plan = json.loads((folder / "boot.json").read_text())
        self.folder = folder
        self.root = folder / "root"
        self.mark = procs.mark(procs.VM, plan["mark"])
        self.metadata: str = plan["metadata"]
        self.boot_s = float(plan["boot_s"]) / float(plan["scale"])
        self.grace_s = TERM_GRACE_S / float(plan["scale"])
        self.env: dict[str, str] = plan["env"]
        self.startup: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        self.say(f"booting, the startup script begins in {self.boot_s:.2f} s")
        self.prepare()
        if self.wait(self.boot_s):
            self.shut_down()
            return
        self.startup = self.script("startup-script")
        self.wait(None)
        self.shut_down()

    def prepare(self) -> None:
        """Empty /run and /tmp, as a boot does; all other folders are on the disk."""
        for name in ("run", "tmp"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        for name in ("run", "tmp", "mnt", "root", "var/lib", "var/log", "dev/disk/by-id"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.env["SPOTKEEPER_INIT_PID"] = str(os.getpid())

    def wait(self, timeout_s: float | None) -> bool:
        """Reap children until a SIGTERM (return True) or the timeout (return False)."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            info = signal.sigwaitinfo(SIGNALS) if left is None else signal.sigtimedwait(SIGNALS, left)
            if info is None:
                return False
            if info.si_signo == signal.SIGTERM:
                return True
            self.reap()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.startup is not None and pid == self.startup.pid:
                self.say(f"startup-script exit status {os.waitstatus_to_exitcode(status)}")
                self.startup.returncode = os.waitstatus_to_exitcode(status)

    def script(self, key: str) -> subprocess.Popen[bytes] | None:
        """Start a script from metadata; return None if metadata has no such script."""
        text = self.attribute(key)
        if text is None:
            return None
        path = self.root / "run" / key
        path.write_bytes(text)
        self.say(f"{key} begins")
        return subprocess.Popen(
            ["bash", str(path)],
            env=self.env,
            cwd=self.root / "root",
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_unblock,  # noqa: PLW1509 - single-threaded
        )

    def attribute(self, key: str) -> bytes | None:
        """Read a metadata attribute; retry while the control plane restarts, until a SIGTERM."""
        while True:
            try:
                return _get(self.metadata, f"/computeMetadata/v1/instance/attributes/{key}")
            except OSError as error:
                self.say(f"metadata: {error}, trying again")
            time.sleep(RETRY_S)
            if signal.SIGTERM in signal.sigpending():
                return None

    def shut_down(self) -> None:
        """Power off: shutdown script, SIGTERM, SIGKILL. After a time limit the cloud cuts the power with kill -9."""
        self.say("powering off")
        script = self.script("shutdown-script")
        if script is not None:
            self.reap_until(script.pid)
        for pid in self.others():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + self.grace_s
        while self.others() and time.monotonic() < end:
            signal.sigtimedwait({signal.SIGCHLD}, min(0.05, self.grace_s))
            self.reap()
        procs.kill_all(self.mark, os.getpid())
        self.reap()
        (self.folder / "off").write_text("clean\n")
        self.say("off")

    def reap_until(self, pid: int) -> None:
        while procs.start_time(pid) is not None:
            signal.sigtimedwait({signal.SIGCHLD}, 0.5)
            self.reap()

    def others(self) -> set[int]:
        return (procs.marked(self.mark) | procs.descendants(os.getpid())) - {os.getpid()}

    def say(self, text: str) -> None:
        print(f"[init {time.time():.3f}] {text}", flush=True)


def _get(address: str, path: str) -> bytes | None:
    """Send a GET without http.client, which imports ssl (20 ms and 5 MB per VM); return None for a 404.

    Raises:
        OSError: no connection, or a status other than 200 and 404.
    """
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        request = f"GET {path} HTTP/1.0\r\nHost: {address}\r\nMetadata-Flavor: Google\r\n\r\n"
        connection.sendall(request.encode())
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    head, separator, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status == [b"404"]:
        return None
    if status != [b"200"] or not separator:
        raise OSError(f"{path}: {head[:80]!r}")
    return body


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_NAME, b"sk-init", 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    Guest(Path(sys.argv[1])).run()


if __name__ == "__main__":
    main()
