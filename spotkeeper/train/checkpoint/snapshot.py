"""Copies parameters and optimizer state during the next forward and backward pass: a save hardly stops training.

Trained parameters and optimizer state change only in an optimizer's step. So a save copies everything else at the
boundary, and a thread copies these tensors into staging memory. Each attached optimizer waits for the thread before
its step (a pre-step hook), and then the save is requested from the saver. ``step(closure)`` waits before the closure,
so nothing is hidden there. Tensors that are not on the CPU are copied at the boundary.

**Check.** A script may change parameters elsewhere too: by ``clamp_`` before the forward pass, or by SAM's first step.
So the first ``CHECKED`` copies, and then one in ``EVERY``, are made at the boundary and compared before the next step
with what the tensors hold then. After each copy, version counters are compared as well; they miss writes through
``.data`` and fused kernels. If a tensor has changed, all later saves copy at the boundary, and a save whose copy may
be torn is not written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from spotkeeper.train.checkpoint.image import TensorCopy, TensorKey, tensor_key
from spotkeeper.train.core.errors import say

CHECKED = 3  # first copies of a run that are checked
EVERY = 1000  # later, one copy in this many is checked


@dataclass(frozen=True)
class _Running:
    """A copy that an optimizer's step must wait for."""

    copies: Sequence[TensorCopy]
    versions: list[int]
    copied: Future[None] | None  # None: made at the boundary, to be checked
    request: Callable[[], None]
    discard: Callable[[str], None]

    def changed(self) -> str:
        """Return the name of a tensor that has changed since the boundary, or ""."""
        for copy, version in zip(self.copies, self.versions, strict=True):
            if copy.tensor._version != version or (self.copied is None and not copy.equal()):
                return copy.name
        return ""


class BackgroundCopier:
    """Copies optimizers' tensors in a thread, and makes the optimizers wait for it.

    Args:
        optimizers: the attached optimizers.
        stalls: seconds that saves stopped the loop, newest last; the copier adds the waits to the newest.
    """

    def __init__(self, optimizers: Sequence[Any], stalls: Any) -> None:
        self._stalls = stalls
        self._thread = ThreadPoolExecutor(1, "spotkeeper-copy")
        self._running: _Running | None = None
        self._begun = 0
        self._on = all(hasattr(each, "register_step_pre_hook") for each in optimizers)
        if self._on:
            for each in optimizers:
                each.register_step_pre_hook(self._before_step)

    def select(self, owned: Iterable[tuple[str, torch.Tensor]]) -> dict[TensorKey, str]:
        """Return the names of the tensors that may be copied while training continues."""
        if not self._on:
            return {}
        return {
            tensor_key(tensor): name
            for name, tensor in owned
            if tensor.device.type == "cpu" and not tensor.is_inference()
        }

    def begin(self, copies: Sequence[TensorCopy], request: Callable[[], None], discard: Callable[[str], None]) -> None:
        """Start copying.

        Args:
            copies: the copies that the image still lacks.
            request: asks the saver to write the image; called once the image is complete.
            discard: called instead if the image may be torn, with the reason.
        """
        number, self._begun = self._begun, self._begun + 1
        versions = [copy.tensor._version for copy in copies]
        copied = None
        if number < CHECKED or number % EVERY == 0:
            _run(copies)
            request()
        else:
            copied = self._thread.submit(_run, copies)
        self._running = _Running(copies, versions, copied, request, discard)

    def wait(self) -> None:
        """Wait until the running copy is complete, and request its save. Does nothing if no copy runs."""
        running, self._running = self._running, None
        if running is None:
            return
        if running.copied is not None:
            running.copied.result()
        name = running.changed()
        if name:
            self._on = False
            say(f"snapshots are off for the rest of this run: {name} changed before an optimizer's step")
        if running.copied is not None and name:
            running.discard(f"{name} changed while it was copied")
        elif running.copied is not None:
            running.request()

    def _before_step(self, *_: object) -> None:
        if self._running is not None:
            began = time.monotonic()
            self.wait()
            if self._stalls:
                self._stalls[-1] += time.monotonic() - began


def _run(copies: Sequence[TensorCopy]) -> None:
    for copy in copies:
        copy.run()
