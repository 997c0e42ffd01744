"""``compare``: a job's forecast on each shape that the stack's pools can give it, by cost and by time."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from spotkeeper.cli import forecast as ground
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import emit, note
from spotkeeper.cli.past import shape_of
from spotkeeper.report.compare import Comparison, Row, Shape, Step, assumed, network_s, shapes, step_s
from spotkeeper.report.compare_text import table
from spotkeeper.report.forecast import Forecast, Library, barred, forecast
from spotkeeper.report.forecast_past import Task
from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.problem import SpecError
from spotkeeper.spec.stack import PoolState


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
    """Print the comparison.

    Raises:
        SpecError, CliError: as ``forecast``; or no shape fits, the calibration run failed, two step times were given.
    """
    if measure and step_time is not None:
        raise CliError("--measure or --step-time: one of them", Exit.USAGE)
    known = ground.ground(stack, stack_file)
    spec = known.job(file)
    said = list(known.said)
    home = ground.pool_of(spec, known.stack, [])
    step = _step(file, spec, known, home, step_time, gradients_gb, said, measure=measure)
    made = compare(spec, known, home, step, work, markets, said)
    emit(made, as_json, "" if as_json else table(made))


def _step(
    file: Path,
    spec: JobSpec,
    known: ground.Ground,
    home: PoolState,
    step_time: float | None,
    gradients_gb: float,
    said: list[str],
    *,
    measure: bool,
) -> Step:
    """The step that all others are made from: given, measured here, or as an earlier job of this name told it."""
    shape = shape_of(spec, home)
    what = f"{shape.nodes} x {shape.machine_type}"
    if step_time is not None:
        said.append(f"step: {step_time:g} s on {what}, as given")
        return Step(step_time, shape, gradients_gb)
    if measure:
        from spotkeeper.cli.measure import LONGEST_S, STEPS
        from spotkeeper.cli.measure import step_s as measured

        note(f"measuring: the job's command runs here until it has made {STEPS} steps, {LONGEST_S:.0f} s at most")
        took = measured(file, spec)
        said.append(f"step: {took:.3f} s measured here with one process, which is taken for one of {home.machine_type}")
        return Step(took, Shape(home.machine_type, 1, 1), gradients_gb)
    if (told := known.ran(spec.name)) is not None:
        was = told.shape or shape
        what = f"{was.nodes} x {was.machine_type}"
        said.append(f"step: {told.step_s:.3f} s on {what}, as the job {told.job} of this name told last")
        return Step(told.step_s, was, gradients_gb)
    said.append(f"step: 1 s on {what}, for nobody measured one (--measure, or --step-time SECONDS)")
    return Step(1.0, shape, gradients_gb)


def compare(
    spec: JobSpec,
    known: ground.Ground,
    home: PoolState,
    step: Step,
    work: str | None,
    markets: Path | None,
    said: list[str],
) -> Comparison:
    """Each pool with as many machines as make the job's processes, on spot and on-demand. ``work`` is that of the
    job on its own shape; on another it is as much longer as its steps are.

    Raises:
        SpecError, CliError: no shape is left.
    """
    own = shape_of(spec, home)
    pools = {pool.name: pool for pool in ground.dynamic(spec, known.stack)}
    fits, skipped = shapes(pools.values(), own, home.name)
    base = ground.task_of(replace(spec, deadline=None), known, work, said, home)
    tasks: list[tuple[Shape, float, Task, Library]] = []
    for name, shape in fits:
        took = step_s(step, shape)
        task_work = base.work_h * took / step_s(step, own)
        try:
            task = ground.task_of(replace(spec, nodes=shape.nodes), known, f"{task_work:.4f}h", [], pools[name])
        except SpecError as error:  # its deadline cannot be held there: the line says which can
            skipped.append(f"{name}: {error}")
        else:
            if spec.policy != "spot" and (why := barred(task)):
                skipped.append(f"{name} on-demand: {why}")
            if spec.policy != "on-demand" or task.shop.on_demand:
                tasks.append((shape, took, task, ground.library_of(known, task, markets)))
    if not tasks:
        remedy = "another `deadline`, `nodes` or `pools` in the job file"
        raise CliError("\n".join([f"{spec.name}: no shape fits", *skipped]), Exit.REFUSED, remedy)
    rows: list[Row] = []
    with ground.progress(f"replaying {spec.name}", sum(len(library.parts) for *_, library in tasks)) as done:
        for shape, took, task, library in tasks:
            rows += _rows(forecast(task, library, done=done), task, shape, took, network_s(step, shape))
    rows.sort(key=lambda row: (row.course.usd.mid, row.course.finish_h.mid))
    lines = (*said, *assumed(step, [row.shape for row in rows]), f"work: {base.work_h:.1f} h on the job's own shape")
    return Comparison(spec.name, tuple(rows), tuple(skipped), lines)


def _rows(made: Forecast, task: Task, shape: Shape, took: float, reduce: float) -> list[Row]:
    bought = [("spot", made.expected)] if task.spec.policy != "on-demand" else []
    bought += [("on-demand", made.on_demand)] if task.shop.on_demand else []
    return [Row(made.pool, shape, how, took, reduce, task.work_h, course) for how, course in bought]
