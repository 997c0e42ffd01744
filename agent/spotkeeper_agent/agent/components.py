"""Builds the agent's components once, for all parts of its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotkeeper_agent import cloud
from spotkeeper_agent.agent.upgrade import Bundles, Upgrade, own_folder
from spotkeeper_agent.cloud import identity
from spotkeeper_agent.cloud.identity import IdentityServer
from spotkeeper_agent.cloud.metadata import Metadata
from spotkeeper_agent.core.events import Event, HelperThread
from spotkeeper_agent.core.settings import job_path, templates_path
from spotkeeper_agent.core.state import MachineState
from spotkeeper_agent.host.disk import Disk
from spotkeeper_agent.host.mounting import Mounting, OldJobs
from spotkeeper_agent.job.launcher_client import Launcher
from spotkeeper_agent.job.logs import Uploader
from spotkeeper_agent.job.metrics import Metrics
from spotkeeper_agent.job.mirror import Mirroring
from spotkeeper_agent.job.outputs import Outputs
from spotkeeper_agent.job.prepare import JobSecrets, Preparation
from spotkeeper_agent.job.supervisor import Supervisor
from spotkeeper_agent.job.usage import UsageReports


@dataclass(frozen=True)
class Components:
    """The agent's components. The loop's thread calls them; some of them also run threads of their own."""

    helper: HelperThread
    uploader: Uploader
    mounting: Mounting
    old_jobs: OldJobs
    launcher: Launcher
    preparation: Preparation
    supervisor: Supervisor
    output: Outputs
    metrics: Metrics
    mirror: Mirroring
    upgrade: Upgrade
    usage: UsageReports
    identity_server: IdentityServer | None
    secrets: JobSecrets

    @classmethod
    def of(cls, machine: MachineState, metadata: Metadata, post: Callable[[Event], None]) -> Components:
        """Build everything and start nothing. ``post`` receives the threads' events."""
        settings, clock, log = machine.settings, machine.clock, machine.log
        bucket = metadata.storage(settings.storage, settings.bucket)
        helper = HelperThread(post, log)
        output_helper = HelperThread(post, log, "output")  # a separate thread: a mount must not wait for an upload
        mirror_helper = HelperThread(post, log, "mirror")  # a separate thread: a copy may take hours
        identity_server = _identity_server(machine, metadata)
        launcher = Launcher(settings.node, job_path(), post, log)
        return cls(
            helper=helper,
            uploader=Uploader(bucket, settings.state / "logs", clock, log),
            mounting=Mounting(
                Disk(settings.device, settings.mount, log, settings.scratch), helper, machine.say, clock, log
            ),
            old_jobs=OldJobs(),
            launcher=launcher,
            preparation=Preparation(
                settings, bucket, launcher, helper, identity_server.environment if identity_server else dict
            ),
            supervisor=Supervisor(settings.run, templates_path(), launcher, log),
            output=Outputs(bucket, output_helper, settings.mount, settings.state / "out", clock, log),
            metrics=Metrics(bucket, output_helper, clock, log),
            mirror=Mirroring(bucket, mirror_helper, clock, log),
            upgrade=Upgrade(Bundles(settings.state / "bundle", own_folder()), bucket, helper, launcher, log),
            usage=UsageReports(bucket, machine),
            identity_server=identity_server,
            secrets=JobSecrets(identity_server, helper, log),
        )

    def start(self) -> None:
        """Start the threads."""
        self.helper.start()
        self.output.helper.start()
        self.mirror.helper.start()
        self.uploader.start()
        if self.identity_server is not None:
            self.identity_server.start()


def _identity_server(machine: MachineState, metadata: Metadata) -> IdentityServer | None:
    """Return the server that gives jobs their identity; None if the setting ``job_identity`` is missing or invalid."""
    name = machine.settings.job_identity
    if not name:
        return None
    try:
        return IdentityServer(
            cloud.job_identity(name, metadata, machine.clock, identity.Endpoints()), machine.settings.run, machine.log
        )
    except identity.IdentityError as error:
        machine.log("identity.none", error=str(error))
        return None
