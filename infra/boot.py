"""Render the scripts that a machine runs when it starts and when it stops.

The scripts contain only constants of the stack. What a job sets, and what Pulumi learns only during `up` (the
function's address), reaches a machine as metadata (on EC2 as tags), never as shell text. It is an error if a template
uses a name without a value, or inserts a value without a quoting filter.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from infra.settings.model import Settings

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "templates" / "boot"
UNITS = (
    *("spotkeeper.service", "spotkeeper-root.service", "spotkeeper-fence.service"),
    *("spotkeeper-job.service", "spotkeeper-job.socket"),
)
# Programs that run as root come with the machine's template, not from a folder that the agent may write.
AS_ROOT = ("roothelper.py", "roothelper_fence.py")
UDEV = "60-spotkeeper.rules"
SHELL_USER = "spotkeeper-shell"  # the user of Session Manager's shells, where the stack file has `ssh`
METADATA_BYTES = 256 * 1024  # Compute Engine's limit for one value
USER_DATA_BYTES = 16 * 1024  # EC2's limit for user data, before base64
_BARE = re.compile(r"\{\{(?![^}]*\|)[^}]*\}\}")


@dataclass(frozen=True)
class Scripts:
    """The scripts that a stack's machines run.

    Attributes:
        startup: on Compute Engine the metadata key ``startup-script``; on EC2 an object in the bucket.
        shutdown: the metadata key ``shutdown-script``. EC2 has none: there the agent reacts when systemd stops it.
        user_data: EC2's user data by kind of pool. It only fetches and runs ``startup``; releases do not change it.
    """

    startup: str
    shutdown: str = ""
    user_data: Mapping[str, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of ``startup``. On EC2 it is part of the object's name in the bucket."""
        return hashlib.sha256(self.startup.encode()).hexdigest()


def render(settings: Settings) -> Scripts:
    """Return the scripts of a stack's machines.

    Raises:
        ValueError: a value cannot be quoted in the place where a template uses it, or a script is too long.
    """
    constants = {"stack": settings.stack, "interpreter": settings.agent.interpreter}
    files = {f"/usr/local/lib/spotkeeper/{name}": _program(name) for name in AS_ROOT}
    files |= {f"/etc/systemd/system/{name}": text for name, text in units(settings).items()}
    if settings.cloud == "aws":
        files[f"/etc/udev/rules.d/{UDEV}"] = _render(f"{UDEV}.j2", {}, METADATA_BYTES)
    watchdog_s = str(2 * settings.boot_deadline_s())
    given = {**constants, "cloud": settings.cloud, "files": files, "watchdog_s": watchdog_s}
    given["shell_user"] = SHELL_USER if settings.ssh and settings.cloud == "aws" else ""
    startup = _render("startup.sh.j2", given, METADATA_BYTES)
    if settings.cloud == "gcp":
        return Scripts(startup, shutdown=_render("shutdown.sh.j2", constants, METADATA_BYTES))
    # Pulumi owns static machines, so no watchdog ends them.
    watchdogs = {"spot": watchdog_s, "static": ""}
    user_data = {
        kind: _render("user-data.sh.j2", {**constants, "watchdog_s": seconds}, USER_DATA_BYTES)
        for kind, seconds in watchdogs.items()
    }
    return Scripts(startup, user_data=user_data)


def units(settings: Settings) -> dict[str, str]:
    """Return the systemd units by file name: of the agent, its helpers that run as root, and the jobs."""
    constants = {"stack": settings.stack, "interpreter": settings.agent.interpreter}
    return {name: _render(f"{name}.j2", constants, METADATA_BYTES) for name in UNITS}


def _program(name: str) -> str:
    return (ROOT / "agent/spotkeeper_agent/host" / name).read_text("utf-8")


def _render(name: str, values: Mapping[str, object], most: int) -> str:
    text = _environment().get_template(name).render(values)
    if len(text.encode()) > most:
        raise ValueError(f"{name} has {len(text.encode())} bytes; the limit is {most}")
    return text


@cache
def _environment() -> Environment:
    for path in TEMPLATES.glob("*.j2"):
        if bare := _BARE.search(path.read_text("utf-8")):
            raise ValueError(f"{path.name}: {bare[0]} passes no filter")
    environment = Environment(  # noqa: S701 - shell and unit files; every value passes a quoting filter
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters.update(FILTERS)
    return environment


def sh(value: str) -> str:
    """Quote a value as one shell word."""
    if "\0" in value or "\n" in value:
        raise ValueError(f"{value!r} cannot be quoted as one shell word")
    return shlex.quote(value)


def unit(value: str) -> str:
    """Quote a value as one word of a systemd unit, so that systemd expands no specifiers and variables in it."""
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise ValueError(f"{value!r} cannot be quoted as one word of a systemd unit")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def heredoc(value: str, mark: str) -> str:
    """Return a value as the body of a quoted here-document whose last line is ``mark``."""
    if mark in value.splitlines():
        raise ValueError(f"the text has a line {mark}, which would end its here-document")
    return value.rstrip("\n")


FILTERS: dict[str, Callable[..., str]] = {"sh": sh, "unit": unit, "heredoc": heredoc}
