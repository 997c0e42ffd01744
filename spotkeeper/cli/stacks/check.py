"""``check``: reports all problems of a stack file and of the job files that it names, without a cloud or an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.cli.output import emit
from spotkeeper.cli.stacks.stackfile import CHECKOUT, StackFile, no_checkout, read_stack_file, stack_path
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.contract.parse.problem import Problem, SpecError

if TYPE_CHECKING:
    from infra.settings.model import Settings
    from infra.settings.pool import Pool

EXAMPLES = ("acme", "123456789012", "ami-0c0ffee0c0ffee000", "0123AB-4567CD-89EF01")  # values in the example files


class PlacedProblem(Struct, frozen=True):
    """One problem with its file and line, for an editor or a review."""

    file: str
    line: int | None
    path: str
    value: str | None  # as JSON, shortened
    message: str
    nearest: str | None


class CheckedPool(Struct, frozen=True):
    """A pool, with the hourly list price of all its machines in the most expensive zone: all on spot, and at most."""

    name: str
    kind: str
    machine: str
    machines: int
    on_demand: int  # the most of them on-demand
    usd_hour_spot: float | None
    usd_hour_most: float


class CheckedStack(Struct, frozen=True):
    """The result of a check, as the command prints it."""

    stack: str
    ok: bool
    problems: tuple[PlacedProblem, ...] = ()
    cloud: str = ""
    region: str = ""
    pools: tuple[CheckedPool, ...] = ()
    jobs: tuple[str, ...] = ()  # their files
    examples: tuple[str, ...] = ()  # keys that still have a value of the example files


def run(stack: str | None, *, as_json: bool) -> None:
    """Check a stack, print the result, and fail if anything is invalid.

    Args:
        stack: a stack's name, or the path of its file; None: SPOTKEEPER_STACK, or the local one.

    Raises:
        SpecError: all problems; with ``as_json`` they are printed, and a :class:`CliError` is raised.
        CliError: no such stack, or no checkout.
    """
    file = stack_path(stack, "spotkeeper check FILE")
    try:
        checked = check(file)
    except SpecError as error:
        if not as_json:
            raise
        name, count = file.name.removeprefix("Pulumi.").removesuffix(".yaml"), len(error.problems)
        emit(CheckedStack(name, False, tuple(map(_placed, error.problems))), True, "")
        raise CliError(f"{count} problem{'s' * (count != 1)}", Exit.USAGE) from None
    emit(checked, as_json, _text(checked))


def check(file: Path) -> CheckedStack:
    """Check a stack file.

    Raises:
        SpecError: all problems of the stack file and of the job files that it names.
        CliError: this is no checkout.
    """
    try:
        from infra.settings.read import read_jobs
    except ImportError:
        raise no_checkout() from None
    try:
        read = read_stack_file(file, None, "spotkeeper check FILE")
    except SpecError as error:
        raise SpecError([*error.problems, *_of_jobs(file)]) from None
    # As in `up`, deadlines are not compared with the clock: the file of an ended job may have a past one.
    found = read_jobs(read.settings, CHECKOUT, 0.0)
    return _checked(read, tuple(job.name for job in found))


def _of_jobs(file: Path) -> tuple[Problem, ...]:
    """The problems of the job files alone, for a stack file that is invalid itself."""
    from infra.settings.read import NAMESPACE, read_one
    from spotkeeper.local.deploy.config import read_config

    try:
        names = json.loads(read_config(file).get(f"{NAMESPACE}:jobs", "[]"))
    except (SpecError, ValueError):
        return ()  # the problem is reported already
    problems: list[Problem] = []
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts:
            problems += read_one(name, CHECKOUT, 0.0, None)[1]
    return tuple(problems)


def _placed(one: Problem) -> PlacedProblem:
    return PlacedProblem(one.source, one.line, one.path, one.value, one.message, one.hint)


def _checked(read: StackFile, jobs: tuple[str, ...]) -> CheckedStack:
    settings: Settings = read.settings
    pools = tuple(map(_pool, settings.pools))
    examples = tuple(key for key, text in sorted(read.config.items()) if any(word in text for word in EXAMPLES))
    return CheckedStack(read.name, True, (), settings.cloud, settings.region, pools, jobs, examples)


def _pool(pool: Pool) -> CheckedPool:
    prices = [price for zone in pool.zones if (price := pool.price(zone))]
    dear = max(price.on_demand for price in prices)
    spot = max((price.spot for price in prices if price.spot is not None), default=dear)
    bought = pool.on_demand_machines() if pool.kind == "spot" else pool.size
    return CheckedPool(
        name=pool.name,
        kind=pool.kind,
        machine=pool.machine.type,
        machines=pool.size,
        on_demand=bought,
        usd_hour_spot=round(pool.size * spot, 2) if pool.kind == "spot" else None,
        usd_hour_most=round(bought * dear + (pool.size - bought) * spot, 2),
    )


def _text(checked: CheckedStack) -> str:
    held = len(checked.examples)
    examples = f", but {held} field{'s' * (held != 1)} still hold{'s' * (held == 1)} example values" if held else ""
    lines = [f"{checked.stack}: valid ({checked.cloud}, {checked.region}){examples}"]
    for pool in checked.pools:
        count = f"{pool.machines} x" if pool.kind == "static" else f"up to {pool.machines} x"
        price = f"${pool.usd_hour_most:.2f} an hour"
        if pool.usd_hour_spot is not None:
            price = f"${pool.usd_hour_spot:.2f} an hour as spot, at most ${pool.usd_hour_most:.2f}"
        lines.append(f"  {pool.name} ({pool.kind}): {count} {pool.machine}, {price}")
    lines += [f"  job {name}" for name in checked.jobs]
    if checked.examples:
        lines.append(f"example values to replace: {', '.join(checked.examples)}")
    return "\n".join(
        [*lines, "no cloud was called: quotas, images and permissions are checked by pulumi preview and up"]
    )
