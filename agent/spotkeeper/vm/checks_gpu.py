"""Preflight's look at what accelerators need: torch, driver, shared memory, and NCCL's way to the network (EFA).

torch is imported in a process of its own, with the interpreter that runs the job: this one never imports it.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from spotkeeper.spec import codec
from spotkeeper.vm.preflight import Check, Finding, Level, Place

NVIDIA, AMAZON = "0x10de", "0x1d0f"  # PCI vendors
DISPLAY = "0x03"  # PCI class of what computes: VGA and 3D controllers
TORCH_S = 120.0  # a first import from a network disk
SHM_BYTES = 1 << 30
LINE = 200
TORCH = """
import json, time
began = time.monotonic()
import torch
seconds = time.monotonic() - began
there = torch.cuda.is_available()
said = {"version": torch.__version__, "cuda": torch.version.cuda or "", "seconds": seconds}
said["devices"] = torch.cuda.device_count() if there else 0
if there and torch.distributed.is_nccl_available():
    said["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
print(json.dumps(said))
"""
PLUGINS = ("opt/amazon/ofi-nccl", "opt/amazon/aws-ofi-nccl", "opt/aws-ofi-nccl", "usr/local/lib", "usr/lib")


class _Torch(Struct, frozen=True):
    version: str
    cuda: str
    seconds: float
    devices: int
    nccl: str = ""


def torch(place: Place) -> Finding:
    """Whether the job's interpreter imports it, and finds the accelerators that are there."""
    argv, env = [place.python, "-c", TORCH], place.environ or None
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TORCH_S, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        words = f"{place.python}: {getattr(error, 'strerror', None) or 'no end'}"
        return Finding("torch", Level.ERROR, words, "name the job's interpreter: --python, `python:` of the job file")
    try:
        said = codec.decode(done.stdout.strip().rpartition("\n")[2], _Torch)
    except msgspec.DecodeError:
        words = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1][:LINE]
        return Finding("torch", Level.ERROR, words, f"install torch for {place.python}, or take an image that has it")
    words = f"torch {said.version}, imported in {said.seconds:.1f} s, {said.devices} devices"
    words += f", NCCL {said.nccl}" if said.nccl else ""
    figures = {"import_s": round(said.seconds, 2), "devices": float(said.devices)}
    if said.devices or not gpus(place):
        return Finding("torch", Level.OK, words, figures=figures)
    why = "it was built without CUDA" if not said.cuda else f"it was built for CUDA {said.cuda}"
    remedy = "a torch that fits the driver (nvidia-smi shows the newest CUDA that it knows)"
    return Finding("torch", Level.ERROR, f"{words}, though there are GPUs: {why}", remedy, figures)


def driver(place: Place) -> Finding:
    """NVIDIA's driver, and what it says of the memory's health."""
    cards = len(gpus(place))
    if not cards:
        return Finding("driver", Level.SKIPPED, "no GPU in this machine")
    query = "name,driver_version,ecc.errors.uncorrected.volatile.total"
    argv = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode:
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:] if done else ["nvidia-smi does not run"]
        remedy = "install the driver, or take an image that has it; after a kernel's upgrade, reboot"
        return Finding("driver", Level.ERROR, f"{cards} GPUs, no driver: {''.join(said)[:LINE]}", remedy)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    figures = {"gpus": float(len(rows))}
    words = f"{len(rows)} x {rows[0][0]}, driver {rows[0][1]}" if rows else "the driver shows no GPU"
    if len(rows) < cards:
        return Finding("driver", Level.ERROR, f"{words}; {cards} are in the machine", _REPLACE, figures)
    if any(row[2].isdigit() and int(row[2]) for row in rows):
        return Finding("driver", Level.ERROR, f"{words}; uncorrectable memory errors since boot", _REPLACE, figures)
    return Finding("driver", Level.OK, words, figures=figures)


_REPLACE = "a broken GPU: reboot, and have the machine replaced where that does not help"


def network(place: Place) -> Finding:
    """What NCCL will use: the variables that steer it, shared memory, and on EC2 the fabric adapter."""
    trouble = [*_interfaces(place), *_shared_memory(place), *_efa(place)]
    adapters = len(_adapters(place))
    words = f"{adapters} EFA" if adapters else "TCP"
    if not trouble:
        return Finding("nccl", Level.OK, words)
    return Finding("nccl", Level.WARNING, "; ".join(said for said, _ in trouble), "; ".join(do for _, do in trouble))


def _interfaces(place: Place) -> Iterator[tuple[str, str]]:
    """``NCCL_SOCKET_IFNAME=eth0`` on a machine whose interface is ``ens4`` ends in a timeout half an hour later."""
    there = place.names("sys/class/net")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = place.environ.get(name, "")
        if not wanted or wanted.startswith("^"):
            continue
        exact = wanted.startswith("=")
        for one in wanted.lstrip("=").split(","):
            if not any(found == one if exact or name.startswith("GLOO") else found.startswith(one) for found in there):
                yield f"{name}={wanted}: no such interface ({', '.join(there)})", f"unset {name}"
                break


def _shared_memory(place: Place) -> Iterator[tuple[str, str]]:
    shm = place.root / "dev/shm"
    try:
        size = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
    except OSError:
        return
    if size < SHM_BYTES:
        yield f"{shm} has {size >> 20} MB, data loaders and NCCL share memory there", "--shm-size=8g of a container"


def _efa(place: Place) -> Iterator[tuple[str, str]]:
    if not _adapters(place):
        return
    if place.environ.get("FI_PROVIDER", "efa") != "efa":
        yield f"FI_PROVIDER={place.environ['FI_PROVIDER']} leaves the EFA adapters idle", "unset FI_PROVIDER"
    if not any(_found(place.root / folder) for folder in PLUGINS):
        yield "EFA adapters, but no plugin for NCCL (libnccl-net*.so)", "install aws-ofi-nccl, or take an image with it"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft not in (resource.RLIM_INFINITY, -1):
        yield f"memory that may be locked ends at {soft >> 10} KB: EFA cannot register buffers", "LimitMEMLOCK=infinity"


def _found(folder: Path) -> bool:
    """Directly there, or in ``lib``, ``lib64``, ``lib/x86_64-linux-gnu``."""
    below = ("", "lib*/", "lib*/*-linux-gnu/", "*-linux-gnu/")
    return any(next(folder.glob(f"{path}libnccl-net*.so*"), None) for path in below)


def _adapters(place: Place) -> list[str]:
    folder = "sys/class/infiniband"
    return [name for name in place.names(folder) if place.text(f"{folder}/{name}/device/vendor") == AMAZON]


def gpus(place: Place) -> list[str]:
    """PCI addresses of NVIDIA's accelerators, driver or not."""
    folder = "sys/bus/pci/devices"
    return [
        name
        for name in place.names(folder)
        if place.text(f"{folder}/{name}/vendor") == NVIDIA and place.text(f"{folder}/{name}/class").startswith(DISPLAY)
    ]


CHECKS = (
    Check("torch", torch, TORCH_S + 5, "torch does not import in two minutes: is it on a slow disk?", alone=True),
    Check("driver", driver, 25.0, "the driver hangs: reboot, and have the machine replaced", boot=True),
    Check("nccl", network, 5.0, "", boot=True),
)
