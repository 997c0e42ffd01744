"""Partial responses: the ``fields`` parameter, as Google's APIs take it.

``a,b`` selects two fields, ``a/b`` a field of a field, ``a(b,c)`` two of them, ``*`` any key of a map. Lists are
gone through. What selects nothing gives nothing, as there; a name that no schema has is not noticed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Mask = dict[str, "Mask"]
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*|[*/(),]")


class MaskError(Exception):
    """Not of the grammar."""


def parse(text: str) -> Mask:
    """
    Raises:
        MaskError: it is none; in the words of the API.
    """
    words = _WORD.findall(text)
    if "".join(words) != text:
        raise MaskError(f"Invalid field selection {text}")
    rest = iter([*words, ""])
    mask, end = _several(rest, text)
    if end:
        raise MaskError(f"Invalid field selection {text}")
    return mask


def _several(words: Iterator[str], text: str) -> tuple[Mask, str]:
    """Selectors up to the word that ends them, which comes back too."""
    mask: Mask = {}
    while True:
        end = _one(mask, words, text)
        if end != ",":
            return mask, end


def _one(mask: Mask, words: Iterator[str], text: str) -> str:
    name = next(words, "")
    if name in ("", "/", "(", ")", ","):
        raise MaskError(f"Invalid field selection {text}")
    below = mask.setdefault(name, {})
    end = next(words, "")
    if end == "/":
        return _one(below, words, text)
    if end == "(":
        inner, end = _several(words, text)
        if end != ")":
            raise MaskError(f"Invalid field selection {text}")
        below.update(inner)
        end = next(words, "")
    return end


def apply(mask: Mask, value: Any) -> Any:
    """What is left of a JSON value; None where nothing is."""
    if not mask:
        return value
    if isinstance(value, list):
        return [left for item in value if (left := apply(mask, item)) is not None] or None
    if not isinstance(value, dict):
        return None
    out = {}
    for name, item in value.items():
        below = mask.get(name, mask.get("*"))
        if below is not None and (left := apply(below, item)) is not None:
            out[name] = left
    return out or None
