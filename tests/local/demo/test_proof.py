"""The demo's undisturbed run leaves no worker behind when it is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spotkeeper.local.demo import proof

# As with torchrun, the worker has its own session, and its parent ends it at SIGTERM.
_PARENT = """
import signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
def end(*_):
    worker.kill()
    worker.wait()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
print(worker.pid, flush=True)
time.sleep(60)
"""


def test_a_stopped_run_ends_its_workers() -> None:
    torchrun = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert torchrun.stdout is not None
    worker = int(torchrun.stdout.readline())
    os.kill(worker, 0)
    proof._end(torchrun)
    assert torchrun.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_the_last_hash_of_a_log_counts() -> None:
    assert proof.weights_in(f"weights {'a' * 64}\nagain: weights {'b' * 64}\n") == "b" * 64
    assert proof.weights_in("weights unknown") is None


def test_the_undisturbed_run_leaves_nothing_beside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``--log-dir`` torchrun makes a folder for logs among temporary files."""
    (elsewhere := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    (tmp_path / "train.py").write_text(f"print('weights {'c' * 64}')\n")
    assert proof.left_alone(tmp_path, ("train.py",), 1, {}, tmp_path / "alone") == "c" * 64
    assert list(elsewhere.glob("torchelastic_*")) == []
