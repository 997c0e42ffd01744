"""Why a resumed DDP run adds gradients in the order of the one it continues.

DDP sorts parameters into buckets once more after its first synchronised backward, by the
order in which gradients became ready. A ring all-reduce adds the ranks' values in an
order that depends on an element's place in its bucket, and three floats do not add
associatively. So after a restart the first step would sum in another order than the same
step of a run left alone, and at three ranks or more the weights differ in the last bit.

Cure: note the order in the first synchronised backward, keep it in the checkpoint, and on
resume play it to DDP with zeros, before any state is loaded. It needs no batch and runs
no user code, and a fresh run is plain DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module in ``model``: itself, or under torch.compile's wrapper."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def plain(name: str) -> str:
    """A parameter's name in the user's own module, whether or not it, or a part of it, is compiled."""
    return name.replace("_orig_mod.", "")


class Recorder:
    """Notes the order of one synchronised backward, then takes its hooks away.

    ``order``: names of parameters as their gradients became ready, () until known.
    ``synced``: how often DDP has synchronised (a static graph sorts after the second).
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.order: tuple[str, ...] = ()
        self.synced = 0
        self._names: list[str] = []
        self._recording = False
        named = [(plain(name), param) for name, param in ddp.module.named_parameters() if param.requires_grad]
        self._hooks = [param.register_post_accumulate_grad_hook(self._note(name)) for name, param in named]
        self._hooks.append(ddp.register_forward_pre_hook(self._forward))

    def stepped(self) -> None:
        """An optimizer step is done; so is the backward before it."""
        if not self._recording:
            return
        self._recording = False
        self.synced += 1
        if not self.order:
            self.order = tuple(dict.fromkeys(self._names))
        if self.synced >= _sorts_after(self._ddp):
            for hook in self._hooks:
                hook.remove()

    def _note(self, name: str) -> Any:
        def hook(_: torch.Tensor) -> None:
            if self._recording and not self.order:
                self._names.append(name)

        return hook

    def _forward(self, *_: object) -> None:
        if torch.is_grad_enabled() and self._ddp.require_backward_grad_sync:
            self._recording = True
            self._names.clear()


class Replayed:
    """Stands in for a ``Recorder`` in a resumed run: the order is known."""

    def __init__(self, order: tuple[str, ...], synced: int) -> None:
        self.order = order
        self.synced = synced

    def stepped(self) -> None:
        """Nothing to note."""


def replay(ddp: DistributedDataParallel, order: tuple[str, ...], synced: int) -> None:
    """Make ``ddp`` sort its buckets as the recorded run did. Collective; before state is loaded.

    Raises:
        ValueError: the model has other parameters than the one that was recorded.
    """
    params = {plain(name): param for name, param in ddp.module.named_parameters()}
    if unknown := [name for name in order if name not in params]:
        raise ValueError(f"the checkpoint was made with a model that has {unknown[0]!r}; this one has not")
    module, sync_params = ddp.module, ddp.require_forward_param_sync
    ddp.module = _Chain([params[name] for name in order])
    try:
        for _ in range(min(synced, _sorts_after(ddp))):
            ddp.require_forward_param_sync = False  # buffers are the real module's; each forward sets it again
            ddp().backward()
    finally:
        ddp.module, ddp.require_forward_param_sync = module, sync_params
    for param in params.values():
        param.grad = None


def _sorts_after(ddp: DistributedDataParallel) -> int:
    return 2 if getattr(ddp, "static_graph", False) else 1


class _Chain(nn.Module):  # type: ignore[misc]
    """A graph whose backward reaches the parameters in the given order, with zeros."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self._chain = params  # a plain list: they belong to the real module

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
