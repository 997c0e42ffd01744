"""The Pulumi program: it reads the stack file, declares the stack and exports its outputs."""

from __future__ import annotations

from pathlib import Path

import pulumi
from pulumi.runtime.config import CONFIG, get_config_env

from infra.settings.model import Settings
from infra.settings.read import clashes, from_config
from infra.shared import Exports
from spotkeeper.contract.parse.problem import SpecError

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".spotkeeper" / "build"
STACKS = ROOT / "infra" / "stacks"  # `stackConfigDir` of Pulumi.yaml


def main() -> None:
    """Declare the selected stack.

    Raises:
        RunError: the stack file is wrong; the message lists all problems.
    """
    try:
        stack = from_config({**get_config_env(), **CONFIG.get()}, pulumi.get_stack())
        if told := clashes(stack, STACKS):
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
    pulumi.export("staticMachines", exports.static_machines)
    pulumi.export("keptDisks", exports.kept_disks)


def declare(stack: Settings) -> Exports:
    """Declare the stack in its cloud; import only this cloud's library, since each takes seconds to import."""
    if stack.cloud == "aws":
        from infra import aws

        return aws.declare(stack, BUILD)
    from infra import gcp

    return gcp.declare(stack, BUILD)


def declare_jobs(stack: Settings, ready: pulumi.Resource) -> None:
    """Declare the stack's jobs.

    Only this function imports the code that submits jobs: a stack without jobs does not need that code.

    Raises:
        RunError: a job file is wrong; the message lists all problems.
    """
    from infra import jobs
    from spotkeeper.client.errors import CliError

    try:
        jobs.declare(stack, ready)
    except SpecError as error:
        raise pulumi.RunError(f"the jobs of Pulumi.{pulumi.get_stack()}.yaml:\n{error}") from None
    except CliError as error:
        raise pulumi.RunError(f"{error}; {error.remedy}") from None


main()
