"""``spotkeeper ssh``: which machine, by which program, what is said where it cannot be, and who is told of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.cli.jobs import ssh
from spotkeeper.client.errors import Exit
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Node, Outcome, Phase
from spotkeeper.contract.stack import Model, StackState
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli
from tests.cli.records import JOB, a_job, slot
from tests.contract.samples import STACK

FOLDER = "/var/lib/spotkeeper/src/none"


@pytest.fixture
def calls(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that write down their arguments and exit with 7; the stack file lets people in."""
    let_in(store, STACK)
    programs, told = tmp_path / "bin", tmp_path / "told"
    programs.mkdir()
    for name in ("gcloud", "aws", ssh.PLUGIN):
        says = f'for word in {name} "$@"; do printf "%s\\n" "$word"; done >{told}'
        (programs / name).write_text(f"#!/bin/sh\n{says}\nexit 7\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    return told


def let_in(store: Store, state: StackState) -> None:
    store.put("stack/pools.json", msgspec.json.encode(replace(state, ssh=True)))


def test_on_google_cloud_ssh_uses_the_identity_aware_proxy(cli: Cli, store: Store, calls: Path) -> None:
    a_job(store)
    done = cli("ssh", "first", "--node", "1", "--", "nvidia-smi", "-q", "a b")
    assert done.code == 7, "the exit code is the command's"
    assert calls.read_text().splitlines() == [
        "gcloud", "compute", "ssh", f"sk-prod-{JOB}-n0001-a2", "--project", "my-project", "--zone", "us-central1-a",
        "--tunnel-through-iap", f"--command=cd {FOLDER} 2>/dev/null || cd; nvidia-smi -q 'a b'",
    ]  # fmt: skip


def test_without_a_command_ssh_opens_a_login_shell(cli: Cli, store: Store, calls: Path) -> None:
    a_job(store)
    done = cli("ssh", "first", "--node", "0")
    *_, terminal, command = calls.read_text().splitlines()
    assert terminal == "--ssh-flag=-t" and command.endswith('; exec "${SHELL:-/bin/bash}" -l')
    assert FOLDER in done.err and f"/run/spotkeeper/{JOB}" in done.err


def test_on_aws_ssh_starts_a_session_with_the_stacks_document(cli: Cli, store: Store, calls: Path) -> None:
    let_in(store, replace(STACK, cloud="aws", project="123456789012", region="us-east-1"))
    a_job(store, nodes=(Node(cur=replace(slot(), uid="i-0123456789abcdef0")),))
    command = ("sh", "-c", 'echo "it\'s" {{ 1 }}')
    assert cli("ssh", "first", "--", *command).code == 7
    *words, parameters = calls.read_text().splitlines()
    assert words == [
        "aws", "ssm", "start-session", "--region", "us-east-1", "--target", "i-0123456789abcdef0",
        "--document-name", "sk-prod-ssh", "--parameters",
    ]  # fmt: skip
    (text,) = json.loads(parameters)["command"]
    assert shlex.split(text)[-3:] == list(command)


def test_a_session_starts_in_its_machines_region(cli: Cli, store: Store, calls: Path) -> None:
    regions = ("us-east-1", "us-west-2")
    let_in(store, replace(STACK, cloud="aws", project="123456789012", region=regions[0], regions=regions))
    a_job(store, nodes=(Node(cur=replace(slot(), uid="i-0123456789abcdef0", zone="us-west-2b")),))
    assert cli("ssh", "first").code == 7
    words = calls.read_text().splitlines()
    assert words[words.index("--region") + 1] == regions[1]


def test_a_static_machine_is_found_by_its_own_name(cli: Cli, store: Store, calls: Path) -> None:
    static = replace(slot(), model=Model.STATIC, machine="sk-prod-always-s0")
    a_job(store, nodes=(Node(cur=static),), members=(0,))
    assert cli("ssh", "first").code == 7
    assert "sk-prod-always-s0" in calls.read_text().splitlines()


def test_each_shell_is_an_event_with_user_and_machine(
    cli: Cli, store: Store, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "whoami", lambda: "ada")
    a_job(store)
    for _ in range(2):
        cli("ssh", "first", "--node", "1", "--", "env")
    first, second = [entry for entry in store.list_ledger(JOB) if entry.event is Event.SHELL]
    assert first.id != second.id and (first.by, first.node, first.attempt) == ("ada", 1, 2)
    told = f"node 1: a shell was opened: ada on sk-prod-{JOB}-n0001-a2"
    assert [event["text"] for event in json.loads(cli("status", "first", "--json").out)["events"]].count(told) == 2
    assert cli("report", "first").out.count(told) == 2
    assert "env" not in told, "a command may hold a secret"


def test_a_shell_that_cannot_be_logged_does_not_open(
    cli: Cli, store: Store, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spotkeeper.reconcile.store.objects import StoreError

    def refuse(*_: object) -> None:
        raise StoreError("403")

    a_job(store)
    monkeypatch.setattr(Store, "append_ledger", refuse)
    done = cli("ssh", "first", "--node", "0")
    assert done.code == Exit.FAILED and not calls.exists()


def test_a_stack_without_shells_is_reported(cli: Cli, store: Store) -> None:
    a_job(store)
    done = cli("ssh", "first", "--node", "0")
    assert done.code == Exit.REFUSED
    assert "the stack prod allows no shells" in done.err
    assert "spotkeeper:ssh in Pulumi.prod.yaml" in done.err
    assert not [entry for entry in store.list_ledger(JOB) if entry.event is Event.SHELL]


@pytest.mark.parametrize(("cloud", "missing"), [("gcp", ["gcloud"]), ("aws", ["aws", ssh.PLUGIN])])
def test_a_missing_program_is_named_with_its_installation_page(
    cli: Cli, store: Store, calls: Path, cloud: str, missing: list[str]
) -> None:
    let_in(store, replace(STACK, cloud=cloud))
    a_job(store)
    for name in reversed(missing):
        (calls.parent / "bin" / name).unlink()
        done = cli("ssh", "first", "--node", "0")
        assert done.code == Exit.FAILED and f"{name} is not on this machine's PATH" in done.err
        assert "https://" in done.err
    assert not [entry for entry in store.list_ledger(JOB) if entry.event is Event.SHELL]


def test_a_node_without_a_machine_is_refused(cli: Cli, store: Store, calls: Path) -> None:
    a_job(store, nodes=(Node(cur=slot()), Node(cur=replace(slot(), uid=None)), Node()))
    for node in ("1", "2"):
        done = cli("ssh", "first", "--node", node)
        assert done.code == Exit.REFUSED and f"node {node} has no machine now" in done.err
        assert "nodes with a machine: 0" in done.err
    beyond = cli("ssh", "first", "--node", "3")
    assert beyond.code == Exit.MISSING and beyond.err.startswith("error: node 3: first has nodes 0 to ")
    assert cli("ssh", "first").code == 7, "the only one that has one"


def test_several_machines_need_a_node_number(cli: Cli, store: Store, calls: Path) -> None:
    a_job(store)
    done = cli("ssh", "first")
    assert done.code == Exit.REFUSED and "name one by --node" in done.err and "machine: 0, 1" in done.err


def test_an_ended_job_has_no_machine(cli: Cli, store: Store, calls: Path) -> None:
    a_job(store, phase=Phase.DONE, outcome=Outcome.SUCCEEDED)
    assert cli("ssh", "first").code != 7 and not calls.exists()


def test_json_prints_the_command_and_opens_nothing(cli: Cli, store: Store, calls: Path) -> None:
    a_job(store)
    found = json.loads(cli("ssh", "first", "--node", "0", "--json").out)
    assert found["machine"]["name"] == f"sk-prod-{JOB}-n0000-a1" and found["argv"][:3] == ["gcloud", "compute", "ssh"]
    assert not calls.exists() and not store.list_ledger(JOB)
