"""Read the files of a stack: its configuration as checked settings, the stack files beside it, and its job files.

This module reads only files. It calls no cloud and reads no environment variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct, inspect

from infra import naming
from infra.settings import aws, checks, gcp
from infra.settings.checks import NOT_WATCHED, UNWATCHED
from infra.settings.model import Settings, pool_state, stack_state
from spotkeeper.contract import codec
from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.parse.problem import Problem, SpecError, join, located, nearest, problem
from spotkeeper.contract.parse.typed import convert, load, problems_of, read_text
from spotkeeper.contract.parse.yamltext import read
from spotkeeper.contract.stack import StackState

NAMESPACE = "spotkeeper"
PROJECT = "gcp:project"
_CLOUDS = {"gcp": gcp, "aws": aws}
_STAND_IN = {"cloud": "gcp", "region": "", "image": ""}  # for missing required fields; never shown


def from_config(config: Mapping[str, str], stack: str) -> Settings:
    """Return the settings in Pulumi's flat configuration (``spotkeeper:pools`` -> text or JSON, and so on).

    Raises:
        SpecError: all problems of the configuration.
    """
    plain: dict[str, object] = {}
    wrong: list[Problem] = []
    cloud, region = config.get(f"{NAMESPACE}:cloud"), home_region(config)
    for name, text in config.items():
        namespace, _, key = name.partition(":")
        if namespace == NAMESPACE and text == _NOT_SET.get(key):
            continue
        if namespace == NAMESPACE:
            plain[key] = _value(key, text)
        elif hint := _typo_of(name, config):
            wrong.append(Problem(name, "unknown key", hint=hint))
        elif name == f"{cloud}:region" and region not in (None, "", text):
            wrong.append(problem(name, f"differs from {NAMESPACE}:region: leave it out", text))
    if wrong:  # a limit in a misspelt namespace would have no effect
        raise SpecError(wrong)
    return parse(plain, stack=stack, project=config.get(PROJECT, ""))


def home_region(config: Mapping[str, str]) -> str:
    """Return the home region in Pulumi's flat configuration: `region`, or the first of `regions`; "": unknown."""
    regions = _value("regions", config.get(f"{NAMESPACE}:regions", ""))
    first = next(iter(regions), "") if isinstance(regions, list) else ""
    return config.get(f"{NAMESPACE}:region", "") or str(first)


def _typo_of(name: str, config: Mapping[str, str]) -> str | None:
    """Return the key that ``name`` probably misspells; None if ``name`` seems to be another Pulumi provider's key."""
    namespace, _, key = name.partition(":")
    if nearest(namespace, (NAMESPACE,)):
        return f"{NAMESPACE}:{key}"
    of_gcp = namespace == "gcp" or (namespace not in _CLOUDS and nearest(namespace, _CLOUDS) == "gcp")
    missed = PROJECT not in config and config.get(f"{NAMESPACE}:cloud") == "gcp"
    return PROJECT if missed and of_gcp and nearest(key, ("project",)) else None


_FIELDS = codec.type_info(Settings).fields  # type: ignore[attr-defined]
# Pulumi passes these keys as written; all others are JSON.
_TEXTS = frozenset(
    f.encode_name for f in _FIELDS if isinstance(getattr(f.type, "type", f.type), inspect.StrType | inspect.LiteralType)
)
# Pulumi.yaml's empty defaults of required keys count as missing.
_NOT_SET = {f.encode_name: "" if f.encode_name in _TEXTS else "[]" for f in _FIELDS if f.required}
_MAY_BE_EMPTY = frozenset(f.encode_name for f in _FIELDS if f.default == "")


def _value(key: str, text: str) -> object:
    if not text and key not in _MAY_BE_EMPTY:
        return None  # Pulumi's form of a key without a value
    if key in _TEXTS:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse(plain: Mapping[str, object], *, stack: str, project: str) -> Settings:
    """Return the stack file's keys and values as checked settings, with omitted values filled in.

    Raises:
        SpecError: unknown keys, wrong types, and combinations that cannot work.
    """
    fixed = {"stack": None, "project": PROJECT}
    problems = [Problem(key, "cannot be set here", hint=hint) for key, hint in fixed.items() if key in plain]
    if problems:
        raise SpecError(problems)
    given = {key: value for key, value in plain.items() if not (key == "budget" and value == {})}
    problems = _home_first(given)
    document: dict[str, object] = {**given, "stack": stack, "project": project}
    empty = "regions" in given and given["regions"] is None and "region" not in given
    derived = {"region"} if given.get("regions") or empty else set()  # a problem with it is one with `regions`
    wrong = [found for found in problems_of(document, Settings, by_hand=True) if found.path not in derived]
    problems += map(checks.explained, wrong)
    settings, positions, unknown = _usable(document, problems)
    if settings is None:
        raise SpecError(problems)
    unknown |= derived
    problems += [found for found in _judged(settings, positions, unknown) if _head(found.path) not in unknown]
    if problems:
        raise SpecError(problems)
    return settings


def _home_first(given: dict[str, object]) -> list[Problem]:
    """Take the home region from `regions`, its first, if it has any; return a problem if `region` is there too."""
    regions = given.get("regions")
    if not regions or not isinstance(regions, list | tuple):
        return []
    if "region" in given:
        told = "cannot be used with `region`: leave `region` out; the first of `regions` is the home region"
        return [problem("regions", told, regions)]
    if isinstance(regions[0], str):  # else only `regions` is reported
        given["region"] = regions[0]
    return []


def _judged(settings: Settings, positions: list[int], unknown: set[str]) -> list[Problem]:
    """Return the problems that the rules find; ``positions`` and ``unknown`` are those that :func:`_usable` returns.

    The rules of one cloud apply only if the key ``cloud`` is valid.
    """
    rules, pool_rules = checks.RULES, checks.POOL_RULES
    if "cloud" not in unknown:
        rules, pool_rules = rules + _CLOUDS[settings.cloud].RULES, pool_rules + _CLOUDS[settings.cloud].POOL_RULES
    told = [found for rule in rules for found in rule(settings)]
    for position, pool in zip(positions, settings.pools, strict=True):
        where = join("pools", position)
        for rule in pool_rules:
            told += [Problem(f"{where}.{p.path}", p.message, p.value, p.hint) for p in rule(pool, settings)]
    return told


def _usable(document: dict[str, object], problems: list[Problem]) -> tuple[Settings | None, list[int], set[str]]:
    """Leave out the keys and pools with wrong types, so that the rules can check all others in the same run.

    Returns (settings made of the rest, or None if it is too little; the original positions of their pools; the keys
    left out).
    """
    wrong = {found.path for found in problems}
    unknown = {_head(path) for path in wrong if not path.startswith("pools[")}
    unknown |= {found.hint for found in problems if found.path in document and found.hint}  # a misspelt key
    pools = document.get("pools")
    each = list(enumerate(pools)) if isinstance(pools, list | tuple) else []
    well = [(at, pool) for at, pool in each if not any(_head(path, 2) == join("pools", at) for path in wrong)]
    known = {key: value for key, value in document.items() if key not in unknown}
    try:
        settings = convert({**_STAND_IN, **known, "pools": [pool for _, pool in well]}, Settings)
    except SpecError:
        if not problems:
            raise
        return None, [], unknown
    return _CLOUDS[settings.cloud].complete(settings), [at for at, _ in well], unknown


def _head(path: str, parts: int = 1) -> str:
    """Return the first ``parts`` parts of a path: of ``pools[1].zones``, 1 gives ``pools`` and 2 gives ``pools[1]``."""
    return "".join(re.findall(r"\[?[^.\[]+", path)[:parts])


# --- other stacks of the same folder -----------------------------------------------------


class _StackFile(Struct):
    config: dict[str, object] = {}


def clashes(settings: Settings, folder: Path) -> tuple[Problem, ...]:
    """Return a problem for each stack in ``folder`` whose rights overlap with this stack's on Google Cloud.

    Conditions there cannot test labels, so rights apply to a name prefix: those of stack ``a`` would include machines
    of a stack ``a-b`` in the same project (``infra/gcp/identity``). Stacks of other repositories are not checked.
    """
    if settings.cloud != "gcp":
        return ()
    return tuple(_clash(settings, other) for other in _overlapping(settings, folder))


def _overlapping(settings: Settings, folder: Path) -> Iterator[str]:
    """Yield the project's other stacks whose name begins with this stack's or vice versa; skip unreadable files."""
    own = naming.machine_prefix(settings.stack)
    for path in sorted(folder.glob("Pulumi.*.yaml")):
        name = path.name.removeprefix("Pulumi.").removesuffix(".yaml")
        other = naming.machine_prefix(name)
        if name == settings.stack or not (own.startswith(other) or other.startswith(own)):
            continue
        try:
            config = load(path, _StackFile).config
        except SpecError:
            continue
        if config.get(PROJECT) == settings.project:
            yield name


def _clash(settings: Settings, other: str) -> Problem:
    short, long = sorted((settings.stack, other), key=len)
    return problem(
        PROJECT,
        f"is also the project of the stack {other} (Pulumi.{other}.yaml). Rights in a project apply to names: "
        f"{short}'s rights to {naming.machine_prefix(short)}* would include the machines of {long}. Give one of these "
        f"stacks another project, or a name that does not begin with '{short}-'",
        settings.project,
    )


# --- job files ---------------------------------------------------------------------------


UNWATCHED_PARTS = tuple((folder,) for folder in UNWATCHED)
SHORT_NOTICE_S = 30  # for a pool with notice_s: 0
_MARGIN_S = 5  # for the machine's shutdown


@dataclass(frozen=True)
class JobFile:
    """A job that `up` submits: ``name`` is its path as the stack file writes it, ``path`` the file that was read."""

    name: str
    path: Path
    spec: JobSpec


def read_jobs(settings: Settings, root: Path, now: float) -> tuple[JobFile, ...]:
    """Return the stack's job files, in the stack file's order, checked against the stack without calling a cloud.

    ``spotkeeper.contract.parse.check`` checks a job file alone and against pools. This checks it against the stack
    file: the pools' preemption notice, the secrets that jobs may read, duplicate names and unwatched folders.

    Args:
        root: the folder of Pulumi.yaml, to which the job files' paths are relative.
        now: unix seconds, to check deadlines.

    Raises:
        SpecError: all problems of all job files, with line numbers.
    """
    state = stack_state(settings, tuple(pool_state(settings, pool) for pool in settings.pools))
    files: list[JobFile] = []
    problems: list[Problem] = []
    for name in settings.jobs:
        found, wrong = read_one(name, root, now, state)
        problems += wrong
        if found is None:
            continue
        told = [
            *_same_name(found, files),
            *_watched(found, root),
            *_grace(found.spec, settings),
            *_secrets(found.spec, settings),
        ]
        if told:
            lines = read(read_text(found.path), name)[1]
            problems += located(SpecError(told), name, lines).problems
        files.append(found)
    if problems:
        raise SpecError(problems)
    return tuple(files)


def read_one(name: str, root: Path, now: float, state: StackState | None) -> tuple[JobFile | None, tuple[Problem, ...]]:
    """Return (the job file, no problems) or (None, its problems). If ``state`` is None, pools are not checked."""
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
            yield problem("name", f"is also the name of the job in {other.name}: choose another", found.spec.name)


def _watched(found: JobFile, root: Path) -> Iterator[Problem]:
    """Report a source folder inside a folder that CI does not watch. The folder of Pulumi.yaml itself is accepted."""
    folder = (found.path.resolve().parent / (found.spec.source or ".")).resolve()
    if folder.is_relative_to(root.resolve()) and folder.relative_to(root.resolve()).parts[:1] in UNWATCHED_PARTS:
        yield problem("source", f"{NOT_WATCHED}: move it", found.spec.source)


def _grace(spec: JobSpec, settings: Settings) -> Iterator[Problem]:
    """Check that ``grace_s``, the time from SIGTERM to SIGKILL, fits into the notice of each pool of the job."""
    names = spec.pool_names()
    for pool in (pool for pool in settings.dynamic() if not names or pool.name in names):
        notice = pool.notice_seconds() or SHORT_NOTICE_S
        if spec.grace_s > notice - _MARGIN_S:
            told = f"is above {notice - _MARGIN_S}: a machine of `{pool.name}` ends {notice} s after its notice"
            yield problem("grace_s", told, spec.grace_s)
            return


def _secrets(spec: JobSpec, settings: Settings) -> Iterator[Problem]:
    """Report secrets of a job that are not in the stack file's list; report none if there is no list."""
    known = {_full(name, settings) for name in settings.secrets}
    for variable, reference in spec.secrets.items():
        wanted = _secret(reference)
        if known and wanted is not None and wanted not in known:
            near = nearest(wanted, known)
            message = f"{wanted} is not in the stack file's `secrets`, so no job may read it"
            yield Problem(join("secrets", variable), message, hint=near)


def _full(name: str, settings: Settings) -> str:
    """Return a secret's full name, without a version and without the six characters that AWS appends."""
    if settings.cloud == "gcp":
        return name if name.startswith("projects/") else f"projects/{settings.project}/secrets/{name}"
    return re.sub(r"-[A-Za-z0-9]{6}\Z", "", name.rsplit(":secret:", 1)[1]) if name.startswith("arn:") else name


def _secret(reference: str) -> str | None:
    if found := re.match(r"gcp-secret://(projects/[^/]+/secrets/[^/]+)/versions/", reference):
        return found[1]
    if found := re.match(r"aws-secret://arn:[^:]+:secretsmanager:[^:]+:\d+:secret:(.+)\Z", reference):
        return re.sub(r"-[A-Za-z0-9]{6}\Z", "", found[1])
    return None
