"""A command on a job's machine runs in the job's folder, beside its logs, and ends with the VM."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper.cli.main import run as cli
from spotkeeper.client.target import FOLDER
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import SlotState
from spotkeeper.local.core import procs
from tests.lifecycle.stage import Run, Stage, script

pytestmark = pytest.mark.lifecycle

WAITS = "import signal; print('it waits', flush=True); signal.pause()"


def test_ssh_runs_a_command_on_the_jobs_machine_and_logs_it(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(FOLDER, str(stage.cloud.folder))
    spec, source = script(tmp_path, "waits", WAITS, stop="signal")
    with Run(stage, spec, source) as run:
        run.until("it to train", lambda: (cur := run.record().nodes[0].cur) and cur.state is SlotState.MEMBER)
        vm = f"sk-local-{run.job}-n0000-a1"
        capfd.readouterr()
        look = f'cat main.py; echo; echo "$HOSTNAME"; env | grep -c "^{procs.VM}="; exit 3'
        assert cli(["ssh", "waits", "--", "sh", "-c", look]) == 3
        assert capfd.readouterr().out.splitlines() == [WAITS, vm, "1"], "the VM's mark: it ends with the VM"
        logs = stage.cloud.folder / f"vms/{run.record().nodes[0].cur.uid}/root/run/spotkeeper/{run.job}"
        run.until("it to say so", lambda: any("it waits" in path.read_text() for path in logs.rglob("*.log")))
        (start,) = run.ledger(Event.SHELL)
        assert start.node == 0 and start.detail.endswith(f"on {vm}")
        run.cancel()
