"""Who may do what: four service accounts, two custom roles, no default account anywhere.

The rights are data (:func:`roles`, :func:`project_bindings`), so that a test can read
them as a reviewer does. Conditions hold on to names, since labels cannot be used in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.gcp.network import Network, project_of
from infra.settings import Settings

NODE = "vm"
FUNCTION = "fn"
CLOCK = "ck"
BUILD = "bd"
ACCOUNTS: dict[str, str] = {
    NODE: "Spotkeeper machines",
    FUNCTION: "Spotkeeper reconcile function",
    CLOCK: "Spotkeeper schedule and event push",
    BUILD: "Spotkeeper function build",
}

# Reading, and the use of what Pulumi declared: conditions on names do not apply to lists.
LOOK: tuple[str, ...] = (
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
# Bounded by name to this stack's machines. setMetadata, setServiceAccount, setTags and setLabels
# are needed to insert from a template that has them, and give nothing that create does not.
CHANGE: tuple[str, ...] = (
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
# What Google asks of a build's own account: to read the source (in a bucket of Cloud Functions' own), to store the
# image, to log. Cloud Build's own role can also rewrite the project's buckets, and builds run what packages bring.
# https://cloud.google.com/functions/docs/securing/build-custom-sa
BUILDS: tuple[str, ...] = ("roles/artifactregistry.writer", "roles/logging.logWriter", "roles/storage.objectViewer")


@dataclass(frozen=True)
class Role:
    """A custom role: ``key`` completes its id."""

    key: str
    title: str
    permissions: tuple[str, ...]


@dataclass(frozen=True)
class Binding:
    """An account of ours (``who``) holds a role in the project; ``role`` without a slash is a custom one's key."""

    who: str
    role: str
    condition: str | None = None


def roles(stack: str) -> tuple[Role, ...]:
    return (
        Role("look", f"Spotkeeper {stack}: see machines", LOOK),
        Role("change", f"Spotkeeper {stack}: make and remove machines", CHANGE),
    )


def project_bindings(stack: str) -> tuple[Binding, ...]:
    return (
        Binding(FUNCTION, "look"),
        Binding(FUNCTION, "change", machines_of(stack)),
        Binding(FUNCTION, "roles/logging.logWriter"),
        Binding(NODE, "roles/logging.logWriter"),
        *(Binding(BUILD, role) for role in BUILDS),
    )


def machines_of(stack: str) -> str:
    """Condition: the resource is a rank's machine, disk or snapshot of this stack, by its name.

    A static node and its disk have no ``-r`` in theirs (but where their pool has), so they are out of reach.
    """
    prefix = naming.machine_prefix(stack)
    kinds = ("instances", "disks", "snapshots")
    return " || ".join(f'resource.name.extract("/{kind}/{prefix}{{job}}-r") != ""' for kind in kinds)


def secret_keys(secrets: Sequence[str]) -> list[str]:
    """What each secret's right is called: two projects may have one of the same name, and the second is told whole."""
    short = [secret.rsplit("/", 1)[-1] for secret in secrets]
    return [key if key not in short[:i] else secrets[i].replace("/", "-") for i, key in enumerate(short)]


@dataclass(frozen=True)
class IdentityArgs:
    settings: Settings
    network: Network


class Identity(pulumi.ComponentResource):
    """``node``, ``function``, ``clock``, ``build``: the accounts."""

    def __init__(self, name: str, args: IdentityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Identity", name, None, opts)
        self._settings = args.settings
        self._child = pulumi.ResourceOptions(parent=self)
        accounts = {key: self._account(key, title) for key, title in ACCOUNTS.items()}
        self.node, self.function = accounts[NODE], accounts[FUNCTION]
        self.clock, self.build = accounts[CLOCK], accounts[BUILD]
        custom = {role.key: self._role(role) for role in roles(args.settings.stack)}
        self.bindings: list[pulumi.Resource] = [
            self._bind(binding, accounts[binding.who], custom) for binding in project_bindings(args.settings.stack)
        ]
        # The edge that matters: only machines may be given an identity, and only this one.
        self.bindings.append(
            gcp.serviceaccount.IAMMember(
                "function-uses-node",
                service_account_id=self.node.name,
                role="roles/iam.serviceAccountUser",
                member=self.function.member,
                opts=self._child,
            )
        )
        if args.settings.network.exists():
            self.bindings.append(self._uses(args.network))
        if args.settings.job_identity:
            self.bindings.append(self._may_be(args.settings.job_identity))
            found = zip(secret_keys(args.settings.secrets), args.settings.secrets, strict=True)
            self.bindings += [self._reads(key, args.settings.job_identity, secret) for key, secret in found]
        self.register_outputs({})

    def _may_be(self, account: str) -> gcp.serviceaccount.IAMMember:
        """Machines may ask for tokens of the jobs' account, and of no other."""
        project = account.partition("@")[2].removesuffix(".iam.gserviceaccount.com")
        return gcp.serviceaccount.IAMMember(
            "node-acts-as-jobs",
            service_account_id=f"projects/{project}/serviceAccounts/{account}",
            role="roles/iam.serviceAccountTokenCreator",
            member=self.node.member,
            opts=self._child,
        )

    def _uses(self, network: Network) -> gcp.compute.SubnetworkIAMMember:
        """A network may be another project's, where the roles of this one count for nothing."""
        return gcp.compute.SubnetworkIAMMember(
            "function-uses-subnetwork",
            project=network.subnetwork.apply(lambda link: project_of(link, self._settings.project)),
            region=self._settings.region,
            subnetwork=network.subnetwork.apply(lambda link: link.rsplit("/", 1)[-1]),
            role="roles/compute.networkUser",
            member=self.function.member,
            opts=self._child,
        )

    def _reads(self, key: str, account: str, secret: str) -> gcp.secretmanager.SecretIamMember:
        """Jobs, and not the machines that they run on."""
        return gcp.secretmanager.SecretIamMember(
            f"jobs-read-{key}",
            secret_id=secret if "/" in secret else f"projects/{self._settings.project}/secrets/{secret}",
            role="roles/secretmanager.secretAccessor",
            member=f"serviceAccount:{account}",
            opts=self._child,
        )

    def _account(self, key: str, title: str) -> gcp.serviceaccount.Account:
        stack = self._settings.stack
        return gcp.serviceaccount.Account(
            f"account-{key}",
            account_id=naming.account(stack, key),
            display_name=f"{title} ({stack})",
            opts=self._child,
        )

    def _role(self, role: Role) -> gcp.projects.IAMCustomRole:
        return gcp.projects.IAMCustomRole(
            f"role-{role.key}",
            role_id=naming.custom_role(self._settings.stack, role.key),
            title=role.title,
            permissions=list(role.permissions),
            opts=self._child,
        )

    def _bind(
        self, binding: Binding, account: gcp.serviceaccount.Account, custom: dict[str, gcp.projects.IAMCustomRole]
    ) -> gcp.projects.IAMMember:
        condition = None
        if binding.condition:
            condition = gcp.projects.IAMMemberConditionArgs(
                title="only machines of this stack", expression=binding.condition
            )
        role = custom[binding.role].name if binding.role in custom else binding.role
        return gcp.projects.IAMMember(
            f"{binding.who}-{binding.role.rsplit('/', 1)[-1]}",
            project=self._settings.project,
            role=role,
            member=account.member,
            condition=condition,
            opts=self._child,
        )
