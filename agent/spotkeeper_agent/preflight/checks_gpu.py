"""Preflight checks for accelerators: torch, driver, shared memory, and NCCL's network.

A separate process with the job's interpreter imports torch; the checking process never does.
"""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from spotkeeper.contract import codec
from spotkeeper_agent.preflight.findings import Check, Finding, Level, Machine

NVIDIA, AMAZON = "0x10de", "0x1d0f"  # PCI vendors
DISPLAY = "0x03"  # PCI class of GPUs: VGA and 3D controllers
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


class Fabric(NamedTuple):
    """A kind of GPUDirect, and its needs on a Google machine. ``daemon``: a path that exists while its daemon runs."""

    name: str
    plugin: str
    remedy: str
    adapters: int = 0
    daemon: str = ""


# Google's installers: GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpx, -tcpxo and -rdma.
FABRICS = {
    "tcpx": Fabric("GPUDirect-TCPX", "var/lib/tcpx", "install its NCCL plugin and start tcpgpudmarxd", 0, "run/tcpx"),
    "tcpxo": Fabric("GPUDirect-TCPXO", "var/lib/tcpxo", "run Google's installer", 0, "dev/aperture_devices"),
    "rdma": Fabric("GPUDirect-RDMA", "usr/local/gib", "install the gIB plugin, or use an accelerator image", 8),
}
PLUGINS = ("opt/amazon/ofi-nccl", "opt/amazon/aws-ofi-nccl", "opt/aws-ofi-nccl", "usr/local/lib", "usr/lib")


class _Torch(Struct, frozen=True):
    version: str
    cuda: str
    seconds: float
    devices: int
    nccl: str = ""


def torch(machine: Machine) -> Finding:
    """Check that the job's interpreter imports torch, and that torch finds the machine's GPUs."""
    argv, env = [machine.python, "-c", TORCH], machine.environ or None
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TORCH_S, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        words = f"{machine.python}: {getattr(error, 'strerror', None) or 'did not end'}"
        return Finding("torch", Level.ERROR, words, "name the job's interpreter with `--python`")
    try:
        said = codec.decode(done.stdout.strip().rpartition("\n")[2], _Torch)
    except msgspec.DecodeError:
        words = (done.stderr.strip().splitlines() or [f"{machine.python} ended without output"])[-1][:LINE]
        return Finding("torch", Level.ERROR, words, f"install torch for {machine.python}, or use an image with torch")
    words = f"torch {said.version}, imported in {said.seconds:.1f} s, {said.devices} devices"
    words += f", NCCL {said.nccl}" if said.nccl else ""
    figures = {"import_s": round(said.seconds, 2), "devices": float(said.devices)}
    if said.devices or not gpus(machine):
        return Finding("torch", Level.OK, words, figures=figures)
    why = "torch was built without CUDA" if not said.cuda else f"torch was built for CUDA {said.cuda}"
    remedy = "install a torch that fits the driver (nvidia-smi shows the newest CUDA that the driver supports)"
    return Finding("torch", Level.ERROR, f"{words}, though the machine has GPUs: {why}", remedy, figures)


def driver(machine: Machine) -> Finding:
    """Check NVIDIA's driver and its count of memory errors."""
    cards = len(gpus(machine))
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
        remedy = "install the driver, or use an image with the driver; after an upgrade of the kernel, reboot"
        return Finding("driver", Level.ERROR, f"{cards} GPUs, no driver: {''.join(said)[:LINE]}", remedy)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    figures = {"gpus": float(len(rows))}
    words = f"{len(rows)} x {rows[0][0]}, driver {rows[0][1]}" if rows else "the driver shows no GPU"
    if len(rows) < cards:
        return Finding("driver", Level.ERROR, f"{words}, but {cards} GPUs are in the machine", _REPLACE, figures)
    if any(row[2].isdecimal() and int(row[2]) for row in rows):
        return Finding("driver", Level.ERROR, f"{words}; uncorrectable memory errors since the boot", _REPLACE, figures)
    return Finding("driver", Level.OK, words, figures=figures)


_REPLACE = "a broken GPU: reboot; if that does not help, replace the machine"


def network(machine: Machine) -> Finding:
    """Check what NCCL needs: its environment variables, shared memory, and network adapters."""
    trouble = [*_interfaces(machine), *_shared_memory(machine), *_efa(machine), *_gpu_direct(machine)]
    adapters = len(_adapters(machine))
    words = f"{adapters} EFA" if adapters else FABRICS[machine.fabric].name if machine.fabric in FABRICS else "TCP"
    if not trouble:
        return Finding("nccl", Level.OK, words)
    return Finding("nccl", Level.WARNING, "; ".join(said for said, _ in trouble), "; ".join(do for _, do in trouble))


def _interfaces(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (finding, remedy) for each variable with a wrong interface: training would time out half an hour later."""
    there = machine.names("sys/class/net")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = machine.environ.get(name, "")
        if not wanted or wanted.startswith("^"):
            continue
        exact = wanted.startswith("=")
        for one in wanted.lstrip("=").split(","):
            if not any(found == one if exact or name.startswith("GLOO") else found.startswith(one) for found in there):
                yield f"{name}={wanted}: no such interface (the machine has {', '.join(there)})", f"unset {name}"
                break


def _shared_memory(machine: Machine) -> Iterator[tuple[str, str]]:
    shm = machine.root / "dev/shm"
    try:
        size = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
    except OSError:
        return
    if size < SHM_BYTES:
        yield f"{shm} has only {size >> 20} MB for data loaders and NCCL", "run the container with --shm-size=8g"


def _efa(machine: Machine) -> Iterator[tuple[str, str]]:
    if not _adapters(machine):
        if machine.fabric == "efa":
            yield "the pool has EFA adapters, but the kernel shows none", "install the EFA driver (aws-efa-installer)"
        return
    if machine.environ.get("FI_PROVIDER", "efa") != "efa":
        yield f"FI_PROVIDER={machine.environ['FI_PROVIDER']} makes NCCL ignore the EFA adapters", "unset FI_PROVIDER"
    if not any(_found(machine.root / folder) for folder in PLUGINS):
        yield "EFA adapters, but no plugin for NCCL (libnccl-net*.so)", "install aws-ofi-nccl, or use an image with it"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft not in (resource.RLIM_INFINITY, -1):
        yield f"at most {soft >> 10} KB of memory may be locked, too little for EFA", "set LimitMEMLOCK=infinity"


def _gpu_direct(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (finding, remedy) if GPUDirect lacks NCCL's plugin, its adapters or its daemon.

    Without them NCCL silently uses plain TCP, at a tenth of the speed.
    """
    fabric = FABRICS.get(machine.fabric)
    if fabric is None:
        return
    if not _found(machine.root / fabric.plugin):
        yield f"{fabric.name}, but no plugin for NCCL in /{fabric.plugin} (libnccl-net*.so)", fabric.remedy
    if fabric.adapters and len(machine.names("sys/class/infiniband")) < fabric.adapters:
        yield (
            f"{fabric.name}, but fewer than {fabric.adapters} RDMA adapters exist",
            "install the mlx5 driver (rdma-core)",
        )
    if fabric.daemon and not (machine.root / fabric.daemon).exists():
        yield f"the daemon of {fabric.name} does not run: /{fabric.daemon} does not exist", fabric.remedy


def _found(folder: Path) -> bool:
    """Whether NCCL's plugin is in ``folder``, or in its ``lib``, ``lib64``, ``lib/x86_64-linux-gnu``."""
    below = ("", "lib*/", "lib*/*-linux-gnu/", "*-linux-gnu/")
    return any(next(folder.glob(f"{path}libnccl-net*.so*"), None) for path in below)


def _adapters(machine: Machine) -> list[str]:
    folder = "sys/class/infiniband"
    return [name for name in machine.names(folder) if machine.text(f"{folder}/{name}/device/vendor") == AMAZON]


def gpus(machine: Machine) -> list[str]:
    """Return the PCI addresses of NVIDIA's accelerators, with or without a driver."""
    folder = "sys/bus/pci/devices"
    return [
        name
        for name in machine.names(folder)
        if machine.text(f"{folder}/{name}/vendor") == NVIDIA
        and machine.text(f"{folder}/{name}/class").startswith(DISPLAY)
    ]


CHECKS = (
    Check("torch", torch, TORCH_S + 5, "torch does not import in two minutes: is it on a slow disk?", alone=True),
    Check("driver", driver, 25.0, "the driver hangs: reboot; if that does not help, replace the machine", boot=True),
    Check("nccl", network, 5.0, "", boot=True),
)
