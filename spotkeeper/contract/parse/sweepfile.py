"""Reads a search's file and its job, and reports all their problems at once.

As of a job file, types and spelling come from ``typed.py``, and each rule on the meaning is a small generator here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.contract.job import START_S, JobSpec
from spotkeeper.contract.names import JOB_NAME
from spotkeeper.contract.parse.check_params import WANT_NAME
from spotkeeper.contract.parse.check_run import JobContext
from spotkeeper.contract.parse.jobfile import Overrides, checked_job
from spotkeeper.contract.parse.problem import Problem, SpecError, called, join, located, nearest, problem
from spotkeeper.contract.parse.typed import convert, problems_of, read_text
from spotkeeper.contract.parse.yamltext import read
from spotkeeper.contract.stack import StackState
from spotkeeper.contract.sweep import MOST_TRIALS, Params
from spotkeeper.contract.sweepfile import (
    NAME_LENGTH,
    PARAM,
    Dimension,
    SweepFile,
    Value,
    finite,
    holds,
    placeholders,
    same,
    trial_name,
)

SOBOL_DIMENSIONS = 21


class SweepAndJob(Struct, frozen=True):
    """A checked search. ``job``: without values of the search in its command; ``folder``: where its `source` begins."""

    file: SweepFile
    job: JobSpec
    job_file: Path


def read_sweep(
    path: Path,
    stack: StackState | None,
    now: float,
    starts: Callable[[JobSpec], float] = lambda _: START_S,
) -> SweepAndJob:
    """Read a search's file and its job, and check both as far as possible without a cloud.

    Args:
        stack, now, starts: as for :func:`~spotkeeper.contract.parse.jobfile.read_job`.

    Raises:
        SpecError: with every problem and its line in the file.
    """
    document, lines = read(read_text(path), called(path), texts="job.command")
    if problems := problems_of(document, SweepFile, by_hand=True):
        raise located(SpecError([*problems, *_despite(problems, document)]), called(path), lines)
    file = convert(document, SweepFile)
    problems = [found for rule in RULES for found in rule(file)]
    errors = [located(SpecError(problems), called(path), lines)] if problems else []
    inline = isinstance(file.job, dict)
    job_file = path if isinstance(file.job, dict) else path.parent / file.job
    context = JobContext(JobSpec("-", ("-",)), stack, job_file.resolve().parent, now, starts)
    job: object = file.job
    try:
        if not inline:
            job, lines = read(read_text(job_file), called(job_file), texts="command")
        checked = _job(file, job, context, bool(problems))
    except SpecError as error:
        errors.append(error if error.problems[0].source else _in_file(error, called(job_file), lines, inline))
    if errors:
        raise SpecError(each for error in errors for each in error.problems)
    return SweepAndJob(file, checked, job_file)


def _despite(problems: Iterable[Problem], document: object) -> Iterator[Problem]:
    """Yield what else is wrong with a search's file that has ``problems`` of type: what its valid fields break."""
    wrong = {re.split(r"[.\[]", each.path)[0] for each in problems}
    if isinstance(document, Mapping) and "" not in wrong:
        valid = {key: document[key] for key in SweepFile.__struct_fields__ if key in document and key not in wrong}
        file = convert({**STAND_IN, **valid}, SweepFile)
        for rule, fields in RULES.items():
            if wrong.isdisjoint(fields):
                yield from rule(file)


def _in_file(error: SpecError, source: str, lines: Mapping[str, int], inline: bool) -> SpecError:
    """Return the error of a job with file and lines; ``inline``: the job is in the search's file."""
    if inline:
        error = SpecError(replace(each, path=f"job.{each.path}".rstrip(".")) for each in error.problems)
    return located(error, source, lines)


def _job(file: SweepFile, document: object, context: JobContext, wrong: bool) -> JobSpec:
    """Return the job, checked with values of the search: it need not have any for the search's parameters.

    ``wrong``: whether the search's file has problems, so that its name may make no name of a job.
    """
    overrides = Overrides("trial" if wrong else trial_name(file.name, 0), (), example(file.space))
    written = {"name": "trial", **document} if isinstance(document, Mapping) else document
    try:
        checked = checked_job(written, context, overrides)
    except SpecError as error:
        named = (replace(each, path="name") if each.path == "--name" else each for each in error.problems)
        raise SpecError(named) from None
    own = document.get("params", {}) if isinstance(document, Mapping) else {}
    job = msgspec.structs.replace(checked, params=dict(own))
    if problems := [*_in_trials(file, job)]:
        raise SpecError(problems)
    return job


def example(space: Mapping[str, Dimension]) -> Params:
    """Return a value for each parameter of the search with a valid name, also for those that never apply together."""
    found: Params = {}
    for name, one in space.items():
        value: Value | None = one.choice[0] if one.choice else None
        for range_ in (one.integers, one.uniform, one.loguniform):
            value = range_[0] if range_ else value
        if value is not None and PARAM.match(name):
            found[name] = value
    return found


def _in_trials(file: SweepFile, job: JobSpec) -> Iterator[Problem]:
    """Yield what is wrong with a job as a trial: a ``{name}`` without a value in some trials, no stop at a step."""
    for index, word in enumerate(job.command):
        for name in placeholders(word):
            if name not in job.params and name in file.space and file.space[name].when:
                told = f"{name} has no value in trials where its `when` does not hold: give it one under `params`"
                yield problem(join("command", index), told, word)
    if file.stop is not None and job.stop == "signal":
        told = "a search with `stop: {halving: ...}` needs `library`: only the library stops at a step"
        yield problem("stop", told, job.stop)


# -- rules


def name(file: SweepFile) -> Iterator[Problem]:
    if not JOB_NAME.match(file.name) or len(file.name) > NAME_LENGTH:
        near = re.sub(r"[^a-z0-9]+", "-", file.name.lower()).strip("-0123456789")[:NAME_LENGTH].rstrip("-")
        want = f"want a letter, then letters, digits and -, at most {NAME_LENGTH}, all lower case"
        yield problem("name", want, file.name, near if JOB_NAME.match(near) else None)


def dimensions(file: SweepFile) -> Iterator[Problem]:
    if not file.space:
        yield problem("space", "is empty, want a parameter, such as lr: {loguniform: [1e-5, 1e-1]}")
    for word, one in file.space.items():
        path = join("space", word)
        if not PARAM.match(word):
            yield problem(path, WANT_NAME)
        if len(one.kinds()) != 1:
            said = f"has {' and '.join(one.kinds())}" if one.kinds() else "has no values"
            yield problem(path, f"{said}, want one of choice, int, uniform, loguniform")
        else:
            yield from _values(path, one)


def _values(path: str, one: Dimension) -> Iterator[Problem]:
    choice = one.choice or ()
    for index, value in enumerate(choice):
        if not finite(value):
            yield problem(join(join(path, "choice"), index), "want a finite number", value)
        elif any(same(value, other) for other in choice[:index]):
            yield problem(join(join(path, "choice"), index), "is there twice: remove one", value)
    for kind, range_ in (("int", one.integers), ("uniform", one.uniform), ("loguniform", one.loguniform)):
        if range_ is None:
            continue
        low, high = range_
        if not low < high:
            yield problem(join(path, kind), "want [low, high] with low below high", list(range_))
        elif kind == "loguniform" and low <= 0:
            yield problem(join(path, kind), "a logarithm needs a low end above 0", list(range_))
        elif not math.isfinite(high - low):
            yield problem(join(path, kind), "is too wide", list(range_))


def conditions(file: SweepFile) -> Iterator[Problem]:
    for word, one in file.space.items():
        for other, wanted in one.when.items():
            path = join(join(join("space", word), "when"), other)
            if other == word:
                yield problem(path, "is the parameter itself")
            elif other not in file.space:
                yield problem(path, "no such parameter in `space`", hint=nearest(other, file.space))
            elif file.space[other].choice is None:
                yield problem(path, "must be a parameter with `choice`")
            else:
                for value in wanted if isinstance(wanted, tuple) else (wanted,):
                    if not holds(file.space[other].choice or (), value):
                        yield problem(path, f"{other} never has this value", value)
        if _circular(file.space, word):
            yield problem(join(join("space", word), "when"), "leads back to the parameter itself")


def _circular(space: Mapping[str, Dimension], word: str) -> bool:
    """Whether a parameter's conditions depend on the parameter by way of another one."""
    seen: set[str] = set()
    ahead = [other for other in space[word].when if other in space and other != word]
    while ahead:
        one = ahead.pop()
        if one == word:
            return True
        if one not in seen:
            seen.add(one)
            ahead += [other for other in space[one].when if other in space]
    return False


def sampler(file: SweepFile) -> Iterator[Problem]:
    if file.sampler == "grid":
        if file.trials is not None:
            yield problem("trials", "a grid tries every combination: remove it, or use `sampler: random`", file.trials)
        yield from _grid(file.space)
        return
    if file.trials is None:
        yield problem("trials", f"missing, want a whole number: `sampler: {file.sampler}` has no end")
    for word, one in file.space.items():
        if one.points is not None:
            yield problem(join(join("space", word), "points"), "only a grid has points: remove it", one.points)
    if file.sampler == "sobol" and len(file.space) > SOBOL_DIMENSIONS:
        told = f"has {len(file.space)} parameters, sobol takes {SOBOL_DIMENSIONS} at most: use `sampler: random`"
        yield problem("space", told)


def _grid(space: Mapping[str, Dimension]) -> Iterator[Problem]:
    size = 1
    for word, one in space.items():
        if one.choice is not None and one.points is not None:
            yield problem(join(join("space", word), "points"), "is for a range: remove it", one.points)
        elif one.points is None and (one.uniform or one.loguniform):
            yield problem(join("space", word), "a range in a grid needs its number of values, such as points: 5")
        count = one.points or len(one.choice or ()) or (one.integers[1] - one.integers[0] + 1 if one.integers else 1)
        if one.integers and one.points and one.points > one.integers[1] - one.integers[0] + 1 > 0:
            told = f"the range has {one.integers[1] - one.integers[0] + 1} whole numbers: remove it for all of them"
            yield problem(join(join("space", word), "points"), told, one.points)
        size *= max(1, count)
    if size > MOST_TRIALS:
        yield problem("space", f"has {size:,} combinations, at most {MOST_TRIALS:,} are allowed: use `sampler: random`")


def halving(file: SweepFile) -> Iterator[Problem]:
    if file.stop is None:
        return
    steps = file.stop.halving
    if steps.min >= steps.max:
        yield problem("stop.halving.min", f"must be below max ({steps.max})", steps.min)
    elif file.trials is not None and file.trials < steps.eta:
        yield problem("trials", f"is below eta ({steps.eta}), so only one trial would continue: use more", file.trials)


# Each rule with the fields that it reads.
RULES: Mapping[Callable[[SweepFile], Iterator[Problem]], tuple[str, ...]] = {
    name: ("name",),
    dimensions: ("space",),
    conditions: ("space",),
    sampler: ("sampler", "space", "trials"),
    halving: ("stop", "trials"),
}
STAND_IN = {"name": "search", "job": "", "space": {}, "metric": "-", "goal": "min"}  # for required fields without value
