"""The tree: imports run one way, folders are short, class names occur once, jobs and function import what is there."""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import graph

FILES = 22  # in a folder at most
# A class name occurs once in a package tree, except in these modules: they take their names from an API, and the two
# clouds' modules mirror each other.
NAMED_BY_AN_API = (
    *("spotkeeper.reconcile.clouds.gce", "spotkeeper.reconcile.clouds.ec2", "spotkeeper.local.core.schema"),
    *("spotkeeper.train.lightning", "spotkeeper.train.huggingface"),
)
# Class name -> why it may occur twice.
TWICE: dict[str, str] = {}
# A module may import what its own package and these name; the longest beginning of its name counts.
ALLOWED = {
    "spotkeeper": {"spotkeeper.train", "spotkeeper.version"},
    "spotkeeper.version": set(),
    "spotkeeper.clock": set(),
    "spotkeeper.contract": {"spotkeeper.clock"},
    "spotkeeper.train": {"spotkeeper.clock", "spotkeeper.version"},
    "spotkeeper.replay": {"spotkeeper.contract"},
    "spotkeeper.reconcile": {"spotkeeper.clock", "spotkeeper.contract"},
    "spotkeeper.report": {"spotkeeper.contract", "spotkeeper.replay", "spotkeeper.train.core.curve"},  # as jobs thin
    # the view of the queue asks the function's own scheduler
    "spotkeeper.report.queue": {"spotkeeper.contract", "spotkeeper.report", "spotkeeper.reconcile.decide.queue"},
    # a forecast replays the choice that the function makes
    "spotkeeper.report.forecast": {
        *("spotkeeper.contract", "spotkeeper.replay", "spotkeeper.report"),
        *("spotkeeper.reconcile.select", "spotkeeper.reconcile.decide", "spotkeeper.reconcile.store"),
    },
    "spotkeeper_agent": {"spotkeeper", "spotkeeper.clock", "spotkeeper.contract", "spotkeeper.train"},
    "spotkeeper_agent.launcher": {"spotkeeper.train"},  # it runs in a job's Python
    "spotkeeper.client": {
        *("spotkeeper.clock", "spotkeeper.contract", "spotkeeper.reconcile", "spotkeeper.report"),
        *("spotkeeper_agent.launcher", "spotkeeper_agent.cloud.sigv4"),  # what logs and signatures look like
        *("spotkeeper.local.lifecycle", "infra.naming"),  # the one-machine cloud's stack
    },
    "spotkeeper.dashboard": {
        *("spotkeeper.client", "spotkeeper.contract", "spotkeeper.reconcile.store", "spotkeeper.report"),
    },
    "spotkeeper.exporter": {
        *("spotkeeper.client", "spotkeeper.contract", "spotkeeper.reconcile", "spotkeeper.report"),
        "spotkeeper.version",
    },
    "spotkeeper.integrations": {
        *("spotkeeper.client", "spotkeeper.contract", "spotkeeper.reconcile.store", "spotkeeper.report"),
    },
    "infra": {"spotkeeper.clock", "spotkeeper.client", "spotkeeper.contract", "spotkeeper.reconcile.store"},
    "spotkeeper.local": {"spotkeeper", "spotkeeper.clock", "spotkeeper.contract", "spotkeeper.reconcile"},
    "spotkeeper.local.deploy": {"spotkeeper.contract", "spotkeeper.local", "infra"},
    "spotkeeper.local.demo": {
        *("spotkeeper.client", "spotkeeper.clock", "spotkeeper.contract", "spotkeeper.local", "spotkeeper.reconcile"),
        *("spotkeeper.report", "spotkeeper.train"),
    },
    "spotkeeper.cli": set(),  # everything; nothing imports it
}


def owner(name: str) -> str:
    return max((part for part in ALLOWED if name == part or name.startswith(f"{part}.")), key=len)


def within(name: str, parts: set[str]) -> bool:
    """``spotkeeper`` alone is the package's own file and not all that is in it."""
    return any(name == part or (name.startswith(f"{part}.") and part != "spotkeeper") for part in parts)


@pytest.mark.parametrize("part", sorted(set(ALLOWED) - {"spotkeeper.cli"}))
def test_imports_run_one_way(part: str) -> None:
    known = graph.imports()
    wrong = []
    for name in sorted(known):
        if owner(name) != part:
            continue
        wrong += [f"{name} -> {other}" for other in known[name] if not within(other, ALLOWED[part] | {part})]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_command() -> None:
    found = [
        f"{name} -> {other}"
        for name, others in graph.imports().items()
        for other in others
        if f"{other}.".startswith("spotkeeper.cli.") and not name.startswith("spotkeeper.cli")
    ]
    assert not found


def test_imports_have_no_circle() -> None:
    assert graph.circles() == []


def test_no_folder_has_too_many_files() -> None:
    found = collections.Counter(path.parent.relative_to(graph.ROOT).as_posix() for path in graph.files())
    assert {folder: count for folder, count in found.items() if count > FILES} == {}


def test_a_class_name_occurs_once_in_a_package_tree() -> None:
    found: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for module, path in graph.modules().items():
        if not within(module, set(NAMED_BY_AN_API)):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[module.partition(".")[0], node.name].append(module)
    twice = {name: places for (_, name), places in found.items() if len(places) > 1}
    assert {name: places for name, places in twice.items() if name not in TWICE} == {}, "give each a name of its own"


def test_a_jobs_part_imports_only_the_standard_library_at_first() -> None:
    """The launcher and the saver start before torch is known to be there."""
    code = (
        "import sys; import spotkeeper_agent.launcher.__main__, spotkeeper_agent.launcher.host, "
        "spotkeeper.train.checkpoint.saver\n"
        "print([name for name in ('torch', 'msgspec', 'requests', 'jinja2', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_test_replaces_a_clock_of_the_whole_process() -> None:
    """It would also answer threads that earlier tests left; ``tests/module_time.py`` replaces it in one module."""
    whole = re.compile(r'setattr\(\s*(?:[\w.]*\btime, "|"(?:[\w.]+\.)?time\.\w)')
    assert whole.search('setattr(status.time, "sleep", wait)')
    files = {*(graph.ROOT / "tests").rglob("*.py")} - {Path(__file__)}
    assert not [path for path in files if whole.search(path.read_text())]
