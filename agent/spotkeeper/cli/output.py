"""What commands print: JSON on request, otherwise text; notes go to standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 160  # of what is piped on: no column is cut off


def emit(value: object, as_json: bool, text: RenderableType | str) -> None:
    """``value`` as one JSON document, or ``text`` for people."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    elif isinstance(text, str):
        print(text)
    else:
        console().print(text, crop=False)  # a log's lines are as long as they are; all else fits itself


def emit_line(value: object) -> None:
    """One JSON document on one line (streams: ``watch --json``), at once."""
    print(msgspec.json.encode(value).decode(), flush=True)


def note(text: str) -> None:
    """Something beside the result."""
    print(text, file=sys.stderr)


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
