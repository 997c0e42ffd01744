"""Communication among all ranks of a run: gather, agree, send.

``DistributedGang`` is for several ranks, ``SoloGang`` for one. Communication runs on the CPU through a separate gloo
group, so it cannot mix with the user's collectives and needs no device. Methods are collective (all ranks call them in
the same order) unless their docstring says otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from spotkeeper.train.core.errors import CallError

_CHUNK = 64 << 20  # bytes per message: 256 MB messages were no faster, and one message per tensor three times slower


class Gang(Protocol):
    """Communication among all ranks of a run, as one rank uses it."""

    rank: int
    world: int
    local_rank: int
    node: int  # index of this rank's machine

    def gather(self, blob: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order, on every rank."""

    def collect(self, blob: bytes) -> Callable[[], list[bytes]]:
        """Start gathering bytes of the same length on every rank; return a function that waits for all ranks' bytes."""

    def highest(self, value: int) -> Callable[[], int]:
        """Start finding the highest value of all ranks; return a function that waits for this value."""

    def share(self, values: tuple[float, ...]) -> Callable[[], list[tuple[float, ...]]]:
        """Start exchanging values; return a function that waits for all ranks' values, in rank order."""

    def send(self, view: memoryview, to: int) -> None:
        """Send bytes to one rank, which calls ``receive``. Not collective."""

    def receive(self, view: memoryview, source: int, landed: Callable[[memoryview], None]) -> None:
        """Receive bytes from one rank; ``landed`` gets each piece as it arrives. Not collective."""


class SoloGang:
    """A gang of one process."""

    rank = 0
    world = 1
    local_rank = 0
    node = 0

    def gather(self, blob: bytes) -> list[bytes]:
        return [blob]

    def collect(self, blob: bytes) -> Callable[[], list[bytes]]:
        return lambda: [blob]

    def highest(self, value: int) -> Callable[[], int]:
        return lambda: value

    def share(self, values: tuple[float, ...]) -> Callable[[], list[tuple[float, ...]]]:
        return lambda: [values]

    def send(self, view: memoryview, to: int) -> None:
        raise AssertionError("send() needs a second rank, but this run has only one rank")

    def receive(self, view: memoryview, source: int, landed: Callable[[memoryview], None]) -> None:
        raise AssertionError("receive() needs a second rank, but this run has only one rank")


class DistributedGang:
    """The ranks of the default process group."""

    def __init__(self) -> None:
        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo")
        self.node, self.local_rank = self._find_place()
        atexit.register(self._end)

    def _end(self) -> None:
        """Destroy the group. Called once the interpreter begins to end: gloo's threads could raise SIGABRT later.

        The threads end once nothing refers to the group, so this method drops the last reference. Python itself would
        drop it too late: the run holds it, and a cycle holds the run (the optimizer has a hook that refers to the run).
        """
        group, self._group = self._group, None
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # the script has already destroyed it
            dist.destroy_process_group(group)

    def _find_place(self) -> tuple[int, int]:
        """Return (node, local rank), from torchrun's variables or, under other launchers, by host names."""
        if "LOCAL_RANK" in os.environ and "GROUP_RANK" in os.environ:
            return int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])
        hosts = self.gather(socket.gethostname().encode())
        mine = hosts[self.rank]
        return list(dict.fromkeys(hosts)).index(mine), hosts[: self.rank].count(mine)

    def gather(self, blob: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        size = torch.tensor([len(blob)])
        dist.all_gather(sizes, size, group=self._group)
        width = max(1, *(int(each) for each in sizes))
        parts = [bytearray(width) for _ in range(self.world)]
        mine = torch.frombuffer(bytearray(blob.ljust(width, b"\0")), dtype=torch.uint8)
        theirs = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
        dist.all_gather(theirs, mine, group=self._group)
        return [bytes(part[: int(each)]) for part, each in zip(parts, sizes, strict=True)]

    def collect(self, blob: bytes) -> Callable[[], list[bytes]]:
        parts = [bytearray(len(blob)) for _ in range(self.world)]
        mine = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        theirs = [torch.frombuffer(part, dtype=torch.uint8) for part in parts]
        work = dist.all_gather(theirs, mine, group=self._group, async_op=True)

        def answer() -> list[bytes]:
            work.wait()
            return [bytes(part) for part in parts]

        return answer

    def highest(self, value: int) -> Callable[[], int]:
        word = torch.tensor([value], dtype=torch.int64)
        work = dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> int:
            work.wait()
            return int(word)

        return answer

    def share(self, values: tuple[float, ...]) -> Callable[[], list[tuple[float, ...]]]:
        mine = torch.tensor(values, dtype=torch.float64)
        theirs = [torch.zeros_like(mine) for _ in range(self.world)]
        work = dist.all_gather(theirs, mine, group=self._group, async_op=True)

        def answer() -> list[tuple[float, ...]]:
            work.wait()
            return [tuple(each.tolist()) for each in theirs]

        return answer

    def send(self, view: memoryview, to: int) -> None:
        for at in range(0, len(view), _CHUNK):
            dist.send(torch.frombuffer(view[at : at + _CHUNK], dtype=torch.uint8), dst=to, group=self._group)

    def receive(self, view: memoryview, source: int, landed: Callable[[memoryview], None]) -> None:
        for at in range(0, len(view), _CHUNK):
            piece = view[at : at + _CHUNK]
            dist.recv(torch.frombuffer(piece, dtype=torch.uint8), src=source, group=self._group)
            landed(piece)


def find_gang() -> Gang:
    """Return the gang of this process.

    Raises:
        CallError: several ranks were started, but no process group exists yet.
    """
    if dist.is_available() and dist.is_initialized():
        return DistributedGang() if dist.get_world_size() > 1 else SoloGang()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CallError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but no process group exists: "
            "call torch.distributed.init_process_group() before spotkeeper.attach()"
        )
    return SoloGang()
