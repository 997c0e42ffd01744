"""Keeps resumed DDP runs bitwise equal: replays the order in which gradients became ready.

After its first synchronized backward, DDP rebuilds its buckets in the order in which gradients became ready. A ring
all-reduce adds the ranks' values in an order that depends on an element's place in its bucket, and floating-point
addition is not associative. After a plain restart, the first step would therefore be summed in another order than in
the uninterrupted run; with three or more ranks the last bits of the weights would differ.

So ``Recorder`` notes the order in the first synchronized backward, and the checkpoint keeps it. On resume, before any
state is loaded, ``replay`` runs a backward with zero gradients in that order, so that DDP builds the same buckets. This
needs no batch and runs no user code. In a new run DDP is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP module in ``model``: ``model`` itself, or the module that torch.compile wrapped."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def find_all(module: nn.Module) -> dict[str, DistributedDataParallel]:
    """Return all DDP modules in ``module``, itself included, by name."""
    found = {plain(f"{name}.").strip("."): each for name, each in module.named_modules()}
    return {name: each for name, each in found.items() if isinstance(each, DistributedDataParallel)}


def plain(name: str) -> str:
    """Return a parameter's name in the user's module, without the prefixes that torch.compile adds."""
    return name.replace("_orig_mod.", "")


class Recorder:
    """Notes the order of gradients in one synchronized backward, then removes its hooks."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.order: tuple[str, ...] = ()  # parameter names in the order of their gradients, once known
        self.synced = 0  # synchronized backwards so far; DDP with a static graph rebuilds buckets after the second
        self._names: list[str] = []
        self._recording = False
        named = [(plain(name), param) for name, param in ddp.module.named_parameters() if param.requires_grad]
        self._hooks = [param.register_post_accumulate_grad_hook(self._note(name)) for name, param in named]
        self._hooks.append(ddp.register_forward_pre_hook(self._forward))

    def stepped(self) -> None:
        """Keep the order of the backward before this optimizer step, and remove the hooks once they are not needed."""
        self._keep()
        self._recording = False
        if self.synced >= _sorts_after(self._ddp):
            for hook in self._hooks:
                hook.remove()

    def _keep(self) -> None:
        """Count a synchronized backward, if there was one, and keep the order of the first."""
        if self._names:
            self.order = self.order or tuple(dict.fromkeys(self._names))
            self.synced += 1
            self._names.clear()

    def _note(self, name: str) -> Any:
        def hook(_: torch.Tensor) -> None:
            if self._recording:
                self._names.append(name)

        return hook

    def _forward(self, *_: object) -> None:
        self._keep()  # before another forward of the same step: a discriminator has several
        if torch.is_grad_enabled() and self._ddp.require_backward_grad_sync:
            self._recording = True


class Replayed:
    """Takes the place of ``Recorder`` in a resumed run, where the checkpoint has the order of gradients."""

    def __init__(self, order: tuple[str, ...], synced: int) -> None:
        self.order = order
        self.synced = synced

    def stepped(self) -> None:
        """Do nothing: the checkpoint has the order of gradients."""


def replay(ddp: DistributedDataParallel, order: tuple[str, ...], synced: int) -> None:
    """Make ``ddp`` build its buckets as before the restart. Collective; call it before state is loaded.

    Args:
        order: parameter names in the order in which gradients became ready, from the checkpoint.
        synced: synchronized backwards before the save.

    Raises:
        ValueError: the model lacks a parameter that ``order`` names.
    """
    params = {plain(name): param for name, param in ddp.module.named_parameters()}
    if unknown := [name for name in order if name not in params]:
        raise ValueError(f"the checkpoint's model has a parameter {unknown[0]!r}, but this model does not")
    module, sync_params = ddp.module, ddp.require_forward_param_sync
    ddp.module = _Chain([params[name] for name in order])
    try:
        for _ in range(min(synced, _sorts_after(ddp))):
            ddp.require_forward_param_sync = False  # _Chain has no buffers to sync; each forward resets this flag
            ddp().backward()
    finally:
        ddp.module, ddp.require_forward_param_sync = module, sync_params
    for param in params.values():
        param.grad = None


def _sorts_after(ddp: DistributedDataParallel) -> int:
    return 2 if getattr(ddp, "static_graph", False) else 1


class _Chain(nn.Module):  # type: ignore[misc]
    """A module without computation; its backward gives each parameter a zero gradient, in the given order."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self._chain = params  # a plain list, so that this module does not register them

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), device=self._chain[0].device, requires_grad=True)
        for param in reversed(self._chain):
            x = _Touch.apply(x, param)
        return x


class _Touch(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(param)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (param,) = ctx.saved_tensors
        return grad, torch.zeros_like(param)
