"""Messages to the author of a training script: wrong arguments, a checkpoint that does not fit, a loop that never ran.

Errors name the argument, its value and the remedy. The exit hooks add a line to the log and change neither what the
script does nor its exit code.
"""

from __future__ import annotations

import atexit
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from spotkeeper.train.checkpoint.strategy import ResumePoint
from spotkeeper.train.core.errors import AttachError, CallError, say
from spotkeeper.train.core.gradorder import plain
from spotkeeper.train.core.parts import Attached
from spotkeeper.train.core.settings import own_argv

AGAIN = "SPOTKEEPER_AGAIN"
_SHOWN = 3  # tensors named in a message
PAGE = 'docs/train.md, "After the loop"'
UNLOOPED = (
    "the script called attach() but never looped over run.steps(): no training state was saved, and a preemption would "
    "have restarted the training from the beginning. Train in `for batch in run.steps(loader, epochs=3): ...`"
)
SKIPPED = (
    "a loop over run.steps() had ended before the save, so it yields nothing now, but the code between this "
    "loop and the next runs again. If that code changes something (a scheduler's step, a count), put the loops into "
    'run.epochs(n), which skips that code: docs/train.md, "Several loops"'
)


def check_given(parts: Attached) -> None:
    """Check that ``attach()`` was given an object to save.

    Raises:
        AttachError: no object was given.
    """
    if parts.model is None and not parts.optimizers and parts.scaler is None and not parts.common:
        raise AttachError(
            "attach() was given nothing to save: write attach(model=model, optimizer=optimizer), and add the scheduler "
            "and all other objects that change during training"
        )


def check_loop(positional: tuple[object, ...], epochs: object, steps: object) -> None:
    """Check the arguments of ``run.steps()``.

    Raises:
        CallError: the arguments do not give a loop's length.
    """
    if positional:
        given = ", ".join(map(repr, positional))
        first = positional[0]
        raise CallError(
            f"run.steps(loader, {given}) does not say what {first!r} counts: write run.steps(loader, epochs={first!r}) "
            f"or run.steps(loader, steps={first!r})"
        )
    for name, value, what in (("epochs", epochs, "passes over the data"), ("steps", steps, "optimizer steps in all")):
        if value is not None and not _counts(value):
            raise CallError(
                f"run.steps({name}={value!r}): want the number of {what}, a whole number from 1{_instead(name, value)}"
            )


def _counts(value: object) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= 1  # type: ignore[arg-type] # numpy's, too
    except TypeError:
        return False


def _instead(name: str, value: object) -> str:
    """Return a hint with the value that the user probably meant, or ""."""
    try:
        number = int(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return ""
    return f", such as {name}={number}" if number >= 1 and not isinstance(value, bool) else ""


def misfit(parts: Attached, found: ResumePoint, folder: str, managed: bool, error: Exception) -> AttachError | None:
    """Return an error that explains why a checkpoint could not be loaded, or None if the model is not the reason.

    Args:
        folder: the checkpoint's folder.
        managed: whether an agent started the run.
        error: the error of the load.
    """
    differ = list(_differences(parts, found.model))
    if not differ and not isinstance(error, ValueError):
        return None
    named = "; ".join(differ[:_SHOWN]) + (f"; and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else "")
    remedy = f"move {folder} away, or give attach(checkpoint_dir=) another folder"
    if managed:
        remedy = "submit the job under another name to start over, or resume it with the script that saved that state"
    return AttachError(
        f"checkpoint {found.manifest.commit} in {folder} belongs to another model: {named or error}. "
        f"To train this model: {remedy}"
    )


def _differences(parts: Attached, saved: Any) -> Iterable[str]:
    """Describe each tensor that differs between model and checkpoint, with shapes."""
    if parts.core is None or not isinstance(saved, dict):
        return
    now = {plain(name): param for name, param in parts.core.named_parameters(remove_duplicate=False)}
    for name in sorted(now.keys() | saved.keys()):
        old, new = saved.get(name), now.get(name)
        if new is None:
            yield f"{name} {_shape(old)} is in the checkpoint and not in the model"
        elif old is None:
            yield f"{name} {_shape(new)} is in the model and not in the checkpoint"
        elif isinstance(old, torch.Tensor) and old.shape != new.shape:
            yield f"{name} is {_shape(old)} in the checkpoint and {_shape(new)} in the model"


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def check_rerun(steps: int, then: str, folder: str) -> None:
    """Refuse a run that has no steps left because an earlier run, with other arguments, did all steps.

    Otherwise only the code after the loop would run, and the earlier run's results would look like this run's.

    Args:
        steps: steps of the earlier run.
        then: the earlier run's script and arguments; "" if unknown.
        folder: the checkpoint folder.

    Raises:
        CallError: the earlier run had other arguments.
    """
    now = own_argv()
    if then and now and then != now and os.environ.get(AGAIN) != "1":
        raise CallError(
            f"nothing is left to train: an earlier run in {folder} did all {steps} steps, with other arguments.\n"
            f"  then: {then}\n  now:  {now}\n"
            f"To train with the new arguments: move {folder} away, or give attach(checkpoint_dir=) another folder. To "
            f"continue the earlier run: ask for more steps. To run only the code after the loop: set {AGAIN}=1"
        )


def on_failure(run: Any, advice: Callable[[Any], str]) -> None:
    """If an exception ends the script, log ``advice(run)`` below the traceback, unless the advice is ""."""
    former, run_ref = sys.excepthook, weakref.ref(run)  # weak: a script that drops its run may need the memory

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "" if (now := run_ref()) is None else advice(now)
        former(kind, error, trace)
        if text:
            say(text)

    sys.excepthook = hook


def on_exit(unlooped: Callable[[], bool]) -> None:
    """Log a warning if the script succeeds without a loop over ``run.steps()``, because no state was saved then."""
    told, failed = sys.excepthook, False

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal failed
        failed = True
        told(kind, error, trace)

    def end() -> None:
        if not failed and unlooped():
            say(UNLOOPED)

    sys.excepthook = hook
    atexit.register(end)


def nothing_left(steps: int, folder: str | None) -> str:
    """Return the message for a loop without a step left. ``folder``: the checkpoint folder; None under an agent."""
    if folder is None:
        return f"nothing left to do: all {steps} steps are done; this run executes only what follows the loop ({PAGE})"
    return (
        f"nothing left to do: an earlier run did all {steps} steps. To start over, remove {folder}, "
        "or give attach() another checkpoint_dir"
    )


def not_saved(step: int, newest: object) -> str:
    """Return the message for a run that ended before it could save. ``newest``: newest checkpoint, if known."""
    goes_on = f"; the next start continues from {newest}" if newest is not None else ""
    return f"asked to stop, but the script ended before it could save, at step {step}{goes_on}"


def failed_after(steps: int, idle: bool) -> str:
    """Return the message for a failure after the loop. ``idle``: whether the loop yielded no batch."""
    yielded = "The loop yielded nothing here, because its steps were done before. " if idle else ""
    return (
        f"the loop ended after step {steps}, and the code after it failed. {yielded}A restart repeats only that code, "
        f"not the training: {PAGE}"
    )
