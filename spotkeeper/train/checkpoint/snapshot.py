"""Copies parameters and optimizer state during the next forward and backward pass: a save hardly stops training.

Trained parameters and optimizer state change only in an optimizer's step. So a save copies everything else at the
boundary, and a thread copies these tensors into staging memory. Every optimizer of the process, attached or not, waits
for the thread before its step (a pre-step hook), and then the save is requested from the saver. ``step(closure)`` waits
once the closure has returned, because optimizers change parameters only then. CUDA devices copy their tensors
themselves (``device_copy.py``): the step waits on the device, not in the loop, and the save is requested at a later
boundary, when all bytes are there. Tensors on other devices are copied at the boundary.

**Check.** A script may change parameters elsewhere too: by ``clamp_`` before the forward pass, or by SAM's first step.
So the first ``CHECKED`` copies, and then one in ``EVERY``, are made at the boundary and compared with what the tensors
hold before the next step, and with a parameter also when it gets a gradient: SAM has changed it then, and changes it
back before the step. After each copy, version counters are compared as well; they miss writes through ``.data`` and
fused kernels. If a tensor has changed, all later saves copy at the boundary, and a save whose copy may
be torn is not written. A copy that fails has the same effect; the error reaches the log, not the script. A device makes
a checked copy too, over the one of the boundary: it must have the same bits.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spotkeeper.train.checkpoint.device_copy import DeviceCopier, DeviceCopies, on_device, sums
from spotkeeper.train.core.errors import say
from spotkeeper.train.core.tensors import TensorCopy, TensorKey, tensor_key

CHECKED = 3  # first copies of a run that are checked
EVERY = 1000  # later, one copy in this many is checked


@dataclass(frozen=True)
class _Running:
    """A copy that an optimizer's step must wait for."""

    copies: Sequence[TensorCopy]
    versions: list[int]
    copied: Future[None] | None  # None: made at the boundary, or by devices alone
    devices: DeviceCopies | None
    request: Callable[[], None] | None  # None: requested already
    discard: Callable[[str], None]
    stalls: deque[float] | None  # seconds that saves stopped the loop; the newest grows by the waits
    watch: GradientWatch | None  # of a copy to be checked
    seen: list[int]  # checksums that copies of devices must have, of a copy to be checked

    def failed(self) -> str:
        """Wait for the copy, but not for devices unless it is to be checked; return why it failed, or ""."""
        error = None if self.copied is None else self.copied.exception()
        if error is None and self.devices is not None and self.watch is not None:
            error = self.devices.wait()
        return _told(error)

    def changed(self) -> str:
        """Return the name of a tensor that has changed since the save began, or ""."""
        if self.watch is not None and (name := self.watch.end()):
            return name
        for copy, version in zip(self.copies, self.versions, strict=True):
            if copy.tensor._version != version or (self.watch is not None and not copy.equal()):
                return copy.name
        if self.seen:
            far = [copy for copy in self.copies if on_device(copy.tensor)]
            return next((c.name for c, old, now in zip(far, self.seen, sums(far), strict=True) if old != now), "")
        return ""


class GradientWatch:
    """Compares parameters with their copies whenever they get a gradient.

    Args:
        params: the optimizers' parameters; those whose memory is in no copy are left out.
    """

    def __init__(self, params: Iterable[torch.Tensor], copies: Sequence[TensorCopy]) -> None:
        self._changed: list[str] = []
        known = {tensor_key(copy.tensor): copy for copy in copies}
        found = ((param, known.get(tensor_key(param))) for param in params if param.requires_grad)
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(self._compare, copy)) for param, copy in found if copy
        ]

    def _compare(self, copy: TensorCopy, param: torch.Tensor) -> None:
        if tensor_key(param) != tensor_key(copy.tensor) or not copy.equal():
            self._changed.append(copy.name)

    def end(self) -> str:
        """Remove the hooks; return the name of a parameter that was changed, or ""."""
        for hook in self._hooks:
            hook.remove()
        return self._changed[0] if self._changed else ""


class BackgroundCopier:
    """Copies optimizers' tensors in a thread, and makes every optimizer wait for it.

    Args:
        optimizers: those that train the model at the moment of each iteration. While one of them calls no hooks, all
            tensors are copied at the boundary.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._thread = ThreadPoolExecutor(1, "spotkeeper-copy")
        self._devices = DeviceCopier()
        self._running: _Running | None = None
        self._held: _Running | None = None  # what devices still copy, though optimizers may step
        self._begun = 0
        self._lock = threading.RLock()  # several threads may step
        self._pid = os.getpid()
        self._optimizers = optimizers
        self._on = True
        me = weakref.ref(self)
        hook = register_optimizer_step_pre_hook(lambda _, args, kwargs: _before_step(me(), args, kwargs))
        weakref.finalize(self, hook.remove)

    def select(self, owned: Iterable[tuple[str, torch.Tensor]]) -> dict[TensorKey, str]:
        """Return the names of the tensors that may be copied while training continues."""
        if not self._on or not all(map(_calls_hooks, self._optimizers)):
            return {}
        return {
            tensor_key(tensor): name
            for name, tensor in owned
            if (tensor.device.type == "cpu" or on_device(tensor)) and not tensor.is_inference()
        }

    def begin(
        self,
        copies: Sequence[TensorCopy],
        request: Callable[[], None],
        discard: Callable[[str], None],
        stalls: deque[float] | None = None,
    ) -> None:
        """Start copying.

        Args:
            copies: the copies that the image still lacks; if it lacks none, it is complete at once.
            request: asks the saver to write the image; called once the image is complete.
            discard: called instead if the image may be torn, with the reason.
            stalls: seconds that saves stopped the loop; an optimizer's wait for this copy is added to the newest.
        """
        if not copies:
            request()
            return
        number, self._begun = self._begun, self._begun + 1
        versions = [copy.tensor._version for copy in copies]
        far = [copy for copy in copies if on_device(copy.tensor)]
        near = [copy for copy in copies if not on_device(copy.tensor)] if far else copies
        checked = not self._can(far) or number < CHECKED or number % EVERY == 0
        copied = None if checked or not near else self._submit(near)
        watch, seen = None, list[int]()
        if checked or (near and copied is None):
            _run(copies)
            watch, seen = GradientWatch(self._params(), copies), sums(far)
        devices, asks = self._start(far), request if watch is None else None
        if devices is not None:
            asks = request
        elif watch is None:
            _run(far)
        else:
            request()
        self._running = _Running(copies, versions, copied, devices, asks, discard, stalls, watch, seen)

    def _can(self, far: Sequence[TensorCopy]) -> bool:
        """Whether the devices' copies can run beside training; if they never can, snapshots are off."""
        if not self._devices.can(far):
            self._end("CUDA cannot register the saver's memory")
            return False
        return True

    def _start(self, far: Sequence[TensorCopy]) -> DeviceCopies | None:
        """Start the devices' copies; return None if there are none, or snapshots are off."""
        if not far or not self._on:
            return None
        try:
            return self._devices.begin(far)
        except RuntimeError as error:
            self._end(str(error))
            return None

    def _params(self) -> Iterator[torch.Tensor]:
        for each in self._optimizers:
            for group in each.param_groups:
                yield from group["params"]

    def _submit(self, copies: Sequence[TensorCopy]) -> Future[None] | None:
        """Start the copy in the thread; return None if the process may have no more threads."""
        try:
            return self._thread.submit(_run, copies)
        except RuntimeError as error:
            self._end(str(error))
            return None

    def wait(self) -> None:
        """Wait until the running copy is complete, and request its save. Does nothing if no copy runs.

        An interrupted wait (Ctrl-C) leaves the copy running, for the next wait.
        """
        if not self.running or os.getpid() != self._pid:  # a fork has no thread, and saves nothing
            return
        with self._lock:
            self._release()
            self._finish()

    def poll(self) -> None:
        """Request the save whose bytes the devices have copied by now, if there is one. Takes about a microsecond."""
        held = self._held
        if held is not None and held.devices is not None and os.getpid() == self._pid and held.devices.ready():
            with self._lock:
                self._finish()

    def _release(self) -> None:
        """Wait for the copy as long as an optimizer's step must; devices wait for theirs by themselves."""
        running = self._running
        if running is None:  # another thread has waited, or another optimizer has stepped
            if self._held is not None and self._held.devices is not None:
                self._held.devices.hold()
            return
        failed = running.failed()
        name = "" if failed else running.changed()
        try:
            if failed or name:
                self._end(failed or f"{name} changed before an optimizer's step")
                if running.request is not None:
                    running.discard(failed or f"{name} changed while it was copied")
            elif running.request is not None:
                if running.devices is not None:
                    running.devices.hold()
                self._held = running
        finally:
            self._running = None

    def _finish(self) -> None:
        """Wait until all bytes are there, and request the save."""
        held = self._held
        if held is None or held.request is None:
            return
        failed = "" if held.devices is None else _told(held.devices.wait())
        try:
            if failed:
                self._end(failed)
                held.discard(failed)
            else:
                held.request()
        finally:
            self._held = None

    def _end(self, why: str) -> None:
        self._on = False
        say(f"snapshots are off for the rest of this run: {why}")

    @property
    def running(self) -> bool:
        return self._running is not None or self._held is not None

    def before_step(self) -> None:
        """Wait for the copy before an optimizer's step, and count this time as a stall."""
        if not self.running or os.getpid() != self._pid:
            return
        began = time.monotonic()
        with self._lock:
            running = self._running
            self._release()
            if self._held is not None and self._held.devices is None:
                self._finish()
        if running is not None and running.stalls:
            running.stalls[-1] += time.monotonic() - began


def _before_step(
    copier: BackgroundCopier | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Wait for the copy, or return the arguments of ``step`` with a closure that does so at its end."""
    if copier is None or not copier.running:
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        copier.before_step()
        return None

    def closed(*each: Any, **named: Any) -> Any:
        try:
            return closure(*each, **named)
        finally:
            copier.before_step()

    return (args, kwargs | {"closure": closed}) if "closure" in kwargs else ((args[0], closed, *args[2:]), kwargs)


def _told(error: BaseException | None) -> str:
    return "" if error is None else f"the copy failed: {type(error).__name__}: {error}"


def _calls_hooks(optimizer: Any) -> bool:
    """Whether a step calls hooks: of an optimizer that called ``Optimizer.__init__``, or of a wrapper around one."""
    step = getattr(type(optimizer), "step", None)
    return bool(getattr(step, "hooked", False)) or isinstance(
        getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    )


def _run(copies: Sequence[TensorCopy]) -> None:
    for copy in copies:
        copy.run()
