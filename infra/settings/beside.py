"""Other stacks of the same folder: whether the rights of one would reach the machines of the other.

On Google Cloud conditions of rights cannot see labels, so they hold on to what names begin with: those of the stack
``a`` would reach the machines of a stack ``a-b`` in the same project (``infra/gcp/identity``). On AWS they see tags.
A stack of another repository cannot be seen from here. Reads files, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from spotkeeper.spec.parse import load
from spotkeeper.spec.problem import Problem, SpecError, problem

from infra import naming
from infra.settings.model import Settings
from infra.settings.read import PROJECT


class _File(Struct):
    config: dict[str, object] = {}


def clashes(settings: Settings, folder: Path) -> tuple[Problem, ...]:
    """What is wrong with having this stack beside those whose files lie in ``folder``."""
    if settings.cloud != "gcp":
        return ()
    return tuple(_clash(settings, other) for other in _others(settings, folder))


def _others(settings: Settings, folder: Path) -> Iterator[str]:
    """Names of the stacks that are not told apart from this one; a file that cannot be read has its own check."""
    mine = naming.machine_prefix(settings.stack)
    for path in sorted(folder.glob("Pulumi.*.yaml")):
        name = path.name.removeprefix("Pulumi.").removesuffix(".yaml")
        theirs = naming.machine_prefix(name)
        if name == settings.stack or not (mine.startswith(theirs) or theirs.startswith(mine)):
            continue
        try:
            config = load(path, _File).config
        except SpecError:
            continue
        if config.get(PROJECT) == settings.project:
            yield name


def _clash(settings: Settings, other: str) -> Problem:
    short, long = sorted((settings.stack, other), key=len)
    return problem(
        PROJECT,
        f"is that of the stack {other} (Pulumi.{other}.yaml) too, and rights go by names there: those of {short}, over "
        f"{naming.machine_prefix(short)}*, would reach the machines of {long}. Give one of the two another project, or "
        f"another name, which does not begin with the other's and a -",
        settings.project,
    )
