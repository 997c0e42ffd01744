"""All ranks of a run as one: gather, agree, send. One class for many ranks, one for a single process.

Works on the processes' CPU side only, through a gloo group of its own, so nothing here can
mix with the user's collectives or needs a device. Every method is collective unless it
says so: all ranks call it, in the same order.
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

from spotkeeper.train.errors import CallError

_CHUNK = 64 << 20  # bytes a message: 256 MB was no faster, and one per tensor three times slower


class Gang(Protocol):
    """What the library needs of the ranks."""

    rank: int
    world: int
    local_rank: int
    node: int  # index of this rank's machine

    def gather(self, blob: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, on every rank."""

    def highest(self, value: int) -> Callable[[], int]:
        """Start to find the highest of all ranks' values; the answer waits for it."""

    def share(self, values: tuple[float, ...]) -> Callable[[], list[tuple[float, ...]]]:
        """Start to tell all ranks as many numbers each; the answer, by rank, waits for them."""

    def send(self, view: memoryview, to: int) -> None:
        """To one rank, that calls ``receive``. Not collective."""

    def receive(self, view: memoryview, source: int, landed: Callable[[memoryview], None]) -> None:
        """From one rank; ``landed`` is called with each piece. Not collective."""


class Solo:
    """One process."""

    rank = 0
    world = 1
    local_rank = 0
    node = 0

    def gather(self, blob: bytes) -> list[bytes]:
        return [blob]

    def highest(self, value: int) -> Callable[[], int]:
        return lambda: value

    def share(self, values: tuple[float, ...]) -> Callable[[], list[tuple[float, ...]]]:
        return lambda: [values]

    def send(self, view: memoryview, to: int) -> None:
        raise AssertionError("one process has nobody to send to")

    def receive(self, view: memoryview, source: int, landed: Callable[[memoryview], None]) -> None:
        raise AssertionError("one process has nobody to receive from")


class Ranks:
    """The ranks of the default process group."""

    def __init__(self) -> None:
        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo")
        self.node, self.local_rank = self._find_place()
        atexit.register(self._end)

    def _end(self) -> None:
        """Join gloo's threads while the interpreter is whole: one that outlives it ends a good run with SIGABRT.

        The last reference to a group joins its threads, without the interpreter's lock. A run is part of
        reference cycles (its hook on the optimizer), so it would not go by itself before it is too late.
        """
        group, self._group = self._group, None
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # the user has destroyed it already
            dist.destroy_process_group(group)

    def _find_place(self) -> tuple[int, int]:
        """Node and local rank: torchrun says so; other launchers' ranks compare their hosts' names."""
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
    """The ranks of this run.

    Raises:
        CallError: torchrun started several ranks, and the process group does not exist yet.
    """
    if dist.is_available() and dist.is_initialized():
        return Ranks() if dist.get_world_size() > 1 else Solo()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CallError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group: "
            "call torch.distributed.init_process_group() before spotkeeper.attach()"
        )
    return Solo()
