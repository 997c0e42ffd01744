"""``check``: whether a stack file, and the job files it names, can work. Asks no cloud and starts no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.output import emit
from spotkeeper.cli.show import CHECKOUT, StackFile, no_checkout, read_stack_file, stack_path
from spotkeeper.spec.problem import Problem, SpecError

if TYPE_CHECKING:
    from infra.settings import Pool, Settings

EXAMPLES = ("acme", "123456789012", "ami-0c0ffee0c0ffee000", "0123AB-4567CD-89EF01")  # of the stack files to copy


class Wrong(Struct, frozen=True):
    """One problem, as an editor or a review would place it."""

    file: str
    line: int | None
    path: str
    value: str | None  # as JSON, shortened
    message: str
    nearest: str | None


class CheckedPool(Struct, frozen=True):
    """What all its machines cost together, by list price in the dearest zone: all of them spot, and at most."""

    name: str
    kind: str
    machine: str
    machines: int
    on_demand: int  # how many of them may be
    usd_hour_spot: float | None
    usd_hour_most: float


class Checked(Struct, frozen=True):
    stack: str
    ok: bool
    problems: tuple[Wrong, ...] = ()
    cloud: str = ""
    region: str = ""
    pools: tuple[CheckedPool, ...] = ()
    jobs: tuple[str, ...] = ()  # their files
    examples: tuple[str, ...] = ()  # keys with a value of the stack files to copy: nobody's


def run(stack: str | None, *, as_json: bool) -> None:
    """Check, print, and fail where something is wrong.

    Args:
        stack: a stack's name, or the path of its file; None: SPOTKEEPER_STACK, or the local one.

    Raises:
        SpecError: what is wrong, all of it; with ``as_json`` it is printed, and a :class:`CliError` raised.
        CliError: no such stack, or no checkout.
    """
    named = stack is not None and stack.endswith((".yaml", ".yml"))
    file = Path(stack) if stack is not None and named else stack_path(stack, "spotkeeper check FILE")
    try:
        checked = check(file)
    except SpecError as error:
        if not as_json:
            raise
        name, count = file.name.removeprefix("Pulumi.").removesuffix(".yaml"), len(error.problems)
        emit(Checked(name, False, tuple(map(_wrong, error.problems))), True, "")
        raise CliError(f"{count} problem{'s' * (count != 1)}", Exit.USAGE) from None
    emit(checked, as_json, _text(checked))


def check(file: Path) -> Checked:
    """
    Raises:
        SpecError: everything that is wrong with the stack file and the job files it names.
        CliError: no checkout.
    """
    try:
        from infra.settings import jobs
    except ImportError:
        raise no_checkout() from None
    try:
        read = read_stack_file(file, None, "spotkeeper check FILE")
    except SpecError as error:
        raise SpecError([*error.problems, *_of_jobs(file)]) from None
    # Not by the clock, like `up`: the file of a job that is over may have a deadline that is past.
    found = jobs.read_jobs(read.settings, CHECKOUT, 0.0)
    return _checked(read, tuple(job.name for job in found))


def _of_jobs(file: Path) -> tuple[Problem, ...]:
    """What is wrong with the job files themselves, where the stack they are for cannot be known."""
    from infra.settings import NAMESPACE, jobs
    from spotkeeper.local.deploy.config import read_config

    try:
        names = json.loads(read_config(file).get(f"{NAMESPACE}:jobs", "[]"))
    except (SpecError, ValueError):
        return ()  # that file is what is wrong, and was said
    told: list[Problem] = []
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts:
            told += jobs.read_one(name, CHECKOUT, 0.0, None)[1]
    return tuple(told)


def _wrong(one: Problem) -> Wrong:
    return Wrong(one.source, one.line, one.path, one.value, one.message, one.hint)


def _checked(read: StackFile, jobs: tuple[str, ...]) -> Checked:
    settings: Settings = read.settings
    pools = tuple(map(_pool, settings.pools))
    examples = tuple(key for key, text in sorted(read.config.items()) if any(word in text for word in EXAMPLES))
    return Checked(read.name, True, (), settings.cloud, settings.region, pools, jobs, examples)


def _pool(pool: Pool) -> CheckedPool:
    prices = [price for zone in pool.zones if (price := pool.price(zone))]
    dear = max(price.on_demand for price in prices)
    spot = max((price.spot for price in prices if price.spot is not None), default=dear)
    bought = pool.on_demand_nodes() if pool.kind == "spot" else pool.size
    return CheckedPool(
        name=pool.name,
        kind=pool.kind,
        machine=pool.machine.type,
        machines=pool.size,
        on_demand=bought,
        usd_hour_spot=round(pool.size * spot, 2) if pool.kind == "spot" else None,
        usd_hour_most=round(bought * dear + (pool.size - bought) * spot, 2),
    )


def _text(checked: Checked) -> str:
    lines = [f"{checked.stack}: right ({checked.cloud}, {checked.region})"]
    for pool in checked.pools:
        count = f"{pool.machines} x" if pool.kind == "static" else f"up to {pool.machines} x"
        price = f"${pool.usd_hour_most:.2f} an hour"
        if pool.usd_hour_spot is not None:
            price = f"${pool.usd_hour_spot:.2f} an hour as spot, at most ${pool.usd_hour_most:.2f}"
        lines.append(f"  {pool.name} ({pool.kind}): {count} {pool.machine}, {price}")
    lines += [f"  job {name}" for name in checked.jobs]
    if checked.examples:
        lines.append(f"still as in the example, where it is acme's: {', '.join(checked.examples)}")
    return "\n".join([*lines, "no cloud was asked: quotas, images and rights show in pulumi preview and up"])
