"""What is declared, as the policy pack's rules see it. Here they know what Pulumi keeps from a policy: `retain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from infra.policy.resource import DeclaredResource
from infra.policy.rules import RULES
from tests.infra.conftest import Declared


@dataclass(frozen=True)
class Violation:
    rule: str
    resource: str  # type::name
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.resource}: {self.message}"


def violations(every: Iterable[DeclaredResource]) -> Iterator[Violation]:
    """Yield the violations of all rules in a stack's resources."""
    resources = tuple(every)
    for rule in RULES:
        for resource in resources:
            for message in rule.of_one(resource):
                yield Violation(rule.name, f"{resource.type}::{resource.name}", message)
        for resource, message in rule.of_all(resources):
            yield Violation(rule.name, f"{resource.type}::{resource.name}", message)


def broken(declared: Mapping[str, Declared], stack: str) -> list[str]:
    """What the rules find in everything that a stack declares."""
    seen = (
        DeclaredResource(one.type, one.name, one.properties, stack, one.protect, one.retain)
        for one in declared.values()
    )
    return [str(found) for found in violations(seen)]
