"""What a stack tells others, whatever its cloud: Pulumi's outputs, an API for other stacks and the command line."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi


@dataclass(frozen=True)
class Exports:
    bucket: pulumi.Output[str]
    function_url: pulumi.Output[str]
    bundle_sha256: str
    pools: list[str]
    static_nodes: list[str]
    kept_disks: list[str]
