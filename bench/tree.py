"""Layout of the source tree: files per folder, import circles, lines. Without tests, benchmarks and examples."""

from __future__ import annotations

from collections import Counter

from tests import graph

LINES_AT_FIRST = 71_484  # before the tree was laid out by package
FEWER = 2_000


def figures() -> list[dict[str, object]]:
    files = graph.files()
    longest = max(Counter(path.parent for path in files).values())
    circles = len(graph.circles())
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in files)
    most = LINES_AT_FIRST - FEWER
    return [
        _figure("house.files_per_folder_max", longest, "files", "<= 22", longest <= 22, "62 before"),
        _figure("house.import_circles", circles, "circles", "0", circles == 0, "6 before"),
        _figure("house.lines", lines, "lines", f"<= {most}", lines <= most, f"{LINES_AT_FIRST} before"),
    ]


def _figure(name: str, value: int, unit: str, goal: str, holds: bool, against: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds, "against": against}
