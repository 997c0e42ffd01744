"""Start of a generation: ranks exchange their places and checkpoint generations, and measure the network.

The bandwidth test, all-reduces of 64 MiB for two seconds, runs only at a gang's first start. With a misconfigured
network (no EFA plugin, no GPUDirect, the wrong interface), a gang trains at a tenth of its speed without an error. The
agent reports the figure to the function, and ``spotkeeper compare`` uses it instead of the vendor's number.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from spotkeeper.train.checkpoint.manifest import RankPlace
from spotkeeper.train.checkpoint.store import scan
from spotkeeper.train.core.errors import say
from spotkeeper.train.core.gang import Gang
from spotkeeper.train.core.settings import RunSettings, lock

SWITCH = "SPOTKEEPER_BANDWIDTH"  # on or off; default: on with GPUs only (with CPUs it would measure the processors)
PAYLOAD_BYTES = 64 << 20  # larger messages are no faster with NCCL (nccl-tests)
SECONDS = 2.0
MOST = 2000  # all-reduces
FABRIC = "SPOTKEEPER_FABRIC"  # network between the machines' GPUs
VARIABLES = {  # settings that make NCCL use each fabric, from Google's guides
    "rdma": ("NCCL_NET=gIB", "`source /usr/local/gib/scripts/set_nccl_env.sh` sets the fabric's variables"),
    "tcpx": ("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME=eth1,eth2,eth3,eth4", "together with NCCL_NET=GPUDirectTCPX_v7"),
    "tcpxo": (
        "NCCL_FASTRAK_IFNAME=eth1,eth2,eth3,eth4,eth5,eth6,eth7,eth8",
        "the plugin's nccl-env-profile.sh sets the fabric's variables",
    ),
}


@dataclass(frozen=True)
class GangInfo:
    """The places of all ranks, and this node's checkpoint ``folder`` (None if the node writes no checkpoints)."""

    gen: int
    folder: Path | None
    places: tuple[RankPlace, ...]
    lock: IO[str] | None  # lock of the folder, kept while this object lives


def rendezvous(gang: Gang, settings: RunSettings) -> GangInfo:
    """Exchange places and newest saved generations of all ranks, and choose this generation's number. Collective.

    Raises:
        RuntimeError: another run uses the checkpoint folder.
    """
    folder, lock = _own_folder(gang, settings)
    there = scan(folder) if folder else []
    slot = gang.node if settings.slot is None else settings.slot
    place = RankPlace(gang.rank, gang.node, slot, folder is not None)
    words = {"top": there[0].gen if there else -1, "place": asdict(place)}
    peers = [json.loads(blob) for blob in gang.gather(json.dumps(words).encode())]
    gen = settings.gen if settings.gen is not None else 1 + max(peer["top"] for peer in peers)
    return GangInfo(gen, folder, tuple(RankPlace(**peer["place"]) for peer in peers), lock)


def _own_folder(gang: Gang, settings: RunSettings) -> tuple[Path | None, IO[str] | None]:
    folder = settings.folder
    if settings.managed or folder is None:
        return folder, None
    if len(set(gang.gather(str(gang.node).encode()))) > 1:
        folder = folder / f"node{gang.node}"  # the machines may share a file system
    return folder, None if gang.local_rank else lock(folder)


def measure_bandwidth(gang: Gang, gen: int | None) -> float:
    """Return the bandwidth between the gang's machines in Gbit/s; 0.0 if not measured. Collective, equal on every rank.

    In an all-reduce, each of n machines sends 2 (n - 1) / n of the payload to the next (Patarasu and Yuan, 2009). The
    measured time includes the sums within each machine, so the true bandwidth is at least the returned one. The test
    draws no random number and changes no state of the script.

    Args:
        gen: the run's generation; only generation 1 measures.
    """
    device = _device()
    if gang.rank == 0 and (told := missing_variable(os.environ)):
        say(told)
    if gen != 1 or gang.highest(device is None)():  # no test if any rank has no device or has the test switched off
        return 0.0
    assert device is not None
    nodes = 1 + gang.highest(gang.node)()
    if nodes == 1:
        return 0.0
    payload = torch.zeros(PAYLOAD_BYTES // 4, dtype=torch.float32, device=device)
    _seconds(payload, device, 1)  # the first all-reduce makes the connections
    once_us = gang.highest(int(_seconds(payload, device, 1) * 1e6))()
    times = max(1, min(MOST, int(SECONDS * 1e6) // max(1, once_us)))
    each_us = gang.highest(int(_seconds(payload, device, times) / times * 1e6))()
    return 2.0 * (nodes - 1) / nodes * PAYLOAD_BYTES * 8.0 / max(1, each_us) / 1e3


def missing_variable(environ: Mapping[str, str]) -> str:
    """Return a warning if NCCL would use plain TCP because the setting for the machines' fabric is missing, or ""."""
    wanted, how = VARIABLES.get(environ.get(FABRIC, ""), ("", ""))
    name = wanted.partition("=")[0]
    if not name or environ.get(name):
        return ""
    return f"network: {name} is not set, so NCCL uses plain TCP: add {wanted} to `env` of the job file ({how})"


def _device() -> torch.device | None:
    """Return the device for the bandwidth test; None: no test.

    The environment variable ``SPOTKEEPER_BANDWIDTH`` turns the test ``on`` or ``off``. By default it runs only with
    NCCL on GPUs. Without a process group it never runs.
    """
    switch = os.environ.get(SWITCH, "")
    if switch == "off" or not dist.is_initialized():
        return None
    if torch.cuda.is_available() and torch.cuda.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if switch == "on" else None


def _seconds(payload: torch.Tensor, device: torch.device, times: int) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else _nothing
    wait()
    began = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(payload)
    wait()
    return time.perf_counter() - began


def _nothing() -> None:
    """Do nothing: a CPU all-reduce is done when its call returns."""
