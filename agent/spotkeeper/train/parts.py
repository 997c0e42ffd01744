"""What a user attached, as state: taken from the objects, and given back to them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spotkeeper.train import gradorder, rng
from spotkeeper.train.errors import AttachError, PartError


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
        optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,) if optimizer else ()
        if model is not None and not isinstance(model, nn.Module):
            raise PartError(f"attach(model=): want a torch.nn.Module, got {type(model).__name__}")
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

    def take_common(self) -> tuple[object, dict[str, object]]:
        """(parameters, the rest). Buffers are in the local part: ranks' differ after a step."""
        rest: dict[str, object] = {
            "optimizers": [each.state_dict() for each in self.optimizers],
            "parts": {name: part.state_dict() for name, part in self.common.items()},
        }
        if self.core is None:
            return None, rest
        state = self.core.state_dict()
        for name in self._buffers(state):
            del state[name]
        return state, rest

    def take_local(self) -> dict[str, object]:
        state = {} if self.core is None else self.core.state_dict()
        return {
            "rng": rng.capture(),
            "buffers": {name: state[name] for name in self._buffers(state)},
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

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
            self.core.load_state_dict(whole)
        for each, state in zip(self.optimizers, rest["optimizers"], strict=True):
            each.load_state_dict(state)
        for name, part in self.common.items():
            part.load_state_dict(rest["parts"][name])
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
        return [name for name in names if name in state]
