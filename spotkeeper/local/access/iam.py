"""IAM: the stack's service accounts have the permissions that their declared roles, bindings and conditions give.

Only accounts that the stack declares need bindings. The operator has all permissions; those of a machine are fixed in
``bucket/bucket_api.py``. A binding takes effect ``Timing.grants_s`` virtual seconds after its declaration; on Google
Cloud this takes minutes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from spotkeeper.local.access.rights import RequiredPermission
from spotkeeper.local.compute.resources import Effect, Resource, Resources, section
from spotkeeper.local.core import errors
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import fingerprint, parse_body, to_json
from spotkeeper.local.core.schema import JsonObject, JsonValue
from spotkeeper.local.core.world import World

ACCOUNT = "serviceaccount:account"
CUSTOM_ROLE = "projects:iAMCustomRole"
IN_PROJECT, ON_ACCOUNT = "projects:iAMMember", "serviceaccount:iAMMember"
ON_SUBNETWORK = "compute:subnetworkIAMMember"
DELETED, POLICIES = "deleted-roles", "policies"
RESTORABLE_S, TAKEN_S = 7 * 86400.0, 37 * 86400.0
WITH_CONDITIONS = 3  # the version of a policy that has conditions
# The permissions in Google's predefined roles, as far as calls here require them.
PREDEFINED: dict[str, frozenset[str]] = {
    "roles/artifactregistry.writer": frozenset(),
    "roles/compute.networkUser": frozenset({"compute.subnetworks.use", "compute.subnetworks.useExternalIp"}),
    "roles/iam.serviceAccountUser": frozenset({"iam.serviceAccounts.actAs"}),
    "roles/logging.logWriter": frozenset(),
    "roles/storage.objectViewer": frozenset(),
}


class _Condition(Struct, frozen=True):
    expression: str = ""


class _Binding(Struct, frozen=True, rename="camel"):
    role: str
    member: str
    condition: _Condition | None = None
    project: str = ""
    region: str = ""
    subnetwork: str = ""
    service_account_id: str = ""


class _Role(Struct, frozen=True):
    permissions: tuple[str, ...] = ()


class RoleGrant(NamedTuple):
    """A role granted to an account.

    ``on``: the only resource that the grant covers; "": all of the project. ``since``: the virtual time of its start.
    """

    role: str
    permissions: frozenset[str]
    condition: str
    on: str
    since: float


class Accounts(Effect):
    """Implements accounts. Each gets a unique number, even if a deleted account had the same name."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        resources.register(ACCOUNT, self)

    def apply(self, resource: Resource) -> dict[str, str]:
        old = self._resources.get(ACCOUNT, resource.name)
        return old.outputs if old else {"uniqueId": str(10**20 + secrets.randbelow(10**19))}


class _Deleted(Struct, frozen=True):
    at: float


class CustomRoles(Effect):
    """Implements custom roles: a role's id stays taken for weeks after the role's deletion.

    In the first week a declaration of the same id restores the deleted role. In the thirty days after that week a
    declaration of the id fails, because Google is still deleting the role.
    https://cloud.google.com/iam/docs/creating-custom-roles#deleting-custom-role
    """

    def __init__(self, world: World, resources: Resources) -> None:
        self._world, self._resources = world, resources
        resources.register(CUSTOM_ROLE, self)

    def check(self, name: str, properties: JsonObject) -> None:
        deleted = self._world.state.get(DELETED, name, _Deleted)
        known = self._resources.get(CUSTOM_ROLE, name) is not None
        if deleted and not known and RESTORABLE_S < self._world.now() - deleted.at < TAKEN_S:
            message = f"You can't create a role_id ({name}) which has been marked for deletion."
            raise ApiError(400, "failedPrecondition", message)

    def remove(self, resource: Resource) -> None:
        self._world.state.put(DELETED, resource.name, _Deleted(self._world.now()))


class ProjectIam:
    def __init__(self, world: World, resources: Resources) -> None:
        self._world = world
        self._resources = resources
        self.accounts, self.custom_roles = Accounts(resources), CustomRoles(world, resources)
        self._grants: dict[str, tuple[RoleGrant, ...]] = {}
        self._version = -1

    def knows(self, email: str) -> bool:
        """Whether the program declared this account."""
        return self._resources.get(ACCOUNT, email.partition("@")[0]) is not None

    def check(self, email: str, required: Iterable[RequiredPermission]) -> None:
        """Raise ApiError (403) if the account lacks a required permission; the error names the first missing one."""
        grants = self.grants(email)
        for one in required:
            if not any(_covers(grant, one) for grant in grants):
                at = f" for '{one.name}'" if one.name else ""
                raise errors.forbidden(f"Required '{one.permission}' permission{at}")

    def has_role(self, email: str, role: str) -> bool:
        """Whether an account has a role that is in effect now."""
        return any(grant.role == role for grant in self.grants(email))

    def grants(self, email: str) -> tuple[RoleGrant, ...]:
        """Return the declared grants of an account that are in effect now."""
        if self._version != self._resources.version:
            self._grants, self._version = {}, self._resources.version
        if email not in self._grants:
            self._grants[email] = tuple(self._declared(f"serviceAccount:{email}"))
        now = self._world.now()
        return tuple(grant for grant in self._grants[email] if grant.since <= now)

    def _declared(self, member: str) -> Iterator[RoleGrant]:
        for type_ in (IN_PROJECT, ON_ACCOUNT, ON_SUBNETWORK):
            for resource in self._resources.list(type_):
                binding = section(_Binding, resource.properties, resource.name)
                if binding.member == member:
                    yield self._grant(binding, resource)

    def _grant(self, binding: _Binding, resource: Resource) -> RoleGrant:
        on = ""
        if resource.type == ON_ACCOUNT:
            on = binding.service_account_id.rpartition("/")[2]
        elif resource.type == ON_SUBNETWORK:
            on = f"projects/{binding.project}/regions/{binding.region}/subnetworks/{binding.subnetwork}"
        expression = binding.condition.expression if binding.condition else ""
        since = resource.declared_at + self._world.timing.grants_s
        return RoleGrant(binding.role, self._permissions(binding.role), expression, on, since)

    def _permissions(self, role: str) -> frozenset[str]:
        if role in PREDEFINED:
            return PREDEFINED[role]
        custom = self._resources.get(CUSTOM_ROLE, role.rpartition("/")[2]) if role.startswith("projects/") else None
        if custom is None:
            raise errors.not_built(f"the permissions of {role} are unknown")
        return frozenset(section(_Role, custom.properties, custom.name).permissions)


def _covers(grant: RoleGrant, required: RequiredPermission) -> bool:
    if required.permission not in grant.permissions or (grant.on and grant.on != required.name):
        return False
    try:
        return not grant.condition or holds(grant.condition, required.name)
    except ConditionError as error:
        raise errors.not_built(f"a binding's condition has an unknown form: {error}") from None


# Policies of single resources. They are only stored, and not enforced.


class PolicyCondition(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The condition of a binding in a resource's policy.

    ``expression``: in CEL. It is stored and never evaluated, unlike the conditions of bindings that a Pulumi program
    declares (:func:`holds`).
    """

    expression: str
    title: str = ""
    description: str = ""
    location: str = ""


class PolicyBinding(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    role: str
    members: list[str] = []
    condition: PolicyCondition | None = None


class IamPolicy(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The policy of a single resource, which is stored and not enforced. ``etag``: its version.

    A change sends the ``etag`` of the policy that it replaces, or "" to replace any version.
    """

    etag: str = ""
    version: int = 1
    bindings: list[PolicyBinding] = []


class Policies:
    """The policies of single resources. A change replaces a whole policy."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get(self, path: str) -> JsonObject:
        """Return the policy of an existing resource; if none was ever set, a policy without bindings."""
        return to_json(self._find(path))

    def put(self, path: str, body: JsonValue) -> JsonObject:
        """Replace the whole policy, and return it with its new ``etag``.

        Raises:
            ApiError: 400 for an invalid policy; 409 if the request's ``etag`` is neither the current one nor "".
        """
        new = parse_body(body, IamPolicy)
        if new.etag not in ("", self._find(path).etag):
            message = "There were concurrent policy changes. Please retry the whole read-modify-write."
            raise ApiError(409, "aborted", message)
        if new.version < WITH_CONDITIONS and any(binding.condition for binding in new.bindings):
            raise errors.invalid("policy.version", new.version, f"Conditions need version {WITH_CONDITIONS}.")
        kept = IamPolicy(_etag(new.bindings), new.version, new.bindings)
        self._world.state.put(POLICIES, path, kept)
        return to_json(kept)

    def forget(self, path: str) -> None:
        """Delete a deleted resource's policy, so that a new resource of the same name begins without bindings."""
        self._world.state.delete(POLICIES, path)

    def _find(self, path: str) -> IamPolicy:
        return self._world.state.get(POLICIES, path, IamPolicy) or IamPolicy(_etag([]))


def _etag(bindings: list[PolicyBinding]) -> str:
    return fingerprint([to_json(binding) for binding in bindings])


# Conditions on ``resource.name``, as IAM evaluates them. Pure. Understands what stacks declare: ``startsWith``,
# ``endsWith`` and ``extract`` of ``resource.name``, a comparison of ``extract`` with a text, and ``!``, ``&&``, ``||``
# and parentheses. Source: https://cloud.google.com/iam/docs/conditions-attribute-reference#extract

_TOKEN = re.compile(
    r'\s*(?:(?P<sign>&&|\|\||!(?!=)|\(|\))|resource\.name\.(?P<call>startsWith|endsWith|extract)\("(?P<text>[^"\\]*)"\)'
    r'(?:\s*(?P<compare>==|!=)\s*"(?P<value>[^"\\]*)")?)'
)
_VARIABLE = re.compile(r"\{\w+\}")


class ConditionError(Exception):
    """Raised for a condition of an unsupported form."""


@lru_cache(maxsize=4096)
def holds(expression: str, name: str | None) -> bool:
    """Whether a binding with this condition applies to a resource.

    Args:
        name: the resource's name; None if the request does not contain it: then the answer is always False.

    Raises:
        ConditionError: the expression has an unsupported form.
    """
    return _Evaluation(expression, name or "").result() and name is not None


def extract(name: str, template: str) -> str:
    """Return the part of ``name`` at the template's ``{variable}``, as IAM's ``extract`` does; "" without a match."""
    parts = _VARIABLE.split(template)
    if len(parts) != 2:
        raise ConditionError(f"extract({template!r}): want one {{variable}}")
    head, tail = map(re.escape, parts)
    found = re.search(f"{head}(.*?){tail}" if tail else f"{head}(.*)", name)
    return found[1] if found else ""


class _Evaluation:
    """Parses and evaluates a condition in one pass, without short-circuits, so that an error in any term is found."""

    def __init__(self, expression: str, name: str) -> None:
        self._expression, self._name = expression, name
        self._tokens = [*self._read()]
        self._at = 0

    def _read(self) -> Iterator[re.Match[str]]:
        at = 0
        while self._expression[at:].strip():
            token = _TOKEN.match(self._expression, at)
            if token is None:
                raise ConditionError(f"{self._expression[at : at + 80].strip()!r} is not supported")
            yield token
            at = token.end()

    def result(self) -> bool:
        found = self._any()
        if self._at < len(self._tokens):
            raise ConditionError(f"{self._expression!r}: must end after {self._tokens[self._at - 1][0].strip()!r}")
        return found

    def _any(self) -> bool:
        found = self._all()
        while self._take("||"):
            found = self._all() or found
        return found

    def _all(self) -> bool:
        found = self._one()
        while self._take("&&"):
            found = self._one() and found
        return found

    def _one(self) -> bool:
        if self._take("!"):
            return not self._one()
        if self._take("("):
            found = self._any()
            if not self._take(")"):
                raise ConditionError(f"{self._expression!r}: a parenthesis is not closed")
            return found
        if self._at == len(self._tokens) or not self._tokens[self._at]["call"]:
            raise ConditionError(f"{self._expression!r}: a term is missing")
        self._at += 1
        return self._term(self._tokens[self._at - 1])

    def _term(self, token: re.Match[str]) -> bool:
        call, text, compare = token["call"], token["text"], token["compare"]
        if (call == "extract") != bool(compare):
            raise ConditionError(
                f"{token[0].strip()!r}: compare the result of `extract` by == or !=, and only that of `extract`"
            )
        if call == "extract":
            return (extract(self._name, text) == token["value"]) == (compare == "==")
        return self._name.startswith(text) if call == "startsWith" else self._name.endswith(text)

    def _take(self, sign: str) -> bool:
        taken = self._at < len(self._tokens) and self._tokens[self._at]["sign"] == sign
        self._at += taken
        return taken
