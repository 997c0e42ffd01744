"""The end of a cloud whose ``cloud.json`` is damaged or gone: its processes are found without it.

Everything that a cloud starts carries its mark, and some of it names the folder as well: keeper and control plane in
their arguments, VMs and functions in their environment. Those tell the mark, and the mark finds the rest. Nothing
else is touched: a process that names the folder and carries no mark is somebody's editor.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from spotkeeper.local import procs
from spotkeeper.local.cloud import LeftOver, LocalCloud
from spotkeeper.local.world import Config


def end(folder: Path) -> LeftOver:
    """Kill every process of the cloud in ``folder``, and remove it; what was still there."""
    folder = folder.resolve()
    *others, last = sorted(marks(folder)) or [secrets.token_hex(6)]  # that nothing carries
    for uid in others:  # a cloud that was started in the same folder when the first could not be found any more
        procs.kill_all(procs.mark(procs.CLOUD, uid))
    return LocalCloud(folder, Config(last, 0, "")).down(purge=True)


def marks(folder: Path) -> set[str]:
    """The marks that living processes of the cloud in ``folder`` (absolute) carry."""
    found: set[str] = set()
    for pid in procs.living():
        values = procs.environment(pid)
        uid = values.get(procs.CLOUD)
        if uid and (_lives_in(folder, values) or _keeps(folder, pid)):
            found.add(uid)
    return found


def _lives_in(folder: Path, values: dict[str, str]) -> bool:
    """A VM's process, or a function's."""
    root = values.get("SPOTKEEPER_ROOT", "")
    bucket = values.get("SPOTKEEPER_BUCKET", "") if procs.FUNCTION in values else ""
    return root.startswith(f"{folder / 'vms'}/") or bucket == f"sqlite://{folder / 'bucket.sqlite'}"


def _keeps(folder: Path, pid: int) -> bool:
    words = procs.arguments(pid)
    modules = ("spotkeeper.local.keeper", "spotkeeper.local.server")
    return words[-1:] == [str(folder)] and any(module in words for module in modules)
