"""A saver whose disk refuses one kind of change: `failing_saver.py CALL ERRNO FLAG saver-arguments...`.

While the file FLAG exists, that call of ``os`` fails so; everything else is real.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any


def main() -> int:
    from spotkeeper.train.checkpoint import saver

    name, number, flag = sys.argv[1], getattr(errno, sys.argv[2]), sys.argv[3]
    real: Callable[..., Any] = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if os.path.exists(flag):  # noqa: PTH110 - pathlib would call what is being replaced
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    setattr(os, name, call)
    return saver.main(sys.argv[4:])


if __name__ == "__main__":
    raise SystemExit(main())
