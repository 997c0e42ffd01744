"""Templates onto machines: nothing missing, nothing unescaped, and an error shows the line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spotkeeper_agent.core.settings import templates_path
from spotkeeper_agent.job.launch_spec import RenderError, render

TEMPLATES = sorted(templates_path().glob("*.j2"))
FILTERS = ("json",)


def unfiltered(text: str) -> list[str]:
    """Every ``{{ }}`` without the filter."""
    found = re.findall(r"{{(.*?)}}", re.sub(r"{#.*?#}", "", text, flags=re.S), flags=re.S)
    return [inner.strip() for inner in found if inner.rpartition("|")[2].strip() not in FILTERS]


def write(folder: Path, text: str) -> Path:
    path = folder / "t.j2"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_every_template_value_has_a_filter(path: Path) -> None:
    assert unfiltered(path.read_text()) == []


def test_the_template_lint_finds_a_missing_filter() -> None:
    assert TEMPLATES
    assert unfiltered("{{ a }} {{ b | upper }} {{ c | json }} {# {{ d }} #}") == ["a", "b | upper"]


def test_values_are_json(tmp_path: Path) -> None:
    assert render(write(tmp_path, "{{ a | json }}"), {"a": 'x; $y 100% "z"'}) == '"x; $y 100% \\"z\\""'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "one\nExecStart={{ missing | json }}\n",
            r"t\.j2:2: 'missing' is undefined\n +ExecStart=\{\{ missing \| json \}\}",
        ),
        ("one\ntwo\n{% if %}\n", r"t\.j2:3: Expected an expression"),
        ("{{ a.b | json }}", r"t\.j2:1: .*has no attribute 'b'"),
        ("{{ a | nothing }}", r"t\.j2:1: No filter named 'nothing'"),
    ],
)
def test_errors_show_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        render(write(tmp_path, text), {"a": 1})


def test_missing_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"none\.j2: No such file"):
        render(tmp_path / "none.j2", {})
