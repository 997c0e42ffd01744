"""Why a worker failed, for whoever looks for the first of a gang: ``error.<local rank>`` in the run folder.

Where one rank fails, the others fail soon after, of the connection that it closed. Each worker notes when and of
what (``note``, by ``boot.py``); of one that was killed torchrun does (``note_exit``). Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from spotkeeper.vm.launcher import output

NAME = "error"
_TAIL = 16384  # bytes of a log
_LONGEST = 500  # characters of a message
_OF_PEERS = {"DistNetworkError", "DistStoreError"}
# gloo's, NCCL's and the store's own words for a peer that is gone, or that does not come
_PEER = re.compile(
    r"gloo/transport|Connection closed by peer|Connection reset by peer|Broken pipe|pair closure"
    r"|ncclRemoteError|ncclSystemError|ncclInternalError|NCCL communicator was aborted|communicator is aborted"
    r"|collective operation timeout|Timed out waiting \d+ms for (recv|send)|Socket Timeout|recvValue failed"
)
_WATCHDOG = re.compile(rb"ProcessGroupNCCL|gloo/transport|Watchdog caught collective")
_FATAL = re.compile(rb"Fatal Python error: [A-Z][\w -]{1,60}")  # faulthandler's, which ``boot.py`` turns on


def note(run: Path, local_rank: int, error: BaseException) -> None:
    """Of a worker that an exception ends."""
    what = traceback.format_exception_only(type(error), error)[-1].strip()
    _write(run, local_rank, time.time(), what, follows(error))


def note_exit(run: Path, local_rank: int, code: int, at: float) -> None:
    """Of a worker that ended otherwise (``code`` negative: by a signal), unless it has noted itself why."""
    if not (run / f"{NAME}.{local_rank}").exists():
        what = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        # SIGTERM is torchrun's, to the others on its node; NCCL's watchdog aborts for a peer's sake.
        after = code == -signal.SIGTERM or (code == -signal.SIGABRT and _spoke_of_a_peer(run, local_rank))
        _write(run, local_rank, at, what, after)


def note_fatal(run: Path) -> None:
    """Of workers that died of themselves, and that torchrun took for healthy when it ended them: a core takes time."""
    for log in run.glob("logs/*/*/*/stderr.log"):
        local_rank, tail = log.parent.name, output.tail(log, _TAIL)
        found = _FATAL.search(tail)
        if found and local_rank.isdigit() and not (run / f"{NAME}.{local_rank}").exists():
            after = _WATCHDOG.search(tail) is not None
            _write(run, int(local_rank), log.stat().st_mtime, found[0].decode(), after)


def follows(error: BaseException) -> bool:
    """Whether it tells only that a peer, or the connection to it, is gone."""
    return any(_is_of_a_peer(each) for each in _chain(error))


def _is_of_a_peer(error: BaseException) -> bool:
    if type(error).__name__ in _OF_PEERS:
        return True
    # A RuntimeError alone: a data loader's own connection may be reset as well, and that is no peer's.
    return isinstance(error, RuntimeError) and _PEER.search(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and not any(at is one for one in seen):
        seen.append(at)
        yield at
        at = at.__cause__ or at.__context__


def _spoke_of_a_peer(run: Path, local_rank: int) -> bool:
    return any(_WATCHDOG.search(output.tail(log, _TAIL)) for log in run.glob(f"logs/*/*/{local_rank}/stderr.log"))


def _write(run: Path, local_rank: int, at: float, what: str, after: bool) -> None:
    path = run / f"{NAME}.{local_rank}"
    with contextlib.suppress(OSError):  # a full disk must not hide the failure itself
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(json.dumps({"at": at, "what": what[:_LONGEST], "follows": after}))
        temporary.replace(path)
