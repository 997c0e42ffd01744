"""The job files of a stack: all problems of all files in one run, and the secrets that its jobs may read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.settings.read import read_jobs
from spotkeeper.contract.parse.problem import SpecError
from tests.infra.settings import stackfiles

OF_AWS = "arn:aws:secretsmanager:us-east-1:123456789012:secret"


def told(folder: Path, cloud: str, jobs: dict[str, str], **stack: Any) -> list[str]:
    """What is wrong with these jobs (name of the file -> its lines beyond the command)."""
    for name, lines in jobs.items():
        (folder / name).write_text(f"command: [/opt/train.py]\nnodes: 1\n{lines}\n")
    try:
        found = read_jobs(stackfiles.read(cloud, {"jobs": list(jobs), **stack}), folder, 0.0)
    except SpecError as error:
        return [str(problem) for problem in error.problems]
    assert [(file.name, file.path) for file in found] == [(name, folder / name) for name in jobs]
    return []


def test_the_problems_of_all_job_files_are_listed(tmp_path: Path) -> None:
    jobs = {
        "a.yaml": "name: a\ngrace_s: 116",
        "b.yaml": "name: b\nnods: 2",
        "c.yaml": "name: a\ngrace_s: 116",
        "d.yaml": "name: d",
    }
    late = "is above 115: a machine of `burst` ends 120 s after its notice"
    assert told(tmp_path, "gcp", jobs) == [
        f"a.yaml:4: grace_s: 116.0: {late}",
        "b.yaml:4: nods: unknown key (did you mean nodes?)",
        'c.yaml:3: name: "a": is also the name of the job in a.yaml: choose another',
        f"c.yaml:4: grace_s: 116.0: {late}",
    ]


GCP = ("trainer@acme-train.iam.gserviceaccount.com", ["wandb", "projects/acme-vault/secrets/hub"])
AWS = ("arn:aws:iam::123456789012:role/trainer", ["wandb", f"{OF_AWS}:hub-AbCdEf", f"{OF_AWS}:team/hf-token"])


@pytest.mark.parametrize(
    ("cloud", "reference", "missing"),
    [
        ("gcp", "gcp-secret://projects/acme-train/secrets/wandb/versions/1", ""),
        ("gcp", "gcp-secret://projects/acme-vault/secrets/hub/versions/latest", ""),
        ("gcp", "gcp-secret://projects/acme-train/secrets/hub/versions/1", "projects/acme-train/secrets/hub"),
        ("aws", f"aws-secret://{OF_AWS}:wandb-XyZ123", ""),
        ("aws", f"aws-secret://{OF_AWS}:hub-AbCdEf", ""),
        ("aws", f"aws-secret://{OF_AWS}:hub-XyZ123", ""),  # of a secret that was made again
        ("aws", f"aws-secret://{OF_AWS}:team/hf-token-XyZ123", ""),
        ("aws", f"aws-secret://{OF_AWS}:hubs-AbCdEf", "hubs"),
        ("aws", f"aws-secret://{OF_AWS}:team/hub-AbCdEf", "team/hub"),
    ],
)
def test_a_job_may_read_the_secrets_that_the_stack_lists(
    tmp_path: Path, cloud: str, reference: str, missing: str
) -> None:
    """By name or by address, on AWS with or without the six characters that it appends to a name."""
    identity, secrets = GCP if cloud == "gcp" else AWS
    jobs = {"a.yaml": f"name: a\nsecrets: {{KEY: '{reference}'}}"}
    found = told(tmp_path, cloud, jobs, job_identity=identity, secrets=secrets)
    assert [each.partition(" (did you mean ")[0] for each in found] == (
        [f"a.yaml:4: secrets.KEY: {missing} is not in the stack file's `secrets`, so no job may read it"]
        if missing
        else []
    )
    assert told(tmp_path, cloud, jobs, job_identity=identity) == [], "without a list, the stack does not know"
