"""What a trainer may ask of the saver, read strictly: a message is one of these, or an error, before anything is done.

The table of messages is in ``saver.py``. Standard library only. It reads; it does nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotkeeper.train.store import Manifest


@dataclass(frozen=True)
class Stretch:
    """Bytes of the memory file that make one file. ``offset`` is a multiple of the page's size."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Hello:
    folder: Path
    gen: int
    keep: int


@dataclass(frozen=True)
class Reserve:
    bytes: int


@dataclass(frozen=True)
class Stage:
    pass


@dataclass(frozen=True)
class Save:
    manifest: Manifest
    stretches: tuple[Stretch, ...]
    part: bool


@dataclass(frozen=True)
class Publish:
    manifest: Manifest


Message = Hello | Reserve | Stage | Save | Publish


class MessageError(ValueError):
    """It is no message of a trainer's."""


def parse(data: bytes) -> Message:
    """One message.

    Raises:
        MessageError: saying what is wrong with it.
    """
    try:
        fields = json.loads(data)
        op = fields["op"]
        if op == "hello":
            return Hello(Path(_text(fields["folder"])), _count(fields["gen"]), _count(fields["keep"]))
        if op == "reserve":
            return Reserve(_count(fields["bytes"]))
        if op == "stage":
            return Stage()
        if op == "save":
            stretches = tuple(_stretch(part) for part in fields["stretches"])
            return Save(_manifest(fields["manifest"]), stretches, _flag(fields.get("part", False)))
        if op == "publish":
            return Publish(_manifest(fields["manifest"]))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise MessageError(f"{type(error).__name__}: {error}") from None
    raise MessageError(f"unknown op {op!r}")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no count")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is no flag")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{value!r} is no text")
    return value


def _manifest(value: Any) -> Manifest:
    manifest = Manifest.from_bytes(_text(value).encode())
    _count(manifest.commit.gen)
    _count(manifest.commit.step)
    return manifest


def _stretch(part: Any) -> Stretch:
    name = _text(part["name"])
    if name in ("", "..") or name != Path(name).name:
        raise ValueError(f"{name!r} is no file's name")
    return Stretch(name, _count(part["offset"]), _count(part["bytes"]))
