"""Parts that have a state of their own on each rank: random generators, and dicts, lists or dataclasses of numbers.

Each rank saves such a state as plain data: numbers, strings, tensors, and dicts, lists and tuples of these.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from spotkeeper.train.core.errors import PartError


class LocalPart(Protocol):
    """A part that has a state of its own on each rank."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> None: ...

    def reseed(self, seed: int) -> None:
        """Reseed a random generator, after the number of ranks has changed. Does nothing for numbers."""


def adapt(name: str, part: object) -> LocalPart | None:
    """Return a wrapper that saves and loads a part's state; None for types that this module does not know.

    Raises:
        PartError: a dict, list or dataclass has a value that cannot be saved; or a dataclass is frozen.
    """
    if isinstance(part, torch.Generator):
        return _TorchGenerator(part)
    if isinstance(part, random.Random):
        return _PythonRandom(part)
    if (numpy := sys.modules.get("numpy")) is not None:
        if isinstance(part, numpy.random.Generator):
            return _NumpyBitGenerator(part.bit_generator)
        if isinstance(part, numpy.random.RandomState):
            return _NumpyRandomState(part)
    if isinstance(part, (dict, list)) or (dataclasses.is_dataclass(part) and not isinstance(part, type)):
        return _PlainValues(name, part)
    return None


class _TorchGenerator:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> torch.Tensor:
        return self._generator.get_state()

    def load_state_dict(self, state_dict: torch.Tensor) -> None:
        self._generator.set_state(state_dict.clone())

    def reseed(self, seed: int) -> None:
        self._generator.manual_seed(seed)


class _PythonRandom:
    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def state_dict(self) -> Any:
        return self._generator.getstate()

    def load_state_dict(self, state_dict: Any) -> None:
        self._generator.setstate(state_dict)

    def reseed(self, seed: int) -> None:
        self._generator.seed(seed)


class _NumpyBitGenerator:
    """A NumPy bit generator: PCG64, Philox, MT19937 and others."""

    def __init__(self, bits: Any) -> None:
        self._bits = bits

    def state_dict(self) -> Any:
        return _listed(self._bits.state)

    def load_state_dict(self, state_dict: Any) -> None:
        self._bits.state = _arrays(state_dict, like=self._bits.state)

    def reseed(self, seed: int) -> None:
        self._bits.state = type(self._bits)(seed).state


class _NumpyRandomState:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return _listed(self._state.get_state(legacy=False))

    def load_state_dict(self, state_dict: Any) -> None:
        self._state.set_state(_arrays(state_dict, like=self._state.get_state(legacy=False)))

    def reseed(self, seed: int) -> None:
        self._state.seed(seed & 0xFFFFFFFF)


def _listed(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _listed(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _arrays(state: Any, like: Any) -> Any:
    """Turn lists back into arrays where ``like`` has arrays; the opposite of ``_listed``."""
    if isinstance(like, dict):
        return {name: _arrays(state[name], value) for name, value in like.items()}
    return type(like)(state) if not hasattr(like, "dtype") else _array(state, like.dtype)


def _array(values: Any, dtype: Any) -> Any:
    import numpy

    return numpy.array(values, dtype=dtype)


class _PlainValues:
    """A dict, list or dataclass of plain data. Its state is loaded in place, since the script refers to the object."""

    def __init__(self, name: str, part: Any) -> None:
        self._name = name
        self._part = part
        if dataclasses.is_dataclass(part) and getattr(part, "__dataclass_params__").frozen:  # noqa: B009 - mypy
            raise PartError(f"attach({name}=): the dataclass {type(part).__name__} is frozen and cannot be restored")
        self.state_dict()

    def state_dict(self) -> Any:
        """Return a copy as plain data.

        Raises:
            PartError: the script has put a value that cannot be saved into the part.
        """
        part = self._part
        if dataclasses.is_dataclass(part):
            return {field: self._plain(getattr(part, field), f".{field}") for field in _fields(part)}
        return self._plain(part, "")

    def load_state_dict(self, state_dict: Any) -> None:
        part = self._part
        if isinstance(part, dict):
            part.clear()
            part.update(state_dict)
        elif isinstance(part, list):
            part[:] = state_dict
        else:
            for field, value in state_dict.items():
                setattr(part, field, value)

    def reseed(self, seed: int) -> None:
        """Do nothing."""

    def _plain(self, value: Any, at: str) -> Any:
        """Copy a value; ``at`` is the value's path in the part, for the message."""
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if hasattr(value, "dtype") and getattr(value, "shape", None) == ():
            return value.item()  # a NumPy scalar; float64 and str_ subclass the built-in types
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return value
        if isinstance(value, dict) and all(isinstance(key, (bool, int, float, str)) for key in value):
            return {key: self._plain(each, f"{at}[{key!r}]") for key, each in value.items()}
        if type(value) in (list, tuple):
            make: Callable[[Any], Any] = type(value)
            return make(self._plain(each, f"{at}[{number}]") for number, each in enumerate(value))
        raise PartError(
            f"attach({self._name}=): {self._name}{at} is a {type(value).__name__}, but only numbers, strings, tensors, "
            "and dicts, lists and tuples of these can be saved, or an object with state_dict() and load_state_dict()"
        )


def _fields(part: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]
