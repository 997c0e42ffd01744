"""The part of the agent that runs in the *job's* Python: the launcher and the first lines of every worker.

Standard library and torch only. The agent puts this package on the job's Python path, so it must not import any other
module of the agent. Agent and launcher communicate through one unix socket (``server.py``).

``__main__.py`` the launcher in its two modes · ``server.py`` its socket, on the loop of ``lines.py`` · ``torchrun.py``
one torchrun, and notes on failed workers · ``boot.py`` the first lines of every worker · ``host.py`` the jobs' systemd
unit · ``pyenv.py`` the job's own Python environment · ``image.py`` its container image.

**No process outlives its generation.** The launcher's parent is its guard (``guard.py``). The guard is a subreaper: if
the launcher is killed, the guard becomes the parent of the launcher's processes, even of daemons, and ends them. If
launcher, guard and agent are killed at once, and no cgroup of systemd contains the job, the sweep before the next
generation finds such daemons by a resource limit that all descendants of a launcher inherit (``process.tag``). Workers
print into a pipe; at the pipe's other end a process keeps the log file short while it grows (``output.py``).

**Stack traces.** Each worker writes its stack traces on a real-time signal (``stacks.py``): faulthandler's handler runs
in C, so it also shows a call that does not release the GIL, and forked loader workers inherit the handler. A small
process signals one worker after the other, skips processes without the handler, and classifies each worker by the
innermost calls of its main thread.

**First failure.** If one rank fails, its connections close and its peers fail too. Each worker notes when and why it
failed (``error.<local rank>``, ``torchrun.py``), and torchrun notes workers that were killed. With the fact EXIT the
agent reports the machine's earliest failure that no peer caused. The earliest of the failures that the machines report
counts as the cause of the crash.
"""
