"""The job files that a stack names (``jobs:``), read and judged against it without a cloud.

What a job file means by itself, and against pools, is checked by ``spotkeeper.spec.check``;
here is what only the stack file knows: the notice its pools give, and the secrets its jobs may read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spotkeeper.spec.job import JobSpec
from spotkeeper.spec.jobfile import read_job
from spotkeeper.spec.parse import read_text
from spotkeeper.spec.problem import Problem, SpecError, join, located, nearest, problem
from spotkeeper.spec.stack import StackState
from spotkeeper.spec.yamltext import read

from infra.settings.model import Settings
from infra.settings.pool import Pool
from infra.settings.state import pool_state, stack_state

SHORT_NOTICE_S = 30  # what is left where a pool asks for no notice
_MARGIN_S = 5  # for the machine's own end


@dataclass(frozen=True)
class JobFile:
    """A job that `up` submits. ``name``: as the stack file has it; ``path``: where it was read."""

    name: str
    path: Path
    spec: JobSpec


def read_jobs(settings: Settings, root: Path, now: float) -> tuple[JobFile, ...]:
    """The stack's job files, in its order.

    Args:
        root: the folder of Pulumi.yaml, where their paths begin.
        now: unix seconds, for deadlines.

    Raises:
        SpecError: everything that is wrong with any of them, with the files' lines.
    """
    state = stack_state(settings, tuple(pool_state(settings, pool) for pool in settings.pools))
    files: list[JobFile] = []
    problems: list[Problem] = []
    for name in settings.jobs:
        found, wrong = read_one(name, root, now, state)
        problems += wrong
        if found is None:
            continue
        told = [*_same_name(found, files), *_grace(found.spec, settings), *_secrets(found.spec, settings)]
        if told:
            lines = read(read_text(found.path), name)[1]
            problems += located(SpecError(told), name, lines).problems
        files.append(found)
    if problems:
        raise SpecError(problems)
    return tuple(files)


def read_one(name: str, root: Path, now: float, state: StackState | None) -> tuple[JobFile | None, tuple[Problem, ...]]:
    """One job file, or what is wrong with it; ``state`` None: the stack is not known."""
    path = root / name
    try:
        return JobFile(name, path, read_job(path, state, now)), ()
    except SpecError as error:
        return None, tuple(
            Problem(p.path, p.message, p.value, p.hint, source=name, line=p.line) for p in error.problems
        )


def _same_name(found: JobFile, before: list[JobFile]) -> Iterator[Problem]:
    for other in before:
        if other.spec.name == found.spec.name:
            yield problem("name", f"is that of {other.name} too: one job of a stack has it", found.spec.name)


def _used(spec: JobSpec, settings: Settings) -> list[Pool]:
    return [p for p in settings.dynamic() if not spec.pools or p.name in spec.pools]


def _grace(spec: JobSpec, settings: Settings) -> Iterator[Problem]:
    """After SIGTERM there must be time for SIGKILL before the machine is taken."""
    for pool in _used(spec, settings):
        notice = pool.notice_seconds() or SHORT_NOTICE_S
        if spec.grace_s > notice - _MARGIN_S:
            told = f"is above {notice - _MARGIN_S}: a machine of {pool.name} is told {notice} s before it goes"
            yield problem("grace_s", told, spec.grace_s)
            return


def _secrets(spec: JobSpec, settings: Settings) -> Iterator[Problem]:
    """Where the stack says what its jobs may read, nothing else can be read."""
    known = {_full(name, settings) for name in settings.secrets}
    for variable, reference in spec.secrets.items():
        wanted = _secret(reference)
        if known and wanted is not None and wanted not in known:
            near = nearest(wanted, known)
            message = f"is not among the stack's secrets, which its jobs may read: {wanted}"
            yield Problem(join("secrets", variable), message, hint=near)


def _full(name: str, settings: Settings) -> str:
    """A secret's name in full, without versions and the six letters that AWS adds."""
    if settings.cloud == "gcp":
        return name if name.startswith("projects/") else f"projects/{settings.project}/secrets/{name}"
    return re.sub(r"-[A-Za-z0-9]{6}\Z", "", name.rsplit(":secret:", 1)[1]) if name.startswith("arn:") else name


def _secret(reference: str) -> str | None:
    if found := re.match(r"gcp-secret://(projects/[^/]+/secrets/[^/]+)/versions/", reference):
        return found[1]
    if found := re.match(r"aws-secret://arn:[^:]+:secretsmanager:[^:]+:\d+:secret:(.+)\Z", reference):
        return re.sub(r"-[A-Za-z0-9]{6}\Z", "", found[1])
    return None
