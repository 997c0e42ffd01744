"""Deploys a stack of the project's own Pulumi program to a one-machine cloud, and destroys it.

One table (``table.py``) maps each resource type to calls; ``api.py`` makes them. Two drivers use both files: Pulumi's
engine with a replacement provider (``engine.py``, ``provider.py``) if ``pulumi`` is installed, else an in-process
runner (``runner.py``, ``monitor.py``, ``state.py``). Both make the same resources. Neither changes a real cloud.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal, Protocol

from spotkeeper.local.deploy.result import (
    DeployedResource,
    DeployError,
    DeployEvent,
    DeployOp,
    DeployResult,
    Endpoint,
    OnEvent,
)

__all__ = [
    "DeployError",
    "DeployEvent",
    "DeployOp",
    "DeployResult",
    "DeployedResource",
    "destroy",
    "preview",
    "refuse_first",
    "up",
]

Engine = Literal["auto", "pulumi", "in-process"]


class Driver(Protocol):
    def up(self, stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent) -> DeployResult: ...
    def preview(
        self, stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent
    ) -> DeployResult: ...
    def destroy(
        self, stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent
    ) -> DeployResult: ...


def _quiet(event: DeployEvent) -> None:
    """Print nothing."""


def up(
    stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent = _quiet, engine: Engine = "auto"
) -> DeployResult:
    """Create or update all resources that the program declares.

    Args:
        stack: the stack's name, usually ``local``.
        config_file: its ``Pulumi.<stack>.yaml``.
        cloud: the URL and the token of a one-machine cloud; a ``LocalCloud`` has both.
        folder: keeps the state and the archives of this deployment.
        on_event: called with each event, from several threads, but never by two threads at once.

    Raises:
        DeployError: the stack file is wrong, or a resource could not be made. The state records all resources that
            were made: another ``up`` continues, a ``destroy`` removes them.
    """
    _reserve(stack, config_file, cloud)
    return _driver(engine).up(stack, config_file, cloud, folder, on_event)


def _reserve(stack: str, config_file: Path, cloud: Endpoint) -> None:
    """Make the reservations that the stack file names. In a real cloud they exist: their owner has bought them."""
    from infra.settings.read import from_config
    from spotkeeper.contract.parse.problem import SpecError
    from spotkeeper.local.deploy.api import ResourceClient
    from spotkeeper.local.deploy.config import read_config

    try:
        settings = from_config(read_config(config_file, cloud.endpoint), stack)
    except SpecError:
        return  # the program reports it
    client = ResourceClient(cloud.endpoint, cloud.token)
    for pool in settings.pools:
        for one in pool.reservations:
            scope = f"projects/{settings.project}/zones/{one.zone}"
            client.reserve(scope, one.name, pool.machine.type, one.count)


def preview(
    stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent = _quiet, engine: Engine = "auto"
) -> DeployResult:
    """Compute the changes of an ``up`` without making them. Arguments and errors as for :func:`up`."""
    return _driver(engine).preview(stack, config_file, cloud, folder, on_event)


def refuse_first(
    stack: str, config_file: Path, kept: Path, cloud: Endpoint, folder: Path, engine: Engine = "auto"
) -> None:
    """Preview an ``up`` with another stack file, since an ``up`` changes the pools before the drain can refuse it.

    ``kept``: the stack file of the last ``up``. Other arguments as for :func:`up`.

    Raises:
        DeployError: the ``up`` would be refused: a job needs a region that the file no longer has.
    """
    if folder.exists() and config_file.read_bytes() != kept.read_bytes():
        preview(stack, config_file, cloud, folder, engine=engine)


def destroy(
    stack: str, config_file: Path, cloud: Endpoint, folder: Path, on_event: OnEvent = _quiet, engine: Engine = "auto"
) -> DeployResult:
    """Delete all resources in reverse order, including the drain, which deletes the stack's dynamic machines.

    It also succeeds if no deployment exists. Arguments and errors as for :func:`up`.
    """
    return _driver(engine).destroy(stack, config_file, cloud, folder, on_event)


def choose(engine: Engine) -> Literal["pulumi", "in-process"]:
    """Choose the driver; ``auto`` means Pulumi's engine if it and its Python host are installed."""
    if engine != "auto":
        return engine
    return "pulumi" if shutil.which("pulumi") and shutil.which("pulumi-language-python") else "in-process"


def _driver(engine: Engine) -> Driver:
    if choose(engine) == "pulumi":
        from spotkeeper.local.deploy import engine as pulumi_engine

        return pulumi_engine
    from spotkeeper.local.deploy import runner

    return runner
