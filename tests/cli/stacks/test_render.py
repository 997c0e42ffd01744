"""`render`: the scripts of a stack's machines and the launch command of a job."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli

ROOT = Path(__file__).resolve().parents[3]


def test_render_of_the_stack_of_this_machine_shows_its_scripts(cli: Cli) -> None:
    done = cli("render")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("===== startup-script\n#!")
    assert "\n===== shutdown-script\n" in done.out


def test_render_of_a_wrong_stack_file_names_its_lines(cli: Cli, tmp_path: Path) -> None:
    shipped = (ROOT / "infra" / "stacks" / "Pulumi.example-gcp.yaml").read_text()
    file = tmp_path / "Pulumi.wrong.yaml"
    file.write_text(shipped.replace("kind: spot", "kind: spto"))
    line = file.read_text().splitlines().index("      kind: spto") + 1
    done = cli("render", file)
    assert done.code == 2
    assert f'Pulumi.wrong.yaml:{line}: pools[1].kind: "spto"' in done.err
    file.write_text("config:\n  a: 1\n b\n")
    assert cli("render", file).err.startswith("error: Pulumi.wrong.yaml:3: ")
    file.write_text("confg: {}\n")
    assert "Pulumi.wrong.yaml: config: missing" in cli("render", file).err


def test_render_of_a_job_shows_torchrun_and_its_environment(cli: Cli, folder: Path) -> None:
    done = cli("render", folder / "job.yaml")
    assert done.code == 0, done.err
    assert "--nnodes=2" in done.out
    assert "SPOTKEEPER_RUN=" in done.out
    names = [one["name"] for one in json.loads(cli("render", folder / "job.yaml", "--json").out)]
    assert names == ["command", "environment"]
