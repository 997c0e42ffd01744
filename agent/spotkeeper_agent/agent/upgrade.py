"""Upgrades the agent in place while training continues: download by hash, verify, exec.

The function names the bundle that the stack's agents shall run (``SyncReply.bundle``, from ``stack/pools.json``). This
process executes the new agent under the same pid, so it stays the main process of its systemd unit; launcher, saver and
job run in the jobs' unit and are unaffected. ``bundle/current``, from which the unit starts, is switched only after the
function has answered the new agent. If the new agent fails, systemd starts the old one, which tries the upgrade twice
more and then waits for another hash.

Bundles in use are never deleted: this agent's, the launcher's, and the previous one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import tarfile
from pathlib import Path

import spotkeeper
from spotkeeper_agent.cloud.storage import Bucket
from spotkeeper_agent.core.events import BundleReady, HelperThread
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.host.systemd import has_units
from spotkeeper_agent.job.launcher_client import Launcher
from spotkeeper_agent.job.source import HashError, SourceError, extract, verified

TRIES = 3
_HASH = re.compile(r"[0-9a-f]{64}\Z")


def own_folder() -> Path | None:
    """Return the folder of the bundle that this process runs from; None in a checkout."""
    folder = Path(spotkeeper.__file__).resolve().parents[2]  # <folder>/site/spotkeeper/__init__.py
    return folder if _HASH.match(folder.name) else None


class Bundles:
    """The bundles on a machine, in ``folder``. ``own``: the folder of the bundle that this agent runs from."""

    def __init__(self, folder: Path, own: Path | None) -> None:
        self._folder = folder
        self._own = own
        self._proved = False

    def wants(self, sha256: str) -> bool:
        """Whether to upgrade to this bundle: it is not this agent's, and fewer than :data:`TRIES` tries have failed."""
        if self._own is None or not _HASH.match(sha256) or sha256 == self._own.name:
            return False
        return self._tried(sha256) < TRIES

    def fetch(self, bucket: Bucket, sha256: str) -> Path:
        """Fetch and unpack a bundle; return its folder, which gets its final name only when it is complete.

        Raises:
            SourceError: the content does not match the hash, or cannot be unpacked safely.
            StorageError: the bucket does not answer; try again.
        """
        target = self._folder / sha256
        if target.is_dir():
            return target
        try:
            with verified(bucket, f"bundles/{sha256}.tar", sha256, self._folder) as file:
                part = target.with_suffix(".part")  # the startup script uses the same name, but never at the same time
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                with tarfile.open(fileobj=file) as tar:
                    extract(tar, part)
                part.rename(target)
        except HashError:
            self._write_tried(sha256, self._tried(sha256) + 1)
            raise
        except tarfile.TarError as error:
            raise SourceError(f"bundles/{sha256}.tar: cannot unpack: {error}") from None
        return target

    def become(self, folder: Path) -> None:
        """Execute the agent in ``folder``; return only with an error.

        Raises:
            OSError: the agent cannot be executed.
        """
        self._write_tried(folder.name, self._tried(folder.name) + 1)
        if has_units():
            check_own(folder)
        env = os.environ | {"PYTHONPATH": str(folder / "site")}
        os.execve(sys.executable, sys.orig_argv, env)  # noqa: S606 - this process's own arguments

    def proved(self) -> None:
        """Point ``bundle/current`` to this agent's bundle, now that the function has answered this agent."""
        if self._own is None or self._proved or self._own.parent != self._folder.resolve():
            return
        self._proved = True
        current = self._folder / "current"
        if current.is_symlink() and current.resolve() != self._own:
            new = self._folder / "current.new"
            new.unlink(missing_ok=True)
            new.symlink_to(self._own)
            new.replace(current)
        if self._tried(self._own.name):
            (self._folder / "tried").unlink()

    def prune(self, launcher: str) -> list[str]:
        """Delete unused bundles; return their names. ``launcher``: the folder that the launcher imports from, or ""."""
        if not self._proved or self._own is None:
            return []
        others = [path for path in self._folder.iterdir() if _HASH.match(path.name.removesuffix(".part"))]
        used = {self._own.name, Path(launcher).parent.name}
        idle = sorted((path for path in others if path.name not in used), key=lambda path: path.stat().st_mtime)
        for path in idle[:-1]:
            shutil.rmtree(path, ignore_errors=True)
        return [path.name for path in idle[:-1]]

    def _tried(self, sha256: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            name, count = (self._folder / "tried").read_text().split()
            return int(count) if name == sha256 else 0
        return 0

    def _write_tried(self, sha256: str, count: int) -> None:
        temporary = self._folder / "tried.tmp"
        temporary.write_text(f"{sha256} {count}\n")
        temporary.replace(self._folder / "tried")


def check_own(folder: Path) -> None:
    """Check that only root and this user can write or replace a bundle.

    Raises:
        PermissionError: another user can write or replace it.
    """
    found = (Path(root, name) for root, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in (folder, *folder.absolute().parents, *found):
        about = path.lstat()
        sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX  # others cannot replace files in it
        others = about.st_mode & 0o022 and not sticky and not stat.S_ISLNK(about.st_mode)
        if others or about.st_uid not in (0, os.geteuid()):
            owner = f"user {about.st_uid}, mode {stat.S_IMODE(about.st_mode):o}"
            raise PermissionError(
                errno.EPERM, f"not executed, because other users than the agent can write it ({owner})", str(path)
            )


class Upgrade:
    """Upgrades the agent, in the loop's thread. ``folder``: the newer agent's folder, once it is complete."""

    def __init__(self, bundles: Bundles, bucket: Bucket, helper: HelperThread, launcher: Launcher, log: Log) -> None:
        self.folder: Path | None = None
        self._bundles = bundles
        self._bucket = bucket
        self._helper = helper
        self._launcher = launcher
        self._log = log

    def heard(self, sha256: str, serving: bool) -> None:
        """Process a reply. ``sha256``: the bundle that agents shall run; ``serving``: the machine has a job."""
        self._bundles.proved()
        # Until the job's launcher is found, any bundle may be the launcher's.
        if (self._launcher.up or not serving) and (gone := self._bundles.prune(self._launcher.home)):
            self._log("bundle.pruned", bundles=gone)
        if self.folder is None and self._bundles.wants(sha256):
            bundles, bucket = self._bundles, self._bucket
            self._helper.do("bundle", lambda: BundleReady(bundles.fetch(bucket, sha256)))

    def ready(self, folder: Path) -> None:
        self._log("bundle.ready", bundle=folder.name)
        self.folder = folder

    def succeed(self) -> None:
        """Execute the newer agent, if one is ready.

        Raises:
            OSError: the newer agent cannot be executed; this process must then end, so that systemd restarts it.
        """
        if self.folder is not None:
            self._log("agent.succeed", bundle=self.folder.name)
            self._bundles.become(self.folder)
