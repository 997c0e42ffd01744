"""From text or plain values to the typed contract, with errors a person can act on.

Reads YAML and JSON into strict ``msgspec`` structs. Everything wrong is reported at
once, one line a problem::

    job.yaml:7: nodes.mn: unknown key (did you mean min?)
    job.yaml:9: policy: "ballanced": not one of balanced, spot, on-demand, shuffle (did you mean balanced?)

Types, ranges and spelling are :mod:`spotkeeper.spec.fit`'s; what fields mean together is checked by
:mod:`spotkeeper.spec.check` (jobs) and ``infra/settings`` (stacks), which report
through the same ``SpecError``. It may not touch the network or guess a value.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TypeVar

import msgspec

from spotkeeper.spec import codec
from spotkeeper.spec.fit import problems_of
from spotkeeper.spec.problem import Problem, SpecError, located, nearest

T = TypeVar("T")

MAX_BYTES = 1_000_000  # a job or stack file; a source tree given by mistake is larger


def convert(obj: object, type: type[T], *, where: str = "") -> T:
    """Plain values (dicts, lists, texts, numbers) as a ``type``.

    Args:
        obj: what a YAML, JSON or Pulumi configuration reader gave.
        type: a struct, or anything msgspec can convert to.
        where: path of ``obj`` inside its document, for messages (``pools[1]``).

    Raises:
        SpecError: everything that does not fit, all at once.
    """
    if problems := problems_of(obj, type, where):
        raise SpecError(problems)
    try:
        return codec.convert(obj, type)
    except msgspec.ValidationError as error:  # a rule the walk below does not know (__post_init__)
        message, _, path = str(error).partition(" - at `$")
        inner = path.rstrip("`").lstrip(".")
        raise SpecError([Problem(f"{where}.{inner}".strip("."), message)]) from None


def load(source: Path | str, type: type[T]) -> T:
    """A file (``Path``) or a text (``str``) of YAML or JSON as a ``type``.

    Raises:
        SpecError: the file is missing, unreadable, no YAML, or does not fit.
    """
    if isinstance(source, str):
        return load_yaml(source, type)
    return load_yaml(read_text(source), type, where=source.name)


def read_text(path: Path) -> str:
    """A file's text, or the reason why it cannot be read as a :class:`SpecError`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # and no more: a link to a device has no end
        if len(data) > MAX_BYTES:
            size = f"larger than {MAX_BYTES // 1000} kB: not a job or stack file"
            raise SpecError([Problem("", size, source=str(path))])
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError:
        raise SpecError([Problem("", "not a text file (UTF-8)", source=str(path))]) from None
    except FileNotFoundError:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.y*ml"))) if path.parent.is_dir() else None
        raise SpecError([Problem("", "no such file", source=str(path), hint=near)]) from None
    except IsADirectoryError:
        raise SpecError([Problem("", "is a folder, want a file", source=str(path))]) from None
    except OSError as error:
        raise SpecError([Problem("", f"cannot be read: {error.strerror}", source=str(path))]) from None


def load_yaml(text: str, type: type[T], where: str = "") -> T:
    """YAML (or JSON) text as a ``type``; ``where`` is the file's name, for messages.

    Raises:
        SpecError: syntax (with its line), duplicate keys, or what does not fit.
    """
    from spotkeeper.spec.yamltext import read

    document, lines = read(text, where)
    try:
        return convert(document, type)
    except SpecError as error:
        raise located(error, where, lines) from None
