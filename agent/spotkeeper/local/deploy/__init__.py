"""Brings a stack of the project's own Pulumi program up on a one-machine cloud, and down again.

One table (``table.py``) says which calls a resource type makes; two drivers use it: the
real engine with a stand-in provider, where the ``pulumi`` command is installed, and an
in-process runner where it is not. Both give the same cloud. Nothing here is used to
change a real cloud, and nothing here knows what the program declares.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from spotkeeper.local.deploy.result import DeployError, DeployResult, Event, Op, Resource

__all__ = ["DeployError", "DeployResult", "Event", "Op", "Resource", "destroy", "preview", "up"]

Engine = Literal["auto", "pulumi", "in-process"]
OnEvent = Callable[[Event], None]


def _quiet(event: Event) -> None:
    """Shows nothing."""


def up(
    stack: str, config_file: Path, endpoint: str, folder: Path, on_event: OnEvent = _quiet, engine: Engine = "auto"
) -> DeployResult:
    """Create, update or leave alone whatever the program declares.

    Args:
        stack: the stack's name, usually ``local``.
        config_file: its ``Pulumi.<stack>.yaml``.
        endpoint: root of the control plane, ``http://127.0.0.1:<port>``.
        folder: where state and archives of this deployment live.
        on_event: told of every resource, from several threads, one at a time.

    Raises:
        DeployError: the stack file is wrong, or a resource could not be made. What was
            made is recorded: a further ``up`` goes on, a ``destroy`` removes it.
    """
    if choose(engine) == "pulumi":
        from spotkeeper.local.deploy import engine as real

        return real.up(stack, config_file, endpoint, folder, on_event)
    from spotkeeper.local.deploy import runner

    return runner.up(stack, config_file, endpoint, folder, on_event)


def preview(
    stack: str, config_file: Path, endpoint: str, folder: Path, on_event: OnEvent = _quiet, engine: Engine = "auto"
) -> DeployResult:
    """What ``up`` would do; changes nothing. Arguments and errors as for :func:`up`."""
    if choose(engine) == "pulumi":
        from spotkeeper.local.deploy import engine as real

        return real.preview(stack, config_file, endpoint, folder, on_event)
    from spotkeeper.local.deploy import runner

    return runner.preview(stack, config_file, endpoint, folder, on_event)


def destroy(
    stack: str, config_file: Path, endpoint: str, folder: Path, on_event: OnEvent = _quiet, engine: Engine = "auto"
) -> DeployResult:
    """Delete everything, last made first: the drain empties the stack of dynamic machines on the way.

    A deployment that was never made is destroyed already. Arguments and errors as for :func:`up`.
    """
    if choose(engine) == "pulumi":
        from spotkeeper.local.deploy import engine as real

        return real.destroy(stack, config_file, endpoint, folder, on_event)
    from spotkeeper.local.deploy import runner

    return runner.destroy(stack, endpoint, folder, on_event)


def choose(engine: Engine) -> Literal["pulumi", "in-process"]:
    """The real engine, where it and its Python host are installed."""
    if engine != "auto":
        return engine
    return "pulumi" if shutil.which("pulumi") and shutil.which("pulumi-language-python") else "in-process"
