"""The stack's four service accounts and their rights, and optional shells on machines. No default account is used.

Rights are data (:func:`roles`, :func:`project_bindings`, :func:`shell_rights`), so that tests and reviewers read what
Google gets. Their conditions test the names of resources, since conditions cannot test labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.gcp.network import GcpNetwork, project_of
from infra.settings.gcp import is_local
from infra.settings.model import Settings
from infra.shared import IAM_SPREADS_S, Component, Settled, key_in
from spotkeeper.contract.notification import GCP_SECRET, secret_of

MACHINE = "vm"
FUNCTION = "fn"
CLOCK = "ck"
BUILD = "bd"
ACCOUNTS: dict[str, str] = {
    MACHINE: "Spotkeeper machines",
    FUNCTION: "Spotkeeper reconcile function",
    CLOCK: "Spotkeeper schedule and event push",
    BUILD: "Spotkeeper function build",
}

# Rights to list, and to use what Pulumi declared; conditions on names do not apply to lists.
READ_RIGHTS: tuple[str, ...] = (
    "compute.advice.capacity",
    "compute.advice.capacityHistory",
    "compute.disks.list",
    "compute.images.useReadOnly",
    "compute.instanceTemplates.get",
    "compute.instanceTemplates.useReadOnly",
    "compute.instances.list",
    "compute.regions.get",
    "compute.resourcePolicies.use",
    "compute.snapshots.list",
    "compute.subnetworks.use",
    "compute.zoneOperations.get",
    "compute.zoneOperations.list",
    "compute.globalOperations.get",
)
# Rights limited by name to this stack's machines. An insert from a template with metadata, account, tags and labels
# needs the four set... permissions, which allow nothing that create does not.
CHANGE_RIGHTS: tuple[str, ...] = (
    "compute.disks.create",
    "compute.disks.createSnapshot",
    "compute.disks.delete",
    "compute.disks.get",
    "compute.disks.setLabels",
    "compute.disks.use",
    "compute.instances.attachDisk",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.detachDisk",
    "compute.instances.get",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.instances.setServiceAccount",
    "compute.instances.setTags",
    "compute.snapshots.create",
    "compute.snapshots.delete",
    "compute.snapshots.get",
    "compute.snapshots.setLabels",
    "compute.snapshots.useReadOnly",
)
# Rights by which a machine gets tokens of the jobs' account. Google's predefined role could also sign as that account.
TOKENS: tuple[str, ...] = ("iam.serviceAccounts.getAccessToken", "iam.serviceAccounts.getOpenIdToken")
# A build reads the source (in a bucket of Cloud Functions), stores the image, and logs. Cloud Build's predefined role
# could also rewrite the project's buckets, and builds run code of packages.
# https://cloud.google.com/functions/docs/securing/build-custom-sa
BUILDS: tuple[str, ...] = ("roles/artifactregistry.writer", "roles/logging.logWriter", "roles/storage.objectViewer")
# `gcloud compute ssh` reads the project's metadata, which a condition on machines' names would refuse.
SHELL: tuple[str, ...] = ("compute.projects.get",)
# The proxy cannot test machine names: the firewall rule and OS Login decide which machine a tunnel reaches.
PORT = "destination.port == 22"


@dataclass(frozen=True)
class Role:
    """A custom role of the stack; ``key`` is the part of its id that differs between the stack's roles."""

    key: str
    title: str
    permissions: tuple[str, ...]


@dataclass(frozen=True)
class Binding:
    """Grants the stack's account ``who`` a role in the project. A ``role`` without a slash is a custom role's key."""

    who: str
    role: str
    condition: str | None = None


def roles(stack: str, public_ip: bool = False) -> tuple[Role, ...]:
    """Return the stack's custom roles; ``public_ip`` adds the permission to give machines public addresses."""
    read = (*READ_RIGHTS, "compute.subnetworks.useExternalIp") if public_ip else READ_RIGHTS
    return (
        Role("read", f"Spotkeeper {stack}: see machines", read),
        Role("change", f"Spotkeeper {stack}: make and remove machines", CHANGE_RIGHTS),
    )


def project_bindings(stack: str) -> tuple[Binding, ...]:
    return (
        Binding(FUNCTION, "read"),
        Binding(FUNCTION, "change", machines_of(stack)),
        Binding(FUNCTION, "roles/logging.logWriter"),
        Binding(MACHINE, "roles/logging.logWriter"),
        *(Binding(BUILD, role) for role in BUILDS),
    )


def machines_of(stack: str) -> str:
    """Return a condition that is true for the stack's dynamic machines, node disks and snapshots, by their names.

    After the stack's prefix, these names have ``-n`` before a node's number and no ``-s``. Names of static machines and
    their disks have ``-s`` before the machine's index, whatever their pool is called.
    """
    prefix = naming.machine_prefix(stack)

    def dynamic(kind: str) -> str:
        node, index = (f'resource.name.extract("/{kind}/{prefix}{{job}}-{letter}")' for letter in "ns")
        return f'{node} != "" && {index} == ""'

    return " || ".join(f"({dynamic(kind)})" for kind in ("instances", "disks", "snapshots"))


def secret_keys(secrets: Sequence[str]) -> list[str]:
    """Return, for each secret, the name of its binding in Pulumi.

    It is the secret's short name, or the full name if an earlier secret of the list has the same short name.
    """
    short = [secret.rsplit("/", 1)[-1] for secret in secrets]
    return [key if key not in short[:i] else secrets[i].replace("/", "-") for i, key in enumerate(short)]


@dataclass(frozen=True)
class ShellRight:
    """Grants each shell user a role in the project. A ``role`` without a slash is a custom role's key."""

    key: str
    role: str
    condition: str = ""


def shell_rights(stack: str) -> tuple[ShellRight, ...]:
    return (
        ShellRight("tunnel", "roles/iap.tunnelResourceAccessor", PORT),
        ShellRight("login", "roles/compute.osLogin", logins_of(stack)),
        ShellRight("project", "shell"),
    )


def logins_of(stack: str) -> str:
    """Return the condition that a resource is a machine of this stack, dynamic or static, by its name."""
    return f'resource.name.extract("/instances/{naming.machine_prefix(stack)}{{rest}}") != ""'


class GcpIdentity(Component):
    """The service accounts ``machine``, ``function``, ``clock`` (schedule) and ``build``, with their rights."""

    def __init__(self, settings: Settings, network: GcpNetwork) -> None:
        super().__init__("Identity", settings)
        accounts = {key: self._account(key, title) for key, title in ACCOUNTS.items()}
        self.machine, self.function = accounts[MACHINE], accounts[FUNCTION]
        self.clock, self.build = accounts[CLOCK], accounts[BUILD]
        custom = {role.key: self.role(role) for role in roles(settings.stack, settings.network.public_ip)}
        self.bindings: list[pulumi.Resource] = [
            self._bind(binding, accounts[binding.who], custom) for binding in project_bindings(settings.stack)
        ]
        # The function may give machines this identity and no other.
        self.bindings.append(
            gcp.serviceaccount.IAMMember(
                "function-uses-node",
                service_account_id=self.machine.name,
                role="roles/iam.serviceAccountUser",
                member=self.function.member,
                opts=self.child,
            )
        )
        if settings.network.exists():
            self.bindings += [self._uses(region, link) for region, link in network.subnetworks.items()]
        if settings.job_identity:
            self.bindings.append(self._tokens(settings.job_identity))
            found = zip(secret_keys(settings.secrets), settings.secrets, strict=True)
            jobs = f"serviceAccount:{settings.job_identity}"
            self.bindings += [self._reads("jobs", key, jobs, secret) for key, secret in found]
        addresses = dict.fromkeys(secret_of(each.address, GCP_SECRET) for each in settings.channels)
        channels = [secret for secret in addresses if secret]
        self.bindings += [
            self._reads("function", key, self.function.member, secret)
            for key, secret in zip(secret_keys(channels), channels, strict=True)
        ]
        # A build or run under a new account must wait until the account's rights are in force.
        self.settled = Settled(
            [f"{b.who} {b.role} {b.condition or ''}".strip() for b in project_bindings(settings.stack)],
            0 if is_local(settings) else IAM_SPREADS_S,
            pulumi.ResourceOptions(parent=self, depends_on=self.bindings),
        )
        self.register_outputs({})

    def _tokens(self, account: str) -> gcp.serviceaccount.IAMMember:
        """Give machines the right to get access tokens for the jobs' account, and no other right on that account."""
        project = account.partition("@")[2].removesuffix(".iam.gserviceaccount.com")
        role = self.role(Role("tokens", f"Spotkeeper {self.settings.stack}: act as the jobs' account", TOKENS), project)
        return gcp.serviceaccount.IAMMember(
            "node-acts-as-jobs",
            service_account_id=f"projects/{project}/serviceAccounts/{account}",
            role=role.name,
            member=self.machine.member,
            opts=self.child,
        )

    def _uses(self, region: str, link: pulumi.Output[str]) -> gcp.compute.SubnetworkIAMMember:
        """Let the function use a subnetwork, by a right on the subnetwork itself, which can be in another project."""
        return gcp.compute.SubnetworkIAMMember(
            key_in("function-uses-subnetwork", region, self.settings),
            project=link.apply(lambda found: project_of(found, self.settings.project)),
            region=region,
            subnetwork=link.apply(lambda found: found.rsplit("/", 1)[-1]),
            role="roles/compute.networkUser",
            member=self.function.member,
            opts=self.child,
        )

    def _reads(self, who: str, key: str, member: pulumi.Input[str], secret: str) -> gcp.secretmanager.SecretIamMember:
        """Let the jobs' account, or the function's, read a secret. The machines' account gets no such right."""
        return gcp.secretmanager.SecretIamMember(
            f"{who}-read-{key}",
            secret_id=secret if "/" in secret else f"projects/{self.settings.project}/secrets/{secret}",
            role="roles/secretmanager.secretAccessor",
            member=member,
            opts=self.child,
        )

    def _account(self, key: str, title: str) -> gcp.serviceaccount.Account:
        stack = self.settings.stack
        return gcp.serviceaccount.Account(
            f"account-{key}",
            account_id=naming.account(stack, key),
            display_name=f"{title} ({stack})",
            opts=self.child,
        )

    def role(self, role: Role, project: str | None = None) -> gcp.projects.IAMCustomRole:
        """Declare a custom role in ``project`` (None: the stack's). A custom role can be granted only in its project.

        Google does not free the id of a deleted role for up to 37 days. So the id ends with digits from the number of
        the function's account, and a stack that is declared again after a destroy gets another id.
        """
        stack = self.settings.stack
        return gcp.projects.IAMCustomRole(
            f"role-{role.key}",
            project=project,
            role_id=self.function.unique_id.apply(lambda number: naming.custom_role(stack, role.key, number)),
            title=role.title,
            permissions=list(role.permissions),
            opts=self.child,
        )

    def _bind(
        self, binding: Binding, account: gcp.serviceaccount.Account, custom: dict[str, gcp.projects.IAMCustomRole]
    ) -> gcp.projects.IAMMember:
        role = custom[binding.role].name if binding.role in custom else binding.role
        return gcp.projects.IAMMember(
            f"{binding.who}-{binding.role.rsplit('/', 1)[-1]}",
            project=self.settings.project,
            role=role,
            member=account.member,
            condition=_when("only machines of this stack", binding.condition),
            opts=self.child,
        )


class GcpShells(Component):
    """Shells through the Identity-Aware Proxy for the users that ``ssh`` in the stack file lists.

    OS Login gives them an ordinary user without sudo. A firewall rule (``network.py``) lets the proxy reach port 22 of
    this stack's machines only. In a shell the machine's credentials cannot be read: the agent's firewall rules refuse
    them to the user ids that OS Login gives.
    """

    def __init__(self, settings: Settings, identity: GcpIdentity) -> None:
        super().__init__("Access", settings)
        stack = settings.stack
        custom = identity.role(Role("shell", f"Spotkeeper {stack}: find machines to log in to", SHELL))
        for who in settings.ssh:
            for right in shell_rights(stack):
                self._grant(who, right, custom)
            # OS Login needs this right on machines with a service account.
            gcp.serviceaccount.IAMMember(
                f"{naming.address(who)}-ssh-node",
                service_account_id=identity.machine.name,
                role="roles/iam.serviceAccountUser",
                member=who,
                opts=self.child,
            )
        self.register_outputs({})

    def _grant(self, who: str, right: ShellRight, custom: gcp.projects.IAMCustomRole) -> None:
        gcp.projects.IAMMember(
            f"{naming.address(who)}-ssh-{right.key}",
            project=self.settings.project,
            role=right.role if "/" in right.role else custom.name,
            member=who,
            condition=_when(f"shells on machines of {self.settings.stack}", right.condition),
            opts=self.child,
        )


def _when(title: str, condition: str | None) -> gcp.projects.IAMMemberConditionArgs | None:
    return gcp.projects.IAMMemberConditionArgs(title=title, expression=condition) if condition else None
