"""What a stack tells others, whatever its cloud: Pulumi's outputs, an API for other stacks and the command line."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi


@dataclass(frozen=True)
class Exports:
    """Everything but ``ready`` is an output; that is for the program's own jobs."""

    bucket: pulumi.Output[str]
    function_url: pulumi.Output[str]
    bundle_sha256: str
    pools: list[str]
    static_nodes: list[str]
    kept_disks: list[str]
    ready: pulumi.Resource  # when it is there, jobs are taken in; it goes before anything that they need
