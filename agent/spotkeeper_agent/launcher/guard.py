"""The launcher's parent: ends the launcher's processes if the launcher itself is killed.

A daemon of the job that has left its session and emptied its environment is found by neither process group nor mark
(``process.py``). When the daemon's parent ends, the kernel makes the daemon a child of its nearest ancestor that is a
subreaper. That is the launcher, or the guard once the launcher has ended. If both are killed together, a resource limit
that the daemon has inherited identifies the daemon (``process.tag``).

    python -BIS guard.py FOLDER COMMAND...

SIGTERM to the guard ends the launcher. The guard ends with the launcher's exit code, once no process is left. It has no
mark or tag, so ``process.sweep`` spares it. Standard library only (8 MB resident).
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file, with nothing on the path but the standard library
    sys.path.insert(0, __file__.rsplit("/", 3)[0])

import os
import signal

from spotkeeper_agent.launcher.process import GUARD, MARK, become_subreaper, kill_children, reap_dead, shell_code, tag


def main(folder: str, command: list[str]) -> int:
    become_subreaper()
    heard = {signal.SIGCHLD, signal.SIGTERM}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    env = os.environ | {MARK: folder, GUARD: str(os.getpid())}
    launcher = os.posix_spawnp(command[0], command, env, setsigmask=())
    tag(launcher, folder)
    code: int | None = None
    while code is None:
        if signal.sigwait(heard) == signal.SIGTERM:
            os.kill(launcher, signal.SIGKILL)  # not reaped yet, so no other process has its pid
        code = reap_dead().get(launcher)
    if left := kill_children():
        print(f"guard: {left} processes of the job do not end after SIGKILL", file=sys.stderr)
    return shell_code(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
