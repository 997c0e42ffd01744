"""The source tree as a graph: its modules, and which of them imports which, also within functions and for types."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = {
    "spotkeeper": ROOT / "spotkeeper",
    "spotkeeper_agent": ROOT / "agent/spotkeeper_agent",
    "infra": ROOT / "infra",
}


def files() -> list[Path]:
    return sorted(modules().values())


def modules() -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for name, folder in SOURCE.items():
        for path in folder.rglob("*.py"):
            parts = (name, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Of each module, those of the tree that it imports."""
    known = modules()
    return {name: set(_imported(name, path, known)) for name, path in known.items()}


def _imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        words = []
        if isinstance(node, ast.Import):
            words = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            words = [f"{node.module}.{alias.name}" for alias in node.names]
        for word in words:
            while word and word not in known:
                word = word.rpartition(".")[0]  # noqa: PLW2901 - a name within a module, or a package without a file
            if word and word != name:
                yield word


def circles() -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm (SIAM J. Comput. 1, 1972)."""
    graph, order, low = imports(), dict[str, int](), dict[str, int]()
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found
