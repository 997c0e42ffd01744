"""Jinja onto machines. A missing variable is an error, and every value says how it is written.

Filters: ``sh`` a shell word, ``unit`` a value of a systemd unit, ``json`` a JSON value.
A test refuses a template with a ``{{ }}`` that has none of them. Jinja is imported at the
first use and adds 3 MB, so a machine that renders nothing does not pay for it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path


class RenderError(Exception):
    """A template could not be rendered: file, line, the line itself, and what was wrong."""


def sh(value: object) -> str:
    return shlex.quote(str(value))


def unit(value: object) -> str:
    """For the right side of a unit's directive: ``%`` and ``$`` are systemd's, a newline would start another."""
    text = str(value)
    if any(ord(char) < 32 for char in text):
        raise ValueError(f"{text!r} has a control character, which a unit cannot hold")
    return text.replace("%", "%%").replace("$", "$$")


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=_no_json)


def _no_json(value: object) -> object:
    str(value)  # an undefined value says here what it lacks
    raise TypeError(f"{type(value).__name__} has no JSON form")


def render(path: Path, values: Mapping[str, object]) -> str:
    """The text of a template with these values.

    Raises:
        RenderError: no such file, wrong syntax, a variable that is not given, a value that a filter refuses.
    """
    import jinja2

    try:
        source = path.read_text()
    except OSError as error:
        raise RenderError(f"{path}: {error.strerror}") from None
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - these are units and JSON; the filters escape
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(sh=sh, unit=unit, json=to_json)
    try:
        return environment.from_string(source).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise _wrong(path, source, error.lineno, str(error.message)) from None
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise _wrong(path, source, _line(error), str(error)) from None


def _line(error: BaseException) -> int:
    """Jinja compiles templates to Python with the template's own line numbers."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _wrong(path: Path, source: str, number: int, what: str) -> RenderError:
    lines = source.splitlines()
    shown = f"\n    {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""
    return RenderError(f"{path}:{number}: {what}{shown}")
