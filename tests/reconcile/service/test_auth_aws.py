"""Who called on AWS, as IAM says: each condition by a caller that lacks only this one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from spotkeeper.contract import names
from spotkeeper.contract.cloud import Listing, Vm, VmStatus
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.service.auth import AuthError
from spotkeeper.reconcile.service.auth_aws import Iam, instance, invoker, is_instance, is_ours, nodes_of

JOB = "abcd2345"
ACCOUNT, OTHER = "123456789012", "999999999999"
MACHINE = "i-0123456789abcdef0"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/path/of/nodes"
SESSION = f"arn:aws:sts::{ACCOUNT}:assumed-role/nodes/{MACHINE}"
ID = f"AROAEXAMPLE:{MACHINE}"
NODE = Iam(ACCOUNT, SESSION, ID, ID, "ASIAEXAMPLE")


def test_a_machine_of_the_stack_is_known_by_its_session() -> None:
    assert instance(NODE, ACCOUNT, ROLE) == MACHINE
    assert instance(NODE, ACCOUNT, f"arn:aws:iam::{ACCOUNT}:role/nodes") == MACHINE
    elsewhere = replace(NODE, user_arn=SESSION.replace("aws", "aws-us-gov"))
    assert instance(elsewhere, ACCOUNT, ROLE.replace("aws", "aws-us-gov")) == MACHINE


@pytest.mark.parametrize(
    ("caller", "account", "role", "why"),
    [
        (None, ACCOUNT, ROLE, "IAM names no caller: is the function URL's AuthType AWS_IAM?"),
        (replace(NODE, user_arn=f"arn:aws:iam::{ACCOUNT}:user/nodes"), ACCOUNT, ROLE, "not a session of a role"),
        (NODE, ACCOUNT, f"arn:aws:iam::{ACCOUNT}:user/nodes", "not a session of a role"),
        (NODE, ACCOUNT, "", "not a session of a role"),
        (replace(NODE, account_id=""), "", ROLE, "another account"),
        (NODE, OTHER, ROLE, "another account"),
        (NODE, ACCOUNT, ROLE.replace(ACCOUNT, OTHER), "another account"),
        (replace(NODE, user_arn=SESSION.replace(ACCOUNT, OTHER)), ACCOUNT, ROLE, "another account"),
        (replace(NODE, account_id=OTHER), ACCOUNT, ROLE, "another account"),
        (NODE, ACCOUNT, ROLE.replace("nodes", "others"), "another role"),
        (replace(NODE, user_arn=SESSION[:-1]), ACCOUNT, ROLE, "the caller is not a session of an instance profile"),
        (
            replace(NODE, user_id=f"AROAOTHER:{MACHINE}"),
            ACCOUNT,
            ROLE,
            "userId and callerId are not the same AROA...:<instance id>",
        ),
        (
            replace(NODE, caller_id=f"AROAOTHER:{MACHINE}"),
            ACCOUNT,
            ROLE,
            "userId and callerId are not the same AROA...:<instance id>",
        ),
        (
            replace(NODE, user_id=f"AIDAX:{MACHINE}", caller_id=f"AIDAX:{MACHINE}"),
            ACCOUNT,
            ROLE,
            "userId and callerId are not the same AROA...:<instance id>",
        ),
        (
            replace(NODE, user_id="AROAX:i", caller_id="AROAX:i"),
            ACCOUNT,
            ROLE,
            "userId and callerId are not the same AROA...:<instance id>",
        ),
        (replace(NODE, access_key="AKIAEXAMPLE"), ACCOUNT, ROLE, "the caller's access key is not a temporary one"),
    ],
)
def test_each_of_these_alone_makes_a_caller_no_machine(caller: Iam | None, account: str, role: str, why: str) -> None:
    with pytest.raises(AuthError) as caught:
        instance(caller, account, role)
    assert str(caught.value) == why


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("i-01234567", True),
        (MACHINE, True),
        ("i-0123456", False),
        ("i-012345678", False),
        (f"{MACHINE}0", False),
        ("i-0123456G", False),
        ("x i-01234567", False),
    ],
)
def test_the_form_of_an_instance_id(text: str, known: bool) -> None:
    assert is_instance(text) is known


USER = f"arn:aws:iam::{ACCOUNT}:user/team/ann"
DEPLOYER = f"arn:aws:sts::{ACCOUNT}:assumed-role/deployer/ann@example.com"
ROLE_ARN = f"arn:aws:iam::{ACCOUNT}:role/teams/deployer"  # a session's ARN has no path
ALLOWED = frozenset({USER, ROLE_ARN})


@pytest.mark.parametrize(
    ("arn", "user"), [(USER, USER), (DEPLOYER, ROLE_ARN), (DEPLOYER.replace("ann@example.com", "ci"), ROLE_ARN)]
)
def test_an_operator_is_a_listed_user_or_any_session_of_a_listed_role(arn: str, user: str) -> None:
    caller = invoker(Iam(ACCOUNT, arn), ALLOWED)
    assert (caller.email, caller.user, caller.verified) == (arn, user, True)


SHARED = f"arn:aws:iam::{ACCOUNT}:role/sk-demo-sb"
KIM, LEE = f"arn:aws:iam::{ACCOUNT}:user/team/kim", f"arn:aws:iam::{ACCOUNT}:role/lee"


@pytest.mark.parametrize(
    ("role", "session", "user"),
    [
        ("sk-demo-sb", "kim", KIM),
        ("sk-demo-sb", "lee", LEE),
        ("sk-demo-sb", "mallory", SHARED),  # no submitter, so no team has it as a member
        ("deployer", "kim", ROLE_ARN),  # its own callers choose the names of its sessions
    ],
)
def test_a_submitter_is_known_by_the_session_in_the_submitters_role(role: str, session: str, user: str) -> None:
    signed = Iam(ACCOUNT, f"arn:aws:sts::{ACCOUNT}:assumed-role/{role}/{session}")
    caller = invoker(signed, ALLOWED | {SHARED}, "sk-demo-sb", frozenset({KIM, LEE}))
    assert (caller.user, caller.email) == (user, signed.user_arn)


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        (Iam(ACCOUNT, USER), frozenset()),
        (Iam(OTHER, USER), ALLOWED),
        (Iam(ACCOUNT, USER.replace("ann", "bob")), ALLOWED),
        (Iam(ACCOUNT, USER.replace(ACCOUNT, OTHER)), ALLOWED),
        (Iam(OTHER, USER.replace(ACCOUNT, OTHER)), ALLOWED),
        (Iam(ACCOUNT, f"arn:aws:iam::{ACCOUNT}:user/deployer"), ALLOWED),  # a user with the name of a listed role
        (Iam(ACCOUNT, DEPLOYER.replace("deployer", "ann")), ALLOWED),
        (Iam(ACCOUNT, "arn:aws:iam::aws:root"), ALLOWED | {"nobody"}),  # none of them is a principal
    ],
)
def test_everybody_else_is_no_operator(caller: Iam, allowed: frozenset[str]) -> None:
    with pytest.raises(AuthError) as caught:
        invoker(caller, allowed)
    assert str(caught.value) == "not an invoker"


def test_an_unsigned_request_is_no_operators() -> None:
    with pytest.raises(AuthError, match="IAM names no caller"):
        invoker(None, ALLOWED)


def test_a_machine_is_proven_by_a_unique_id_and_by_the_name_that_its_labels_give() -> None:
    vm = Vm(names.vm_name("t", JOB, 1, 2), "u1", "z-a", VmStatus.RUNNING, "pool", JOB, 1, 2, "10.0.0.1")
    static = Vm(names.static_machine_name("t", "fix", 0), "u2", "z-b", VmStatus.RUNNING, "fix", "", 0, 0, "10.0.0.2")
    strange = [
        replace(vm, uid="u3", name=names.vm_name("s", JOB, 1, 2)),
        replace(vm, uid="u4", job="bcde3456"),
        replace(vm, uid="u5", node=0),
        replace(vm, uid="u6", attempt=1),
        replace(static, uid="u7", job=JOB),
        replace(static, uid="u8"),
        replace(static, uid="u8", zone="z-c"),
    ]
    assert nodes_of(Listing((vm, static, *strange), (), ()), "t") == {
        "u1": Speaker("u1", vm.name, "z-a"),
        "u2": Speaker("u2", static.name, "z-b"),
    }
    assert [is_ours(each, "t") for each in strange] == [False] * 5 + [True] * 2
