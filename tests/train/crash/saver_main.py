"""A real saver to which something happens in one save: ``saver_main.py POINT STEP TOLD WHAT saver-arguments...``.

Counted from the request to save ``STEP`` until what was too old has been dropped; or, if ``STEP`` is ``IMAGE``, from
the first loss of a trainer that leaves an image until the image is written. Its
pieces are small, so that one checkpoint takes many writes.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from spotkeeper.train.checkpoint import durable, handover, saver

if __package__:
    from tests.train.crash.points import Points, half_of
else:  # run as a file, without site-packages
    from points import Points, half_of

CHANGES = ("mkdir", "open", "posix_fallocate", "ftruncate", "fsync", "replace", "rename", "unlink", "rmdir")
PIECE = 1 << 16
IMAGE = -2


def main() -> int:
    points = Points(int(sys.argv[1]), Path(sys.argv[3]), sys.argv[4])
    _wrap(points)
    _arm_at(points, int(sys.argv[2]))
    durable.CHUNK = PIECE
    code = saver.main(sys.argv[5:])
    points.count()
    return code


def _wrap(points: Points) -> None:
    for name in CHANGES:
        points.before(os, name, disk=True)
    points.within(os, "pwrite", lambda real, args: real(args[0], args[1][: half_of(len(args[1]))], args[2]))
    points.within(os, "write", lambda real, args: real(args[0], args[1][: half_of(len(args[1]))]))
    points.before(os, "close")
    points.before(socket.socket, "sendmsg", "answer")


def _arm_at(points: Points, step: int) -> None:
    if step == IMAGE:
        _arm_at_image(points)
        return
    real = saver.SaverServer._finish

    def finish(self: Any, peer: Any, commit: Any, write: Any) -> None:
        if commit.step != step or write.func.__func__ is not saver.SaverServer._save:
            real(self, peer, commit, write)
            return
        points.arm()
        points.reach("asked")
        real(self, peer, commit, write)
        points.reach("done")
        points.disarm()

    saver.SaverServer._finish = finish  # type: ignore[method-assign]


def _arm_at_image(points: Points) -> None:
    real = handover.Handover._write

    def write(self: Any, *arguments: Any) -> None:
        handover.Handover._write = real  # type: ignore[method-assign]
        points.arm(alone=True)  # meanwhile the saver answers the next trainer
        points.reach("asked")
        real(self, *arguments)
        points.reach("done")
        points.disarm()

    handover.Handover._write = write  # type: ignore[method-assign]


if __name__ == "__main__":
    raise SystemExit(main())
