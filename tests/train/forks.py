"""Processes that have torch from their first moment: forked from a server of which each test process has one."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
WARM = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "spotkeeper.train.loop.attach",
)
FROZEN = "tests.train.frozen"
FORKS.set_forkserver_preload([*WARM, FROZEN])
LIMIT_S = 300.0


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def run_script(folder: Path, *argv: str, nproc: int = 1, **env: str) -> Ended:
    """Run a script in ``folder`` to its end, as an interpreter would but for its imports.

    Args:
        argv: its file first.
        nproc: ranks, under a torchrun that forks them.
        env: variables in addition to this process's.
    """
    for name in ("out", "err"):
        (folder / name).write_text("")
    process = FORKS.Process(target=interpret, args=(folder, list(argv), os.environ | env, nproc))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode is not None, f"it does not end:\n{(folder / 'err').read_text()}"
    return Ended(process.exitcode, *((folder / name).read_text() for name in ("out", "err")))


def interpret(folder: Path, argv: list[str], env: dict[str, str], nproc: int = 1) -> None:
    """What an interpreter does for a script: run it, show the exception that ends it, call what waits for the end.

    It prints into the files ``out`` and ``err`` of the folder. ``nproc``: ranks, under a torchrun that forks them.
    """
    os.setsid()
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
    multiprocessing.set_start_method("fork", force=True)  # as an interpreter has it
    if threads := env.get("OMP_NUM_THREADS"):  # OpenMP read the server's
        importlib.import_module("torch").set_num_threads(int(threads))
    _default_signals()  # the tests may have been started with nohup
    code = 0
    try:
        if nproc == 1:
            runpy.run_path(argv[0], run_name="__main__")
        else:
            os.register_at_fork(after_in_child=_default_signals)
            torchrun = importlib.import_module("torch.distributed.run")
            _let_stopped_ranks_end()
            torchrun.main(["--run-path", "--start-method=fork", "--standalone", f"--nproc-per-node={nproc}", *argv])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _let_stopped_ranks_end() -> None:
    """A forked rank ends once torchrun has read its result, which a torchrun that is signalled does not: it waits 30 s.

    Ranks that torchrun executes, as it does by default, end by themselves.
    """
    api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    close = api.MultiprocessContext._close

    def closed(context: Any, *args: Any, **options: Any) -> None:
        context._worker_finished_event.set()
        close(context, *args, **options)

    api.MultiprocessContext._close = closed


def _default_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
