"""What submit warns of before anything is paid for: the script's syntax tree, and processes that no device is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper.cli.jobs.foresee import warnings
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.contract.samples import STACK

EXAMPLES = Path(__file__).parents[3] / "examples"
LOOP = "for batch in run.steps(loader):\n    loss = model(batch)\n"


def warned(folder: Path, script: str, more: str = "", command: str = "[train.py]") -> list[str]:
    (folder / "train.py").write_text(script)
    (folder / "job.yaml").write_text(f"name: first\ncommand: {command}\nsource: .\n{more}")
    file = folder / "job.yaml"
    return list(warnings(file, read_job(file, None, 0.0), STACK))


@pytest.mark.parametrize("job", sorted(EXAMPLES.glob("*/job.yaml")), ids=lambda file: file.parent.name)
def test_the_examples_cause_no_warning(job: Path) -> None:
    assert list(warnings(job, read_job(job, None, 0.0), STACK)) == []


@pytest.mark.parametrize(
    ("head", "run"),
    [
        ("import spotkeeper", "run = spotkeeper.attach(model, optimizer)"),
        ("import spotkeeper as sk", "run = sk.attach(model=model)"),
        ("from spotkeeper import attach", "run = attach(model)"),
        ("from spotkeeper.train import attach as hold", "hold(model)"),
        ("import spotkeeper", "run = spotkeeper.attach(model); epochs = run.epochs(3)"),
    ],
)
def test_attach_without_a_loop_is_warned_about(tmp_path: Path, head: str, run: str) -> None:
    (line,) = warned(tmp_path, f"{head}\n{run}\nfor batch in loader:\n    train(batch)\n")
    assert "/train.py:2: attach() without run.steps()" in line and "for batch in run.steps(loader)" in line


@pytest.mark.parametrize(
    "script",
    [
        f"import spotkeeper\nrun = spotkeeper.attach(model)\n{LOOP}",
        "import spotkeeper\nrun = spotkeeper.attach(model)\nfor epoch in run.epochs(3):\n    list(run.steps(loader))\n",
        "import spotkeeper\nrun = spotkeeper.attach(model)\ntrain(run)\n",  # other code has the loop
        "import spotkeeper\ndef make():\n    return spotkeeper.attach(model)\n",
        "import spotkeeper\ntrain(spotkeeper.attach(model))\n",
        "import spotkeeper\nself.run = spotkeeper.attach(model)\n",
        "from other import attach\nattach(model)\n",
        "from spotkeeper.train.lightning import SpotkeeperCallback\ntrainer.fit(callbacks=[SpotkeeperCallback()])\n",
        "print(1)\n",
    ],
)
def test_correct_or_unreadable_scripts_cause_no_warning(tmp_path: Path, script: str) -> None:
    assert warned(tmp_path, script, "nodes: {min: 1, max: 2}\n") == []


def test_attach_without_arguments_is_warned_about(tmp_path: Path) -> None:
    (line,) = warned(tmp_path, f"import spotkeeper\nrun = spotkeeper.attach()\n{LOOP}")
    assert "/train.py:2: attach() without arguments" in line and "attach(model=model" in line


def test_an_own_optimizer_step_in_an_elastic_job_is_warned_about(tmp_path: Path) -> None:
    script = (
        f"import spotkeeper\nopt = torch.optim.AdamW(p)\nrun = spotkeeper.attach(model, opt)\n{LOOP}    opt.step()\n"
    )
    (line,) = warned(tmp_path, script, "nodes: {min: 1, max: 2}\n")
    assert "/train.py:6: " in line and "run.backward(loss) and run.step()" in line
    assert warned(tmp_path, script, "nodes: 2\n") == []
    (line,) = warned(tmp_path, script, "machines: [{pool: l4, nodes: 1}, {pool: t4, nodes: 1}]\n")
    assert "with `machines` the script must call run.backward(loss)" in line
    assert warned(tmp_path, script.replace("opt.step()", "run.step()"), "nodes: {min: 1, max: 2}\n") == []


def test_a_script_that_saves_by_itself_is_not_read(tmp_path: Path) -> None:
    script = "import spotkeeper\nrun = spotkeeper.attach(model)\n"
    assert warned(tmp_path, script, "stop: signal\nstatic: never\n") == []


def test_a_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__main__.py").write_text("import spotkeeper\nspotkeeper.attach(model)\n")
    (line,) = warned(tmp_path, "", command='["-m", pkg]')
    assert "/pkg/__main__.py:2: " in line


def test_more_processes_than_devices_are_warned_about(tmp_path: Path) -> None:
    found = warned(tmp_path, "", "nproc: 9\n")
    (line,) = found
    assert "/job.yaml: nproc: 9 is more processes than a machine has devices" in line
    assert "8 devices" in line and "one device, or none" in line
    assert warned(tmp_path, "", "nproc: 1\n") == []


@pytest.mark.parametrize("check", [("--check",), ()])
def test_submit_prints_warnings_and_continues(cli: Cli, store: Store, folder: Path, check: tuple[str, ...]) -> None:
    (folder / "code" / "train.py").write_text("import spotkeeper\nspotkeeper.attach(model)\n")
    done = cli("submit", folder / "job.yaml", *check)
    assert done.code == 0
    assert "train.py:2: attach() without run.steps()" in done.err


def test_a_scaled_step_in_an_elastic_job_is_warned_about(tmp_path: Path) -> None:
    script = f"import spotkeeper\nopt = torch.optim.AdamW(p)\nrun = spotkeeper.attach(model, opt)\n{LOOP}"
    (line,) = warned(tmp_path, f"{script}    scaler.step(opt)\n    scaler.update()\n", "nodes: {min: 1, max: 2}\n")
    assert "/train.py:6: " in line and "run.backward(loss) and run.step()" in line


def test_a_script_with_a_syntax_error_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    (line,) = warned(tmp_path, "import os\nthis is no Python\n")
    assert line.startswith(f"{tmp_path.name}/train.py:2: invalid syntax (in Python 3.")


@pytest.mark.parametrize(
    "script", [b"x = 1\0\n", bytes(range(256)), b"x = " + b"(" * 5000, b"# coding: nonsense\nx = 1\n"]
)
def test_an_unparsable_script_stops_no_submission(tmp_path: Path, script: bytes) -> None:
    """Which Python reports a NUL byte or a nesting too deep as a syntax error, and which otherwise, varies."""
    (tmp_path / "train.py").write_bytes(script)
    (tmp_path / "job.yaml").write_text("name: first\ncommand: [train.py]\nsource: .\n")
    found = list(warnings(tmp_path / "job.yaml", read_job(tmp_path / "job.yaml", None, 0.0), STACK))
    assert all("train.py:" in line for line in found) and len(found) <= 1
