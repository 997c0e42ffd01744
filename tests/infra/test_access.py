"""Shells on machines, on both clouds: off is nothing at all; on is these people, these machines, an ordinary user."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.service import idle
from infra import boot
from infra.aws.rights import document, shell_machine_rights, shell_rights
from infra.settings.read import from_config
from spotkeeper.contract import codec
from spotkeeper.contract.stack import StackState
from spotkeeper.local.access.iam import holds
from spotkeeper.local.deploy.config import read_config
from spotkeeper.reconcile.store import paths
from spotkeeper_agent.host.roothelper_fence import SYSTEM_UID_MAX
from tests.infra.aws.cloud import AwsCloud
from tests.infra.aws.judge import Ask, allowed, judge, operation, pascal
from tests.infra.conftest import STACKS, Declared, run_program
from tests.infra.policies import broken

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning")
Declaration = dict[str, Declared]
GCP, AWS = "example-gcp", "example-aws"
KIM, LEE = "user:kim@acme.dev", "user:lee@acme.dev"
ROLE = "arn:aws:iam::123456789012:role/ml"
INSTANCE = "arn:aws:ec2:us-east-1:123456789012:instance/i-0123456789abcdef0"
SSM = "arn:aws:ssm:us-east-1:123456789012"
DOCUMENT = f"{SSM}:document/sk-demo-ssh"
BUCKET = "arn:aws:s3:::sk-123456789012-demo"


def config(name: str, ssh: list[str]) -> dict[str, str]:
    found = {key: value for key, value in read_config(STACKS / f"Pulumi.{name}.yaml").items() if key != SSH}
    return {**found, SSH: json.dumps(ssh)} if ssh else found


SSH = "spotkeeper:ssh"


def declared(name: str, ssh: list[str]) -> Declaration:
    return run_once(name, tuple(ssh))


@functools.cache
def run_once(name: str, ssh: tuple[str, ...]) -> Declaration:
    """Run the program once for each list of people: a run takes half a second."""
    return run_program("demo", config(name, list(ssh)), AwsCloud() if name == AWS else None)


def added(name: str, ssh: list[str]) -> dict[str, dict[str, Any]]:
    """What is declared with these people and not without them, by its name."""
    on, off = declared(name, ssh), declared(name, [])
    assert not off.keys() - on.keys()
    return {on[key].name: on[key].properties for key in on.keys() - off.keys()}


@pytest.mark.parametrize(("name", "who"), [(GCP, KIM), (AWS, ROLE)])
def test_the_state_says_whether_shells_are_allowed(name: str, who: str) -> None:
    for ssh in ([], [who]):
        (found,) = [each for each in declared(name, ssh).values() if each.properties.get("content", "")[:1] == "{"
                    and each.name == "pools"]  # fmt: skip
        assert codec.decode(found.properties["content"], StackState).ssh is bool(ssh)


@pytest.mark.parametrize("stack", ["dev", "prod"])
@pytest.mark.parametrize(("name", "who"), [(GCP, KIM), (AWS, ROLE)])
def test_no_declared_resource_breaks_a_policy_rule(name: str, who: str, stack: str) -> None:
    assert broken(declared(name, [who]), stack) == []


@pytest.mark.parametrize(("name", "who"), [(GCP, KIM), (AWS, ROLE)])
def test_shells_have_no_standing_cost(name: str, who: str) -> None:
    costs = []
    for ssh in ([], [who]):
        types = Counter(each.type for each in declared(name, ssh).values())
        costs.append(idle.total(idle.idle(from_config(config(name, ssh), "demo"), types)))
    assert costs[0] == costs[1]


# --- Google Cloud --------------------------------------------------------------------------


def test_on_google_cloud_exactly_these_resources_are_declared() -> None:
    new = added(GCP, [KIM])
    assert new.keys() == {
        "access", "ssh-iap", "role-shell", "kim@acme.dev-ssh-tunnel", "kim@acme.dev-ssh-login",
        "kim@acme.dev-ssh-project", "kim@acme.dev-ssh-node", "kim@acme.dev-reads", "kim@acme.dev-tells",
    }  # fmt: skip
    assert new["role-shell"]["permissions"] == ["compute.projects.get"]
    roles = {name.rsplit("-", 1)[1]: found["role"] for name, found in new.items() if "role" in found}
    shell = roles.pop("project")
    assert "shell" in shell or shell.endswith("role-shell")
    assert roles == {
        "tunnel": "roles/iap.tunnelResourceAccessor",
        "login": "roles/compute.osLogin",  # not osAdminLogin: no sudo
        "node": "roles/iam.serviceAccountUser",
        "reads": "roles/storage.objectViewer",
        "tells": "roles/storage.objectCreator",
    }
    assert {found["member"] for found in new.values() if "member" in found} == {KIM}
    assert new["kim@acme.dev-ssh-node"]["serviceAccountId"].rsplit("/", 1)[1].startswith("sk-demo-vm")


def test_on_google_cloud_only_the_proxy_reaches_port_22() -> None:
    wall = added(GCP, [KIM])["ssh-iap"]
    assert (wall["direction"], wall["sourceRanges"], wall["targetTags"]) == (
        "INGRESS", ["35.235.240.0/20"], ["sk-demo"]
    )  # fmt: skip
    assert wall["allows"] == [{"protocol": "tcp", "ports": ["22"]}]


def test_on_google_cloud_shell_rights_cover_only_the_stack() -> None:
    new = added(GCP, [KIM])
    assert new["kim@acme.dev-ssh-tunnel"]["condition"]["expression"] == "destination.port == 22"
    login = new["kim@acme.dev-ssh-login"]["condition"]["expression"]
    zone = "projects/acme-train/zones/us-central1-a/instances"
    assert holds(login, f"{zone}/sk-demo-abcdefgh-n0000-a1") and holds(login, f"{zone}/sk-demo-floor-s0")
    assert not holds(login, f"{zone}/sk-prod-floor-s0") and not holds(login, f"{zone}/mine")
    tells = new["kim@acme.dev-tells"]["condition"]["expression"]
    objects, job = "projects/_/buckets/sk-acme-train-demo/objects", "abcd2345"
    assert holds(tells, f"{objects}/{paths.entry(job, 1.0, 'shell.1')}")
    for path in (
        paths.entry(job, 1.0, "admitted.1"),
        f"{paths.record(job)}.shell-1",
        paths.record(job),
        paths.active(job),
        paths.STACK,
        paths.request(job, "1"),
        paths.bundle("a" * 64),
    ):
        assert not holds(tells, f"{objects}/{path}"), path
    assert not holds(tells, f"projects/_/buckets/other/objects/{paths.ledger(job)}1")


def test_a_submitter_with_shells_gets_no_right_twice() -> None:
    new = added(GCP, [LEE])
    assert {name for name in new if name.startswith("lee")} == {
        *(f"lee@acme.dev-ssh-{key}" for key in ("tunnel", "login", "project", "node")),
        "lee@acme.dev-tells",
    }


# --- AWS -----------------------------------------------------------------------------------


def test_on_aws_exactly_these_resources_are_declared() -> None:
    new = added(AWS, [ROLE])
    assert new.keys() == {"access", "session-logs", "session", "role-sh", "rights-sh", "rights-vm-ssh"}
    assert new["session-logs"]["name"] == "/spotkeeper/sk-demo/sessions"
    assert new["session-logs"]["retentionInDays"] == 90
    (trusted,) = json.loads(new["role-sh"]["assumeRolePolicy"])["Statement"]
    # No sts:TagSession: a session tag SSMSessionRunAs would say as whom a shell runs.
    assert (trusted["Principal"], trusted["Action"]) == ({"AWS": [ROLE]}, ["sts:AssumeRole"])
    assert new["rights-vm-ssh"]["role"] == "sk-demo-vm" and new["rights-sh"]["role"] == "sk-demo-sh"


def test_on_aws_a_session_runs_as_an_ordinary_user_and_is_logged() -> None:
    session = added(AWS, [ROLE])["session"]
    assert (session["name"], session["documentType"], session["documentFormat"]) == ("sk-demo-ssh", "Session", "JSON")
    assert judge("ssm", "CreateDocument", pascal(session, {}, operation("ssm", "CreateDocument"))) == []
    assert json.loads(session["content"]) == {
        "schemaVersion": "1.0",
        "description": "Spotkeeper demo: a shell on one of its machines",
        "sessionType": "InteractiveCommands",
        "parameters": {
            "command": {
                "type": "String",
                "default": "cd; exec bash -l",
                "description": "The command that the session runs.",
            }
        },
        "inputs": {
            "runAsEnabled": True,
            "runAsDefaultUser": boot.SHELL_USER,
            "cloudWatchLogGroupName": "/spotkeeper/sk-demo/sessions",
            "cloudWatchEncryptionEnabled": False,
            "cloudWatchStreamingEnabled": True,
            "idleSessionTimeout": "20",
            "maxSessionDuration": "720",
        },
        "properties": {"linux": {"commands": "{{ command }}", "runAsElevated": False}},
    }


def test_on_aws_shell_users_may_only_start_the_stacks_sessions() -> None:
    policy = document(shell_rights(from_config(config(AWS, [ROLE]), "demo")))
    checked = {"ssm:SessionDocumentAccessCheck": "true"}
    ours = {"ssm:resourceTag/sk-stack": "demo", **checked}
    may = lambda action, resource, context: allowed(policy, Ask(action, resource, context))  # noqa: E731
    assert may("ssm:StartSession", INSTANCE, ours) and may("ssm:StartSession", DOCUMENT, checked)
    assert not may("ssm:StartSession", INSTANCE, checked)
    assert not may("ssm:StartSession", INSTANCE, {**ours, "ssm:resourceTag/sk-stack": "prod"})
    unchecked = {**ours, "ssm:SessionDocumentAccessCheck": "false"}
    assert not may("ssm:StartSession", INSTANCE, unchecked), "the account's default document runs as an administrator"
    assert not may("ssm:StartSession", DOCUMENT, unchecked), "AWS asks for the check in every statement, or it is none"
    starts = [each for each in json.loads(policy)["Statement"] if each["Action"] == ["ssm:StartSession"]]
    assert [each["Condition"]["BoolIfExists"] for each in starts] == [checked, checked]
    for other in ("SSM-SessionManagerRunShell", "AWS-StartPortForwardingSession", "sk-prod-ssh"):
        assert not may("ssm:StartSession", f"{SSM}:document/{other}", checked)
    assert not may("ssm:SendCommand", INSTANCE, ours)
    job = "abcd2345"
    new = {"s3:if-none-match": "*"}
    opened = f"{BUCKET}/{paths.entry(job, 1.0, 'shell.1')}"
    assert may("s3:PutObject", opened, new) and may("s3:GetObject", f"{BUCKET}/x", {})
    assert not may("s3:PutObject", opened, {}), "an entry is never replaced"
    for path in (
        paths.entry(job, 1.0, "admitted.1"),
        paths.record(job),
        paths.STACK,
        paths.active(job),
        paths.request(job, "1"),
    ):
        assert not may("s3:PutObject", f"{BUCKET}/{path}", new), path


def test_on_aws_machines_allow_sessions_and_no_commands() -> None:
    policy = document(shell_machine_rights(from_config(config(AWS, [ROLE]), "demo")))
    actions = {action for each in json.loads(policy)["Statement"] for action in each["Action"]}
    assert {action for action in actions if not action.startswith("logs:")} == {
        "ssm:UpdateInstanceInformation", "ssmmessages:CreateControlChannel", "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
    }  # fmt: skip
    logs = "arn:aws:logs:us-east-1:123456789012:log-group"
    assert allowed(policy, Ask("logs:PutLogEvents", f"{logs}:/spotkeeper/sk-demo/sessions:log-stream:x"))
    assert not allowed(policy, Ask("logs:PutLogEvents", f"{logs}:/aws/lambda/sk-demo:log-stream:x"))


# --- machines ------------------------------------------------------------------------------


def test_the_shell_user_exists_only_on_aws_with_ssh() -> None:
    scripts = {
        (name, bool(ssh)): boot.render(from_config(config(name, ssh), "demo")).startup
        for name, who in ((GCP, KIM), (AWS, ROLE))
        for ssh in ([], [who])
    }
    has = {key for key, text in scripts.items() if boot.SHELL_USER in text or "amazon-ssm-agent" in text}
    assert has == {(AWS, True)}
    assert scripts[GCP, True] == scripts[GCP, False], "OS Login makes its users itself"


def run(script: str, folder: Path, uid: str) -> subprocess.CompletedProcess[str]:
    """The lines about the user, with stand-ins for ``id`` (which knows the user once it is made) and ``useradd``."""
    lines = script.splitlines()
    first = next(index for index, line in enumerate(lines) if line.lstrip().startswith(f"id -u {boot.SHELL_USER}"))
    bash = shutil.which("bash")
    assert bash is not None
    made = folder / "made"
    (folder / "id").write_text(f"#!/bin/sh\n[ -e {made} ] && echo {uid} || exit 1\n")
    (folder / "useradd").write_text(f'#!/bin/sh\necho "$@" >{made}\n')
    for name in ("id", "useradd"):
        (folder / name).chmod(0o755)
    text = "\n".join(["set -euo pipefail", *lines[first : first + 2], "echo goes on"])
    env = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run([bash, "-c", text], env=env, capture_output=True, text=True, check=False)


def test_the_fence_covers_the_shell_user(tmp_path: Path) -> None:
    """Ids above those of services; and in no group: the jobs' own may read the token for their cloud identity."""
    script = boot.render(from_config(config(AWS, [ROLE]), "demo")).startup
    done = run(script, tmp_path, str(SYSTEM_UID_MAX + 1))
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
    words = (tmp_path / "made").read_text().split()
    assert f"UID_MIN={SYSTEM_UID_MAX + 1}" in words and words[-1] == boot.SHELL_USER
    assert not {"--groups", "-G", "--gid", "-g", "--system", "-r"} & set(words)
    assert not re.search(rf"(sudo|wheel|usermod|gpasswd).*{boot.SHELL_USER}", script)


def test_a_shell_user_with_a_system_id_stops_the_boot(tmp_path: Path) -> None:
    (tmp_path / "made").touch()
    done = run(boot.render(from_config(config(AWS, [ROLE]), "demo")).startup, tmp_path, str(SYSTEM_UID_MAX))
    assert done.returncode == 1 and f"want a user id above {SYSTEM_UID_MAX}" in done.stderr
