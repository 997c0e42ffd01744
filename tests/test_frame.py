"""The frame of the checkout: the lock, the make targets, the benchmark runner, what the README promises."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCK = (ROOT / "requirements.lock").read_text()
PACK = (ROOT / "infra" / "policy" / "requirements.txt").read_text()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(("lock", "least"), [(LOCK, 50), (PACK, 10)], ids=["the program's", "the policy pack's"])
def test_a_lock_has_hashes_and_no_address(lock: str, least: int) -> None:
    entries = re.split(r"\n(?=\S)", lock.strip())
    assert len(entries) > least
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==\S+", entry), entry[:80]
        assert "--hash=sha256:" in entry, entry[:80]
    assert "://" not in lock
    assert "--index" not in lock
    assert "--find-links" not in lock


def test_the_policy_packs_versions_equal_the_programs_except_for_protobuf() -> None:
    """What judges a stack reads what the program's own Pulumi wrote."""
    ours, theirs = (dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE)) for lock in (LOCK, PACK))
    differ = {name for name, version in theirs.items() if ours.get(name, version) != version}
    assert differ <= {"protobuf", "googleapis-common-protos"}, "run: make lock"
    assert {"pulumi", "grpcio"} < theirs.keys() & ours.keys() and "pulumi-policy" in theirs
    assert "a" not in theirs["pulumi-policy"], "a pre-release"
    asked = (ROOT / "infra/policy/requirements.in").read_text()
    assert {"pulumi", "pulumi-policy"} == set(re.findall(r"^([a-z-]+)", asked, re.MULTILINE))


def test_the_lock_covers_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    taken = re.search(r"spotkeeper\[(.*)\]", next(line for line in extras["dev"] if line.startswith("spotkeeper[")))
    assert taken is not None  # the others have an environment of their own (`make adapters`)
    groups = [project["dependencies"], extras["dev"], *(extras[extra] for extra in taken[1].split(","))]
    named = {canonical(re.match(r"[A-Za-z0-9._-]+", line)[0]) for group in groups for line in group}  # type: ignore[index]
    locked = {canonical(line.partition("==")[0]) for line in LOCK.splitlines() if "==" in line and line[0] != " "}
    assert named - {"spotkeeper"} - locked == set(), "run: make lock"


def test_the_readme_names_the_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ {4})make ([a-z]+)\b", readme, re.MULTILINE))
    assert {"demo", "test", "bench", "lint", "types", "setup"} <= named
    assert named <= targets


def test_the_readme_names_spotkeeper_commands_that_exist() -> None:
    from spotkeeper.cli.local.commands import app as local_app
    from spotkeeper.cli.main import app

    commands = {one.name or one.callback.__name__ for one in app.registered_commands if one.callback}
    commands |= {group.name for group in app.registered_groups if group.name}
    local = {command.callback.__name__ for command in local_app.registered_commands if command.callback}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        shell = re.findall(r"^ {4}spotkeeper ([a-z-]+)(?: ([a-z]+))?", text, re.MULTILINE)
        shell += re.findall(r"`spotkeeper ([a-z-]+)(?: ([a-z]+))?", text)
        assert {first for first, _ in shell} <= commands, page.name
        assert {second for first, second in shell if first == "local" and second} <= local, page.name


def test_the_readme_states_the_measured_cost_of_an_idle_stack() -> None:
    figures = json.loads((ROOT / "bench" / "results.json").read_text())["figures"]
    idle = {figure["name"]: figure["value"] for figure in figures}
    stated = f"${idle['idle.gcp_usd_month']:.2f} a month on Google Cloud and ${idle['idle.aws_usd_month']:.2f} on AWS"
    assert stated in " ".join((ROOT / "README.md").read_text().split())


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``bench/run.py`` over a folder of made-up benchmarks."""
    spec = importlib.util.spec_from_file_location("bench_run", ROOT / "bench" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return module


def benchmark(folder: Path, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text(f"def figures():\n    {body}\n")


GOOD = "return [dict(name='{name}', value={value}, unit='s', goal='<= 1', holds={holds}, against='x')]"


def test_bench_writes_what_it_prints(runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark(tmp_path, "one", GOOD.format(name="one.s", value=0.5, holds=True))
    benchmark(tmp_path, "two", GOOD.format(name="two.s", value=2, holds=False))
    out = tmp_path / "results.json"
    assert runner.main(["--out", str(out)]) == 1  # a missed goal is a failure
    results = json.loads(out.read_text())
    assert set(results) == {"machine", "figures"}
    assert [figure["name"] for figure in results["figures"]] == ["one.s", "two.s"]
    table = capsys.readouterr().out
    assert "holds" in table
    assert "MISSED" in table


def test_a_figure_without_a_value_is_not_measured_and_does_not_hold(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark(tmp_path, "skipped", GOOD.format(name="skipped.s", value=None, holds=None))
    out = tmp_path / "results.json"
    assert runner.main(["--out", str(out)]) == 0
    assert "not measured" in capsys.readouterr().out
    assert json.loads(out.read_text())["figures"][0]["holds"] is None
    benchmark(tmp_path, "claimed", GOOD.format(name="claimed.s", value=None, holds=True))
    assert runner.main(["claimed", "--out", str(out)]) == 1


def test_every_figure_of_this_tree_has_a_value_or_is_not_measured() -> None:
    figures = json.loads((ROOT / "bench" / "results.json").read_text())["figures"]
    assert len(figures) > 50
    assert [figure["name"] for figure in figures if (figure["value"] is None) != (figure["holds"] is None)] == []


def test_a_benchmark_that_fails_does_not_disappear(runner: ModuleType, tmp_path: Path) -> None:
    benchmark(tmp_path, "bad", "raise RuntimeError('no')")
    benchmark(tmp_path, "empty", "return []")
    benchmark(tmp_path, "short", "return [dict(name='short', value=1)]")
    out = tmp_path / "results.json"
    assert runner.main(["--out", str(out)]) == 1
    figures = json.loads(out.read_text())["figures"]
    assert [(figure["name"], figure["holds"]) for figure in figures] == [
        ("bad", False),
        ("empty", False),
        ("short", False),
    ]
    assert "RuntimeError: no" in figures[0]["against"]


def test_measuring_one_figure_keeps_the_others(runner: ModuleType, tmp_path: Path) -> None:
    benchmark(tmp_path, "one", GOOD.format(name="one.s", value=1, holds=True))
    benchmark(tmp_path, "two", GOOD.format(name="two.s", value=1, holds=True))
    out = tmp_path / "results.json"
    assert runner.main(["--out", str(out)]) == 0
    # Another size: within a second, Python takes a source of the same size for the one whose bytecode it has.
    benchmark(tmp_path, "two", GOOD.format(name="two.s", value=10, holds=True))
    assert runner.main(["two", "--out", str(out)]) == 0
    assert {f["name"]: f["value"] for f in json.loads(out.read_text())["figures"]} == {"one.s": 1, "two.s": 10}


def test_the_check_ends_with_pytests_summary_and_fails_if_a_test_fails(tmp_path: Path) -> None:
    """``.ci/run`` in a copy whose ``make`` is made up: lint fails, the tests still run and come last."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\ncase "$2" in lint) echo wrong; exit 3;; test) echo "5 passed in 1s";; esac\n')
    make.chmod(0o755)
    for tool in ("promtool", "chromium"):  # there, so that none is fetched
        (tmp_path / tool).symlink_to("/bin/true")

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(tmp_path / ".ci" / "run")], env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip

    done = check()
    assert done.returncode == 3
    assert done.stdout.splitlines() == ["--- make --silent lint (exit status 3)", "wrong", "5 passed in 1s"]
    make.write_text('#!/bin/sh\n[ "$2" != test ] || echo "5 passed in 1s"\n')
    assert (check().returncode, check().stdout) == (0, "5 passed in 1s\n")


def setup(tmp_path: Path, stderr: int) -> list[str]:
    """``.ci/setup`` in a copy whose installers only write down how they were called."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "agent").mkdir()
    (tmp_path / ".ci" / "setup").write_text((ROOT / ".ci" / "setup").read_text())
    (tmp_path / "requirements.lock").write_text("uv==1 \\\n    --hash=sha256:0\n")
    for name in ("python", "uv"):
        tool = tmp_path / ".venv" / "bin" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        # Everything but torch is there, and the progress of an installer is a word.
        tool.write_text(
            f'#!/bin/sh\necho "{name} $*" >>"{tmp_path}/calls"\n[ "$1" != -c ] || [ -z "${{2##*sys*}}" ] || exit 1\n'
            'case "$*" in *--quiet*) ;; *install*) echo PROGRESS ;; esac\n'
        )
        tool.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(tmp_path / ".venv/bin/python")}
    command = ["bash", str(tmp_path / ".ci" / "setup")]
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr, timeout=30, check=True)
    assert (tmp_path / ".venv" / ".stamp").exists()
    return (tmp_path / "calls").read_text().splitlines()


def test_setup_says_how_large_it_is_and_shows_progress_on_a_terminal_only(tmp_path: Path) -> None:
    for name in ("terminal", "pipe"):
        (tmp_path / name).mkdir()
    ours, theirs = pty.openpty()
    calls = setup(tmp_path / "terminal", theirs)
    assert [call for call in calls if call.startswith("uv") and "--quiet" not in call]
    shown = os.read(ours, 4096).decode()
    assert "about 3 GB to fetch" in shown and "6 GB on disk" in shown and "PROGRESS" in shown
    read, write = os.pipe()
    calls = setup(tmp_path / "pipe", write)
    assert not [call for call in calls if "install" in call and "--quiet" not in call]
    shown = os.read(read, 4096).decode()
    assert len(shown.splitlines()) == 1 and "about 3 GB to fetch" in shown
    for fd in (ours, theirs, read, write):
        os.close(fd)
