"""The state of the objects given to ``attach()``: taken from them at a save, loaded into them at a restore.

In this module a *part* is such an object. A part with ``state_dict`` and ``load_state_dict`` has one state for all
ranks. A random generator, or a dict, list or dataclass of numbers, has a state on each rank; each rank saves it as
plain data: numbers, strings, tensors, and dicts, lists and tuples of these.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spotkeeper.train.core import gradorder, rng
from spotkeeper.train.core.errors import AttachError, PartError
from spotkeeper.train.core.gradorder import plain
from spotkeeper.train.core.shards import Meshes, is_shared


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


@runtime_checkable
class Stateful(Protocol):
    """An object with torch's ``state_dict`` convention."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class FrameworkState:
    """The state of a framework's trainer. ``optimizers``: those that train the model; they may be made later."""

    optimizers: Sequence[Any] = ()


@dataclass(frozen=True)
class AllOptimizers:
    """The optimizers that train an attached model at the moment: those given to ``attach()``, and a trainer's own."""

    attached: Attached

    def __iter__(self) -> Iterator[Any]:
        yield from self.attached.optimizers
        for part in self.attached.common.values():
            if isinstance(part, FrameworkState):
                yield from part.optimizers


@dataclass(frozen=True)
class Attached:
    """The objects given to ``attach()``."""

    model: nn.Module | None
    optimizers: tuple[Optimizer, ...]
    scaler: Stateful | None  # each rank has its own state
    common: dict[str, Stateful]  # by name; the same state on all ranks
    own: dict[str, LocalPart] = field(default_factory=dict)  # by name; each rank has its own state
    owned: frozenset[int] = frozenset()  # ids of the user's objects that the wrappers in ``own`` wrap

    @classmethod
    def of(cls, model: Any, optimizer: Any, scaler: Any, named: dict[str, Any]) -> Attached:
        """Check the arguments of ``attach()``.

        Raises:
            PartError: an object has no state to save; the message names it.
        """
        several = list(optimizer.values()) if isinstance(optimizer, dict) else optimizer
        optimizers = tuple(several) if isinstance(several, (list, tuple)) else (several,) if several else ()
        if model is not None and not isinstance(model, nn.Module):
            raise PartError(f"attach(model=): want a torch.nn.Module, got {type(model).__name__}")
        if model is not None and any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
            raise PartError(
                "attach(model=): FullyShardedDataParallel is not supported; use its successor, "
                "torch.distributed.fsdp.fully_shard(model)"
            )
        for each in optimizers:
            if not hasattr(each, "register_step_post_hook"):
                raise PartError(f"attach(optimizer=): want a torch.optim.Optimizer, got {type(each).__name__}")
            if hasattr(each, "consolidate_state_dict"):
                raise PartError(
                    "attach(optimizer=): ZeroRedundancyOptimizer keeps sharded state, which is not supported"
                )
        named = {name: part for name, part in named.items() if part is not None}
        others = {name: adapt(name, part) for name, part in named.items() if not isinstance(part, Stateful)}
        own = {name: each for name, each in others.items() if each is not None}
        common = {name: part for name, part in named.items() if name not in own}
        for name, part in [*common.items(), *([] if scaler is None else [("scaler", scaler)])]:
            if not isinstance(part, Stateful):
                raise PartError(
                    f"attach({name}=): {type(part).__name__} has no state_dict() and load_state_dict(), and is neither "
                    "a random generator nor a dict, list or dataclass of numbers"
                )
        return cls(model, optimizers, scaler, common, own, frozenset(id(named[name]) for name in own))

    @property
    def ddp(self) -> DistributedDataParallel | None:
        return None if self.model is None else gradorder.find_ddp(self.model)

    @property
    def ddps(self) -> dict[str, DistributedDataParallel]:
        """All DDP modules, also in parts such as a GAN's second network."""
        modules = {"model": self.model, **self.common}
        found = {name: gradorder.find_all(part) for name, part in modules.items() if isinstance(part, nn.Module)}
        return {f"{name}.{below}": ddp for name, each in found.items() for below, ddp in each.items()}

    @property
    def core(self) -> nn.Module | None:
        """The user's module without the wrappers of DDP and torch.compile, which change parameter names."""
        module = self.model
        while isinstance(module, nn.Module):
            inner = getattr(module, "_orig_mod", None)
            if isinstance(module, DistributedDataParallel):
                inner = module.module
            if inner is None:
                return module
            module = inner
        return None

    @property
    def sharded(self) -> bool:
        """Whether tensors are sharded over ranks."""
        return any(map(is_shared, self._tensors()))

    @property
    def meshes(self) -> Meshes:
        return Meshes(self._tensors())

    def take_common(self) -> tuple[object, dict[str, object]]:
        """Return (model parameters, other shared state). Buffers are local state, because ranks may differ in them."""
        rest: dict[str, object] = {
            "optimizers": [each.state_dict() for each in self.optimizers],
            "parts": {name: _take(part) for name, part in self.common.items()},
        }
        if self.core is None:
            return None, rest
        state = _take(self.core)
        for name in self._buffers(state):
            del state[name]
        return state, rest

    def take_local(self) -> dict[str, object]:
        state = {} if self.core is None else _take(self.core)
        return {
            "rng": rng.capture(),
            "buffers": {name: state[name] for name in self._buffers(state)},
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "own": {name: part.state_dict() for name, part in self.own.items()},
        }

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that only an optimizer's step changes: trained parameters and their state, with names.

        Two kinds of parameters are left out, because only the script changes them, as in a momentum encoder: frozen
        ones, and those without state in an optimizer that keeps state for others.
        """
        names = {id(param): plain(name) for name, param in self._parameters()}
        for each in AllOptimizers(self):
            for param in (param for group in each.param_groups for param in group["params"] if param.requires_grad):
                state = each.state.get(param, {})
                if each.state and not state:
                    continue
                name = names.get(id(param), f"a parameter of shape {tuple(param.shape)}")
                yield name, param
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{key} of {name}", value

    def named(self, model: Any, rest: dict[str, Any]) -> dict[str, object]:
        """Return the state with the keys that torch.distributed.checkpoint uses, so that its tools find the tensors.

        These keys are the parameters' full names, also in an optimizer's state, whose own keys are numbers.
        """
        names = {id(param): plain(name) for name, param in self._parameters()}
        tree: dict[str, object] = {"model": model or {}}
        for number, (each, state) in enumerate(zip(self.optimizers, rest["optimizers"], strict=True)):
            params = [param for group in each.param_groups for param in group["params"]]
            moments = {names.get(id(params[at]), str(at)): value for at, value in state["state"].items()}
            tree[f"optimizer{number or ''}"] = {"state": moments}
        return tree

    def load(self, model: Any, rest: dict[str, Any], local: dict[str, Any]) -> None:
        """Load all state but the random state into the objects.

        Raises:
            AttachError: the attached objects are not those in the checkpoint.
        """
        self._compare(rest, local)
        if self.core is not None:
            whole = OrderedDict(model)
            whole.update(local["buffers"])
            whole._metadata = getattr(model, "_metadata", None)  # type: ignore[attr-defined]
            _give(self.core, whole)
        for each, state in zip(self.optimizers, rest["optimizers"], strict=True):
            each.load_state_dict(state)
        for name, part in self.common.items():
            _give(part, rest["parts"][name])
        for name, own in self.own.items():
            own.load_state_dict(local["own"][name])
        if self.scaler is not None and local["scaler"] is not None:
            self.scaler.load_state_dict(local["scaler"])

    def reseed(self, *where: int) -> None:
        """Reseed attached generators for a changed number of ranks. ``where``: integers mixed into the seeds."""
        for number, own in enumerate(self.own.values()):
            own.reseed(rng.mix(*where, number))

    def _compare(self, rest: dict[str, Any], local: dict[str, Any]) -> None:
        if len(rest["optimizers"]) != len(self.optimizers):
            raise AttachError(
                f"the checkpoint has {len(rest['optimizers'])} optimizers, but attach() has {len(self.optimizers)}"
            )
        now, then = self.common.keys() | self.own.keys(), rest["parts"].keys() | local["own"].keys()
        if missing := now ^ then or self.own.keys() ^ local["own"].keys():
            name = min(missing)
            has, has_not = ("attach()", "the checkpoint") if name in now else ("the checkpoint", "attach()")
            raise AttachError(
                f"{has} has {name!r}, but {has_not} does not: attach the same objects, or start in a new folder"
            )

    def _buffers(self, state: dict[str, Any]) -> list[str]:
        names = () if self.core is None else (name for name, _ in self.core.named_buffers(remove_duplicate=False))
        return [name for name in map(plain, names) if name in state and not is_shared(state[name])]

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(()) if self.core is None else iter(self.core.named_parameters())

    def _tensors(self) -> Iterator[torch.Tensor]:
        for _, param in self._parameters():
            yield param
        for each in self.optimizers:
            for group in each.param_groups:
                yield from group["params"]


def _take(part: Stateful) -> Any:
    """Return a part's state; for a module, under the user's parameter names."""
    state = part.state_dict()
    if not isinstance(part, nn.Module):
        return state
    named = OrderedDict((plain(name), value) for name, value in state.items())
    named._metadata = {  # type: ignore[attr-defined]
        plain(f"{name}.")[:-1]: value for name, value in getattr(state, "_metadata", {}).items()
    }
    return named


def _give(part: Stateful, state: Any) -> None:
    """Load a part's state. If the part is a compiled module, translate the saved parameter names to its own names."""
    if isinstance(part, nn.Module):
        now = part.state_dict()
        names = {plain(name): name for name in now}
        prefixes = {plain(f"{name}.")[:-1]: name for name in getattr(now, "_metadata", {})}
        metadata = getattr(state, "_metadata", None) or {}
        state = OrderedDict((names.get(name, name), value) for name, value in state.items())
        state._metadata = {prefixes.get(name, name): value for name, value in metadata.items()}
    part.load_state_dict(state)
