"""Runs one torchrun, returns its failed worker's exit code, and notes when and why each worker failed.

torchrun itself returns 1 for every failure. If one rank fails, its connections close, and the other ranks soon fail
with connection errors; the notes (``error.<local rank>`` in the run folder) show which one was first. A worker notes
its own exception (``note``, called in ``boot.py``); this module notes workers that were killed.

A child that the zygote forks calls :func:`run`; the ``exec`` launcher starts ``python -m
spotkeeper_agent.launcher.torchrun ARG...``. Standard library and torch only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from spotkeeper.train.core.errors import NO_RESTART
from spotkeeper_agent.launcher import output
from spotkeeper_agent.launcher.process import shell_code

NAME = "error"
_TAIL = 16384  # bytes of a log
_LONGEST = 500  # characters of a message
_OF_PEERS = {"DistNetworkError", "DistStoreError"}
# messages of gloo, NCCL and the store about a peer that is gone or does not come
_PEER = re.compile(
    r"gloo/transport|Connection closed by peer|Connection reset by peer|Broken pipe|pair closure"
    r"|ncclRemoteError|ncclSystemError|ncclInternalError|NCCL communicator was aborted|communicator is aborted"
    r"|collective operation timeout|Timed out waiting \d+ms for (recv|send)|Socket Timeout|recvValue failed"
)
_WATCHDOG = re.compile(rb"ProcessGroupNCCL|gloo/transport|Watchdog caught collective")
_FATAL = re.compile(rb"Fatal Python error: [A-Z][\w -]{1,60}")  # written by faulthandler, which ``boot.py`` enables


def run(args: list[str]) -> int:
    """Run torchrun with these arguments to its end.

    Returns:
        0, or the code of the worker that failed first, as a shell shows it (128 + n for signal n); 93 if any worker
        returned 93.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ["SPOTKEEPER_PARENT"] = str(os.getpid())
    _leave_in_turn()
    _show_logs()
    try:
        torchrun.main(args)
    except ChildFailedError as error:
        codes = [failed.exitcode for failed in error.failures.values()]
        print(error, file=sys.stderr)
        if folder := os.environ.get("SPOTKEEPER_RUN"):
            for failed in error.failures.values():
                note_exit(Path(folder), failed.local_rank, failed.exitcode, failed.timestamp)
            note_fatal(Path(folder))
        return NO_RESTART if NO_RESTART in codes else shell_code(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # a busy port, a rendezvous that timed out
        traceback.print_exc()
        return 1
    return 0


def _leave_in_turn() -> None:
    """Let only the first node, which hosts the store, wait for the other nodes at a successful end.

    Torchrun makes every node wait. When the first node ends, the store is gone, and each node that still waits would
    print thirty lines of C++ frames at the end of a successful job's log. The exit codes show how the nodes ended.
    """
    from torch.distributed.elastic.agent.server import api
    from torch.distributed.elastic.utils import store

    check_in = getattr(store, "_barrier_nonblocking", None)
    if check_in is None:  # before torch 2.4
        return
    wait = api.SimpleElasticAgent._exit_barrier

    def leave(agent: api.SimpleElasticAgent) -> None:
        group = agent._worker_group
        if group.group_rank == 0:
            wait(agent)
            return
        with contextlib.suppress(RuntimeError):  # the store is gone: no node waits for this one
            check_in(agent._store, group.group_world_size, api._TERMINAL_STATE_SYNC_ID)

    api.SimpleElasticAgent._exit_barrier = leave


def _show_logs() -> None:
    """Make the log folder readable for the agent, since torchrun makes it private and the agent is another user."""
    from torch.distributed.elastic.multiprocessing import api

    make = api.DefaultLogsSpecs._make_log_dir

    def shown(specs: api.DefaultLogsSpecs, log_dir: str | None, run_id: str) -> str:
        folder: str = make(specs, log_dir, run_id)
        Path(folder).chmod(0o775)
        return folder

    api.DefaultLogsSpecs._make_log_dir = shown


# -- why a worker failed: notes in the run folder


def note(run: Path, local_rank: int, error: BaseException) -> None:
    """Write into the run folder which exception ends this worker."""
    what = traceback.format_exception_only(type(error), error)[-1].strip()
    _write(run, local_rank, time.time(), what, follows(error))


def note_exit(run: Path, local_rank: int, code: int, at: float) -> None:
    """Write a failed worker's note unless the worker has. ``code`` is -n for a worker killed by signal n."""
    if not (run / f"{NAME}.{local_rank}").exists():
        what = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        # torchrun sends SIGTERM to a failed worker's neighbours; NCCL's watchdog aborts because of a peer.
        after = code == -signal.SIGTERM or (code == -signal.SIGABRT and _log_names_peer(run, local_rank))
        _write(run, local_rank, at, what, after)


def note_fatal(run: Path) -> None:
    """Write the notes of workers that had crashed but seemed healthy to torchrun, while they wrote a core dump."""
    for log in run.glob("logs/*/*/*/stderr.log"):
        local_rank, tail = log.parent.name, output.tail(log, _TAIL)
        found = _FATAL.search(tail)
        if found and local_rank.isdecimal() and not (run / f"{NAME}.{local_rank}").exists():
            after = _WATCHDOG.search(tail) is not None
            _write(run, int(local_rank), log.stat().st_mtime, found[0].decode(), after)


def follows(error: BaseException) -> bool:
    """Whether this error, or one in its chain, reports only that a peer or the connection to it is gone."""
    return any(_is_of_peer(each) for each in _chain(error))


def _is_of_peer(error: BaseException) -> bool:
    if type(error).__name__ in _OF_PEERS:
        return True
    # Only a RuntimeError: a data loader's own connection may be reset as well.
    return isinstance(error, RuntimeError) and _PEER.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and not any(at is one for one in seen):
        seen.append(at)
        yield at
        at = at.__cause__ or at.__context__


def _log_names_peer(run: Path, local_rank: int) -> bool:
    return any(_WATCHDOG.search(output.tail(log, _TAIL)) for log in run.glob(f"logs/*/*/{local_rank}/stderr.log"))


def _write(run: Path, local_rank: int, at: float, what: str, after: bool) -> None:
    path = run / f"{NAME}.{local_rank}"
    with contextlib.suppress(OSError):  # a full disk must not hide the failure
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(json.dumps({"at": at, "what": what[:_LONGEST], "follows": after}))
        temporary.replace(path)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
