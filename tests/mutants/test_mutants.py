"""``make mutants``: what is mutated, which tests meet it, and that the list of equivalent mutants names real ones."""

from __future__ import annotations

import ast
import importlib.util
import json
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants import areas, lane, reach, worker
from tests.mutants.__main__ import EQUIVALENT, drawn

if TYPE_CHECKING:
    from tests.mutants.operators import Mutant

ROOT = Path(__file__).parents[2]
SOURCE = '''
from functools import cached_property

LIMIT = 3


def near(a: int | None, b: int = 5) -> bool:
    """Not a word of this is mutated."""
    return a is not None and a < b + LIMIT


class Box:
    @cached_property
    def full(self) -> bool:
        return near(7)
'''


def mutated(file: str, source: str) -> list[Mutant]:
    from tests.mutants.operators import mutants  # libcst is imported where it runs, not by all that collect this file

    return mutants(file, source)


def found(function: str) -> set[str]:
    every = mutated("box.py", SOURCE)
    return {mutant.diff.split("\n+")[1].strip() for mutant in every if mutant.function == function}


def test_an_environment_that_imports_another_checkout_is_refused(tmp_path: Path) -> None:
    """Its tests would not meet the mutants."""
    root, packages = tmp_path / "ours", tmp_path / "ours/.venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (root / ".venv/bin").mkdir()
    (root / ".venv/pyvenv.cfg").touch()
    finder = packages / "__editable___spotkeeper_finder.py"
    finder.write_text(f"MAPPING = {{'spotkeeper': '{root}/spotkeeper'}}")
    lane._environment(root, tmp_path / "copy")
    copied = tmp_path / "copy/.venv" / packages.relative_to(root / ".venv") / finder.name
    assert copied.read_text() == f"MAPPING = {{'spotkeeper': '{tmp_path}/copy/spotkeeper'}}"
    finder.write_text("MAPPING = {'spotkeeper': '/theirs/spotkeeper'}")
    with pytest.raises(RuntimeError, match=r"\.venv is another checkout's: remove it and run `make setup` in .*/ours$"):
        lane._environment(root, tmp_path / "other")


def test_operators_mutate_conditions_numbers_and_arguments_but_no_annotations() -> None:
    assert found("near") == {
        "def near(a: int | None, b: int = 6) -> bool:",
        "return a is not None or a < b + LIMIT",
        "return a is None and a < b + LIMIT",
        "return a is not None and a <= b + LIMIT",
        "return a is not None and a < b - LIMIT",
    }


def test_decorated_functions_are_mutated() -> None:
    assert found("Box.full") == {"return near(None)", "return near(8)"}


def test_only_a_default_value_is_part_of_the_signature_and_the_functions_tests_can_notice_it() -> None:
    (mutant,) = [mutant for mutant in mutated("box.py", SOURCE) if mutant.signature]
    first, *_, last = SOURCE.split("\n")[mutant.first - 1 : mutant.last]
    assert mutant.diff.split("\n")[0] == f"-{first}" == "-def near(a: int | None, b: int = 5) -> bool:"
    assert last == "    return a is not None and a < b + LIMIT"


def test_a_mutant_keeps_its_name_when_lines_move() -> None:
    moved = mutated("box.py", "\n\n" + SOURCE)
    assert [mutant.key for mutant in moved] == [mutant.key for mutant in mutated("box.py", SOURCE)]


def test_a_seed_draws_the_same_mutants_and_more_of_them_in_a_larger_sample() -> None:
    every = mutated("box.py", SOURCE)
    assert drawn(every, 1, 3) == drawn(every, 1, 7)[:3]
    assert len({mutant.key for mutant in drawn(every, 1, 7)}) == 7
    assert drawn(every, 1, 7) != drawn(every, 2, 7)


@pytest.fixture
def box(tmp_path: Path) -> ModuleType:
    path = tmp_path / "box.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("box", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_live_functions_and_properties_take_the_mutant(box: ModuleType) -> None:
    path = Path(box.__file__ or "")
    near, full = box.near, box.Box().full
    mutated = SOURCE.replace("a < b", "a > b").replace("near(7)", "near(99)")
    assert (near(7), full) == (True, True)
    assert worker._swap(path, SOURCE, mutated)
    assert (near(7), box.Box().full) == (False, True)


def test_a_function_that_begins_to_close_over_a_variable_is_not_swapped(tmp_path: Path) -> None:
    before = "def outer(n):\n    def inner():\n        return 1\n    return inner\n\n\nkept = outer(2)\n"
    path = tmp_path / "closed.py"
    names: dict[str, object] = {}
    exec(compile(before, str(path), "exec"), names)  # noqa: S102
    assert not worker._swap(path, before, before.replace("return 1", "return n"))


def test_only_tests_that_passed_twice_are_kept() -> None:
    first = {"outcomes": {"a": ["passed", 3.0], "b": ["passed", 1.0], "c": ["failed", 1.0], "d": ["skipped", 0.0]}}
    second = {"outcomes": {"a": ["passed", 2.0], "b": ["failed", 1.0], "c": ["passed", 1.0], "d": ["skipped", 0.0]}}
    lines = {"x.py": {3: ["a", "b"], 4: ["c"]}}
    kept = reach.record(first | {"lines": lines, "left_out": 0}, second)
    assert kept["seconds"] == {"a": 2.0}
    assert kept["lines"] == {"x.py": {3: [0], 4: []}}
    assert kept["dropped"] == ["c", "b"]


def test_what_a_fixture_reaches_all_its_tests_reach() -> None:
    first, second = (SimpleNamespace(nodeid=name, fixturenames=["stack"]) for name in ("t::one", "t::two"))
    other = SimpleNamespace(nodeid="t::three", fixturenames=[])
    reached = {"a.py": {7: [f"{worker.FIXTURE}stack", "t::three"], 8: ["t::one"]}}
    found = worker.with_users(reached, [first, second, other])  # type: ignore[list-item]
    assert found == {"a.py": {7: ["t::one", "t::three", "t::two"], 8: ["t::one"]}}


def test_lines_that_moved_are_found_again() -> None:
    old = ["a = 1", "", "def f():", "    return 2", "", "b = 3"]
    assert reach.moves("\n".join(old), "\n".join(["# put in", *old])) == {0: [1], **{n: [n + 1] for n in range(1, 7)}}
    changed = [*old[:3], "    x = 2", "    return x", *old[4:]]
    assert reach.moves("\n".join(old), "\n".join(changed)) == {1: [1], 2: [2], 3: [3], 4: [4, 5], 5: [6], 6: [7]}
    assert reach.moves("\n".join(old), "\n".join(old[:3] + old[4:]))[4] == []


def test_tests_of_the_same_folder_are_near() -> None:
    near = areas.nearness
    assert near("infra/gcp/function.py", "tests/infra/gcp/test_declared.py::test_a") == 2
    assert near("spotkeeper/reconcile/decide/gang/requests.py", "tests/reconcile/decide/test_guards.py::test_a") == 2
    assert near("agent/spotkeeper_agent/job/mirror.py", "tests/agent/job/test_mirror.py::test_a") == 2
    assert near("spotkeeper/train/checkpoint/saver.py", "tests/infra/test_idle.py::test_a") == 0


def test_every_area_and_every_list_names_files() -> None:
    for area in areas.AREAS:
        assert areas.sources(ROOT, [area])
    lists = (*areas.PROCESSES.values(), *areas.NEAR.values())
    for entry in (*areas.PROCESSES, *areas.TESTS, *(test for tests in lists for test in tests)):
        assert (ROOT / entry).exists(), entry


def test_every_equivalent_mutant_exists() -> None:
    rows = tomllib.loads(EQUIVALENT.read_text("utf-8")).get("equivalent", [])
    removed = {(row["file"], row["function"], line[1:]) for row in rows for line in row["diff"].strip().split("\n")}
    known = {
        (mutant.file, mutant.function, mutant.diff)
        for file in {row["file"] for row in rows}
        for mutant in mutated(file, _excerpt(file, {row["function"] for row in rows if row["file"] == file}))
        for line in mutant.source.splitlines()[mutant.first - 1 : mutant.last]
        if (file, mutant.function, line) in removed  # a diff takes 20 ms
    }
    for row in rows:
        assert row["reason"]
        assert (row["file"], row["function"], row["diff"].strip()) in known, row


def _excerpt(file: str, functions: set[str]) -> str:
    """Return the lines of these functions and of their classes' heads: to mutate whole files takes 10 s."""
    source = (ROOT / file).read_text("utf-8")
    kept: set[int] = set()

    def keep(body: list[ast.stmt], names: list[str]) -> None:
        for node in body:
            if getattr(node, "name", None) == names[0]:
                inner = node.body if isinstance(node, ast.ClassDef) and names[1:] else []
                kept.update(range(node.lineno, inner[0].lineno if inner else (node.end_lineno or 0) + 1))
                keep(inner, names[1:])

    for function in functions:
        keep(ast.parse(source).body, function.split("."))
    return "".join(line for at, line in enumerate(source.splitlines(keepends=True), 1) if at in kept)


def test_threads_that_save_at_once_lose_no_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "OUT", tmp_path / "mutants.json")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: mutants.save({str(number): number}), range(200)))
    assert len(json.loads((tmp_path / "mutants.json").read_text())) == 200
