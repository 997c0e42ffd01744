"""Reads a job file and reports all its problems at once.

An invalid field hides no problems of other fields, which are checked all the same. ``typed.py`` checks types and
spelling, ``check.py`` checks the meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct

from spotkeeper.contract.job import START_S, JobSpec, PartialJob
from spotkeeper.contract.parse.check import job_problems
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.parse.problem import Problem, SpecError, join, located
from spotkeeper.contract.parse.typed import convert, problems_of, read_text
from spotkeeper.contract.parse.yamltext import read
from spotkeeper.contract.stack import StackState

_STAND_IN = {"name": "-", "command": ["-"]}  # values for invalid required fields; never shown
_OF_NAMES = ("env", "secrets")  # mappings whose entries are independent: valid ones are checked beside invalid ones


class Overrides(Struct, frozen=True):
    """Values from the command line: a name that replaces the job file's, and further arguments of the command."""

    name: str | None = None
    arguments: tuple[str, ...] = ()


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
    document, lines = read(read_text(file), file.name, texts="command")
    document = document if overrides is None else _overridden(document, overrides)
    problems = problems_of(document, JobSpec, by_hand=True)
    spec = _partial(document, problems) if problems else convert(document, JobSpec)
    problems += job_problems(JobContext(spec, stack, file.resolve().parent, now, starts))
    if overrides is not None and overrides.name is not None:
        problems = [replace(one, path="--name") if one.path == "name" else one for one in problems]
    if problems:
        raise located(SpecError(problems), file.name, lines)
    return spec


def _overridden(document: object, overrides: Overrides) -> object:
    if not isinstance(document, dict):
        return document
    named = {} if overrides.name is None else {"name": overrides.name}
    command = document.get("command")
    longer = {"command": [*command, *overrides.arguments]} if isinstance(command, list) else {}
    return {**document, **named, **longer}


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


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))
