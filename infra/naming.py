"""What everything that Pulumi declares is called: one function a kind of thing.

Names begin with ``sk-<stack>``, so that conditions of identities can hold on to them.
Stack and pool names have at most 24 characters, which keeps each name within its
provider's limit (the figure beside it). Dynamic machines are named in
``spotkeeper.spec.names``, not here.
"""

from __future__ import annotations

from spotkeeper.spec.names import LABEL_POOL, LABEL_STACK, static_node_name

POOLS_OBJECT = "stack/pools.json"  # which the function, and the drain, look for under this name


def stack(stack: str) -> str:
    """Network, function, topic, sink, schedule: one of each in a stack (<= 27)."""
    return f"sk-{stack}"


def account(stack: str, role: str) -> str:
    """A service account's id (limit 30); ``role`` is two letters: vm, fn, ck (clock), bd (build)."""
    return f"sk-{stack}-{role}"


def custom_role(stack: str, role: str) -> str:
    """Custom roles know no hyphen (limit 64)."""
    return f"sk_{stack.replace('-', '_')}_{role}"


def template(stack: str, pool: str, model: str) -> str:
    """Without the prefix: the provider adds 8 characters, since a template cannot be changed (63)."""
    return f"{stack}-{pool}-{'spot' if model == 'spot' else 'od'}"


def launch_template(stack: str, pool: str, model: str) -> str:
    """On EC2, where a change is a new version under the same name (<= 57 of 128)."""
    return f"sk-{stack}-{pool}-{'od' if model == 'on-demand' else model}"


def placement(stack: str, pool: str, zone: str) -> str:
    """A policy is regional and its group lives in one zone, hence the zone's letter (<= 54)."""
    return f"sk-{stack}-{pool}-{zone.rsplit('-', 1)[1]}"


def node(stack: str, pool: str, index: int) -> str:
    return static_node_name(stack, pool, index)


def node_disk(stack: str, pool: str, index: int) -> str:
    """Of a static node (<= 61)."""
    return f"{static_node_name(stack, pool, index)}-data"


def machine_prefix(stack: str) -> str:
    """What names of a stack's machines, disks and snapshots begin with."""
    return f"sk-{stack}-"


def labels(extra: dict[str, str], stack: str, pool: str | None = None) -> dict[str, str]:
    """The labels of a declared thing: the operator's own, then ours."""
    ours = {LABEL_STACK: stack} | ({LABEL_POOL: pool} if pool else {})
    return {**extra, **ours}


def tags(extra: dict[str, str], stack: str, name: str, pool: str | None = None) -> dict[str, str]:
    """Labels on AWS, where also the name of a thing that has only an id is one."""
    return {**labels(extra, stack, pool), "Name": name}
