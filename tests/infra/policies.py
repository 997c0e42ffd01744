"""What is declared, as the policy pack's rules see it. Here they know what Pulumi keeps from a policy: `retain`."""

from __future__ import annotations

from collections.abc import Mapping

from infra.policy.resource import DeclaredResource
from infra.policy.rules import violations
from tests.infra.conftest import Declared


def broken(declared: Mapping[str, Declared], stack: str) -> list[str]:
    """What the rules find in everything that a stack declares."""
    seen = (
        DeclaredResource(one.type, one.name, one.properties, stack, one.protect, one.retain)
        for one in declared.values()
    )
    return [str(found) for found in violations(seen)]
