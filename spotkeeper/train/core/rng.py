"""Random state of this process: torch, Python, and also NumPy and CUDA if they are in use."""

from __future__ import annotations

import functools
import hashlib
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

A = TypeVar("A")
R = TypeVar("R")
_WORDS = "=625I"  # the words of a Mersenne twister, and its position


def capture(*, devices: bool = True) -> dict[str, Any]:
    """Return the current state. ``devices=False`` leaves out GPUs, so the call does not wait for them."""
    version, words, gauss = random.getstate()
    python = version, struct.pack(_WORDS, *words), gauss  # bytes, because 625 numbers take longer to pickle
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python}
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state(legacy=False)
    if devices and torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set the state that ``capture`` returned."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, struct.unpack(_WORDS, words), gauss))
    if "numpy" in state:
        import numpy

        from spotkeeper.train.core import arrays

        arrays.check(state["numpy"])
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def aside(seed: int, call: Callable[[A], R], arg: A) -> R:
    """Call a function with the CPU generators seeded, then restore them.

    Takes 20 us; ``capture`` and ``restore`` would take 110 us, because NumPy's state is slow to copy. Instead, NumPy's
    bit generator is swapped for a spare one. NumPy draws normal numbers in pairs, and forgets a pair's second number at
    the swap. This changes the numbers that the script gets, but in interrupted and uninterrupted runs alike.
    """
    torch_state, python = torch.default_generator.get_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    swaps = numpy is not None and hasattr(numpy.random, "set_bit_generator")  # since numpy 1.24
    bits = numpy.random.get_bit_generator() if numpy and swaps else None
    slow = numpy.random.get_state(legacy=False) if numpy and not swaps else None
    if numpy and swaps:
        numpy.random.set_bit_generator(_spare(numpy))
    try:
        seed_cpu(seed)
        return call(arg)
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python)
        if numpy and swaps:
            numpy.random.set_bit_generator(bits)
        elif numpy:
            numpy.random.set_state(slow)


@functools.cache
def _spare(numpy: Any) -> Any:
    return numpy.random.MT19937(0)


def seed_cpu(seed: int) -> None:
    """Seed torch's, Python's and NumPy's CPU generators, in 7 us. ``torch.manual_seed`` would also seed devices."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)


def seed_all(*what: int) -> None:
    """Seed all generators from integers that name a place in the run."""
    seed = mix(*what)
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)


def mix(*what: int) -> int:
    """Hash integers into a 63-bit seed, the same on every machine."""
    text = ",".join(map(str, what)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
