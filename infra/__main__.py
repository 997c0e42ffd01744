"""The Pulumi program: reads the stack file, declares the stack, exports what others need."""

from __future__ import annotations

from pathlib import Path

import pulumi
from pulumi.runtime.config import CONFIG, get_config_env
from spotkeeper.spec.problem import SpecError

from infra import settings
from infra.exports import Exports
from infra.settings import beside

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".spotkeeper" / "build"
STACKS = ROOT / "infra" / "stacks"  # `stackConfigDir` of Pulumi.yaml


def main() -> None:
    """Declare the selected stack.

    Raises:
        RunError: the stack file is wrong; the message lists everything.
    """
    try:
        stack = settings.from_config({**get_config_env(), **CONFIG.get()}, pulumi.get_stack())
        if told := beside.clashes(stack, STACKS):
            raise SpecError(told)
    except SpecError as error:
        raise pulumi.RunError(f"Pulumi.{pulumi.get_stack()}.yaml:\n{error}") from None
    exports = declare(stack)
    if stack.jobs:
        declare_jobs(stack, exports.ready)
    pulumi.export("bucket", exports.bucket)
    pulumi.export("reconcileUrl", exports.function_url)
    pulumi.export("bundle", exports.bundle_sha256)
    pulumi.export("pools", exports.pools)
    pulumi.export("staticNodes", exports.static_nodes)
    pulumi.export("keptDisks", exports.kept_disks)


def declare(stack: settings.Settings) -> Exports:
    """By the stack's cloud; the other one's library, which takes seconds to load, stays where it is."""
    if stack.cloud == "aws":
        from infra import aws

        return aws.declare(stack, BUILD)
    from infra import gcp

    return gcp.declare(stack, BUILD)


def declare_jobs(stack: settings.Settings, ready: pulumi.Resource) -> None:
    """Only where there are any: what submits a job is not loaded by a program that has none.

    Raises:
        RunError: a job file is wrong; the message lists everything.
    """
    from spotkeeper.cli.errors import CliError

    from infra import jobs

    try:
        jobs.declare(stack, ready)
    except SpecError as error:
        raise pulumi.RunError(f"the jobs of Pulumi.{pulumi.get_stack()}.yaml:\n{error}") from None
    except CliError as error:
        raise pulumi.RunError(f"{error}; {error.remedy}") from None


main()
