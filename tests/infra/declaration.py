"""How the tests of either cloud read what the program declares."""

from __future__ import annotations

import re
from typing import Any

from tests.infra.conftest import Declared

Declaration = dict[str, Declared]

DRAIN = "pulumi-python:dynamic:Resource::drain"


def of(declared: Declaration, type_: str) -> list[Declared]:
    return [found for found in declared.values() if found.type == type_]


def one(declared: Declaration, type_: str, name: str) -> dict[str, Any]:
    return declared[f"{type_}::{name}"].properties


def before(declared: Declaration, key: str) -> set[str]:
    """Everything that must exist before ``key``, hence everything that is deleted after it."""
    found: set[str] = set()
    queue = [key]
    while queue:
        for other in declared[queue.pop()].depends_on:
            if other not in found:
                found.add(other)
                queue.append(other)
    return found


def holds(condition: str, name: str) -> bool:
    """IAM's ``extract``: what lies between a template's two ends, the first of each; "" where it fits nowhere."""

    def extract(template: str) -> str:
        head, tail = re.split(r"\{\w+\}", template)
        rest = name.partition(head)[2]
        return rest.partition(tail)[0] if tail in rest else ""

    return any(extract(part[1]) for part in re.finditer(r'resource\.name\.extract\("([^"]+)"\) != ""', condition))
