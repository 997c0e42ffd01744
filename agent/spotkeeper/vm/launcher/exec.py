"""The portable launcher: a fresh torchrun process per generation, nothing imported before.

For jobs that a warm fork does not suit (a library that breaks over fork). The same
socket, the same ``boot.py``, the same exit codes as the zygote, and a cold start.

    python -m spotkeeper.vm.launcher.exec FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spotkeeper.vm.launcher.process import die_with_parent
from spotkeeper.vm.launcher.server import Cgroup, Server, Start


def main(folder: str) -> None:
    Server(Path(folder), "exec", _spawn).serve()


def _spawn(start: Start, server: Server) -> int:
    parent = os.getpid()
    cgroup = Cgroup.own()

    def in_child() -> None:
        os.setpgid(0, 0)
        die_with_parent(parent)
        if cgroup is not None:
            cgroup.enter(start.gen)

    command = [sys.executable, "-m", "spotkeeper.vm.launcher.torchrun", *start.args]
    with Path(start.log).open("ab") as log:
        return subprocess.Popen(
            command,
            env=os.environ | start.env,
            cwd=start.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # One thread, so forking with Python code in between is safe here.
            preexec_fn=in_child,  # noqa: PLW1509
        ).pid


if __name__ == "__main__":
    main(sys.argv[1])
