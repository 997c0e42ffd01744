"""Random state of this process: torch, Python, and numpy and CUDA where they are in use."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def capture(*, devices: bool = True) -> dict[str, Any]:
    """The state as it is. ``devices=False``: of the CPU side only, which costs no wait for a GPU."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state(legacy=False)
    if devices and torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_all(*what: int) -> None:
    """Seed everything from numbers that name a place in the run."""
    seed = mix(*what)
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)


def mix(*what: int) -> int:
    """A 63-bit seed from whole numbers; the same everywhere, and no two alike."""
    text = ",".join(map(str, what)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
