"""The training library: what a user's script imports, and what the agent shares with it.

It runs in the *job's* Python, so it imports the standard library and torch only, and
torch not before it is used: the agent imports ``control`` and ``saver`` from here and
must stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotkeeper.train.run import Run, attach

__all__ = ["Run", "attach"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from spotkeeper.train import run

        return getattr(run, name)
    raise AttributeError(f"module 'spotkeeper.train' has no attribute {name!r}")
