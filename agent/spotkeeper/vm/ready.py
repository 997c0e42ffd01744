"""Getting ready: the job's files, the saver and a warm launcher, as soon as the job is known.

A standby does all of this, so that training waits for none of it; whoever is ready says hello. For the loop's thread.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from spotkeeper.spec.generation import JobRun
from spotkeeper.vm import jobhost
from spotkeeper.vm.events import SourceReady, SourcesGone
from spotkeeper.vm.helper import Helper
from spotkeeper.vm.jobhost import Process
from spotkeeper.vm.launch import Launcher, saver_pid, start_saver
from spotkeeper.vm.launcher import pyenv
from spotkeeper.vm.recipe import launcher_kind
from spotkeeper.vm.settings import Settings, job_path
from spotkeeper.vm.source import fetch, forget_all
from spotkeeper.vm.storage import Bucket

WARM_S = 60.0  # real; a launcher that takes longer to start keeps nobody from joining
LAUNCH_RETRY_S = 2.0  # real
SAVER_RETRY_S = 5.0  # real


class Ready:
    """What must be there before a generation can start. ``source``: the job's folder, once it is fetched."""

    def __init__(self, settings: Settings, bucket: Bucket, launcher: Launcher, helper: Helper) -> None:
        self.source: Path | None = None
        self._set = settings
        self._sources = settings.state / "src"
        self._home = (jobhost.STATE if jobhost.hosted() else settings.state) / "env"
        self._disk = settings.run / pyenv.DISK
        self._disk.unlink(missing_ok=True)
        self._mounted: Path | None = None
        self._bucket = bucket
        self._launcher = launcher
        self._helper = helper
        self._greet_by: float | None = None  # monotonic; hello is due then at the latest, or when warm
        self._launching = False  # or launched: from begin() to its end
        self._launch_at = 0.0  # monotonic; not before
        self._launch_failed = False
        self._saver: Process | None = None
        self._saver_at = 0.0

    def prepare(self, job: str, run: JobRun) -> None:
        """Start what is missing, one after the other; called until all is there, and after."""
        if self.source is None:
            folder, bucket, sha256 = self._sources, self._bucket, run.source_sha256
            self._helper.do("source", lambda: SourceReady(sha256, fetch(bucket, job, sha256, folder)))
            return
        self._keep_saver()
        if not self._launching and time.monotonic() >= self._launch_at:
            self._launching = True
            self._launcher.begin(launcher_kind(run, self.source, self._home))

    def mounted(self, folder: Path | None) -> None:
        """Where the job's environment is on the rank's disk, while that is mounted. Told once, however often said."""
        if folder == self._mounted:
            return
        self._mounted = folder
        if folder is None:
            self._disk.unlink(missing_ok=True)
        else:
            beside = self._disk.with_suffix(".new")
            beside.write_text(f"{folder}\n")
            beside.rename(self._disk)

    def _keep_saver(self) -> None:
        if self._saver is not None and self._saver.poll() is None:
            return
        if time.monotonic() < self._saver_at:
            return
        self._saver_at = time.monotonic() + SAVER_RETRY_S
        if saver_pid(self._set.run) is None:
            self._saver = start_saver(self._set.run, job_path())

    def launcher_lost(self, at_once: bool) -> None:
        """It is started again: ``at_once`` where it had worked, after a pause where it could not be started."""
        self._launching = False
        self._launch_failed = True
        self._launch_at = 0.0 if at_once else time.monotonic() + LAUNCH_RETRY_S

    def greet_when_warm(self) -> None:
        """A hello is due: to be admitted means that training need not wait for this machine."""
        self._greet_by = time.monotonic() + WARM_S

    def may_greet(self) -> bool:
        """Whether the hello is to be said now; true once.

        A launcher that cannot start does not keep the machine from joining: the crash budget decides about that.
        """
        if self._greet_by is None:
            return False
        # An environment that is being made may be on the rank's disk, which comes to those who have said hello.
        due = self._launcher.building or time.monotonic() > self._greet_by
        if not (self._launcher.up or self._launch_failed or due):
            return False
        self._greet_by = None
        return True

    def end_saver(self, hurry: bool) -> bool:
        """True once it is gone. It finishes the save in hand, unless there is no time (``hurry``).

        One that does not answer may still be coming up, or going.
        """
        saver = saver_pid(self._set.run)
        if saver is None and self._saver is not None and self._saver.poll() is None:
            saver = self._saver.pid
        if saver is None:
            return True
        jobhost.send_signal(saver, signal.SIGKILL if hurry else signal.SIGTERM)
        return False

    def forget_job(self) -> None:
        self.source = None
        self._greet_by, self._launch_failed = None, False

    def forget_sources(self) -> None:
        """Nothing of any job runs here, and none is assigned. A fetch for the next one waits behind this."""
        folder = self._sources

        def forget() -> SourcesGone:
            forget_all(folder)
            return SourcesGone()

        self._helper.do("sources", forget)
