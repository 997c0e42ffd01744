"""What follows the loop is not protected: where it fails, the log says what that means for the training.

It may not change what the script does, nor how its end is told.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from spotkeeper.train.writer import say

PAGE = 'docs/train.md, "After the loop"'


def on_failure(run: Any, advice: Callable[[Any], str]) -> None:
    """Say ``advice(run)``, where it has any, below the traceback of an exception that ends the script."""
    told, held = sys.excepthook, weakref.ref(run)  # a script that lets go of its run may want the memory

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told(kind, error, trace)
        if (now := held()) is not None and (text := advice(now)):
            say(text)

    sys.excepthook = hook


def nothing_left(steps: int, folder: str | None) -> str:
    """A loop that began at its end. ``folder``: of the checkpoints, where no agent looks after them."""
    if folder is None:
        return f"nothing left to do: all {steps} steps are done; this run only does what follows the loop ({PAGE})"
    return (
        f"nothing left to do: an earlier run did all {steps} steps. To start anew, remove {folder}, "
        "or give attach() another checkpoint_dir"
    )


def failed_after(steps: int, idle: bool) -> str:
    yielded = "It yielded nothing here, for its steps were done before. " if idle else ""
    return (
        f"the loop was over after step {steps}, and what follows it has failed. {yielded}A restart goes back to the "
        f"loop's end and does only that again, not the training: {PAGE}"
    )
