"""The git hooks: they run lint and types from .venv, and refuse what CI would refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
WHO = {f"GIT_{role}_{field}": "x" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *words], cwd=folder, env=CLEAN | WHO, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small checkout with the project's own Makefile, settings and hooks, and a link to its .venv/bin."""
    for name in (".githooks", ".ci", ".github"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    for package in ("spotkeeper", "agent/spotkeeper_agent", "infra", "bench"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "one.py").write_text("NUMBER: int = 1\n")
    (tmp_path / ".gitignore").write_text(".venv/\n.mypy_cache/\n.ruff_cache/\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(ROOT / ".venv" / "bin")
    (tmp_path / ".venv" / ".stamp").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "core.hooksPath", ".githooks")
    git(tmp_path, "add", "--all")
    return tmp_path


def test_a_commit_that_ci_would_accept_is_made(checkout: Path) -> None:
    done = git(checkout, "commit", "-m", "a" * 72)
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [("import os\n", "F401"), ('NUMBER: int = "1"\n', "Incompatible types")],
    ids=["lint", "types"],
)
def test_a_commit_that_ci_would_refuse_is_refused(checkout: Path, text: str, says: str) -> None:
    (checkout / "spotkeeper" / "one.py").write_text(text)
    done = git(checkout, "commit", "--all", "-m", "Change a number")
    assert done.returncode != 0 and says in done.stdout + done.stderr


@pytest.mark.parametrize("subject", ["a" * 73, "# a comment\n" + "é" * 73])
def test_a_long_subject_is_refused(checkout: Path, subject: str) -> None:
    (checkout / "message").write_text(subject)
    hook = [checkout / ".githooks" / "commit-msg", "message"]
    done = subprocess.run(hook, cwd=checkout, env=CLEAN, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and "has 73 characters, want at most 72" in done.stderr


def test_an_old_environment_is_refused_and_not_renewed(checkout: Path) -> None:
    (checkout / ".venv" / ".stamp").unlink()
    done = git(checkout, "commit", "-m", "Change nothing")
    assert done.returncode == 1 and "run make setup" in done.stderr
    assert not (checkout / ".venv" / ".stamp").exists()
