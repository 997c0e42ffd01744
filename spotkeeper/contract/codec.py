"""Decodes bytes and plain values to structs, safely in threads. All other modules use these functions.

When msgspec (0.22) first decodes a struct type, other threads see its description of the type before that description
is complete. A thread that decodes the type meanwhile reads a null pointer and ends the process with SIGSEGV. So every
type is prepared under one lock, and no other module passes a type to msgspec's decoders or asks it about one, for which
msgspec makes a decoder (``tests/contract/test_codec.py``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from msgspec import inspect

T = TypeVar("T")

_LOCK = threading.Lock()
_ready: dict[tuple[object, bool], msgspec.json.Decoder[Any]] = {}


def decode(data: bytes | str, kind: type[T], *, strict: bool = True) -> T:
    """Decode JSON to a ``kind``. ``strict=False`` accepts numbers and booleans written as texts.

    Raises:
        msgspec.DecodeError: invalid JSON, or (``ValidationError``) JSON that does not fit ``kind``.
    """
    try:
        return _decoder(kind, strict).decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec raises these two unchanged
        raise msgspec.DecodeError(f"no JSON: {error}") from None


def convert(plain: object, kind: type[T], *, strict: bool = True) -> T:
    """Convert plain values (dicts, lists, texts, numbers) to a ``kind``.

    Raises:
        msgspec.ValidationError: the values do not fit ``kind``.
    """
    _decoder(kind, strict)
    return msgspec.convert(plain, kind, strict=strict)


def type_info(kind: type[T]) -> inspect.Type:
    """What msgspec says of a type; a struct of the size of a job takes it 10 ms."""
    from msgspec import inspect

    _decoder(kind, strict=True)
    return inspect.type_info(kind)


def _decoder(kind: type[T], strict: bool) -> msgspec.json.Decoder[T]:
    found = _ready.get((kind, strict))
    if found is None:
        with _LOCK:
            found = _ready.setdefault((kind, strict), msgspec.json.Decoder(kind, strict=strict))
    return found
