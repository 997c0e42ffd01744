"""Another agent in place of this one, without a pause of training: fetched by its hash, verified, and executed.

The function names the bundle that the stack's agents run (``SyncReply.bundle``, from ``stack/pools.json``). This
process becomes the new agent by exec, with the same pid, so to systemd it is the unit's main process still; launcher,
saver and job belong to the jobs' unit and do not notice. ``bundle/current``, with which the unit starts, is moved
only once the new agent has been answered: one that cannot live is followed by the old one, which tries again twice
and then waits for another hash.

It may not touch a bundle that something runs from: its own, the launcher's, and the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import spotkeeper
from spotkeeper.vm.events import BundleReady
from spotkeeper.vm.helper import Helper
from spotkeeper.vm.launch import Launcher
from spotkeeper.vm.log import Log
from spotkeeper.vm.source import SourceError, extract
from spotkeeper.vm.storage import Bucket

TRIES = 3
_HASH = re.compile(r"[0-9a-f]{64}\Z")


def own_folder() -> Path | None:
    """The bundle that this process runs from; None where it runs from a checkout."""
    folder = Path(spotkeeper.__file__).resolve().parents[2]  # <folder>/site/spotkeeper/__init__.py
    return folder if _HASH.match(folder.name) else None


class Bundles:
    """A machine's bundles, in ``folder``; ``own``: the one that runs."""

    def __init__(self, folder: Path, own: Path | None) -> None:
        self._folder = folder
        self._own = own
        self._proved = False

    def wants(self, sha256: str) -> bool:
        """Whether this machine is to become another agent. One that failed to live is not tried for ever."""
        if self._own is None or not _HASH.match(sha256) or sha256 == self._own.name:
            return False
        return self._tried(sha256) < TRIES

    def fetch(self, bucket: Bucket, sha256: str) -> Path:
        """The bundle's folder, under its final name only when it is whole.

        Raises:
            SourceError: its content is not what its name says, or would leave its folder.
            StorageError: it could not be read; try again.
        """
        target = self._folder / sha256
        if target.is_dir():
            return target
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            digest = hashlib.sha256()
            for piece in bucket.read(f"bundles/{sha256}.tar"):
                digest.update(piece)
                file.write(piece)
            if digest.hexdigest() != sha256:
                self._write_tried(sha256, self._tried(sha256) + 1)
                raise SourceError(f"bundles/{sha256}.tar: its hash is {digest.hexdigest()}; not used")
            file.seek(0)
            part = target.with_suffix(".part")  # the startup script uses the same name, and never at the same time
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                with tarfile.open(fileobj=file) as tar:
                    extract(tar, part)
            except tarfile.TarError as error:
                raise SourceError(f"bundles/{sha256}.tar: cannot unpack: {error}") from None
            part.rename(target)
        return target

    def become(self, folder: Path) -> None:
        """Execute the agent in ``folder``; does not return, unless that cannot be done.

        Raises:
            OSError: this agent goes on.
        """
        self._write_tried(folder.name, self._tried(folder.name) + 1)
        env = os.environ | {"PYTHONPATH": str(folder / "site")}
        os.execve(sys.executable, sys.orig_argv, env)  # noqa: S606 - the words this process was started with

    def proved(self) -> None:
        """The function has answered this agent: it is the one to start with from now on."""
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
            (self._folder / "tried").unlink(missing_ok=True)

    def prune(self, launcher: str) -> list[str]:
        """Delete bundles that nothing runs from; ``launcher``: the job folder that the launcher imports from, or ""."""
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


class Upgrade:
    """For the loop's thread. ``folder``: of the agent that this process is to become, once it may."""

    def __init__(self, bundles: Bundles, bucket: Bucket, helper: Helper, launcher: Launcher, log: Log) -> None:
        self.folder: Path | None = None
        self._bundles = bundles
        self._bucket = bucket
        self._helper = helper
        self._launcher = launcher
        self._log = log

    def heard(self, sha256: str, serving: bool) -> None:
        """The function has answered. ``serving``: there is a job, so a launcher may be about to be found."""
        self._bundles.proved()
        if (self._launcher.up or not serving) and (gone := self._bundles.prune(self._launcher.home)):
            self._log("bundle.pruned", bundles=gone)
        if self.folder is None and self._bundles.wants(sha256):
            bundles, bucket = self._bundles, self._bucket
            self._helper.do("bundle", lambda: BundleReady(bundles.fetch(bucket, sha256)))

    def ready(self, folder: Path) -> None:
        self._helper.done("bundle")
        self._log("bundle.ready", bundle=folder.name)
        self.folder = folder

    def succeed(self) -> None:
        """Become the agent that is ready; returns where there is none.

        Raises:
            OSError: that cannot be done: this process is to end, and be started anew.
        """
        if self.folder is not None:
            self._log("agent.succeed", bundle=self.folder.name)
            self._bundles.become(self.folder)
