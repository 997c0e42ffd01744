"""The roles of function, machines, schedule and submitters, and optional shells through Session Manager."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra import naming
from infra.aws.network import AwsNetwork, abroad
from infra.aws.rights import (
    CLOCK,
    FORWARD,
    FUNCTION,
    KEY_USES,
    MACHINE,
    PARTITION,
    SESSION_LOG_DAYS,
    SHELL,
    SUBMITTER,
    Statement,
    clock_rights,
    document,
    forward_rights,
    function_rights,
    job_rights,
    machine_rights,
    session,
    session_log,
    shell_machine_rights,
    shell_rights,
    submitter_rights,
    trust,
    trust_people,
    trust_submitters,
)
from infra.settings.model import Settings
from infra.shared import Component, key_in
from spotkeeper.contract.names import session_document


class AwsRoles(Component):
    """A component with roles. A role and its policy have the same name, ``sk-<stack>-<key>``."""

    def _role(self, key: str, title: str, *trusted: Statement) -> aws.iam.Role:
        called = naming.account(self.settings.stack, key)
        return aws.iam.Role(
            f"role-{key}",
            name=called,
            description=f"{title} ({self.settings.stack})",
            assume_role_policy=document(trusted),
            tags=self.tags(called),
            opts=self.child,
        )

    def _bind(self, key: str, role: pulumi.Input[str], policy: pulumi.Input[str]) -> aws.iam.RolePolicy:
        called = naming.account(self.settings.stack, key)
        return aws.iam.RolePolicy(f"rights-{key}", name=called, role=role, policy=policy, opts=self.child)


class AwsIdentity(AwsRoles):
    """The roles ``machine``, ``function`` and ``clock`` (the schedule's), and the machines' instance ``profile``.

    ``bindings``: the policies that give these and other roles their rights. Submitters assume a role of the stack, so
    that they have only its rights; a policy added to their own role would leave them all their other rights too.
    """

    def __init__(self, settings: Settings, network: AwsNetwork, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("Identity", settings, opts)
        self.machine = self._role(MACHINE, "Spotkeeper machines", trust("ec2"))
        self.function = self._role(FUNCTION, "Spotkeeper reconcile function", trust("lambda"))
        self.clock = self._role(CLOCK, "Spotkeeper schedule", trust("scheduler", settings.account))
        self.profile = aws.iam.InstanceProfile(
            "machines", name=naming.account(settings.stack, MACHINE), role=self.machine.name,
            tags=self.tags(naming.account(settings.stack, MACHINE)), opts=self.child,
        )  # fmt: skip
        ids = pulumi.Output.all(subnets=network.subnets, groups=network.groups)
        self.bindings: list[pulumi.Resource] = [
            self._bind(
                FUNCTION, self.function.name, ids.apply(lambda found: document(function_rights(settings, **found)))
            ),
            self._bind(MACHINE, self.machine.name, document(machine_rights(settings))),
            self._bind(CLOCK, self.clock.name, document(clock_rights(settings))),
        ]
        if settings.submitters:
            self.submitter = self._role(SUBMITTER, "Spotkeeper submitters", *trust_submitters(settings.submitters))
            self.bindings.append(self._bind(SUBMITTER, self.submitter.name, document(submitter_rights(settings))))
        if rights := job_rights(settings):
            role = settings.job_identity.rsplit("/", 1)[1]
            self.bindings.append(self._bind("job", role, document(rights)))
        if settings.service_linked_role:
            self.bindings.append(
                aws.iam.ServiceLinkedRole(
                    "spot",
                    aws_service_name="spot.amazonaws.com",
                    # Retained, because other stacks and programs of the account use this role to launch spot machines.
                    opts=pulumi.ResourceOptions(parent=self, retain_on_delete=True),
                )
            )
        if settings.kms_key and settings.dynamic():
            before = list(self.bindings)
            self.bindings += [self._lend_key(region, before) for region in settings.regions]
        if len(settings.regions) > 1:
            title = "Spotkeeper events from other regions"
            self.forward = self._role(FORWARD, title, trust("events", settings.account))
            self.forwards = self._bind(FORWARD, self.forward.name, document(forward_rights(settings)))
        self.register_outputs({})

    def _lend_key(self, region: str, after: list[pulumi.Resource]) -> aws.kms.Grant:
        """Let the account's role for spot machines use the KMS key: EC2 acts as this role when it makes their disks."""
        settings = self.settings
        role = "role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot"
        return aws.kms.Grant(
            key_in("spot-disks", region, settings),
            name=self.prefix,
            key_id=settings.kms_key_in(region),
            grantee_principal=f"arn:{PARTITION}:iam::{settings.account}:{role}",
            operations=[*KEY_USES, "CreateGrant"],
            region=abroad(region, settings),
            opts=pulumi.ResourceOptions(parent=self, depends_on=after),
        )


class AwsShells(AwsRoles):
    """Shells through Session Manager for the users that ``ssh`` in the stack file lists.

    These users assume a role with which they can start sessions only on the stack's machines, and only with the stack's
    session document. In a shell they are ``boot.SHELL_USER``, who has no sudo and no access to the machine's
    credentials. A log group receives a session's output; CloudTrail records who started it.
    """

    def __init__(self, settings: Settings, identity: AwsIdentity, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("Access", settings, opts)
        for region in settings.regions:
            self._sessions(region)
        role = self._role(SHELL, "Spotkeeper shells", trust_people(settings.ssh))
        self.parts += [
            self._bind(SHELL, role.name, document(shell_rights(settings))),
            self._bind(f"{MACHINE}-ssh", identity.machine.name, document(shell_machine_rights(settings))),
        ]
        self.register_outputs({})

    def _sessions(self, region: str) -> None:
        settings = self.settings
        logs = aws.cloudwatch.LogGroup(
            key_in("session-logs", region, settings),
            name=session_log(settings.stack),
            retention_in_days=SESSION_LOG_DAYS,
            tags=self.tags(session_log(settings.stack)),
            region=abroad(region, settings),
            opts=self.child,
        )
        sessions = aws.ssm.Document(
            key_in("session", region, settings),
            name=session_document(settings.stack),
            document_type="Session",
            document_format="JSON",
            content=session(settings.stack),
            tags=self.tags(session_document(settings.stack)),
            region=abroad(region, settings),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[logs]),
        )
        self.parts += [logs, sessions]
