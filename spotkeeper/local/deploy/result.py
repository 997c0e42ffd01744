"""The events and the result of a deployment, and their printed form, like that of ``pulumi up``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class DeployError(Exception):
    """Raised if a deployment failed; the message names the resource, the cause and the remedy."""


class Endpoint(Protocol):
    """Access to a one-machine cloud: the root URL of its control plane, and the operator's token."""

    @property
    def endpoint(self) -> str: ...

    @property
    def token(self) -> str: ...


class DeployOp(str, Enum):
    """The action on a resource, as ``pulumi up`` names it."""

    SAME = "same"
    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    DELETE = "delete"


@dataclass(frozen=True)
class DeployEvent:
    """The start or end of an action on a resource. ``seconds``: its real duration, once it is ``done``."""

    op: DeployOp
    type: str
    name: str
    parent: str = ""
    done: bool = True
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class DeployedResource:
    """A resource of a deployment. ``id``: the provider's id; empty for a component."""

    type: str
    name: str
    id: str


@dataclass(frozen=True)
class DeployResult:
    """The result of a deployment. ``changes``: number of resources by action."""

    engine: Literal["pulumi", "in-process"]
    outputs: Mapping[str, object]
    resources: tuple[DeployedResource, ...]
    changes: Mapping[DeployOp, int]

    @property
    def empty(self) -> bool:
        """Whether every resource was unchanged."""
        return not any(count for op, count in self.changes.items() if op is not DeployOp.SAME)


OnEvent = Callable[[DeployEvent], None]

_STYLE = {  # mark, style, past participle
    DeployOp.SAME: ("  ", "dim", "unchanged"),
    DeployOp.CREATE: ("+ ", "green", "created"),
    DeployOp.UPDATE: ("~ ", "yellow", "updated"),
    DeployOp.REPLACE: ("+-", "magenta", "replaced"),
    DeployOp.DELETE: ("- ", "red", "deleted"),
}
_SHOW_S = 1.0  # shorter times are not shown, as in Pulumi


class Printer:
    """An ``on_event`` that prints each completed change."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: DeployEvent) -> None:
        if not event.done or event.op is DeployOp.SAME:
            return
        mark, style, done = ("! ", "bold red", f"failed: {event.error}") if event.error else _STYLE[event.op]
        what = f"{done} ({event.seconds:.1f}s)" if event.seconds >= _SHOW_S and not event.error else done
        thing = f"{escape(type_words(event.type)):<42} {escape(event.name):<28}"
        self._console.print(f" [{style}]{mark}[/] {thing} [{style}]{escape(what)}[/]", highlight=False)


def type_words(type_: str) -> str:
    """Return a type as Pulumi shows it: ``gcp:compute/disk:Disk`` becomes ``gcp:compute:Disk``."""
    package, module, name = type_.split(":")
    return f"{package}:{module.partition('/')[0]}:{name}"


def summary(result: DeployResult, console: Console) -> None:
    """Print outputs and totals."""
    if result.outputs:
        console.print("\n[bold]Outputs:[/]")
        table = Table.grid(padding=(0, 2))
        for name in sorted(result.outputs):
            table.add_row(f"    {name}", escape(str(result.outputs[name])))
        console.print(table, highlight=False)
    console.print(f"\n[bold]Resources:[/] {totals(result.changes)}", highlight=False)


def totals(changes: Mapping[DeployOp, int]) -> str:
    """Return the number of resources by action, without zeros: ``50 created, 3 unchanged``."""
    words = [f"{count} {past}" for op, (_, _, past) in _STYLE.items() if (count := changes.get(op, 0))]
    return ", ".join(words) or "nothing to do"
