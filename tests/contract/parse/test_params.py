"""Parameters of a job: their values take the place of ``{name}`` in its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotkeeper.contract.parse.jobfile import Overrides, read_job


def command(folder: Path, words: str, params: str = "{lr: 3e-4, wide: true, model: vit}") -> list[str]:
    (folder / "job.yaml").write_text(f"name: first\ncommand: [/opt/train.py, {words}]\nparams: {params}\n")
    return list(read_job(folder / "job.yaml", None, 0.0).command[1:])


@pytest.mark.parametrize(
    ("words", "filled"),
    [
        ("'--lr={lr}'", ["--lr=0.0003"]),
        ("'{model}-{lr}-{wide}'", ["vit-0.0003-true"]),
        ("'{{lr}}'", ["{lr}"]),
        ("'{{lr}'", ["{0.0003"]),
        ("'{lr:.2f} {\"lr\": 1} {} { lr }'", ['{lr:.2f} {"lr": 1} {} { lr }']),
    ],
)
def test_values_replace_placeholders(tmp_path: Path, words: str, filled: list[str]) -> None:
    assert command(tmp_path, words) == filled


def test_a_value_with_braces_is_not_filled_again(tmp_path: Path) -> None:
    assert command(tmp_path, "'{a}'", "{a: '{b}', b: 1}") == ["{b}"]


def test_the_script_may_depend_on_a_parameter(tmp_path: Path) -> None:
    (tmp_path / "train_vit.py").touch()
    (tmp_path / "job.yaml").write_text("name: a\ncommand: ['train_{m}.py']\nsource: .\nparams: {m: vit}\n")
    spec = read_job(tmp_path / "job.yaml", None, 0.0)
    assert spec.command == ("train_vit.py",) and spec.params == {"m": "vit"}


def test_a_trials_values_replace_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\ncommand: [/x.py, '{m}', '{n}']\nparams: {m: 1, n: 2}\n")
    spec = read_job(tmp_path / "job.yaml", None, 0.0, overrides=Overrides("b", ("{n}",), {"m": 7}))
    assert (spec.name, spec.command, spec.params) == ("b", ("/x.py", "7", "2", "2"), {"m": 7, "n": 2})
