"""`spotkeeper check`: a stack file and the job files it names, all that is wrong at once, without a cloud."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spotkeeper.cli.stacks import stackfile
from tests.cli.conftest import Cli

ROOT = Path(__file__).resolve().parents[3]
STACK = """config:
  gcp:project: acme-train
  spotkeeper:cloud: gcp
  spotkeeper:region: us-east1
  spotkeeper:image: projects/acme-images/global/images/train-1
  spotkeeper:job_identity: trainer@acme-train.iam.gserviceaccount.com
  spotkeeper:secrets: [wandb]
  spotkeeper:jobs: [jobs/vit.yaml, jobs/gpt.yaml]
  spotkeeper:pools:
    - name: burst
      kind: spot
      size: 8
      max_on_demand: 2
      zones: [us-east1-b]
      machine: {type: a2-highgpu-1g}
      disk: {size_gb: 100}
"""
JOB = "name: NAME\ncommand: [train.py]\nsource: .\nnodes: 4\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a stack and two jobs, all right."""
    (tmp_path / "infra/stacks").mkdir(parents=True)
    (tmp_path / "infra/stacks/Pulumi.dev.yaml").write_text(STACK)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/train.py").write_text("print(1)\n")
    for name in ("vit", "gpt"):
        (tmp_path / f"jobs/{name}.yaml").write_text(JOB.replace("NAME", name))
    monkeypatch.setattr(stackfile, "CHECKOUT", tmp_path)
    return tmp_path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_channels_are_listed_without_their_addresses(cli: Cli, checkout: Path) -> None:
    secret, literal = "gcp-secret://projects/acme-train/secrets/slack/versions/latest", "https://hooks.acme.dev/key-123"
    with (checkout / "infra/stacks/Pulumi.dev.yaml").open("a") as file:
        file.write("  spotkeeper:channels:\n")
        file.write(f"    - {{name: team, kind: slack, address: '{secret}', events: [failed]}}\n")
        file.write(f"    - {{name: quiet, kind: webhook, address: '{literal}', events: []}}\n")
    done = cli("check", "dev")
    assert "  channel team (slack, its address is a secret): failed\n" in done.out
    assert "  channel quiet (webhook, its address is in the stack file): no events\n" in done.out
    as_json = cli("check", "dev", "--json")
    assert json.loads(as_json.out)["channels"][0] == {
        "name": "team",
        "kind": "slack",
        "events": ["failed"],
        "secret": True,
    }
    for said in (done, as_json):
        assert "key-123" not in said.out and "secrets/slack" not in said.out


def test_a_valid_stack_is_summarised_with_the_cost_of_its_pools(cli: Cli, checkout: Path) -> None:
    done = cli("check", "dev")
    assert (done.code, done.err) == (0, "")
    # 8 x 1.469; of them 2 on-demand: 6 x 1.469 + 2 x 3.673
    assert "burst (spot): up to 8 x a2-highgpu-1g, $11.75 an hour as spot, at most $16.16\n" in done.out
    assert "job jobs/vit.yaml\n" in done.out


def test_json_has_the_same_content(cli: Cli, checkout: Path) -> None:
    told = json.loads(cli("check", checkout / "infra/stacks/Pulumi.dev.yaml", "--json").out)
    assert (told["stack"], told["ok"], told["problems"], told["jobs"]) == (
        "dev",
        True,
        [],
        ["jobs/vit.yaml", "jobs/gpt.yaml"],
    )
    assert told["pools"][0] | {"machine": ""} == {
        "name": "burst", "kind": "spot", "machine": "", "machines": 8, "on_demand": 2,
        "usd_hour_spot": 11.75, "usd_hour_most": 16.16, "reserved": [],
    }  # fmt: skip


def test_the_limits_of_all_pools_are_said(cli: Cli, checkout: Path) -> None:
    file = checkout / "infra/stacks/Pulumi.dev.yaml"
    assert "all spot pools together" not in cli("check", file).out
    change(file, "config:\n", "config:\n  spotkeeper:limits: {machines: 6, usd_per_hour: 9.5}\n")
    assert "  all spot pools together: at most 6 machines and $9.50 an hour (limits)\n" in cli("check", file).out
    told = json.loads(cli("check", file, "--json").out)
    assert (told["max_machines"], told["max_usd_hour"]) == (6, 9.5)


def test_what_is_reserved_is_said(cli: Cli, checkout: Path) -> None:
    file = checkout / "infra/stacks/Pulumi.dev.yaml"
    reserved = "{name: res, zone: us-east1-b, count: 4, ends: 2026-12-08T11:30:00Z}"
    change(file, "max_on_demand: 2", f"max_on_demand: 2\n      reservations: [{reserved}]")
    told = "4 reserved in us-east1-b as res to 2026-12-08T11:30:00Z, paid for already: first"
    assert f"    {told}\n" in cli("check", file).out
    assert json.loads(cli("check", file, "--json").out)["pools"][0]["reserved"] == [told]


def test_a_reservation_that_has_ended_is_a_warning(cli: Cli, checkout: Path) -> None:
    file = checkout / "infra/stacks/Pulumi.dev.yaml"
    later = "{name: res, zone: us-east1-b, count: 4, ends: 2999-12-08T11:30:00Z}"
    change(file, "max_on_demand: 2", f"max_on_demand: 2\n      reservations: [{later}]")
    assert cli("check", file).err == ""
    change(file, "2999", "2020")
    why = "res ended at 2020-12-08T11:30:00Z, so no job uses it: correct the time or remove it"
    done = cli("check", file)
    assert (done.code, done.err) == (0, f"warning: pools[0].reservations[0].ends: {why}\n")
    assert json.loads(cli("check", file, "--json").out)["warnings"] == [f"pools[0].reservations[0].ends: {why}"]


def test_a_region_without_zones_is_a_warning(cli: Cli, checkout: Path) -> None:
    file = checkout / "infra/stacks/Pulumi.dev.yaml"
    change(file, "spotkeeper:region: us-east1", "spotkeeper:regions: [us-east1, us-central1]")
    why = "add zones of us-central1 to `zones` or to a pool's, or remove the region"
    done = cli("check", file)
    assert (done.code, done.err) == (0, f"warning: regions[1]: no pool has a zone in us-central1: {why}\n")
    change(file, "zones: [us-east1-b]", "zones: [us-east1-b, us-central1-a]")
    assert cli("check", file).err == ""


def test_what_another_region_lacks_is_at_the_line_of_the_home_regions(cli: Cli, tmp_path: Path) -> None:
    text = (ROOT / "infra/stacks/Pulumi.example-aws.yaml").read_text()
    text = text.replace("spotkeeper:region: us-east-1", "spotkeeper:regions: [us-east-1, us-west-2]")
    file = tmp_path / "Pulumi.dev.yaml"
    file.write_text(text.replace("us-east-1b, us-east-1c]", "us-east-1b, us-west-2a]"))
    line = next(at for at, found in enumerate(text.splitlines(), 1) if "spotkeeper:image:" in found)
    assert f"error: Pulumi.dev.yaml:{line}: images.us-west-2: missing" in cli("check", file).err


def test_all_problems_of_stack_and_jobs_are_listed_with_file_and_line(cli: Cli, checkout: Path) -> None:
    change(checkout / "infra/stacks/Pulumi.dev.yaml", "kind: spot", "kind: spto")
    change(checkout / "jobs/gpt.yaml", "nodes: 4", "nods: 4")
    done = cli("check", "dev")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: 2 problems:",
        '  Pulumi.dev.yaml:11: pools[0].kind: "spto": not one of spot, static (did you mean spot?)',
        "  jobs/gpt.yaml:4: nods: unknown key (did you mean nodes?)",
    ]


def test_a_stack_within_another_stacks_rights_is_refused(cli: Cli, checkout: Path) -> None:
    (checkout / "infra/stacks/Pulumi.dev-gpu.yaml").write_text(STACK)
    for name, other in (("dev", "dev-gpu"), ("dev-gpu", "dev")):
        done = cli("check", name)
        assert done.code == 2
        assert (
            f'Pulumi.{name}.yaml:2: gcp:project: "acme-train": is also the project of the stack {other} (' in done.err
        )
    change(checkout / "infra/stacks/Pulumi.dev-gpu.yaml", "acme-train\n", "acme-test\n")
    assert cli("check", "dev").code == 0


def test_json_lists_each_problem(cli: Cli, checkout: Path) -> None:
    change(checkout / "infra/stacks/Pulumi.dev.yaml", "us-east1-b", "us-east1-x")
    done = cli("check", "dev", "--json")
    assert (done.code, done.err) == (2, "error: 1 problem\n")
    told = json.loads(done.out)
    assert not told["ok"]
    assert told["problems"] == [
        {
            "file": "Pulumi.dev.yaml", "line": 14, "path": "pools[0].zones[0]", "value": '"us-east1-x"',
            "message": "is not a zone of us-east1", "nearest": "us-east1-d",
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("nodes: 9", "jobs/gpt.yaml:4: nodes: 9: is more machines than pool burst may have (8)"),
        (
            "nodes: 2\npools: [brust]",
            'jobs/gpt.yaml:5: pools[0]: "brust": the stack dev has no such pool (did you mean burst?)',
        ),
        ("name: vit", 'jobs/gpt.yaml:4: name: "vit": is also the name of the job in jobs/vit.yaml: choose another'),
        (
            "grace_s: 116",
            "jobs/gpt.yaml:4: grace_s: 116.0: is above 115: a machine of `burst` ends 120 s after its notice",
        ),
        (
            "secrets: {K: gcp-secret://projects/acme-train/secrets/wandbb/versions/1}",
            "jobs/gpt.yaml:4: secrets.K: projects/acme-train/secrets/wandbb is not "
            "in the stack file's `secrets`, so no job may read it (did you mean projects/acme-train/secrets/wandb?)",
        ),
    ],
)  # fmt: skip
def test_a_job_file_is_checked_against_its_stack(cli: Cli, checkout: Path, job: str, told: str) -> None:
    change(checkout / "jobs/gpt.yaml", "nodes: 4", job)
    if job.startswith("name"):
        change(checkout / "jobs/gpt.yaml", "name: gpt\n", "")
        told = told.replace(":4:", ":3:")
    assert cli("check", "dev").err == f"error: {told}\n"


def test_a_pool_without_notice_leaves_a_job_30_s(cli: Cli, checkout: Path) -> None:
    change(checkout / "infra/stacks/Pulumi.dev.yaml", "      size: 8", "      size: 8\n      notice_s: 0")
    change(checkout / "jobs/vit.yaml", "nodes: 4", "grace_s: 26")
    told = "vit.yaml:4: grace_s: 26.0: is above 25: a machine of `burst` ends 30 s after its notice"
    assert told in cli("check", "dev").err


def test_a_missing_job_file_names_the_nearest(cli: Cli, checkout: Path) -> None:
    change(checkout / "infra/stacks/Pulumi.dev.yaml", "jobs/gpt.yaml", "jobs/gtp.yaml")
    assert cli("check", "dev").err == "error: jobs/gtp.yaml: no such file (did you mean gpt.yaml?)\n"


def test_an_unknown_stack_is_an_error(cli: Cli, checkout: Path) -> None:
    done = cli("check", "dve")
    assert done.code == 3
    assert "no stack dve" in done.err and "(did you mean dev?)" in done.err


@pytest.mark.parametrize("stack", ["local", "example-gcp", "example-aws"])
def test_the_shipped_stack_files_are_valid(cli: Cli, stack: str) -> None:
    assert cli("check", stack).code == 0


def test_a_copy_of_the_local_stack_is_valid_under_any_name(cli: Cli, checkout: Path) -> None:
    file = checkout / "Pulumi.mine.yaml"
    file.write_text((ROOT / "infra/stacks/Pulumi.local.yaml").read_text())
    done = cli("check", file)
    assert (done.code, done.err) == (0, "")
    change(file, "project: local", "project: mine")
    assert "is not a project id" in cli("check", file).err


def test_unchanged_example_values_are_named(cli: Cli, checkout: Path) -> None:
    told = cli("check", "dev").out
    assert "example values to replace: gcp:project, spotkeeper:image, spotkeeper:job_identity" in told
    file = checkout / "infra/stacks/Pulumi.dev.yaml"
    file.write_text(file.read_text().replace("acme", "initech"))
    assert "example" not in cli("check", "dev").out
    assert json.loads(cli("check", "dev", "--json").out)["examples"] == []


@pytest.mark.parametrize("cloud", ["gcp", "aws"])
def test_all_placeholders_of_the_examples_contain_acme(cloud: str) -> None:
    """Which is how people find what is theirs to change."""
    text = (ROOT / f"infra/stacks/Pulumi.example-{cloud}.yaml").read_text()
    theirs = [line for line in text.splitlines() if any(word in line for word in stackfile.EXAMPLES[1:])]
    assert theirs and all("acme" in line for line in theirs)


def test_check_needs_neither_engine_nor_cloud() -> None:
    """Neither Pulumi nor a client of a cloud is imported, and there is nothing to log in to."""
    program = (
        "import sys\n"
        "from spotkeeper.cli.main import run\n"
        "assert run(['check', 'example-gcp']) == 0\n"
        "heavy = {'torch', 'obstore', 'requests', 'boto3', 'pulumi', 'pulumi_gcp', 'pulumi_aws', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert done.stderr.strip() == "[]"
