"""Runs VMs as process trees on this machine, keeps their roots and disks in folders, and reports ended processes.

It knows only the ids and folders of VMs and disks. Every step can be repeated after a crash. A cloud's folder has::

    vms/<id>/{boot.json,off,root/}   serial/<name>-<id>.log   disks/<id>/<attachments>/   snapshots/<id>/
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import spotkeeper
from spotkeeper import clock as clock_module
from spotkeeper.local.core import procs
from spotkeeper.local.core.world import World

log = logging.getLogger("spotkeeper.local")

ROOT = Path(spotkeeper.__file__).resolve().parents[1]  # PYTHONPATH needs it to import spotkeeper
# The part of the operator's environment that a guest sees: without secrets and settings of other clouds.
PASSED = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ", "SSL_CERT_FILE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def base_env(world: World) -> dict[str, str]:
    """Return the environment that all processes of this cloud share."""
    env = {name: os.environ[name] for name in PASSED if name in os.environ}
    tools = Path(sys.executable).parent
    env["PATH"] = f"{tools}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    env[clock_module.ENV] = world.config.clock
    env[procs.CLOUD] = world.config.uid
    return env


class Host:
    def __init__(self, world: World) -> None:
        self._world = world
        self._watched: dict[int, tuple[int, Callable[[], None]]] = {}
        # Not the cloud's own folder: a control plane that starts while its cloud is removed must not make it again.
        for name in ("vms", "serial", "disks", "snapshots", "buckets", "functions"):
            (world.folder / name).mkdir(exist_ok=True)

    # VMs

    def vm_folder(self, vm_id: int) -> Path:
        return self._world.folder / "vms" / str(vm_id)

    def root(self, vm_id: int) -> Path:
        return self.vm_folder(vm_id) / "root"

    def serial(self, name: str, vm_id: int) -> Path:
        return self._world.folder / "serial" / f"{name}-{vm_id}.log"

    def vm_mark(self, vm_id: int) -> str:
        return f"{self._world.config.uid}-{vm_id}"

    def power_on(self, vm_id: int, name: str, address: str) -> tuple[int, int]:
        """Start the VM's init, which may outlive this process; return the pid and start time of init."""
        folder = self.vm_folder(vm_id)
        root = self.root(vm_id)
        root.mkdir(parents=True, exist_ok=True)
        (folder / "off").unlink(missing_ok=True)
        metadata = f"{address}:{self._world.config.port}"
        env = base_env(self._world) | {
            procs.VM: self.vm_mark(vm_id),
            "HOME": str(root / "root"),
            "TMPDIR": str(root / "tmp"),
            "HOSTNAME": name,
            "GCE_METADATA_HOST": metadata,
            "SPOTKEEPER_ROOT": str(root),
            "SPOTKEEPER_ADDRESS": address,
        }
        plan = {
            "mark": self.vm_mark(vm_id),
            "metadata": metadata,
            "scale": self._world.clock.scale,
            "boot_s": self._world.timing.boot_s,
            "env": env,
        }
        (folder / "boot.json").write_text(json.dumps(plan))
        with self.serial(name, vm_id).open("ab") as serial:
            process = subprocess.Popen(
                [sys.executable, "-S", "-m", "spotkeeper.local.machines.init", str(folder)],
                env=env | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=serial,
                stderr=serial,
                start_new_session=True,
            )
        return process.pid, procs.start_time(process.pid) or 0

    def find_init(self, vm_id: int) -> tuple[int, int] | None:
        """Find a VM's init by the VM's mark in its environment; return its pid and start time, or None."""
        pids = procs.marked(procs.mark(procs.VM, self.vm_mark(vm_id)))
        found = (pid for pid in sorted(pids) if "spotkeeper.local.machines.init" in procs.arguments(pid))
        pid = next(found, None)
        return None if pid is None else (pid, procs.start_time(pid) or 0)

    def press_power(self, pid: int, started: int) -> None:
        """Send ACPI off, so that the guest shuts down."""
        if procs.is_same(pid, started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def cut_power(self, vm_id: int, pid: int) -> None:
        """Send SIGKILL to every process in the VM."""
        procs.kill_all(procs.mark(procs.VM, self.vm_mark(vm_id)), pid or None)

    def was_clean(self, vm_id: int) -> bool:
        """Whether the guest last ended by its own power-off."""
        return (self.vm_folder(vm_id) / "off").exists()

    def drop_vm(self, vm_id: int) -> None:
        shutil.rmtree(self.vm_folder(vm_id), ignore_errors=True)

    # Processes that end

    def watch(self, pid: int, started: int, ended: Callable[[], None]) -> None:
        """Call ``ended`` when the process has ended, or now if it ended earlier. The process need not be a child."""
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            loop.call_soon(ended)
            return
        if not procs.is_same(pid, started):
            os.close(fd)
            _reap(pid)
            loop.call_soon(ended)
            return

        def gone() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            _reap(pid)
            ended()

        loop.add_reader(fd, gone)

    # Disks

    def disk_folder(self, disk_id: int) -> Path:
        """Return the folder of a disk's content.

        The folder's name changes with every attach, so that an earlier VM's paths fail, as after a device's removal.
        """
        parent = self._world.folder / "disks" / str(disk_id)
        found = sorted(parent.glob("a*"), key=lambda path: int(path.name[1:])) if parent.is_dir() else []
        if found:
            return found[-1]
        first = parent / "a0"
        first.mkdir(parents=True, exist_ok=True)
        return first

    def attach(self, vm_id: int, disk_id: int, device: str) -> None:
        link = self._device(vm_id, device)
        link.parent.mkdir(parents=True, exist_ok=True)
        old = self.disk_folder(disk_id)
        if link.is_symlink() and link.readlink() == old:
            return  # done before a crash; this is the repetition
        new = old.with_name(f"a{int(old.name[1:]) + 1}")
        old.rename(new)
        temporary = link.with_name(link.name + ".new")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(new)
        temporary.rename(link)

    def detach(self, vm_id: int, disk_id: int, device: str) -> None:
        self._device(vm_id, device).unlink(missing_ok=True)
        old = self.disk_folder(disk_id)
        old.rename(old.with_name(f"a{int(old.name[1:]) + 1}"))

    def _device(self, vm_id: int, device: str) -> Path:
        return self.root(vm_id) / "dev/disk/by-id" / f"google-{device}"

    def drop_disk(self, disk_id: int) -> None:
        shutil.rmtree(self._world.folder / "disks" / str(disk_id), ignore_errors=True)

    def snapshot_folder(self, snapshot_id: int) -> Path:
        return self._world.folder / "snapshots" / str(snapshot_id)

    def drop_snapshot(self, snapshot_id: int) -> None:
        shutil.rmtree(self.snapshot_folder(snapshot_id), ignore_errors=True)

    def copy_tree(self, source: Path, target: Path, done: Callable[[str | None], None]) -> None:
        """Copy a folder in a thread, replacing the target; then call ``done(None)``, or ``done(error)``."""
        loop = asyncio.get_running_loop()

        def work() -> str | None:
            shutil.rmtree(target, ignore_errors=True)
            try:
                shutil.copytree(source, target, symlinks=True)
            except (OSError, shutil.Error) as error:
                return str(error)
            return None

        future = loop.run_in_executor(None, work)
        future.add_done_callback(lambda result: done(result.result()))


def _reap(pid: int) -> None:
    """Reap the process if it is a child; processes that an earlier control plane started are not children."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
