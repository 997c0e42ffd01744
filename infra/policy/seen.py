"""A declared resource as rules see it, and words to ask it with. Judges nothing.

Inputs are whatever Pulumi hands over: mappings and sequences that may be proxies. A value that is known only after
`up` raises when it is read, and the check waits for it; so a check reads only what it judges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seen:
    """``retain``: None where it cannot be known: Pulumi tells policies of `protect`, and not of `retain_on_delete`."""

    type: str
    name: str
    inputs: Mapping[str, object]
    stack: str
    protect: bool = False
    retain: bool | None = None

    @property
    def production(self) -> bool:
        """As settings have it: the stack's name says so."""
        return self.stack.startswith("prod")

    def at(self, path: str) -> object:
        """The input at ``scheduling.maxRunDuration.seconds``; None where any part of it is not there."""
        return at(self.inputs, path)

    def each(self, path: str) -> tuple[object, ...]:
        return each(self.at(path))


def at(value: object, path: str) -> object:
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def each(value: object) -> tuple[object, ...]:
    """The elements of a list, or the one value that stands for a list of one; () of nothing."""
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return (value,)


def on(value: object) -> bool:
    """Launch templates write booleans as texts."""
    return value is True or value == "true"


@dataclass(frozen=True)
class Statement:
    """One statement of an IAM document."""

    allows: bool
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    conditions: Mapping[str, object]
    principals: tuple[str, ...]  # "*", "Service:ec2.amazonaws.com"


def statements(document: object) -> Iterator[Statement]:
    """Of a policy, as JSON or as a mapping.

    Raises:
        ValueError: it is no JSON.
    """
    plain = json.loads(document) if isinstance(document, str) else document
    for one in each(at(plain, "Statement")):
        yield Statement(
            allows=at(one, "Effect") == "Allow",
            actions=tuple(map(str, each(at(one, "Action")))),
            resources=tuple(map(str, each(at(one, "Resource")))),
            conditions=found if isinstance(found := at(one, "Condition"), Mapping) else {},
            principals=tuple(_principals(at(one, "Principal"))),
        )


def _principals(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for kind, names in value.items():
            yield from ("*" if name == "*" else f"{kind}:{name}" for name in each(names))
    elif value is not None:
        yield str(value)
