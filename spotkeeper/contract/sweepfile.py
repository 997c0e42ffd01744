"""A search's file (``sweep.yaml``), and what the bucket keeps of a search: the file, and the values drawn for trials.

``sweeps/<name>/spec.json`` has a :class:`SweepSpec`, ``sweeps/<name>/cohorts/<first>.json`` a :class:`Cohort`,
``sweeps/<name>/stops/<below>.json`` a :class:`SweepStop`. Each is written once. The drawn values are stored, so a later
change of the sampler does not change the trials of a search.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from spotkeeper.contract.job import JobSpec, Mirror
from spotkeeper.contract.names import new_job_id
from spotkeeper.contract.sweep import MOST_TRIALS, Params, Trial

MOST_S = 253_370_764_800.0  # the year 9999, the last that dates can show
NAME_LENGTH = 35  # of a search: a trial's name, such as lr-0007, has at most 40 characters
PARAM = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_PLACEHOLDER = re.compile(r"\{(\{)?([A-Za-z_][A-Za-z0-9_]*)\}(?(1)\})")

Value = bool | int | float | str
Range = Annotated[tuple[float, ...], Meta(min_length=2, max_length=2)]
_Option = Value | tuple[Value, ...]


class Dimension(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The values that one parameter may have: exactly one of ``choice``, ``int``, ``uniform`` and ``loguniform``."""

    choice: Annotated[tuple[Value, ...], Meta(min_length=1, description="one of these values")] | None = None
    integers: (
        Annotated[tuple[int, ...], Meta(min_length=2, max_length=2, description="[low, high]: a whole number")] | None
    ) = field(default=None, name="int")
    uniform: Annotated[Range, Meta(description="[low, high]: a number")] | None = None
    loguniform: Annotated[Range, Meta(description="[low, high]: a number, its logarithm uniform")] | None = None
    points: Annotated[int, Meta(ge=2, le=MOST_TRIALS, description="of a range in a grid: number of values")] | None = (
        None
    )
    when: Annotated[
        dict[str, _Option], Meta(description="only where another parameter has this value, or one of these")
    ] = {}

    def kinds(self) -> list[str]:
        """Return the names of the fields that say which values there are; a valid dimension has one."""
        said = {
            "choice": self.choice, "int": self.integers, "uniform": self.uniform, "loguniform": self.loguniform,
        }  # fmt: skip
        return [name for name, value in said.items() if value is not None]

    def applies(self, values: Mapping[str, object]) -> bool:
        """Whether the conditions hold; ``values``: those of the parameters that apply."""
        return all(name in values and holds(wanted, values[name]) for name, wanted in self.when.items())


def holds(wanted: _Option, value: object) -> bool:
    """Whether a value is the one, or one of those, that a condition names."""
    options = wanted if isinstance(wanted, tuple) else (wanted,)
    return any(same(option, value) for option in options)


def same(one: object, other: object) -> bool:
    """Whether two values of a parameter are equal: 1 and 1.0 are, 1 and true are not."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


class Halving(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Successive halving: trials compare at steps min, min * eta, min * eta^2 ... below max; 1/eta of them continue."""

    min: Annotated[int, Meta(ge=1, description="step at which the trials are compared first")]
    max: Annotated[int, Meta(ge=2, description="steps of a whole training; the script itself must end there")]
    eta: Annotated[int, Meta(ge=2, le=100, description="at each comparison 1/eta of the trials continue")] = 3

    def rungs(self) -> tuple[int, ...]:
        """Return the steps at which trials are compared, ascending."""
        found, step = [], self.min
        while step < self.max:
            found.append(step)
            step *= self.eta
        return tuple(found)


class EarlyStop(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which trials end early."""

    halving: Annotated[Halving, Meta(description="successive halving: {min, max, eta}")]


class SweepFile(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """``sweep.yaml``. ``spotkeeper.contract.parse.sweepfile`` has the rules that concern several fields."""

    name: Annotated[str, Meta(description="a-z, 0-9 and -, at most 35 characters; never used for another search")]
    job: Annotated[str | dict[str, Any], Meta(description="the job file's path, relative to this file, or the job")]
    space: Annotated[
        dict[str, Dimension], Meta(description="parameter -> its values, such as lr: {loguniform: [1e-5, 1e-1]}")
    ]
    metric: Annotated[str, Meta(min_length=1, description="name of the metric, as the script reports it")]
    goal: Annotated[Literal["min", "max"], Meta(description="min: the smallest value is best; max: the largest")]
    sampler: Annotated[
        Literal["grid", "random", "sobol"],
        Meta(description="grid: every combination; random; sobol: more even than random"),
    ] = "random"
    seed: Annotated[int, Meta(ge=0, lt=2**32, description="seed of the sampler")] = 0
    trials: (
        Annotated[int, Meta(ge=1, le=MOST_TRIALS, description="number of trials; a grid tries every combination")]
        | None
    ) = None
    parallel: (
        Annotated[int, Meta(ge=1, le=MOST_TRIALS, description="most trials that have machines; unset: the stack's")]
        | None
    ) = None
    max_usd: Annotated[float, Meta(gt=0, description="all trials stop after this much for machines, USD")] | None = None
    stop: Annotated[EarlyStop, Meta(description="which trials end early; unset: none")] | None = None

    def rungs(self) -> tuple[int, ...]:
        return self.stop.halving.rungs() if self.stop is not None else ()


class SweepSpec(Struct, frozen=True, omit_defaults=True):
    """``sweeps/<name>/spec.json``. ``nonce`` makes the ids of the trials' jobs (:meth:`job_id`)."""

    file: SweepFile  # its `job` is ""
    job: JobSpec  # of every trial, but for name, values and ``trial``; placeholders are not filled in
    parallel: int
    nonce: str
    at: float  # unix seconds
    by: str = ""  # as the submitter's machine says

    def job_id(self, number: int, attempt: int) -> str:
        """Return the id of a trial's job. The same trial gets the same id, so it is never submitted twice.

        ``attempt``: 0, or higher if the function has removed earlier, incomplete submissions.
        """
        digest = hashlib.sha256(f"{self.nonce}/{number}/{attempt}".encode()).digest()
        return new_job_id(int.from_bytes(digest, "big"))


class Cohort(Struct, frozen=True, omit_defaults=True):
    """Trials that are compared with each other: those of the first submission, or of one ``extend``."""

    first: int  # the lowest number
    values: tuple[Params, ...]  # of each trial, without those of the job file
    seed: int
    drawn: int = 0  # values that earlier cohorts have drawn with this seed
    max_usd: float | None = None  # for all trials of the search
    at: float = 0.0
    by: str = ""

    def numbers(self) -> range:
        return range(self.first, self.first + len(self.values))


class SweepStop(Struct, frozen=True, omit_defaults=True):
    """``sweeps/<name>/stops/<below>.json``: a person stopped the search; it submits no further trial of these."""

    below: Annotated[int, Meta(ge=0, le=MOST_TRIALS)]  # all trials with lower numbers
    at: Annotated[float, Meta(ge=0, le=MOST_S)]  # unix seconds
    by: Annotated[str, Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")] = ""  # one line


def trial_name(sweep: str, number: int) -> str:
    """Return the name of a trial's job."""
    return f"{sweep}-{number:04d}"


def trial_of(spec: SweepSpec, cohort: Cohort, number: int) -> Trial:
    """Return a trial's part in its search."""
    file = spec.file
    return Trial(
        sweep=file.name,
        number=number,
        metric=file.metric,
        goal=file.goal,
        first=cohort.first,
        count=len(cohort.values),
        rungs=file.rungs(),
        eta=file.stop.halving.eta if file.stop is not None else 3,
        parallel=spec.parallel,
        max_usd=cohort.max_usd,
    )


def trial_job(spec: SweepSpec, cohort: Cohort, number: int) -> JobSpec:
    """Return the job of a trial."""
    trial = trial_of(spec, cohort, number)
    params, checkpoint = {**spec.job.params, **cohort.values[number - cohort.first]}, spec.job.checkpoint
    if trial.rungs and checkpoint.mirror is None:  # a trial that waits keeps a copy in the bucket, and no disk
        checkpoint = replace(checkpoint, mirror=Mirror())
    name = trial_name(spec.file.name, number)
    return filled(replace(spec.job, name=name, params=params, checkpoint=checkpoint, trial=trial))


# -- parameters in a command


def placeholders(word: str) -> list[str]:
    """Return the names of the parameters that stand in a word of a command as ``{name}``."""
    return [found[2] for found in _PLACEHOLDER.finditer(word) if not found[1]]


def filled(spec: JobSpec) -> JobSpec:
    """Return a job with its parameters' values in its command. ``{{name}}`` becomes ``{name}``."""
    return replace(spec, command=tuple(_filled(word, spec.params) for word in spec.command))


def _filled(word: str, params: Params) -> str:
    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"{{{found[2]}}}"
        return text(params[found[2]]) if found[2] in params else found[0]

    return _PLACEHOLDER.sub(value, word)


def text(value: Value) -> str:
    """Return a value as a command has it, and a job file."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def finite(value: Value) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
