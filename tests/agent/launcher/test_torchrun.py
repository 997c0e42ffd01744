"""The end of torchrun on several nodes: which node waits for which, and that a success logs no error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spotkeeper_agent.core.settings import job_path
from tests.agent.fakes import free_port, wait_until

# A torchrun a node, forked from one process that has torch; a line for each end: node and code.
NODES = """
import os, sys, torch.distributed.run
from spotkeeper_agent.launcher.torchrun import run
folder, port = sys.argv[1:]
nodes = {}
for node in range(3):
    pid = os.fork()
    if not pid:
        log = os.open(f"{folder}/log{node}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        args = [f"--node-rank={node}", f"--master-port={port}", f"--log-dir={folder}/{node}", f"{folder}/train.py"]
        code = 1
        try:
            code = run(["--nnodes=3", "--rdzv-backend=static", "--master-addr=127.0.0.1", "--max-restarts=0", *args])
        finally:
            os._exit(code)
    nodes[pid] = node
while nodes:
    pid, status = os.wait()
    with open(f"{folder}/ended", "a") as ended:
        print(nodes.pop(pid), os.waitstatus_to_exitcode(status), file=ended)
"""

WORKER = """
import os, pathlib, time
here, rank = pathlib.Path(__file__).parent, os.environ["RANK"]
(here / f"up{rank}").touch()
while not (here / f"go{rank}").exists():
    time.sleep(0.01)
"""


def test_only_the_node_with_the_store_waits_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    env = os.environ | {"PYTHONPATH": str(job_path()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", NODES, str(tmp_path), str(free_port())]
    ended = tmp_path / "ended"
    with subprocess.Popen(command, env=env) as gang:
        try:
            wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(3)), 60)
            (tmp_path / "go1").touch()
            wait_until(ended.exists, 30)  # it is through; what the others do is theirs
        finally:
            (tmp_path / "go0").touch()
            (tmp_path / "go2").touch()
        assert gang.wait(30) == 0
    # torchrun keeps its folder of logs to its own user; the agent, which carries the logs, is another in its group.
    modes = [path.stat().st_mode & 0o777 for path in tmp_path.glob("[012]/*")]
    assert modes == [0o775] * 3
    assert sorted(ended.read_text().splitlines()) == ["0 0", "1 0", "2 0"]
    logs = "".join((tmp_path / f"log{node}").read_text() for node in range(3))
    assert "barrier" not in logs
    assert "Error" not in logs
