"""A saver that is killed at its n-th change of the disk: `crashing_saver.py N saver-arguments...`.

It prints how many changes it made when it ends by itself, so that a test knows all of them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

CHANGES = ("mkdir", "open", "posix_fallocate", "pwrite", "write", "ftruncate", "fsync", "replace", "unlink", "rmdir")


def main() -> int:
    from spotkeeper.train import saver

    last = int(sys.argv[1])
    done = 0

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **kwargs)

        return call

    for name in CHANGES:
        setattr(os, name, dying(getattr(os, name)))
    code = saver.main(sys.argv[2:])
    print(done, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
