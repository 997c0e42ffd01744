"""A flipped byte in every file of a checkpoint, in one machine's copy or in all: what loads, and what is said."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from spotkeeper.train.agent_link.control import Commit
from tests.train.crash import oracle
from tests.train.crash.gang import NODES, SLOTS, Machines, machines

FILES = ("state.bin", "skeleton.pkl", "COMMIT")
PLACES = {"first": 0.0, "middle": 0.5, "last": 1.0}
SAVES = (2, 4)


@dataclass(frozen=True)
class Flip:
    """One byte. ``everywhere``: in each machine's copy, else in the first one's."""

    world: int
    file: str
    place: str
    everywhere: bool


def flips() -> list[Flip]:
    every = [Flip(*each) for each in product(NODES, FILES, PLACES, (True, False))]
    return [flip for flip in every if flip.everywhere or NODES[flip.world] > 1]


def prepare(root: Path, world: int) -> None:
    """Two checkpoints on each machine of a gang."""
    with machines(root, world) as gang:
        gang.start_savers(-1)
        codes = gang.run(1, SAVES, {})
        if any(codes):
            raise RuntimeError(f"nobody hurts these: exit codes {codes}; see {root}")


def try_flip(prepared: Path, root: Path, flip: Flip) -> list[str]:
    """A generation over damaged copies; what was wrong with it."""
    with machines(root, flip.world) as gang:
        for node, disk in enumerate(gang.disks):
            shutil.copytree(prepared / f"node{node}" / "ckpt", disk, dirs_exist_ok=True)
            if flip.everywhere or node == 0:
                _flip(disk / str(Commit(1, SAVES[-1])) / flip.file, PLACES[flip.place])
        wrong = _judge(gang, flip)
    if not wrong:
        shutil.rmtree(root)
    return wrong


def _judge(gang: Machines, flip: Flip) -> list[str]:
    damaged = [node for node, disk in enumerate(gang.disks) if len(oracle.whole(disk)) < len(SAVES)]
    if flip.file != "COMMIT" or flip.place != "last":  # the last byte of COMMIT is white space
        assert damaged == [node for node in gang.nodes if flip.everywhere or node == 0]
    want = oracle.newest(gang.disks)
    assert want is not None
    gang.start_savers(-1)
    codes = gang.run(2, (want.step + 2,), {})
    wrong = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    for rank in range(gang.world):
        seen = gang.seen(2, rank)
        if seen["step"] != want.step or seen["wrong"]:
            wrong.append(f"rank {rank} began with {seen}, want step {want.step}")
    name = str(Commit(1, SAVES[-1]))
    for node in damaged:
        log = gang.log(2, gang.first_rank(node)).splitlines()
        if not any(name in line and flip.file in line for line in log):
            wrong.append(f"node {node}: nobody said that {flip.file} of {name} is damaged")
        gang.quiet(node)
        if any(each.why for each in oracle.look(gang.disks[node])):
            wrong.append(f"node {node}: {name} still lies among the good ones, and counts as one that is kept")
    return wrong


def _flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[round(place * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


__all__ = ["SLOTS", "Flip", "flips", "prepare", "try_flip"]
