"""Prepares a job on this machine before it has to train: its files, its secrets, the saver and a warm launcher.

A standby prepares before its hello, so training never waits for the preparation. Only the loop's thread may call this
module.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from spotkeeper.contract.generation import JobRun
from spotkeeper.contract.redact import learn
from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.identity import IdentityError, IdentityServer
from spotkeeper_agent.cloud.storage import Bucket
from spotkeeper_agent.core.events import HelperThread, SecretsRead, SourceReady, SourcesGone
from spotkeeper_agent.core.log import Log
from spotkeeper_agent.core.settings import Settings, job_path
from spotkeeper_agent.host.mounting import make_job_folders
from spotkeeper_agent.host.systemd import has_units
from spotkeeper_agent.job import jobhost
from spotkeeper_agent.job.jobhost import Process
from spotkeeper_agent.job.launch_spec import launcher_kind
from spotkeeper_agent.job.launcher_client import Launcher, saver_pid, start_saver
from spotkeeper_agent.job.source import fetch, forget_all
from spotkeeper_agent.launcher import pyenv
from spotkeeper_agent.launcher.spool import lines_of

WARM_S = 60.0  # real; the hello waits at most this long for the launcher
PULL_S = 300.0  # real; and this long for a container image: the function waits 8 minutes for a boot
LAUNCH_RETRY_S = 2.0  # real
SAVER_RETRY_S = 5.0  # real
TRIES = 3  # tries to read the secrets, a second apart; then the start fails, which the job's crash budget covers


class Preparation:
    """Prepares what a generation needs. ``source``: the folder with the job's files, once they are fetched."""

    def __init__(
        self,
        settings: Settings,
        bucket: Bucket,
        launcher: Launcher,
        helper: HelperThread,
        identity: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """``identity``: returns the variables of the job's identity."""
        self._identity = identity
        self.source: Path | None = None
        self._set = settings
        self._sources = settings.state / "src"
        beneath.make_way(settings.node, pyenv.DISK)
        self._mounted: Path | None = None
        self._bucket = bucket
        self._launcher = launcher
        self._helper = helper
        self._greet_since: float | None = None  # monotonic; since when a hello waits for the launcher
        self._pulls = False  # whether the job has a container image
        self._launching = False  # from begin() until the launcher ends
        self._launch_at = 0.0  # monotonic; earliest time of the next launch
        self._launch_failed = False
        self._saver: Process | None = None
        self._saver_at = 0.0

    def prepare(self, job: str, run: JobRun) -> None:
        """Take the next step: fetch the source if it is missing, else start saver and launcher if they do not run.

        Called in every iteration of the agent's loop.
        """
        self._pulls = bool(run.image)
        if self.source is None:
            folder, bucket, sha256 = self._sources, self._bucket, run.source_sha256

            def begin() -> SourceReady:
                jobhost.begin(job)
                return SourceReady(fetch(bucket, job, sha256, folder))

            self._helper.do("source", begin)
            return
        self._keep_saver()
        if not self._launching and time.monotonic() >= self._launch_at:
            self._launching = True
            home = jobhost.home(self._set.state, job) / "env"
            folders = (self._set.run, self._set.state, self._set.mount.parent)
            identity = self._identity() if run.image else {}
            self._launcher.begin(launcher_kind(run, self.source, home, folders, identity))

    def mounted(self, folder: Path | None) -> None:
        """Set the folder on the disk for the job's Python environment; None while the disk is not mounted."""
        if folder == self._mounted:
            return
        self._mounted = folder
        if folder is None:
            beneath.make_way(self._set.node, pyenv.DISK)
        else:
            make_job_folders(folder.parent.parent, folder.parent.name)  # by these a static machine recognises the job
            beneath.replace(self._set.node, pyenv.DISK, f"{folder}\n".encode())

    def _keep_saver(self) -> None:
        if self._saver is not None and self._saver.poll() is None:
            return
        if time.monotonic() < self._saver_at:
            return
        self._saver_at = time.monotonic() + SAVER_RETRY_S
        if saver_pid(self._set.node) is None:
            with contextlib.suppress(jobhost.HostError):  # the unit restarts; the launcher's end follows
                self._saver = start_saver(self._set.node, job_path().saver)

    def launcher_lost(self, at_once: bool) -> None:
        """Have the launcher started again, ``at_once`` or after a pause."""
        self._launching = False
        if has_units():
            self.source = None  # the jobs' unit may have restarted, so it must begin the job first
        self._launch_failed = True
        self._launch_at = 0.0 if at_once else time.monotonic() + LAUNCH_RETRY_S

    def greet_when_warm(self) -> None:
        """Have the hello sent once the launcher is warm, so that training need not wait for this machine."""
        self._greet_since = time.monotonic()

    def may_greet(self) -> bool:
        """Return whether to send the hello now; True only once.

        A machine joins even if its launcher cannot start: its generation then ends with a crash, which the job's crash
        budget covers.
        """
        if self._greet_since is None:
            return False
        # An environment under construction may need the node's disk, which is attached after the hello.
        builds = self._launcher.building and not self._pulls
        due = builds or time.monotonic() > self._greet_since + (PULL_S if self._pulls else WARM_S)
        if not (self._launcher.up or self._launch_failed or due):
            return False
        self._greet_since = None
        return True

    def end_saver(self, hurry: bool) -> bool:
        """End the saver; return True once it has ended. It first finishes a running save, unless ``hurry`` is set.

        A saver that does not answer is signalled too: it can still be starting or ending.
        """
        saver = saver_pid(self._set.node)
        if saver is None and self._saver is not None and self._saver.poll() is None:
            saver = self._saver.pid
        if saver is None:
            return True
        jobhost.send_signal(saver, signal.SIGKILL if hurry else signal.SIGTERM)
        return False

    def forget_job(self) -> None:
        self.source = None
        self._greet_since, self._launch_failed = None, False

    def forget_sources(self) -> None:
        """Delete all sources; call it only while no job is assigned. The next job's fetch waits for the deletion."""
        folder = self._sources
        self._mounted = None
        beneath.make_way(self._set.node, pyenv.DISK)  # a job may have made this file

        def forget() -> SourcesGone:
            forget_all(folder)
            jobhost.begin("")
            return SourcesGone()

        self._helper.do("sources", forget)


class JobSecrets:
    """The variables of a job's identity, and its secrets, read with that identity.

    Secrets exist only in this process and in the job's environment: they reach the launcher through its socket, and are
    removed from uploaded logs. ``refused``: why the secrets could not be read in a few tries, or "".
    """

    def __init__(self, identity_server: IdentityServer | None, helper: HelperThread, log: Log) -> None:
        self.refused = ""
        self._identity_server = identity_server
        self._helper = helper
        self._log = log
        self._values: dict[str, str] | None = None
        self._failed = 0

    def prepare(self, references: Mapping[str, str]) -> None:
        """Have the secrets read, once; :class:`SecretsRead` follows. Called in every iteration of the agent's loop."""
        if not references or self._values is not None or self.refused:
            return
        identity_server = self._identity_server
        if identity_server is None:
            self.refused = "the job has secrets, but the stack gives jobs no identity to read them (`job_identity`)"
            return
        wanted = dict(references)
        self._helper.do(
            "secrets", lambda: SecretsRead({name: _read(identity_server, name, wanted[name]) for name in wanted})
        )

    def read(self, event: SecretsRead) -> None:
        learn(lines_of(event.values.values()))
        self._values = dict(event.values)

    def failed(self, error: str) -> None:
        self._failed += 1
        if self._failed >= TRIES:
            self.refused = error

    def environment(self, references: Mapping[str, str]) -> dict[str, str] | None:
        """Return the variables of identity and secrets; None until the secrets are read."""
        if references and self._values is None:
            return None
        served = self._identity_server.environment() if self._identity_server is not None else {}
        return served | (self._values or {} if references else {})

    def retry(self) -> None:
        """Let the next generation try to read the secrets again, in case an operator has granted access."""
        self.refused, self._failed = "", 0

    def forget_job(self) -> None:
        self._values = None
        self.retry()


def _read(identity_server: IdentityServer, name: str, reference: str) -> str:
    try:
        return identity_server.identity.secret(reference)
    except IdentityError as error:
        raise IdentityError(f"secret {name}: {error}", final=error.final) from None
