"""The launcher: one process per machine that starts a torchrun per generation, in one of two modes.

    python -m spotkeeper_agent.launcher zygote FOLDER [MODULE...]
    python -m spotkeeper_agent.launcher exec FOLDER

In mode ``zygote`` the launcher imports torch once and forks for each generation. So the time from a kill to the next
step is 0.3-0.5 s and not the 10 s of a cold start, which are mostly imports. The zygote never initialises CUDA, because
a fork of a process that has done so cannot use CUDA. In mode ``exec`` each generation starts a new torchrun process,
for jobs that do not support forks, and for jobs with an image, in a container (``image.py``). Both modes have the same
socket, ``boot.py`` and exit codes.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from spotkeeper_agent.launcher.image import Container
from spotkeeper_agent.launcher.process import die_with_parent, start_program
from spotkeeper_agent.launcher.server import Cgroup, Server, Start
from spotkeeper_agent.launcher.torchrun import run

# Without _dynamo the first optimizer step of every worker imports it: 3.0 s instead of 0.3 s.
WARM = ("torch.distributed.run", "torch._dynamo", "numpy", "spotkeeper.train", "spotkeeper.train.loop.attach")


def main(mode: str, folder: str, warm: list[str]) -> None:
    """Serve in ``folder`` until killed. ``warm``: modules that a zygote imports in addition to :data:`WARM`."""
    if mode == "zygote":
        gc.disable()  # modules are no garbage, and collections take an eighth of an import of torch
        _import_all(folder, warm)
        gc.collect()
        gc.freeze()  # so that a child's garbage collector does not write to shared pages
        gc.enable()
    Server(Path(folder), mode, _fork if mode == "zygote" else _spawn).serve()


# -- exec


def _spawn(start: Start, server: Server) -> int:
    parent = os.getpid()
    cgroup = Cgroup.own()

    def in_child() -> None:
        os.setpgid(0, 0)
        die_with_parent(parent)
        if cgroup is not None:
            cgroup.enter(start.gen)

    words, env = ["-m", "spotkeeper_agent.launcher.torchrun", *start.args], os.environ | start.env
    command = [sys.executable, *words]
    if (container := Container.of(os.environ)) is not None:
        command, env = container.command(words, start.env, start.cwd)
    with Path(start.log).open("ab") as log:
        return start_program(
            command,
            env=env,
            cwd=start.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # One thread, so forking with Python code in between is safe here.
            preexec_fn=in_child,
        )


# -- zygote


def _import_all(folder: str, warm: list[str]) -> None:
    for name in WARM:
        if _exists(name):
            importlib.import_module(name)
    for name in warm:
        why_not, harmless = _import(name)
        if why_not:
            print(f"zygote: {name} is imported again by each generation: {why_not}", flush=True)
            if not harmless:  # start again without the module: a process with its threads or CUDA context must not fork
                left = [other for other in warm if other != name]
                again = [sys.executable, "-m", "spotkeeper_agent.launcher", "zygote", folder, *left]
                os.execv(sys.executable, again)  # noqa: S606 - an argv


def _import(name: str) -> tuple[str, bool]:
    """Import a module. Return why a zygote cannot keep it ("" if it can), and whether the zygote can still fork."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # the job meets the same error and shows it in its log
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
    except ModuleNotFoundError:  # the parent package is missing
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
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
