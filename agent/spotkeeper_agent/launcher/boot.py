"""The first lines of every worker, in both modes of the launcher: torchrun runs this file as its script.

It limits the size of the worker's log, makes the worker die with torchrun, restores default signal handlers, registers
the signal that shows the worker's stack traces, seeds every random generator, runs the user's script as ``__main__``
and writes the exit code to ``exit.<local rank>`` in the run folder. Standard library and torch only.

    boot.py SCRIPT ARG...      boot.py -m MODULE ARG...
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import importlib.util
import io
import multiprocessing
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path

from spotkeeper.train.core.errors import NO_RESTART, ScriptError
from spotkeeper_agent.launcher import output, stacks, torchrun
from spotkeeper_agent.launcher.process import die_with_parent


def main(argv: list[str]) -> None:
    """Run the script; raise ``SystemExit`` if its exit code is not 0 or an exception ended it.

    The script's exception was already printed: raised again, it would be printed twice, with torchrun's frames.
    """
    forked = multiprocessing.parent_process() is not None
    output.bound()
    _die_with_torchrun()
    _default_signals()
    _listen()
    if forked:
        atexit._clear()  # drop the zygote's exit handlers
        _buffer_by_line()
    _seed()
    _set_threads()
    code = _run_user(argv)
    if forked:
        # A multiprocessing child ends by os._exit, which would skip the handlers that the user registered.
        atexit._run_exitfuncs()
    _write_code(code)
    if code:
        sys.exit(code)


def _die_with_torchrun() -> None:
    """Make this worker die with torchrun, and the processes that its main thread forks die with this worker.

    Torchrun notices a worker's death when all copies of a pipe are closed, and forked loader workers hold copies. If
    loader workers lived on, torchrun would notice a killed rank after 5 s instead of 0.08 s. Processes that another
    thread forks are left out: the kernel would kill them as soon as that *thread* ends, even if the worker lives on.
    """
    parent = os.environ.get("SPOTKEEPER_PARENT")
    die_with_parent(int(parent) if parent else None)
    from_main = [True]

    def before() -> None:
        from_main[0] = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if from_main[0]:
            die_with_parent()

    os.register_at_fork(before=before, after_in_child=in_child)


def _default_signals() -> None:
    """Restore Python's default handlers. A forked worker inherits torchrun's, which would raise in the user's code."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _listen() -> None:
    faulthandler.enable()  # a crash in C leaves its Python frames in the log
    if folder := os.environ.get("SPOTKEEPER_RUN"):
        stacks.listen(Path(folder), _local_rank())


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _buffer_by_line() -> None:
    """Flush each printed line, so that a preemption loses none.

    The agent sets PYTHONUNBUFFERED, but Python reads that only when it starts, and the zygote started earlier.
    """
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)


def _seed() -> None:
    """Seed all random generators from job, seed and rank. A resumed run later loads the generators' saved state."""
    text = "/".join(os.environ.get(name, "") for name in ("SPOTKEEPER_UID", "SPOTKEEPER_SEED", "RANK"))
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    random.seed(seed)
    if importlib.util.find_spec("numpy"):
        import numpy as np

        np.random.seed(seed)
    if importlib.util.find_spec("torch"):
        import torch

        torch.manual_seed(seed)


def _set_threads() -> None:
    """Set torch's number of threads. OpenMP has read OMP_NUM_THREADS before, when the zygote imported torch."""
    count = os.environ.get("OMP_NUM_THREADS", "")
    if count.isdecimal() and int(count) > 0 and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(count))


def _run_user(argv: list[str]) -> int:
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path[0] = os.getcwd()  # noqa: PTH109 - what `python -m` puts there
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path[0] = str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        return _code_of(stop)
    except BaseException as error:
        if folder := os.environ.get("SPOTKEEPER_RUN"):
            torchrun.note(Path(folder), _local_rank(), error)
        code = _show(error)
        return NO_RESTART if isinstance(error, ScriptError) else code
    return 0


def _show(error: BaseException) -> int:
    """Show an exception as the interpreter would: through the user's ``sys.excepthook``, without this file's frames.

    If the hook fails, both exceptions are shown. A closed standard error is ignored.

    Returns:
        The exit code: 1, or the code with which the hook ended the script.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    error, code = error.with_traceback(trace), 1
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as stop:
        code = _code_of(stop)
    except BaseException as wrong:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exception(wrong)
            traceback.print_exception(error)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream is closed or None
        sys.stderr.flush()
    return code


def _code_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _write_code(code: int) -> None:
    folder = os.environ.get("SPOTKEEPER_RUN")
    if not folder:
        return
    path = Path(folder) / f"exit.{_local_rank()}"
    with contextlib.suppress(OSError):  # a full disk must not turn a success into a failure
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(f"{code}\n")
        temporary.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
