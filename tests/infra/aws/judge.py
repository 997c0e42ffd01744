"""Two judges of what is declared on AWS: botocore's own service models, and IAM's rules for policies.

The models know names, types, required members, words of a list, and ranges. IAM's rules
are here as far as our policies use them (allow and deny, wildcards, the conditions below);
a policy that uses more is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from botocore.model import Shape
from botocore.session import get_session
from botocore.validate import ParamValidator

# --- the service's own model --------------------------------------------------------------


@cache
def operation(service: str, name: str) -> Shape:
    return get_session().get_service_model(service).operation_model(name).input_shape


def judge(service: str, name: str, request: Mapping[str, Any]) -> list[str]:
    """What is wrong with a request, by the service's model; [] is well."""
    shape = operation(service, name)
    report = ParamValidator().validate(dict(request), shape)
    wrong = [report.generate_report()] if report.has_errors() else []
    return [*wrong, *_more(request, shape, name)]


def _more(value: Any, shape: Shape, path: str) -> list[str]:
    """What botocore itself lets through: names it does not know, words that are none of a list's, ranges."""
    match shape.type_name:
        case "structure":
            unknown = [f"{path}.{key}: unknown" for key in value if key not in shape.members]
            known = [(key, inner) for key, inner in value.items() if key in shape.members]
            return unknown + [
                each for key, inner in known for each in _more(inner, shape.members[key], f"{path}.{key}")
            ]
        case "list":
            return [each for at, inner in enumerate(value) for each in _more(inner, shape.member, f"{path}[{at}]")]
        case "map":
            return [each for key, inner in value.items() for each in _more(inner, shape.value, f"{path}.{key}")]
    wrong = []
    if (words := shape.metadata.get("enum")) and value not in words:
        wrong.append(f"{path}: {value!r} is none of {words}")
    size = value if shape.type_name in ("integer", "long", "double") else len(value) if isinstance(value, str) else None
    if size is not None and not shape.metadata.get("min", size) <= size <= shape.metadata.get("max", size):
        wrong.append(f"{path}: {value!r} is out of range")
    return wrong


def pascal(value: Any, renamed: Mapping[str, str], shape: Shape) -> Any:
    """A resource's inputs in the API's words: ``camelCase`` to ``PascalCase``, tags as lists, texts as booleans."""
    match shape.type_name:
        case "structure" if isinstance(value, dict):
            members: dict[str, Any] = {}
            for key, inner in value.items():
                name = renamed.get(key, key[:1].upper() + key[1:])
                if name and inner is not None:
                    members[name] = pascal(inner, renamed, shape.members[name]) if name in shape.members else inner
            return members
        case "list" if isinstance(value, dict):  # tags, by name
            return [{"Key": key, "Value": inner} for key, inner in value.items()]
        case "list":
            return [pascal(inner, renamed, shape.member) for inner in value]
        case "boolean" if value in ("true", "false"):
            return value == "true"
        case "blob":
            return str(value).encode()
    return value


# --- IAM ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A request as IAM sees it: of one action on one resource, with what is known around it."""

    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def allowed(policy: str, ask: Ask) -> bool:
    """Whether a policy lets it through; nothing is allowed that is not said, and a denial wins."""
    statements = json.loads(policy)["Statement"]
    said = {each["Effect"] for each in statements if _applies(each, ask)}
    return "Allow" in said and "Deny" not in said


def denied(policy: str, ask: Ask) -> bool:
    return any(each["Effect"] == "Deny" and _applies(each, ask) for each in json.loads(policy)["Statement"])


def _applies(statement: Mapping[str, Any], ask: Ask) -> bool:
    actions, resources = statement["Action"], statement["Resource"]
    return (
        any(fnmatchcase(ask.action.lower(), each.lower()) for each in actions)
        and any(fnmatchcase(ask.resource, each) for each in resources)
        and all(_holds(test, keys, ask.context) for test, keys in statement.get("Condition", {}).items())
    )


def _holds(test: str, keys: Mapping[str, str | Sequence[str]], context: Mapping[str, str]) -> bool:
    """Every key must hold; of one key's words any will do. One that is not there holds in ...IfExists and Null only."""
    if test == "Null":
        return all((key in context) != (wanted == "true") for key, wanted in keys.items())
    if test == "StringNotEquals":  # of none of the words; also where the key is missing
        return all(context.get(key) not in wanted for key, wanted in keys.items())
    exists = test.removesuffix("IfExists")
    match = TESTS[exists]
    for key, wanted in keys.items():
        words = [wanted] if isinstance(wanted, str) else wanted
        if key not in context:
            if exists == test:
                return False
        elif not any(match(context[key], word) for word in words):
            return False
    return True


TESTS: dict[str, Callable[[str, str], bool]] = {
    "ArnEquals": fnmatchcase,
    "ArnLike": fnmatchcase,
    "Bool": lambda found, wanted: found.lower() == wanted,
    "StringEquals": lambda found, wanted: found == wanted,
    "StringLike": fnmatchcase,
}
