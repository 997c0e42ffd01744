"""How the tests of either cloud read what the program declares."""

from __future__ import annotations

from typing import Any

from tests.infra.conftest import Declared

Declaration = dict[str, Declared]

DRAIN = "pulumi-python:dynamic:Resource::drain"
REGIONS = "pulumi-python:dynamic/spotkeeper:Regions::regions"


def of(declared: Declaration, type_: str) -> list[Declared]:
    return [found for found in declared.values() if found.type == type_]


def one(declared: Declaration, type_: str, name: str) -> dict[str, Any]:
    return declared[f"{type_}::{name}"].properties


def before(declared: Declaration, key: str) -> set[str]:
    """Everything that must exist before ``key``, hence everything that is deleted after it."""
    found: set[str] = set()
    queue = [key]
    while queue:
        key = queue.pop()
        for other in declared[key].depends_on if key in declared else ():  # another stack is only referred to
            if other not in found:
                found.add(other)
                queue.append(other)
    return found
