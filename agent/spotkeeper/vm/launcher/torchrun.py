"""One torchrun, and the exit code it hides: torchrun returns 1 whatever its worker returned.

Called in a child forked by the zygote, or as ``python -m spotkeeper.vm.launcher.torchrun ARG...``
by the ``exec`` launcher. Standard library and torch only.
"""

from __future__ import annotations

import os
import sys
import traceback

from spotkeeper.train.errors import NO_RESTART
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
    try:
        torchrun.main(args)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        print(error, file=sys.stderr)
        return NO_RESTART if NO_RESTART in codes else shell_code(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # a busy port, a rendezvous that timed out
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
