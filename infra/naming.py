"""Names of everything that Pulumi declares, one function for each kind of resource.

Names begin with ``sk-<stack>``, so that rights can be limited to such names. Names of stacks and pools have at most 24
characters, so no name exceeds its limit (the docstrings give lengths). ``spotkeeper.contract.names`` names dynamic
machines.
"""

from __future__ import annotations

from spotkeeper.contract.names import LABEL_POOL, LABEL_STACK, static_machine_name

POOLS_OBJECT = "stack/pools.json"  # read by the function and the drain


def stack(stack: str) -> str:
    """Return the name of the stack's network, function, topic, sink and schedule (at most 27 characters)."""
    return f"sk-{stack}"


def account(stack: str, role: str) -> str:
    """Return a service account's id (limit: 30 characters); ``role``: vm (machines), fn, ck (schedule), bd (build)."""
    return f"sk-{stack}-{role}"


def custom_role(stack: str, role: str, life: str) -> str:
    """Return a custom role's id, without hyphens (limit: 64); ``life``: a number that a rebuilt stack gets anew."""
    return f"sk_{stack.replace('-', '_')}_{role}_{life[-8:]}"


TEMPLATE_LENGTH = 55  # of 63 characters: the provider appends 8, new ones at each change


def template(stack: str, pool: str, model: str, region: str, home: str) -> str:
    """Return a Google Cloud template's name without the provider's 8 characters; abroad it ends with the region."""
    abroad = "" if region == home else f"-{region}"
    return f"{stack}-{pool}-{'spot' if model == 'spot' else 'od'}{abroad}"


def launch_template(stack: str, pool: str, model: str) -> str:
    """Return an EC2 launch template's name (at most 57 of 128 characters). A changed template keeps its name.

    Stack and pool names cannot contain the separator ``_``, so pool ``b-c`` of ``a`` and pool ``c`` of ``a-b`` differ.
    """
    return f"sk-{stack}_{pool}-{'od' if model == 'on-demand' else model}"


def placement_group(stack: str, pool: str, zone: str) -> str:
    """Return the name of a pool's EC2 placement group in a zone (at most 55 characters); ``_`` separates its parts."""
    return f"sk-{stack}_{pool}-{zone.rsplit('-', 1)[1]}"


def placement(stack: str, pool: str, zone: str) -> str:
    """Return the name (at most 54 characters) of a pool's Google placement policy; it ends with the zone's letter.

    Policies of two regions may have one name, as each name is of its region.
    """
    return f"sk-{stack}-{pool}-{zone.rsplit('-', 1)[1]}"


def static_machine(stack: str, pool: str, index: int) -> str:
    return static_machine_name(stack, pool, index)


def static_disk(stack: str, pool: str, index: int) -> str:
    """Return the name of a static machine's disk (at most 61 characters)."""
    return f"{static_machine_name(stack, pool, index)}-data"


def machine_prefix(stack: str) -> str:
    """Return how the names of all machines, disks and snapshots of a stack begin."""
    return f"sk-{stack}-"


def address(member: str) -> str:
    """Return the e-mail address in an IAM member such as ``user:kim@acme.dev``, to name resources of this member."""
    return member.partition(":")[2]


def labels(extra: dict[str, str], stack: str, pool: str | None = None) -> dict[str, str]:
    """Return the labels of a declared resource: those of the stack file and Spotkeeper's own."""
    own = {LABEL_STACK: stack} | ({LABEL_POOL: pool} if pool else {})
    return {**extra, **own}


def tags(extra: dict[str, str], stack: str, name: str, pool: str | None = None) -> dict[str, str]:
    """Return the tags of an AWS resource: its labels, and ``Name``, since AWS itself gives it only an id."""
    return {**labels(extra, stack, pool), "Name": name}
