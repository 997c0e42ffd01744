"""The one way from bytes and plain values to structs, safe in threads. Holds no types of its own.

msgspec (0.22) publishes what it works out about a struct type before it is complete: a second thread
that decodes that type meanwhile, both for the first time, reads a null pointer, and the process ends
with SIGSEGV. So every type is worked out under one lock, and nothing else in the project hands a
type to msgspec's decoders (``tests/spec/test_codec.py`` says so).
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_LOCK = threading.Lock()
_ready: dict[tuple[object, bool], msgspec.json.Decoder[Any]] = {}


def decode(data: bytes | str, kind: type[T], *, strict: bool = True) -> T:
    """JSON as a ``kind``. ``strict=False`` takes numbers and booleans that were written as texts.

    Raises:
        msgspec.DecodeError: no JSON, or (``ValidationError``) of another shape.
    """
    try:
        return _decoder(kind, strict).decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these two through as they are
        raise msgspec.DecodeError(f"no JSON: {error}") from None


def convert(plain: object, kind: type[T], *, strict: bool = True) -> T:
    """Plain values (dicts, lists, texts, numbers) as a ``kind``.

    Raises:
        msgspec.ValidationError: of another shape.
    """
    _decoder(kind, strict)
    return msgspec.convert(plain, kind, strict=strict)


def _decoder(kind: type[T], strict: bool) -> msgspec.json.Decoder[T]:
    found = _ready.get((kind, strict))
    if found is None:
        with _LOCK:
            found = _ready.setdefault((kind, strict), msgspec.json.Decoder(kind, strict=strict))
    return found
