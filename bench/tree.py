"""Layout of the source tree: files per folder, import circles, lines. Without tests, benchmarks and examples."""

from __future__ import annotations

from collections import Counter

from tests import graph

LINES_BEFORE, LINES_AFTER = 71_484, 69_456  # when the tree was laid out by package; it has grown with features since


def figures() -> list[dict[str, object]]:
    files = graph.files()
    longest = max(Counter(path.parent for path in files).values())
    circles = len(graph.circles())
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in files)
    return [
        _figure("house.files_per_folder_max", longest, "files", "<= 22", longest <= 22, "62 before"),
        _figure("house.import_circles", circles, "circles", "0", circles == 0, "6 before"),
        _figure("house.lines", lines, "lines", "-", True, f"{LINES_BEFORE} before, {LINES_AFTER} after; then features"),
    ]


def _figure(name: str, value: int, unit: str, goal: str, holds: bool, against: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds, "against": against}
