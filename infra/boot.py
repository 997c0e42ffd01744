"""Renders the scripts that a machine runs when it starts and when it stops.

They hold constants only: whatever differs between jobs, and whatever Pulumi learns late
(the function's address), reaches a machine as metadata, never as text in a shell.
Undefined names, and a substitution that passes no filter, are errors.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from infra.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "templates" / "boot"
UNITS = ("spotkeeper.service", "spotkeeper-root.service", "spotkeeper-job.service")
# What runs as root on a machine comes with its template, and not from a folder that the agent may write.
AS_ROOT = ("roothelper.py", "roothelper_fence.py")
METADATA_BYTES = 256 * 1024  # Compute Engine's limit for one value
_BARE = re.compile(r"\{\{(?![^}]*\|)[^}]*\}\}")


@dataclass(frozen=True)
class Scripts:
    """The values of the metadata keys ``startup-script`` and ``shutdown-script``."""

    startup: str
    shutdown: str


def render(settings: Settings) -> Scripts:
    """Both scripts for a stack.

    Raises:
        ValueError: a value that cannot stand where its template puts it.
    """
    constants = {"stack": settings.stack, "interpreter": settings.agent.interpreter}
    files = {f"/usr/local/lib/spotkeeper/{name}": _program(name) for name in AS_ROOT}
    files |= {f"/etc/systemd/system/{name}": text for name, text in units(settings).items()}
    watchdog_s = str(2 * settings.limits.boot_deadline_s)
    return Scripts(
        startup=_render("startup.sh.j2", {**constants, "files": files, "watchdog_s": watchdog_s}),
        shutdown=_render("shutdown.sh.j2", constants),
    )


def units(settings: Settings) -> dict[str, str]:
    """systemd's units by their names: the agent, its root helper, and the jobs."""
    constants = {"stack": settings.stack, "interpreter": settings.agent.interpreter}
    return {name: _render(f"{name}.j2", constants) for name in UNITS}


def _program(name: str) -> str:
    return (ROOT / "agent/spotkeeper/vm" / name).read_text("utf-8")


def _render(name: str, values: Mapping[str, object]) -> str:
    text = _environment().get_template(name).render(values)
    if len(text.encode()) > METADATA_BYTES:
        raise ValueError(f"{name}: {len(text.encode())} bytes, a metadata value has at most {METADATA_BYTES}")
    return text


@cache
def _environment() -> Environment:
    for path in TEMPLATES.glob("*.j2"):
        if bare := _BARE.search(path.read_text("utf-8")):
            raise ValueError(f"{path.name}: {bare[0]} passes no filter")
    environment = Environment(  # noqa: S701 - shell and unit files; every value passes a filter of its own
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters.update(FILTERS)
    return environment


def sh(value: str) -> str:
    """One word of a shell."""
    if "\0" in value or "\n" in value:
        raise ValueError(f"{value!r} cannot be one word of a shell")
    return shlex.quote(value)


def unit(value: str) -> str:
    """One word of a systemd unit: quoted, specifiers and variables taken literally."""
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise ValueError(f"{value!r} cannot stand in a unit")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def heredoc(value: str, mark: str) -> str:
    """The lines of a quoted here-document that ends with ``mark``."""
    if mark in value.splitlines():
        raise ValueError(f"the text has a line {mark}, which would end its here-document")
    return value.rstrip("\n")


FILTERS: dict[str, Callable[..., str]] = {"sh": sh, "unit": unit, "heredoc": heredoc}
