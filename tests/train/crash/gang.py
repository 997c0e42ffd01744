"""A gang of real trainers and savers in small: what the agent does on each machine, without the machine.

Generation 1 saves, and somebody is killed at a point of its last save. Generation 2 starts
from what is there, says what it found, saves once more and ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing.connection
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotkeeper.train.agent_link.control import NAME, Commit, Control
from spotkeeper.train.checkpoint import saver
from tests.train.crash import mirror, oracle
from tests.train.crash.node import quiet, stopped
from tests.train.crash.points import KILL
from tests.train.crash.trainer import Rank, work
from tests.train.forks import FORKS

KEEP = 3
LIMIT_S = 60.0
NODES = {1: 1, 2: 2, 4: 2}  # machines of a world
# Checkpoints that are there already: none; one of three; all that are kept, so that one goes. "image": with images, of
# which each save is one.
SLOTS = {"first": 0, "middle": 1, "last": KEEP, "mirror": KEEP, "image": KEEP}


@dataclass(frozen=True)
class Victim:
    """Who dies. ``number``: of the rank, or of the node whose saver it is."""

    what: str  # "trainer" or "saver"
    number: int

    def __str__(self) -> str:
        return f"{self.what} {self.number}"


@dataclass(frozen=True)
class Cell:
    """One crash, or one error of the disk. ``point`` 0: nothing happens. ``what``: see ``Points``."""

    world: int
    slot: str
    victim: Victim
    point: int
    what: str = KILL

    @property
    def saves(self) -> tuple[int, ...]:
        """Steps of generation 1 that are saved; the last is the one that is crashed."""
        return tuple(range(2, 2 + 2 * SLOTS[self.slot] + 1, 2))


@dataclass(frozen=True)
class Outcome:
    """``where``: the point at which it happened; '' where the save was over before. ``wrong``: what should not be."""

    cell: Cell
    where: str
    loaded: str  # "older", "new" or "none": what generation 2 found
    wrong: tuple[str, ...]
    skipped: int  # checkpoints it was told of


class Machines:
    """The disks and savers of a gang."""

    def __init__(self, root: Path, world: int, nodes: int = 0) -> None:
        self.root, self.world = root, world
        self.images = False  # whether saves are images
        self.nodes = range(nodes or NODES[world])
        self.disks = [root / f"node{node}" / "ckpt" for node in self.nodes]
        self._savers: dict[int, subprocess.Popen[bytes]] = {}
        for disk in self.disks:
            disk.mkdir(parents=True)

    def start_savers(self, step: int, hurt: tuple[int, int, str] = (-1, 0, KILL)) -> None:
        """Those that are not there. ``hurt``: the node, point and kind of what happens when ``step`` is saved."""
        for node in self.nodes:
            if node not in self._savers or self._savers[node].poll() is not None:
                point = hurt[1] if node == hurt[0] else 0
                argv = saver.command(self._socket(node))
                here = Path(__file__).with_name("saver_main.py")
                argv = [*argv[:2], str(here), str(point), str(step), str(self.points(node)), hurt[2], *argv[3:]]
                env = os.environ | {"PYTHONPATH": str(Path(saver.__file__).parents[3])}
                with (self.root / "savers").open("ab") as log:
                    self._savers[node] = subprocess.Popen(argv, env=env, stdout=log, stderr=log)
        for node in self.nodes:
            self.quiet(node)

    def points(self, node: int) -> Path:
        return self.root / f"points-saver{node}"

    def _socket(self, node: int) -> Path:
        return self.root / f"node{node}" / "saver"

    def quiet(self, node: int) -> bool:
        """Wait until a saver has done all that it was asked; False where it is dead."""
        return quiet(self._socket(node), self._savers[node])

    def saver_pids(self) -> list[int]:
        return [process.pid for process in self._savers.values() if process.poll() is None]

    def end_saver(self, node: int) -> None:
        self._savers[node].kill()
        self._savers[node].wait()

    def lose(self, node: int) -> None:
        """A machine's saver and its disk; its trainers are dead."""
        self.end_saver(node)
        shutil.rmtree(self.disks[node])
        self.disks[node].mkdir()

    def run(
        self, gen: int, saves: tuple[int, ...], dies: dict[int, int], target: Callable[[Rank], None] = work
    ) -> list[int]:
        """One generation; once somebody dies all others are killed, as the agent does. Exit codes by rank."""
        ranks = self._begin(gen, saves, dies, target)
        _await(ranks)
        return [process.exitcode or 0 for process in ranks]

    def run_held(self, gen: int, saves: tuple[int, ...], target: Callable[[Rank], None]) -> list[Any]:
        """One generation whose processes stop at their end, still connected to their savers; the processes."""
        ranks = self._begin(gen, saves, {}, target, held=True)
        if not all(map(stopped, ranks)):
            raise RuntimeError(f"generation {gen} has ended; see {self.root}")
        return ranks

    def _begin(
        self,
        gen: int,
        saves: tuple[int, ...],
        dies: dict[int, int],
        target: Callable[[Rank], None],
        *,
        held: bool = False,
    ) -> list[Any]:
        each = self.world // len(self.nodes)
        ranks = []
        for rank in range(self.world):
            node, local = divmod(rank, each)
            run = self._run_folder(node, gen)
            if not run.exists():
                run.mkdir()
                Control.create(run / NAME).close()
            env = self._environment(node, gen)
            me = Rank(self.root, rank, self.world, local, node, gen, saves, dies.get(rank, 0), env, held)
            ranks.append(FORKS.Process(target=target, args=(me,)))
        for process in ranks:
            process.start()
        return ranks

    def saver_pid(self, node: int) -> int:
        return self._savers[node].pid

    def _run_folder(self, node: int, gen: int) -> Path:
        return self.root / f"node{node}" / f"run{gen}"

    def _environment(self, node: int, gen: int) -> dict[str, str]:
        return {
            "SPOTKEEPER_RUN": str(self._run_folder(node, gen)),
            "SPOTKEEPER_GEN": str(gen),
            "SPOTKEEPER_SLOT": str(node),
            "SPOTKEEPER_SAVER": str(self._socket(node)),
            "SPOTKEEPER_CKPT": str(self.disks[node]),
            "SPOTKEEPER_INTERVAL_S": "1000",
            "SPOTKEEPER_KEEP": str(KEEP),
            "OMP_NUM_THREADS": "1",
            "SPOTKEEPER_SNAPSHOTS": "1" if self.images else "0",
        }

    def told_durable(self, gen: int) -> Commit | None:
        """The newest that any node's trainer told its agent of."""
        told = []
        for node in self.nodes:
            with Control.open(self._run_folder(node, gen) / NAME) as control:
                told.append(control.commit)
        return max((commit for commit in told if commit), default=None)

    def log(self, gen: int, rank: int) -> str:
        return (self.root / f"log{gen}-{rank}").read_text()

    def seen(self, gen: int, rank: int) -> dict[str, Any]:
        path = self.root / f"seen{gen}-{rank}"
        found: dict[str, Any] = (
            json.loads(path.read_text()) if path.exists() else {"step": None, "wrong": ["no attach"]}
        )
        return found

    def first_rank(self, node: int) -> int:
        return node * (self.world // len(self.nodes))

    def end(self) -> None:
        for process in self._savers.values():
            process.terminate()  # it tells its points
            process.wait(LIMIT_S)


def _await(ranks: list[Any]) -> None:
    end = time.monotonic() + LIMIT_S
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        multiprocessing.connection.wait([process.sentinel for process in ranks if process.is_alive()], 1.0)
        if any(process.exitcode for process in ranks):
            break
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()


@contextlib.contextmanager
def machines(root: Path, world: int, nodes: int = 0) -> Iterator[Machines]:
    root.mkdir(parents=True)
    gang = Machines(root, world, nodes)
    try:
        yield gang
    finally:
        gang.end()


def crash(root: Path, cell: Cell) -> Outcome:
    """Run a cell, and judge it."""
    with machines(root, cell.world) as gang:
        where = _first_life(gang, cell)
        outcome = _second_life(gang, cell, where)
    if not outcome.wrong:  # else it is kept, to be looked at
        shutil.rmtree(root)
    return outcome


def _first_life(gang: Machines, cell: Cell) -> str:
    victim, last = cell.victim, cell.saves[-1]
    trainer = victim.what == "trainer"
    gang.start_savers(last, (-1 if trainer else victim.number, cell.point, cell.what))
    gang.images = cell.slot == "image"
    with mirror.running(gang.root, gang.disks[0], cell.saves) if cell.slot == "mirror" else contextlib.nullcontext():
        gang.run(1, cell.saves, {victim.number: cell.point} if trainer else {})
        for node in gang.nodes:
            gang.quiet(node)
    told = gang.root / f"points-{victim.what}{victim.number}"
    return told.read_text().strip() if told.exists() else ""


def _second_life(gang: Machines, cell: Cell, where: str) -> Outcome:
    before = {node: oracle.look(disk) for node, disk in enumerate(gang.disks)}
    newest = oracle.newest(gang.disks)
    acked = gang.told_durable(1)
    wrong = _lost(cell, before, newest, acked)
    if cell.what != KILL and where and acked != Commit(1, cell.saves[-1]):
        wrong += _hidden(gang, cell)
    gang.start_savers(-1)
    then = (newest.step if newest else 0) + 2
    codes = gang.run(2, (then,), {})
    wrong += [f"generation 2: rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    for rank in range(gang.world):
        seen = gang.seen(2, rank)
        if seen["step"] != (newest.step if newest else 0):
            wrong.append(f"rank {rank} began at step {seen['step']}, the newest is {newest}")
        wrong += [f"rank {rank}, step {seen['step']}: {what}" for what in seen["wrong"]]
    told, untold = _told(gang, before)
    wrong += untold
    for node, disk in enumerate(gang.disks):
        gang.quiet(node)
        wrong += _left(disk, Commit(2, then))
    loaded = "none" if newest is None else "new" if newest.step == cell.saves[-1] else "older"
    return Outcome(cell, where, loaded, tuple(wrong), told)


def _lost(
    cell: Cell, before: dict[int, list[oracle.Found]], newest: oracle.Found | None, acked: Commit | None
) -> list[str]:
    """What was durable and is no more."""
    wrong = []
    if acked is not None and (newest is None or (newest.gen, newest.step) < (acked.gen, acked.step)):
        wrong.append(f"{acked} was told to be durable, the newest is {newest}")
    for node, found in before.items():
        good = [each for each in found if not each.why]
        if len(good) < len(cell.saves) - 1 and len(good) < KEEP:
            wrong.append(f"node {node}: only {[each.name for each in good]} of {len(cell.saves) - 1} are left")
    return wrong


def _hidden(gang: Machines, cell: Cell) -> list[str]:
    """A save that failed is told in the job's log, with the disk's own words, and what stays."""
    lines = [line for line in gang.log(1, gang.first_rank(cell.victim.number)).splitlines() if "was not saved" in line]
    reason = os.strerror(getattr(errno, cell.what.rstrip("+"), 0))
    stays = f"1-{cell.saves[-2]} stays the newest; " if len(cell.saves) > 1 else ""
    goes_on = (f"{stays}training goes on", f"{stays}the run ends without this save")
    if any(reason in line and any(words in line for words in goes_on) for line in lines):
        return []
    return [f"a save failed ({reason}), and the log only says {lines}"]


def _told(gang: Machines, before: dict[int, list[oracle.Found]]) -> tuple[int, list[str]]:
    """Whether the log names each checkpoint that was passed over, and why."""
    count, wrong = 0, []
    for node, found in before.items():
        lines = gang.log(2, gang.first_rank(node)).splitlines()
        for each in found:
            if each.why:
                count += 1
                if not any(each.name in line and each.why in line for line in lines):
                    wrong.append(f"node {node}: {each} was passed over, and nobody said so")
    return count, wrong


def _left(disk: Path, newest: Commit) -> list[str]:
    """After a generation that was left alone all is whole, and no more than is kept."""
    found = oracle.look(disk)
    wrong = [f"{disk}: {each} still lies there" for each in found if each.why]
    if not found or found[0].name != str(newest):
        wrong.append(f"{disk}: the newest is {found[:1]}, want {newest}")
    if len(found) > KEEP:
        wrong.append(f"{disk}: {len(found)} are kept")
    return wrong + [f"{disk}: {name} was left behind" for name in oracle.debris(disk)]
