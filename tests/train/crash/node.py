"""One machine's saver, and a trainer's end of it without torch: for what is between the saver and its disk."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spotkeeper.train.agent_link.control import Commit
from spotkeeper.train.checkpoint import protocol, saver, store
from spotkeeper.train.checkpoint.client import Client, new_manifest
from spotkeeper.train.checkpoint.durable import PAGE
from spotkeeper.train.checkpoint.manifest import RankPlace
from spotkeeper.train.checkpoint.protocol import Stretch
from tests.train.crash.points import KILL

GANG = (RankPlace(0, 0, 0, True),)
SIZE = 9 * (1 << 16) + 17  # some pieces, and no whole pages
LIMIT_S = 60.0


@contextlib.contextmanager
def served(
    root: Path, name: str, *, point: int = 0, step: int = -1, what: str = KILL, run: tuple[str, ...] = ()
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A saver at a socket of its own. ``run``: what starts it. What it reached is in ``root/points-NAME``."""
    path = root / f"saver-{name}"
    here = Path(__file__).with_name("saver_main.py")
    told = root / f"points-{name}"
    argv = [*run, sys.executable, "-S", str(here), str(point), str(step), str(told), what, "--socket", str(path)]
    env = os.environ | {"PYTHONPATH": str(Path(saver.__file__).parents[3])}
    process = subprocess.Popen(argv, env=env)
    try:
        yield path, process
    finally:
        process.kill()
        process.wait()


def stage(client: Client, commit: Commit) -> None:
    """Ask for a checkpoint whose every byte is of its (generation, step)."""
    memory = client.stage(round_up(SIZE) + PAGE)
    memory[:SIZE] = _byte(commit) * SIZE
    memory[round_up(SIZE) : round_up(SIZE) + 50] = _byte(commit) * 50
    stretches = (Stretch(store.STATE, 0, SIZE), Stretch(store.SKELETON, round_up(SIZE), 50))
    client.save(new_manifest(commit, GANG, {}), stretches)


def mixed(folder: Path, commit: Commit) -> list[str]:
    """Files of a checkpoint that have bytes of another."""
    files = [folder / str(commit) / name for name in (store.STATE, store.SKELETON)]
    return [str(path) for path in files if set(path.read_bytes()) != set(_byte(commit))]


def round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _byte(commit: Commit) -> bytes:
    return bytes([commit.gen * 16 + commit.step])


def stopped(process: Any) -> bool:
    """Wait until it has stopped itself; False where it has answered all without."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]
        if state in "TZ":
            return state == "T"
        time.sleep(0.002)
    return False


def quiet(path: Path, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the saver at ``path`` has done all that it was asked; False where it is dead.

    A stranger's request is refused, but only once what came before it is done.
    """
    end, nothing = time.monotonic() + LIMIT_S, new_manifest(Commit(0, 0), GANG, {}).to_bytes().decode()
    while process.poll() is None and time.monotonic() < end:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(LIMIT_S)
            try:
                with protocol.address(path) as name:
                    sock.connect(name)
                sock.send(json.dumps({"op": "publish", "manifest": nothing}).encode())
                if sock.recv(protocol.MESSAGE):
                    return True
            except OSError:
                time.sleep(0.005)  # it has not begun to listen, or has just died
    return False
