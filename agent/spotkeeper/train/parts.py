"""What a user attached, as state: taken from the objects, and given back to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spotkeeper.train import gradorder, rng
from spotkeeper.train.errors import AttachError, PartError
from spotkeeper.train.gradorder import plain
from spotkeeper.train.shards import Meshes, is_shared


@runtime_checkable
class Stateful(Protocol):
    """Anything that torch's convention fits."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class Parts:
    """``scaler`` is one per rank; ``common`` is the same on all ranks, by name."""

    model: nn.Module | None
    optimizers: tuple[Optimizer, ...]
    scaler: Stateful | None
    common: dict[str, Stateful]

    @classmethod
    def of(cls, model: Any, optimizer: Any, scaler: Any, named: dict[str, Any]) -> Parts:
        """Check what was attached.

        Raises:
            PartError: something has no state to save; the message names it.
        """
        several = list(optimizer.values()) if isinstance(optimizer, dict) else optimizer
        optimizers = tuple(several) if isinstance(several, (list, tuple)) else (several,) if several else ()
        if model is not None and not isinstance(model, nn.Module):
            raise PartError(f"attach(model=): want a torch.nn.Module, got {type(model).__name__}")
        if model is not None and any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
            raise PartError(
                "attach(model=): FullyShardedDataParallel keeps its parameters in a form of its own, which is not "
                "supported; shard with torch.distributed.fsdp.fully_shard(model), its successor"
            )
        for each in optimizers:
            if not hasattr(each, "register_step_post_hook"):
                raise PartError(f"attach(optimizer=): want a torch.optim.Optimizer, got {type(each).__name__}")
            if hasattr(each, "consolidate_state_dict"):
                raise PartError(
                    "attach(optimizer=): ZeroRedundancyOptimizer keeps sharded state, which is not supported"
                )
        named = {name: part for name, part in named.items() if part is not None}
        for name, part in named.items() | ({("scaler", scaler)} if scaler is not None else set()):
            if not isinstance(part, Stateful):
                raise PartError(f"attach({name}=): {type(part).__name__} has no state_dict() and load_state_dict()")
        return cls(model, optimizers, scaler, named)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        return None if self.model is None else gradorder.find_ddp(self.model)

    @property
    def core(self) -> nn.Module | None:
        """The user's own module, without DDP's and the compiler's wrappers: its names are portable."""
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
        """Whether ranks share tensors: each has a part of them only."""
        return any(map(is_shared, self._tensors()))

    @property
    def meshes(self) -> Meshes:
        return Meshes(self._tensors())

    def take_common(self) -> tuple[object, dict[str, object]]:
        """(parameters, the rest). Buffers are in the local part: ranks' differ after a step."""
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
        }

    def named(self, model: Any, rest: dict[str, Any]) -> dict[str, object]:
        """What other tools find in a sharded checkpoint, under the names that torch's own helpers use."""
        names = {id(param): plain(name) for name, param in self._parameters()}
        tree: dict[str, object] = {"model": model or {}}
        for number, (each, state) in enumerate(zip(self.optimizers, rest["optimizers"], strict=True)):
            params = [param for group in each.param_groups for param in group["params"]]
            moments = {names.get(id(params[at]), str(at)): value for at, value in state["state"].items()}
            tree[f"optimizer{number or ''}"] = {"state": moments}
        return tree

    def load(self, model: Any, rest: dict[str, Any], local: dict[str, Any]) -> None:
        """Give everything back but the random state.

        Raises:
            AttachError: the script attaches other things than the one that saved.
        """
        self._compare(rest)
        if self.core is not None:
            whole = OrderedDict(model)
            whole.update(local["buffers"])
            whole._metadata = getattr(model, "_metadata", None)  # type: ignore[attr-defined]
            _give(self.core, whole)
        for each, state in zip(self.optimizers, rest["optimizers"], strict=True):
            each.load_state_dict(state)
        for name, part in self.common.items():
            _give(part, rest["parts"][name])
        if self.scaler is not None and local["scaler"] is not None:
            self.scaler.load_state_dict(local["scaler"])

    def _compare(self, rest: dict[str, Any]) -> None:
        if len(rest["optimizers"]) != len(self.optimizers):
            raise AttachError(
                f"the checkpoint has {len(rest['optimizers'])} optimizers, attach() {len(self.optimizers)}"
            )
        if missing := self.common.keys() ^ rest["parts"].keys():
            name = min(missing)
            has, has_not = ("attach()", "the checkpoint") if name in self.common else ("the checkpoint", "attach()")
            raise AttachError(f"{has} has {name!r}, {has_not} has not; name the same things, or start in a new folder")

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
    """Its state, of a module under plain names."""
    state = part.state_dict()
    if not isinstance(part, nn.Module):
        return state
    named = OrderedDict((plain(name), value) for name, value in state.items())
    named._metadata = {  # type: ignore[attr-defined]
        plain(f"{name}.")[:-1]: value for name, value in getattr(state, "_metadata", {}).items()
    }
    return named


def _give(part: Stateful, state: Any) -> None:
    """The inverse, whether or not it is compiled now as it was then."""
    if isinstance(part, nn.Module):
        now = part.state_dict()
        names = {plain(name): name for name in now}
        prefixes = {plain(f"{name}.")[:-1]: name for name in getattr(now, "_metadata", {})}
        metadata = getattr(state, "_metadata", None) or {}
        state = OrderedDict((names.get(name, name), value) for name, value in state.items())
        state._metadata = {prefixes.get(name, name): value for name, value in metadata.items()}
    part.load_state_dict(state)
