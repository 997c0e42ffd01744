"""The Pulumi policy pack: `pulumi preview --policy-pack infra/policy` runs the rules on all declared resources.

Pulumi runs it in a separate environment without this project, so it adds the repository to ``sys.path``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pulumi_policy import (
    EnforcementLevel,
    Policy,
    PolicyPack,
    PolicyResource,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.proxy import UnknownValueError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from infra.policy.resource import DeclaredResource
from infra.policy.rules import RULES, Rule


def declared(of: ResourceValidationArgs | PolicyResource) -> DeclaredResource:
    return DeclaredResource(
        type=of.resource_type,
        name=of.name,
        inputs=of.props,
        stack=of.urn.split("::")[0].removeprefix("urn:pulumi:"),
        protect=bool(of.opts.protect),
    )


def policies(rule: Rule) -> list[Policy]:
    """Return a rule's Pulumi policies: one for its checks of single resources, one for its checks of all resources."""
    level = EnforcementLevel.MANDATORY if rule.mandatory else EnforcementLevel.ADVISORY

    def of_one(args: ResourceValidationArgs, report: ReportViolation) -> None:
        for message in rule.of_one(declared(args), UnknownValueError):
            report(message, None)

    def of_all(args: StackValidationArgs, report: ReportViolation) -> None:
        for found, message in rule.of_all([declared(each) for each in args.resources], UnknownValueError):
            report(f"{found.name}: {message}", None)

    made: list[Policy] = []
    if rule.parts:
        made.append(ResourceValidationPolicy(rule.name, rule.why, of_one, enforcement_level=level))
    if rule.over_all:
        made.append(StackValidationPolicy(rule.together, rule.why, of_all, enforcement_level=level))
    return made


PolicyPack("spotkeeper", policies=[policy for rule in RULES for policy in policies(rule)])
