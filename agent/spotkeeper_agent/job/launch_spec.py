"""Builds the inputs of a generation's start on this machine: launcher, torchrun's arguments, environment variables.

The module starts nothing. torchrun's arguments come from a Jinja template in which a missing variable is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from spotkeeper.contract import codec
from spotkeeper.contract.generation import Generation, JobRun
from spotkeeper_agent.core.settings import job_path
from spotkeeper_agent.job.launcher_client import Image, LauncherKind, Requirements
from spotkeeper_agent.launcher import pyenv, spool

PULL_S = 900  # real; with an image, a replacement pulls gigabytes while its peers wait
RENDEZVOUS_S = 60  # real; members start within one poll of each other, but a cold launcher imports torch first


@dataclass(frozen=True)
class LaunchSpec:
    """This machine's part of a generation.

    ``index``: the machine's position among the members, which torchrun gets as its node rank; it is below ``node`` if a
    lower node is not a member. ``ckpt``: the checkpoint folder, whose disk is mounted only later if ``late``.
    ``output``: the folder for the job's output.
    """

    node: int
    index: int
    address: str
    source: Path
    saver: Path
    ckpt: Path
    output: Path
    late: bool = False  # whether the node's disk is not attached yet
    fabric: str = ""  # network of the machine's GPUs
    extra_env: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # the identity's variables and the job's secrets
    spool: Path | None = None  # the folder for the processes' whole output
    scratch: Path | None = None  # the scratch folder; None: the job has none
    scratch_made: bool = False  # whether the scratch folder is new, so that it is empty


def launcher_kind(
    run: JobRun, source: Path, home: Path, folders: tuple[Path, ...] = (), identity: Mapping[str, str] | None = None
) -> LauncherKind:
    """Return the launcher that a job needs. If ``run.python`` contains a ``/``, it is a path in the job's source.

    ``home``: the folder on the boot disk for the job's own Python environment. ``folders``: those of a container.
    ``identity``: variables of the job's identity, for the container image's pull.
    """
    python = run.python
    if "/" in python:
        python = str(source / python)
    if run.image:  # the launcher itself runs outside of it, under the agent's Python
        path = tuple(item for item in run.env.items() if item[0] == "PYTHONPATH")
        return LauncherKind("exec", sys.executable, path, image=Image(run.image, python, folders, identity or {}))
    if "/" not in python:
        python = shutil.which(python, path=run.env.get("PATH") or os.environ.get("PATH")) or python
    env = {"OMP_NUM_THREADS": str(threads(run.nproc))} | run.env
    file = run.requirements
    wants = Requirements(source, file, pyenv.contents(source, file), home) if file else None
    return LauncherKind(run.launcher, python, tuple(sorted(env.items())), wants, run.warm)


def threads(nproc: int) -> int:
    """Return the number of OpenMP threads per process: cores divided by ``nproc``. torchrun's default would be 1."""
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def torchrun_args(templates: Path, doc: Generation, run: JobRun, spec: LaunchSpec, folder: Path) -> list[str]:
    """Return torchrun's arguments, from ``torchrun.args.j2``, which has one JSON string per line.

    Raises:
        RenderError: the template is wrong.
    """
    path = templates / "torchrun.args.j2"
    values = {
        "doc": doc,
        "run": run,
        "spec": spec,
        "folder": folder,
        "rendezvous_s": PULL_S if run.image else RENDEZVOUS_S,
    }
    boot = job_path().launcher / "boot.py"
    text = render(path, values | {"command": command(boot, run.command, spec.source)})
    try:
        return [codec.decode(line, str) for line in text.splitlines() if line.strip()]
    except msgspec.DecodeError as error:
        raise RenderError(f"{path}: a line is not a JSON string: {error}") from None


def command(boot: Path, argv: tuple[str, ...], source: Path) -> list[str]:
    """Return a worker's command: ``boot``, and after it the user's command ``argv`` with the script's full path."""
    if argv[0] == "-m":
        return [str(boot), *argv]
    return [str(boot), str(source / argv[0]), *argv[1:]]


def environment(doc: Generation, run: JobRun, spec: LaunchSpec, folder: Path) -> dict[str, str]:
    """Return the variables that the launcher adds for torchrun: the user's, and those listed in ``job/__init__.py``.

    The user's values win, except for ``SPOTKEEPER_*``. PYTHONPATH is left out, since the launcher already has it.
    """
    ours = {
        "SPOTKEEPER_RUN": str(folder),
        "SPOTKEEPER_JOB": doc.job,
        "SPOTKEEPER_UID": doc.uid,
        "SPOTKEEPER_GEN": str(doc.gen),
        "SPOTKEEPER_SLOT": str(spec.node),
        "SPOTKEEPER_SAVER": str(spec.saver),
        "SPOTKEEPER_OUTPUT": str(spec.output),
        "SPOTKEEPER_KEEP": str(run.keep),
        "SPOTKEEPER_SEED": str(run.seed),
        "SPOTKEEPER_REPLICATED": "1" if doc.replicated else "0",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
    }
    if spec.spool is not None:
        ours |= {spool.FOLDER: str(spec.spool), spool.SECRETS: " ".join(run.secrets)}
    if spec.scratch is not None:
        ours["SPOTKEEPER_SCRATCH"] = str(spec.scratch)
    if spec.fabric:
        ours["SPOTKEEPER_FABRIC"] = spec.fabric
    ours["SPOTKEEPER_CKPT_LATE" if spec.late else "SPOTKEEPER_CKPT"] = str(spec.ckpt)
    if run.interval_s is not None:
        ours["SPOTKEEPER_INTERVAL_S"] = str(run.interval_s)
    if run.snapshots:
        ours |= {"SPOTKEEPER_SNAPSHOTS": "1", "SPOTKEEPER_OVERHEAD_PERCENT": str(run.overhead_percent)}
    if run.peers_mb_s is not None:
        ours["SPOTKEEPER_PEERS_MB_S"] = str(run.peers_mb_s)
    if run.metric:
        ours["SPOTKEEPER_METRIC"] = run.metric
    if run.until is not None:
        ours["SPOTKEEPER_UNTIL"] = str(run.until)
    if run.max_world is not None:
        ours["SPOTKEEPER_MAX_WORLD"] = str(run.max_world)
    if doc.mean_life_s is not None:
        ours["SPOTKEEPER_MEAN_LIFE_S"] = str(doc.mean_life_s)
    defaults = {"OMP_NUM_THREADS": str(threads(run.nproc)), "PYTHONUNBUFFERED": "1"}
    interface = interface_of(spec.address)
    if interface is not None:
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    users = {name: value for name, value in run.env.items() if name != "PYTHONPATH"}  # the launcher has it
    return defaults | users | ours


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address; None for loopback, where gloo needs no name."""
    if address.startswith("127."):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


class RenderError(Exception):
    """A template could not be rendered. The message has the file, the line and the cause."""


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=_no_json)


def _no_json(value: object) -> object:
    str(value)  # an undefined value raises its own error here
    raise TypeError(f"{type(value).__name__} has no JSON form")


def render(path: Path, values: Mapping[str, object]) -> str:
    """Render a template.

    Raises:
        RenderError: the file or a variable is missing, the syntax is wrong, or a value has no JSON form.
    """
    import jinja2

    try:
        source = path.read_text()
    except OSError as error:
        raise RenderError(f"{path}: {error.strerror}") from None
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - JSON lines; the filter escapes
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = to_json
    try:
        return environment.from_string(source).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise _render_error(path, source, error.lineno, str(error.message)) from None
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise _render_error(path, source, _line(error), str(error)) from None


def _line(error: BaseException) -> int:
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _render_error(path: Path, source: str, number: int, what: str) -> RenderError:
    lines = source.splitlines()
    shown = f"\n    {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""
    return RenderError(f"{path}:{number}: {what}{shown}")
