"""A short calibration run: the job's own command on this machine, alone, until its step time is known.

It runs as on a machine of a stack (a control file tells its steps), in a folder of its own that is deleted after it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import spotkeeper
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.spec.job import JobSpec
from spotkeeper.train.control import NAME, Control

STEPS = 12  # the first ones are slower: the median of these
LONGEST_S = 120.0  # from the start, imports included
LOOK_S = 0.05


def step_s(file: Path, spec: JobSpec, longest_s: float = LONGEST_S) -> float:
    """Seconds of a step of one process here; its global batch is the job's.

    Raises:
        CliError: it ended, or took too long, before it had made so many steps.
    """
    folder = Path(tempfile.mkdtemp(prefix="spotkeeper-measure-"))
    control = Control.create(folder / NAME)
    source = file.resolve().parent / (spec.source or ".")
    python = sys.executable if spec.python == "python3" else spec.python
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [python, *spec.command],
            cwd=source,
            env=_environment(folder, spec),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return _watched(process, control, folder, longest_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            control.close()
            shutil.rmtree(folder, ignore_errors=True)


def _watched(process: subprocess.Popen[bytes], control: Control, folder: Path, longest_s: float) -> float:
    ends = time.monotonic() + longest_s
    while time.monotonic() < ends:
        over = process.poll() is not None
        if control.step >= STEPS and control.step_s:
            return float(control.step_s)
        if over:
            last = (folder / "log").read_text("utf-8", "replace").strip().splitlines()[-3:]
            why = "; ".join(last) or "it printed nothing"
            raise CliError(f"the calibration run ended after {control.step} steps: {why}", Exit.FAILED, OTHER)
        time.sleep(LOOK_S)
    made = f"{control.step} steps in {longest_s:.0f} s, {STEPS} are wanted"
    raise CliError(f"the calibration run made {made}", Exit.FAILED, OTHER)


OTHER = "--step-time SECONDS, as measured elsewhere"


def _environment(folder: Path, spec: JobSpec) -> dict[str, str]:
    """As torchrun sets it for one process: most scripts begin with ``init_process_group``, which wants it."""
    package = str(Path(spotkeeper.__file__).resolve().parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **spec.env,
        "PYTHONPATH": os.pathsep.join(paths),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "SPOTKEEPER_RUN": str(folder),
        "SPOTKEEPER_CKPT": str(folder / "ckpt"),
        "SPOTKEEPER_OUTPUT": str(folder / "out"),
    }


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
