"""The training library. The user's script imports it; the agent imports some of its modules.

The library runs in the job's Python, so it imports only the standard library and torch. Torch is imported on first use,
because the agent imports ``agent_link`` and ``checkpoint/store.py`` from here and must stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotkeeper.train.loop.attach import Run, attach

__all__ = ["Run", "attach"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from spotkeeper.train.loop import attach

        return getattr(attach, name)
    raise AttributeError(f"module 'spotkeeper.train' has no attribute {name!r}")
