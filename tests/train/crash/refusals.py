"""Saves that are refused something, at every point: training goes on, SIGTERM is obeyed, and the next save works.

Ranks run as on a laptop or under Slurm: without an agent, each machine's first rank with a private saver and with the
library's signal handlers. One save of one machine is refused something; then the cause goes, another save follows, and
SIGTERM. Or the cause stays, and SIGTERM follows at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from spotkeeper.train.checkpoint import saver
from tests.train.crash import oracle
from tests.train.crash.gang import Victim
from tests.train.crash.plan import spread
from tests.train.crash.refusing_saver import (
    DISK,
    FSIZE,
    GROUPS,
    KILL,
    MEMORY,
    MEMORY_FILES,
    STOP,
    THREAD,
    UNLIMITED,
    Refusal,
    no_memory_group,
)
from tests.train.crash.trainer import Rank, Stamped, _settle_in
from tests.train.forks import FORKS

WORLDS = (1, 2)
LIMIT_S = 90.0
PATIENCE_S = 4.0  # instead of the library's, for a saver that is stopped
SAVERS = (FSIZE, DISK, MEMORY, THREAD, STOP, KILL, "ENOSPC", "EIO+", "EMFILE", "EMFILE+")
TRAINERS = ("ENOMEM", "ENOMEM+", "EMFILE+", "EPIPE+")
SLOTS = {"first": 2, "later": 4}  # the step whose save is refused something; another is there already, or none
WORDS = {
    FSIZE: "File too large",
    DISK: "No space left",
    MEMORY: "memory limit of control group",
    THREAD: "can't start new thread",
    STOP: "has done nothing",
    KILL: "the saver",
}


@dataclass(frozen=True)
class Cell:
    """One refusal. ``point`` 0: none. ``lifted``: the cause goes before the next save."""

    world: int
    slot: str
    victim: Victim
    point: int
    what: str
    lifted: bool


def missing(what: str) -> str:
    """Why this cannot be tried here; "" if it can."""
    if what == MEMORY:
        return no_memory_group()
    if what == DISK and os.geteuid():
        return "a disk of its own can be mounted by root only"
    return ""


def refuse(root: Path, cell: Cell) -> list[str]:
    """Run it; what was wrong."""
    root.mkdir(parents=True)
    with _tank(root, cell.what):
        ranks = [FORKS.Process(target=_work, args=(_rank(root, cell, rank), cell)) for rank in range(cell.world)]
        for process in ranks:
            process.start()
        codes = _codes(ranks)
        wrong = _judge(root, cell, codes)
        if not cell.point:
            shutil.copy(root / "hit", root.parent / f"{cell.victim.what}-points")
    if not wrong:
        shutil.rmtree(root)
    return wrong


def cells(world: int, slot: str, names: dict[str, list[str]], count: int) -> Iterator[Cell]:
    """Each kind at ``count`` points of the last machine's processes; the cause goes at every other one."""
    for what, kinds in (("saver", SAVERS), ("trainer", TRAINERS)):
        for kind in kinds:
            fit = [at for at, name in enumerate(names[what], 1) if kind != THREAD or name == THREAD]
            for number, point in enumerate(spread(fit, count)):
                yield Cell(world, slot, Victim(what, world - 1), point, kind, lifted=number % 2 == 0)


def survey(root: Path, slot: str) -> dict[str, list[str]]:
    """The names of the points of a trainer and of a saver."""
    for what in ("trainer", "saver"):
        if wrong := refuse(root / what, Cell(1, slot, Victim(what, 0), 0, "EIO", lifted=True)):
            raise RuntimeError(f"a run that nobody hurts: {wrong}")
    return {what: json.loads((root / f"{what}-points").read_text()) for what in ("trainer", "saver")}


def _codes(ranks: list[Any]) -> list[int]:
    """As they end by themselves: a rank that hangs is killed at the limit, and shows."""
    end = time.monotonic() + LIMIT_S
    for process in ranks:
        process.join(max(0.1, end - time.monotonic()))
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in ranks]


def _rank(root: Path, cell: Cell, rank: int) -> Rank:
    hurt = rank == cell.victim.number
    env = {
        "SPOTKEEPER_CKPT": str(_disk(root, cell, rank)),
        "SPOTKEEPER_INTERVAL_S": "1000",
        "REFUSAL_AT": "ReserveRequest" if cell.slot == "first" else f"0-{SLOTS[cell.slot]}",
    }
    if hurt and cell.victim.what == "saver":
        paths = (root / "hit", root / "lifted", root / "tank")
        env["REFUSAL"] = " ".join(map(str, (cell.point, cell.what, *paths)))
    return Rank(root, rank, cell.world, 0, rank, 0, (SLOTS[cell.slot],), cell.point if hurt else 0, env)


def _disk(root: Path, cell: Cell, node: int) -> Path:
    return root / ("tank/ckpt" if cell.what == DISK and node == cell.victim.number else "ckpt")


def _folder(root: Path, cell: Cell, node: int) -> Path:
    """Where a node's checkpoints lie: the library gives each machine a folder of its own."""
    return _disk(root, cell, node) / f"node{node}" if cell.world > 1 else _disk(root, cell, node)


# ------------------------------------------------------------ in a rank


def _work(me: Rank, cell: Cell) -> None:
    victim, at = me.rank == cell.victim.number, SLOTS[cell.slot]
    if victim and cell.what == MEMORY:
        (me.root / "tank/cgroup.procs").write_text(str(os.getpid()))
    _settle_in(me)
    import spotkeeper
    from spotkeeper.train.checkpoint import connection
    from spotkeeper.train.loop import boundary

    boundary.EVERY_S, connection.PATIENCE_S = 0.0, PATIENCE_S
    points = None
    if "REFUSAL" in me.env:
        os.environ["PYTHONPATH"] = str(Path(saver.__file__).parents[3])
        connection.saver = SimpleNamespace(__file__=str(Path(__file__).with_name("refusing_saver.py")))  # type: ignore[assignment]
    elif victim:
        points = Refusal(me.dies, cell.what, me.root / "hit", me.root / "lifted", me.root / "tank")
        _wrap(points)
    model = Stamped()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = spotkeeper.attach(model, optimizer)
    for _ in run.steps(range(10_000), steps=10_000):
        for weight in model.weights:
            weight.grad = -torch.ones_like(weight)
        optimizer.step()
        step = run.steps_done
        if points is not None and step == at - 1:  # in the first slot that is before memory is asked for
            points.arm()
        if step in (SLOTS["first"], at):
            run.save()
        if step == at and victim and cell.lifted:
            _lift(me, cell, run._boundary.writer.client)
        if step == at + 2 and cell.lifted:
            commit = run.save()
            (me.root / f"saved{me.rank}").write_text(str(commit))
        if step == (at + 3 if cell.lifted else at) and not me.rank:
            if points is not None and not cell.point:
                points.count()
            os.kill(os.getpid(), signal.SIGTERM)


def _wrap(points: Refusal) -> None:
    """What a trainer needs for a save from its machine."""
    points.before(mmap, "mmap", disk=True)
    points.before(socket.socket, "sendall", "ask", disk=True)
    points.before(socket.socket, "recvmsg", "hear", disk=True)
    points.before(socket, "socketpair", disk=True)
    points.before(subprocess, "Popen", "start", disk=True)


def _lift(me: Rank, cell: Cell, client: Any) -> None:
    """The cause goes; other steps of the gang are no part of it."""
    (me.root / "lifted").touch()
    if cell.what == DISK:
        (me.root / "tank/fill").unlink(missing_ok=True)
    elif cell.what == MEMORY:
        (me.root / "tank" / MEMORY_FILES[0]).write_text(UNLIMITED)
    elif cell.what == FSIZE and client is not None:
        resource.prlimit(client.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


# ------------------------------------------------------------ around it


@contextlib.contextmanager
def _tank(root: Path, what: str) -> Iterator[None]:
    """What can be filled: a disk of 8 MB, or a control group. Both go with their last process."""
    tank = root / "tank"
    if what == MEMORY:
        group = GROUPS / f"crash-{os.getpid()}-{root.name}"
        group.mkdir()
        tank.symlink_to(group)
    elif what == DISK:
        tank.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tank)], check=True)
    try:
        yield
    finally:
        if what == DISK:
            subprocess.run(["umount", "-l", str(tank)], check=True)
        elif what == MEMORY:
            tank.resolve().rmdir()
            tank.unlink()


def _judge(root: Path, cell: Cell, codes: list[int]) -> list[str]:
    at = SLOTS[cell.slot]
    wrong = [f"rank {rank} ended with {code}: {_log(root, rank)[-300:]}" for rank, code in enumerate(codes) if code]
    hit = cell.point and (root / "hit").exists()
    for node in range(cell.world):
        whole = {each.step for each in oracle.whole(_folder(root, cell, node))}
        refused = hit and node == cell.victim.number
        if cell.lifted and max(whole, default=0) < at + 3:
            wrong.append(f"node {node}: after SIGTERM there is only {whole}")
        if cell.lifted and (root / f"saved{node}").read_text() != f"0-{at + 2}":
            wrong.append(f"node {node}: the save after it: {(root / f'saved{node}').read_text()}")
        if not (cell.lifted or refused) and max(whole, default=0) < at:
            wrong.append(f"node {node}, to which nothing happened, has only {whole}")
        if refused and cell.slot == "later" and not cell.lifted and not whole:
            wrong.append("the older checkpoint is gone")
        if refused and not cell.lifted and at not in whole and not _says(_log(root, node), cell.what):
            wrong.append(f"node {node}: nothing says why: {_log(root, node)[-400:]}")
    return wrong


def _says(log: str, what: str) -> bool:
    """Whether a line has the reason, and what becomes of the run."""
    number = getattr(errno, what.rstrip("+"), None)
    words = WORDS[what] if number is None else os.strerror(number)
    ends = any("training goes on" in line or "the run ends without this save" in line for line in log.splitlines())
    return words in log and ends


def _log(root: Path, rank: int) -> str:
    return (root / f"log0-{rank}").read_text()
