"""A right stack file for each cloud, and a way to spoil it: what the tests of settings begin with."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import yaml

from infra.settings.model import Settings
from infra.settings.read import parse

GOOD: dict[str, str] = {
    "gcp": """
cloud: gcp
region: us-east1
image: projects/acme-images/global/images/train-2026-11-03
pools:
  - name: floor
    kind: static
    size: 1
    zones: [us-east1-b]
    machine: {type: g2-standard-12}
    disk: {size_gb: 200}
  - name: burst
    kind: spot
    size: 8
    max_on_demand: 2
    machine: {type: a2-highgpu-1g}
    disk: {size_gb: 100}
""",
    "aws": """
cloud: aws
account: "123456789012"
region: us-east-1
image: ami-0123456789abcdef0
pools:
  - name: floor
    kind: static
    size: 1
    zones: [us-east-1a]
    machine: {type: g5.xlarge}
    disk: {size_gb: 200}
  - name: burst
    kind: spot
    size: 8
    max_on_demand: 2
    zones: [us-east-1a, us-east-1b]
    machine: {type: p4d.24xlarge, efa: 4}
    placement: {strategy: cluster}
    disk: {size_gb: 500}
""",
}


@cache
def _read(text: str) -> Any:
    return yaml.safe_load(text)


def plain(cloud: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The right file with changes, whose keys are paths: ``pools.1.size``. None as a value removes the key."""
    found: dict[str, Any] = copy.deepcopy(_read(GOOD[cloud]))
    for path, value in (changes or {}).items():
        *parents, last = [int(word) if word.isdigit() else word for word in path.split(".")]
        at: Any = found
        for word in parents:
            at = at[word] if isinstance(word, int) else at.setdefault(word, {})
        if value is None:
            del at[last]
        else:
            at[last] = copy.deepcopy(value)
    return found


def read(
    cloud: str, changes: dict[str, Any] | None = None, stack: str = "dev", project: str = "acme-train"
) -> Settings:
    return parse(plain(cloud, changes), stack=stack, project=project if cloud == "gcp" else "")
