"""What a generation on this machine is started with: its launcher, torchrun's arguments, its environment.

Made of the document, the job file and a look at this machine; nothing is started here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from spotkeeper.spec import codec
from spotkeeper.spec.generation import Generation, JobRun
from spotkeeper.vm import render
from spotkeeper.vm.launch import Kind, Wants
from spotkeeper.vm.launcher import pyenv
from spotkeeper.vm.settings import job_path

RENDEZVOUS_S = 60  # real; all members start within a poll, but a cold launcher imports torch first


@dataclass(frozen=True)
class Node:
    """What of this machine a generation needs. ``ckpt``: its checkpoints, writable at once unless ``late``.

    ``output``: where the job leaves what is to be kept of it.
    """

    slot: int
    index: int
    address: str
    source: Path
    saver: Path
    ckpt: Path
    output: Path
    late: bool = False  # its disk is not attached yet
    given: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables of its identity, and its secrets


def launcher_kind(run: JobRun, source: Path, home: Path) -> Kind:
    """The launcher a job needs. A Python with a ``/`` in it is looked for in the job's source.

    ``home``: where on the boot disk an environment of the job's own may be made.
    """
    python = run.python
    if "/" in python:
        python = str(source / python)
    else:
        python = shutil.which(python, path=run.env.get("PATH") or os.environ.get("PATH")) or python
    env = {"OMP_NUM_THREADS": str(threads(run.nproc))} | run.env
    file = run.requirements
    wants = Wants(source, file, pyenv.contents(source, file), home) if file else None
    return Kind(run.launcher, python, tuple(sorted(env.items())), wants, run.warm)


def threads(nproc: int) -> int:
    """Cores per process: torchrun itself would say 1."""
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def torchrun_args(templates: Path, doc: Generation, run: JobRun, node: Node, folder: Path) -> list[str]:
    """torchrun's arguments, from ``torchrun.args.j2``: one a line, each a JSON string.

    Raises:
        RenderError: the template is wrong.
    """
    path = templates / "torchrun.args.j2"
    values = {"doc": doc, "run": run, "node": node, "folder": folder, "rendezvous_s": RENDEZVOUS_S}
    boot = job_path() / "spotkeeper/vm/launcher/boot.py"
    text = render.render(path, values | {"command": command(boot, run.command, node.source)})
    try:
        return [codec.decode(line, str) for line in text.splitlines() if line.strip()]
    except msgspec.DecodeError as error:
        raise render.RenderError(f"{path}: a line is no JSON string: {error}") from None


def command(boot: Path, argv: tuple[str, ...], source: Path) -> list[str]:
    """``boot.py``, the script by its full path, its arguments."""
    if argv[0] == "-m":
        return [str(boot), *argv]
    return [str(boot), str(source / argv[0]), *argv[1:]]


def environment(doc: Generation, run: JobRun, node: Node, folder: Path) -> dict[str, str]:
    """What ``docs/design.md`` promises the job's processes, laid over the launcher's own environment.

    The user's own values win, but for ``SPOTKEEPER_*`` and the path on which the library is.
    """
    ours = {
        "SPOTKEEPER_RUN": str(folder),
        "SPOTKEEPER_JOB": doc.job,
        "SPOTKEEPER_UID": doc.uid,
        "SPOTKEEPER_GEN": str(doc.gen),
        "SPOTKEEPER_SLOT": str(node.slot),
        "SPOTKEEPER_SAVER": str(node.saver),
        "SPOTKEEPER_OUTPUT": str(node.output),
        "SPOTKEEPER_KEEP": str(run.keep),
        "SPOTKEEPER_SEED": str(run.seed),
        "SPOTKEEPER_REPLICATED": "1" if doc.replicated else "0",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }
    ours["SPOTKEEPER_CKPT_LATE" if node.late else "SPOTKEEPER_CKPT"] = str(node.ckpt)
    if run.interval_s is not None:
        ours["SPOTKEEPER_INTERVAL_S"] = str(run.interval_s)
    if run.max_world is not None:
        ours["SPOTKEEPER_MAX_WORLD"] = str(run.max_world)
    if doc.mean_life_s is not None:
        ours["SPOTKEEPER_MEAN_LIFE_S"] = str(doc.mean_life_s)
    defaults = {"OMP_NUM_THREADS": str(threads(run.nproc)), "PYTHONUNBUFFERED": "1"}
    interface = interface_of(node.address)
    if interface is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    users = {name: value for name, value in run.env.items() if name != "PYTHONPATH"}  # the launcher's start had it
    return defaults | users | ours


def interface_of(address: str) -> str | None:
    """The network interface that owns an IPv4 address; None on loopback, where gloo needs nothing."""
    if address.startswith("127."):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
