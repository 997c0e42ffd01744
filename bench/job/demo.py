"""The promises of the main job, measured in one run of the demo.

Recovery times come from the control files of the training processes, to the millisecond; ``seconds`` leaves out boots,
which depend on the cloud.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 900.0  # a demo takes four to five minutes on two cores


def figures() -> list[dict[str, object]]:
    """Steps lost after a full notice, and the slowest recovery from an unannounced loss.

    Raises:
        RuntimeError: the demo failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="sk-bench-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "spotkeeper.local.demo", "--folder", folder + "/demo"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the demo ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        report = json.loads((Path(folder) / "demo" / "report.json").read_text())
    announced = [one for one in report["recoveries"] if one["announced"]]
    surprises = [one for one in report["recoveries"] if not one["announced"]]
    lost = max(one["steps_lost"] for one in announced)
    slowest = max(one["seconds"] for one in surprises)
    against = f"{len(announced)} announced and {len(surprises)} unannounced changes in one run of the demo"
    return [
        _figure("demo.steps_lost_after_full_notice", lost, "steps", "0", lost == 0, against),
        _figure("demo.unannounced_loss_to_step_s", slowest, "s", "<= 10", slowest <= 10, against),
    ]


def _figure(name: str, value: float, unit: str, goal: str, holds: bool, against: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds, "against": against}
