"""Reads a job file and reports all its problems at once.

An invalid field hides no problems of other fields, which are checked all the same. ``typed.py`` checks types and
spelling, ``check.py`` checks the meaning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct

from spotkeeper.contract.job import START_S, JobSpec, MachineGroup, PartialJob, UnknownError
from spotkeeper.contract.parse import check_mix
from spotkeeper.contract.parse.check import job_problems
from spotkeeper.contract.parse.check_params import placeholder_problems
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.parse.problem import Problem, SpecError, called, join, located
from spotkeeper.contract.parse.typed import convert, problems_of, read_text
from spotkeeper.contract.parse.yamltext import read
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.sweep import Params
from spotkeeper.contract.sweepfile import filled

_NO_JOB = JobSpec("-", ("-",))
_STAND_IN = {"name": "-", "command": ["-"]}  # values for invalid required fields; never shown
# Mappings whose entries are independent: valid ones are checked beside invalid ones.
_OF_NAMES = ("env", "params", "secrets")


class Overrides(Struct, frozen=True):
    """What replaces values of the job file: a name and further arguments (command line), values of a search's trial."""

    name: str | None = None
    arguments: tuple[str, ...] = ()
    params: Params = {}


def read_job(
    file: Path,
    stack: StackState | None,
    now: float,
    starts: Callable[[JobSpec], float] = lambda _: START_S,
    overrides: Overrides | None = None,
) -> JobSpec:
    """Read a job file and check it as far as possible without a cloud. ``stack``: None if it is unknown.

    Args:
        now: time of the submission, unix seconds.
        starts: returns the duration of a start of the job in seconds, measured or ``START_S``.

    Raises:
        SpecError: with every problem and its line in the file.
    """
    document, lines = read(read_text(file), called(file), texts="command")
    try:
        return filled(checked_job(document, JobContext(_NO_JOB, stack, file.resolve().parent, now, starts), overrides))
    except SpecError as error:
        raise located(error, called(file), lines) from None


def checked_job(document: object, context: JobContext, overrides: Overrides | None = None) -> JobSpec:
    """Return the job that a job file's values describe; placeholders in its command are not filled in.

    Args:
        context: what is known of the stack, the folder and the time; its job is not read.

    Raises:
        SpecError: with every problem.
    """
    document = document if overrides is None else _overridden(document, overrides)
    problems = problems_of(document, JobSpec, by_hand=True)
    spec = _partial(document, problems) if problems else convert(document, JobSpec)
    problems += _of_valid_groups(document, problems, spec, context.stack)
    with contextlib.suppress(UnknownError):
        problems += placeholder_problems(spec)
        spec = spec if problems else filled(spec)  # so that `train_{model}.py` is the script that is looked for
    problems += job_problems(replace(context, spec=spec))
    if overrides is not None and overrides.name is not None:
        problems = [replace(one, path="--name") if one.path == "name" else one for one in problems]
    if problems:
        raise SpecError(problems)
    return convert(document, JobSpec)


def _overridden(document: object, overrides: Overrides) -> object:
    if not isinstance(document, dict):
        return document
    named = {} if overrides.name is None else {"name": overrides.name}
    command, params = document.get("command"), document.get("params", {})
    longer = {"command": [*command, *overrides.arguments]} if isinstance(command, list) else {}
    drawn = {"params": {**params, **overrides.params}} if overrides.params and isinstance(params, dict) else {}
    return {**document, **named, **longer, **drawn}


def _partial(document: object, problems: Iterable[Problem]) -> JobSpec:
    """Return the document's valid fields as a job; the fields with problems are ``UNSET``."""
    written = document if isinstance(document, Mapping) else {}
    wrong = {problem.path for problem in problems}
    # `sorce: .` does not mean that the job has no source: the field that was meant counts as unknown
    unknown = {problem.hint for problem in problems if problem.path in written and problem.hint}
    well: dict[str, object] = dict(_STAND_IN)
    for name in JobSpec.__struct_fields__:
        value = written.get(name)
        if name in _OF_NAMES and isinstance(value, Mapping) and name not in wrong:
            value = {key: item for key, item in value.items() if join(name, key) not in wrong}
        elif not isinstance(document, Mapping) or any(_within(path, name) for path in wrong):
            unknown.add(name)
        if name in written and name not in unknown:
            well[name] = value
    spec = convert(well, JobSpec)
    fields: dict[str, Any] = {
        name: UNSET if name in unknown else getattr(spec, name) for name in JobSpec.__struct_fields__
    }
    return PartialJob(**fields)


def _of_valid_groups(
    document: object, problems: Sequence[Problem], spec: JobSpec, stack: StackState | None
) -> list[Problem]:
    """Check the valid groups of a mix beside invalid ones; none if all are valid: other rules check these."""
    groups = document.get("machines") if isinstance(document, Mapping) else None
    if not isinstance(groups, list) or not any(one.path.startswith("machines[") for one in problems):
        return []
    places = [join("machines", index) for index in range(len(groups))]
    wrong = {place for place in places if any(_within(one.path, place) for one in problems)}
    valid = ((at, convert(groups[at], MachineGroup)) for at, place in enumerate(places) if place not in wrong)
    return [*check_mix.contradictions(spec), *check_mix.group_problems(stack, valid)]


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))
