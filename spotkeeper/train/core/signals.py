"""Turns signals into a request to save and stop, in the trainer and in its loader workers.

Without an agent, SIGTERM (from another scheduler), SIGHUP and Ctrl-C request a stop. The handler only writes the
request into the control file, as an agent would; it never saves. Ctrl-C in a terminal, ``kill %1`` in a shell and Slurm
signal every process of a job, loader workers too. The trainer may need more batches to reach the end of its step, so
loader workers ignore these signals while the loop runs. They end soon after their trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from spotkeeper.train.agent_link.control import AgentRequest, Control

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that request a whole process group to stop
_LEAVE_S = 2.0  # time for a worker to end by itself once its trainer stops
_DIE_S = 1.0  # from SIGTERM to SIGKILL
_STARTED: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_TWICE_S = 1.0  # a second SIGINT within this time is the same Ctrl-C, forwarded by torchrun


class _Shield:
    """A shared flag: 1 while loader workers ignore stop signals. Workers of every start method see the flag."""

    flag: Any = None


class ShieldedInit:
    """A ``worker_init_fn`` that sets the worker's signal handlers, then calls the script's own function."""

    def __init__(self, then: Callable[[int], object] | None, orderly: Any) -> None:
        self._then = then
        self._orderly = orderly

    def __call__(self, worker: int) -> None:
        trainer = os.getppid()

        def handle(number: int, frame: FrameType | None) -> None:
            if not self._orderly.value or os.getppid() != trainer:
                os._exit(0)  # as torch's handler does: any other exit code is a loader error

        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
                signal.signal(number, handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if self._then is not None:
            self._then(worker)


def prepare_workers() -> None:
    """Shield from stop signals the workers of all loaders that are iterated from now on. Idempotent."""
    if _Shield.flag is None:
        _Shield.flag = RawValue(ctypes.c_byte, 0)
        _wrap_loaders()
        atexit.register(end_workers)  # before multiprocessing's own hook, which waits for each worker without limit


def shield_workers() -> None:
    """Let loader workers ignore stop signals. Called when the loop starts, after the trainer's handlers are set."""
    if _Shield.flag is not None:
        _Shield.flag.value = 1


def unshield_workers() -> None:
    """Let stop signals end loader workers again. Called when the loop ends."""
    if _Shield.flag is not None:
        _Shield.flag.value = 0


def end_workers() -> None:
    """End loader workers when the trainer exits: a thread kills those that outlive the deletion of their loaders."""
    unshield_workers()
    left = [worker for worker in _STARTED if worker.is_alive()]
    if not left:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error for a killed worker
    threading.Thread(target=_reap, args=(left,), daemon=True).start()


def _reap(workers: list[BaseProcess]) -> None:
    for wait_s, then in ((_LEAVE_S, BaseProcess.terminate), (_DIE_S, BaseProcess.kill)):
        end = time.monotonic() + wait_s
        while time.monotonic() < end and any(map(_alive, workers)):
            time.sleep(0.02)
        for worker in filter(_alive, workers):
            with contextlib.suppress(OSError, ValueError):
                then(worker)


def _alive(worker: BaseProcess) -> bool:
    try:
        return worker.is_alive()
    except (OSError, ValueError, AssertionError):  # the main thread has just joined and closed it
        return False


@contextlib.contextmanager
def shielded_start(loader: Any) -> Iterator[None]:
    """Shield a loader's workers while they start, in a ``with`` block that creates the loader's iterator.

    Stop signals are blocked, and stay pending, until a worker has set its handlers.
    """
    if not getattr(loader, "num_workers", 0) or _Shield.flag is None:
        yield
        return
    if not isinstance(loader.worker_init_fn, ShieldedInit):
        loader.worker_init_fn = ShieldedInit(loader.worker_init_fn, _Shield.flag)
    before = set(multiprocessing.active_children())
    if _method(loader) == "forkserver":
        forkserver.ensure_running()  # a server started inside the block would pass blocked signals to all its forks
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _STARTED.update(set(multiprocessing.active_children()) - before)


def _method(loader: Any) -> str | None:
    context = loader.multiprocessing_context or multiprocessing
    method: str | None = context.get_start_method()
    return method


def _wrap_loaders() -> None:
    """Wrap ``DataLoader.__iter__``, so that workers of loaders that the run does not know ignore stop signals too."""
    begin = DataLoader.__iter__

    @functools.wraps(begin)
    def iterate(self: DataLoader[Any]) -> Any:
        with shielded_start(self):
            return begin(self)

    DataLoader.__iter__ = iterate


class StopSignals:
    """Makes SIGTERM, SIGHUP and Ctrl-C save and stop while a loop runs; a second Ctrl-C interrupts at once.

    Args:
        world: number of ranks; the message to the user depends on it.
        managed: whether an agent requests stops; signals then keep their usual meaning.
    """

    def __init__(self, control: Control, world: int, *, managed: bool) -> None:
        self._control = control
        self._world = world
        self._launched = "TORCHELASTIC_RUN_ID" in os.environ
        self._interrupted_at = 0.0
        self._before: dict[int, Any] = {}
        self._managed = managed
        if not managed:
            prepare_workers()

    def install(self) -> None:
        """Install the handlers at the start of a loop. A signal that the script handles itself keeps that handler."""
        if self._managed or threading.current_thread() is not threading.main_thread():
            return
        for number in STOPS:
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler):
                self._before[number] = before
                signal.signal(number, self._handle)
        if self._before:
            _INSTALLED.add(self)
            _prepare_forks()
        if signal.SIGTERM in self._before:
            shield_workers()

    def restore(self) -> None:
        """Restore the former handlers at the end of a loop."""
        unshield_workers()
        _INSTALLED.discard(self)
        self.restore_handlers()

    def restore_handlers(self) -> None:
        """Restore the former handlers, but leave loader workers shielded: forks call this too, and own no workers."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                with contextlib.suppress(ValueError):  # another thread closes the loop
                    signal.signal(number, before)
        self._before.clear()

    @property
    def asked(self) -> bool:
        """Whether the run was asked to save and stop."""
        return self._control.requested is AgentRequest.SAVE_STOP

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self._interrupted_at and not (self._launched and now - self._interrupted_at < _TWICE_S)
        if number == signal.SIGINT and again:
            signal.default_int_handler(number, frame)
        if number == signal.SIGINT:
            self._interrupted_at = self._interrupted_at or now
        if not self.asked:
            self._control.request(AgentRequest.SAVE_STOP)
            _print(f"spotkeeper: {signal.Signals(number).name}: {self._promise()}{_more(number)}\n")

    def _promise(self) -> str:
        if self._world == 1:
            return "saving and stopping after this step"
        newest = f"; until then the newest checkpoint is {self._control.commit}" if self._control.commit else ""
        return f"saving and stopping once all {self._world} ranks have ended a step{newest}"


def _more(number: int) -> str:
    return " (Ctrl-C again: stop at once, without saving)" if number == signal.SIGINT else ""


def _print(line: str) -> None:
    """Write to stderr's descriptor: a signal may have interrupted a write to ``sys.stderr``."""
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


_INSTALLED: weakref.WeakSet[StopSignals] = weakref.WeakSet()  # objects whose handlers are installed
_MASK = threading.local()  # .before: the forking thread's signal mask


@functools.cache
def _prepare_forks() -> None:
    """Arrange that forks of the trainer get the former handlers, so that the script can end them as usual.

    CPython drops signals that reach a child before ``os.fork`` has set it up, so stop signals stay blocked until then.
    """
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child)


def _block() -> None:
    _MASK.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS if _INSTALLED else ())


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASK.before)


def _restore_in_child() -> None:
    for installed in list(_INSTALLED):
        installed.restore_handlers()
    _INSTALLED.clear()
    _unblock()
