"""Rules that every stack must satisfy, each with its reason and its checks for both clouds.

The rules import only the standard library, so that tests need no Pulumi, and the policy pack (``__main__.py``) can run
in an environment of its own (``requirements.txt``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from infra.policy import aws, gcp
from infra.policy.resource import DeclaredResource, Told

Check = Callable[[DeclaredResource], Iterator[str]]
StackCheck = Callable[[Sequence[DeclaredResource]], Told]

# Rule -> its reason. A violation stops an `up`, unless the rule is in ADVICE.
WHY: dict[str, str] = {
    "no-public-address": "Machines need no public address, and without one the internet cannot reach them.",
    "no-nat": "An idle stack should cost almost nothing, but a NAT gateway bills by the hour.",
    "no-open-port": "No firewall rule admits the whole internet.",
    "imds-v2": "A forged request on a machine (SSRF) must not get the machine's credentials.",
    "machines-end": "A machine that ends stays ended: only reconcile starts its replacement.",
    "runs-end": "In production the cloud itself ends machines that run too long.",
    "no-price-cap": "A spot machine never costs more than on-demand; a lower price cap only adds preemptions.",
    "encrypted-disks": "Every disk is encrypted, including the boot disks of machines.",
    "own-identity": "Machines run as the stack's own service account or role, which has few permissions.",
    "shielded": "Secure boot and integrity monitoring ensure that a machine boots its image unchanged.",
    "pinned-image": "An image is pinned, so that a preview of an unchanged stack shows no change.",
    "least-privilege": "Permissions and members are named: no avoidable wildcards, no public members.",
    "no-keys": "The stack creates no account keys: Pulumi's state would store them, and they could outlive the stack.",
    "schedule-only-invokes": "The schedule's identity may only invoke the function.",
    "private-bucket": "The bucket with records, checkpoints and outputs is never public.",
    "tidy-bucket": "Unfinished uploads are deleted, so that they do not bill forever.",
    "bucket-stays": "Destroying a production stack keeps its bucket.",
    "disks-stay": "Destroying a production stack keeps its static machines' disks.",
    "labelled": "Every resource carries the stack's label, which the drain and cost reports use.",
    "logs-end": "Logs expire.",
}
# Pulumi hides retain_on_delete from policies, so the rule disks-stay can err; a NAT may be intended.
ADVICE = frozenset({"disks-stay", "no-nat"})


@dataclass(frozen=True)
class Rule:
    """A rule. ``parts``: pairs of resource types and the check that each resource of these types must pass.

    ``over_all``: checks that take all resources of the stack together. ``later``, an argument of :meth:`of_one` and
    :meth:`of_all`: the errors that Pulumi raises when a check reads an input whose value is known only after `up`. Such
    an error ends the check without a violation, and `up` repeats the check.
    """

    name: str
    why: str
    mandatory: bool
    parts: tuple[tuple[tuple[str, ...], Check], ...]
    over_all: tuple[StackCheck, ...]

    @property
    def together(self) -> str:
        """Return the name of the policy for ``over_all``: ``name``, unless the policy for ``parts`` has this name."""
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
