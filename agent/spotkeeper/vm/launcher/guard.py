"""The launcher's parent: where the launcher is killed, what it started ends all the same.

A daemon of the job's that has left its session and blanked its environment is found in no process group; but its
parent gone, it falls to the nearest subreaper above: the launcher, and without it this process. Where both are killed
together, or by whoever kills the agent as well, a limit that all of it has inherited tells whose it is (``brand``).

    python -BIS guard.py FOLDER COMMAND...

SIGTERM ends the launcher. It ends itself with the launcher, and then with the launcher's code, once nothing is
left. It bears no mark of the node's, so that a sweep, which may come at any time, does not end it before its work.
Standard library only (8 MB resident).
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file, with nothing on the path but the standard library
    sys.path.insert(0, __file__.rsplit("/", 4)[0])

import os
import signal

from spotkeeper.vm.launcher.process import GUARD, NODE, become_subreaper, brand, kill_children, reap_dead, shell_code


def main(folder: str, command: list[str]) -> int:
    become_subreaper()
    heard = {signal.SIGCHLD, signal.SIGTERM}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    env = os.environ | {NODE: folder, GUARD: str(os.getpid())}
    launcher = os.posix_spawnp(command[0], command, env, setsigmask=())
    brand(launcher, folder)
    code: int | None = None
    while code is None:
        if signal.sigwait(heard) == signal.SIGTERM:
            os.kill(launcher, signal.SIGKILL)  # not reaped yet, so the number is still its own
        code = reap_dead().get(launcher)
    if left := kill_children():
        print(f"guard: {left} processes of the job do not end", file=sys.stderr)
    return shell_code(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
