"""What somebody sees who types a command for the first time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from spotkeeper.cli.local import app as local_app
from spotkeeper.cli.main import JOBS, STACKS, app, run
from typer.models import CommandInfo


def commands() -> Iterator[tuple[str, CommandInfo]]:
    for prefix, one in (("", app), ("local ", local_app)):
        for command in one.registered_commands:
            assert command.callback is not None
            yield prefix + (command.name or command.callback.__name__), command


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_every_command_teaches_with_an_example_of_itself(name: str) -> None:
    words = inspect.getdoc(ALL[name].callback) or ""
    assert f"`spotkeeper {name}" in words.partition("Example")[2], words


@pytest.mark.parametrize("name", ALL)
def test_every_command_answers_in_json(name: str) -> None:
    callback = ALL[name].callback
    assert callback is not None
    assert "as_json" in inspect.signature(callback).parameters


def test_who_has_never_seen_it_learns_the_words_and_which_commands_are_for_whom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert all(command.rich_help_panel in (JOBS, STACKS) for command in app.registered_commands)
    assert run(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in ("job", "ranks", "generation", "stack", "pools", JOBS, STACKS):
        assert word in said.partition("The words:")[2], word


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"spotkeeper {version('spotkeeper')}\n"
