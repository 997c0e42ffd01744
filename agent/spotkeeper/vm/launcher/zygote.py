"""The fast launcher: one process per node that has imported torch and forks a torchrun per generation.

Kill to first step takes 0.3-0.5 s instead of the 10 s of a cold start, most of which is
imports. It never touches CUDA: a fork after CUDA has started cannot use it.

    python -m spotkeeper.vm.launcher.zygote FOLDER [MODULE...]
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from spotkeeper.vm.launcher.process import die_with_parent
from spotkeeper.vm.launcher.server import Cgroup, Server, Start
from spotkeeper.vm.launcher.torchrun import run

# Without _dynamo the first optimizer step of every worker imports it: 3.0 s instead of 0.3 s.
WARM = ("torch.distributed.run", "torch._dynamo", "numpy", "spotkeeper.train", "spotkeeper.train.run")


def main(folder: str, warm: list[str]) -> None:
    """``warm``: what the job asks for beside :data:`WARM`."""
    for name in WARM:
        if _exists(name):
            importlib.import_module(name)
    for name in warm:
        why_not, harmless = _warm(name)
        if why_not:
            print(f"zygote: {name} is imported by each generation anew: {why_not}", flush=True)
            if not harmless:  # what it has left behind is no ground to fork from
                left = [other for other in warm if other != name]
                os.execv(sys.executable, [sys.executable, "-m", __spec__.name, folder, *left])  # noqa: S606
    gc.collect()
    gc.freeze()  # the collector of a child then leaves the shared pages alone
    Server(Path(folder), "zygote", _fork).serve()


def _warm(name: str) -> tuple[str, bool]:
    """Import it; why it is of no use to a process that forks, or '', and whether this one may go on forking."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # its own code; the job meets the same, and is told in its log
        return f"it cannot be imported here ({type(error).__name__}: {error})", True
    if threading.active_count() > 1:
        return "it starts threads", False
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "it initialises CUDA", False
    return "", True


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _fork(start: Start, server: Server) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        code = _child(start, server)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _child(start: Start, server: Server) -> int:
    os.setpgid(0, 0)
    server.leave_in_child()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    cgroup = Cgroup.own()
    if cgroup is not None:
        cgroup.enter(start.gen)
    os.environ.update(start.env)
    os.chdir(start.cwd)
    return run(["--run-path", "--start-method=fork", *start.args])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
