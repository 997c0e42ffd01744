"""Spotkeeper: train on spot machines as if they never went away.

A training script needs two lines, and no package but torch::

    run = spotkeeper.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    for batch in run.steps(loader, epochs=3):
        ...

``import spotkeeper`` does not import torch, because agent, function and command use this package without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotkeeper.version import __version__

if TYPE_CHECKING:
    from spotkeeper.train import Run, attach

__all__ = ["Run", "__version__", "attach", "params"]


def params() -> dict[str, bool | int | float | str]:
    """Return the values that the job file (``params``) or a search gives the script; {} outside a job.

    A script that trains alone, too, gives its own defaults::

        lr = spotkeeper.params().get("lr", 1e-3)
    """
    from spotkeeper.train.core import settings

    return settings.params()


def __getattr__(name: str) -> Any:
    if name in ("attach", "Run"):
        from spotkeeper import train

        return getattr(train, name)
    raise AttributeError(f"module 'spotkeeper' has no attribute {name!r}")
