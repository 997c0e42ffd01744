"""What refers to something names what exists: rules and properties in the code, files and functions on the pages."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from tests import graph
from tests.model.mutants.nine_rules import RULES

ROOT = Path(__file__).resolve().parents[1]
PROTOCOL = (ROOT / "docs/protocol.md").read_text("utf-8")
PAGES = ("docs/architecture.md", "docs/protocol.md", "docs/glossary.md", "docs/testing.md", "CONTRIBUTING.md")
RULE = re.compile(r"\brules? (\d+)(?:(?:,| and| to) (\d+))?", re.IGNORECASE)
PROPERTY = re.compile(r"(?<![\w-])[SL][1-9]\d?\b")
ABOUT_THE_PROTOCOL = ("spotkeeper/reconcile", "tests/model", "tests/sim", "tests/properties", "tests/reconcile")
BESIDE = re.compile(r"((?:`[\w./-]+\.py`(?:, | \| |\s))+)((?:`(?![\w.]*\.py`)[A-Za-z_][\w.]*`(?:, )?)+)")
FILE = re.compile(r"``([\w/*]+\.py)``")
STORED = ("jobs", "stack", "names", "static", "market", "tomb", "active", "bundles", "out", "ckpt")  # in the bucket
SHORT = ("", "spotkeeper/", "spotkeeper/reconcile/", "agent/spotkeeper_agent/", "infra/", "tests/")  # omitted on pages


def sources(*below: str) -> Iterator[tuple[str, str]]:
    for path in sorted(path for folder in below for path in (ROOT / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text("utf-8")


def stated(kind: str) -> list[str]:
    """The rules (``kind`` "") or properties that the page states, in the first column of its tables."""
    return re.findall(rf"^\| ({kind}\d+) \|", PROTOCOL, re.MULTILINE)


def test_the_page_states_nine_rules_and_all_properties_once() -> None:
    assert stated("") == [str(number) for number in range(1, 10)]
    assert stated("S") == [f"S{number}" for number in range(1, 11)]
    assert stated("L") == [f"L{number}" for number in range(1, 7)]


def test_every_rule_that_the_code_names_is_stated() -> None:
    named = [
        (name, number)
        for name, text in sources("spotkeeper", "agent", "infra", "tests")
        for found in RULE.finditer(text)
        for number in found.groups()
        if number is not None
    ]
    assert len(named) > 20
    assert [(name, number) for name, number in named if number not in stated("")] == []


def test_every_property_that_the_code_names_is_stated() -> None:
    named = [(name, word) for name, text in sources(*ABOUT_THE_PROTOCOL) for word in PROPERTY.findall(text)]
    assert {"S1", "S4", "S7", "S9", "S10", "L1", "L5", "L6"} <= {word for _, word in named}
    known = {*stated("S"), *stated("L")}
    assert [(name, word) for name, word in named if word not in known] == []


def test_the_pages_rules_are_those_of_the_search() -> None:
    """Each rule's last column is the mutant that breaks it; the search shows that it does."""
    rows = re.findall(r"^\| (\d) \|.*\| `([^`|]+)` \|$", PROTOCOL, re.MULTILINE)
    assert [f"rule {number}: {mutant}" for number, mutant in rows] == [mutant.name for mutant in RULES]


# -- files and functions


@lru_cache
def defined(path: Path) -> frozenset[str]:
    """Names of a file's functions, methods, classes, fields and constants."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            out |= {ast.unparse(target) for target in targets}
    return frozenset(out)


@lru_cache
def files_of(word: str) -> tuple[Path, ...]:
    """What a page means: a path, perhaps without its beginning, or the bare name of files of the tree."""
    if "/" in word:
        return tuple(path for short in SHORT if (path := ROOT / short / word).exists())[:1]
    return tuple(path for path in (*graph.files(), *(ROOT / "tests").rglob("*.py")) if path.name == word)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    words = [word for word in re.findall(r"`([\w./-]+)`", text) if "/" in word or word.endswith(".py")]
    assert [word for word in words if not files_of(word) and word.split("/")[0] not in (*STORED, ".spotkeeper")] == []


@pytest.mark.parametrize("page", ["architecture", "protocol"])
def test_every_function_named_beside_a_file_exists(page: str) -> None:
    """``file`` ``function``, ``function``; of several files before them, each has them."""
    text = (ROOT / f"docs/{page}.md").read_text("utf-8")
    named = [
        (path, function)
        for files, functions in BESIDE.findall(text)
        for file in re.findall(r"`([^`]+)`", files)
        for path in ([files_of(file)] if files_of(file) else [])
        for function in re.findall(r"`([^`]+)`", functions)
    ]
    assert len(named) > 15
    wrong = [f"{paths[0].relative_to(ROOT)}: {name}" for paths, name in named if not _has(paths, name)]
    assert wrong == []


def _has(paths: tuple[Path, ...], name: str) -> bool:
    return any(set(name.split(".")) <= defined(path) for path in paths)


def test_every_file_that_a_docstring_names_exists() -> None:
    """After a move, a name that stayed behind leads nowhere."""
    known = {path.name for path in (*graph.files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").glob("*.py"))}
    named = [(name, word) for name, text in sources("spotkeeper", "agent", "infra") for word in FILE.findall(text)]
    assert len(named) > 100
    wrong = [f"{name}: {word}" for name, word in named if not fnmatch.filter(known, word.rpartition("/")[2])]
    assert wrong == []
