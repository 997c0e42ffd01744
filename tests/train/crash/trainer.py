"""The job of the crash tests: every tensor of its state tells the step it is of, so a mixture shows.

Runs in a forked process per rank, without torchrun; what is under test is the library.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spotkeeper.train.checkpoint.seal import AREA
from tests.train.crash import mirror
from tests.train.crash.points import Call, Points

WIDTHS = (1, 7, 500, 4096, 40_000, 64, 1000, 2, 9999, 128, 30, 5000)  # floats in each parameter
SAVED, IMAGED = 2, 7  # a step that ``work_into_images`` saves, and the one after which its points begin


@dataclass(frozen=True)
class Rank:
    """One process of one generation.

    ``saves``: the steps it saves, each durable before the next; it waits for the last one,
    too, then ends. ``dies``: the point of the last save at which it dies; 0: never.
    """

    root: Path
    rank: int
    world: int
    local_rank: int
    node: int
    gen: int
    saves: tuple[int, ...]
    dies: int
    env: dict[str, str]
    held: bool = False  # at its end it stops, and does not end

    @property
    def told(self) -> Path:
        """Its points, or the one it died at."""
        return self.root / f"points-trainer{self.rank}"

    @property
    def seen(self) -> Path:
        """What it found in its state when it began."""
        return self.root / f"seen{self.gen}-{self.rank}"


class Stamped(nn.Module):
    """Parameters that are a function of the step (``expected``), and buffers that are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(width)) for width in WIDTHS])
        self.register_buffer("mine", torch.zeros(300))


class Counter:
    """A part of the script's own."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"number": 0, "tensor": torch.zeros(2000, dtype=torch.float64)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def work(me: Rank) -> None:
    """One rank, from ``attach`` to the end of its last save."""
    _settle_in(me)
    import spotkeeper

    points = Points(me.dies, me.told)
    model, counter = Stamped(), Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    run = spotkeeper.attach(model, optimizer, counter=counter)
    me.seen.write_text(
        json.dumps({"step": run.steps_done, "wrong": _wrong(run.steps_done, me.rank, model, optimizer, counter)})
    )
    for _ in run.steps(range(1000), steps=1000):
        for weight in model.weights:
            weight.grad = -torch.ones_like(weight)
        optimizer.step()
        step = run.steps_done
        model.mine.fill_(step * 100 + me.rank)
        counter.state = {"number": step, "tensor": torch.full((2000,), float(step), dtype=torch.float64)}
        if step == me.saves[-1]:
            break
        if step in me.saves:
            run.save()
    mirror.await_ready(me.root)
    _wrap(points)
    points.arm()
    run.save(wait=False)
    run.wait()
    points.disarm()
    points.count()
    os._exit(0)  # nothing of the interpreter's end is under test


def work_with_images(me: Rank) -> None:
    """Keep images and save nothing. ``saves``: the last step; ``dies``: the step of its death.

    It dies between a boundary and the optimizer's step, while a copy may run.
    """
    _settle_in(me)

    def between(run: Any) -> None:
        if me.dies and run.steps_done == me.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    _keep_images(me, between)


def work_into_images(me: Rank) -> None:
    """Save a step, then keep images. ``saves``: the last step; ``dies``: the point of an image at which it dies."""
    _settle_in(me)
    points = Points(me.dies, me.told)

    def between(run: Any) -> None:
        if run.steps_done == SAVED:
            run.save()
        elif run.steps_done == IMAGED:
            _wrap_images(points)
            points.arm()
        elif run.steps_done == IMAGED + 3:  # with an image in between, at least
            points.disarm()
            points.count()

    _keep_images(me, between)


def work_from_image(me: Rank) -> None:
    """Begin with what is there. ``dies``: the point of ``attach`` at which it dies."""
    _settle_in(me)
    import spotkeeper
    from spotkeeper.train.checkpoint import restore
    from spotkeeper.train.core import gang

    points = Points(me.dies, me.told)
    for name in ("gather", "send", "receive"):
        points.before(gang.DistributedGang, name)
    points.before(restore, "thaw")
    points.before(socket.socket, "sendall", "ask")
    points.before(socket.socket, "recvmsg", "hear")
    model = Stamped()
    points.arm()
    spotkeeper.attach(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0), counter=Counter())
    points.disarm()
    points.count()
    os._exit(0)


def work_until_warm(me: Rank) -> None:
    """Begin with what is there, and die once the saver has allocated memory for the first image."""
    _settle_in(me)
    from spotkeeper.train.core import pace

    pace.SavePace.image_due = pace.SavePace.due = lambda *_, **__: False  # type: ignore[method-assign]
    steps: list[int] = []

    def between(run: Any) -> None:
        steps.append(run.steps_done)
        if len(steps) == 2:  # the loop has asked for memory after the first step
            client = run._boundary.writer.client
            while client is not None and not client.images._maps:
                client._read_soon()
            if me.world > 1:
                dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    _keep_images(me, between)


def _keep_images(me: Rank, between: Callable[[Any], None]) -> None:
    """Keep an image after each agreement. ``between`` is called before each step of the optimizer."""
    os.environ["SPOTKEEPER_SNAPSHOTS"] = "1"
    import spotkeeper
    from spotkeeper.train.core import pace
    from spotkeeper.train.loop import boundary

    pace.SavePace.image_interval_s = boundary.EVERY_S = 0.0  # type: ignore[assignment]
    model, counter = Stamped(), Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    run = spotkeeper.attach(model, optimizer, counter=counter)
    me.seen.write_text(
        json.dumps({"step": run.steps_done, "wrong": _wrong(run.steps_done, me.rank, model, optimizer, counter)})
    )
    client = run._boundary.writer.client
    for _ in run.steps(range(1000), steps=1000):
        for weight in model.weights:
            weight.grad = -torch.ones_like(weight)
        between(run)
        optimizer.step()
        step = run.steps_done
        model.mine.fill_(step * 100 + me.rank)
        counter.state = {"number": step, "tensor": torch.full((2000,), float(step), dtype=torch.float64)}
        for number in (0, 1, 2):  # all memories are there before the first image
            while step == 1 and client is not None and client.image(number, 4 << 20) is None:
                client._read_soon()
        if step == me.saves[-1]:
            break  # without the save of a loop's end
    if me.held:
        run._boundary.copied()
        os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)


def _settle_in(me: Rank) -> None:
    log = os.open(me.root / f"log{me.gen}-{me.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(me.env, RANK=f"{me.rank}", WORLD_SIZE=f"{me.world}")
    os.environ.update(LOCAL_RANK=f"{me.local_rank}", GROUP_RANK=f"{me.node}")
    torch.set_num_threads(1)
    if me.world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{me.root}/store{me.gen}", rank=me.rank, world_size=me.world
        )


def _wrong(step: int, rank: int, model: Stamped, optimizer: torch.optim.Optimizer, counter: Counter) -> list[str]:
    """Names of what is not of this step; whole tensors are compared."""
    wrong = []

    def compare(name: str, tensor: Tensor | None, value: float) -> None:
        if tensor is None or not bool((tensor == value).all()):
            wrong.append(f"{name} is {None if tensor is None else tensor.unique()[:3].tolist()}, want {value}")

    for number, weight in enumerate(model.weights):
        compare(f"weight {number}", weight.detach(), step * (step + 1) / 2)
        if step:
            compare(f"moment {number}", optimizer.state[weight].get("momentum_buffer"), -step)
    compare("buffer", model.mine, step * 100 + rank if step else 0)  # type: ignore[arg-type]
    compare("counter", counter.state["tensor"], step)
    if counter.state["number"] != step:
        wrong.append(f"number is {counter.state['number']}, want {step}")
    return wrong


def _wrap_images(points: Points) -> None:
    """What a trainer does for an image: gather with the others, break the seal, copy, seal."""
    from spotkeeper.train.core import gang

    points.before(gang.DistributedGang, "gather")
    _wrap_copy(points)


def _wrap_copy(points: Points) -> None:
    """The copy into the memory, and the seal of an image."""
    from spotkeeper.train.checkpoint import writer

    def half_broken(real: Call, args: tuple[Any, ...]) -> None:
        at = len(args[0]) - AREA
        args[0][at : at + 20] = bytes(20)

    def half_sealed(real: Call, args: tuple[Any, ...]) -> None:
        real(*args)
        at = len(args[0]) - AREA
        args[0][at + 20 : at + 40] = bytes(20)

    points.before(writer, "Image", "image")
    points.within(writer, "break_seal", half_broken)
    points.within(ctypes, "memmove", lambda real, args: real(args[0], args[1], args[2] // 2))
    points.within(writer, "seal", half_sealed)


def _wrap(points: Points) -> None:
    """What a trainer does in a save: gather with the others, copy into the memory, ask, hear, tell the agent."""
    from spotkeeper.train.agent_link import control
    from spotkeeper.train.core import gang

    points.before(gang.DistributedGang, "gather")
    points.before(dist, "all_gather")
    _wrap_copy(points)
    points.before(socket.socket, "sendall", "ask")
    points.before(socket.socket, "recvmsg", "hear")
    points.before(control.Control, "committed")
