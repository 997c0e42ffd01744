"""Rules that every stack must satisfy, each with its reason and its checks for both clouds.

They import only the standard library, so that they can be tested without Pulumi and the policy pack (``__main__.py``)
can run in a separate environment (``requirements.txt``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from infra.policy import aws, gcp
from infra.policy.resource import DeclaredResource, Told

Check = Callable[[DeclaredResource], Iterator[str]]
StackCheck = Callable[[Sequence[DeclaredResource]], Told]

# Rule -> its reason. A violation stops an `up`, except of the rules in ADVICE.
WHY: dict[str, str] = {
    "no-public-address": "Machines reach what they need without one, and nobody reaches them.",
    "no-nat": "An idle stack costs next to nothing: no gateway that bills by the hour.",
    "no-open-port": "Nobody comes in from the whole internet.",
    "imds-v2": "A machine's identity is given to nobody who merely makes it send a request.",
    "machines-end": "What reconcile launched ends whole, once, and is started again by reconcile alone.",
    "runs-end": "In production the cloud itself ends a machine that everybody forgot.",
    "no-price-cap": "A spot machine costs at most its on-demand price; a cap below it only loses machines.",
    "encrypted-disks": "Every disk is encrypted, also those that machines bring.",
    "own-identity": "Machines are an account of the stack's own, with its few rights.",
    "shielded": "A machine boots what its image says.",
    "pinned-image": "A stack that nobody changed shows no difference.",
    "least-privilege": "Rights are named: no wildcard where it can be avoided, nobody called everybody.",
    "no-keys": "No key of an account is made: it would be in the state, and outlive the stack.",
    "schedule-only-invokes": "The schedule calls the function and may do nothing else.",
    "private-bucket": "Records, checkpoints and outputs are nobody else's.",
    "tidy-bucket": "What was left of a broken upload does not bill for ever.",
    "bucket-stays": "A destroy of a production stack does not empty its bucket.",
    "disks-stay": "A destroy of a production stack keeps the disks of its static machines.",
    "labelled": "Everything says whose it is: destroy and the bill go by it.",
    "logs-end": "Logs have an end.",
}
# Pulumi hides retain_on_delete from policies, so disks-stay can be wrong; a NAT may be intended.
ADVICE = frozenset({"disks-stay", "no-nat"})


@dataclass(frozen=True)
class Rule:
    """A rule: ``parts`` pairs resource types with the check of each resource, ``over_all`` checks all together.

    ``later`` in its methods: the errors that reading an input raises if its value is known only after `up`. They end
    the check without a violation; `up` repeats it.
    """

    name: str
    why: str
    mandatory: bool
    parts: tuple[tuple[tuple[str, ...], Check], ...]
    over_all: tuple[StackCheck, ...]

    @property
    def together(self) -> str:
        """Return the name of the policy that checks all resources together; Pulumi needs two distinct names."""
        return f"{self.name}-together" if self.parts else self.name

    def of_one(self, resource: DeclaredResource, *later: type[Exception]) -> Iterator[str]:
        for types, check in self.parts:
            if resource.type in types:
                with suppress(*later):
                    yield from check(resource)

    def of_all(self, every: Sequence[DeclaredResource], *later: type[Exception]) -> Told:
        for check in self.over_all:
            with suppress(*later):
                yield from check(every)


def _rule(name: str) -> Rule:
    parts = tuple((types, check) for of, types, check in (*gcp.CHECKS, *aws.CHECKS) if of == name)
    over_all = tuple(check for of, check in (*gcp.STACK_CHECKS, *aws.STACK_CHECKS) if of == name)
    return Rule(name, WHY[name], name not in ADVICE, parts, over_all)


RULES: tuple[Rule, ...] = tuple(map(_rule, WHY))
