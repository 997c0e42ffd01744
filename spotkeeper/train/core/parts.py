"""The state of the objects given to ``attach()``: taken from them at a save, loaded into them at a restore.

In this module a *part* is such an object. A part with ``state_dict`` and ``load_state_dict`` has one state for all
ranks. Others have a state on each rank (``local_parts.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spotkeeper.train.core import gradorder, rng
from spotkeeper.train.core.errors import AttachError, PartError
from spotkeeper.train.core.gradorder import plain
from spotkeeper.train.core.local_parts import LocalPart, adapt
from spotkeeper.train.core.shards import Meshes, is_shared


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
        core = self.core  # without buffers its state is not needed, and takes milliseconds
        state = {} if core is None or next(core.buffers(), None) is None else _take(core)
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
