"""Request bodies into structs: strict, bounded, and silent about what was wrong with them.

Called after authentication only. The answer to a bad body never repeats any of it.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn, TypeVar

import msgspec

from spotkeeper.spec import codec

T = TypeVar("T")

MAX_BODY = 16 * 1024
MAX_DEPTH = 6
MAX_KEYS = 512  # a sync holds at most 32 facts of 4 keys, and progress
MAX_INT = 2**53  # beyond it JSON readers disagree about what a number is

# Takes a text to its end even where its quote is missing: a pattern that gave up there would start over at
# every quote, and 16 KB of them would cost a third of a second.
_STRING = re.compile(rb'"(?:[^"\\]+|\\.?)*+"?', re.DOTALL)
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


class BodyError(ValueError):
    """The body is not what this path takes. The text is for the log and holds nothing of the body."""


def parse(data: bytes, kind: type[T]) -> T:
    """The body as a struct. The cheap questions come first: most of what is refused is refused in microseconds.

    Raises:
        BodyError: not UTF-8, no JSON, too deep, a key twice, a number no double holds, another shape.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise BodyError("not UTF-8") from None
    if _deeper(data, MAX_DEPTH):
        raise BodyError("too deep")
    try:
        body = codec.decode(data, kind)
    except msgspec.DecodeError:
        raise BodyError(f"not a {kind.__name__}") from None
    _strict(text)
    return body


def _deeper(data: bytes, most: int) -> bool:
    """Whether brackets are nested deeper, or do not balance: each removal of the innermost pairs is one level."""
    brackets = _STRING.sub(b"", data).translate(_SQUARE, _NO_BRACKET)
    for _ in range(most):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _strict(text: str) -> None:
    """What msgspec lets pass: keys given twice, and numbers that two readers of JSON read differently."""
    keys = 0

    def once(pairs: list[tuple[str, object]]) -> None:
        nonlocal keys
        keys += len(pairs)
        if len({key for key, _ in pairs}) != len(pairs):
            raise BodyError("a key twice")

    try:
        json.loads(text, object_pairs_hook=once, parse_constant=_constant, parse_int=_int, parse_float=_float)
    except BodyError:
        raise
    except (ValueError, RecursionError):
        raise BodyError("no JSON") from None
    if keys > MAX_KEYS:
        raise BodyError("too many keys")


def _constant(_: str) -> NoReturn:
    raise BodyError("not a number of JSON's")


def _int(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > MAX_INT:
        raise BodyError("a number too large")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BodyError("a number too large")
    return value
