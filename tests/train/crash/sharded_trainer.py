"""The job of the crash tests with sharded state: each element tells the step it is of, and its place in the tensor."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from spotkeeper.train.checkpoint.protocol import address
from tests.train.crash.points import Call, Points
from tests.train.crash.trainer import AREA, SAVED, Counter, Rank, _settle_in

ROWS = (4, 40, 40_000, 64, 1000)  # of each parameter, over all ranks
ARMED = 8  # the step from which points count
LAST = 17
CUT = "cut"  # a file; with it, nothing that machine 1 is sent for its image arrives, from step ``ARMED`` on
LATE_S = 0.2  # of a copy over a cut link


class Rows(nn.Module):
    """Parameters whose rows are divided among the ranks: row r is r + n (n + 1) / 2 after step n."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.mesh = init_device_mesh("cpu", (world,))
        self.weights = nn.ParameterList([nn.Parameter(self._part(rows)) for rows in ROWS])

    def _part(self, rows: int) -> DTensor:
        return DTensor.from_local(first(rows, self.mesh.size(), self.mesh.get_rank()), self.mesh, [Shard(0)])


def first(rows: int, world: int, rank: int) -> torch.Tensor:
    """A rank's part at the beginning."""
    return torch.arange(rows, dtype=torch.float32).chunk(world)[rank].clone()


def begun(me: Rank) -> Any:
    return me.root / f"begun{me.gen}-{me.rank}"


def work_with_peers(me: Rank) -> None:
    """Save step ``SAVED``, keep images in neighbours' memories, and end after step ``saves[-1]`` without a save.

    ``dies``: the point, counted from step ``ARMED`` on, at which it dies; if negative, at which its saver is killed.
    """
    _settle_in(me)
    os.environ |= {"SPOTKEEPER_PEERS_MB_S": "250", "SPOTKEEPER_SNAPSHOTS": "1", "SPOTKEEPER_REPLICATED": "0"}
    import spotkeeper
    from spotkeeper.train.core import pace
    from spotkeeper.train.loop import boundary

    pace.SavePace.image_interval_s = boundary.EVERY_S = 0.0  # type: ignore[assignment]
    points = Points(me.dies, me.told) if me.dies >= 0 else _SaverPoints(-me.dies, me.told)
    _wrap(points)
    cut = me.gen == 1 and (me.root / CUT).exists()
    if cut:
        _cut_link(me)
    model, counter = Rows(me.world), Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    run = spotkeeper.attach(model, optimizer, counter=counter)
    wrong = _wrong(run.steps_done, me, model, optimizer, counter)
    me.seen.write_text(json.dumps({"step": run.steps_done, "wrong": wrong}))
    peers: Any = run._boundary._strategy._peers  # type: ignore[attr-defined]
    if isinstance(points, _SaverPoints):
        points.path = me.env["SPOTKEEPER_SAVER"]
    if me.local_rank == 0:
        _allocate(run._boundary.writer.client)
    flight = None
    for _ in run.steps(range(1000), steps=1000):
        for weight in model.weights:
            weight.grad = DTensor.from_local(-torch.ones_like(weight.to_local()), model.mesh, [Shard(0)])
        dist.barrier()  # as the script's own collectives
        optimizer.step()
        step = run.steps_done
        counter.state = {"number": step, "tensor": torch.full((2000,), float(step), dtype=torch.float64)}
        if peers._flight is not flight and (flight := peers._flight) is not None:
            with begun(me).open("a") as stream:
                stream.write(f"{step - 1}\n")
        for thread in flight.copies.threads if flight is not None and flight.copies is not None else ():
            thread.join(LATE_S / 4 if cut else None)  # so each run has the same points
        if step == SAVED and me.gen == 1:
            run.save()
        elif step == ARMED:
            points.arm()
        if step == me.saves[-1]:
            break
    points.disarm()
    points.count()
    if me.gen == 1 and not cut:
        os._exit(0)
    run.save()
    run.wait()
    dist.destroy_process_group()


class _SaverPoints(Points):
    """At the point, this machine's saver is killed; the trainer goes on."""

    path = ""

    def _act(self, name: str) -> None:
        self._tell(name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, address(Path(self.path)) as short:
            sock.connect(short)
            pid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        os.kill(pid, signal.SIGKILL)


def _cut_link(me: Rank) -> None:
    from spotkeeper.train.checkpoint import peers

    real: Call = peers._receive
    peers.LATE_S = LATE_S

    def receive(*args: Any) -> Any:
        if me.node == 1 and (me.root / f"begun1-{me.rank}").read_text().count("\n") > 1:
            threading.Event().wait()
        return real(*args)

    peers._receive = receive


def _allocate(client: Any) -> None:
    for number in range(4):
        while client.part_image(number, 4 << 20) is None:
            client._read_soon()


def _wrap(points: Points) -> None:
    """What an image of sharded state takes: gather, break seals, copy, seal, send, receive, seal."""
    import ctypes

    from spotkeeper.train.checkpoint import peers
    from spotkeeper.train.core import gang

    def half_broken(real: Call, args: tuple[Any, ...]) -> None:
        at = len(args[0]) - AREA
        args[0][at : at + 20] = bytes(20)

    def half_sealed(memory: memoryview, *args: Any, **kwargs: Any) -> bool:
        done: bool = real_seal(memory, *args, **kwargs)
        at = len(memory) - AREA
        whole = bytes(memory[at + 20 : at + 40])
        memory[at + 20 : at + 40] = bytes(20)
        points.reach("seal, half")
        memory[at + 20 : at + 40] = whole
        return done

    real_seal = peers.seal
    peers.seal = half_sealed
    points.before(peers, "seal")
    points.before(gang.DistributedGang, "gather")
    points.before(gang.DistributedGang, "highest")
    points.within(peers, "break_seal", half_broken)
    points.within(ctypes, "memmove", lambda real, args: real(args[0], args[1], args[2] // 2))
    points.before(gang.DistributedGang, "send")
    points.before(gang.DistributedGang, "receive")


def _wrong(step: int, me: Rank, model: Rows, optimizer: torch.optim.Optimizer, counter: Counter) -> list[str]:
    """Names of what is not of this step; whole tensors are compared."""
    wrong = []
    for rows, weight in zip(ROWS, model.weights, strict=True):
        want, found = first(rows, me.world, me.rank) + step * (step + 1) / 2, weight.to_local()
        if not torch.equal(found, want):
            wrong.append(f"the weight of {rows} rows begins with {found[:3].tolist()}, want {want[:3].tolist()}")
        moment = optimizer.state[weight].get("momentum_buffer") if step else None
        if step and (moment is None or not bool((moment.to_local() == -step).all())):
            wrong.append(f"the moment of {rows} rows is not {-step}")
    if counter.state["number"] != step or not bool((counter.state["tensor"] == step).all()):
        wrong.append(f"the counter is {counter.state['number']}, want {step}")
    return wrong
