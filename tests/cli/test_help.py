"""The help of the command and of each subcommand."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from typer.models import CommandInfo

from spotkeeper.cli.for_sweeps import app as sweep_app
from spotkeeper.cli.local.commands import app as local_app
from spotkeeper.cli.main import JOBS, STACKS, app, run
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.cli.records import a_job


def commands() -> Iterator[tuple[str, CommandInfo]]:
    for prefix, one in (("", app), ("local ", local_app), ("sweep ", sweep_app)):
        for command in one.registered_commands:
            assert command.callback is not None
            yield prefix + (command.name or command.callback.__name__), command


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_every_commands_help_has_its_own_example(name: str) -> None:
    words = inspect.getdoc(ALL[name].callback) or ""
    assert f"`spotkeeper {name}" in words.partition("Example")[2], words


@pytest.mark.parametrize("name", ALL)
def test_every_command_answers_in_json(name: str) -> None:
    callback = ALL[name].callback
    assert callback is not None
    assert "as_json" in inspect.signature(callback).parameters


def test_help_explains_the_terms_and_groups_the_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert all(command.rich_help_panel in (JOBS, STACKS) for command in app.registered_commands)
    assert run(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in ("job", "nodes", "generation", "stack", "pools", JOBS, STACKS):
        assert word in said.partition("Terms:")[2], word


def test_the_version_option_prints_the_packages_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"spotkeeper {version('spotkeeper')}\n"


def test_every_command_has_help_and_an_example_or_a_reason(cli: Cli) -> None:
    out = cli("--help").out
    for command in (
        "submit",
        "status",
        "watch",
        "logs",
        "report",
        "cancel",
        "pause",
        "resume",
        "resize",
        "reconcile",
        "render",
    ):
        assert command in out
        text = cli(command, "--help").out
        assert "Usage: spotkeeper" in text
        assert len(text.splitlines()) > 8


def test_help_loads_nothing_heavy() -> None:
    """What makes `--help` slow is an import, and that can be told without a clock (bench/service/cli.py has one)."""
    program = (
        "import sys\n"
        "from spotkeeper.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        "heavy = {'torch', 'obstore', 'requests', 'yaml', 'jwt', 'pulumi', 'pathspec', 'starlette', 'rich.console'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


def test_status_loads_only_what_it_shows(store: Store) -> None:
    a_job(store)
    program = (
        "import sys\n"
        "from spotkeeper.cli.main import run\n"
        "assert run(['status']) == 0\n"
        "heavy = {'torch', 'obstore', 'requests', 'yaml', 'jwt', 'pathspec', 'spotkeeper.reconcile.decide'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
