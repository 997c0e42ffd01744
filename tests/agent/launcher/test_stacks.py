"""Stacks of a job that hangs: of all its processes, also of one that never comes back from C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spotkeeper_agent.launcher import stacks
from spotkeeper_agent.launcher.stacks import Frame, Where


def test_a_process_without_the_handler_is_not_signalled(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / "pid.0").write_text(str(other.pid))
        stacks.main(os.getpid(), tmp_path)
        assert other.poll() is None
        other.kill()
    assert [place["where"] for place in json.loads((tmp_path / stacks.SHORT).read_text())] == ["silent"]


def test_stopped_processes_are_silent_and_ended_ones_gone(tmp_path: Path) -> None:
    script = "import os, signal, sys; from pathlib import Path; from spotkeeper_agent.launcher.stacks import listen\n" \
             "listen(Path(sys.argv[1]), 0); os.kill(os.getpid(), signal.SIGSTOP)\n"  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) as other:
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        (tmp_path / "pid.1").write_text("999999999\n")
        stacks.main(os.getpid(), tmp_path)
        other.send_signal(signal.SIGKILL)
    stopped, gone = json.loads((tmp_path / stacks.SHORT).read_text())
    assert (stopped["where"], stopped["state"], gone["where"]) == ("silent", "stopped", "gone")


TORCH = "/v/lib/python3.11/site-packages/torch"


@pytest.mark.parametrize(
    ("files", "where", "at"),
    [
        (
            [(f"{TORCH}/distributed/distributed_c10d.py", "barrier"), ("/s/train.py", "main")],
            Where.WAITS,
            "distributed_c10d.py:1 in barrier, called from train.py:1 in main",
        ),
        ([(f"{TORCH}/_ops.py", "__call__"), (f"{TORCH}/distributed/_functional_collectives.py", "f")], Where.WAITS, ""),
        ([(f"{TORCH}/autograd/graph.py", "_engine_run_backward"), ("/s/train.py", "<module>")], Where.WAITS, ""),
        ([(f"{TORCH}/utils/data/dataloader.py", "_try_get_data"), ("/s/train.py", "main")], Where.ELSEWHERE, ""),
        ([("/s/train.py", "item")], Where.DEVICE, "train.py:1 in item"),
        ([("/s/train.py", "wait")], Where.WAITS, "train.py:1 in wait"),
        ([], Where.ELSEWHERE, ""),
    ],
)
def test_a_workers_state_follows_from_its_frames(
    monkeypatch: pytest.MonkeyPatch, files: list[tuple[str, str]], where: Where, at: str
) -> None:
    lines = {"item": "    total += loss.item()\n", "wait": "    work.wait()\n"}
    monkeypatch.setattr(stacks, "_source", lambda frame: lines.get(frame.function, ""))
    frames = [Frame(file, 1, function) for file, function in files]
    assert stacks.where(frames) is where
    assert not at or stacks.at(frames) == at


def test_the_main_thread_is_the_last_in_the_stacks() -> None:
    text = """Thread 0x00007f1 (most recent call first):
  File "/s/pin.py", line 3 in loop

Current thread 0x00007f2 (most recent call first):
  File "/s/train.py", line 41 in load
  File "/s/train.py", line 50 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/lib/libc.so.6", at __futex_wait+0x1
"""
    assert [str(frame) for frame in stacks.main_frames(text)] == ["train.py:41 in load", "train.py:50 in <module>"]


def test_frames_of_launcher_and_torchrun_are_left_out() -> None:
    boot = "/b/job/spotkeeper_agent/launcher/boot.py"
    text = f"""Thread 0x00007f1 (most recent call first):
  File "/s/pin.py", line 3 in loop

Current thread 0x00007f2 (most recent call first):
  File "/s/train.py", line 41 in load
  File "{boot}", line 138 in _run_user
  File "/v/torch/distributed/run.py", line 9 in main
"""
    told = stacks.users_part(text)
    assert "pin.py" in told and "train.py" in told and "Current thread" in told
    assert "boot.py" not in told and "run.py" not in told
    assert stacks.users_part("") == ""
