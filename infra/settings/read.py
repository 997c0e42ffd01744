"""From Pulumi's flat configuration, or plain values, to checked and completed settings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from msgspec import inspect
from spotkeeper.spec.fit import problems_of
from spotkeeper.spec.parse import convert
from spotkeeper.spec.problem import Problem, SpecError, join, nearest, problem

from infra.settings import aws, checks, gcp
from infra.settings.model import Settings

NAMESPACE = "spotkeeper"
PROJECT = "gcp:project"
_CLOUDS = {"gcp": gcp, "aws": aws}
_STAND_IN = {"cloud": "gcp", "region": "", "image": ""}  # for required fields; nobody gets to see them


def from_config(config: Mapping[str, str], stack: str) -> Settings:
    """Pulumi's flat configuration (``spotkeeper:pools`` -> text or JSON) as settings.

    Raises:
        SpecError: everything that is wrong with it.
    """
    plain: dict[str, object] = {}
    wrong: list[Problem] = []
    for name, text in config.items():
        namespace, _, key = name.partition(":")
        if namespace == NAMESPACE and text == _NOT_SET.get(key):
            continue
        if namespace == NAMESPACE:
            plain[key] = _value(key, text)
        elif hint := _meant(name, config):
            wrong.append(Problem(name, "unknown key", hint=hint))
        elif key == "region" and namespace == config.get(f"{NAMESPACE}:cloud") and _elsewhere(config, text):
            wrong.append(problem(name, f"differs from {NAMESPACE}:region: leave it out", text))
    if wrong:  # nobody would read them: a limit of a misspelt namespace would be none
        raise SpecError(wrong)
    return parse(plain, stack=stack, project=config.get(PROJECT, ""))


def _meant(name: str, config: Mapping[str, str]) -> str | None:
    """What a key of another namespace is a slip of the pen for; None: it is a provider's own."""
    namespace, _, key = name.partition(":")
    if nearest(namespace, (NAMESPACE,)):
        return f"{NAMESPACE}:{key}"
    of_gcp = namespace == "gcp" or (namespace not in _CLOUDS and nearest(namespace, _CLOUDS) == "gcp")
    missed = PROJECT not in config and config.get(f"{NAMESPACE}:cloud") == "gcp"
    return PROJECT if missed and of_gcp and nearest(key, ("project",)) else None


def _elsewhere(config: Mapping[str, str], region: str) -> bool:
    return config.get(f"{NAMESPACE}:region") not in (None, "", region)


_FIELDS = inspect.type_info(Settings).fields  # type: ignore[attr-defined]
# The keys that Pulumi hands over as they are written; everything else is JSON.
_TEXTS = frozenset(
    f.encode_name for f in _FIELDS if isinstance(getattr(f.type, "type", f.type), inspect.StrType | inspect.LiteralType)
)
# Defaults in Pulumi.yaml: the empty ones of keys that must be set are as good as none.
_NOT_SET = {f.encode_name: "" if f.encode_name in _TEXTS else "[]" for f in _FIELDS if f.required}
_MAY_BE_EMPTY = frozenset(f.encode_name for f in _FIELDS if f.default == "")


def _value(key: str, text: str) -> object:
    if not text and key not in _MAY_BE_EMPTY:
        return None  # a key without a value, as the engine hands it over
    if key in _TEXTS:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse(plain: Mapping[str, object], *, stack: str, project: str) -> Settings:
    """Plain values (the keys of the stack file) as checked, completed settings.

    Raises:
        SpecError: unknown keys, wrong types, and combinations that cannot work.
    """
    fixed = {"stack": None, "project": PROJECT}
    problems = [Problem(key, "is not set here", hint=hint) for key, hint in fixed.items() if key in plain]
    if problems:
        raise SpecError(problems)
    given = {key: value for key, value in plain.items() if not (key == "budget" and value == {})}
    document: dict[str, object] = {**given, "stack": stack, "project": project}
    problems = [checks.explained(found) for found in problems_of(document, Settings, by_hand=True)]
    settings, places, unknown = _well(document, problems)
    if settings is None:
        raise SpecError(problems)
    told = _told(settings, places, unknown)
    problems += [found for found in told if _head(found.path) not in unknown]
    if problems:
        raise SpecError(problems)
    return settings


def _told(settings: Settings, places: list[int], unknown: set[str]) -> list[Problem]:
    """What the rules say. Of a cloud that nobody knows, nothing is said that only one of them asks for."""
    rules, pool_rules = checks.RULES, checks.POOL_RULES
    if "cloud" not in unknown:
        rules, pool_rules = rules + _CLOUDS[settings.cloud].RULES, pool_rules + _CLOUDS[settings.cloud].POOL_RULES
    told = [found for rule in rules for found in rule(settings)]
    for place, pool in zip(places, settings.pools, strict=True):
        where = join("pools", place)
        for rule in pool_rules:
            told += [Problem(f"{where}.{p.path}", p.message, p.value, p.hint) for p in rule(pool, settings)]
    return told


def _well(document: dict[str, object], problems: list[Problem]) -> tuple[Settings | None, list[int], set[str]]:
    """(the settings without what is of a wrong type, the places of their pools, the keys of which nothing is known).

    So a field of a wrong type hides no combination that cannot work. None: too little of them is left.
    """
    wrong = {found.path for found in problems}
    unknown = {_head(path) for path in wrong if not path.startswith("pools[")}
    unknown |= {found.hint for found in problems if found.path in document and found.hint}  # a key spelt wrong
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
    """The first parts of a path: ``limits``, ``pools``; with two of them, ``pools[1]``."""
    return "".join(re.findall(r"\[?[^.\[]+", path)[:parts])
