"""``compare``: forecasts a job on each pool of the stack; it can measure a step in a calibration run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from spotkeeper.cli.jobs.check_script import trainer
from spotkeeper.cli.jobs.forecast import dynamic, library_of, never, pool_of, task_of
from spotkeeper.cli.jobs.ground import Ground, ground, shape_of
from spotkeeper.cli.output import emit, note, progress
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.stack import PoolState
from spotkeeper.report.forecast.compare import (
    Comparison,
    ForecastRow,
    GangShape,
    MeasuredStep,
    assumed,
    network_s,
    shapes,
    step_s,
    table,
)
from spotkeeper.report.forecast.forecast import Forecast, Library, barred, forecast
from spotkeeper.report.forecast.recordings import Task
from spotkeeper.train.agent_link.control import NAME, Control

STEPS = 12  # steps of a calibration run: the first ones are slower, and the median counts
LONGEST_S = 120.0  # longest calibration run, including its imports
POLL_S = 0.05
OTHERWISE = "--step-time SECONDS, as measured elsewhere"


def run(
    file: Path,
    stack: str | None,
    stack_file: Path | None,
    work: str | None,
    markets: Path | None,
    step_time: float | None,
    gradients_gb: float,
    *,
    measure: bool,
    as_json: bool,
) -> None:
    """Print the comparison of a job on all pools.

    Raises:
        SpecError, CliError: as ``forecast``; or no pool fits, the calibration run failed, or two options conflict.
    """
    if measure and step_time is not None:
        raise CliError("--measure and --step-time exclude each other", Exit.USAGE)
    known = ground(stack, stack_file)
    spec = known.job(file)
    said = list(known.said)
    home = pool_of(spec, known.stack, [])
    step = _step(file, spec, known, home, step_time, gradients_gb, said, measure=measure)
    made = compare(spec, known, home, step, work, markets, said)
    emit(made, as_json, "" if as_json else table(made))


def _step(
    file: Path,
    spec: JobSpec,
    known: Ground,
    home: PoolState,
    step_time: float | None,
    gradients_gb: float,
    said: list[str],
    *,
    measure: bool,
) -> MeasuredStep:
    """Return the one known duration of a step, from which those on other pools are computed.

    It is given, measured here, reported by an earlier job, or assumed, as a line appended to ``said`` tells.
    """
    shape = shape_of(spec, home, known.networks)
    what = f"{shape.nodes} x {shape.machine_type}"
    if step_time is not None:
        said.append(f"step: {step_time:g} s on {what}, as given")
        return MeasuredStep(step_time, shape, gradients_gb)
    if measure:
        note(f"measuring: running the job's command here for {STEPS} steps, at most {LONGEST_S:.0f} s")
        took = measured_step_s(file, spec)
        said.append(f"step: {took:.3f} s measured here with one process, assumed to be the same on {home.machine_type}")
        return MeasuredStep(took, GangShape(home.machine_type, 1, 1), gradients_gb)
    if (told := known.ran(spec.name)) is not None:
        was = told.shape or shape
        what = f"{was.nodes} x {was.machine_type}"
        said.append(f"step: {told.step_s:.3f} s on {what}, as an earlier job of this name ({told.job}) reported")
        return MeasuredStep(told.step_s, was, gradients_gb)
    said.append(f"step: 1 s on {what}, assumed, since no step was measured (--measure, or --step-time SECONDS)")
    return MeasuredStep(1.0, shape, gradients_gb)


def compare(
    spec: JobSpec,
    known: Ground,
    home: PoolState,
    step: MeasuredStep,
    work: str | None,
    markets: Path | None,
    said: list[str],
) -> Comparison:
    """Compare the job on each pool with enough machines for its processes, on spot and on-demand.

    Args:
        work: the training time on the job's own machines; for others it is scaled with the duration of a step.

    Raises:
        SpecError, CliError: no pool fits.
    """
    own = shape_of(spec, home, known.networks)
    pools = {pool.name: pool for pool in dynamic(spec, known.stack)}
    fits, skipped = shapes(pools.values(), own, home.name, known.networks)
    base = task_of(replace(spec, deadline=None), known, work, said, home)
    tasks: list[tuple[GangShape, float, Task, Library]] = []
    for name, shape in fits:
        took = step_s(step, shape)
        task_work = base.work_h * took / step_s(step, own)
        try:
            task = task_of(replace(spec, nodes=shape.nodes), known, f"{task_work:.4f}h", [], pools[name])
        except SpecError as error:  # this pool cannot meet the deadline; the message names a deadline that it can meet
            skipped.append(f"{name}: {error}")
        else:
            if spec.policy != "spot" and (why := barred(task)):
                skipped.append(f"{name} on-demand: {why}")
            if spec.policy != "on-demand" or task.shop.on_demand:
                tasks.append((shape, took, task, library_of(known, task, markets)))
    if not tasks:
        remedy = "another `deadline`, `nodes` or `pools` in the job file"
        raise CliError("\n".join([f"{spec.name}: fits no pool of the stack", *skipped]), Exit.REFUSED, remedy)
    rows: list[ForecastRow] = []
    with progress(f"replaying {spec.name}", sum(len(library.parts) for *_, library in tasks)) as done:
        for shape, took, task, library in tasks:
            made = forecast(task, library, done=done)
            skipped += [] if made.runs else [f"{made.pool} spot: {never(spec, made.replays)}"]
            rows += _rows(made, task, shape, took, network_s(step, shape))
    rows.sort(key=lambda row: (row.outlook.usd.mid, row.outlook.finish_h.mid))
    lines = (*said, *assumed(step, [row.shape for row in rows]), f"work: {base.work_h:.1f} h on the job's machines")
    return Comparison(spec.name, tuple(rows), tuple(skipped), lines)


def _rows(made: Forecast, task: Task, shape: GangShape, took: float, reduce: float) -> list[ForecastRow]:
    if not made.bought:
        return [ForecastRow(made.pool, shape, "reserved", took, reduce, task.work_h, made.expected)]
    bought = [("spot", made.expected)] if task.spec.policy != "on-demand" and made.runs else []
    bought += [("on-demand", made.on_demand)] if task.shop.on_demand else []
    return [ForecastRow(made.pool, shape, how, took, reduce, task.work_h, outlook) for how, outlook in bought]


# -- a calibration run


def measured_step_s(file: Path, spec: JobSpec, longest_s: float = LONGEST_S) -> float:
    """Measure the seconds of a step of the job's command on this machine, in one process, with the global batch.

    The command runs as on a machine of a stack (a control file reports its steps), in a folder that is deleted
    afterwards.

    Raises:
        CliError: the run ended before ``STEPS`` steps, or took too long.
    """
    source = file.resolve().parent / (spec.source or ".")
    python = sys.executable if spec.python == "python3" else spec.python
    with tempfile.TemporaryDirectory(prefix="spotkeeper-measure-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        run = trainer([python, *spec.command], _environment(folder, spec), folder / "log", source)
        with Control.create(folder / NAME) as control, run as process:
            return _watched(process, control, folder, longest_s)


def _watched(process: subprocess.Popen[bytes], control: Control, folder: Path, longest_s: float) -> float:
    ends = time.monotonic() + longest_s
    while time.monotonic() < ends:
        over = process.poll() is not None
        if control.step >= STEPS and control.step_s:
            return float(control.step_s)
        if over:
            last = (folder / "log").read_text("utf-8", "replace").strip().splitlines()[-3:]
            why = "; ".join(last) or "it printed nothing"
            raise CliError(f"the calibration run ended after {control.step} steps: {why}", Exit.FAILED, OTHERWISE)
        time.sleep(POLL_S)
    made = f"only {control.step} of {STEPS} steps within {longest_s:.0f} s"
    raise CliError(f"the calibration run made {made}", Exit.FAILED, OTHERWISE)


def _environment(folder: Path, spec: JobSpec) -> dict[str, str]:
    """The environment that torchrun would set for one process; ``init_process_group`` needs it."""
    return {
        **os.environ,
        **spec.env,
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
