"""Which tests reach which line, how long each takes, and which pass: recorded once for each file of tests.

A record stays valid while its file of tests is unchanged. The sources as they were recorded are kept beside it, so
that lines that have moved since are found again; a line that has changed counts as reached by what reached the lines
in its place.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.mutants import areas

FILE_S = 600.0  # of one file of tests; those that it would begin later are left out
Json = dict[str, Any]


class Reach:
    def __init__(self, root: Path, folder: Path, names: Sequence[str] = ()) -> None:
        """``names``: the areas whose tests count; empty: all."""
        self._root, self._folder = root, folder
        self._tests = areas.tests(root, names)
        self._lines: dict[tuple[str, int], list[str]] = {}
        self._files: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        self._imported: dict[str, set[int]] = {}
        self._moves: dict[tuple[str, str], dict[int, list[int]] | None] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def outdated(self) -> list[str]:
        return [test for test in self._tests if self._known(test) is None]

    def keep(self, test: str, record: Json, copy: Path) -> None:
        """``copy``: the tree in which it was recorded."""
        record["hashes"] = {file: digest(copy, [file]) for file in [test, *record["lines"]]}
        self._keep_sources(record["lines"], copy)
        self._path(test).write_text(json.dumps(record))

    def keep_imported(self, lines: dict[str, list[str]], copy: Path) -> None:
        """``lines``: of the files that were imported now; what is known of others stays."""
        path = self._folder / "imported.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        now = {file: {"hash": digest(copy, [file]), "lines": found} for file, found in lines.items()}
        self._keep_sources(lines, copy)
        path.write_text(json.dumps(known | now))

    def _keep_sources(self, files: Iterable[str], copy: Path) -> None:
        for file in files:
            (self._folder / f"{digest(copy, [file])}.py").write_bytes((copy / file).read_bytes())

    def load(self) -> None:
        """Read all records. Only tests that passed count."""
        path = self._folder / "imported.json"
        imported = json.loads(path.read_text()) if path.exists() else {}
        for file, found in imported.items():
            moved = self._moved(file, found["hash"])
            self._imported[file] = {new for line in found["lines"] for new in moved(int(line))}
        for test in self._tests:
            record = self._known(test)
            if record is None:
                continue
            self._files[test] = list(record["seconds"])
            self.seconds |= record["seconds"]
            for file, lines in record["lines"].items():
                moved = self._moved(file, record["hashes"][file])
                for line, numbers in lines.items():
                    names = [record["tests"][at] for at in numbers]
                    for new in moved(int(line)):
                        self._lines.setdefault((file, new), []).extend(names)

    def tests(self, file: str, first: int, last: int) -> list[str]:
        """Return the tests that reach one of these lines, those of quick files first."""
        found = {name for line in range(first, last + 1) for name in self._lines.get((file, line), ())}
        found |= {name for test in areas.by_hand(file) for name in self._files.get(test, ())}
        return self.sorted(name for name in found if name in self.seconds)

    def sorted(self, names: Iterable[str]) -> list[str]:
        files: dict[str, list[str]] = {}
        for name in sorted(names):
            files.setdefault(name.partition("::")[0], []).append(name)
        order = sorted(files, key=lambda file: sum(self.seconds[name] for name in files[file]) / len(files[file]))
        return [name for file in order for name in files[file]]

    def imported(self, file: str, first: int, last: int) -> bool:
        """Whether one of these lines runs when its module is imported."""
        return not self._imported.get(file, set()).isdisjoint(range(first, last + 1))

    def _known(self, test: str) -> Json | None:
        try:
            record: Json = json.loads(self._path(test).read_text())
        except (OSError, ValueError):
            return None
        return record if record["hashes"][test] == digest(self._root, [test]) else None

    def _moved(self, file: str, recorded: str) -> Callable[[int], Iterable[int]]:
        """Return where a line of the recorded source is today."""
        if (file, recorded) not in self._moves:
            path = self._root / file
            new = path.read_text("utf-8") if path.exists() else ""
            old = (self._folder / f"{recorded}.py").read_text("utf-8")
            self._moves[file, recorded] = None if old == new else moves(old, new)
        table = self._moves[file, recorded]
        return (lambda line: (line,)) if table is None else (lambda line: table.get(line, ()))

    def _path(self, test: str) -> Path:
        return self._folder / (test.removeprefix("tests/").removesuffix(".py").replace("/", ".") + ".json")


def record(first: Json, second: Json) -> Json:
    """Return what is kept of two runs of a file: tests that passed twice, the second run's seconds, lines by test."""
    passed = [name for name, (outcome, _) in first["outcomes"].items() if outcome == "passed"]
    again = second["outcomes"]
    seconds = {name: again[name][1] for name in passed if name in again and again[name][0] == "passed"}
    tests = list(seconds)
    at = {name: number for number, name in enumerate(tests)}
    lines = {
        file: {line: sorted(at[name] for name in names if name in at) for line, names in found.items()}
        for file, found in first["lines"].items()
    }
    dropped = sorted(name for name, (outcome, _) in first["outcomes"].items() if outcome == "failed")
    dropped += [name for name in passed if name not in seconds]
    return {"tests": tests, "seconds": seconds, "lines": lines, "dropped": dropped, "left_out": first["left_out"]}


def moves(old: str, new: str) -> dict[int, list[int]]:
    """Return old line -> new lines, from 1. Lines put in belong to the line before them."""
    found: dict[int, list[int]] = {}
    for what, first, last, to, end in difflib.SequenceMatcher(
        None, old.split("\n"), new.split("\n"), autojunk=False
    ).get_opcodes():
        if what == "equal":
            for line in range(first, last):
                found.setdefault(line + 1, []).append(to + line - first + 1)
        else:
            for line in range(first, last) if last > first else (first - 1,):
                found.setdefault(line + 1, []).extend(range(to + 1, end + 1))
    return found


def digest(root: Path, files: Iterable[str], content: Callable[[Path], bytes] = Path.read_bytes) -> str:
    found = hashlib.sha256()
    for file in files:
        path = root / file
        found.update(content(path) if path.exists() else b"-")
    return found.hexdigest()[:16]


def code(path: Path) -> bytes:
    """The syntax of a Python file without comments and docstrings."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return ast.dump(tree).encode()
