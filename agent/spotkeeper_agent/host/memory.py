"""Keeps the agent small. ``__main__.py`` imports this module before any other.

``requests`` imports a library that guesses text encodings and takes 3 MB. The agent does not need that library, so this
module makes the import fail. Memory that imports and templates have freed stays with the process until glibc is told to
return it (:func:`trim`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import warnings

_M_ARENA_MAX = -8

for _name in ("charset_normalizer", "chardet"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]  # None: the import system takes it for missing
warnings.filterwarnings("ignore", message="Unable to find acceptable character detection dependency")


def use_one_arena() -> None:
    """Make all threads share one heap, because each further heap takes some hundred kilobytes."""
    with contextlib.suppress(AttributeError):  # a C library without mallopt
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Return freed heap memory to the machine."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # a C library without malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
