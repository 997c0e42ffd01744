"""Two hosts of one test, each with a network of its own, and one cable between them that can be cut. Needs root.

The namespaces have no names and belong to two sleeping processes: whatever happens to the test, nothing of them stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
CABLE = "cable"  # the interface's name at both ends
ESTABLISHED = "01"


def why_not() -> str:
    """Why no networks can be had here, "" where they can."""
    if os.geteuid() != 0:
        return "needs root: a cut cable is one between two network namespaces"
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"needs {program}"
    words = ["unshare", "-n", "ip", "link", "add", "one", "type", "veth", "peer", "name", "other"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Net:
    """One host's network; ``holder`` is the process that keeps it."""

    address: str
    holder: int

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """What this thread opens and starts meanwhile is of this network, and stays so."""
        with Path("/proc/thread-self/ns/net").open("rb") as home, Path(f"/proc/{self.holder}/ns/net").open("rb") as net:
            _enter(net.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def cut(self) -> None:
        """No packet leaves this host, or reaches it, from now on; its loopback works."""
        self.ip("link", "set", CABLE, "down")

    def ip(self, *words: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.holder), "-n", "ip", *words], check=True, timeout=30)

    def connected(self, other: Net) -> int:
        """Connections to another host that this one takes for alive."""
        there = bytes(map(int, other.address.split(".")))[::-1].hex().upper()
        lines = [line.split() for line in Path(f"/proc/{self.holder}/net/tcp").read_text().splitlines()[1:]]
        return sum(line[2].partition(":")[0] == there and line[3] == ESTABLISHED for line in lines)


def _enter(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def two() -> Iterator[tuple[Net, Net]]:
    """Two hosts, 10.77.0.1 and 10.77.0.2."""
    with contextlib.ExitStack() as stack:
        nets = []
        for number in (1, 2):
            # A shell that says when it is there: only then does the namespace exist.
            words = ["unshare", "-n", "sh", "-c", "echo there; exec sleep 900"]
            process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"there\n"
            nets.append(Net(f"10.77.0.{number}", process.pid))
        one, other = nets
        one.ip("link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(other.holder))
        for net in nets:
            net.ip("addr", "add", f"{net.address}/24", "dev", CABLE)
            net.ip("link", "set", CABLE, "up")
            net.ip("link", "set", "lo", "up")
        yield one, other
