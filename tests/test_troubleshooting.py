"""The troubleshooting page has every hold, reason to wait, warning and quarantine entry of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from spotkeeper.client.target import LOCAL
from spotkeeper.contract.record import Hold
from spotkeeper.reconcile.decide import Times
from spotkeeper.reconcile.decide.job import limits

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
RECONCILE = ROOT / "spotkeeper" / "reconcile"
LEVELS = ("warning", "error", "critical", "exception")
QUOTED = set(re.findall(r"`([^`\n]+)`", PAGE))


@cache
def nodes() -> tuple[tuple[Path, ast.AST], ...]:
    """The function's code: file, and each node of its syntax tree."""
    files = sorted(RECONCILE.rglob("*.py"))
    return tuple((path, node) for path in files for node in ast.walk(ast.parse(path.read_text("utf-8"))))


def calls() -> Iterator[tuple[Path, ast.Call, str, str]]:
    """Every call of a method in the function's code: file, call, the name it is called on (or ""), and its name."""
    for path, node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on = node.func.value
            yield path, node, on.id if isinstance(on, ast.Name) else "", node.func.attr


def warnings() -> list[str]:
    """Lines of the log from WARNING on, as the page spells them: ``…`` for what differs."""
    texts = [node.args[0] for _, node, on, name in calls() if on == "log" and name in LEVELS]
    assert all(isinstance(text, ast.Constant) for text in texts), (
        "a line that warns is a constant, so that it can be found"
    )
    return sorted({re.sub(r"%[sd]|%\.\d+f", "…", text.value) for text in texts if isinstance(text, ast.Constant)})


def reasons() -> list[str]:
    """What a job that waits says, up to what differs."""
    decide = RECONCILE / "decide"
    texts = (node.value for path, node in nodes() if isinstance(node, ast.Constant) and path.is_relative_to(decide))
    return sorted({text for text in texts if isinstance(text, str) and text.startswith("waiting")})


def test_every_warning_of_the_log_is_on_the_page() -> None:
    found = warnings()
    missing = [line for line in found if line not in QUOTED]
    assert found and not missing, 'docs/troubleshooting.md, "Log lines": say what each means and what to do'


def test_every_reason_to_wait_is_on_the_page() -> None:
    found = reasons()
    missing = [reason for reason in found if not any(f"{said}…".startswith(f"{reason}…") for said in QUOTED)]
    assert found and not missing, 'docs/troubleshooting.md, "Jobs that wait": say what each means and what to do'


@pytest.mark.parametrize("hold", Hold, ids=lambda hold: hold.value)
def test_every_hold_is_on_the_page(hold: Hold) -> None:
    assert f"| `{hold.value}` |" in PAGE


def test_every_writer_of_the_quarantine_is_on_the_page() -> None:
    writers = {path.stem for path, _, _, name in calls() if name == "quarantine"}
    table = PAGE.partition("## Quarantine")[2]
    assert writers and not [writer for writer in writers if f"| `{writer}` |" not in table]


def test_the_page_lists_only_existing_log_lines() -> None:
    table = PAGE.partition("| Line of the log |")[2].partition("## Quarantine")[0]
    firsts = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {said for first in firsts for said in re.findall(r"`([^`]+)`", first)} == set(warnings())


def test_the_limits_on_the_costs_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "costs.md").read_text("utf-8")
    times = Times()
    assert (
        f"{times.launches_node} machines were requested for a node within an hour, "
        f"or for a job {times.launches_node} plus {times.launches_job} per node"
    ) in page
    assert "more than a fifth of the nodes (at least two) vanish within a minute" in page and "for two minutes" in page
    assert (limits.SHARE, limits.AT_LEAST, times.breaker_s, times.breaker_window_s) == (0.2, 2, 120.0, 60.0)


def test_the_page_says_where_the_one_machine_cloud_has_the_functions_log() -> None:
    """`local/serverless/functions.py` writes it; the glob on the page is what finds it."""
    text = (ROOT / "spotkeeper" / "local" / "serverless" / "functions.py").read_text("utf-8")
    assert 'folder / "serial" / f"function-{name}.log"' in text
    assert f"{LOCAL}/serial/function-*.log" in QUOTED
