"""Spotkeeper: train on spot machines as if they never went away.

A training script needs two lines, and nothing but torch::

    run = spotkeeper.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    for batch in run.steps(loader, epochs=3):
        ...

This module imports nothing by itself: the agent on a VM, the function and the
command line all share the package, and none of them may pay for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotkeeper.train import Run, attach

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    if name in ("attach", "Run"):
        from spotkeeper import train

        return getattr(train, name)
    raise AttributeError(f"module 'spotkeeper' has no attribute {name!r}")
