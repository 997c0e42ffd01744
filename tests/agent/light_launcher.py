"""A launcher without torch, for tests of the agent: the real server, but a worker of its own instead of torchrun.

The tests' ``light-python`` runs it in place of the launcher the agent asks for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from spotkeeper_agent.launcher.process import die_with_parent, start_program
from spotkeeper_agent.launcher.server import Cgroup, Server, Start


def spawn(start: Start, server: Server) -> int:
    parent = os.getpid()
    cgroup = Cgroup.own()

    def in_child() -> None:
        die_with_parent(parent)
        if cgroup is not None:
            cgroup.enter(start.gen)

    boot = next(index for index, word in enumerate(start.args) if word.endswith("/boot.py"))
    with Path(start.log).open("ab") as log:
        return start_program(
            [sys.executable, "-S", *start.args[boot + 1 :]],
            env=os.environ | start.env | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            cwd=start.cwd,
            stdout=log,
            stderr=log,
            preexec_fn=in_child,
        )


if __name__ == "__main__":
    Server(Path(sys.argv[1]), "light", spawn).serve()
