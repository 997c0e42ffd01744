"""Processes are found by their mark, or as descendants of a marked one."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

from spotkeeper.local.core import procs

# A process with the mark; its child has cleared its environment and stays until its input ends.
FAMILY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-c", "print(flush=True); import sys; sys.stdin.read()"],
                         env={}, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_that_hides_its_environment_ends_with_its_marked_parent() -> None:
    mark = uuid.uuid4().hex
    parent = subprocess.Popen(
        [sys.executable, "-I", "-c", FAMILY],
        env=os.environ | {procs.CLOUD: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        started = procs.start_time(child)
        assert started is not None
        assert child not in procs.marked(procs.mark(procs.CLOUD, mark))
        assert procs.kill_all(procs.mark(procs.CLOUD, mark)) == 2
        assert not procs.is_same(child, started)
    finally:
        parent.kill()  # its end closes what the child reads
        parent.communicate()
