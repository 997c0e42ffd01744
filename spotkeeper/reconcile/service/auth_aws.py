"""Authentication on AWS: the caller that IAM has verified for the function's URL.

The URL's ``AuthType`` is ``AWS_IAM``, so Lambda has checked the signature and says in the request's context who
signed; no header or body can change this. A node signs with its instance profile, and the session name of such
credentials is the instance id. This proves the id only while the role's trust policy lets only EC2 assume the nodes'
role, because any other caller that assumes a role chooses the session's name.

Source: AWS, "Lambda function URL payload format 2.0", ``requestContext.authorizer.iam``.
"""

from __future__ import annotations

import re
from collections import Counter

from msgspec import Struct

from spotkeeper.contract.cloud import Listing, Vm
from spotkeeper.contract.names import parse_vm_name
from spotkeeper.reconcile.controller.document import Speaker
from spotkeeper.reconcile.service.auth import AuthError, Caller

_ROLE_SESSION = re.compile(
    r"arn:(?P<partition>aws[-a-z]*):sts::(?P<account>[0-9]{12}):assumed-role/"
    r"(?P<role>[A-Za-z0-9+=,.@_-]{1,64})/(?P<session>[A-Za-z0-9+=,.@_-]{2,64})\Z"
)
_PRINCIPAL = re.compile(r"arn:aws[-a-z]*:iam::(?P<account>[0-9]{12}):(?P<kind>user|role)/(?:.*/)?(?P<name>[^/]+)\Z")
_INSTANCE = re.compile(r"i-(?:[0-9a-f]{8}|[0-9a-f]{17})\Z")
_ROLE_ID = "AROA"  # prefix of unique ids of roles; a node has no user's or federated id
_TEMPORARY = "ASIA"  # prefix of sessions' access keys


class Iam(Struct, frozen=True, rename="camel"):
    """The fields of ``requestContext.authorizer.iam`` that are read."""

    account_id: str = ""
    user_arn: str = ""
    user_id: str = ""
    caller_id: str = ""
    access_key: str = ""


def instance(iam: Iam | None, account: str, node_role: str) -> str:
    """Return the instance id of the machine that signed the request.

    Args:
        account: the stack's account, 12 digits.
        node_role: ARN of the nodes' role; its path, if it has one, is not part of a session's ARN.

    Raises:
        AuthError: the request is not signed, or not by a machine of the stack.
    """
    iam, session = _signed(iam)
    role = _PRINCIPAL.match(node_role)
    if session is None or role is None or role["kind"] != "role":
        raise AuthError("not a session of a role")
    if not account or {session["account"], role["account"], iam.account_id} != {account}:
        raise AuthError("another account")
    if session["role"] != role["name"]:
        raise AuthError("another role")
    name = session["session"]
    if not _INSTANCE.match(name):
        raise AuthError("the caller is not a session of an instance profile")
    ids = {iam.user_id, iam.caller_id}
    if len(ids) != 1 or not iam.user_id.startswith(_ROLE_ID) or not iam.user_id.endswith(f":{name}"):
        raise AuthError("userId and callerId are not the same AROA...:<instance id>")
    if not iam.access_key.startswith(_TEMPORARY):
        raise AuthError("the caller's access key is not a temporary one")
    return name


def is_instance(text: str) -> bool:
    return _INSTANCE.match(text) is not None


def invoker(
    iam: Iam | None, allowed: frozenset[str], shared: str = "", submitters: frozenset[str] = frozenset()
) -> Caller:
    """Return the operator that signed the request.

    The submitters' role trusts each submitter only with a session of the submitter's own name (``trust_submitters`` of
    ``infra/aws/rights.py``), so the session says which of them it is.

    Args:
        allowed: ARNs of users and of roles (in any session).
        shared: the name of the submitters' role. ``submitters``: ARNs of who may assume it.

    Raises:
        AuthError: the request is not signed, or by another caller.
    """
    iam, session = _signed(iam)
    found = ("role", session["account"], session["role"]) if session else _principal(iam.user_arn)
    listed = {_principal(arn): arn for arn in allowed}
    if found is None or found[1] != iam.account_id or found not in listed:
        raise AuthError("not an invoker")
    if session and session["role"] == shared:
        names = {parts[2]: arn for arn in submitters if (parts := _principal(arn))}
        return Caller(iam.user_arn, listed=names.get(session["session"], listed[found]))
    return Caller(iam.user_arn, listed=listed[found] if session else "")


def nodes_of(listing: Listing, stack: str) -> dict[str, Speaker]:
    """Return the stack's machines in a listing, by id.

    This leaves out machines with the same id, since the id does not say which of them the caller is, and machines whose
    name is not the one that the stack, job, node and attempt require.
    """
    times = Counter(vm.uid for vm in listing.vms)
    ours = (vm for vm in listing.vms if times[vm.uid] == 1 and is_ours(vm, stack))
    return {vm.uid: Speaker(vm.uid, vm.name, vm.zone) for vm in ours}


def is_ours(vm: Vm, stack: str) -> bool:
    owned = parse_vm_name(vm.name)
    return not vm.job if owned is None else (owned.stack, *owned[1:]) == (stack, vm.job, vm.node, vm.attempt)


def _signed(iam: Iam | None) -> tuple[Iam, re.Match[str] | None]:
    if iam is None:
        raise AuthError("IAM names no caller: is the function URL's AuthType AWS_IAM?")
    return iam, _ROLE_SESSION.match(iam.user_arn)


def _principal(arn: str) -> tuple[str, str, str] | None:
    found = _PRINCIPAL.match(arn)
    return (found["kind"], found["account"], found["name"]) if found else None
