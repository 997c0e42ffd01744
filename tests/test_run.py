"""What ``make test`` starts ends with it, and what it took is noted."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest, run

ROOT = Path(run.__file__).parents[1]
LEAVES = """
import os, signal, subprocess, sys
def test_it():
    left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    open("left", "w").write(str(left.pid))
    if {pauses}:
        os.mkfifo("ready") if not os.path.exists("ready") else None
        open("ready", "w").close()
        signal.pause()
"""


def test_files_that_start_the_same_share_processes() -> None:
    """Each process with a whole run starts a cloud of its own, which computes until the process ends."""
    lanes = conftest._lanes()
    assert set(lanes) == {f"lifecycle/{path.name}" for path in (ROOT / "tests/lifecycle").glob("test_*.py")}
    assert len(set(lanes.values())) == conftest.LANES
    for place in (place for places in conftest.TOGETHER.values() for place in places):
        assert (ROOT / "tests" / place).exists(), place
    assert conftest._lane("infra/aws/test_efa.py") == conftest._lane("local/deploy/test_deploy.py") == "pulumi"


@pytest.mark.parametrize("cut", [None, signal.SIGTERM, signal.SIGINT])
def test_no_process_of_a_test_stays(tmp_path: Path, cut: int | None) -> None:
    (tmp_path / "test_it.py").write_text(LEAVES.format(pauses=cut is not None))
    os.mkfifo(tmp_path / "ready")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    whole = subprocess.Popen(
        [sys.executable, "-m", "tests.run", "", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509 - as a background job has it
    )
    if cut is not None:
        with os.fdopen(os.open(tmp_path / "ready", os.O_RDONLY | os.O_NONBLOCK)) as ready:
            assert select.select([ready], [], [], 60)[0], "the test never began"
        os.killpg(whole.pid, cut) if cut == signal.SIGINT else whole.send_signal(cut)
    out, err = whole.communicate(timeout=60)
    left = int((tmp_path / "left").read_text())
    assert f"left behind: {left} {sys.executable} -c import signal" in err, out + err
    assert not Path(f"/proc/{left}").exists()
    assert whole.returncode == (0 if cut is None else 2), out + err


def test_what_it_took_is_noted_for_each_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "OUT", tmp_path / "new" / "tests.json")
    run.note("test", {"wall_s": 400.0, "processor_s": 700.0})
    run.note("quick", {"wall_s": 60.0, "processor_s": 90.0})
    noted = json.loads(run.OUT.read_text())
    assert noted["test"]["wall_s"] == 400.0 and noted["quick"]["cores"] >= 1
