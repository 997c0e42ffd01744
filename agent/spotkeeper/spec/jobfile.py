"""A job file as a whole: all that can be known to be wrong with it, at once.

A field that makes no sense hides nothing of the others: they are checked without it, and what cannot be said
without it is not said. This file reads, and asks; the rules are in :mod:`~spotkeeper.spec.fit` (types, spelling)
and :mod:`~spotkeeper.spec.check` (meaning).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import UNSET

from spotkeeper.spec.check import job_problems
from spotkeeper.spec.context import JobContext, taken
from spotkeeper.spec.fit import problems_of
from spotkeeper.spec.job import JobSpec, PartialJob
from spotkeeper.spec.parse import convert, read_text
from spotkeeper.spec.problem import Problem, SpecError, join, located
from spotkeeper.spec.stack import StackState
from spotkeeper.spec.yamltext import read

_STAND_IN = {"name": "-", "command": ["-"]}  # for required fields; nobody gets to see them
_OF_NAMES = ("env", "secrets")  # mappings whose entries mean something each on its own


def read_job(file: Path, stack: StackState | None, now: float, starts: Callable[[JobSpec], float] = taken) -> JobSpec:
    """A job file, checked as far as can be without a cloud; of the stack, what is known of it.

    Args:
        now: unix seconds, of the submission.
        starts: how long a start of the job takes, where somebody measured one, seconds.

    Raises:
        SpecError: everything that is wrong, with the file's lines.
    """
    document, lines = read(read_text(file), file.name)
    problems = problems_of(document, JobSpec, by_hand=True)
    spec = _partial(document, problems) if problems else convert(document, JobSpec)
    problems += job_problems(JobContext(spec, stack, file.resolve().parent, now, starts))
    if problems:
        raise located(SpecError(problems), file.name, lines)
    return spec


def _partial(document: object, problems: Iterable[Problem]) -> JobSpec:
    """What is well in the document; the fields with problems cannot be read."""
    written = document if isinstance(document, Mapping) else {}
    wrong = {problem.path for problem in problems}
    # `sorce: .` is no job without a source: nothing is known of the field that was meant
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
