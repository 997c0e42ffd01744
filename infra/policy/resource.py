"""A declared resource as policy rules see it, with helpers that read its inputs.

Inputs are Pulumi's mappings and sequences, maybe as proxies. Reading a value that is known only after `up` raises an
error, which ends the check until `up` repeats it; so a check reads only the inputs that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DeclaredResource:
    """A declared resource. ``retain`` is None if unknown: Pulumi hides the option `retain_on_delete` from policies."""

    type: str
    name: str
    inputs: Mapping[str, object]
    stack: str
    protect: bool = False
    retain: bool | None = None

    @property
    def production(self) -> bool:
        """Return whether this is a production stack: its name starts with "prod", as in the settings."""
        return self.stack.startswith("prod")

    def at(self, path: str) -> object:
        """Return the input at a path such as ``scheduling.maxRunDuration.seconds``; None if any part is missing."""
        return at(self.inputs, path)

    def each(self, path: str) -> tuple[object, ...]:
        return each(self.at(path))


Told = Iterator[tuple[DeclaredResource, str]]  # a resource, and what is wrong with it


def at(value: object, path: str) -> object:
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def each(value: object) -> tuple[object, ...]:
    """Return the elements of a list; a single value as a tuple of one; () for None."""
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(value)
    return (value,)


def on(value: object) -> bool:
    """Return whether a value is true; launch templates write booleans as strings."""
    return value is True or value == "true"


# --- checks of both clouds


def bucket_stays(resource: DeclaredResource) -> Iterator[str]:
    if resource.production and on(resource.at("forceDestroy")):
        yield "forceDestroy: a destroy of this production stack would delete all objects: set on_destroy: protect"


def disk_stays(resource: DeclaredResource) -> Iterator[str]:
    if resource.production and not resource.protect and not resource.retain:
        yield "a destroy may delete this disk: set on_destroy: protect; ignore this advice if on_destroy is retain"


# --- IAM documents of AWS


@dataclass(frozen=True)
class PolicyStatement:
    """One statement of an IAM document."""

    allows: bool
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    conditions: Mapping[str, object]
    principals: tuple[str, ...]  # "*", "Service:ec2.amazonaws.com"


def statements(document: object) -> Iterator[PolicyStatement]:
    """Yield the statements of an IAM policy, given as JSON text or as a mapping.

    Raises:
        ValueError: the text is not JSON.
    """
    plain = json.loads(document) if isinstance(document, str) else document
    for one in each(at(plain, "Statement")):
        yield PolicyStatement(
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
