"""Converts NumPy values to plain descriptions and bytes, for ``pickling.py``.

NumPy's own pickles set flags, field offsets and buffer positions unchecked, so a forged pickle could make NumPy read or
write any address. This module makes values only by public constructors, which check their arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

# Bit generators with a buffer: the state's key for the position in the buffer, and the buffer's size. NumPy does not
# check that position.
_POSITIONS = {"MT19937": ("pos", 624), "Philox": ("buffer_pos", 4)}
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def reduce(value: object) -> tuple[Any, ...] | None:
    """Return a function of this module and the arguments that rebuild the value; None if it is not a NumPy value.

    Raises:
        ValueError: the value's dtype has no plain description.
    """
    if type(value) is np.ndarray:
        if value.dtype == object:
            return objects, (value.shape, value.ravel().tolist())
        order: Literal["F", "C"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        return array, (_describe(value.dtype, data=True), value.shape, order, value.tobytes(order))
    if isinstance(value, np.generic) and type(value).__module__ == "numpy":
        return scalar, (_describe(value.dtype, data=True), value.tobytes())
    if isinstance(value, np.dtype):
        return dtype, (_describe(value),)
    return _reduce_generator(value)


def _reduce_generator(value: object) -> tuple[Any, ...] | None:
    if type(value) is np.random.RandomState:
        return random_state, (value.get_state(legacy=False),)
    if type(value) is np.random.Generator:
        return generator, (value.bit_generator,)
    if isinstance(value, np.random.BitGenerator) and type(value).__name__ in _BIT_GENERATORS:
        return bit_generator, (dict(value.state), getattr(value, "seed_seq", None))
    if type(value) is np.random.SeedSequence:
        return seed_sequence, (value.entropy, value.spawn_key, value.pool_size, value.n_children_spawned)
    return None


def _describe(kind: np.dtype[Any], data: bool = False) -> Any:
    """Describe a dtype: as a string, as (base, shape) for a subarray, or as a dict for a structure.

    ``data``: whether the values are stored as raw bytes; a dtype with Python objects is then an error.
    """
    if kind.subdtype is not None:
        base, shape = kind.subdtype
        plain: Any = (_describe(base), shape)
    elif kind.names is not None:
        fields = [(name, kind.fields[name][1], _describe(kind.fields[name][0])) for name in kind.names]  # type: ignore[index]
        plain = {"fields": fields, "itemsize": kind.itemsize}
    else:
        plain = kind.str
    if (data and kind.hasobject) or dtype(plain) != kind:
        raise ValueError(f"NumPy data of dtype {kind} cannot be saved: convert it to plain values or other arrays")
    return plain


def dtype(plain: Any) -> np.dtype[Any]:
    """Rebuild a dtype from its description. NumPy checks that the fields lie within the dtype."""
    if isinstance(plain, str):
        return np.dtype(plain)
    if isinstance(plain, dict):
        names, offsets, formats = zip(*plain["fields"], strict=True) if plain["fields"] else ((), (), ())
        words = {"names": names, "offsets": offsets, "formats": [dtype(one) for one in formats]}
        return np.dtype(words | {"itemsize": plain["itemsize"]})  # type: ignore[call-overload, no-any-return]
    base, shape = plain
    return np.dtype((dtype(base), tuple(operator.index(length) for length in shape)))


def array(plain: Any, shape: Sequence[int], order: str, data: bytes) -> np.ndarray[Any, Any]:
    kind = dtype(plain)
    if kind.hasobject or kind.subdtype is not None or not isinstance(data, bytes):
        raise ValueError(f"the bytes do not fit an array of dtype {kind}")
    made: np.ndarray[Any, Any] = np.ndarray(shape, kind, bytearray(data), order="F" if order == "F" else "C")
    return made


def scalar(plain: Any, data: bytes) -> Any:
    return array(plain, (), "C", data)[()]


def objects(shape: Sequence[int], items: list[Any]) -> np.ndarray[Any, Any]:
    """Rebuild an object array item by item: ``np.array`` would turn items that are lists into further dimensions."""
    flat: np.ndarray[Any, Any] = np.empty(len(items), object)
    for number, item in enumerate(items):
        flat[number] = item
    return flat.reshape(shape)


def bit_generator(state: dict[str, Any], seeds: Any) -> Any:
    check(state)
    made = _bits(state["bit_generator"], seeds if type(seeds) is np.random.SeedSequence else 0)
    made.state = state
    return made


def generator(bits: Any) -> np.random.Generator:
    return np.random.Generator(bits)


def random_state(state: dict[str, Any]) -> np.random.RandomState:
    check(state)
    made = np.random.RandomState(_bits(state["bit_generator"], 0))
    made.set_state(state)
    return made


def seed_sequence(entropy: Any, key: Any, pool_size: int, spawned: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(entropy, spawn_key=key, pool_size=pool_size, n_children_spawned=spawned)


def check(state: dict[str, Any]) -> None:
    """Check the saved state of a NumPy bit generator, because NumPy itself would read outside the generator's buffer.

    Raises:
        ValueError: the state's position in the buffer lies outside the buffer.
    """
    name, size = _POSITIONS.get(str(state["bit_generator"]), ("", 0))
    if name:
        holder = state["state"] if name in state["state"] else state
        if not 0 <= operator.index(holder[name]) <= size:
            raise ValueError(f"a NumPy {state['bit_generator']} is invalid: {name} is {holder[name]}, not 0 to {size}")


def _bits(name: str, seeds: Any) -> Any:
    if name not in _BIT_GENERATORS:
        raise ValueError(f"{name!r:.80} is not a NumPy bit generator")
    return getattr(np.random, name)(seeds)
