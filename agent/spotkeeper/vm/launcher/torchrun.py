"""One torchrun, and the exit code it hides: torchrun returns 1 whatever its worker returned.

Called in a child forked by the zygote, or as ``python -m spotkeeper.vm.launcher.torchrun ARG...``
by the ``exec`` launcher. Standard library and torch only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path

from spotkeeper.train.errors import NO_RESTART
from spotkeeper.vm.launcher import failure
from spotkeeper.vm.launcher.process import shell_code


def run(args: list[str]) -> int:
    """Run torchrun with these arguments to its end.

    Returns:
        0, or the code of the worker that failed first (93 if any said so, for it beats every other code), as a shell
        shows it: a worker killed by signal n gives 128 + n.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ["SPOTKEEPER_PARENT"] = str(os.getpid())
    _leave_in_turn()
    try:
        torchrun.main(args)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        print(error, file=sys.stderr)
        if folder := os.environ.get("SPOTKEEPER_RUN"):
            for failed in error.failures.values():
                failure.note_exit(Path(folder), failed.local_rank, failed.exitcode, failed.timestamp)
            failure.note_fatal(Path(folder))
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
    """Of all nodes whose workers have ended well, only the first waits for the others: it has the store.

    torchrun has every node wait, and the first one's end then breaks off the others' wait: thirty lines of C++ frames
    at the end of the log of a job that succeeded. Which node succeeded its own exit code tells.
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
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody waits for this node
            check_in(agent._store, group.group_world_size, api._TERMINAL_STATE_SYNC_ID)

    api.SimpleElasticAgent._exit_barrier = leave


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
