"""What a deployment reports: events as they happen, and what stands in the end. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal


class DeployError(Exception):
    """The deployment failed; the message says what, at which resource, and what to do."""


class Op(str, Enum):
    """What happens to a resource, in the words of ``pulumi up``."""

    SAME = "same"
    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    DELETE = "delete"


@dataclass(frozen=True)
class Event:
    """``done`` is False when it begins; ``seconds`` is real time, 0 until it is done."""

    op: Op
    type: str
    name: str
    parent: str = ""
    done: bool = True
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Resource:
    """``id`` is the provider's; empty for a component."""

    type: str
    name: str
    id: str


@dataclass(frozen=True)
class DeployResult:
    """``changes`` counts resources by what happened to them."""

    engine: Literal["pulumi", "in-process"]
    outputs: Mapping[str, object]
    resources: tuple[Resource, ...]
    changes: Mapping[Op, int]

    @property
    def empty(self) -> bool:
        """Whether nothing had to be done."""
        return not any(count for op, count in self.changes.items() if op is not Op.SAME)
